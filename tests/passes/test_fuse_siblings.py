"""Siblings become one product with the values of the products they were; what does not fit together stays apart."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import fxquant
from fxquant import QuantizedTensor
from fxquant.kernels import numerics
from fxquant.kernels.formats import FORMATS, Scheme
from fxquant.passes.fuse_siblings import PACK_KEY, PACKED_WITH_KEY, fuse_siblings
from fxquant.passes.rewrite_sites import META_KEY, QuantizedInput, rewrite_sites
from fxquant.passes.share_activations import share_activations

SCALED_MM = torch.ops.fxquant.scaled_mm.default

SCHEMES = [
    ("fp8_per_channel_static", "fp8_per_token"),
    ("fp8_per_channel_static", None),
    ("fp8_per_tensor_static", "fp8_per_tensor_dynamic"),
    ("fp8_per_tensor_static", "fp8_per_token"),
    ("fp8_per_block_static", "fp8_per_block_dynamic"),
    ("fp8_per_block_static", None),
    ("mxfp8", "mxfp8"),
    ("mxfp8", None),
    ("mxfp4", "mxfp4"),
    ("mxfp4", None),
    ("nvfp4", "nvfp4"),
    ("nvfp4", None),
    ("int8_per_channel_static", "int8_per_token"),
    ("int8_per_channel_static", None),
]


def scheme(weight: str, activation: str | None = None) -> Scheme:
    return Scheme(weight=FORMATS[weight], activation=FORMATS[activation] if activation else None)


FP8 = scheme("fp8_per_channel_static", "fp8_per_token")


class Program:
    """A graph of linears over quantised weights, as ``rewrite`` hands it to the passes, and the values of its inputs."""

    def __init__(self, x: Tensor, weights: Sequence[QuantizedTensor], biases: Sequence[Tensor | None] = ()) -> None:
        self.graph, self.values = fx.Graph(), dict[fx.Node, Any]()
        self.x = self.input("x", x, parameter=False)
        self.weights = [self.input(f"w{i}", weight) for i, weight in enumerate(weights)]
        self.biases = [bias if bias is None else self.input(f"b{i}", bias) for i, bias in enumerate(biases)]
        self.biases += [None] * (len(weights) - len(biases))
        for node in self.weights:
            weight = self.values[node]
            parts = zip(weight.spec.scheme.weight.components, weight.components, strict=True)
            components = tuple(self.input(f"{node}_{name}", component) for name, component in parts)
            node.meta[META_KEY] = QuantizedInput(components=components, spec=weight.spec, name=node.name)

    def input(self, name: str, value: Tensor, *, parameter: bool = True) -> fx.Node:
        node = self.graph.placeholder(name)
        self.values[node], node.meta = value, {"example_value": value}
        if parameter:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        """A call with its value, as Dynamo leaves it."""
        node = self.graph.call_method(target, args) if isinstance(target, str) else self.graph.call_function(target, args)
        values = fx.node.map_arg(args, lambda arg: arg.meta["example_value"])
        with torch.no_grad():
            if isinstance(target, str):
                node.meta = {"example_value": getattr(values[0], target)(*values[1:])}
            else:
                node.meta = {"example_value": target(*values)}
        return node

    def linear(self, index: int, x: fx.Node | None = None, module: Sequence[str] = ()) -> fx.Node:
        node = self.call(F.linear, x or self.x, self.weights[index], self.biases[index])
        node.meta["nn_module_stack"] = {name: (name, nn.Module) for name in module}
        return node

    def passes(self, *, fuse: bool) -> int:
        rewrite_sites(self.graph)
        share_activations(self.graph)
        count = fuse_siblings(self.graph) if fuse else 0
        self.graph.lint()
        return count

    def products(self) -> int:
        return len(self.graph.find_nodes(op="call_function", target=SCALED_MM))

    def run(self) -> Any:
        values = dict(self.values)
        for node in self.graph.find_nodes(op="placeholder"):
            if node not in values:
                pack = node.meta[PACK_KEY]
                weights = [values[member] for member in pack.members]
                stacked = numerics.stack_shards([w.components for w in weights], weights[0].spec.scheme.weight)
                values.update(zip(pack.components, stacked, strict=True))
        inputs = [values[node] for node in self.graph.find_nodes(op="placeholder")]
        module = fx.GraphModule(nn.Module(), self.graph)
        with torch.no_grad():
            return module(*(value.clone() if type(value) is Tensor else value for value in inputs))


USES: dict[str, Callable[[Program, fx.Node], fx.Node]] = {
    "as it is": lambda program, y: program.call(torch.mul, y, 2),
    "flat": lambda program, y: program.call(torch.mul, program.call("view", y, -1), 2),
    "heads": lambda program, y: program.call(torch.mul, program.call("unflatten", y, -1, (-1, 1)), 2),
    "written": lambda program, y: program.call("mul_", program.call("view", y, -1), 3),
    "returned": lambda program, y: y,
}


def quantized(
    rows: int, columns: int, kind: Scheme = FP8, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> QuantizedTensor:
    return QuantizedTensor.from_float(torch.randn(rows, columns, dtype=dtype), kind, **options)


def siblings(rows: Sequence[int] = (16, 32, 16), kind: Scheme = FP8, **options: Any) -> Program:
    """Siblings over an activation (2, 3, 64) that no line calls yet."""
    weights = [quantized(n, 64, kind, **options) for n in rows]
    return Program(torch.randn(2, 3, 64, dtype=torch.bfloat16), weights)


def exact(*shape: int, largest: int, factor: float = 1.0) -> Tensor:
    """Numbers that the formats hold as they are: their sums of products are exact, in whatever order a kernel adds.

    Every block holds the largest number, which makes its scale a power of two.
    """
    values = torch.randint(-2, 3, shape).float()
    values[..., ::16] = largest
    return values * torch.randint(0, 2, shape).mul(2).sub(1) * factor


LARGEST = {"e4m3": 448, "int8": 127, "mxfp4": 6, "nvfp4": 42}


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(SCHEMES),
    st.lists(st.tuples(st.sampled_from([1, 8, 16, 48, 128, 200]), st.booleans()), min_size=2, max_size=4),
    st.sampled_from([(5, 64), (1, 96), (2, 3, 160)]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.sampled_from(sorted(USES)),
    st.integers(0, 1000),
)
def test_values_are_those_of_the_products_alone(names, shards, shape, dtype, use, seed):
    """To the bit: every shard has scales of another size, and blocks that begin anew."""
    torch.manual_seed(seed)
    kind = scheme(*names)
    largest = LARGEST.get(kind.weight.name) or LARGEST[kind.weight.element]
    weights, outputs, counts = [], [], []
    for index, (rows, _) in enumerate(shards):
        values = exact(rows, shape[-1], largest=largest, factor=2.0**index).to(dtype)
        weights.append(QuantizedTensor.from_float(values, kind))
    biases = [torch.randint(-8, 9, (rows,)).to(dtype) if biased else None for rows, biased in shards]
    x = exact(*shape, largest=largest).to(dtype)
    for fuse in (False, True):
        program = Program(x, weights, biases)
        parts = [program.linear(i) for i in range(len(shards))]
        program.graph.output(tuple(USES[use](program, part) for part in parts))
        counts.append(program.passes(fuse=fuse))
        outputs.append(program.run())
    assert counts == [0, 1]
    for alone, fused in zip(*outputs, strict=True):
        assert alone.dtype == fused.dtype
        assert torch.equal(alone, fused)


def test_one_product_with_one_packed_weight_stands_where_the_first_stood():
    program = siblings((16, 32, 16))
    q, k, v = (program.linear(i) for i in range(3))
    program.graph.output(program.call(torch.cat, (q, k, v), -1))
    assert program.passes(fuse=True) == 1
    (product,) = program.graph.find_nodes(op="call_function", target=SCALED_MM)
    assert product.kwargs["shards"] == [16, 32, 16]
    assert [node.name for node in product.args[1]] == ["w0_pack_qdata", "w0_pack_scale"]
    assert [tuple(node.meta["example_value"].shape) for node in product.args[1]] == [(64, 64), (64, 1)]
    assert product.meta["example_value"].shape == (2, 3, 64)
    packs = {node.meta[PACK_KEY] for node in product.args[1]}
    assert [pack.members for pack in packs] == [tuple(program.weights)]
    assert all(not part.users for weight in program.weights for part in weight.meta[META_KEY].components)


def test_two_groups_in_one_graph():
    program = Program(torch.randn(4, 32), [quantized(32, 32, dtype=torch.float32) for _ in range(4)])
    h = program.call(torch.mul, program.linear(0), program.linear(1))
    program.graph.output(program.call(torch.mul, program.linear(2, h), program.linear(3, h)))
    assert program.passes(fuse=True) == 2
    assert program.products() == 2


def test_other_siblings_of_the_activation_are_other_groups():
    """A router and a shared expert read the same hidden states; so do the cross-attentions of all layers."""
    program = siblings((16, 16, 16, 16))
    router = program.input("router", torch.randn(8, 64, dtype=torch.bfloat16))
    gate = program.call(F.linear, program.x, router)
    gate.meta["nn_module_stack"] = {"mlp": None, "mlp.gate": None}
    parts = [program.linear(i, module=("mlp", "mlp.shared", f"mlp.shared.{i}")) for i in range(2)]
    parts += [program.linear(i, module=("attention", f"attention.{i}")) for i in (2, 3)]
    for part in parts:
        program.call(torch.mul, part, 2)
    program.graph.output(gate)
    assert program.passes(fuse=True) == 2
    packs = dict.fromkeys(node.meta[PACK_KEY] for node in program.graph.nodes if PACK_KEY in node.meta)
    assert [[member.name for member in pack.members] for pack in packs] == [["w0", "w1"], ["w2", "w3"]]


def float_member(program: Program) -> None:
    program.call(F.linear, program.x, program.input("plain", torch.randn(8, 64, dtype=torch.bfloat16)))


def other_scheme(program: Program) -> None:
    weight = program.weights[1].meta[META_KEY]
    other = quantized(32, 64, scheme("mxfp8", "fp8_per_token"))
    program.values[program.weights[1]] = other
    program.weights[1].meta["example_value"] = other
    program.weights[1].meta[META_KEY] = QuantizedInput(
        components=tuple(program.input(f"o{i}", c) for i, c in enumerate(other.components)), spec=other.spec, name=weight.name
    )


def read_twice(program: Program) -> None:
    program.call(F.linear, program.call(torch.relu, program.x), program.weights[1])


def read_in_float(program: Program) -> None:
    program.call("sum", program.weights[1])


def packed_with_another(program: Program) -> None:
    program.weights[0].meta[PACKED_WITH_KEY] = (program.weights[0], None)


@pytest.mark.parametrize("obstacle", [float_member, other_scheme, read_twice, read_in_float, packed_with_another])
def test_a_group_is_fused_whole_or_not_at_all(obstacle):
    program = siblings()
    obstacle(program)
    program.graph.output(tuple(program.call(torch.mul, program.linear(i), 2) for i in range(3)))
    before = program.run()
    assert program.passes(fuse=True) == 0
    for got, expected in zip(program.run(), before, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.1)


def test_the_pack_that_the_weights_sit_in_already_is_kept():
    program = siblings()
    for weight in program.weights:
        weight.meta[PACKED_WITH_KEY] = tuple(program.weights)
    program.graph.output(tuple(program.call(torch.mul, program.linear(i), 2) for i in range(3)))
    assert program.passes(fuse=True) == 1


def test_another_kernel_would_change_the_values():
    """On CUDA the library's kernel takes multiples of 16 rows; here one kernel serves all shards, which the table says."""
    kind = scheme("int8_per_channel_static")
    program = siblings((16, 16), kind)
    program.weights[1].meta[META_KEY] = QuantizedInput(
        **{**vars(program.weights[1].meta[META_KEY]), "spec": quantized(16, 64, kind, backend="reference").spec}
    )
    program.graph.output(tuple(program.call(torch.mul, program.linear(i), 2) for i in range(2)))
    assert program.passes(fuse=True) == 0


