"""The Dynamo backend: quantised weights become inputs of the graph, the passes rewrite it, Inductor compiles the rest.

Dynamo reuses one compiled graph for every layer of a class, so weights are never constants here: at each call the quantised
parts are taken from the parameters that arrive, after a check that they are what the graph was compiled for.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.exc import ShortenTraceback
from torch._guards import TracingContext, detect_fake_mode

from . import kernels
from .conversions import CONVERSIONS
from .errors import FxQuantError, RuleError, UnsupportedError
from .graph_layers import graph_layers, layer_name
from .kernels.quantized_tensor import QuantizedTensor, WeightSpec
from .log import log
from .options import BackendOptions
from .passes.pipeline import run_passes
from .passes.rewrite_sites import META_KEY, QuantizedInput
from .plan import megabytes, plan_layers


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One weight input of a graph.

    Args:
        index: its place among the graph's inputs.
        spec: what the graph was compiled for.
        name: the layer, for messages; relative to the compiled module.
        plain: whether the module holds the float original (a quantised copy is looked up) or the quantised weight itself.
    """

    index: int
    spec: WeightSpec
    name: str
    plain: bool


def fxquant_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Backend for ``torch.compile(model, backend="fxquant", options={...})``; see ``BackendOptions`` for the options.

    Raises:
        ConfigError: an option, the mode or the quantisation configuration cannot be parsed.
        RuleError: rules contradict each other, or a pattern matches nothing in this graph.
        UnsupportedError: a weight or shape that cannot be served.
    """
    try:
        return _compile(gm, example_inputs, BackendOptions.parse(mode, options))
    except FxQuantError as error:
        raise _through_dynamo(error) from None


class _ThroughDynamo(ShortenTraceback):
    """What Dynamo does not wrap; its frames above the compiled call are of no use to a caller."""

    def remove_dynamo_frames(self) -> _ThroughDynamo:  # type: ignore[override]
        return self.with_traceback(None)


def _through_dynamo(error: FxQuantError) -> FxQuantError:
    """The error as one that Dynamo hands to the caller as it is, instead of inside a ``BackendCompilerFailed``."""
    kind = type(type(error).__name__, (type(error), _ThroughDynamo), {"__module__": type(error).__module__})
    visible = kind.__new__(kind, *error.args)
    visible.__dict__.update(error.__dict__)
    return visible


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], parsed: BackendOptions) -> Callable[..., Any]:
    slots = _find_slots(gm.graph, example_inputs, parsed)
    eager = _copy(gm)
    rewritten = _copy(gm)
    weights = {slot.index: _weight(slot, example_inputs[slot.index]) for slot in slots}
    kept, inputs = _swap_inputs(rewritten.graph, example_inputs, slots, weights)
    run_passes(rewritten.graph)
    rewritten.recompile()
    compiled = _inductor(rewritten, inputs, parsed)
    return _runner(compiled, eager, slots, kept, _user_inputs(gm.graph, example_inputs))


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph that can be rewritten and keeps no parameter alive."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, mapping)
    graph.output(output)
    for old, new in mapping.items():
        new.meta.pop("grapharg", None)
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copy._param_name_to_source = gm._param_name_to_source  # type: ignore[assignment]
    return copy


# -- which inputs are weights ---------------------------------------------------------------------------------------------


def _find_slots(graph: fx.Graph, inputs: Sequence[Any], options: BackendOptions) -> list[Slot]:
    placeholders = list(graph.find_nodes(op="placeholder"))
    slots = []
    for index, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        if isinstance(value, QuantizedTensor):
            slots.append(Slot(index=index, spec=value.spec, name=layer_name(node), plain=False))
    return slots + _plain_slots(graph, placeholders, inputs, options, converted=bool(slots))


def _plain_slots(
    graph: fx.Graph, placeholders: list[fx.Node], inputs: Sequence[Any], options: BackendOptions, *, converted: bool
) -> list[Slot]:
    policy = options.policy()
    layers = graph_layers(graph, inputs)
    if policy is None:
        if not converted and any(layer.kind == "linear" for layer in layers.values()):
            _warn_once(
                "fxquant backend: no quantization option and no quantised weight: a graph is compiled as it is; give "
                'options={"quantization": ...} or convert the model first: fxquant.quantize_(model, ...)'
            )
        return []
    prefixes = {layer.name for layer in layers.values()}
    prefixes |= {name[:i] for name in prefixes for i, character in enumerate(name) if character == "."}
    try:
        decided = plan_layers(
            list(layers.values()),
            policy,
            linear_backend=options.linear_backend,
            moe_backend=options.moe_backend,
            strict=options.strict,
            packed_modules_mapping=options.packed_modules_mapping,
            containers=prefixes,
        )
    except RuleError as error:
        raise RuleError(
            f"{error}\n(These are the layers of one compiled graph, named relative to the module given to torch.compile; where a "
            "model is compiled in parts, fxquant.compile and fxquant.quantize_ see the whole module.)",
            error.layers,
        ) from None
    for line in decided.summary():
        log.info("%s", line)
    by_name = {layer.name: layer for layer in decided.chosen}
    slots = []
    for node, layer in layers.items():
        chosen = by_name.get(layer.name)
        if chosen is not None and chosen.scheme is not None:
            spec = WeightSpec(
                scheme=chosen.scheme,
                rows=layer.rows,
                columns=layer.columns,
                dtype=layer.dtype,
                contraction=layer.contraction,
                backend=options.linear_backend,
            )
            slots.append(Slot(index=placeholders.index(node), spec=spec, name=layer.name, plain=True))
    if not slots and not converted and layers:
        _warn_once("fxquant backend: no layer of this graph is quantised:\n  " + "\n  ".join(decided.summary()))
    _say_originals_stay(slots, inputs)
    return slots


def _say_originals_stay(slots: Sequence[Slot], inputs: Sequence[Any]) -> None:
    fresh = [slot for slot in slots if inputs[slot.index] not in CONVERSIONS]
    if fresh:
        held = sum(inputs[slot.index].numel() * inputs[slot.index].itemsize for slot in fresh)
        _warn_once(
            f"fxquant backend: the module keeps the {len(fresh)} original weights of this graph ({megabytes(held)} MB) beside "
            "their quantised copies; fxquant.compile(model, ...) or fxquant.quantize_(model, ...) frees them"
        )


@functools.lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def _weight(slot: Slot, value: Tensor) -> QuantizedTensor:
    """The quantised weight that an input stands for."""
    if slot.plain:
        return CONVERSIONS.get(value, slot.spec, slot.name)
    assert isinstance(value, QuantizedTensor)
    return value


# -- the graph ------------------------------------------------------------------------------------------------------------


def _swap_inputs(
    graph: fx.Graph, inputs: Sequence[Any], slots: Sequence[Slot], weights: Mapping[int, QuantizedTensor]
) -> tuple[list[int], list[Any]]:
    """Put placeholders for the components behind the others and mark the weights' own; returns kept indices and inputs.

    The weights' own placeholders are dropped once the passes have taken every use from them (``_inductor``).
    """
    placeholders = list(graph.find_nodes(op="placeholder"))
    fake_mode = detect_fake_mode(inputs) or _tracing_fake_mode()
    kept = [index for index in range(len(inputs)) if index not in weights]
    new_inputs = [inputs[index] for index in kept]
    last = placeholders[-1] if placeholders else None
    for slot in slots:
        weight, node = weights[slot.index], placeholders[slot.index]
        parts = []
        for name, component in zip(weight.spec.scheme.weight.components, weight.components, strict=True):
            fake = component if fake_mode is None else fake_mode.from_tensor(component, static_shapes=True)
            with graph.inserting_after(last):
                last = graph.placeholder(f"{node.name}_{name}")
            last.meta = {"example_value": fake, "tensor_dict": {"_dynamo_static_input_type": "unguarded"}}
            _set_source(last, node, name)
            parts.append(last)
            new_inputs.append(fake)
        node.meta[META_KEY] = QuantizedInput(components=tuple(parts), spec=slot.spec, name=slot.name)
    return kept, new_inputs


def _set_source(node: fx.Node, owner: fx.Node, name: str) -> None:
    """Dynamo's note of where an input comes from: AOTAutograd asks for it to tell weights (static inputs) from activations."""
    from torch._dynamo.source import AttrSource

    source = getattr(owner, "_dynamo_source", None)
    node._dynamo_source = None if source is None else AttrSource(source, name)  # type: ignore[attr-defined]


