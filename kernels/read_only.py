"""Which arguments an op writes or aliases, and tensors that refuse to be written.

A view of a quantised weight is a view of dequantised values: a write to it would be lost. ``ReadOnlyView`` holds such values
and refuses the write, naming the op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from .errors import UnsupportedError
from .wrapper_tensor import WrapperTensor


def is_composite(func: Any) -> bool:
    """Whether an op is defined by a decomposition into other ops."""
    composite: bool = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return composite


def _bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(schema argument, value) of every argument that was passed."""
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _tensors(value: Any, kind: type) -> list[Any]:
    return [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, kind)]


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any], kind: type) -> list[Any]:
    """The tensors of class ``kind`` that ``func`` writes to, each once."""
    if not func._schema.is_mutable:
        return []
    written = [
        tensor
        for argument, value in _bound(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value, kind)
    ]
    return list({id(tensor): tensor for tensor in written}.values())


def aliased_outputs(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, kind: type) -> Any:
    """``result`` with every output that aliases an argument of class ``kind`` made read-only."""
    aliases = any(argument.alias_info is not None and _tensors(value, kind) for argument, value in _bound(func, args, kwargs))
    return tree_map_only(Tensor, read_only, result) if aliases else result


def read_only(values: Tensor) -> Tensor:
    """``values`` as a tensor that cannot be written; tensors that only exist while tracing are left as they are."""
    if type(values) is not torch.Tensor or isinstance(values, FakeTensor) or torch._C._functorch.maybe_get_level(values) >= 0:
        return values
    return ReadOnlyView(values)


class ReadOnlyView(WrapperTensor):
    """A view of dequantised values. Reads work as ever, a write raises ``UnsupportedError``; ``clone()`` gives a plain copy."""

    plain: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> ReadOnlyView:
        offset = values.storage_offset()
        self = cls.wrap(values.shape, strides=values.stride(), storage_offset=offset, dtype=values.dtype, device=values.device)
        self.plain = values
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            return func.decompose(*args, **kwargs)
        if written_arguments(func, args, kwargs, ReadOnlyView):
            raise UnsupportedError(
                f"{func} would write to a view of a quantised weight, where the write cannot be stored; write to the whole "
                "weight, or take a copy first: w.dequantize() or view.clone()"
            )
        plain_args, plain_kwargs = tree_map_only(ReadOnlyView, lambda t: t.plain, (args, kwargs))
        return aliased_outputs(func, args, kwargs, func(*plain_args, **plain_kwargs), ReadOnlyView)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReadOnlyView({self.plain!r})"

    def parts(self) -> list[Tensor]:
        return [self.plain]

    def plain_copy(self) -> Tensor:
        return self.plain.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain_copy().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy: Tensor = memo.setdefault(id(self), self.plain_copy())
        return copy
