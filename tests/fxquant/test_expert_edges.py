"""Blocks of experts with no token, one token, all tokens in one expert, all experts for every token: eager and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxquant
from fxquant.backend import fxquant_backend
from fxquant.schemes import SHORTHANDS

WIDTH, INNER, EXPERTS = 64, 40, 5
"""INNER is no multiple of 16 or 32, EXPERTS is odd."""


def experts(implementation: str) -> nn.Module:
    """The experts of a Qwen3-MoE layer."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=WIDTH, moe_intermediate_size=INNER, num_experts=EXPERTS)
    config._experts_implementation = implementation
    module = nn.ModuleDict({"experts": Qwen3MoeExperts(config)})
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module.bfloat16()


ROUTES = {
    "no token": torch.empty(0, 2, dtype=torch.long),
    "one token": torch.tensor([[3, 1]]),
    "all to one expert": torch.full((7, 2), 3),
    "some experts get none": torch.tensor([[0, 2], [2, 0], [0, 2]]),
    "last expert": torch.full((3, 2), EXPERTS - 1),
}
EVERY_EXPERT = {"every expert for every token": torch.arange(EXPERTS).repeat(4, 1)}


def arguments(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(ids.shape[0], WIDTH).bfloat16(), ids, torch.rand(ids.shape).bfloat16()


@pytest.mark.parametrize("scheme", SHORTHANDS)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_every_routing(scheme, implementation, relative_error):
    module, reference = experts(implementation), experts("eager")
    fxquant.quantize_(module, scheme)
    for name, parameter in reference.named_parameters():
        parameter.data = module.get_parameter(name).dequantize()
    weight_only = module["experts"].down_proj.spec.scheme.activation is None
    for case, ids in {**ROUTES, **EVERY_EXPERT}.items():
        given = arguments(ids)
        with torch.no_grad():
            expected, got = reference["experts"](*given), module["experts"](*given)
        assert got.shape == given[0].shape, case
        assert got.isfinite().all(), case
        assert relative_error(got, expected) < (0.01 if weight_only else 0.06), case


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "implementation"), [("fp8_per_block", "grouped_mm"), ("mxfp4", "batched_mm")])
def test_every_routing_compiled(scheme, implementation, relative_error):
    module, graphs = experts(implementation), []
    fxquant.quantize_(module, scheme)

    def backend(gm, inputs, **options):
        graphs.append(gm)
        return fxquant_backend(gm, inputs, **options)

    compiled = torch.compile(module["experts"], backend=backend, dynamic=True, fullgraph=True)
    for case, ids in ROUTES.items():
        given = arguments(ids)
        with torch.no_grad():
            assert relative_error(compiled(*given), module["experts"](*given)) < 0.01, case
    assert len(graphs) == 3  # Dynamo has graphs of their own for no row and for one


def test_a_token_does_not_depend_on_its_batch_mates(relative_error):
    module = experts("grouped_mm")
    fxquant.quantize_(module, "fp8_per_channel")
    x, ids = torch.randn(9, WIDTH).bfloat16(), torch.randint(EXPERTS, (9, 2))
    weights = torch.rand(9, 2).bfloat16()

    def run(rows: Tensor) -> Tensor:
        with torch.no_grad():
            return module["experts"](x[rows], ids[rows], weights[rows])

    together = run(torch.arange(9))
    order = torch.randperm(9)
    assert relative_error(run(order), together[order]) < 1e-3
    for row in range(9):
        assert relative_error(run(torch.tensor([row])), together[row : row + 1]) < 5e-3


def test_a_poisoned_token_spoils_no_other():
    module = experts("grouped_mm")
    fxquant.quantize_(module, "fp8_per_block")
    x, ids, weights = torch.randn(6, WIDTH).bfloat16(), torch.randint(EXPERTS, (6, 2)), torch.rand(6, 2).bfloat16()
    with torch.no_grad():
        clean = module["experts"](x, ids, weights)
        x[2, 5] = float("nan")
        got = module["experts"](x, ids, weights)
    assert not got[2].isfinite().any()
    rest = torch.arange(6) != 2
    assert torch.equal(got[rest], clean[rest])
