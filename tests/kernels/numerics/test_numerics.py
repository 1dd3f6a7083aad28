"""The dispatch from a format to its family of numerics."""

from __future__ import annotations

import pytest
import torch

from fxquant.kernels.errors import UnsupportedError
from fxquant.kernels.formats import FORMATS
from fxquant.kernels.numerics import dequantize, quantize

KNOWN = [name for name, format in FORMATS.items() if has_numerics(format)]
UNKNOWN = [name for name in FORMATS if name not in KNOWN]


def test_the_fp8_formats_with_float32_scales_are_computed():
    assert set(KNOWN) >= {name for name, format in FORMATS.items() if name.startswith("fp8")}


@pytest.mark.parametrize("name", KNOWN)
def test_components_come_in_the_order_of_the_format(name):
    components = quantize(torch.randn(4, 8), FORMATS[name])
    assert len(components) == len(FORMATS[name].components)
    assert components[0].dtype == FORMATS[name].qdata_dtype
    assert components[1].dtype == FORMATS[name].scale_dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert dequantize(components, FORMATS[name], dtype).dtype == dtype


@pytest.mark.parametrize("name", KNOWN)
def test_the_seam_sees_the_magnitudes_of_the_blocks(name):
    x, seen = torch.randn(200, 300), []

    def record(amax):
        seen.append(amax)
        return amax * 2

    scale = quantize(x, FORMATS[name], record)[1]
    assert [tuple(amax.shape) for amax in seen] == [FORMATS[name].scale_shape(200, 300)]
    assert torch.equal(scale, quantize(x, FORMATS[name])[1] * 2)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_format_without_numerics_is_refused_with_those_that_have(name):
    with pytest.raises(UnsupportedError, match=f"no numerics for {name}; it has: .*fp8_per_channel_static"):
        quantize(torch.randn(4, 32), FORMATS[name])
    with pytest.raises(UnsupportedError, match=name):
        dequantize([torch.zeros(4, 32), torch.zeros(4, 1)], FORMATS[name], torch.float32)
