"""A tensor without storage answers from what it wraps: to numpy, lists, DLPack and other processes, in every grad mode."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch import Tensor

from fxquant.kernels.wrapper_tensor import WrapperTensor


class Doubled(WrapperTensor):
    """Twice the tensor that it wraps."""

    half: Tensor

    @staticmethod
    def __new__(cls, half: Tensor) -> Doubled:
        self = cls.wrap(half.shape, strides=half.stride(), dtype=half.dtype, device=half.device)
        self.half = half
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.t.default:
            return Doubled(args[0].half.t())
        if func is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(func)

    def parts(self) -> list[Tensor]:
        return [self.half]

    def plain_copy(self) -> Tensor:
        return self.half * 2


def test_it_has_the_properties_given_and_no_storage():
    tensor = Doubled(torch.ones(3, 4, dtype=torch.float16).t())
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((4, 3), (1, 4), torch.float16)
    assert not tensor.requires_grad
    assert tensor.data_ptr() == 0


def test_reads_by_pointer_get_the_values():
    half = torch.arange(6.0).view(2, 3)
    expected = (half * 2).numpy()
    tensor = Doubled(half)
    assert np.array_equal(tensor.numpy(), expected)
    assert np.array_equal(tensor.numpy(force=True), expected)
    assert np.array_equal(np.asarray(tensor), expected)
    assert np.array_equal(np.from_dlpack(tensor), expected)
    assert torch.equal(torch.from_dlpack(tensor), half * 2)
    assert tensor.tolist() == expected.tolist()


def test_sharing_moves_the_parts():
    tensor = Doubled(torch.ones(2))
    assert not tensor.is_shared()
    assert tensor.share_memory_() is tensor
    assert tensor.is_shared()
    assert tensor.half.is_shared()


@pytest.mark.parametrize("made_in", [torch.inference_mode, torch.no_grad, contextlib.nullcontext])
@pytest.mark.parametrize("used_in", [torch.inference_mode, torch.no_grad, contextlib.nullcontext])
def test_views_in_every_mode(made_in, used_in):
    """Inference mode sets up a view of a normal tensor as a normal one; a wrapper made there must be that."""
    with made_in():
        tensor = Doubled(torch.arange(6.0).view(2, 3))
    with used_in():
        turned = tensor.t()
    assert not tensor.is_inference()
    assert not turned.is_inference()
    assert torch.equal(turned.plain_copy(), tensor.plain_copy().t())


def test_a_subclass_says_what_it_wraps():
    class Unfinished(WrapperTensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(func)

    tensor = Unfinished.wrap((2,), dtype=torch.float32)
    for read in (tensor.parts, tensor.plain_copy, tensor.numpy, tensor.tolist, tensor.share_memory_):
        with pytest.raises(NotImplementedError):
            read()
