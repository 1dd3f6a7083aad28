"""The layers of a model that a rule can speak of: their names, kinds, shapes and parameters. Touches no weight."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from .kernels.formats import Scheme
from .kernels.quantized_tensor import QuantizedTensor
from .kernels.weight_spec import WeightSpec

HEAD_NAMES = frozenset({"lm_head", "embed_out", "output_embeddings"})
PACKED_PROJECTION = "packed projection"
"""Kind of nn.MultiheadAttention's one matrix for q, k and v, which torch's attention functions read by itself."""
SHARED_WEIGHT = "weight shared with a module of another sort"
"""Kind of a layer whose weight, or part of whose experts, something else reads too: quantising it would break the tie."""
GATE_UP = r"gate_up|up_gate|w13"
"""Names of parameters that hold gate and up together."""
ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate"})


@dataclass(frozen=True, kw_only=True)
class LayerWeight:
    """One weight of a layer, as its products read it.

    Args:
        parameter: name in the module: ``weight``, or that of a 3-D parameter of experts.
        rows, columns: out features N and in features K (of one expert).
        contraction: dimension of the parameter that is contracted: -1 (nn.Linear), -2 (Conv1D).
        experts, shards, interleaved: see ``WeightSpec``.
    """

    parameter: str
    rows: int
    columns: int
    contraction: int = -1
    experts: int = 0
    shards: tuple[int, ...] = ()
    interleaved: bool = False

    def spec(self, scheme: Scheme, dtype: torch.dtype, backend: str) -> WeightSpec:
        """What the weight is once it is quantised."""
        return WeightSpec(
            scheme=scheme,
            rows=self.rows,
            columns=self.columns,
            dtype=dtype,
            contraction=self.contraction,
            experts=self.experts,
            shards=self.shards,
            interleaved=self.interleaved,
            backend=backend,
        )


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer.

    Args:
        name: module path, e.g. ``model.layers.0.self_attn.q_proj``.
        kind: ``linear``, ``moe``, ``head``, ``router``, ``embedding`` or ``packed projection``.
        weights: its weights: one, or the 3-D parameters of experts.
        nbytes: bytes of the weights as they are now; 0 for a head whose weight is the embedding's.
        device: where the weights live.
        dtype: their logical dtype; of several the one that cannot be converted.
        quantized: specs of the weights that are quantised already.
        tied_to: the first layer that holds the same parameter, where this is not the first.
    """

    name: str
    kind: str
    weights: tuple[LayerWeight, ...]
    nbytes: int
    device: torch.device
    dtype: torch.dtype
    quantized: tuple[WeightSpec, ...] = ()
    tied_to: str | None = None

    @property
    def holds_experts(self) -> bool:
        return any(weight.experts for weight in self.weights)


def is_router(name: str) -> bool:
    """Whether a module path names a router: any component is exactly gate, router or shared_expert_gate."""
    return not ROUTER_NAMES.isdisjoint(name.split("."))


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D (GPT-2): y = x @ weight + bias with weight (K, N)."""
    return any(cls.__module__ == "transformers.pytorch_utils" and cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def find_layers(model: nn.Module) -> list[Layer]:
    """Every layer of ``model`` that a rule may name, in module order; tied layers appear under each of their names."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    others = {id(p) for m in model.modules() if not _is_linear(m) for p in m._parameters.values() if p is not None} - embeddings
    heads = {id(head) for head in _output_embeddings(model)}
    holders = _holders_of_stacks(model)
    layers: list[Layer] = []
    first_owner: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for layer, parameter in _layers_of(name, module, embeddings, heads):
            stacks = [module._parameters[weight.parameter] for weight in layer.weights] if layer.kind == "moe" else []
            if any(len(holders[id(stack)]) > 1 for stack in stacks):
                new = [p for p in stacks if p is not None and first_owner.setdefault(id(p), name) == name]
                layers.append(replace(layer, kind=SHARED_WEIGHT, nbytes=sum(p.numel() * p.itemsize for p in new)))
                continue
            if layer.kind == "linear" and id(parameter) in others:
                layer = replace(layer, kind=SHARED_WEIGHT)
            owner = name if layer.kind == "embedding" else first_owner.setdefault(id(parameter), name)
            layers.append(layer if owner == name else replace(layer, tied_to=owner))
    return layers


def _holders_of_stacks(model: nn.Module) -> dict[int, set[frozenset[int]]]:
    """For each 3-D parameter the sets of such parameters that the modules which hold it hold."""
    holders: dict[int, set[frozenset[int]]] = defaultdict(set)
    for module in model.modules():
        held = frozenset(id(p) for p in module._parameters.values() if p is not None and not is_lazy(p) and p.dim() == 3)
        for stack in held:
            holders[stack].add(held)
    return holders


def _output_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        if callable(getter):
            try:
                head = getter()
            except (NotImplementedError, AttributeError):
                continue
            if isinstance(head, nn.Module):
                yield head