@pytest.mark.parametrize("kind", [FP8, scheme("mxfp4")])
def test_a_write_to_the_activation_in_between_keeps_them_apart(kind):
    def build() -> Program:
        program = siblings((16, 32, 16), kind)
        x = program.call(torch.mul, program.x, 1)
        first = program.call(torch.mul, program.linear(0, x), 1)
        program.call("mul_", program.call("view", x, -1), 3)
        program.graph.output(
            (first, program.call(torch.mul, program.linear(1, x), program.call(torch.sum, program.linear(2, x))))
        )
        return program

    outputs = []
    for fuse in (False, True):
        torch.manual_seed(0)
        program = build()
        assert program.passes(fuse=fuse) == fuse
        assert program.products() == 3 - fuse
        outputs.append(program.run())
    for alone, fused in zip(*outputs, strict=True):
        assert torch.equal(alone, fused)


def test_a_write_to_a_cast_of_the_activation_keeps_them_apart():
    program = siblings((16, 16), scheme("mxfp4"))
    x = program.call("to", program.call("float", program.x), torch.bfloat16)
    first = program.call(torch.mul, program.linear(0, x), 1)
    program.call("mul_", x, 3)
    program.graph.output((first, program.call(torch.mul, program.linear(1, x), 1)))
    assert program.passes(fuse=True) == 0


