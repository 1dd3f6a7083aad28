"""The layers of a model that a rule can speak of: their names, kinds, shapes and parameters. Touches no weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .kernels.quantized_tensor import QuantizedTensor

HEAD_NAMES = frozenset({"lm_head", "embed_out", "output_embeddings"})
PACKED_PROJECTION = "packed projection"
"""Kind of nn.MultiheadAttention's one matrix for q, k and v, which torch's attention functions read by itself."""
SHARED_WEIGHT = "weight shared with a module that is no linear layer"
"""Kind of a linear layer whose weight something else reads too: quantising it would break the tie."""
ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate"})


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer.

    Args:
        name: module path, e.g. ``model.layers.0.self_attn.q_proj``.
        kind: ``linear``, ``moe``, ``head``, ``router``, ``embedding`` or ``packed projection``.
        rows, columns: out features N and in features K (of one expert).
        contraction: dimension of the parameter that is contracted: -1 (nn.Linear), -2 (Conv1D).
        nbytes: bytes of the weights as they are now; 0 for a head whose weight is the embedding's.
        device: where the weight lives.
        dtype: its logical dtype.
        parameters: names of the weights in the module, ``weight`` or the 3-D parameters of experts.
        quantized: the weight as it is, where it is quantised already.
        tied_to: the first layer that holds the same parameter, where this is not the first.
    """

    name: str
    kind: str
    rows: int
    columns: int
    contraction: int
    nbytes: int
    device: torch.device
    dtype: torch.dtype
    parameters: tuple[str, ...] = ("weight",)
    quantized: QuantizedTensor | None = None
    tied_to: str | None = None


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
    layers: list[Layer] = []
    first_owner: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for layer, parameter in _layers_of(name, module, embeddings, heads):
            if layer.kind == "linear" and id(parameter) in others:
                layer = replace(layer, kind=SHARED_WEIGHT)
            owner = name if layer.kind == "embedding" else first_owner.setdefault(id(parameter), name)
            layers.append(layer if owner == name else replace(layer, tied_to=owner))
    return layers


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
        if type(module).__module__.startswith("torch.nn."):
            return  # convolutions, Bilinear
        stacks = {key: p for key, p in module._parameters.items() if p is not None and p.dim() == 3 and p.shape[0] > 1}
        if stacks:
            first = next(iter(stacks.values()))
            yield (
                Layer(
                    name=name,
                    kind="moe",
                    rows=first.shape[-2],
                    columns=first.shape[-1],
                    contraction=-2 if getattr(module, "is_transposed", False) else -1,
                    nbytes=sum(p.numel() * p.itemsize for p in stacks.values()),
                    device=first.device,
                    dtype=first.dtype,
                    parameters=tuple(stacks),
                ),
                first,
            )


def matrix_layer(name: str, kind: str, weight: torch.Tensor, contraction: int) -> Layer:
    """The layer of a 2-D weight, quantised already or not."""
    rows, columns = weight.shape if contraction == -1 else weight.shape[::-1]
    quantized = weight if isinstance(weight, QuantizedTensor) else None
    return Layer(
        name=name,
        kind=kind,
        rows=rows,
        columns=columns,
        contraction=contraction,
        nbytes=quantized.stored_nbytes if quantized is not None else weight.numel() * weight.itemsize,
        device=weight.device,
        dtype=weight.dtype,
        quantized=quantized,
    )
