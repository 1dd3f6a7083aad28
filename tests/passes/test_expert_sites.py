"""Every way to multiply with a stack of experts is found, in graphs of plain user code and of transformers' implementations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxquant
from tests.fxquant.families import FAMILIES

E, N, K = 5, 48, 32
"""Experts, out features, in features."""


class PlainExperts(nn.Module):
    """A stack [E, N, K], or [E, K, N] where ``transposed``, multiplied in the way that ``form`` names."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.is_transposed = form.startswith("transposed")
        shape = (E, K, N) if self.is_transposed else (E, N, K)
        self.weight = nn.Parameter(torch.randn(shape).bfloat16() / 8)
        self.bias = nn.Parameter(torch.randn(E, N).bfloat16())

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x (E, T, K), ids (E * T,) in [0, E)."""
        w, rows = self.weight, x.reshape(-1, K)
        order = ids.argsort(stable=True)
        offs = (ids.unsqueeze(1) == torch.arange(E)).sum(0).cumsum(0).to(torch.int32)
        forms = {
            "grouped_mm": lambda: F.grouped_mm(rows[order], w.mT, offs=offs),
            "grouped_mm transpose": lambda: torch._grouped_mm(rows[order], w.transpose(-2, -1), offs=offs),
            "transposed grouped_mm": lambda: F.grouped_mm(rows[order], w, offs=offs),
            "grouped_mm batch": lambda: F.grouped_mm(x, w.transpose(1, 2)),
            "bmm": lambda: torch.bmm(x, w.transpose(1, 2)),
            "bmm permute": lambda: torch.bmm(x, w.permute(0, 2, 1)),
            "bmm weight first": lambda: torch.bmm(w, x.mT),
            "transposed bmm": lambda: x.bmm(w),
            "transposed bmm weight first": lambda: torch.bmm(w.mT, x.mT),
            "baddbmm": lambda: torch.baddbmm(self.bias.unsqueeze(1), x, w.mT),
            "matmul": lambda: x @ w.mT,
            "matmul one batch": lambda: x[:1] @ w.mT,
            "matmul rows": lambda: torch.matmul(rows, w.mT),
            "transposed matmul": lambda: torch.matmul(x, w),
            "chosen weight first": lambda: torch.bmm(w[ids], rows.unsqueeze(-1)).squeeze(-1),
            "chosen": lambda: torch.bmm(rows.unsqueeze(1), w[ids].mT).squeeze(1),
            "chosen from the swapped": lambda: (rows.unsqueeze(1) @ w.mT[ids]).squeeze(1),
            "transposed chosen": lambda: torch.bmm(rows.unsqueeze(1), w[ids]).squeeze(1),
            "einsum": lambda: torch.einsum("etk,enk->etn", x, w),
            "einsum weight first": lambda: torch.einsum("enk,etk->ent", w, x),
            "einsum every token": lambda: torch.einsum("tk,enk->ten", rows, w),
            "transposed einsum": lambda: torch.einsum("tk,ekn->etn", rows, w),
            "transposed einsum batch": lambda: torch.einsum("becd,edh->bech", torch.stack((x, x.flip(1))), w),
        }
        return forms[self.form]()


FORMS = [
    "grouped_mm", "grouped_mm transpose", "transposed grouped_mm", "grouped_mm batch", "bmm", "bmm permute", "bmm weight first",
    "transposed bmm", "transposed bmm weight first", "baddbmm", "matmul", "matmul one batch", "matmul rows",
    "transposed matmul", "chosen weight first", "chosen", "chosen from the swapped", "transposed chosen", "einsum",
    "einsum weight first", "einsum every token", "transposed einsum", "transposed einsum batch",
]  # fmt: skip


def fake_quantised(x: Tensor) -> Tensor:
    """x through FP8 and back, by token."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_product_is_found(form, rewrite_and_run, count_ops, relative_error):
    module = PlainExperts(form)
    x, ids = torch.randn(E, 4, K).bfloat16(), torch.randint(E, (E * 4,))
    original = module.weight.detach()
    report = fxquant.quantize_(module, "fp8_per_channel")
    assert report.plan.expert_bytes_left == 0
    got, graph = rewrite_and_run(module, x, ids)
    assert count_ops(graph.gm.graph) == {
        "quantize_activation": 1,
        "scaled_mm": 0,
        "scaled_grouped_mm": 1,
        "dequantize_weight": 0,
    }

    reference = PlainExperts(form).float()
    reference.weight.data, reference.bias.data = module.weight.dequantize(torch.float32), module.bias.float()
    reference.form = form.replace("grouped_mm transpose", "grouped_mm")
    expected = reference(fake_quantised(x), ids)
    assert relative_error(got, expected) < 0.005
    assert relative_error(module.weight.dequantize(), original) < 0.05