def biased(program: Program, index: int, bias: fx.Node) -> fx.Node:
    return program.call(torch.mul, program.call(F.linear, program.x, program.weights[index], bias), 2)


def bias_of_a_sibling(program: Program, bias: fx.Node) -> list[fx.Node]:
    first = program.linear(0)
    return [first, biased(program, 1, program.call(torch.sum, first, (0, 1)))]


def bias_written_between(program: Program, bias: fx.Node) -> list[fx.Node]:
    bias = program.call(torch.mul, bias, 1)
    first = biased(program, 0, bias)
    program.call("mul_", bias, 2)
    return [first, biased(program, 1, bias)]


def biases_of_two_dtypes(program: Program, bias: fx.Node) -> list[fx.Node]:
    return [biased(program, 0, bias), biased(program, 1, program.input("c", torch.randn(16)))]


@pytest.mark.parametrize("build", [bias_of_a_sibling, bias_written_between, biases_of_two_dtypes])
def test_biases_that_cannot_stand_in_front_keep_them_apart(build):
    program = siblings((16, 16))
    bias = program.input("b", torch.randn(16, dtype=torch.bfloat16))
    program.graph.output(tuple(build(program, bias)))
    assert program.passes(fuse=True) == 0


def test_a_bias_computed_before_is_joined():
    program = siblings((16, 16))
    bias = program.call(torch.mul, program.input("b", torch.randn(16, dtype=torch.bfloat16)), 2)
    program.graph.output((biased(program, 0, bias), program.call(torch.mul, program.linear(1), 2)))
    expected = program.run()
    assert program.passes(fuse=True) == 1
    for got, value in zip(program.run(), expected, strict=True):
        assert torch.equal(got, value)


