"""Sibling fusion from model to call: fewer products, weights in memory once, and every change of a weight seen."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxquant
from fxquant import QuantizedTensor
from fxquant.compiler import keep_guard
from fxquant.kernels.pack import is_packed
from fxquant.log import warn_once
from fxquant.options import BackendOptions
from fxquant.rewrite import Rewritten, rewrite
from fxquant.runner import runner

SCALED_MM = torch.ops.fxquant.scaled_mm.default
SHARDS = [("q", "k", "v"), ("gate_proj", "up_proj")]


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, 16, bias=False), nn.Linear(width, 16)
        self.o = nn.Linear(width, width, bias=False)
        self.mlp = nn.ModuleDict(
            {"gate_proj": nn.Linear(width, 48), "up_proj": nn.Linear(width, 48), "down_proj": nn.Linear(48, width)}
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:])
        q, k, v = (part.view(*x.shape[:-1], -1, 16) for part in (self.q(h), self.k(h), self.v(h)))
        x = x + self.o((q * k + v).flatten(-2))
        h = F.rms_norm(x, x.shape[-1:])
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))


class Counting:
    """The rewritten graph run as it is, without Inductor; counts its calls."""

    def __init__(self, **options: Any) -> None:
        self.options, self.graphs = options, list[Rewritten]()

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
        graph = rewrite(gm, inputs, BackendOptions.parse(None, self.options))
        self.graphs.append(graph)
        return runner(graph.calls, graph.gm)

    def products(self) -> list[int]:
        return [len(graph.gm.graph.find_nodes(op="call_function", target=SCALED_MM)) for graph in self.graphs]


def converted(scheme: str = "fp8_per_channel", width: int = 32) -> Block:
    block = Block(width)
    fxquant.quantize_(block, scheme)
    return block


def shards(block: Block) -> list[list[Any]]:
    return [[block.q.weight, block.k.weight, block.v.weight], [block.mlp["gate_proj"].weight, block.mlp["up_proj"].weight]]


def components(module: nn.Module) -> list[Tensor]:
    return [c for p in module.parameters() if isinstance(p, QuantizedTensor) for c in p.components]


def memory(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes of the distinct storages."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def close(got: Tensor, expected: Tensor) -> bool:
    return torch.allclose(got.float(), expected.float(), rtol=1e-4, atol=1e-4)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 32)


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"])
def test_a_llama_has_four_products_a_block(scheme, llama):
    model, ids = llama(num_hidden_layers=2), torch.arange(16).reshape(2, 8)
    fxquant.quantize_(model, scheme)
    backend = Counting()
    expected = model(ids).logits
    torch.testing.assert_close(torch.compile(model, backend=backend)(ids).logits, expected, rtol=0.02, atol=0.02)
    assert backend.products() == [2 * 4]


def test_inductors_code_has_four_products_a_block(llama):
    from torch._inductor.utils import run_and_get_code

    model = llama(num_hidden_layers=1)
    fxquant.quantize_(model, "fp8_per_channel")
    _, code = run_and_get_code(torch.compile(model, backend="fxquant"), torch.arange(16).reshape(2, 8))
    assert "\n".join(code).count("_scaled_mm.default(") + "\n".join(code).count("extern_kernels._scaled_mm(") == 4


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"])
def test_the_bytes_stay_and_the_storages_are_fewer(scheme, x):
    block = converted(scheme)
    before, old = memory(components(block)), [weakref.ref(c) for group in shards(block) for w in group for c in w.components]
    expected = block(x)
    assert close(torch.compile(block, backend=Counting())(x), expected)
    after = memory(components(block))
    assert sum(after.values()) == sum(before.values())
    assert (len(before), len(after)) == (14, 8)
    gc.collect()
    assert not any(reference() is not None for reference in old)
    assert torch.equal(block(x), expected)  # eager, on the views


@pytest.mark.parametrize("change", ["load_state_dict", "assign", "in_place", "replaced", "data", "moved"])
def test_a_changed_weight_is_seen_without_a_new_graph(change, x):
    """What is written in place stays packed; what takes a weight's place is packed at the next call."""
    block, other, backend = converted(), converted(), Counting()
    call = torch.compile(block, backend=backend, options={"guard_filter_fn": keep_guard})
    before = call(x)
    pack = block.q.weight.pack
    if change in ("load_state_dict", "assign"):
        block.load_state_dict(copy.deepcopy(other.state_dict()), assign=change == "assign")
    elif change == "in_place":
        block.k.weight.mul_(-2)
        block.mlp["up_proj"].weight.copy_(torch.randn(48, 32))
    elif change == "replaced":
        block.k.weight = nn.Parameter(other.k.weight.clone(), requires_grad=False)
    elif change == "data":
        block.k.weight.data = torch.randn(16, 32)
    else:
        block.k.weight, block.v.weight = block.v.weight, block.k.weight
    expected = block(x)
    assert not close(before, expected)
    assert close(call(x), expected)
    assert close(call(x), expected)
    assert all(map(is_packed, shards(block)))
    assert (block.q.weight.pack is pack) == (change in ("load_state_dict", "in_place"))
    assert len(backend.graphs) == 1


