"""Online quantisation for PyTorch, done by the compiler.

Importing it loads torch and ``QuantizedTensor``, which registers itself for ``torch.load(weights_only=True)``; everything else
is loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .kernels.quantized_tensor import QuantizedTensor

__version__ = "0.1.0"

_EXPORTS = {
    "ConfigError": "errors",
    "FxQuantError": "errors",
    "Plan": "planner",
    "QuantizationConfig": "config",
    "Report": "report",
    "RuleError": "errors",
    "UnsupportedError": "errors",
    "compile": "compiler",
    "flatten_state_dict": "state_dict",
    "plan": "planner",
    "plan_names": "planner",
    "quantize_": "quantize",
    "refresh": "conversions",
    "unflatten_state_dict": "state_dict",
}

__all__ = [
    "ConfigError",
    "FxQuantError",
    "Plan",
    "QuantizationConfig",
    "QuantizedTensor",
    "Report",
    "RuleError",
    "UnsupportedError",
    "__version__",
    "compile",
    "flatten_state_dict",
    "plan",
    "plan_names",
    "quantize_",
    "refresh",
    "unflatten_state_dict",
]

if TYPE_CHECKING:
    from .compiler import compile
    from .config import QuantizationConfig
    from .conversions import refresh
    from .errors import ConfigError, FxQuantError, RuleError, UnsupportedError
    from .planner import Plan, plan, plan_names
    from .quantize import quantize_
    from .report import Report
    from .state_dict import flatten_state_dict, unflatten_state_dict


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