def targets_behind(program: Program) -> list[Any]:
    """What reads the parts of the fused product."""
    return [user.target for part in program.graph.find_nodes(op="call_function", target=torch.narrow) for user in part.users]


def test_views_of_a_part_become_reshapes_and_the_rest_reads_it_as_it_is():
    program = siblings((16, 32, 16))
    q, k, v = (program.linear(i) for i in range(3))
    heads = program.call("transpose", program.call("view", q, 2, 3, 4, 4), 1, 2)
    flat = program.call(torch.ops.aten.view.default, k, [-1])
    program.graph.output((program.call(torch.mul, heads, 2), program.call(torch.mul, flat, 2), program.call(F.silu, v)))
    expected = program.run()
    assert program.passes(fuse=True) == 1
    assert targets_behind(program) == ["reshape", torch.ops.aten.reshape.default, F.silu]
    for got, value in zip(program.run(), expected, strict=True):
        assert torch.equal(got, value)


@torch.library.custom_op("fxquant_tests::sum_by_pointer", mutates_args=())
def sum_by_pointer(x: Tensor) -> Tensor:
    """An op of another library, which may well ask for contiguous operands."""
    assert x.is_contiguous()
    return x.sum()


@pytest.mark.parametrize(
    "use",
    [
        lambda program, y: y,
        lambda program, y: program.call("transpose", y, 0, 1),
        lambda program, y: program.call("mul_", y, 2),
        lambda program, y: program.call(operator.imul, program.call("view", y, -1), 2),
        lambda program, y: program.call("view", y, torch.int16),
        lambda program, y: program.call(torch.as_strided, y, (4,), (1,)),
        lambda program, y: program.call(torch.ops.fxquant_tests.sum_by_pointer.default, y),
    ],
)
def test_what_looks_at_the_memory_gets_memory_of_its_own(use):
    program = siblings((16, 16))
    program.graph.output((use(program, program.linear(0)), program.call(torch.mul, program.linear(1), 2)))
    expected = program.run()
    assert program.passes(fuse=True) == 1
    assert targets_behind(program) == ["clone", torch.mul]
    got = program.run()
    assert torch.equal(got[0], expected[0])
    assert got[0].untyped_storage().nbytes() == expected[0].untyped_storage().nbytes()