@pytest.mark.parametrize("move", ["half", "float", "deepcopy", "save"])
def test_moves_after_compile(move, x):
    block = converted()
    expected = torch.compile(block, backend="fxquant")(x)
    size = sum(memory(components(block)).values())
    if move == "deepcopy":
        block = copy.deepcopy(block)
    elif move == "save":
        file = io.BytesIO()
        torch.save(block.state_dict(), file)
        file.seek(0)
        block.load_state_dict(torch.load(file, weights_only=True), assign=True)
    else:
        block = getattr(block, move)()
    dtype = block.q.weight.dtype
    assert sum(memory(components(block)).values()) == size
    got = torch.compile(block, backend=Counting())(x.to(dtype))
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.02)
    assert sum(memory(components(block)).values()) == size
    assert all(map(is_packed, shards(block)))


def test_flattened_state_dicts_hold_packed_weights_once(x, tmp_path):
    from safetensors.torch import load_file, save_file

    block = converted()
    size = sum(memory(components(block)).values())
    expected = torch.compile(block, backend=Counting())(x)
    flat = fxquant.flatten_state_dict(block.state_dict())
    assert sum(memory([t for name, t in flat.items() if name.endswith(("qdata", "scale"))]).values()) == size
    save_file(flat, tmp_path / "block.safetensors")
    fresh = converted()
    fresh.load_state_dict(fxquant.unflatten_state_dict(load_file(tmp_path / "block.safetensors")))
    assert close(fresh(x), expected)


def test_equal_layers_share_one_graph_and_pack_each_their_own():
    from torch._dynamo.utils import counters

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(24))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Model(), torch.randn(2, 3, 32)
    fxquant.quantize_(model, "fp8_per_channel")
    expected = model(x)
    counters.clear()
    fxquant.compile(model, per_layer=True)
    for _ in range(2):
        torch.testing.assert_close(model(x), expected, rtol=0.02, atol=0.02)
    assert counters["stats"]["unique_graphs"] == 1
    assert all(is_packed(group) for layer in model.layers for group in shards(layer))


def test_copies_of_plain_weights_are_packed(x):
    block, backend = Block(), Counting(quantization="fp8_per_channel")
    call = torch.compile(block, backend=backend)
    for _ in range(2):
        twin = copy.deepcopy(block)
        fxquant.quantize_(twin, "fp8_per_channel")
        assert close(call(x), twin(x))
        assert close(call(x), twin(x))
        block.k.weight.mul_(-2)
    assert backend.products() == [4]


@pytest.mark.parametrize("mode", ["inference", "autocast", "dynamic"])
def test_modes(mode, relative_error):
    block, backend = converted(), Counting()
    call = torch.compile(block, backend=backend, dynamic=mode == "dynamic")
    for batch in (2, 3, 5, 8):
        x = torch.randn(batch, 4, 32)
        with torch.inference_mode(mode == "inference"), torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            got, expected = call(x), block(x)
        assert relative_error(got, expected) < 0.02
    assert set(backend.products()) == {4}
    assert mode != "dynamic" or len(backend.graphs) == 1
    block.k.weight.mul_(2)  # packed in inference mode or not, a weight can be written outside of it
    assert close(block(x), call(x)) or mode == "autocast"


