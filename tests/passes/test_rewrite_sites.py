"""Products with quantised weights become ops; every other read of one dequantises; random graphs keep their values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxquant
from fxquant.kernels import numerics
from fxquant.kernels.formats import FORMATS

WIDTH = 32


class Forms(nn.Module):
    """One weight [N, K] and one [K, N], multiplied in the way that ``form`` names."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.lin.weight, self.lin.bias
        forms = {
            "linear": lambda: F.linear(x, w, b),
            "linear keyword": lambda: F.linear(x, weight=w),
            "module": lambda: self.lin(x),
            "matmul t": lambda: torch.matmul(x, w.t()),
            "matmul T": lambda: x @ w.T,
            "matmul mT": lambda: x @ w.mT,
            "matmul transpose": lambda: x.matmul(w.transpose(0, 1)),
            "matmul negative": lambda: x @ torch.transpose(w, -1, -2),
            "matmul permute": lambda: x @ w.permute(1, 0),
            "mm": lambda: torch.mm(x.reshape(-1, WIDTH), w.t()),
            "addmm": lambda: torch.addmm(b, x.reshape(-1, WIDTH), w.t()),
            "addmm method": lambda: b.addmm(x.reshape(-1, WIDTH), w.t()),
            "double transpose": lambda: F.linear(x, w.t().t(), b),
            "cast": lambda: F.linear(x, w.to(x.dtype), b),
            "detach": lambda: F.linear(x, w.detach(), b),
        }
        return forms[self.form]()


