"""Quantised copies of parameters that stay with their module: the road of bare ``torch.compile(backend="fxquant")``.

A copy is looked up by the parameter itself and made again when the parameter's storage or version has changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .errors import UnsupportedError
from .kernels.quantized_tensor import QuantizedTensor
from .kernels.weight_spec import WeightSpec, quantized_components

_Fingerprint = tuple[int, int | None]


class Conversions:
    """Quantised copies by parameter (held weakly) and spec."""

    def __init__(self) -> None:
        self._copies: Any = WeakIdKeyDictionary()

    def get(self, parameter: Tensor, spec: WeightSpec, name: str) -> QuantizedTensor:
        """The quantised copy of ``parameter`` under ``spec``, made on the first call and after a visible change.

        Raises:
            UnsupportedError: the parameter holds NaN or infinity; names the layer.
        """
        found = self._copies.get(parameter)
        if found is None:
            found = self._copies[parameter] = {}
        fingerprint = _fingerprint(parameter)
        entry = found.get(spec)
        if entry is None or entry[0] != fingerprint:
            entry = found[spec] = (fingerprint, _convert(parameter, spec, name))
        copy: QuantizedTensor = entry[1]
        return copy

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._copies

    def forget(self, parameter: Tensor) -> bool:
        """Drop the copies of a parameter; whether there were any."""
        return self._copies.pop(parameter, None) is not None


def _fingerprint(parameter: Tensor) -> _Fingerprint:
    return parameter.data_ptr(), None if parameter.is_inference() else parameter._version


def _convert(parameter: Tensor, spec: WeightSpec, name: str) -> QuantizedTensor:
    with torch.inference_mode(False), torch.no_grad():
        try:
            return QuantizedTensor(quantized_components(parameter, spec), spec)
        except UnsupportedError as error:
            raise UnsupportedError(f"{name}: {error}") from None


CONVERSIONS = Conversions()
"""The process's copies: one parameter is converted once however many graphs read it."""


def refresh(model: nn.Module) -> int:
    """Convert a compiled model's weights again at its next call; returns how many had a quantised copy.

    Needed only on the bare ``torch.compile(backend="fxquant")`` road after a write that PyTorch does not count, such as one
    through ``parameter.data``. A model converted by ``quantize_`` holds no copies.
    """
    return sum(CONVERSIONS.forget(parameter) for parameter in model.parameters())
