"""A Dynamo graph over quantised weights: which inputs are weights, their components as inputs in their place, and the passes.

Dynamo reuses one compiled graph for every layer of a class, so a weight is an input of the graph, never a constant in it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn
from torch._guards import TracingContext, detect_fake_mode

from .conversions import CONVERSIONS
from .errors import RuleError, UnsupportedError
from .graph_layers import graph_layers, layer_name, parameter_name
from .kernels.capability import Problem, choose
from .kernels.pack import packed_spec
from .kernels.quantized_tensor import QuantizedTensor
from .kernels.weight_spec import WeightSpec
from .layers import says_experts
from .log import log, warn_once
from .options import BackendOptions
from .passes.fuse_siblings import PACK_KEY, PACKED_WITH_KEY, PackedInput
from .passes.inline_checkpoints import inline_checkpoints
from .passes.pipeline import run_passes
from .passes.rewrite_sites import META_KEY, QuantizedInput
from .passes.weights import value_of
from .planner import NO_METHOD, Plan, megabytes, plan_layers

_STATIC = {"tensor_dict": {"_dynamo_static_input_type": "unguarded"}}
"""Meta of a placeholder whose tensors stay where they are: a CUDA graph need not copy them."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One weight input of a graph.

    Args:
        index: its place among the graph's inputs.
        spec: what the graph was compiled for.
        name: the layer, for messages; relative to the compiled module.
        plain: whether the module holds the float original (a quantised copy is looked up) or the quantised weight itself.
        float_reads: whether an embedding reads the float original too.
    """

    index: int
    spec: WeightSpec
    name: str
    plain: bool
    float_reads: bool = False


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Weights that the rewritten graph reads as one, stacked in this order."""

    slots: tuple[Slot, ...]

    @property
    def spec(self) -> WeightSpec:
        return packed_spec(tuple(slot.spec for slot in self.slots))


@dataclass(frozen=True, kw_only=True)
class Calls:
    """How the inputs of a traced graph become those of the rewritten one. Holds no tensor.

    Args:
        traced: Dynamo's graph as it came.
        groups: the weights among its inputs that are read one by one, those with equally many components together.
        packs: the weights that are read as stacks, likewise.
        kept: indices of the inputs that the rewritten graph takes as they are; behind them come, for each group, the first
            components of all its weights, the second ones, and so on; then the same for the stacks.
        user_inputs: indices of the float tensors among them that are neither parameter nor buffer.
    """

    traced: fx.GraphModule
    groups: tuple[tuple[Slot, ...], ...]
    packs: tuple[tuple[Packing, ...], ...]
    kept: tuple[int, ...]
    user_inputs: tuple[int, ...]

    @property
    def slots(self) -> Iterator[Slot]:
        packed = (packing.slots for packing in itertools.chain.from_iterable(self.packs))
        return itertools.chain.from_iterable((*self.groups, *packed))


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """A rewritten graph, example inputs of it, how to call it, and how often each pass matched, by name."""

    gm: fx.GraphModule
    inputs: list[Any]
    calls: Calls
    matches: dict[str, int]