def test_parts_whose_rows_begin_anywhere_get_memory_of_their_own():
    """Kernels that read 16 bytes at once would have to take them apart."""
    program = siblings((16, 12))
    program.graph.output(tuple(program.call(torch.mul, program.linear(i), 2) for i in range(2)))
    assert program.passes(fuse=True) == 1
    assert targets_behind(program) == ["clone", "clone"]


class Attention(nn.Module):
    """q/k/v under other names, a gate that may stay in float, and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = (
            nn.Linear(32, 32),
            nn.Linear(32, 16, bias=False),
            nn.Linear(32, 16),
            nn.Linear(32, 32),
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (part.view(*x.shape[:-1], -1, 16).transpose(-3, -2) for part in (self.a(x), self.b(x), self.c(x)))
        return self.out((a * (b + c)).transpose(-3, -2).reshape(x.shape))


@pytest.mark.parametrize(
    ("config", "products"),
    [({}, 2), ({"ignore": ["*.b"]}, 3), ({"targets": {"*.c": "fp8_per_tensor", "*.[ab]": "fp8_per_channel"}}, 3)],
)
def test_dynamo_graphs(config, products, rewrite_and_run, count_ops):
    """Values of eager; a member that is ignored or of another scheme leaves the group as it is."""
    model = nn.Sequential(Attention())
    fxquant.quantize_(model, None if "targets" in config else "fp8_per_channel", config)
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        expected = model(x)
    got, graph = rewrite_and_run(model, x)
    assert count_ops(graph.gm.graph)["scaled_mm"] == products
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_autocast_and_its_borders(rewrite_and_run, count_ops):
    class Borders(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(32, 32) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                first = self.a(x) * self.b(x)
            return first + self.c(x) * self.d(x)

    model = Borders()
    fxquant.quantize_(model, "fp8_per_channel")
    _, graph = rewrite_and_run(model, torch.randn(2, 32))
    assert count_ops(graph.gm.graph)["scaled_mm"] == 4
