"""``QuantizedTensor``: a weight that is stored quantised and looks like the float tensor it came from.

It has the original's shape, logical dtype and device; the values live in its components. Ops fall into four classes:

* products with the contraction dimension where the format has it (linear, mm, addmm, bmm, grouped_mm) run on the quantised
  operands;
* moves (clone, ``.to``, ``copy_`` from its like, t, expand) and the choice of experts act on the components;
* an op that writes to it runs on dequantised values, which are quantised again and stored - or it is refused by name;
* everything else dequantises. The result of a view op is read-only: a write to it could not reach the stored weight.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from .errors import UnsupportedError
from .formats import Scheme, defined_activations, weight_format_named
from .read_only import aliased_outputs, is_composite, written_arguments
from .weight_spec import WeightSpec, dequantized, grouped, linear, quantized_components
from .wrapper_tensor import WrapperTensor

if TYPE_CHECKING:
    from .pack import Pack

aten = torch.ops.aten
log = logging.getLogger("fxquant")


_SPECS: dict[WeightSpec, WeightSpec] = {}
"""One object for equal specs, so that they compare by identity."""


class QuantizedTensor(WrapperTensor):
    """A quantised matrix, or a stack of experts' matrices, with the interface of a float tensor.

    Args:
        components: stored tensors in the order of ``spec.scheme.weight.components``: qdata (N, K), scale, ...; with a leading
            dimension where the weight is a stack of experts.
        spec: formats, logical shape and dtype.
        stride: strides that the tensor reports; contiguous where None.
    """

    record: tuple[Any, ...]
    """(spec, *components): everything that the tensor holds. One attribute, so that a compiled call reads one per weight."""

    pack: Pack | None = None
    """The stack of weights whose memory the components are views of, where a compiled graph reads them together."""

    @staticmethod
    def __new__(cls, components: Sequence[Tensor], spec: WeightSpec, stride: Sequence[int] | None = None) -> QuantizedTensor:
        self = cls.wrap(spec.shape, strides=stride, dtype=spec.dtype, device=components[0].device)
        self._hold(components, spec)
        return self

    def _hold(self, components: Sequence[Tensor], spec: WeightSpec) -> None:
        expected = spec.scheme.weight.components
        if len(components) != len(expected):
            raise ValueError(f"{spec.scheme.weight.name} has the components {expected}, got {len(components)} tensors")
        self.record = (_SPECS.setdefault(spec, spec), *components)
        self.pack = None

    @property
    def spec(self) -> WeightSpec:
        return cast(WeightSpec, self.record[0])

    @property
    def qdata(self) -> Tensor:
        return cast(Tensor, self.record[1])

    @property
    def scale(self) -> Tensor:
        return cast(Tensor, self.record[2])

    @property
    def global_scale(self) -> Tensor:
        return self._component("global_scale")

    @property
    def zero_point(self) -> Tensor:
        return self._component("zero_point")

    @property
    def group_index(self) -> Tensor:
        return self._component("group_index")

    def _component(self, name: str) -> Tensor:
        return self.components[self.spec.scheme.weight.components.index(name)]

    @classmethod
    def from_float(
        cls,
        weight: Tensor,
        scheme: Scheme,
        *,
        contraction: int = -1,
        shards: Sequence[int] = (),
        interleaved: bool = False,
        backend: str = "auto",
        reduce_amax: Callable[[Tensor], Tensor] | None = None,
    ) -> QuantizedTensor:
        """Quantise a float matrix, or a stack of experts' matrices.

        Args:
            weight: (N, K), or (K, N) with ``contraction=-2``; a float dtype; experts stand in a third dimension before these.
            scheme: weight format, and the activation format that products will use.
            contraction: the contracted dimension of ``weight``.
            shards: rows of the matrices that each matrix is stacked of; see ``WeightSpec``.
            interleaved: whether its rows take turns between the shards.
            backend: kernel family that products use.
            reduce_amax: see ``numerics.quantize``.

        Raises:
            UnsupportedError: the weight holds NaN or infinity, or is no float matrix or stack of them, or the scheme's weight
                format holds no weights, or its product is not defined.
        """
        weight_format_named(scheme.weight.name)
        empty_stack = weight.dim() == 3 and weight.shape[0] == 0
        if weight.dim() not in (2, 3) or empty_stack or not weight.is_floating_point():
            raise UnsupportedError(
                f"a quantised weight is a float matrix or a stack of them, got shape {tuple(weight.shape)} of {weight.dtype}"
            )
        if not scheme.defined:
            raise UnsupportedError(
                f"no product of {scheme} is defined; {scheme.weight.name} takes none or "
                f"{', '.join(defined_activations(scheme.weight))}"
            )
        rows, columns = weight.shape[-2:] if contraction == -1 else weight.shape[:-3:-1]
        if shards and (sum(shards) != rows or (interleaved and len(set(shards)) > 1)):
            raise UnsupportedError(
                f"shards {tuple(shards)} do not make up the {rows} rows of a weight of {tuple(weight.shape)}"
            )
        spec = WeightSpec(
            scheme=scheme,
            rows=rows,
            columns=columns,
            dtype=weight.dtype,
            contraction=contraction,
            experts=weight.shape[0] if weight.dim() == 3 else 0,
            shards=tuple(shards) if len(shards) > 1 else (),
            interleaved=interleaved and len(shards) > 1,
            backend=backend,
        )
        with torch.inference_mode(False), torch.no_grad():  # a weight made in inference mode can be written outside of it
            return cls(quantized_components(weight, spec, reduce_amax), spec)

    @property
    def components(self) -> list[Tensor]:
        """The stored tensors, qdata first."""
        return list(self.record[1:])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """The float values, (shape of self), computed in float32 and rounded once to ``dtype`` (default: the logical dtype)."""
        values = dequantized(self.components, self.spec, dtype or self.spec.dtype)
        if values.stride() == self.stride():
            return values
        return values.contiguous() if self.is_contiguous() else values.mT.contiguous().mT

    def with_components(
        self, components: Sequence[Tensor], *, stride: Sequence[int] | None = None, **changes: Any
    ) -> QuantizedTensor:
        """The same kind of tensor over other components; ``changes`` are fields of the spec."""
        spec = replace(self.spec, **changes) if changes else self.spec
        return QuantizedTensor(components, spec, self.stride() if stride is None and not changes else stride)

    @property
    def stored_nbytes(self) -> int:
        """Bytes of the components."""
        return sum(component.numel() * component.itemsize for component in self.components)

    # -- torch protocols ------------------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], WeightSpec]:
        return list(self.spec.scheme.weight.components), self.spec

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], spec: WeightSpec, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> QuantizedTensor:
        return QuantizedTensor([inner[name] for name in spec.scheme.weight.components], spec, outer_stride)

    def _stable_hash_for_caching(self) -> str:
        """What AOTAutograd's cache asks of a subclass, for models that are compiled with plain Inductor."""
        return repr(self.spec)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func) or _HANDLERS_BY_NAME.get(func.name())
        if handler is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        written = written_arguments(func, args, kwargs, QuantizedTensor)
        if written and func.overloadpacket in _REFUSED:
            raise UnsupportedError(
                f"{func} would change the storage of a quantised weight ({written[0]!r}); dequantise it first: w.dequantize()"
            )
        if written:
            return _write_through(func, args, kwargs, written)
        if is_composite(func):  # inference mode hands these over whole: take them apart as other modes do
            return func.decompose(*args, **kwargs)
        result = func(*_dequantized_tree(args), **_dequantized_tree(kwargs))
        return aliased_outputs(func, args, kwargs, result, QuantizedTensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) not in memo:
            components = [c.clone() if _is_part(c) else copy.deepcopy(c, memo) for c in self.components]
            memo[id(self)] = copied = QuantizedTensor(components, self.spec, self.stride())
            others = {name: value for name, value in self.__dict__.items() if name not in ("record", "pack")}
            copied.__dict__.update(copy.deepcopy(others, memo))
        return cast(QuantizedTensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Alone, not with the pack. torch cannot pickle a float8 Parameter; the raw bytes travel as uint8.
        own = [c.clone() if _is_part(c) else c for c in self.components]
        raw = [c.view(torch.uint8) if c.dtype.itemsize == 1 else c for c in own]
        return rebuild_quantized_tensor, (raw, self.spec.to_dict(), self.stride(), isinstance(self, torch.nn.Parameter))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec = self.spec
        return f"QuantizedTensor({spec.scheme}, shape={tuple(self.shape)}, dtype={spec.dtype}, device={self.device})"

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """As for any tensor, ``value`` takes the place of what was there, dtype and device too; floats are quantised first."""
        if value.shape != self.shape or self.spec.leading or not value.is_floating_point():
            raise UnsupportedError(
                f"the data of a quantised weight of shape {tuple(self.shape)} can be replaced by floats of that shape, not by "
                f"{tuple(value.shape)} of {value.dtype}"
            )
        if not isinstance(value, QuantizedTensor):
            spec = replace(self.spec, dtype=value.dtype)
            value = QuantizedTensor(quantized_components(value.detach(), spec), spec)
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._hold(value.components, value.spec)

    def parts(self) -> list[Tensor]:
        return self.components

    def plain_copy(self) -> Tensor:
        return self.dequantize()


def rebuild_quantized_tensor(
    raw: list[Tensor],
    fields: dict[str, Any],
    stride: tuple[int, ...],
    is_parameter: bool,
) -> Tensor:
    """Inverse of ``QuantizedTensor.__reduce_ex__``; listed as a safe global for ``torch.load(weights_only=True)``."""
    spec = WeightSpec.from_dict(fields)
    weight = spec.scheme.weight
    dtypes = {"qdata": weight.qdata_dtype, "scale": weight.scale_dtype}
    components = [part.view(dtypes.get(name, part.dtype)) for name, part in zip(weight.components, raw, strict=True)]
    tensor = QuantizedTensor(components, spec, stride)
    return torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


torch.serialization.add_safe_globals([rebuild_quantized_tensor])


def _is_part(component: Tensor) -> bool:
    """Whether the memory holds more than this."""
    return component.untyped_storage().nbytes() > component.numel() * component.itemsize


def _dequantized_tree(tree: Any) -> Any:
    return tree_map_only(QuantizedTensor, lambda t: t.dequantize(), tree)


def _write_through(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[QuantizedTensor]) -> Any:
    """Run a mutating op on dequantised copies, then quantise what it wrote and store it."""
    for original in written:
        if original.spec.leading:
            raise UnsupportedError(
                f"{func} would write to a quantised weight through an expanded view of shape {tuple(original.shape)}; write to "
                "the weight itself, or take a copy first: w.dequantize()"
            )
    copies = {id(t): t.dequantize() for t in written}
    originals = {id(copies[id(t)]): t for t in written}
    leaves, treespec = tree_flatten((args, kwargs))
    leaves = [copies.get(id(t), t) for t in leaves]
    new_args, new_kwargs = _dequantized_tree(tree_unflatten(leaves, treespec))
    result = func(*new_args, **new_kwargs)
    for original in written:
        values = copies[id(original)]
        if values.shape != original.shape:
            raise UnsupportedError(
                f"{func} would turn a quantised weight of shape {tuple(original.shape)} into {tuple(values.shape)} in place; "
                "dequantise it first: w.dequantize()"
            )
    stored = [quantized_components(copies[id(t)], t.spec) for t in written]
    for original, components in zip(written, stored, strict=True):
        for destination, source in zip(original.components, components, strict=True):
            destination.copy_(source)
    return tree_map_only(Tensor, lambda t: originals.get(id(t), t), result)


# -- ops that act on the components ---------------------------------------------------------------------------------------


def _alias(func: Any, self: QuantizedTensor) -> QuantizedTensor:
    return self.with_components([func(c) for c in self.components])


def _same(func: Any, self: QuantizedTensor) -> QuantizedTensor:
    return self


def _clone(func: Any, self: QuantizedTensor, *, memory_format: Any = None) -> QuantizedTensor:
    stride = None if memory_format == torch.contiguous_format else self.stride()
    return self.with_components([c.clone() for c in self.components], stride=stride, leading=self.spec.leading)


def _to_copy(func: Any, self: QuantizedTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    dtype = dtype or self.spec.dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return NotImplemented
    kwargs.pop("memory_format", None)
    return self.with_components([func(c, **kwargs) for c in self.components], stride=self.stride(), dtype=dtype)


def _on_components(func: Any, self: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    return self.with_components([func(c, *args, **kwargs) for c in self.components])


def _empty_like(func: Any, self: QuantizedTensor, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    if dtype not in (None, self.spec.dtype):
        return NotImplemented
    # zeros, as stray bytes may stand for NaN, which no later write to a part of the weight could take away; zeros divided by 1
    filled = [
        torch.ones_like(c, device=device) if name == "global_scale" else torch.zeros_like(c, device=device)
        for name, c in zip(self.spec.scheme.weight.components, self.components, strict=True)
    ]
    return self.with_components(filled)


def _copy_(func: Any, self: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(self, QuantizedTensor) or self.spec.leading:
        return NotImplemented
    if isinstance(source, QuantizedTensor) and _same_storage(source.spec, self.spec):
        components = source.components
    else:
        values = source.dequantize() if isinstance(source, QuantizedTensor) else source
        values = values.to(device=self.device, dtype=self.spec.dtype).expand(self.shape)
        components = quantized_components(values, self.spec)
    for destination, part in zip(self.components, components, strict=True):
        destination.copy_(part, non_blocking)
    return self


def _same_storage(one: WeightSpec, other: WeightSpec) -> bool:
    """Whether equal components stand for equal values, up to the logical dtype."""
    alike = replace(other, scheme=one.scheme, dtype=one.dtype, backend=one.backend)
    return one.scheme.weight == other.scheme.weight and one == alike


def _from_front(dim: int, self: QuantizedTensor) -> int:
    """A dimension without a sign. One that does not exist stays as it is, and is left to torch's own error."""
    return dim + self.dim() if -self.dim() <= dim < 0 else dim


def _transpose(func: Any, self: QuantizedTensor, dim0: int = 0, dim1: int = 1) -> Any:
    last = self.dim() - 1
    if self.spec.leading or {_from_front(dim0, self), _from_front(dim1, self)} != {last - 1, last}:
        return NotImplemented
    *batch, rows, columns = self.stride()
    return QuantizedTensor(self.components, self.spec.transposed(), (*batch, columns, rows))


def _permute(func: Any, self: QuantizedTensor, dims: Sequence[int]) -> Any:
    order = [_from_front(dim, self) for dim in dims]
    last = self.dim() - 1
    if order != [*range(last - 1), last, last - 1]:
        return NotImplemented
    return _transpose(func, self, last - 1, last)


def _select(func: Any, self: QuantizedTensor, dim: int, index: int) -> Any:
    """One expert's matrix."""
    if not self.spec.experts or _from_front(dim, self) != 0:
        return NotImplemented
    return self.with_components([func(c, 0, index) for c in self.components], stride=self.stride()[1:], experts=0)


def _unbind(func: Any, self: QuantizedTensor, dim: int = 0) -> Any:
    if not self.spec.experts or _from_front(dim, self) != 0:
        return NotImplemented
    return [_select(aten.select.int, self, 0, index) for index in range(self.spec.experts)]


def _index(func: Any, self: QuantizedTensor, indices: Sequence[Tensor | None]) -> Any:
    """The matrices of the experts in a list of numbers, or of one."""
    if not self.spec.experts or len(indices) != 1 or indices[0] is None:
        return NotImplemented
    index, count = indices[0], indices[0].numel()
    if index.dim() > 1 or index.dtype not in (torch.int32, torch.int64) or not isinstance(count, int) or count == 0:
        return NotImplemented  # with a number of experts that only the run knows there is no spec
    taken = [func(c.view(torch.uint8) if c.itemsize == 1 else c, [index]).view(c.dtype) for c in self.components]
    return self.with_components(taken, experts=count if index.dim() else 0)


def _expand(func: Any, self: QuantizedTensor, size: Sequence[int], *, implicit: bool = False) -> Any:
    if tuple(size) == tuple(self.shape):
        return _alias(aten.alias.default, self)
    # torch.matmul spreads a 2-D weight over the batch of a non-contiguous activation this way
    if self.spec.leading or self.spec.experts or tuple(size[-2:]) not in ((-1, -1), tuple(self.shape)) or -1 in size[:-2]:
        return NotImplemented
    leading = tuple(size[:-2])
    return self.with_components(self.components, leading=leading, stride=(0,) * len(leading) + self.stride())


def _view(func: Any, self: QuantizedTensor, size: Sequence[int]) -> Any:
    if tuple(size) == tuple(self.shape):
        return _alias(aten.alias.default, self)
    if not self.spec.leading or tuple(size[-2:]) != tuple(self.shape[-2:]) or -1 in size:
        return NotImplemented
    return self.with_components(self.components, leading=tuple(size[:-2]))


def _linear(func: Any, x: Any, weight: Any, bias: Tensor | None = None) -> Any:
    if not _is_product(x, weight, contraction=-1) or weight.spec.experts:
        return NotImplemented
    return linear(x, weight.components, weight.spec, bias, x.dtype)


def _matmul(func: Any, x: Any, weight: Any) -> Any:
    if not _is_product(x, weight, contraction=-2) or weight.spec.experts:
        return NotImplemented
    return linear(x, weight.components, weight.spec, None, x.dtype)


def _addmm(func: Any, bias: Tensor, x: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if beta != 1 or alpha != 1 or bias.dim() != 1 or not _is_product(x, weight, contraction=-2):
        return NotImplemented
    return linear(x, weight.components, weight.spec, bias, x.dtype)


def _bmm(func: Any, left: Any, right: Any) -> Any:
    if isinstance(left, QuantizedTensor) and not isinstance(right, QuantizedTensor):  # w @ x = (x.T @ w.T).T
        result = _bmm(func, right.mT, _transpose(func, left, 1, 2))
        return result if result is NotImplemented else result.mT.contiguous()
    if not _is_product(left, right, contraction=-2):
        return NotImplemented
    if not right.spec.experts:
        return linear(left, right.components, right.spec, None, left.dtype)
    return grouped(left, right.components, right.spec, left.dtype)


def _baddbmm(func: Any, bias: Tensor, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = _bmm(func, left, right) if beta == alpha == 1 else NotImplemented
    return product if product is NotImplemented else bias + product


def _grouped_mm(func: Any, x: Any, weight: Any, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Any:
    if not _is_product(x, weight, contraction=-2) or not weight.spec.experts or bias is not None:
        return NotImplemented
    if (x.dim() == 2) != (offs is not None):
        return NotImplemented
    return grouped(x, weight.components, weight.spec, out_dtype or x.dtype, offs=offs)


@functools.cache
def _say_other_dimension(spec: WeightSpec) -> None:
    log.warning(
        "experts of shape %s are multiplied along another dimension than they are quantised along, and so are dequantised in "
        "every call; a module of experts with weights [E, K, N] says so with an attribute is_transposed = True",
        spec.shape,
    )


def _is_product(x: Any, weight: Any, *, contraction: int) -> bool:
    """Whether x @ weight (in the op's layout) contracts the weight along its quantised dimension."""
    if not isinstance(weight, QuantizedTensor) or isinstance(x, QuantizedTensor):
        return False
    spec = weight.spec
    if spec.experts and spec.contraction != contraction and x.shape[-1] == weight.shape[contraction]:
        _say_other_dimension(spec)
    if spec.contraction != contraction or x.dtype != spec.dtype or x.shape[-1] != spec.columns:
        return False  # dequantised, torch's own error says what does not fit
    batch = spec.leading[:1] or ((spec.experts,) if spec.experts and x.dim() == 3 else ())
    return not batch or (x.dim() == 3 and x.shape[0] == batch[0])


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.detach_.default: _same,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten._pin_memory.default: _on_components,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy_,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.index.Tensor: _index,
    aten.expand.default: _expand,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.bmm.default: _bmm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten._grouped_mm.default: _grouped_mm,
}

_HANDLERS_BY_NAME = {"transformers::grouped_mm_fallback": _grouped_mm}
"""Ops of other libraries."""

_REFUSED = {
    aten.set_,
    aten.resize_,
    aten.resize_as_,
    aten.as_strided_,
    aten.resize_as_sparse_,
    aten._resize_output_,
    aten.set_data,
}