def rewrite(gm: fx.GraphModule, example_inputs: Sequence[Any], options: BackendOptions) -> Rewritten:
    """Rewrite a copy of Dynamo's graph; raises as ``fxquant_backend`` does."""
    traced = _copy(gm)
    inline_checkpoints(traced)
    traced.recompile()
    slots = _find_slots(traced.graph, example_inputs, options)
    rewritten = _copy(traced)
    weights = {slot.index: _weight(slot, example_inputs[slot.index]) for slot in slots}
    placeholders = list(rewritten.graph.find_nodes(op="placeholder"))
    _add_components(rewritten.graph, placeholders, example_inputs, slots, weights, options)
    matches = run_passes(rewritten.graph)
    groups, packs = _order(rewritten.graph, placeholders, slots)
    replaced = {slot.index for slot in slots if not slot.float_reads}
    calls = Calls(
        traced=traced,
        groups=groups,
        packs=packs,
        kept=tuple(index for index in range(len(placeholders)) if index not in replaced),
        user_inputs=_user_inputs(traced.graph, example_inputs),
    )
    inputs = [example_inputs[index] for index in calls.kept]
    inputs += [value_of(node) for node in rewritten.graph.find_nodes(op="placeholder")[len(inputs) :]]
    rewritten.recompile()
    return Rewritten(gm=rewritten, inputs=inputs, calls=calls, matches=matches)


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
        if not converted and any(layer.kind in ("linear", "moe") for layer, _ in layers):
            warn_once(
                "fxquant backend: no quantization option and no quantised weight: a graph is compiled as it is; give "
                'options={"quantization": ...} or convert the model first: fxquant.quantize_(model, ...)'
            )
        return []
    prefixes = {layer.name for layer, _ in layers}
    prefixes |= {name[:i] for name in prefixes for i, character in enumerate(name) if character == "."}
    try:
        decided = plan_layers(
            [layer for layer, _ in layers],
            policy,
            linear_backend=options.linear_backend,
            moe_backend=options.moe_backend,
            strict=options.strict,
            packed_modules_mapping=options.packed_modules_mapping,
            containers=prefixes,
        )
    except RuleError as error:
        raise RuleError(
            f"{error}\n(These are the layers of one compiled graph, named relative to the module given to torch.compile "
            "or, behind a graph break, to the part that goes on. A name may belong to another part: fxquant.compile and "
            "fxquant.quantize_ see the whole module, where strict=False would judge each part by itself.)",
            error.layers,
        ) from None
    for line in decided.summary():
        log.info("%s", line)
    by_name = {layer.name: layer for layer in decided.chosen}
    slots = []
    embedded = {node for layer, nodes in layers for node in nodes if layer.kind == "embedding"}
    for layer, nodes in layers:
        chosen = by_name.get(layer.name)
        if chosen is not None and chosen.scheme is not None and layer.tied_to is None:
            backend = options.moe_backend if layer.kind == "moe" else options.linear_backend
            for weight, node in zip(layer.weights, nodes, strict=True):
                spec = weight.spec(chosen.scheme, layer.dtype, backend)
                index = placeholders.index(node)
                slots.append(Slot(index=index, spec=spec, name=layer.name, plain=True, float_reads=node in embedded))
    if policy.moe is not None or policy.targets:
        _say_unread_experts(placeholders, inputs, {node for _, nodes in layers for node in nodes})
    if not slots and not converted:
        _say_nothing_is_quantised(decided, inputs, options)
    _say_originals_stay(slots, inputs)
    return slots


def _say_nothing_is_quantised(decided: Plan, inputs: Sequence[Any], options: BackendOptions) -> None:
    lines = list(decided.summary())
    if options.strict and any(layer.reason.startswith(NO_METHOD) for layer in decided.layers):
        raise UnsupportedError(decided.nothing())
    if any(isinstance(value, nn.Parameter) and value.dim() in (2, 3) for value in inputs):
        lines = lines or [
            "it multiplies with no weight that a rule can reach: a fused call such as PyTorch's fast path of",
            "  nn.TransformerEncoderLayer (torch.backends.mha.set_fastpath_enabled(False) takes it apart)",
        ]
        warn_once("fxquant backend: no layer of this graph is quantised:\n  " + "\n  ".join(lines))


def _say_unread_experts(placeholders: Sequence[fx.Node], inputs: Sequence[Any], read: set[fx.Node]) -> None:
    """Experts that the graph reads in a way that is no known product (sliced, or gathered into more dimensions)."""
    names = [
        parameter_name(node) or node.name
        for node, value in zip(placeholders, inputs, strict=True)
        if isinstance(value, nn.Parameter) and not isinstance(value, QuantizedTensor) and value.dim() == 3 and node not in read
    ]
    named = [name for name in names if says_experts(name.rpartition(".")[0], "")]
    if named:
        warn_once(
            f"fxquant backend: the experts {', '.join(named)} are read otherwise than by grouped_mm, bmm, matmul, einsum or "
            "expert by expert, and stay as they are; fxquant.quantize_ converts them and dequantises what is read"
        )


def _say_originals_stay(slots: Sequence[Slot], inputs: Sequence[Any]) -> None:
    fresh = [slot for slot in slots if inputs[slot.index] not in CONVERSIONS]
    if fresh:
        held = sum(inputs[slot.index].numel() * inputs[slot.index].itemsize for slot in fresh)
        warn_once(
            f"fxquant backend: the module keeps the {len(fresh)} original weights of this graph ({megabytes(held)} MB) beside "
            "their quantised copies; fxquant.compile(model, ...) or fxquant.quantize_(model, ...) frees them"
        )


def _weight(slot: Slot, value: Tensor) -> QuantizedTensor:
    """The quantised weight that an input stands for."""
    if slot.plain:
        return CONVERSIONS.get(value, slot.spec, slot.name)
    assert isinstance(value, QuantizedTensor)
    return value


