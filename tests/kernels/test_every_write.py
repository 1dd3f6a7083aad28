"""Every aten overload that writes to or aliases an argument, with a quantised weight in that argument's place.

The walk takes the overloads from torch's own schemas and makes up arguments by name and type until the op runs on a plain
twin of the weight. Then the weight takes the twin's place, and must end up as the quantised value of the twin, or the op must
raise ``UnsupportedError`` and leave the weight as it was. Where the op returns a view, the view is written: the write must
arrive at the weight as it arrives at the twin, or be refused.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fxquant.kernels.errors import UnsupportedError
from fxquant.kernels.formats import FORMATS, Scheme
from fxquant.kernels.quantized_tensor import QuantizedTensor
from fxquant.kernels.read_only import is_composite

pytestmark = pytest.mark.filterwarnings("ignore")

N = 16
TENSOR_TYPES = ("Tensor", "Optional[Tensor]", "List[Tensor]", "Optional[List[Tensor]]", "List[Optional[Tensor]]")
TRIES = 24

CRASHES = ("_batch_norm_no_update", "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit")
"""Segmentation faults in torch itself, on plain tensors, with arguments that are made up."""

UNSPECIFIED = (
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    *("_pdist_backward", "_weight_norm_interface", "_weight_norm_interface_backward"),
)
"""Their result is whatever the memory held, with arguments that are made up for the last three: a twin's says nothing."""

BEHIND_DISPATCH = ("set_data",)
"""The C++ half of the setter of ``Tensor.data``: it swaps the tensor's implementation before any dispatch. Python's half is
overridden (``test_quantized_tensor.py`` has its tests); inference mode, where the op is dispatched, refuses it."""

NEEDLESSLY_REFUSED = ("set_", "resize_", "resize_as_", "as_strided_", "fill_diagonal_", "linalg_matrix_rank", "rand", "randn")
"""Refused though the weight could have stored the outcome: they resize it to the size it has, or write through a view of it."""

# -- arguments ------------------------------------------------------------------------------------------------------------


def random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) * 0.5 + 0.2


def matrix() -> Tensor:
    """Positive, well conditioned: inside the domain of most functions."""
    return random(N, N) + torch.eye(N)


def initial() -> Tensor:
    """What the weight holds before the op; no op's made-up arguments hold the same."""
    return (matrix() * 1.4 + 0.1).t().contiguous()


def matrix_of_indices() -> Tensor:
    return torch.arange(N * N).reshape(N, N) % N


