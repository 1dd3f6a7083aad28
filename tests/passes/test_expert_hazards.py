"""Graphs in which a product with experts is easily got wrong: writes in between, broadcasts, layouts, odd indices, autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxquant
from fxquant.log import warn_once

E, N, K = 4, 32, 64


class Reads(nn.Module):
    """A stack [E, N, K] that ``function`` reads."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.experts_weight = nn.Parameter(torch.randn(E, N, K))
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self.experts_weight, *args)


class Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.experts = Reads(function)

    def forward(self, *args: Tensor) -> Tensor:
        return self.experts(*args)


def stale_transposed(w, x, ids):
    ids = ids.clone()
    chosen = w[ids]
    ids.fill_(0)
    return torch.bmm(x.unsqueeze(1), chosen.transpose(1, 2))


def stale_chosen_again(w, x, ids):
    ids = ids.clone()
    chosen = w[ids]
    ids.fill_(0)
    again = w[ids]
    return torch.bmm(chosen, x.unsqueeze(-1)) + 2 * torch.bmm(again, x.unsqueeze(-1))


def written_product(w, x, ids):
    y = torch.bmm(w, x[:E].unsqueeze(-1).expand(-1, -1, 3))
    y.flatten().zero_()
    return y


def written_matmul(w, x, ids):
    y = torch.matmul(w, x.t())
    y.reshape(-1)[0] = 7
    return y


def written_einsum(w, x, ids):
    y = torch.einsum("tk,enk->ten", x, w)
    y.reshape(-1)[3:9].zero_()
    return y


CASES = {
    "negative numbers": lambda w, x, ids: torch.bmm(w[ids - E], x.unsqueeze(-1)),
    "some negative numbers": lambda w, x, ids: torch.bmm(w[torch.where(ids == 3, -1, ids)], x.unsqueeze(-1)),
    "negative numbers, other read": lambda w, x, ids: w[ids - E] * 2,
    "stale, transposed after the write": stale_transposed,
    "stale, chosen again": stale_chosen_again,
    "unbind along another dimension": lambda w, x, ids: x @ w.unbind(dim=1)[0].t(),
    "unbind by name": lambda w, x, ids: x @ w.unbind(dim=0)[1].t(),
    "list in brackets": lambda w, x, ids: w[[2]] * 2,
    "tuple in brackets": lambda w, x, ids: w[(2,)] * 2,
    "broadcast over one expert": lambda w, x, ids: torch.matmul(x.unsqueeze(1), w[ids[:1]].transpose(1, 2)),
    "broadcast over one row": lambda w, x, ids: torch.matmul(x[:1].unsqueeze(1), w[ids].transpose(1, 2)),
    "einsum, one row of experts": lambda w, x, ids: torch.einsum("etk,enk->etn", x.unsqueeze(0), w),
    "einsum, empty": lambda w, x, ids: torch.einsum("tk,enk->etn", x[:0], w),
    "written product": written_product,
    "written matmul": written_matmul,
    "written einsum": written_einsum,
    "viewed einsum": lambda w, x, ids: torch.einsum("tk,enk->ten", x, w).view(x.shape[0], -1),
    "viewed matmul": lambda w, x, ids: torch.matmul(w, x.t()).view(E * N, -1),
    "viewed bmm": lambda w, x, ids: torch.bmm(w, x[:E].unsqueeze(-1).expand(-1, -1, 3)).view(E * N, 3),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("road", ["converted", "plain"])
def test_the_values_are_those_of_the_float_weight(case, road, rewrite_and_run, relative_error):
    module = Model(CASES[case])
    x, ids = torch.randn(8, K), torch.tensor([2, 0, 3, 1, 1, 2, 3, 0])
    config = {"moe": {"weight": "fp8_per_channel_static", "activation": "none"}}
    if road == "plain":
        got, _ = rewrite_and_run(module, x, ids, quantization_config=config, strict=False)
        fxquant.quantize_(module, quantization_config=config)
    else:
        fxquant.quantize_(module, quantization_config=config)
        got, _ = rewrite_and_run(module, x, ids)
    expected = CASES[case](module.experts.experts_weight.dequantize(), x, ids)
    with torch.no_grad():
        assert relative_error(module(x, ids), expected) < 1e-5
    assert relative_error(got, expected) < (1e-5 if road == "converted" else 0.06)  # what is read otherwise stays as it was


def test_experts_that_are_read_otherwise_are_named_on_the_plain_road(rewrite_and_run, caplog):
    warn_once.cache_clear()
    module, x = Model(lambda w, x: torch.bmm(x, w[:2].mT)), torch.randn(2, 3, K)
    rewrite_and_run(module, x, quantization_config={"moe": "mxfp8"})
    assert "the experts experts.experts_weight are read otherwise" in caplog.text


def test_products_stay_in_float32_under_autocast(rewrite_and_run, relative_error):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(K, N, bias=False)
            nn.init.normal_(self.linear.weight, std=1e-3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return self.linear(x)

    module, x = Net(), torch.rand(4, K) * 2000 + 57000  # the operands in float16 would overflow
    fxquant.quantize_(module, quantization_config={"linear": {"weight": "mxfp4", "activation": "mxfp4"}})
    got, _ = rewrite_and_run(module, x)
    with torch.no_grad():
        assert got.isfinite().all()
        assert torch.equal(got, module(x))


def test_a_bias_is_cast_as_autocast_does(rewrite_and_run):
    def product(w: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.baddbmm(bias, x, w.mT)

    module = Model(product)
    fxquant.quantize_(module, "mxfp8")
    x, bias = torch.randn(E, 3, K), torch.randn(E, 1, N)
    got, _ = rewrite_and_run(module, x, bias)
    assert got.dtype == torch.bfloat16


def test_rows_behind_the_last_group_do_not_count_for_a_joint_scale(rewrite_and_run, relative_error):
    module = Model(lambda w, x, offs: F.grouped_mm(x, w.mT, offs=offs)).bfloat16()
    x, offs = torch.randn(8, K).bfloat16(), torch.tensor([1, 3, 3, 5], dtype=torch.int32)
    fxquant.quantize_(
        module, quantization_config={"moe": {"weight": "fp8_per_channel_static", "activation": "fp8_per_tensor_dynamic"}}
    )
    with torch.no_grad():
        clean = module(x, offs)[:5]
        x[5:] = torch.tensor([[1e30], [float("nan")], [float("inf")]])
        got, _ = rewrite_and_run(module, x, offs)
        assert torch.equal(module(x, offs)[:5], clean)
    assert relative_error(got[:5], clean) < 1e-3