def _add_components(
    graph: fx.Graph,
    placeholders: Sequence[fx.Node],
    inputs: Sequence[Any],
    slots: Sequence[Slot],
    weights: Mapping[int, QuantizedTensor],
    options: BackendOptions,
) -> None:
    """Put placeholders for the weights' components behind the others and mark the weights' own."""
    fake_mode = detect_fake_mode(inputs) or _tracing_fake_mode()
    owners = {id(weights[slot.index].record): placeholders[slot.index] for slot in slots}
    last = placeholders[-1] if placeholders else None
    for slot in slots:
        owner, weight, nodes = placeholders[slot.index], weights[slot.index], []
        for name, component in zip(slot.spec.scheme.weight.components, weight.components, strict=True):
            with graph.inserting_after(last):
                last = graph.placeholder(f"{owner.name}_{name}")
            fake = component if fake_mode is None else fake_mode.from_tensor(component, static_shapes=True)
            last.meta = {"example_value": fake, **_STATIC}
            _set_source(last, owner, name)
            nodes.append(last)
        spec = _with_backend(slot, weight, options)
        owner.meta[META_KEY] = QuantizedInput(components=tuple(nodes), spec=spec, name=slot.name, float_reads=slot.float_reads)
        if weight.pack is not None:
            owner.meta[PACKED_WITH_KEY] = tuple(owners.get(id(member)) for member in weight.pack.members)


def _order(
    graph: fx.Graph, placeholders: Sequence[fx.Node], slots: Sequence[Slot]
) -> tuple[tuple[tuple[Slot, ...], ...], tuple[tuple[Packing, ...], ...]]:
    """Drop the placeholders that the passes left without a use and put the others into the order that ``Calls`` describes.

    Returns:
        The groups and the packs of ``Calls``.
    """
    slot_of = {placeholders[slot.index]: slot for slot in slots}
    packed = dict.fromkeys(node.meta[PACK_KEY] for node in graph.find_nodes(op="placeholder") if PACK_KEY in node.meta)
    members = {member for pack in packed for member in pack.members}
    groups: dict[Any, list[fx.Node]] = defaultdict(list)
    packs: dict[Any, list[PackedInput]] = defaultdict(list)
    for node, slot in slot_of.items():
        if node not in members:
            groups[slot.spec.scheme.weight.components].append(node)
    for pack in packed:
        names = slot_of[pack.members[0]].spec.scheme.weight.components
        packs[names].append(pack)
        for node, name in zip(pack.components, names, strict=True):
            node.meta.update(_STATIC)
            _set_source(node, pack.members[0], f"pack_{name}")
    body = next(node for node in graph.nodes if node.op != "placeholder")
    inputs = [[node.meta[META_KEY] for node in group] for group in groups.values()]
    for alike in (*inputs, *packs.values()):
        for column in zip(*(weight.components for weight in alike), strict=True):
            for node in column:
                body.prepend(node)
    for node, slot in slot_of.items():
        if node in members:
            for component in node.meta[META_KEY].components:
                graph.erase_node(component)
        if not slot.float_reads:
            graph.erase_node(node)
    return (
        tuple(tuple(slot_of[node] for node in group) for group in groups.values()),
        tuple(
            tuple(Packing(slots=tuple(slot_of[member] for member in pack.members)) for pack in group)
            for group in packs.values()
        ),
    )


def _with_backend(slot: Slot, weight: QuantizedTensor, options: BackendOptions) -> WeightSpec:
    """The slot's spec with the kernel family that the options pin, checked."""
    family = options.moe_backend if slot.spec.experts else options.linear_backend
    spec = slot.spec if family == "auto" else replace(slot.spec, backend=family)
    problem = Problem.on(weight.device, spec.scheme, spec.rows, spec.columns, dtype=spec.dtype, experts=spec.experts)
    try:
        choose(problem, spec.backend)
    except UnsupportedError as error:
        raise UnsupportedError(f"{slot.name}: {error}") from None
    return spec


def _set_source(node: fx.Node, owner: fx.Node, name: str) -> None:
    """Dynamo's note of where an input comes from: AOTAutograd asks for it to tell weights (static inputs) from activations."""
    from torch._dynamo.source import AttrSource

    source = getattr(owner, "_dynamo_source", None)
    node._dynamo_source = None if source is None else AttrSource(source, name)  # type: ignore[attr-defined]


def _tracing_fake_mode() -> Any:
    context = TracingContext.try_get()
    return None if context is None else context.fake_mode


def _user_inputs(graph: fx.Graph, inputs: Sequence[Any]) -> tuple[int, ...]:
    """Indices of the float tensors that a caller passes: what is neither parameter nor buffer."""
    return tuple(
        index
        for index, (node, value) in enumerate(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and not node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    )
