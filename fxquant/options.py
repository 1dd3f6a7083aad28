"""Options of the ``fxquant`` backend of torch.compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, suggest

if TYPE_CHECKING:
    from .config import QuantizationConfig
    from .rules import Policy

EAGER_NUMERICS = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
"""Inductor settings under which a compiled model quantises the values that the eager model quantises, to the same bytes.

Left alone, Inductor keeps a fused producer (RMSNorm, SiLU * up) in float32 where eager rounds it to bfloat16, and on CUDA
divides approximately and flushes subnormal numbers to zero. ``options["inductor"]`` may set them otherwise.
"""


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """What ``torch.compile(model, backend="fxquant", options={...})`` accepts.

    Args:
        quantization, quantization_config: how to quantise plain weights; both None: only what is quantised already.
        linear_backend, moe_backend: kernel family: auto, torch, triton or reference; on a converted model a family other
            than auto overrides the one it was converted with.
        strict: refuse a pattern that matches nothing in a graph.
        packed_modules_mapping: fused name -> shard names, added to the default table.
        mode: one of Inductor's modes, e.g. ``reduce-overhead``; torch refuses ``mode=`` beside ``options=``.
        inductor: settings of ``torch._inductor.config`` for this compile.
        signature: distinguishes models whose weights differ; set by ``fxquant.compile``.
    """

    quantization: str | None = None
    quantization_config: QuantizationConfig | Mapping[str, Any] | str | None = None
    linear_backend: str = "auto"
    moe_backend: str = "auto"
    strict: bool = True
    packed_modules_mapping: Mapping[str, Sequence[str]] | None = None
    mode: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)
    signature: str = ""

    @classmethod
    def parse(cls, mode: str | None, options: Mapping[str, Any] | None) -> BackendOptions:
        """Options from torch.compile's keywords (``mode`` alone, or ``options``).

        Raises:
            ConfigError: an unknown option, mode or Inductor setting, or one that breaks quantisation.
        """
        given = dict(options or {})
        given.pop("guard_filter_fn", None)  # Dynamo's; it stays in the mapping on some versions of torch
        accepted = [f.name for f in fields(cls) if f.name != "signature"]
        for name in given:
            if name not in accepted and name != "signature":
                inside = " (an Inductor setting goes into options['inductor'])" if _is_inductor_setting(name) else ""
                raise ConfigError(
                    f"unknown option {name!r} of the fxquant backend{inside}; accepted are {', '.join(accepted)}."
                    f"{suggest(name, accepted)}"
                )
        parsed = cls(**{"mode": mode, **given})
        if not isinstance(parsed.inductor, Mapping):
            raise ConfigError(f"options['inductor']: got {parsed.inductor!r}, needed is a mapping of Inductor settings")
        if not isinstance(parsed.strict, bool):
            raise ConfigError(f"options['strict']: got {parsed.strict!r}, needed is True or False")
        parsed.inductor_patches()
        return parsed

    def policy(self) -> Policy | None:
        """The policy for plain weights, or None where none was asked for."""
        if self.quantization is None and self.quantization_config is None:
            return None
        from .config import resolve  # brings in pydantic

        return resolve(self.quantization, self.quantization_config)

    def inductor_patches(self) -> dict[str, Any]:
        """Inductor settings of ``mode`` and ``inductor`` together."""
        import torch._inductor as inductor

        patches: dict[str, Any] = {name: value for name, value in EAGER_NUMERICS.items() if _is_inductor_setting(name)}
        if self.mode not in (None, "default"):
            try:
                patches.update(inductor.list_mode_options(self.mode))  # type: ignore[arg-type]
            except (KeyError, RuntimeError):
                modes = dict.fromkeys(["default", *inductor.list_mode_options()])
                raise ConfigError(f"unknown mode {self.mode!r}; accepted are {', '.join(modes)}.") from None
        for name, value in self.inductor.items():
            if not _is_inductor_setting(name):
                raise ConfigError(f"options['inductor']: unknown Inductor setting {name!r}; see torch._inductor.list_options()")
            if name == "freezing" and value:
                raise ConfigError("options['inductor']: freezing folds quantised weights back to float constants; leave it off")
            patches[name] = value
        return patches


def _is_inductor_setting(name: str) -> bool:
    import torch._inductor as inductor

    return name.replace("-", "_") in inductor.list_options()