def test_a_weight_in_another_format_runs_the_graph_as_traced(x, caplog):
    block = converted()
    call = torch.compile(block, backend=Counting(), options={"guard_filter_fn": keep_guard})
    call(x)
    block.k.weight = nn.Parameter(converted("fp8_per_tensor").k.weight, requires_grad=False)
    with caplog.at_level(logging.WARNING, logger="fxquant"):
        assert close(call(x), block(x))
    block.k.weight = nn.Parameter(torch.randn(16, 32), requires_grad=False)
    assert close(call(x), block(x))


def test_one_weight_in_two_places_after_compile(x):
    block = Block()
    block.k = nn.Linear(32, 16)
    fxquant.quantize_(block, "fp8_per_channel")
    call = torch.compile(block, backend=Counting(), options={"guard_filter_fn": keep_guard})
    call(x)
    block.v.weight = block.k.weight
    assert close(call(x), block(x))
    block.mlp["up_proj"].weight = block.mlp["gate_proj"].weight
    assert close(call(x), block(x))


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x) + self.c(x)

    def other(self, x: Tensor) -> Tensor:
        return self.b(x) - self.c(x)


def test_a_graph_that_groups_packed_weights_otherwise_leaves_them_apart(x):
    model, backend = TwoWays(), Counting()
    fxquant.quantize_(model, "fp8_per_channel")
    forward, other = torch.compile(model.forward, backend=backend), torch.compile(model.other, backend=backend)
    for _ in range(2):
        assert close(forward(x), model(x))
        assert close(other(x), model.other(x))
    assert backend.products() == [1, 2]
    assert is_packed([model.a.weight, model.b.weight, model.c.weight])


def test_graphs_that_take_turns_pack_again_and_say_so_once(x, caplog):
    """Both compiled for one model and called for another: nothing was packed when the second was compiled."""
    models, backend = [TwoWays() for _ in range(2)], Counting()
    for model in models:
        fxquant.quantize_(model, "fp8_per_channel")
    options = {"guard_filter_fn": keep_guard}
    forward = torch.compile(TwoWays.forward, backend=backend, options=options)
    other = torch.compile(TwoWays.other, backend=backend, options=options)
    forward(models[0], x), other(models[1], x)
    warn_once.cache_clear()
    assert backend.products() == [1, 1]
    with caplog.at_level(logging.WARNING, logger="fxquant"):
        for _ in range(2):
            assert close(other(models[0], x), models[0].other(x))
            assert close(forward(models[0], x), models[0](x))
    assert len(backend.graphs) == 2
    assert sum("are packed in another" in record.message for record in caplog.records) == 1


def test_inputs_come_in_the_order_that_calls_describes(x):
    block, backend = converted(), Counting()
    torch.compile(block, backend=backend)(x)
    (graph,) = backend.graphs
    nodes = graph.gm.graph.find_nodes(op="placeholder")[len(graph.calls.kept) :]
    assert [node.name.rpartition("_")[2] for node in nodes] == ["qdata", "qdata", "scale", "scale"] * 2
    assert [slot.name for group in graph.calls.groups for slot in group] == ["o", "mlp.down_proj"]
    packs = itertools.chain.from_iterable(graph.calls.packs)
    assert [[slot.name.rpartition(".")[2] for slot in packing.slots] for packing in packs] == [list(names) for names in SHARDS]
    assert [tuple(value.shape) for value in graph.inputs[len(graph.calls.kept) :]] == [
        *((32, 32), (32, 48), (32, 1), (32, 1)),
        *((64, 32), (96, 32), (64, 1), (96, 1)),
    ]
    for node in nodes:
        assert node.meta["tensor_dict"]["_dynamo_static_input_type"]
        assert node._dynamo_source is not None
    assert len({node._dynamo_source.name for node in nodes}) == len(nodes)
