"""What a quantised model should compute, said a second time and plainly: float matrices and a Python loop over experts.

It takes an unquantised model and gives its layers dequantised weights, made with the formats' numerics alone, and
activations that went through the same. Nothing here knows of ``QuantizedTensor``, of the ops or of the passes.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxquant.kernels import numerics
from fxquant.kernels.formats import FORMATS

Rounding = Callable[[Tensor], Tensor]
"""A tensor of any float dtype -> the float32 values that are left of it."""


@dataclass(frozen=True, kw_only=True)
class FakeScheme:
    """Names of the formats that weights and activations go through; None: they stay as they are.

    Without an activation format products are those of the activations' own type, to which the weight is rounded.
    """

    weight: str | None = None
    activation: str | None = None

    def round_weight(self, matrix: Tensor) -> Tensor:
        """One matrix (N, K) of the activations' type."""
        values = _through(self.weight, matrix)
        return values if self.activation else values.to(matrix.dtype).float()

    def round_rows(self, x: Tensor) -> Tensor:
        """Activations (..., K), each row for itself."""
        rows = x.reshape(-1, 1, x.shape[-1])
        return _through(self.activation, rows).reshape(x.shape)


def _through(format: str | None, x: Tensor) -> Tensor:
    if format is None:
        return x.float()
    components = numerics.quantize(x, FORMATS[format])
    return numerics.dequantize(components, FORMATS[format], torch.float32, columns=x.shape[-1])


def fake_quantise_(
    model: nn.Module,
    linear: FakeScheme | None = None,
    experts: FakeScheme | None = None,
    *,
    kept: Collection[str] = (),
    sum_dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Make the model compute as if its layers were quantised, in place; returns their names.

    Args:
        model: a model of transformers, not quantised.
        linear: scheme of every Linear and Conv1D; None: they stay as they are.
        experts: scheme of every module of experts.
        kept: last components of the names of linear modules that stay as they are.
        sum_dtype: type in which the experts' outputs are added: float32 is that of transformers' grouped_mm and batched_mm, its
            eager loop adds in the activations' type.
    """
    changed = []
    for name, module in model.named_modules():
        forward: Callable[..., Tensor] | None = None
        if linear is not None and name.rpartition(".")[2] not in kept:
            forward = _linear_forward(module, linear)
        if experts is not None and "down_proj" in module._parameters:
            forward = _experts_forward(module, experts, sum_dtype)
        if forward is not None:
            module.forward = types.MethodType(forward, module)
            changed.append(name)
    return changed


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """x (float32) times a matrix (N, K), in float32."""
    return F.linear(x, matrix, None if bias is None else bias.float())


def _linear_forward(module: nn.Module, scheme: FakeScheme) -> Callable[[nn.Module, Tensor], Tensor] | None:
    if isinstance(module, nn.Linear):
        matrix = module.weight.detach()
    elif type(module).__name__ == "Conv1D":
        matrix = module.weight.detach().T.contiguous()
    else:
        return None
    matrix = scheme.round_weight(matrix)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return _product(scheme.round_rows(x), matrix, self.bias).to(x.dtype)

    return forward


def _experts_forward(module: nn.Module, scheme: FakeScheme, sum_dtype: torch.dtype) -> Callable[..., Tensor]:
    gate_up, down = (module._parameters[name].detach() for name in ("gate_up_proj", "down_proj"))
    gate_up_bias, down_bias = (module._parameters.get(name) for name in ("gate_up_proj_bias", "down_proj_bias"))
    if type(module).__name__ == "GptOssExperts":  # [E, K, N], and the columns of gate and up take turns
        gate, up, down = gate_up[..., ::2].mT, gate_up[..., 1::2].mT, down.mT
        gate_bias, up_bias = gate_up_bias[..., ::2], gate_up_bias[..., 1::2]

        def join(g: Tensor, u: Tensor) -> Tensor:
            g, u = g.clamp(max=module.limit), u.clamp(-module.limit, module.limit)
            return (u + 1) * (g * torch.sigmoid(g * module.alpha))
    else:  # [E, N, K], gate above up
        gate, up = gate_up.chunk(2, 1)
        gate_bias = up_bias = None

        def join(g: Tensor, u: Tensor) -> Tensor:
            return module.act_fn(g) * u

    count = len(down)
    gates, ups, downs = ([scheme.round_weight(w[e].contiguous()) for e in range(count)] for w in (gate, up, down))

    def bias_of(bias: Tensor | None, expert: int) -> Tensor | None:
        return None if bias is None else bias[expert]

    def forward(self: nn.Module, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """hidden (tokens, H), chosen and shares (tokens, top_k) -> (tokens, H)."""
        total = torch.zeros(hidden.shape, dtype=sum_dtype)
        for e in range(count):
            token, place = torch.where(chosen == e)
            x = scheme.round_rows(hidden[token])
            g = _product(x, gates[e], bias_of(gate_bias, e)).to(hidden.dtype)
            u = _product(x, ups[e], bias_of(up_bias, e)).to(hidden.dtype)
            y = _product(scheme.round_rows(join(g, u)), downs[e], bias_of(down_bias, e)).to(hidden.dtype)
            total.index_add_(0, token, (y * shares[token, place, None]).to(sum_dtype))
        return total.to(hidden.dtype)

    return forward
