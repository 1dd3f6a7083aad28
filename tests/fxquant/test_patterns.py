"""One pattern against one name, and many patterns against one."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxquant import ConfigError
from fxquant.patterns import Pattern, PatternSet


@pytest.mark.parametrize(
    ("text", "name", "hit"),
    [
        ("mlp.gate", "mlp.gate", True),
        ("mlp.gate", "mlp.gate_proj", False),
        ("mlp.gate", "model.mlp.gate", False),
        ("*mlp.gate", "model.mlp.gate", True),
        ("layers.[0-2].*", "layers.1.mlp", True),
        ("layers.?.mlp", "layers.10.mlp", False),
        ("re:layers", "layers.1.mlp", True),
        ("re:mlp", "layers.1.mlp", False),
        ("re:.*MLP", "layers.1.mlp", False),
        ("re:(?i).*MLP", "layers.1.mlp", True),
    ],
)
def test_matches(text, name, hit):
    assert Pattern(text).matches(name) is hit


def test_bad_expressions_are_refused_where_they_are_written():
    with pytest.raises(ConfigError, match=r"re:\*\("):
        Pattern("re:*(")


names = st.text(alphabet="ab.[]*?1", min_size=1, max_size=6)


@given(st.lists(names, max_size=5), names)
def test_a_set_hits_as_its_patterns_do(texts, name):
    patterns = list(dict.fromkeys(map(Pattern, texts)))
    hits = PatternSet(patterns).hits(name)
    assert sorted(p.text for p in hits) == sorted(p.text for p in patterns if p.matches(name))
    for pattern in patterns:
        assert pattern.matches(name) == (pattern.text == name or bool(re.match(fnmatch.translate(pattern.text), name)))
