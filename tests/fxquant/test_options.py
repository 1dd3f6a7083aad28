"""Options of the backend: merged, checked, and turned into Inductor settings."""

from __future__ import annotations

import pytest

from fxquant import ConfigError
from fxquant.options import EAGER_NUMERICS, BackendOptions


def test_mode_comes_from_either_place():
    assert BackendOptions.parse("reduce-overhead", None).mode == "reduce-overhead"
    options = BackendOptions.parse(None, {"mode": "max-autotune", "inductor": {"max_autotune": False}})
    patches = options.inductor_patches()
    assert patches["triton.cudagraphs"] is True
    assert patches["max_autotune"] is False


def test_compiled_models_round_as_eager_ones_unless_told_otherwise():
    assert EAGER_NUMERICS.items() <= BackendOptions().inductor_patches().items()
    told = BackendOptions(inductor={"emulate_precision_casts": False}).inductor_patches()
    assert told["emulate_precision_casts"] is False


def test_dynamos_own_option_is_passed_over():
    assert BackendOptions.parse(None, {"guard_filter_fn": len}) == BackendOptions()


def test_no_policy_without_quantization():
    assert BackendOptions().policy() is None
    assert BackendOptions(quantization="fp8_per_tensor").policy().linear.weight.name == "fp8_per_tensor_static"


@pytest.mark.parametrize(
    "options", [{"strict": "no"}, {"inductor": ["a"]}, {"signatur": 1}, {"inductor": {"freezing": True}}, {"mode": "quick"}]
)
def test_refusals(options):
    with pytest.raises(ConfigError):
        BackendOptions.parse(None, options)