def _tracing_fake_mode() -> Any:
    context = TracingContext.try_get()
    return None if context is None else context.fake_mode


def _inductor(gm: fx.GraphModule, inputs: list[Any], options: BackendOptions) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    for node in gm.graph.find_nodes(op="placeholder"):
        if META_KEY in node.meta:
            gm.graph.erase_node(node)
    gm.recompile()
    patches = options.inductor_patches()
    marked = dict(torch._inductor.config.unsafe_marked_cacheable_functions)
    patches["unsafe_marked_cacheable_functions"] = {**marked, "fxquant.passes.rewrite_sites.dequantize_weight": _code_digest()}
    with torch.no_grad():
        compiled: Callable[..., Any] = compile_fx(gm, inputs, config_patches=patches)
    return compiled


@functools.cache
def _code_digest() -> str:
    """Digest of the kernels' source: AOTAutograd's cache knows our ops by name alone, so it must see when their code changes."""
    digest = hashlib.sha256()
    for path in sorted(Path(kernels.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# -- the call -------------------------------------------------------------------------------------------------------------


def _user_inputs(graph: fx.Graph, inputs: Sequence[Any]) -> list[int]:
    """Indices of the float tensors that a caller passes: what is neither parameter nor buffer."""
    return [
        index
        for index, (node, value) in enumerate(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and not node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    ]


def _runner(
    compiled: Callable[..., Any], eager: fx.GraphModule, slots: Sequence[Slot], kept: list[int], user_inputs: list[int]
) -> Callable[..., Any]:
    """The function that Dynamo calls with the graph's inputs."""
    stored = [(slot.index, slot.spec, slot.spec.scheme.weight.components) for slot in slots if not slot.plain]
    copied = [slot for slot in slots if slot.plain]
    take_kept = operator.itemgetter(*kept) if len(kept) > 1 else lambda args: tuple(args[index] for index in kept)

    def run(*args: Any) -> Any:
        if user_inputs and torch.is_grad_enabled():
            args = _without_grad(args, user_inputs)
        inputs = [*take_kept(args)]
        for index, spec, components in stored:
            weight = args[index]
            if type(weight) is not QuantizedTensor or (weight.spec is not spec and weight.spec != spec):
                return _run_eagerly(eager, args, slots)
            for name in components:
                inputs.append(getattr(weight, name))
        for slot in copied:
            inputs.extend(CONVERSIONS.get(args[slot.index], slot.spec, slot.name).components)
        return compiled(*inputs)

    return run


def _without_grad(args: tuple[Any, ...], user_inputs: Sequence[int]) -> tuple[Any, ...]:
    tracked = [index for index in user_inputs if args[index].requires_grad]
    if not tracked:
        return args
    for index in tracked:
        if args[index].is_leaf:
            raise UnsupportedError(
                f"an input of shape {tuple(args[index].shape)} requires grad, but fxquant compiles for inference only; call the "
                "model under torch.no_grad(), or pass input.detach()"
            )
    _warn_once("fxquant backend: an input carries a gradient history; it is detached, fxquant compiles for inference only")
    detached = list(args)
    for index in tracked:
        detached[index] = args[index].detach()
    return tuple(detached)


def _run_eagerly(eager: fx.GraphModule, args: tuple[Any, ...], slots: Sequence[Slot]) -> Any:
    """Run the graph as traced, with whatever weights arrive: right, but not compiled."""
    for slot in slots:
        weight = args[slot.index]
        if tuple(weight.shape) != slot.spec.shape or weight.dtype != slot.spec.dtype:
            raise UnsupportedError(
                f"{slot.name}: the compiled graph is for a weight of shape {slot.spec.shape} and {slot.spec.dtype}, got "
                f"{tuple(weight.shape)} and {weight.dtype}; compile the model again (torch.compiler.reset() drops old graphs)"
            )
    _warn_once(
        "fxquant backend: a weight is no longer in the format that a graph was compiled for; the graph runs uncompiled. "
        "Compile the model again: torch.compiler.reset(), then fxquant.compile(model)"
    )
    given = list(args)
    for slot in slots:
        if slot.plain:
            given[slot.index] = CONVERSIONS.get(given[slot.index], slot.spec, slot.name)
    with torch.no_grad():
        return eager(*given)
