"""Tensors that wrap others and own no storage, so that nothing may be read through their data pointer, which is null."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor


class WrapperTensor(torch.Tensor):
    """What torch would read or move by pointer is answered from the wrapped tensors, or from a copy of the values."""

    @classmethod
    def wrap(cls, shape: Sequence[int], **properties: Any) -> Self:
        """A tensor without storage; ``properties`` are strides, dtype, device, ..."""
        with torch.inference_mode(False):  # a view of a normal tensor must be a normal one, in inference mode too
            wrapper: Self = torch.Tensor._make_wrapper_subclass(cls, shape, requires_grad=False, **properties)
        return wrapper

    def parts(self) -> list[Tensor]:
        """The wrapped tensors."""
        raise NotImplementedError

    def plain_copy(self) -> Tensor:
        """A copy of the values as a plain tensor."""
        raise NotImplementedError

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain_copy().numpy(force=force)

    def tolist(self) -> Any:
        return self.plain_copy().tolist()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.plain_copy().__dlpack__(**kwargs)

    def share_memory_(self) -> Self:
        for part in self.parts():
            part.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        return all(part.is_shared() for part in self.parts())  # type: ignore[no-untyped-call]
