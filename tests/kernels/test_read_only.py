"""Which arguments an op writes or aliases, and views that can be read in every way and written in none."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from fxquant.kernels.errors import UnsupportedError
from fxquant.kernels.read_only import ReadOnlyView, aliased_outputs, is_composite, read_only, written_arguments

aten = torch.ops.aten


# -- schemas -----------------------------------------------------------------------------------------------------------------


def test_written_arguments():
    a, b, c = torch.ones(2), torch.ones(2), torch.ones(2)
    assert written_arguments(aten.add.Tensor, (a, b), {}, Tensor) == []
    for op, args, kwargs, expected in (
        (aten.add_.Tensor, (a, b), {}, [a]),
        (aten.add.out, (a, b), {"out": c}, [c]),
        (aten.add.out, (a, a), {"out": a}, [a]),
        (aten.aminmax.out, (a,), {"min": b, "max": c}, [b, c]),
        (aten._foreach_add_.Scalar, ([a, b, a], 1.0), {}, [a, b]),
        (aten.copy_.default, (a, b), {"non_blocking": True}, [a]),
    ):
        written = written_arguments(op, args, kwargs, Tensor)
        assert [id(t) for t in written] == [id(t) for t in expected]


def test_written_arguments_of_another_class_are_left_out():
    a = torch.ones(2)
    assert written_arguments(aten.add_.Tensor, (a, read_only(a)), {}, ReadOnlyView) == []
    assert len(written_arguments(aten.add_.Tensor, (read_only(a), a), {}, ReadOnlyView)) == 1


def test_aliased_outputs():
    a = read_only(torch.ones(4))
    result = torch.ones(4)
    assert isinstance(aliased_outputs(aten.view.default, (a, [4]), {}, result, ReadOnlyView), ReadOnlyView)
    assert aliased_outputs(aten.add.Tensor, (a, 1), {}, result, ReadOnlyView) is result
    assert aliased_outputs(aten.view.default, (result, [4]), {}, result, ReadOnlyView) is result
    pair = aliased_outputs(aten.split.Tensor, (a, 2), {}, [result, result], ReadOnlyView)
    assert [type(t) for t in pair] == [ReadOnlyView] * 2


def test_composite_ops():
    assert is_composite(aten.linear.default)
    assert is_composite(aten.reshape.default)
    assert not is_composite(aten.add.Tensor)
    assert not is_composite(aten.view.default)


def test_only_plain_tensors_become_views():
    plain, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    assert type(read_only(plain)) is ReadOnlyView
    assert read_only(parameter) is parameter
    view = read_only(plain)
    assert read_only(view) is view
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(plain)
        assert read_only(fake) is fake


# -- views -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def mode(request):
    with request.param():
        yield


@pytest.fixture
def values() -> Tensor:
    return torch.arange(12.0).view(3, 4).t()


@pytest.mark.usefixtures("mode")
def test_a_view_looks_like_its_values(values):
    view = read_only(values[1:])
    assert (view.shape, view.stride(), view.storage_offset()) == ((3, 3), (1, 4), 1)
    assert (view.dtype, view.device) == (values.dtype, values.device)
    assert repr(view) == f"ReadOnlyView({values[1:]!r})"


@pytest.mark.usefixtures("mode")
def test_reads(values):
    view = read_only(values)
    for function in (
        torch.sum,
        lambda v: v + 1,
        lambda v: v @ v.t(),
        lambda v: torch.cat([v, v]),
        lambda v: v.to(torch.int32),
        lambda v: v.clone(),
        lambda v: torch.zeros(4, 3).add_(v),
        lambda v: torch.zeros(4, 3).copy_(v),
        lambda v: v[values > 2],
    ):
        result = function(view)
        assert type(result) is torch.Tensor
        assert torch.equal(result, function(values))
    assert view.tolist() == values.tolist()
    assert np.array_equal(view.numpy(), values.numpy())
    assert np.array_equal(np.from_dlpack(view), values.numpy())
    assert view[0, 1].item() == 4


@pytest.mark.usefixtures("mode")
def test_views_of_a_view_are_views(values):
    view = read_only(values)
    for function in (
        lambda v: v[0],
        lambda v: v.t(),
        lambda v: v.t().view(-1),
        lambda v: v.reshape(4, 3),
        lambda v: v.unsqueeze(0),
        lambda v: v.chunk(2)[1],
        lambda v: v.detach(),
        lambda v: v.expand(2, 4, 3),
        lambda v: v.diagonal(),
        lambda v: v.contiguous() if v.is_contiguous() else v.t().contiguous(),
    ):
        result = function(view)
        assert isinstance(result, ReadOnlyView)
        assert torch.equal(result.clone(), function(values))


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    "write",
    [
        lambda v: v.zero_(),
        lambda v: v.add_(1),
        lambda v: v.copy_(torch.ones(4, 3)),
        lambda v: v[0].mul_(2),
        lambda v: v.t()[0].fill_(1),
        lambda v: v.__setitem__(0, 1.0),
        lambda v: v.__setitem__(v.clone() > 2, 1.0),
        lambda v: v.detach().zero_(),
        lambda v: v.data.zero_(),
        lambda v: torch.add(torch.ones(4, 3), 1, out=v),
        lambda v: torch._foreach_mul_([v], 2.0),
        lambda v: v.resize_(2, 2),
        lambda v: torch.nn.init.zeros_(v),
        lambda v: torch.frexp(torch.ones(4, 3), out=(v, torch.zeros(4, 3, dtype=torch.int32))),
    ],
)
def test_writes_are_refused(values, write):
    before = values.clone()
    with pytest.raises(UnsupportedError, match=r"aten\.[\w.]+ would write to a view of a quantised weight.*view\.clone\(\)"):
        write(read_only(values))
    assert torch.equal(values, before)


def test_copies_are_plain_and_writable(values):
    view = read_only(values)
    buffer = io.BytesIO()
    torch.save(view, buffer)
    buffer.seek(0)
    for duplicate in (
        view.clone(),
        copy.deepcopy(view),
        pickle.loads(pickle.dumps(view)),
        torch.load(buffer, weights_only=True),
        view.to(torch.float64).float(),
    ):
        assert type(duplicate) is torch.Tensor
        assert torch.equal(duplicate, values)
        duplicate.zero_()
        assert values.sum() == 66
    view.numpy()[:] = 0
    assert values.sum() == 66
    first, second = copy.deepcopy([view, view])
    assert first is second


def test_shared_memory(values):
    view = read_only(values)
    assert not view.is_shared()
    assert view.share_memory_() is view
    assert view.is_shared()
    assert torch.equal(view.clone(), torch.arange(12.0).view(3, 4).t())
