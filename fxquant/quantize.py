"""``quantize_``: convert a model's own weights in place, one at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import RuleError, UnsupportedError
from .kernels.quantized_tensor import QuantizedTensor
from .kernels.weight_spec import WeightSpec, dequantized, quantized_components
from .layers import LayerWeight
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
    to_convert = _check(model, decided, backends := {"linear": linear_backend, "moe": moe_backend})
    for line in decided.summary():
        log.info("%s", line)
    bytes_before = model_nbytes(model)
    with torch.inference_mode(False), torch.no_grad():
        energies = _convert(model, to_convert, device, backends, progress)
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


def _check(model: nn.Module, decided: Plan, backends: Mapping[str, str]) -> list[PlannedLayer]:
    """The layers still to convert, after every reason to refuse was looked for."""
    if not decided.chosen:
        raise UnsupportedError(decided.nothing())
    to_convert = []
    for layer in decided.chosen:
        backend = _backend(layer, backends)
        for spec in layer.layer.quantized:
            found, asked = spec.scheme, layer.scheme
            if layer.rule != QUANTIZED_ALREADY and (found != asked or backend not in ("auto", spec.backend)):
                raise RuleError(
                    f"{layer.name} is quantised as {found} with backend {spec.backend} already; {asked} with backend "
                    f"{backend} is asked for ({layer.rule}); load the original weights to quantise it another way",
                    (layer.name,),
                )
        if layer.rule != QUANTIZED_ALREADY and len(layer.layer.quantized) < len(layer.layer.weights):
            to_convert.append(layer)
    for layer in to_convert:
        for name, parameter in _parameters(model, layer):
            if parameter.is_meta:
                raise UnsupportedError(
                    f"{name}: the weight is on the meta device and has no data; load the weights first (plan() works on meta)"
                )
            values = parameter.detach()
            bounds = torch.stack(torch.aminmax(values)) if values.numel() else values.new_zeros(1)
            if not bool(bounds.isfinite().all()):
                raise UnsupportedError(
                    f"{name}: the weight holds NaN or infinity; check the checkpoint, or leave the layer out: "
                    f'quantization_config={{"ignore": ["{layer.name}"]}}'
                )
    return to_convert


def _backend(layer: PlannedLayer, backends: Mapping[str, str]) -> str:
    return backends["moe" if layer.layer.kind == "moe" else "linear"]


def _parameters(model: nn.Module, layer: PlannedLayer) -> Iterator[tuple[str, nn.Parameter]]:
    """(name for messages, weight) for the layer's weights."""
    module = model.get_submodule(layer.name)
    for weight in layer.layer.weights:
        parameter = module._parameters[weight.parameter]
        assert parameter is not None, layer.name
        name = f"{layer.name}.{weight.parameter}" if layer.layer.kind == "moe" else layer.name
        yield name or "(root)", parameter


def _convert(
    model: nn.Module,
    layers: Sequence[PlannedLayer],
    device: torch.device | str | None,
    backends: Mapping[str, str],
    progress: bool | None,
) -> dict[str, Energy]:
    from tqdm import tqdm

    energies: dict[str, Energy] = {}
    show = sys.stderr.isatty() if progress is None else progress
    for layer in tqdm(layers, desc="quantising", unit="layer", disable=not show):
        module, owner = model.get_submodule(layer.name), layer.layer.tied_to
        if owner in energies:
            module._parameters.update({w.parameter: model.get_parameter(f"{owner}.{w.parameter}") for w in layer.layer.weights})
        else:
            energies[layer.name] = Energy(signal=0.0, noise=0.0)
            for weight in layer.layer.weights:
                energies[layer.name] += _convert_parameter(module, weight, layer, device, _backend(layer, backends))
        return_free_memory()
    return energies


def _convert_parameter(
    module: nn.Module, weight: LayerWeight, layer: PlannedLayer, device: torch.device | str | None, backend: str
) -> Energy:
    """Put the quantised weight in the place of its original; matrix by matrix, so that little is held beside the two."""
    assert layer.scheme is not None
    original = module._parameters[weight.parameter]
    assert original is not None
    if isinstance(original, QuantizedTensor):
        return Energy(signal=0.0, noise=0.0)
    spec = weight.spec(layer.scheme, original.dtype, backend)
    if weight.experts:
        components: list[torch.Tensor] = []
        energy, single = Energy(signal=0.0, noise=0.0), replace(spec, experts=0)
        for index, matrix in enumerate(original.detach()):
            parts, noise = _quantized(matrix, single, device)
            components = components or [part.new_empty((weight.experts, *part.shape)) for part in parts]
            for stack, part in zip(components, parts, strict=True):
                stack[index].copy_(part)
            energy += noise
    else:
        components, energy = _quantized(original.detach(), spec, device)
    module._parameters[weight.parameter] = nn.Parameter(QuantizedTensor(components, spec), requires_grad=False)
    return energy


def _quantized(matrix: torch.Tensor, spec: WeightSpec, device: torch.device | str | None) -> tuple[list[torch.Tensor], Energy]:
    """Components of one matrix, and what quantising it changed."""
    values = matrix if device is None else matrix.to(device)
    components = quantized_components(values, spec)
    exact = values.float()
    noise = dequantized(components, spec, torch.float32).sub(exact)
    return components, Energy(signal=_sum_of_squares(exact), noise=_sum_of_squares(noise))


def _sum_of_squares(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
