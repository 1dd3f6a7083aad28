"""Packed weights keep their values and everything that a weight can do; their memory is the pack's, once."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from fxquant.kernels.formats import FORMATS, STORED_FORMATS, Scheme
from fxquant.kernels.pack import is_packed, pack, packed_spec
from fxquant.kernels.quantized_tensor import QuantizedTensor
from fxquant.kernels.weight_spec import WeightSpec, dequantized

WEIGHTS = [name for name, format in FORMATS.items() if format.weight]


def weights(name: str = "fp8_per_channel_static", rows: tuple[int, ...] = (32, 200, 16), **options) -> list[QuantizedTensor]:
    scheme = Scheme(weight=FORMATS[name])
    return [QuantizedTensor.from_float(torch.randn(n, 64) * 2**i, scheme, **options) for i, n in enumerate(rows)]


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("contraction", [-1, -2])
def test_values_stay_and_the_stack_has_them_one_below_the_other(name, contraction):
    scheme = Scheme(weight=FORMATS[name])
    parts = [QuantizedTensor.from_float(torch.randn(n, 64), scheme) for n in (32, 200, 16)]
    if contraction == -2:
        parts = [QuantizedTensor.from_float(torch.randn(64, n), scheme, contraction=-2) for n in (32, 200, 16)]
    before = [part.dequantize() for part in parts]
    made = pack(parts)
    spec, *components = made.record
    assert spec == packed_spec(tuple(part.spec for part in parts))
    assert (spec.rows, spec.shards) == (248, (32, 200, 16))
    stacked = dequantized(components, spec, torch.float32)
    assert torch.equal(stacked, torch.cat(before, 0 if contraction == -1 else 1))
    for part, values in zip(parts, before, strict=True):
        assert torch.equal(part.dequantize(), values)
        assert part.pack is made
        assert all(storage(own) == storage(whole) for own, whole in zip(part.components, components, strict=True))
        assert not any(component._is_view() for component in part.components)
    assert sum(c.untyped_storage().nbytes() for c in components) == sum(part.stored_nbytes for part in parts)


def test_stored_formats_are_packed_too():
    format = STORED_FORMATS["int4_group32"]
    spec = {"scheme": Scheme(weight=format), "columns": 64, "dtype": torch.float32}
    parts = []
    for rows in (8, 24):
        components = [torch.randint(0, 255, (rows, 32), dtype=torch.uint8), torch.rand(rows, 2)]
        components.append(torch.randint(0, 15, (rows, 2), dtype=torch.uint8))
        parts.append(QuantizedTensor(components, WeightSpec(rows=rows, **spec)))
    before = torch.cat([part.dequantize() for part in parts])
    packed, *components = pack(parts).record
    assert torch.equal(dequantized(components, packed, torch.float32), before)


def test_what_the_weights_held_before_is_freed():
    parts = weights()
    before = [weakref.ref(component) for part in parts for component in part.components]
    pack(parts)
    gc.collect()
    assert all(reference() is None for reference in before)


def test_members_in_their_order_are_packed_and_others_are_not():
    a, b, c = weights()
    assert not is_packed([a, b, c])
    pack([a, b, c])
    assert is_packed([a, b, c])
    assert not is_packed([b, a, c])
    assert not is_packed([a, b])
    pack([b, c])
    assert is_packed([b, c])
    assert not is_packed([a, b, c])


@pytest.mark.parametrize("write", [lambda w, v: w.copy_(v), lambda w, v: w.zero_().add_(v)])
def test_writes_reach_the_pack(write):
    parts, values = weights(), torch.randn(200, 64)
    spec, *components = pack(parts).record
    write(parts[1], values)
    assert is_packed(parts)
    stacked = dequantized(components, spec, torch.float32)
    assert torch.equal(stacked[32:232], parts[1].dequantize())
    torch.testing.assert_close(stacked[32:232], values, rtol=0.1, atol=0.1)


def test_packing_under_autocast():
    parts = weights()
    before = torch.cat([part.dequantize() for part in parts])
    with torch.autocast("cpu", torch.bfloat16):
        spec, *components = pack(parts).record
    assert torch.equal(dequantized(components, spec, torch.float32), before)


def test_new_data_leaves_the_pack():
    parts = weights()
    pack(parts)
    parts[1].data = torch.randn(200, 64)
    assert parts[1].pack is None
    assert not is_packed(parts)
    before = [part.dequantize() for part in parts]
    pack(parts)
    assert is_packed(parts)
    assert all(torch.equal(part.dequantize(), values) for part, values in zip(parts, before, strict=True))


def test_aliases_of_members_are_packed_without_a_copy():
    parts = weights("nvfp4")
    _, *components = pack(parts).record
    aliases = [part.detach() for part in parts]
    _, *same = pack(aliases).record
    assert [(c.data_ptr(), c.shape, c.stride()) for c in same] == [(c.data_ptr(), c.shape, c.stride()) for c in components]
    assert is_packed(parts)
    swapped = [aliases[1], aliases[0], aliases[2]]
    before = [part.dequantize() for part in swapped]
    assert pack(swapped).record[1].data_ptr() != components[0].data_ptr()
    assert all(torch.equal(part.dequantize(), values) for part, values in zip(swapped, before, strict=True))


@pytest.mark.parametrize("name", ["fp8_per_tensor_static", "fp8_per_block_static", "nvfp4"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save", "clone", "to"])
def test_a_copy_of_a_member_is_whole_and_alone(name, way):
    parts = [nn.Parameter(part, requires_grad=False) for part in weights(name)]
    pack(parts)
    part = parts[1]
    part.note = "kept"
    if way == "deepcopy":
        copied = copy.deepcopy(part)
        assert copied.note == "kept"
    elif way == "pickle":
        copied = pickle.loads(pickle.dumps(part))
    elif way == "save":
        file = io.BytesIO()
        torch.save(part, file)
        file.seek(0)
        copied = torch.load(file, weights_only=True)
    elif way == "clone":
        copied = part.clone()
    else:
        copied = part.to(torch.float16)
    assert copied.pack is None
    assert torch.equal(copied.dequantize(torch.float32), part.dequantize(torch.float32))
    assert isinstance(copied, nn.Parameter) or way in ("clone", "to")
    assert sum(c.untyped_storage().nbytes() for c in copied.components) == part.stored_nbytes
    assert is_packed(parts)


def test_files_hold_a_packed_weight_once():
    parts = weights(rows=(1024, 1024, 1024))
    sizes = []
    for packed in (False, True):
        if packed:
            pack(parts)
        file = io.BytesIO()
        torch.save({str(i): part for i, part in enumerate(parts)}, file)
        sizes.append(len(file.getvalue()))
        sizes.append(len(pickle.dumps(parts[0])))
    assert sizes[2] < 1.02 * sizes[0]
    assert sizes[3] < 1.02 * sizes[1]


def test_copies_of_aliases_share_their_memory_as_they_did():
    (weight,) = weights(rows=(32,))
    one, other = copy.deepcopy([weight.detach(), weight.detach()])
    assert storage(one.qdata) == storage(other.qdata)
