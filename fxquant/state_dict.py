"""State dicts as plain tensors, for files that take nothing else (safetensors)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError
from .kernels.quantized_tensor import QuantizedTensor
from .kernels.weight_spec import WeightSpec

SPEC, TIED_TO = "fxquant_spec", "fxquant_tied_to"


def flatten_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of plain tensors that ``safetensors.torch.save_file`` and any other writer takes.

    A quantised weight ``NAME`` becomes its components ``NAME.qdata``, ``NAME.scale`` and its spec as JSON bytes (uint8)
    ``NAME.fxquant_spec``. Of tensors that share their memory (tied weights) the first is written; the others become
    ``NAME.fxquant_tied_to``, the first one's name as JSON bytes. ``unflatten_state_dict`` is the inverse.
    """
    flat: dict[str, Tensor] = {}
    first_name: dict[Any, str] = {}
    for name, value in state_dict.items():
        owner = first_name.setdefault(_identity(value), name)
        if owner != name:
            flat[f"{name}.{TIED_TO}"] = _to_bytes(owner)
        elif isinstance(value, QuantizedTensor):
            parts = zip(value.spec.scheme.weight.components, value.components, strict=True)
            flat.update({f"{name}.{part}": component.detach().contiguous() for part, component in parts})
            flat[f"{name}.{SPEC}"] = _to_bytes(value.spec.to_dict())
        else:
            flat[name] = value.detach().contiguous()
    return flat


def unflatten_state_dict(flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict that ``flatten_state_dict`` took apart, for ``load_state_dict(..., assign=True)`` or without.

    Raises:
        ConfigError: a component or the owner of a tied weight is missing; names it.
    """
    rest = dict(flat)
    state_dict: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    for key in flat:
        name, _, last = key.rpartition(".")
        if last == SPEC:
            spec = WeightSpec.from_dict(_from_bytes(rest.pop(key)))
            parts = [f"{name}.{part}" for part in spec.scheme.weight.components]
            if missing := [part for part in parts if part not in rest]:
                raise ConfigError(f"{name}: {missing[0]} is missing from the flattened state dict; it needs {', '.join(parts)}")
            state_dict[name] = QuantizedTensor([rest.pop(part) for part in parts], spec)
        elif last == TIED_TO:
            ties[name] = _from_bytes(rest.pop(key))
    state_dict.update(rest)
    for name, owner in ties.items():
        if owner not in state_dict:
            raise ConfigError(f"{name}: it is tied to {owner}, which is missing from the flattened state dict")
        state_dict[name] = state_dict[owner]
    return state_dict


def _identity(value: Tensor) -> Any:
    """Equal for tensors that are the same view of the same memory; tensors without memory are only equal to themselves."""
    stored = value.qdata if isinstance(value, QuantizedTensor) else value
    if stored.is_meta or stored.numel() == 0:
        return id(value)
    spec = value.spec if isinstance(value, QuantizedTensor) else None
    return stored.data_ptr(), tuple(stored.shape), stored.stride(), stored.dtype, spec


def _to_bytes(value: Any) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(value: Tensor) -> Any:
    return json.loads(bytes(value.tolist()))
