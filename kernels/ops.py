"""The custom ops ``torch.ops.fxquant.*``: the IR between the passes and the kernels.

They are composite: a Dynamo or exported graph shows one op with its formats; AOTAutograd and ``run_decompositions()`` take
it apart, so the quantisation becomes plain torch ops that Inductor fuses with what stands in front, and the product becomes
the kernel that the capability table picks. A tensor in a format is the list of its components (``Format.components``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import numerics
from .capability import INT8_PACK, SCALED_MM, Problem, choose
from .errors import UnsupportedError
from .formats import WHOLE, Format, Scheme, activation_format_named, weight_format_named

NO_ACTIVATION = "none"
"""Activation format name for weight-only products: the activation is [x]."""


def quantize_activation(x: Tensor, format: str) -> list[Tensor]:
    """Quantise an activation with scales made from ``x`` itself.

    Args:
        x: (..., K), one dimension or more, float16, bfloat16 or float32.
        format: an activation format of the grammar, e.g. ``fp8_per_token``.

    Returns:
        [xq (..., K, or ceil(K/2) bytes of 4-bit codes), xs]; the shape of xs is () per tensor, (..., 1) per token,
        (..., blocks) by blocks of a row. nvfp4 has a third, the global scale of each token (..., 1).

    Raises:
        UnsupportedError: ``format`` is not an activation format, or ``x`` is not a float tensor of one dimension or more.
    """
    spec = activation_format_named(format)
    if x.dim() == 0 or not x.is_floating_point():
        raise UnsupportedError(
            f"quantize_activation takes a float tensor of one dimension or more, got {x.dim()} dimensions of {x.dtype}"
        )
    if spec.block == (WHOLE, WHOLE):
        qdata, *scales = numerics.quantize(x.reshape(1, -1) if x.numel() else x.new_zeros(1, 0), spec)
        return [qdata.view(x.shape), *scales]
    if spec.second_scale:  # each token is a matrix of one row
        qdata, scale, global_scale = numerics.quantize(x.unsqueeze(-2), spec)
        return [qdata.squeeze(-2), scale.squeeze(-2), global_scale.unsqueeze(-1)]
    return numerics.quantize(x, spec)


def dequantize_activation(components: list[Tensor], format: Format, dtype: torch.dtype) -> Tensor:
    """The values of an activation in the form that ``quantize_activation`` gives; packed formats: an even number of columns."""
    if format.second_scale:
        qdata, scale, global_scale = components
        matrices = [qdata.unsqueeze(-2), scale.unsqueeze(-2), global_scale.squeeze(-1)]
        return numerics.dequantize(matrices, format, dtype).squeeze(-2)
    return numerics.dequantize(components, format, dtype)


def _as_rows(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def _one_a_row(scale: Tensor, rows: int) -> Tensor:
    """A () or (rows, 1) scale as a dense (rows, 1) one (an expanded one would have stride 0)."""
    return scale if scale.dim() else scale.repeat(rows, 1)


def _torch_scaled_mm(x: list[Tensor], weight: list[Tensor], bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """(M, N) through torch._scaled_mm; scales are () or (M, 1) and () or (N, 1)."""
    xq, x_scale = x[0].contiguous(), x[1]
    wq, w_scale = weight
    if xq.device.type == "cuda" and out_dtype != torch.bfloat16:
        # The row-wise CUDA kernel writes bfloat16 alone: take the plain product in float32 and scale it behind.
        # The scales are multiplied with each other first: the product times one of them may overflow where the result does not.
        one = x_scale.new_ones(())
        product = torch._scaled_mm(xq, wq.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        product = product * (x_scale * w_scale.t())
        return (product if bias is None else product + bias).to(out_dtype)
    if xq.device.type != "cuda" or x_scale.dim() or w_scale.dim():
        # On the CPU two scalar scales take a path that is hundreds of times slower, and overflows on the way.
        x_scale, w_scale = _one_a_row(x_scale, xq.shape[0]), _one_a_row(w_scale, wq.shape[0])
    if bias is not None:
        bias = bias.to(out_dtype)
    return torch._scaled_mm(xq, wq.t(), scale_a=x_scale, scale_b=w_scale.t(), bias=bias, out_dtype=out_dtype)


def _known(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds for certain; of a size that only the run knows it is not asked."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def _is_empty(x: Tensor) -> bool:
    return any(_known(size == 0) for size in x.shape)


def _is_unbacked(x: Tensor) -> bool:
    """Whether only the run knows a size of ``x``; torch._scaled_mm asks for it while a graph is traced."""
    symbols = [size for size in x.shape if isinstance(size, torch.SymInt)]
    if not symbols:
        return False
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    return any(has_free_unbacked_symbols(size) for size in symbols)


def _int8_pack_is_faster(x: Tensor) -> bool:
    """Always for one token; for more where the CPU has no bfloat16 units, with which dequantising and matmul wins."""
    return not torch.cpu._is_avx512_bf16_supported() or all(_known(size == 1) for size in x.shape[:-1])


def _torch_int8_mm(x: Tensor, weight: list[Tensor], bias: Tensor | None) -> Tensor:
    """(M, N) in the dtype of ``x`` (M, K), bfloat16, through torch._weight_int8pack_mm."""
    wq, w_scale = weight
    # Its scales would have to be rounded to bfloat16: they are applied behind. The ones in their place are no constants, and a
    # view: Inductor (torch 2.13) fails on scales that it has not written to memory.
    ones = w_scale.isfinite().to(x.dtype).as_strided((wq.shape[0],), (1,))
    product = torch._weight_int8pack_mm(x.contiguous(), wq, ones)
    scaled = product.float() * w_scale.t()
    return (scaled if bias is None else scaled + bias).to(x.dtype)


def _operands(
    x: list[Tensor], weight: list[Tensor], scheme: Scheme, shards: list[int], out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Dequantised x and weight of equally many columns: weight-only in ``out_dtype``, quantised activations in float32."""
    activation = scheme.activation
    left = x[0].to(out_dtype) if activation is None else dequantize_activation(x, activation, torch.float32)
    right = numerics.dequantize(weight, scheme.weight, left.dtype, shards=shards)
    columns = min(left.shape[-1], right.shape[-1])
    return left[..., :columns], right[..., :columns]


