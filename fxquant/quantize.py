"""``quantize_``: convert a model's own weights in place, one at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import RuleError, UnsupportedError
from .kernels.quantized_tensor import QuantizedTensor
from .log import log
from .memory import return_free_memory
from .planner import QUANTIZED_ALREADY, Plan, PlannedLayer, checked_model, model_nbytes, plan
from .report import Energy, Report

if TYPE_CHECKING:
    from .config import QuantizationConfig


def quantize_(
    model: nn.Module,
    quantization: str | None = None,
    quantization_config: QuantizationConfig | Mapping[str, Any] | str | None = None,
    *,
    device: torch.device | str | None = None,
    linear_backend: str = "auto",
    moe_backend: str = "auto",
    strict: bool = True,
    packed_modules_mapping: Mapping[str, Sequence[str]] | None = None,
    progress: bool | None = None,
) -> Report:
    """Replace the chosen weights of ``model`` by quantised ones, in place.

    Each original is freed before the next is converted (unless the caller holds it). All parameters are frozen: a quantised
    model is for inference. Calling it again with the same configuration changes nothing.

    Args:
        model, quantization, quantization_config, linear_backend, moe_backend, strict, packed_modules_mapping: see ``plan``.
        device: convert the weights on this device and leave the model there; default: where they are.
        progress: show a progress bar; default: on a terminal.

    Returns:
        What was converted, with which rule, how well and at which cost.

    Raises:
        ConfigError, RuleError: see ``plan``.
        UnsupportedError: nothing would be quantised, a weight is not finite or has no data, a layer is quantised another
            way already, or a pinned backend cannot serve a layer. Raised before the first weight is converted.
    """
    start = time.perf_counter()
    model = checked_model(model)
    decided = plan(
        model,
        quantization,
        quantization_config,
        device=device,
        linear_backend=linear_backend,
        moe_backend=moe_backend,
        strict=strict,
        packed_modules_mapping=packed_modules_mapping,
    )
    to_convert = _check(model, decided, linear_backend)
    for line in decided.summary():
        log.info("%s", line)
    bytes_before = model_nbytes(model)
    with torch.inference_mode(False), torch.no_grad():
        energies = _convert(model, to_convert, device, linear_backend, progress)
        model.requires_grad_(False)
        if device is not None:
            model.to(device)
    return Report(
        plan=decided,
        energies=energies,
        bytes_before=bytes_before,
        bytes_after=model_nbytes(model),
        seconds=time.perf_counter() - start,
    )


def _check(model: nn.Module, decided: Plan, linear_backend: str) -> list[PlannedLayer]:
    """The layers still to convert, after every reason to refuse was looked for."""
    if not decided.chosen:
        reasons = "\n".join(f"  {line}" for line in decided.summary()) or "  the model has no linear or expert layer"
        raise UnsupportedError(f"nothing would be quantised:\n{reasons}\nchoose another scheme, or other rules")
    to_convert = []
    for layer in decided.chosen:
        quantized = layer.layer.quantized
        if quantized is not None:
            found, asked = quantized.spec.scheme, layer.scheme
            if layer.rule != QUANTIZED_ALREADY and (found != asked or linear_backend not in ("auto", quantized.spec.backend)):
                raise RuleError(
                    f"{layer.name} is quantised as {found} with backend {quantized.spec.backend} already; {asked} with backend "
                    f"{linear_backend} is asked for ({layer.rule}); load the original weights to quantise it another way",
                    (layer.name,),
                )
            continue
        to_convert.append(layer)
    for layer in to_convert:
        weight = _weight(model, layer)
        if weight.is_meta:
            raise UnsupportedError(
                f"{layer.name}: the weight is on the meta device and has no data; load the weights first (plan() works on meta)"
            )
        bounds = torch.stack(torch.aminmax(weight.detach())) if weight.numel() else weight.detach().new_zeros(1)
        if not bool(bounds.isfinite().all()):
            raise UnsupportedError(
                f"{layer.name or '(root)'}: the weight holds NaN or infinity; check the checkpoint, or leave the layer out: "
                f'quantization_config={{"ignore": ["{layer.name}"]}}'
            )
    return to_convert


def _weight(model: nn.Module, layer: PlannedLayer) -> nn.Parameter:
    weight = model.get_submodule(layer.name)._parameters[layer.layer.parameters[0]]
    assert weight is not None, layer.name
    return weight


def _convert(
    model: nn.Module,
    layers: Sequence[PlannedLayer],
    device: torch.device | str | None,
    linear_backend: str,
    progress: bool | None,
) -> dict[str, Energy]:
    from tqdm import tqdm

    energies: dict[str, Energy] = {}
    converted: dict[str, nn.Parameter] = {}
    show = sys.stderr.isatty() if progress is None else progress
    for layer in tqdm(layers, desc="quantising", unit="layer", disable=not show):
        owner = layer.layer.tied_to
        if owner in converted:
            parameter = converted[owner]
        else:
            parameter, energies[layer.name] = _quantized_parameter(_weight(model, layer), layer, device, linear_backend)
            converted[layer.name] = parameter
        model.get_submodule(layer.name)._parameters[layer.layer.parameters[0]] = parameter
        return_free_memory()
    return energies


def _quantized_parameter(
    weight: nn.Parameter, layer: PlannedLayer, device: torch.device | str | None, linear_backend: str
) -> tuple[nn.Parameter, Energy]:
    assert layer.scheme is not None
    values = weight.detach() if device is None else weight.detach().to(device)
    quantized = QuantizedTensor.from_float(values, layer.scheme, contraction=layer.layer.contraction, backend=linear_backend)
    exact = values.float()
    noise = quantized.dequantize(torch.float32).sub_(exact)
    energy = Energy(signal=_sum_of_squares(exact), noise=_sum_of_squares(noise))
    return nn.Parameter(quantized, requires_grad=False), energy


def _sum_of_squares(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
