"""What would happen to each layer of a model: scheme, rule, kernel, bytes. Made before any weight is touched."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from .errors import ConfigError, RuleError, UnsupportedError, suggest
from .kernels.capability import FAMILIES, Kernel, Problem, choose, default_activation, device_key
from .kernels.formats import Scheme
from .layers import PACKED_PROJECTION, SHARED_WEIGHT, Layer, can_convert, find_layers
from .log import log
from .rules import Decision, Policy, decide, unmatched
from .schemes import DEFAULT, SHORTHANDS, SLOTS, SchemeRequest

if TYPE_CHECKING:
    from .config import QuantizationConfig

PLANNED_KINDS = ("linear", "moe", "head", "router", PACKED_PROJECTION, SHARED_WEIGHT)
QUANTIZED_ALREADY = "quantised already"
NO_RULE = "no rule"
"""The reason where a configuration does not speak of a layer."""
NO_METHOD = "no method"
"""How the reason starts where a scheme was chosen that nothing can compute."""


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """One layer's part of a plan.

    Args:
        layer: the layer as it is.
        scheme: what it becomes, None where it stays as it is.
        rule: the rule that chose.
        fused_name: the virtual fused name through which the rule chose, if one did.
        kernel: what will compute its products.
        reason: why it stays as it is; empty where it is quantised.
    """

    layer: Layer
    scheme: Scheme | None
    rule: str
    fused_name: str | None = None
    kernel: Kernel | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        return self.layer.name

    @property
    def because(self) -> str:
        """The rule that chose the scheme, and the fused name that it went through; the reason where the layer stays."""
        if self.scheme is None:
            return self.reason
        return f"{self.rule} through {group_name(self.fused_name)}" if self.fused_name else self.rule

    @property
    def bytes_before(self) -> int:
        return 0 if self.layer.tied_to else self.layer.nbytes

    @property
    def bytes_after(self) -> int:
        if self.scheme is None or self.layer.tied_to or self.layer.quantized:
            return self.bytes_before
        return sum(weight.spec(self.scheme, self.layer.dtype, "auto").nbytes for weight in self.layer.weights)

    def to_dict(self) -> dict[str, Any]:
        activation = self.scheme.activation if self.scheme else None
        return {
            "name": self.name,
            "kind": self.layer.kind,
            "weight": self.scheme.weight.name if self.scheme else None,
            "activation": (activation.name if activation else "none") if self.scheme else None,
            "scale_search": self.scheme.scale_search if self.scheme else None,
            "rule": self.rule,
            "fused_name": self.fused_name,
            "kernel": str(self.kernel) if self.kernel else None,
            "reason": self.reason or None,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decision for every layer of a model. ``str(plan)`` is a table by group; ``to_dict()`` is for machines.

    Args:
        layers: every linear, expert, head and router layer, in model order.
        device: device type that the kernels were chosen for.
        model_bytes: bytes of all parameters and buffers now.
    """

    layers: tuple[PlannedLayer, ...]
    device: str
    model_bytes: int

    @property
    def chosen(self) -> list[PlannedLayer]:
        """The layers that are, or will be, quantised."""
        return [layer for layer in self.layers if layer.scheme is not None]

    @property
    def expert_bytes_left(self) -> int:
        """Bytes of the expert layers that stay as they are."""
        return sum(layer.bytes_before for layer in self.layers if layer.layer.holds_experts and layer.scheme is None)

    @property
    def model_bytes_after(self) -> int:
        saved = sum(layer.bytes_before - layer.bytes_after for layer in self.chosen)
        return self.model_bytes - saved

    def groups(self) -> dict[tuple[str, str], list[PlannedLayer]]:
        """Layers by (name without the part up to the layer number, outcome)."""
        groups: dict[tuple[str, str], list[PlannedLayer]] = defaultdict(list)
        for layer in self.layers:
            groups[group_name(layer.name), outcome(layer)].append(layer)
        return dict(groups)

    def experts_left(self) -> list[str]:
        """The line that says how much of the experts is not quantised; none for a model without experts."""
        if not any(layer.layer.holds_experts for layer in self.layers):
            return []
        left = self.expert_bytes_left
        return [f"experts left as they are: {f'{megabytes(left)} MB' if left else 'none'}"]

    def nothing(self) -> str:
        """The message of a plan that quantises no layer: why not, and what to do."""
        reasons = "\n".join(f"  {line}" for line in self.summary()) or "  the model has no linear or expert layer"
        remedy = "choose another scheme, or other rules"
        for shorthand in SHORTHANDS.values():
            if any(layer.reason.startswith(f"{shorthand.name} defines no") for layer in self.layers):
                remedy = f"{shorthand.name} is for experts; for linear layers {shorthand.lack('linear').partition('; ')[2]}"
                remedy += " into quantization_config, e.g. {'linear': NAME}"
        if self.layers and all(layer.reason == NO_RULE for layer in self.layers if layer.layer.kind in SLOTS):
            remedy = "none of these layers is of a kind that the configuration speaks of; " + remedy
        return f"nothing would be quantised:\n{reasons}\n{remedy}"

    def summary(self) -> Iterator[str]:
        """One log line a group, e.g. ``self_attn.o_proj: 24 (from quantization: mxfp8)``."""
        for (group, text), layers in self.groups().items():
            yield f"{group}: {len(layers)} ({text})"

    def __str__(self) -> str:
        rows = [("layers", "count", "weight x activation", "rule", "kernel", "MB before", "after")]
        for (group, _), layers in self.groups().items():
            first = layers[0]
            rows.append(
                (
                    group,
                    str(len(layers)),
                    str(first.scheme) if first.scheme else "-",
                    first.because,
                    str(first.kernel) if first.kernel else "-",
                    megabytes(sum(layer.bytes_before for layer in layers)),
                    megabytes(sum(layer.bytes_after for layer in layers)),
                )
            )
        before, after = sum(x.bytes_before for x in self.chosen), sum(x.bytes_after for x in self.chosen)
        return "\n".join(
            [
                *format_table(rows),
                f"quantised layers: {len(self.chosen)} of {len(self.layers)}, {megabytes(before)} -> {megabytes(after)} MB",
                *self.experts_left(),
                f"whole model: {megabytes(self.model_bytes)} -> {megabytes(self.model_bytes_after)} MB on {self.device}",
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "model_bytes_before": self.model_bytes,
            "model_bytes_after": self.model_bytes_after,
            "expert_bytes_left": self.expert_bytes_left,
            "layers": [layer.to_dict() for layer in self.layers],
        }


def group_name(name: str) -> str:
    """A layer's name without everything up to its last number: ``model.layers.3.mlp.up_proj`` -> ``mlp.up_proj``.

    Where nothing but a number would be left the name stays, its other numbers as ``*``: ``blocks.3.1`` -> ``blocks.*.1``.
    """
    short = re.sub(r"^.*\.\d+\.(?=.)|^\d+\.(?=.)", "", name)
    if short.isdigit() and short != name:
        return re.sub(r"(?<![^.])\d+(?=\.)", "*", name)
    return short or "(root)"


def outcome(layer: PlannedLayer) -> str:
    """What happens to a layer and by which rule, in a phrase."""
    return layer.because if layer.scheme is not None else f"stays: {layer.because}"


def megabytes(count: int) -> str:
    return f"{count / 1e6:.2f}"


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns; numbers and the like are the caller's strings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def plan(
    model: nn.Module,
    quantization: str | None = None,
    quantization_config: QuantizationConfig | Mapping[str, Any] | str | None = None,
    *,
    device: torch.device | str | None = None,
    linear_backend: str = "auto",
    moe_backend: str = "auto",
    strict: bool = True,
    packed_modules_mapping: Mapping[str, Sequence[str]] | None = None,
) -> Plan:
    """Decide what happens to each layer, touching no weight; the model may be on the meta device.

    Args:
        model: any module; its Linear and Conv1D modules and the modules that own 3-D expert parameters are candidates.
        quantization: a shorthand such as ``fp8_per_channel``, or ``online`` (also None beside a config).
        quantization_config: a dict, ``QuantizationConfig`` or JSON text: linear, moe, ignore, targets.
        device: device to choose kernels for; default: where the weights are (meta counts as the CPU).
        linear_backend, moe_backend: kernel family: auto, torch, triton or reference.
        strict: refuse a pattern that matches nothing; False logs it.
        packed_modules_mapping: fused name -> shard names, added to the default table.

    Raises:
        ConfigError: the configuration or an option cannot be parsed.
        RuleError: rules contradict each other, or a pattern matches nothing.
        UnsupportedError: a pinned backend cannot serve a layer.
    """
    from .config import resolve  # brings in pydantic

    model = checked_model(model)
    policy = resolve(quantization, quantization_config)
    return plan_layers(
        find_layers(model),
        policy,
        device=device,
        linear_backend=linear_backend,
        moe_backend=moe_backend,
        strict=strict,
        packed_modules_mapping=packed_modules_mapping,
        containers=[name for name, _ in model.named_modules()],
        model_bytes=model_nbytes(model),
    )