FORMS = [
    "linear", "linear keyword", "module", "matmul t", "matmul T", "matmul mT", "matmul transpose", "matmul negative",
    "matmul permute", "mm", "addmm", "addmm method", "double transpose", "cast", "detach",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_product_is_found(form, rewrite_and_run, count_ops, relative_error):
    module = Forms(form)
    fxquant.quantize_(module, "fp8_per_channel")
    x = torch.randn(3, 5, WIDTH)
    got, graph = rewrite_and_run(module, x)
    assert count_ops(graph.gm.graph) == {
        "quantize_activation": 1,
        "scaled_mm": 1,
        "scaled_grouped_mm": 0,
        "dequantize_weight": 0,
    }
    assert relative_error(got, module(x)) < 1e-5


def test_conv1d_weights_contract_their_first_dimension(rewrite_and_run, count_ops, relative_error):
    from transformers.pytorch_utils import Conv1D

    module, x = Conv1D(48, WIDTH), torch.randn(2, 3, WIDTH)
    expected = module(x)
    fxquant.quantize_(module, "fp8_per_channel")
    assert module.weight.shape == (WIDTH, 48)
    got, graph = rewrite_and_run(module, x)
    assert count_ops(graph.gm.graph)["scaled_mm"] == 1
    assert relative_error(got, module(x)) < 1e-5
    assert relative_error(got, expected) < 0.06


class OtherReads(nn.Module):
    def __init__(self, read: str) -> None:
        super().__init__()
        self.read = read
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        w = self.lin.weight
        reads = {
            "wrong side": lambda: w @ x.reshape(-1, WIDTH).t(),
            "other contraction": lambda: x @ w,
            "rows": lambda: w[:3].sum() + x,
            "float": lambda: (w.double() * 2).sum() + x,
            "transposed read": lambda: w.t().contiguous()[0] + x,
            "scaled addmm": lambda: torch.addmm(self.lin.bias, x.reshape(-1, WIDTH), w.t(), beta=0.5),
            "einsum": lambda: torch.einsum("bsk,nk->bsn", x, w),
            "reshape": lambda: F.linear(x, w.reshape(WIDTH * 2, WIDTH // 2).reshape(WIDTH, WIDTH)),
        }
        return reads[self.read]()


@pytest.mark.parametrize(
    "read", ["wrong side", "other contraction", "rows", "float", "transposed read", "scaled addmm", "einsum", "reshape"]
)
def test_other_reads_dequantise(read, rewrite_and_run, count_ops, relative_error):
    module = OtherReads(read)
    fxquant.quantize_(module, "fp8_per_channel")
    x = torch.randn(3, 5, WIDTH)
    got, graph = rewrite_and_run(module, x)
    counts = count_ops(graph.gm.graph)
    assert counts["scaled_mm"] == 0
    assert counts["dequantize_weight"] == 1
    assert relative_error(got, module(x)) < 1e-5


def test_a_branch_reads_its_weights_dequantised(rewrite_and_run, count_ops):
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.cond(x.sum() > 0, self.a, lambda x: torch.sin(self.a(x)), (x,)))

    module, x = Branches(), torch.rand(2, WIDTH)
    fxquant.quantize_(module, "fp8_per_channel")
    got, graph = rewrite_and_run(module, x)
    assert count_ops(graph.gm.graph) == {
        "quantize_activation": 1,
        "scaled_mm": 1,
        "scaled_grouped_mm": 0,
        "dequantize_weight": 1,
    }
    inner = F.linear(x, module.a.weight.dequantize(), module.a.bias)
    torch.testing.assert_close(got, module.b(inner), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("config", [{"linear": {"weight": "fp8_per_channel_static", "activation": "none"}}])
def test_weight_only_products_have_no_activation_quantisation(config, rewrite_and_run, count_ops, relative_error):
    module, x = Forms("module"), torch.randn(2, WIDTH)
    expected = module(x)
    fxquant.quantize_(module, None, config)
    got, graph = rewrite_and_run(module, x)
    assert count_ops(graph.gm.graph) == {
        "quantize_activation": 0,
        "scaled_mm": 1,
        "scaled_grouped_mm": 0,
        "dequantize_weight": 0,
    }
    assert relative_error(got, F.linear(x, module.lin.weight.dequantize(), module.lin.bias)) < 1e-5
    assert relative_error(got, expected) < 0.05


class RandomProgram(nn.Module):
    """A chain of steps over values of one width; each step names its operands by index."""

    def __init__(self, layers: int, steps: list[tuple[str, int, int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bool(i % 2)) for i in range(layers))
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for kind, layer, a, b in self.steps:
            module = self.layers[layer % len(self.layers)]
            left, right = values[a % len(values)], values[b % len(values)]
            if kind == "module":
                values.append(module(left))
            elif kind == "functional":
                values.append(F.linear(left, module.weight))
            elif kind == "matmul":
                values.append(left @ module.weight.t())
            elif kind == "siblings":
                values.append(module(left) * self.layers[b % len(self.layers)](left))
            elif kind == "add":
                values.append(left + right)
            elif kind == "in_place":
                values.append(left.clone().mul_(0.5).add_(right))
            elif kind == "write":
                left.mul_(0.5)
            else:
                values.append(torch.tanh(left))
        return torch.stack(values).sum(0)


class FakeQuantized(torch.overrides.TorchFunctionMode):
    """The same formulas on dequantised weights and activations, in plain torch."""

    def __init__(self, model: RandomProgram) -> None:
        super().__init__()
        weight, activation = FORMATS["fp8_per_channel_static"], FORMATS["fp8_per_token"]
        self.weights = {
            id(layer.weight): numerics.dequantize(numerics.quantize(layer.weight, weight), weight, torch.float32)
            for layer in model.layers
        }
        self.activation = activation

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and id(args[1]) in self.weights:
            x = numerics.dequantize(numerics.quantize(args[0], self.activation), self.activation, torch.float32)
            return func(x, self.weights[id(args[1])], *args[2:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


steps = st.lists(
    st.tuples(
        st.sampled_from(["module", "functional", "matmul", "siblings", "add", "in_place", "write", "tanh"]),
        st.integers(0, 5), st.integers(0, 5), st.integers(0, 5),
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers=st.integers(1, 3), program=steps)
def test_random_programs_keep_their_values(layers, program, rewrite_and_run, relative_error):
    torch.manual_seed(0)
    module = RandomProgram(layers, [("functional" if kind == "matmul" else kind, *rest) for kind, *rest in program])
    x = torch.randn(3, WIDTH)
    with torch.no_grad(), FakeQuantized(module):
        reference = module(x.clone())
    matmuls = RandomProgram(layers, program)
    matmuls.load_state_dict(module.state_dict())
    fxquant.quantize_(matmuls, "fp8_per_channel")
    got, graph = rewrite_and_run(matmuls, x.clone())
    with torch.no_grad():
        eager = matmuls(x.clone())
    assert relative_error(got, eager) < 1e-5
    assert relative_error(got, reference) < 1e-2  # a value at a rounding boundary may fall on the other side
    products = sum({"module": 1, "functional": 1, "matmul": 1, "siblings": 2}.get(kind, 0) for kind, *_ in program)
    assert graph.matches["rewrite_sites"] == products