def _layers_of(name: str, module: nn.Module, embeddings: set[int], heads: set[int]) -> Iterator[tuple[Layer, nn.Parameter]]:
    weight = module._parameters.get("weight")
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and weight is not None:
        yield matrix_layer(name, "embedding", weight, -1), weight
    elif _is_linear(module):
        if weight is None or is_lazy(weight) or weight.dim() != 2:
            return  # parametrised (the weight is computed in every forward), or not initialised yet
        last = name.rpartition(".")[2]
        head = id(weight) in embeddings or id(module) in heads or last in HEAD_NAMES
        kind = "head" if head else "router" if is_router(name) else "linear"
        layer = matrix_layer(name, kind, weight, -2 if is_conv1d(module) else -1)
        yield (replace(layer, nbytes=0) if id(weight) in embeddings else layer), weight
    elif is_router(name) and weight is not None and weight.dim() == 2:
        yield matrix_layer(name, "router", weight, -1), weight
    elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        packed = module.in_proj_weight
        yield matrix_layer(f"{name}.in_proj_weight".lstrip("."), PACKED_PROJECTION, packed, -1), packed
    else:
        stacks = {key: p for key, p in module._parameters.items() if p is not None and _is_stack(key, p)}
        if stacks and not isinstance(module, _ConvNd) and says_experts(name, type(module).__name__):
            weights = [expert_weight(module, key, stacks) for key in stacks]
            yield layer_of(name, "moe", weights, list(stacks.values())), next(iter(stacks.values()))


def says_experts(name: str, class_name: str) -> bool:
    """Whether a module that owns 3-D parameters calls itself experts, by its class, its own name or that of the one around it.

    Other modules have such parameters too: position tables, weights by attention head, causal convolutions.
    """
    return re.search(r"expert|moe", " ".join([class_name, *name.split(".")[-2:]]), re.IGNORECASE) is not None


def _is_stack(parameter: str, value: torch.Tensor) -> bool:
    """Whether a parameter of experts holds matrices, not biases."""
    return (
        not is_lazy(value) and value.dim() == 3 and value.numel() > 0 and min(value.shape[1:]) > 1 and "bias" not in parameter
    )


def expert_weight(module: nn.Module, parameter: str, stacks: Mapping[str, torch.Tensor]) -> LayerWeight:
    """How a module of experts reads one of its 3-D parameters.

    transformers' modules say whether their weights are transposed ([E, K, N]) and whether gate and up are concatenated or
    interleaved. Others are asked for the same attributes; without them the shapes of a gate_up and a down weight tell the
    order, and where they do not it is that of F.linear, [E, N, K].
    """
    transposed = getattr(module, "is_transposed", None)
    if transposed is None:
        transposed = _looks_transposed([tuple(stack.shape) for stack in stacks.values()])
    return stack_weight(
        parameter,
        stacks[parameter].shape,
        contraction=-2 if transposed else -1,
        has_gate=getattr(module, "has_gate", True),
        interleaved=not getattr(module, "is_concatenated", True),
    )


def stack_weight(
    parameter: str, shape: torch.Size, *, contraction: int, has_gate: bool = True, interleaved: bool = False
) -> LayerWeight:
    """A 3-D parameter of experts; one that holds gate and up by its name has a shard for each, interleaved or stacked."""
    experts, *matrix = shape
    rows, columns = matrix if contraction == -1 else reversed(matrix)
    gated = re.search(GATE_UP, parameter) is not None and has_gate and rows % 2 == 0
    return LayerWeight(
        parameter=parameter,
        rows=rows,
        columns=columns,
        contraction=contraction,
        experts=experts,
        shards=(rows // 2, rows // 2) if gated else (),
        interleaved=gated and interleaved,
    )


def _looks_transposed(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether two of the stacks are a gate_up [E, H, 2I] and a down [E, I, H]."""
    pairs = itertools.permutations(shapes, 2)
    return any(up[1] == down[2] and up[2] == 2 * down[1] and up[1:] != (2 * down[2], down[1]) for up, down in pairs)


def matrix_layer(name: str, kind: str, weight: torch.Tensor, contraction: int) -> Layer:
    """The layer of a 2-D weight, quantised already or not."""
    rows, columns = weight.shape if contraction == -1 else weight.shape[::-1]
    return layer_of(
        name, kind, [LayerWeight(parameter="weight", rows=rows, columns=columns, contraction=contraction)], [weight]
    )


def can_convert(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype can be quantised: float16, bfloat16 and float32."""
    return dtype.is_floating_point and dtype.itemsize in (2, 4)


def layer_of(name: str, kind: str, weights: Sequence[LayerWeight], values: Sequence[torch.Tensor]) -> Layer:
    """The layer of these weights, quantised already or not."""
    return Layer(
        name=name,
        kind=kind,
        weights=tuple(weights),
        nbytes=sum(getattr(value, "stored_nbytes", value.numel() * value.itemsize) for value in values),
        device=values[0].device,
        dtype=next((value.dtype for value in values if not can_convert(value.dtype)), values[0].dtype),
        quantized=tuple(value.spec for value in values if isinstance(value, QuantizedTensor)),
    )