def plan_names(
    layers: Mapping[str, str],
    quantization: str | None = None,
    quantization_config: QuantizationConfig | Mapping[str, Any] | str | None = None,
    packed_modules_mapping: Mapping[str, Sequence[str]] | None = None,
    strict: bool = False,
) -> dict[str, str | None]:
    """Layer name -> the name of the weight format it would get, or None where it stays as it is.

    Args:
        layers: layer name -> kind: ``linear``, ``moe``, ``head``, ``router`` or ``embedding``; any other kind stays as it is.
        quantization: a shorthand, or ``online`` (also None beside a config).
        quantization_config: a dict, a QuantizationConfig, or JSON text.
        packed_modules_mapping: fused name -> shard names, added to the default table; an empty mapping fuses nothing.
        strict: also refuse a pattern that matches nothing.

    Raises:
        ConfigError: the configuration cannot be parsed or merged.
        RuleError: rules contradict each other on a layer or, if strict, a pattern matches nothing.
    """
    from .config import resolve  # brings in pydantic

    decisions = decide(layers, resolve(quantization, quantization_config), packed_modules_mapping, strict)
    return {name: decision.request.weight.name if decision.request else None for name, decision in decisions.items()}


def checked_model(model: nn.Module) -> nn.Module:
    """The module itself, without torch.compile's wrapper.

    Raises:
        ConfigError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model: got {type(model).__name__} {str(model)[:60]!r}, needed is a torch.nn.Module as first argument"
        )
    return cast(nn.Module, getattr(model, "_orig_mod", model))


def model_nbytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each counted once, quantised ones as stored."""
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(getattr(t, "stored_nbytes", t.numel() * t.itemsize) for t in tensors.values())