VECTOR, SCALAR, MASK, INDICES = random(N), torch.tensor(0.5), random(N, N) > 0.4, torch.arange(N)
TENSORS: dict[str, list[Any]] = {
    **{name: [MASK] for name in ("mask", "condition")},
    **{name: [INDICES, matrix_of_indices()] for name in ("index", "indices")},
    **{name: [VECTOR, matrix()] for name in ("vec", "vec1", "vec2", "tensor", "tau", "input2")},
    **{name: [random(1, N, N), random(2, N, N)] for name in ("batch1", "batch2")},
    **{name: [SCALAR, VECTOR, matrix()] for name in ("lr", "found_inf", "inv_scale", "end", "scale", "zero_point")},
    **{name: [torch.arange(1, N + 1, dtype=torch.int32)] for name in ("pivots", "LU_pivots")},
    **{name: [torch.tensor(0, dtype=torch.int32)] for name in ("info", "infos")},
    **{name: [matrix(), VECTOR, SCALAR] for name in ("values", "source", "src")},
    "max_exp_avg_sqs": [],
    "state_steps": [SCALAR],
    "scalars": [VECTOR[:1]],
    "p": [random(N, N)],
    "tensor_indices_or_sections": [torch.tensor([3, 5])],
    "start": [torch.tensor(1), SCALAR],
    "target": [matrix(), matrix_of_indices(), INDICES],
    "value": [SCALAR, matrix()],
}
FALLBACK_TENSORS: list[Any] = [matrix(), matrix_of_indices(), random(2, N, N), VECTOR, MASK, random(2, N, N, N), SCALAR]
NUMBERS: dict[str, list[Any]] = {
    "size": [[N, N], [N * N], [2, N // 2, N]],
    "stride": [[N, 1], [1]],
    "dim": [[0], [0, 1]],
    "dims": [[1, 0], [0], [0, 1]],
    "split_size": [[N // 2, N // 2]],
    "split_sizes": [[N // 2, N // 2]],
    "sizes": [[2, N // 2]],
    "indices": [[1, 3], [1]],
    "input_shape": [[N, N]],
    "shape": [[N * N]],
    "kernel_size": [[2], [2, 2]],
    "output_size": [[4], [4, 4]],
    "padding": [[1], [1, 1], [1, 1, 1, 1]],
}
STRINGS = {"rounding_mode": ["floor"], "reduce": ["sum", "mean", "add"], "mode": ["reduced"], "UPLO": ["L"], "side": ["left"]}


def choices(argument: Any) -> list[Any]:
    kind, name = str(argument.type), argument.name
    if name in ("min", "max") and kind.startswith("Optional"):
        return [SCALAR if "Tensor" in kind else 0.5]
    if argument.has_default_value():
        return [argument.default_value]
    if kind == "Tensor":
        return TENSORS.get(name, FALLBACK_TENSORS)
    if kind == "List[Tensor]":
        return [[tensor] for tensor in TENSORS.get(name, [matrix(), INDICES, VECTOR])] or [[]]
    if kind == "List[Optional[Tensor]]":
        return [[INDICES], [MASK]]
    if kind.startswith("Optional"):
        return [None]
    simple = {"number": [0.5, 1], "float": [0.5], "int": [0, 1, 2], "bool": [False], "Device": [torch.device("cpu")]}
    simple["Storage"] = [matrix().untyped_storage()]
    lists = {"List[int]": NUMBERS.get(name, [[0], [1], [2], [1, 1]]), "List[number]": [[0.5]], "List[bool]": [[True] * 2]}
    return {**simple, **lists, "str": STRINGS.get(name, ["none", "sum"])}.get(kind, [])


@dataclass(frozen=True)
class Call:
    """An op, the argument that the weight takes, and the others."""

    op: Any
    role: int
    values: tuple[Any, ...]

    @property
    def name(self) -> str:
        return f"{self.op}({self.argument.name}=weight)"

    @property
    def argument(self) -> Any:
        return self.op._schema.arguments[self.role]

    @property
    def writes(self) -> bool:
        return bool(self.argument.alias_info.is_write)

    def __call__(self, weight: Tensor) -> Any:
        args, kwargs = [], {}
        for index, (argument, value) in enumerate(zip(self.op._schema.arguments, self.values, strict=True)):
            if index == self.role:
                value = [weight] if "List" in str(argument.type) else weight
            elif isinstance(value, Tensor):
                value = value.clone()
            elif isinstance(value, list):
                value = [item.clone() if isinstance(item, Tensor) else item for item in value]
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        torch.manual_seed(0)
        return self.op(*args, **kwargs)


def overloads() -> Iterator[tuple[Any, int]]:
    """Every aten overload with each tensor argument that it writes to or aliases."""
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        if name != schema.name and name not in (*CRASHES, *UNSPECIFIED, *BEHIND_DISPATCH):
            for role, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and str(argument.type) in TENSOR_TYPES:
                    yield getattr(getattr(torch.ops.aten, name), schema.overload_name or "default"), role


def find_call(op: Any, role: int) -> Call | str:
    """Arguments with which the op runs on a plain matrix, or the last error."""
    error = "no argument of this type can be made up"
    arguments = op._schema.arguments
    pools = [[None] if index == role else choices(argument) for index, argument in enumerate(arguments)]
    for values in itertools.islice(itertools.product(*pools), TRIES):
        call = Call(op, role, values)
        try:
            call(initial())
        except NotImplementedError as caught:
            return str(caught)
        except (RuntimeError, ValueError, TypeError, IndexError) as caught:
            error = str(caught)
        else:
            return call
    return error


@pytest.fixture(scope="module")
def found() -> tuple[list[Call], dict[str, str]]:
    """The calls, and by op and argument the reason why there is none."""
    calls, failures = [], {}
    with torch.no_grad():
        for op, role in overloads():
            result = find_call(op, role)
            if isinstance(result, Call):
                calls.append(result)
            else:
                failures[f"{op}({op._schema.arguments[role].name}=weight)"] = result
    return calls, failures


# -- the walk -------------------------------------------------------------------------------------------------------------


def leaves(result: Any) -> list[Tensor]:
    items = result if isinstance(result, (list, tuple)) else [result]
    return [item for item in items if isinstance(item, Tensor)]


STEPS = {"e4m3": (1 / 7, 1 / 448), "e2m1": (1 / 2, 1 / 6), "int8": (0.0, 1 / 63)}
"""Distance to the next number: a share of the magnitude, or of the largest."""


def same_weight(values: Tensor, twin: Tensor, quantise: Callable[[Tensor], QuantizedTensor], op: Any) -> bool:
    """Whether ``values`` are the twin's, quantised.

    A few elements may be the next number, as decompositions of a matrix do not repeat to the last bit. An op that is made of
    others, in ATen or in TorchScript, may write in two steps, and so round twice.
    """
    quantised = quantise(twin)
    expected = quantised.dequantize()
    relative, absolute = STEPS[quantised.spec.scheme.weight.element]
    step = expected.abs() * relative + twin.abs().max() * absolute
    error = (values - expected).abs()
    if not torch._C._dispatch_has_kernel(op.name()) or is_composite(op):
        return bool((error <= step).all()) and bool(error.norm() <= expected.norm() / 4)
    equal = error <= expected.abs() * 1e-5 + 1e-6
    return bool((equal | (error <= step)).all()) and int((~equal).sum()) < N


def check(call: Call, quantise: Callable[[Tensor], QuantizedTensor], values: Tensor) -> str:
    """What happened to a weight in this call; raises AssertionError where a write was lost or went wrong."""
    weight = quantise(values)
    before = weight.dequantize()
    twin = before.clone()
    expected = call(twin)
    storable = twin.shape == before.shape and twin.dtype == before.dtype and bool(twin.isfinite().all())
    try:
        result = call(weight)
    except UnsupportedError:
        assert torch.equal(weight.dequantize(), before), "refused, yet changed"
        assert not storable or call.op._schema.name.removeprefix("aten::") in NEEDLESSLY_REFUSED, "refused without need"
        return "refused"
    after = weight.dequantize()
    if call.writes:
        assert storable, "neither stored nor refused"
        assert same_weight(after, twin, quantise, call.op), "the write was lost or is wrong"
        return "written" if not torch.equal(after, before) else "written, same value"
    assert torch.equal(after, before), "changed by an op that writes nothing"
    return check_view(weight, twin, leaves(result), leaves(expected), quantise)


def check_view(
    weight: QuantizedTensor, twin: Tensor, results: list[Tensor], expected: list[Tensor], quantise: Callable[..., Any]
) -> str:
    assert len(results) == len(expected)
    outcome = "no view"
    for view, twin_view in zip(results, expected, strict=True):
        assert view.shape == twin_view.shape
        assert view.dtype == twin_view.dtype
        assert torch.equal(view.clone(), twin_view)
        before, twin_before = weight.dequantize(), twin.clone()
        twin_view.fill_(0.25)
        try:
            view.fill_(0.25)
        except UnsupportedError:
            assert torch.equal(weight.dequantize(), before), "refused, yet changed"
            twin.copy_(twin_before)
            outcome = "view refuses"
        else:
            assert same_weight(weight.dequantize(), twin, quantise, torch.ops.aten.fill_.Scalar), "a write to the view was lost"
            outcome = "view written" if not torch.equal(twin, twin_before) else "a copy"
    return outcome


def walk(calls: list[Call], weight_format: str, values: Callable[[], Tensor] = initial, **keywords: Any) -> Counter[str]:
    """How often each outcome came; fails with the list of calls that went wrong."""

    def quantise(floats: Tensor) -> QuantizedTensor:
        return QuantizedTensor.from_float(floats, Scheme(weight=FORMATS[weight_format]), **keywords)

    outcomes: Counter[str] = Counter()
    wrong = []
    for call in calls:
        try:
            outcomes[check(call, quantise, values())] += 1
        except Exception as error:
            wrong.append(f"{call.name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    assert not wrong, "\n".join(wrong)
    return outcomes


@pytest.mark.parametrize(
    ("weight_format", "keywords", "mode"),
    [
        ("fp8_per_channel_static", {}, torch.no_grad),
        ("fp8_per_tensor_static", {"shards": (4, 12)}, torch.inference_mode),
        ("fp8_per_block_static", {"contraction": -2}, contextlib.nullcontext),
        ("mxfp4", {"contraction": -2, "shards": (8, 8), "interleaved": True}, torch.no_grad),
        ("nvfp4", {"shards": (4, 12)}, torch.no_grad),
        ("int8_per_channel_static", {}, torch.inference_mode),
    ],
)
def test_no_write_is_lost(found, weight_format, keywords, mode):
    with mode():
        outcomes = walk(found[0], weight_format, **keywords)
    assert outcomes["written"] > 780, outcomes
    assert outcomes["view refuses"] > 40, outcomes
    assert outcomes["view written"] > 25, outcomes


OUT_OF_BOUNDS = ("_fused_", "_pad", "_cummax_helper", "_cummin_helper")
"""Ops that write beyond the memory of tensors of other shapes than they think, plain ones too."""


def stacked() -> Tensor:
    return torch.stack([initial(), initial() * 2])


@pytest.fixture(scope="module")
def found_for_stacks(found) -> list[Call]:
    """The calls that also take a stack of two matrices where they took one, and leave its shape."""
    calls = []
    with torch.no_grad():
        for call in found[0]:
            if not any(part in call.name for part in OUT_OF_BOUNDS):
                twin = stacked()
                with contextlib.suppress(RuntimeError, ValueError, TypeError, IndexError):
                    call(twin)
                    calls.extend([call] if twin.shape == (2, N, N) else [])
    return calls


@pytest.mark.parametrize(
    ("weight_format", "keywords", "mode"),
    [
        ("mxfp8", {"shards": (4, 12)}, torch.no_grad),
        ("mxfp4", {"contraction": -2, "shards": (8, 8), "interleaved": True}, torch.inference_mode),
        ("nvfp4", {"shards": (4, 12)}, contextlib.nullcontext),
        ("fp8_per_tensor_static", {"contraction": -2}, torch.no_grad),
    ],
)
def test_no_write_to_a_stack_of_experts_is_lost(found_for_stacks, weight_format, keywords, mode):
    with mode():
        outcomes = walk(found_for_stacks, weight_format, stacked, **keywords)
    assert outcomes["written"] > 220, outcomes
    assert outcomes["view refuses"] > 30, outcomes
    assert outcomes["view written"] > 25, outcomes


IMPOSSIBLE = (
    "Could not run",  # sparse, nested, mkldnn and CUDA kernels only
    "not implemented for 'Float'",
    "sparse",
    "[cC]omplex",
    "Long|Double",  # the op's own dtype
    "dimension|dim|vector expected|1-element|tensor size|one value",  # not for a matrix
    "CUDA|cuda|accelerator|no argument of this type",  # a stream
    "requires_grad|level",
)


def test_the_walk_is_wide(found):
    """Enough overloads were called; those that take the weight first and were not cannot take a float matrix on a CPU."""
    calls, failures = found
    assert len(calls) > 1150, len(calls)
    by_first_argument = {call.op for call in calls if call.role == 0}
    assert len(by_first_argument) > 380, len(by_first_argument)
    not_called = {name: reason for name, reason in failures.items() if name.endswith(("(self=weight)", "(primal=weight)"))}
    assert len(not_called) < 90, len(not_called)
    unexplained = {n: r.splitlines()[0] for n, r in not_called.items() if not any(re.search(why, r) for why in IMPOSSIBLE)}
    assert not unexplained


def test_the_setter_of_data_is_refused_where_it_is_dispatched():
    weight = QuantizedTensor.from_float(matrix(), Scheme(weight=FORMATS["fp8_per_channel_static"]))
    with torch.inference_mode(), pytest.raises(UnsupportedError, match="set_data"):
        torch.ops.aten.set_data(weight, torch.zeros(N, N))
