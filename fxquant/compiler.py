"""``fxquant.compile``: convert if asked, then compile the model or each repeated layer at little host cost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from .errors import ConfigError
from .kernels.quantized_tensor import QuantizedTensor
from .options import BackendOptions
from .planner import checked_model
from .quantize import quantize_

if TYPE_CHECKING:
    from .config import QuantizationConfig


def compile(
    model: nn.Module,
    quantization: str | None = None,
    quantization_config: QuantizationConfig | Mapping[str, Any] | str | None = None,
    *,
    per_layer: bool = False,
    device: torch.device | str | None = None,
    linear_backend: str = "auto",
    moe_backend: str = "auto",
    strict: bool = True,
    packed_modules_mapping: Mapping[str, Sequence[str]] | None = None,
    progress: bool | None = None,
    **torch_compile_kwargs: Any,
) -> nn.Module:
    """Convert a model if asked (see ``quantize_``; originals are freed), then compile it with the ``fxquant`` backend.

    Args:
        model: a model, converted already or not.
        quantization, quantization_config, device, linear_backend, moe_backend, strict, packed_modules_mapping, progress:
            see ``quantize_``; both of the first two None: the model must be converted already.
        per_layer: compile each repeated layer (the elements of the outermost module lists) instead of the whole model: once
            for all layers of a kind, so that compile time does not grow with depth. A layer that reads a number of its own,
            such as its index into a key-value cache, is compiled for itself, up to Dynamo's recompile limit: prefer the whole
            model there.
        torch_compile_kwargs: passed to ``torch.compile``: dynamic, fullgraph, mode, and options (``mode`` and ``inductor``).

    Returns:
        The model, compiled in place (or its layers): names stay as they are, and methods such as transformers' ``generate``
        run the compiled forward. Only a model whose forward is torch.nn's own (``nn.Sequential``) comes back wrapped.

    Raises:
        ConfigError: nothing is quantised and nothing was asked for; an option is unknown; no repeated layer was found.
        RuleError, UnsupportedError: see ``quantize_``.
    """
    if "backend" in torch_compile_kwargs:
        raise ConfigError(
            f"backend: got {torch_compile_kwargs['backend']!r}; fxquant.compile always uses 'fxquant', leave it out"
        )
    kwargs = dict(torch_compile_kwargs)
    options = dict(kwargs.pop("options", None) or {})
    if kwargs.get("mode") is not None:
        options["mode"] = kwargs.pop("mode")
    for name in ("quantization", "quantization_config"):
        if name in options:
            raise ConfigError(f"options[{name!r}]: fxquant.compile takes {name} as an argument of its own")
    BackendOptions.parse(None, options)  # before anything is converted
    checked_model(model)
    layers = repeated_layers(model) if per_layer else []
    if per_layer and (not layers or any(map(_is_built_in, layers))):
        raise ConfigError(
            f"per_layer: {type(model).__name__} has no module list of two or more equal layers that can be compiled in place "
            "(torch reaches no layer whose forward is torch.nn's own, such as nn.Sequential); leave per_layer out"
        )
    if quantization is not None or quantization_config is not None:
        quantize_(
            model,
            quantization,
            quantization_config,
            device=device,
            linear_backend=linear_backend,
            moe_backend=moe_backend,
            strict=strict,
            packed_modules_mapping=packed_modules_mapping,
            progress=progress,
        )
    elif not any(isinstance(p, QuantizedTensor) for p in model.parameters()):
        raise ConfigError(
            "quantization: none was given and the model holds no quantised weight; give one, e.g. 'fp8_per_channel'"
        )
    options.setdefault("guard_filter_fn", keep_guard)
    if _is_built_in(model):
        kwargs["options"] = {**options, "signature": signature(model)}
        return cast(nn.Module, torch.compile(model, backend="fxquant", **kwargs))
    for module in layers or [model]:
        module.compile(backend="fxquant", options={**options, "signature": signature(module)}, **kwargs)
    return model


def _is_built_in(module: nn.Module) -> bool:
    """Whether the forward is torch.nn's own: ``module.compile()`` does not reach those, ``torch.compile(module)`` does."""
    return type(module).forward.__module__.startswith("torch.nn.")


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Elements of the outermost module lists whose class occurs at least twice in the list."""
    layers: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            classes = [type(layer) for layer in child]
            layers += [layer for layer in child if classes.count(type(layer)) > 1]
        else:
            layers += repeated_layers(child)
    return layers


def signature(module: nn.Module) -> str:
    """Digest of the names and specs of a module's quantised weights: modules with equal ones may share compiled graphs.

    It stands in for the guards that ``keep_guard`` drops.
    """
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        if isinstance(parameter, QuantizedTensor):
            digest.update(f"{name} {parameter.spec} {parameter.device}\n".encode())
    return digest.hexdigest()[:16]


def keep_guard(guards: Sequence[Any]) -> list[bool]:
    """Which of Dynamo's guards to check at every call: all but those on quantised parameters.

    Those guards look at every inner tensor and cost more than the rest of a call; the backend checks each weight's type and
    spec itself, and ``signature`` keeps models with other weights apart. The guard that two layers share one
    weight stays: the graph then takes it once.
    """
    quantized = {guard.name for guard in guards if isinstance(guard.value, QuantizedTensor)}
    return [
        guard.guard_type == "DUPLICATE_INPUT" or not any(name in quantized for name in _owners(guard.name)) for guard in guards
    ]


def _owners(name: str) -> Iterator[str]:
    """A guard's source and the parameter that it is a part of, e.g. ``p['weight'].qdata`` -> itself and ``p['weight']``."""
    yield name
    head, separator, _ = name.rpartition("._parameters[")
    if separator:
        yield head + separator + name[len(head) + len(separator) :].partition("]")[0] + "]"