def plan_layers(
    layers: Sequence[Layer],
    policy: Policy,
    *,
    device: torch.device | str | None = None,
    linear_backend: str = "auto",
    moe_backend: str = "auto",
    strict: bool = True,
    packed_modules_mapping: Mapping[str, Sequence[str]] | None = None,
    containers: Iterable[str] = (),
    model_bytes: int = 0,
) -> Plan:
    """The plan for layers that were found already; see ``plan``."""
    for option, value in (("linear_backend", linear_backend), ("moe_backend", moe_backend)):
        if value not in FAMILIES:
            raise ConfigError(f"{option}: got {value!r}, accepted are {', '.join(FAMILIES)}.{suggest(str(value), FAMILIES)}")
    target = _device(device, layers)
    device_type, capability = device_key(target)
    kinds = {layer.name: layer.kind for layer in layers}
    aliases = {
        layer.name: [f"{layer.name}.{weight.parameter}" for weight in layer.weights] for layer in layers if layer.kind == "moe"
    }
    decisions = decide(kinds, policy, packed_modules_mapping, strict, aliases, containers)
    if not strict:
        for message in unmatched(kinds, policy, packed_modules_mapping, aliases, containers):
            log.warning("%s", message)
    planned = [
        _planned(layer, decisions[layer.name], device_type, capability, moe_backend if layer.kind == "moe" else linear_backend)
        for layer in layers
        if layer.kind in PLANNED_KINDS
    ]
    _check_ties(planned)
    return Plan(layers=tuple(planned), device=device_type, model_bytes=model_bytes)


def _device(device: torch.device | str | None, layers: Sequence[Layer]) -> torch.device:
    if device is None:
        found = next((layer.device for layer in layers if layer.kind in SLOTS), torch.device("cpu"))
        return torch.device("cpu") if found.type == "meta" else found
    return usable_device(device)


def usable_device(device: torch.device | str) -> torch.device:
    """The device of this name.

    Raises:
        ConfigError: there is no such name.
        UnsupportedError: this machine has none.
    """
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device: got {device!r}: {error}") from None
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f"device: got {device!r}, but this machine has no CUDA device; use device='cpu'")
    return wanted


def _planned(layer: Layer, decision: Decision, device: str, capability: tuple[int, int] | None, backend: str) -> PlannedLayer:
    stays = PlannedLayer(layer=layer, scheme=None, rule=decision.rule, fused_name=decision.fused_name, reason=decision.reason)
    if decision.request is None:
        if layer.quantized:
            return replace(stays, scheme=layer.quantized[0].scheme, rule=QUANTIZED_ALREADY, reason="")
        return stays
    if not can_convert(layer.dtype):
        return replace(stays, reason=f"{NO_METHOD}: the weight is {layer.dtype}, needed is float16, bfloat16 or float32")
    scheme = resolve_activation(decision.request, capability)
    kernels = []
    for weight in layer.weights:
        problem = Problem(
            scheme=scheme,
            rows=weight.rows,
            columns=weight.columns,
            dtype=layer.dtype,
            experts=weight.experts,
            device=device,
            capability=capability,
        )
        try:
            kernels.append(choose(problem, backend))
        except UnsupportedError as error:
            if backend != "auto":
                raise UnsupportedError(f"{layer.name}: {error}") from None
            return replace(stays, reason=f"{NO_METHOD}: {error}")
    return replace(stays, scheme=scheme, kernel=kernels[0], reason="")


def resolve_activation(request: SchemeRequest, capability: tuple[int, int] | None) -> Scheme:
    """The scheme that a request means on a device of this capability."""
    activation = default_activation(request.weight, capability) if request.activation is DEFAULT else request.activation
    return Scheme(weight=request.weight, activation=activation, scale_search=request.scale_search)


def _check_ties(planned: Sequence[PlannedLayer]) -> None:
    by_name = {layer.name: layer for layer in planned}
    for layer in planned:
        owner = by_name.get(layer.layer.tied_to or "")
        if owner is not None and owner.scheme != layer.scheme:
            raise RuleError(
                f"{owner.name} and {layer.name} share one weight, but the rules give them {owner.scheme or 'no scheme'} "
                f"({owner.rule}) and {layer.scheme or 'no scheme'} ({layer.rule}); give both the same, or untie them first",
                (owner.name, layer.name),
            )
