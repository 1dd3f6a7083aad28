"""The exceptions, and the suggestions in their messages."""

from __future__ import annotations

import pytest

import fxquant
from fxquant.errors import RuleError, suggest


@pytest.mark.parametrize("kind", [fxquant.ConfigError, fxquant.RuleError, fxquant.UnsupportedError])
def test_every_error_is_a_value_error_of_ours(kind):
    assert issubclass(kind, (fxquant.FxQuantError, ValueError))
    assert issubclass(kind, ValueError)


def test_rule_errors_name_their_layers():
    assert RuleError("text", (name for name in ("a", "b"))).layers == ("a", "b")


def test_suggestions():
    assert suggest("fp8-per-tensr", ["fp8_per_tensor", "mxfp8"]) == " Did you mean 'fp8_per_tensor'?"
    assert suggest("nothing like it", ["mxfp8"]) == ""
