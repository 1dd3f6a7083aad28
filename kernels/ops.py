"""The custom ops ``torch.ops.fxquant.*``: the IR between the passes and the kernels.

They are composite: a Dynamo or exported graph shows one op with its formats; AOTAutograd and ``run_decompositions()`` take
it apart, so the quantisation becomes plain torch ops that Inductor fuses with what stands in front, and the product becomes
the kernel that the capability table picks. A tensor in a format is the list of its components (``Format.components``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import numerics
from .capability import Problem, choose_linear
from .errors import UnsupportedError
from .formats import WHOLE, Scheme, activation_format_named, weight_format_named

NO_ACTIVATION = "none"
"""Activation format name for weight-only products: the activation is [x]."""


def quantize_activation(x: Tensor, format: str) -> list[Tensor]:
    """Quantise an activation with scales made from ``x`` itself.

    Args:
        x: (..., K), one dimension or more, float16, bfloat16 or float32.
        format: an activation format of the grammar, e.g. ``fp8_per_token``.

    Returns:
        [xq (..., K), xs]; the shape of xs is () per tensor, (..., 1) per token, (..., ceil(K/128)) per 1x128 block.

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
    return numerics.quantize(x, spec)


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


def _reference_scaled_mm(
    x: list[Tensor], weight: list[Tensor], bias: Tensor | None, scheme: Scheme, out_dtype: torch.dtype
) -> Tensor:
    """(..., N) by dequantising: weight-only in the activation's dtype, quantised activations in float32."""
    if scheme.activation is None:
        values = numerics.dequantize(weight, scheme.weight, out_dtype)
        return F.linear(x[0].to(out_dtype), values, None if bias is None else bias.to(out_dtype))
    left = numerics.dequantize(x, scheme.activation, torch.float32)
    right = numerics.dequantize(weight, scheme.weight, torch.float32)
    product = torch.matmul(left, right.t())
    return (product if bias is None else product + bias).to(out_dtype)


def scaled_mm(
    x: list[Tensor],
    weight: list[Tensor],
    bias: Tensor | None,
    activation: str,
    weight_format: str,
    out_dtype: torch.dtype,
    backend: str = "auto",
) -> Tensor:
    """y = x @ w.T + bias on quantised operands.

    Args:
        x: components of the activation, xq (..., K) first; [x] itself when ``activation`` is ``"none"``.
        weight: components of the weight, wq (N, K) first.
        bias: (N,), any float dtype, or None.
        activation: format name of x, or ``"none"`` (weight-only).
        weight_format: format name of the weight.
        out_dtype: dtype of the result.
        backend: kernel family; ``auto`` takes the capability table's choice.

    Returns:
        (..., N) in ``out_dtype``.

    Raises:
        UnsupportedError: a format that does not exist, operands that do not fit, or no kernel of the family serves these
            formats, this shape and this device.
    """
    scheme = Scheme(
        weight=weight_format_named(weight_format),
        activation=None if activation == NO_ACTIVATION else activation_format_named(activation),
    )
    rows, columns = weight[0].shape[0], x[0].shape[-1]
    kernel = choose_linear(Problem.on(x[0].device, scheme, rows, columns), backend)
    if columns != weight[0].shape[-1]:
        raise UnsupportedError(
            f"the activation has K={columns}, the weight N={rows}, K={weight[0].shape[-1]}; K must be the same"
        )
    out_shape = (*x[0].shape[:-1], rows)
    if 0 in x[0].shape or rows == 0:  # library kernels refuse empty operands; an empty sum is zero
        empty = torch.zeros(out_shape, dtype=out_dtype, device=x[0].device)
        return empty if bias is None else empty + bias.to(out_dtype)
    if kernel.family == "torch":
        x_rows = [_as_rows(x[0]), x[1] if x[1].dim() == 0 else _as_rows(x[1])]
        return _torch_scaled_mm(x_rows, weight, bias, out_dtype).view(out_shape)
    return _reference_scaled_mm(x, weight, bias, scheme, out_dtype)


_library = torch.library.Library("fxquant", "DEF")  # type: ignore[no-untyped-call]
for _schema, _function in (
    ("quantize_activation(Tensor x, str format) -> Tensor[]", quantize_activation),
    (
        "scaled_mm(Tensor[] x, Tensor[] weight, Tensor? bias, str activation, str weight_format, ScalarType out_dtype, "
        "str backend='auto') -> Tensor",
        scaled_mm,
    ),
):
    _library.define(_schema)  # type: ignore[no-untyped-call]
    _library.impl(_schema.partition("(")[0], _function, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