def _reference_scaled_mm(
    x: list[Tensor], weight: list[Tensor], bias: Tensor | None, scheme: Scheme, shards: list[int], out_dtype: torch.dtype
) -> Tensor:
    """(..., N) by dequantising: weight-only in the activation's dtype, quantised activations in float32."""
    left, right = _operands(x, weight, scheme, shards, out_dtype)
    if scheme.activation is None:
        return F.linear(left, right, None if bias is None else bias.to(out_dtype))
    product = torch.matmul(left, right.t())
    return (product if bias is None else product + bias).to(out_dtype)


def _scheme(weight_format: str, activation: str) -> Scheme:
    return Scheme(
        weight=weight_format_named(weight_format),
        activation=None if activation == NO_ACTIVATION else activation_format_named(activation),
    )


def _columns(x: Tensor, weight: Tensor, scheme: Scheme) -> int:
    """K of the product, after a check that both operands have it (a packed one tells it but for an even number)."""
    x_packed = scheme.activation is not None and scheme.activation.packed
    x_bytes, weight_bytes = x.shape[-1], weight.shape[-1]
    if x_packed != scheme.weight.packed:
        x_bytes, weight_bytes = (x_bytes, (weight_bytes + 1) // 2) if x_packed else ((x_bytes + 1) // 2, weight_bytes)
    columns = 2 * x.shape[-1] if x_packed else x.shape[-1]
    if x_bytes != weight_bytes:
        weight_columns = 2 * weight.shape[-1] if scheme.weight.packed else weight.shape[-1]
        raise UnsupportedError(
            f"the activation has K={columns}, the weight N={weight.shape[-2]}, K={weight_columns}; K must be the same"
        )
    return columns


def _as_asked(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The op with autocast off: its float32 products are to stay in float32."""

    @functools.wraps(op)
    def run(x: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        kind = x[0].device.type
        if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return op(x, *args, **kwargs)
        return op(x, *args, **kwargs)

    return run


@_as_asked
def scaled_mm(
    x: list[Tensor],
    weight: list[Tensor],
    bias: Tensor | None,
    activation: str,
    weight_format: str,
    out_dtype: torch.dtype,
    shards: list[int] | None = None,
    backend: str = "auto",
) -> Tensor:
    """y = x @ w.T + bias on quantised operands.

    Args:
        x: components of the activation, xq (..., K) first; [x] itself when ``activation`` is ``"none"``.
        weight: components of the weight, wq (N, stored K) first.
        bias: (N,), any float dtype, or None.
        activation: format name of x, or ``"none"`` (weight-only).
        weight_format: format name of the weight.
        out_dtype: dtype of the result.
        shards: rows of each matrix that the weight is stacked of (``numerics.stack_shards``); empty or None: it is one.
        backend: kernel family; ``auto`` takes the capability table's choice.

    Returns:
        (..., N) in ``out_dtype``.

    Raises:
        UnsupportedError: a format that does not exist, operands that do not fit, or no kernel of the family serves these
            formats, this shape and this device.
    """
    scheme, shards = _scheme(weight_format, activation), shards or []
    rows, columns = weight[0].shape[0], _columns(x[0], weight[0], scheme)
    kernel = choose(Problem.on(x[0].device, scheme, rows, columns, dtype=out_dtype), backend)
    out_shape = (*x[0].shape[:-1], rows)
    if _is_empty(x[0]) or rows == 0:  # library kernels refuse empty operands; an empty sum is zero
        empty = torch.zeros(out_shape, dtype=out_dtype, device=x[0].device)
        return empty if bias is None else empty + bias.to(out_dtype)
    if kernel.runs == INT8_PACK and _int8_pack_is_faster(x[0]):
        return _torch_int8_mm(_as_rows(x[0].to(out_dtype)), weight, bias).view(out_shape)
    if kernel.runs == SCALED_MM and not _is_unbacked(x[0]):
        x_rows = [_as_rows(x[0]), x[1] if x[1].dim() == 0 else _as_rows(x[1])]
        if len(shards) > 1 and weight[1].dim() == 1:  # a scale for each shard
            weight = [weight[0], torch.cat([s.expand(n, 1) for s, n in zip(weight[1].unbind(), shards, strict=True)])]
        return _torch_scaled_mm(x_rows, weight, bias, out_dtype).view(out_shape)
    return _reference_scaled_mm(x, weight, bias, scheme, shards, out_dtype)


def from_the_end(index: Tensor, size: int) -> Tensor:
    """Numbers of experts with the negative ones counted from the end, as in indexing."""
    return torch.where(index < 0, index + size, index)


def without_padding(x: Tensor, offs: Tensor) -> Tensor:
    """x (T, K) with zeros in the rows behind the last group, which may hold anything and should not count for a joint scale."""
    rows = torch.arange(x.shape[0], device=x.device)
    return torch.where((rows < offs[-1]).unsqueeze(1), x, 0)


def take(part: Tensor, index: Tensor) -> Tensor:
    """Entries of the first dimension; 8-bit floats have no indexing of their own everywhere."""
    if part.dtype.itemsize == 1:
        return part.view(torch.uint8).index_select(0, index).view(part.dtype)
    return part.index_select(0, index)


@_as_asked
def scaled_grouped_mm(
    x: list[Tensor],
    weight: list[Tensor],
    offs: Tensor | None,
    expert_ids: Tensor | None,
    activation: str,
    weight_format: str,
    out_dtype: torch.dtype,
    shards: list[int] | None = None,
    backend: str = "auto",
) -> Tensor:
    """y[i] = x[i] @ w[expert of row i].T on quantised operands.

    Args:
        x: components of the activation, xq (T, K) first, or (E, T, K) where each expert has T rows of its own; [x] itself when
            ``activation`` is ``"none"``.
        weight: components of the experts' weights, wq (E, N, stored K) first.
        offs: (E,) integers, where the rows are sorted by expert: the end of each expert's rows. Rows behind the last are zero.
        expert_ids: (T,) integers in [-E, E), where they are not; the rows of others are zero. One of the two is given for x
            (T, K), none for (E, T, K).
        activation, weight_format, out_dtype, backend: see ``scaled_mm``.
        shards: rows of each matrix that an expert's weight is stacked of (gate and up); empty or None: it is one.

    Returns:
        (T, N) or (E, T, N) in ``out_dtype``.

    Raises:
        UnsupportedError: see ``scaled_mm``; also offs or expert_ids that do not go with x.
    """
    given = (offs is not None) + (expert_ids is not None)
    if given + x[0].dim() != 3:
        raise UnsupportedError(
            f"scaled_grouped_mm takes one of offs and expert_ids with x (T, K), none with (E, T, K); got {given} with "
            f"{x[0].dim()} dimensions"
        )
    scheme, shards = _scheme(weight_format, activation), shards or []
    experts, rows = weight[0].shape[:2]
    columns = _columns(x[0], weight[0], scheme)
    choose(Problem.on(x[0].device, scheme, rows, columns, dtype=out_dtype, experts=experts), backend)
    if _is_empty(x[0]) or rows == 0:
        return torch.zeros((*x[0].shape[:-1], rows), dtype=out_dtype, device=x[0].device)
    if given == 0:
        left, right = _operands(x, weight, scheme, shards, out_dtype)
        return torch.bmm(left, right.mT).to(out_dtype)
    if expert_ids is None:
        assert offs is not None
        return _reference_grouped_mm(x, weight, offs, scheme, shards, out_dtype)
    expert_ids = from_the_end(expert_ids, experts)
    order = expert_ids.argsort(stable=True)
    counts = (expert_ids.unsqueeze(1) == torch.arange(experts, device=expert_ids.device)).sum(0)
    sorted_x = [take(part, order) if part.dim() else part for part in x]
    product = _reference_grouped_mm(sorted_x, weight, counts.cumsum(0), scheme, shards, out_dtype)
    return product.index_select(0, order.argsort())


def _reference_grouped_mm(
    x: list[Tensor], weight: list[Tensor], offs: Tensor, scheme: Scheme, shards: list[int], out_dtype: torch.dtype
) -> Tensor:
    """(T, N) for rows sorted by expert, as one batched product over tiles of rows of one expert each.

    A tile has about as many rows as an expert has on average, so there are at most 2 E tiles and 2 (T + E) rows in them,
    however the rows are spread; and at most T tiles, so that a few rows dequantise a few experts. It has two rows or more:
    tiles of one would make a second graph for few tokens, and an exported one could not take any number of them.
    """
    tokens, experts = x[0].shape[0], weight[0].shape[0]
    height = (tokens + experts - 1) // experts + 1
    count = torch.sym_min(tokens, tokens // height + experts)  # type: ignore[no-untyped-call]
    ends = offs.long()
    begins = F.pad(ends, (1, 0))[:-1]
    tile_ends = ((ends - begins + height - 1) // height).cumsum(0)
    tile_begins = F.pad(tile_ends, (1, 0))[:-1]

    tile = torch.arange(count, device=ends.device)
    expert = torch.searchsorted(tile_ends, tile, right=True).clamp(max=experts - 1)
    first = begins[expert] + (tile - tile_begins[expert]) * height
    rows = (first.unsqueeze(1) + torch.arange(height, device=ends.device)).clamp(min=0, max=tokens - 1)
    left, right = _operands(x, [take(part, expert) for part in weight], scheme, shards, out_dtype)
    product = torch.bmm(left[rows], right.mT)

    row = torch.arange(tokens, device=ends.device)
    owner = torch.searchsorted(ends, row, right=True)
    inside = (row < ends[-1]).unsqueeze(1)
    owner = owner.clamp(max=experts - 1)
    offset = row - begins[owner]
    place = (tile_begins[owner] + offset // height).clamp(max=count - 1)
    return torch.where(inside, product[place, offset % height], 0).to(out_dtype)


_library = torch.library.Library("fxquant", "DEF")  # type: ignore[no-untyped-call]
for _schema, _function in (
    ("quantize_activation(Tensor x, str format) -> Tensor[]", quantize_activation),
    (
        "scaled_mm(Tensor[] x, Tensor[] weight, Tensor? bias, str activation, str weight_format, ScalarType out_dtype, "
        "int[]? shards=None, str backend='auto') -> Tensor",
        scaled_mm,
    ),
    (
        "scaled_grouped_mm(Tensor[] x, Tensor[] weight, Tensor? offs, Tensor? expert_ids, str activation, str weight_format, "
        "ScalarType out_dtype, int[]? shards=None, str backend='auto') -> Tensor",
        scaled_grouped_mm,
    ),
):
    _library.define(_schema)  # type: ignore[no-untyped-call]
    _library.impl(_schema.partition("(")[0], _function, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