@pytest.mark.parametrize("form", FORMS)
def test_the_plain_road_finds_the_same(form, rewrite_and_run, count_ops):
    module = MoE(PlainExperts(form))
    x, ids = torch.randn(E, 3, K).bfloat16(), torch.randint(E, (E * 3,))
    plain, graph = rewrite_and_run(module, x, ids, quantization="fp8_per_channel")
    assert count_ops(graph.gm.graph)["scaled_grouped_mm"] == 1
    fxquant.quantize_(module, "fp8_per_channel")
    converted, _ = rewrite_and_run(module, x, ids)
    assert torch.equal(plain, converted)


class Loop(nn.Module):
    """User code that goes through the experts one by one."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.experts_weight = nn.Parameter(torch.randn(E, N, K).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "index":
            return torch.stack([F.linear(x, self.experts_weight[i]) for i in range(E)])
        if self.form == "matmul":
            return torch.stack([x @ self.experts_weight[i].t() for i in range(E)])
        if self.form == "unbind":
            return torch.stack([F.linear(x, w) for w in self.experts_weight.unbind(0)])
        if self.form == "iterate":
            return torch.stack([F.linear(x, w) for w in self.experts_weight])
        return torch.stack([F.linear(x, self.experts_weight.select(0, i)) for i in range(E)])


class MoE(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *args: Tensor) -> Tensor:
        return self.experts(*args)


@pytest.mark.parametrize("form", ["index", "matmul", "unbind", "iterate", "select"])
@pytest.mark.parametrize("quantization", ["fp8_per_channel", "mxfp4"])
def test_loops_over_experts(form, quantization, rewrite_and_run, count_ops, relative_error):
    module, x = MoE(Loop(form)), torch.randn(3, K).bfloat16()
    fxquant.quantize_(module, quantization)
    expected = module(x)
    got, graph = rewrite_and_run(module, x)
    counts = count_ops(graph.gm.graph)
    assert counts["scaled_mm"] == E
    assert counts["dequantize_weight"] == 0
    assert counts["quantize_activation"] == (quantization != "mxfp4")
    assert torch.equal(got, expected)


def test_other_reads_of_chosen_experts_dequantise_those_alone(rewrite_and_run, count_ops):
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(E, N, K).bfloat16())

        def forward(self, ids: Tensor) -> Tensor:
            return self.weight[ids].float().sum(-1) + self.weight[2].abs().sum()

    module, ids = Experts(), torch.tensor([4, 0])
    fxquant.quantize_(module, "mxfp4")
    expected = module(ids)
    got, graph = rewrite_and_run(module, ids)
    assert count_ops(graph.gm.graph)["dequantize_weight"] == 2
    assert torch.allclose(got, expected)


@pytest.mark.parametrize("written", [False, True])
def test_numbers_that_are_written_after_the_choice_are_not_read_again(written, rewrite_and_run, count_ops):
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(E, N, K).bfloat16())

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            ids = ids + 1
            chosen = self.weight[ids]
            if written:
                ids.zero_()
            return torch.bmm(chosen, x.unsqueeze(-1))

    module, x, ids = Experts(), torch.randn(3, K).bfloat16(), torch.tensor([2, 0, 3])
    fxquant.quantize_(module, "mxfp4")
    got, graph = rewrite_and_run(module, x, ids)
    counts = count_ops(graph.gm.graph)
    assert (counts["scaled_grouped_mm"], counts["dequantize_weight"]) == ((0, 1) if written else (1, 0))
    assert torch.allclose(got, module(x, ids), rtol=0.01, atol=0.01)


def test_one_expert_for_many_batches(rewrite_and_run, count_ops, relative_error):
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1, N, K).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.mT + torch.bmm(x[:1], self.weight.mT)

    module, x = Experts(), torch.randn(3, 2, K).bfloat16()
    fxquant.quantize_(module, "mxfp4")
    got, graph = rewrite_and_run(module, x)
    assert count_ops(graph.gm.graph)["scaled_grouped_mm"] == 1
    assert relative_error(got, module(x)) < 0.01


def test_a_stack_multiplied_along_the_other_dimension_is_dequantised_and_said(rewrite_and_run, count_ops, caplog):
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(E, K, N).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, self.weight)

    module, x = Experts(), torch.randn(E, 2, K).bfloat16()
    fxquant.quantize_(module, "fp8_per_channel")
    expected = module(x)
    got, graph = rewrite_and_run(module, x)
    assert count_ops(graph.gm.graph)["dequantize_weight"] == 1
    assert torch.equal(got, expected)
    assert "is_transposed" in caplog.text


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_einsums_of_any_labels(data, rewrite_and_run, count_ops, relative_error):
    """Any order of the axes: found and right where the experts stay apart, dequantised and right elsewhere."""
    sizes = {"e": 3, "n": 8, "k": 16, "b": 2, "t": 4}
    weight_axes = "e" + data.draw(st.sampled_from(["nk", "kn"]))
    extra = data.draw(st.lists(st.sampled_from(["b", "t", "e"]), unique=True, max_size=3))
    x_axes = "".join(data.draw(st.permutations([*extra, "k"])))
    out_axes = [*{*extra, "n", "e"}]
    out = "".join(data.draw(st.permutations(sorted(out_axes))))
    first = data.draw(st.booleans())

    class Experts(nn.Module):
        is_transposed = weight_axes == "ekn"

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn([sizes[axis] for axis in weight_axes]))

        def forward(self, x: Tensor) -> Tensor:
            if first:
                return torch.einsum(f"{weight_axes},{x_axes}->{out}", self.weight, x)
            return torch.einsum(f"{x_axes},{weight_axes}->{out}", x, self.weight)

    module, x = Experts(), torch.randn([sizes[axis] for axis in x_axes])
    fxquant.quantize_(module, quantization_config={"moe": "mxfp8"})
    got, graph = rewrite_and_run(module, x)
    expected = torch.einsum(f"{x_axes},{weight_axes}->{out}", x, module.weight.dequantize())
    assert count_ops(graph.gm.graph)["scaled_grouped_mm"] == 1
    assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])  # the last two: grouped_mm_fallback
def test_both_implementations_of_transformers(family, implementation, dtype, rewrite_and_run, count_ops, relative_error):
    model = FAMILIES[family].model(layers=1).to(dtype)
    model.set_experts_implementation(implementation)
    fxquant.quantize_(model, quantization_config={"moe": "fp8_per_tensor"})
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected = model(ids).logits
    got, graph = rewrite_and_run(model, ids)
    counts = count_ops(graph.gm.graph)
    assert (counts["scaled_grouped_mm"], counts["quantize_activation"], counts["dequantize_weight"]) == (2, 2, 0)
    assert relative_error(got.logits, expected) < 1e-3
    untouched = FAMILIES[family].model(layers=1).to(dtype)
    untouched.set_experts_implementation(implementation)
    plain, graph = rewrite_and_run(untouched, ids, quantization_config={"moe": "fp8_per_tensor"})
    assert count_ops(graph.gm.graph)["scaled_grouped_mm"] == 2
    assert relative_error(plain.logits, expected) < 1e-3
