"""Rules by name: vLLM's own answers, an independent matcher, fused names in both spellings, and what the errors say."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fxquant.config import resolve
from fxquant.errors import ConfigError, RuleError
from fxquant.patterns import Pattern
from fxquant.planner import plan_names
from fxquant.rules import LINEAR_KINDS, PACKED_MODULES, Decision, Policy, decide, unmatched
from fxquant.schemes import SHORTHANDS

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "layer_rules.json").read_text())["cases"]
LAYER_CASES = [case for case in ORACLE if "config_error" not in case]


def _plan(case: dict[str, Any], layers: Mapping[str, str]) -> dict[str, str | None]:
    return plan_names(layers, case["quantization"], case["quantization_config"], case["packed_modules_mapping"])


def test_the_oracle_is_whole() -> None:
    assert len(ORACLE) == len({case["name"] for case in ORACLE}) == 73


@pytest.mark.parametrize("case", ORACLE, ids=lambda case: case["name"])
def test_oracle(case: dict[str, Any]) -> None:
    layers, wrong = case["layers"], case.get("layer_errors", {})
    if "config_error" in case:
        with pytest.raises(ConfigError):
            _plan(case, layers)
        return
    if wrong:
        with pytest.raises(RuleError) as caught:
            _plan(case, layers)
        assert set(caught.value.layers) == set(wrong)
        assert all(name in str(caught.value) for name in wrong)
    right = {name: kind for name, kind in layers.items() if name not in wrong}
    assert _plan(case, right) == case["expected"]


def _as_shards(layers: Mapping[str, str], packed: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Each layer -> the names of its separate shards, or itself."""
    split = {}
    for name, kind in layers.items():
        parent, _, last = name.rpartition(".")
        fused = kind in LINEAR_KINDS and last in packed
        split[name] = [f"{parent}.{shard}" for shard in packed[last]] if fused else [name]
    return split


# Its name repeats the fused name, and vLLM names the shards of a fused layer differently there than modules are named.
REPEATED = "ignore shard original-position names do not match when repeated"


@pytest.mark.parametrize("case", [c for c in LAYER_CASES if c["name"] != REPEATED], ids=lambda case: case["name"])
def test_oracle_with_separate_shards(case: dict[str, Any]) -> None:
    packed = case["packed_modules_mapping"]
    split = _as_shards(case["layers"], packed)
    separate = {
        shard: "linear" if len(shards) > 1 else case["layers"][name] for name, shards in split.items() for shard in shards
    }
    wrong = {shard for name in case.get("layer_errors", {}) for shard in split[name]}
    if wrong:
        with pytest.raises(RuleError) as caught:
            _plan(case, separate)
        assert set(caught.value.layers) == wrong
    right = {name: kind for name, kind in separate.items() if name not in wrong}
    expected = {shard: scheme for name, scheme in case["expected"].items() for shard in split[name]}
    assert _plan(case, right) == expected


# --- an independent matcher -------------------------------------------------------------------------------------------


def _hits(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == name or fnmatch.fnmatchcase(name, pattern)


class Wrong(Exception):
    """The rules contradict each other."""


def _naive(name: str, layers: Mapping[str, str], targets: Mapping[str, str], ignore: list[str]) -> str | None:
    """One layer's shorthand by the letter of the grammar; Wrong where it is an error."""
    kind = layers[name]
    if kind in ("head", "router") and name not in targets:
        return None
    if kind not in ("linear", "moe", "head", "router"):
        return None
    parent, last = name.rsplit(".", 1) if "." in name else ("", name)
    names, whole = [name], None
    for fused, shards in PACKED_MODULES.items():
        full = [f"{parent}.{shard}" for shard in shards]
        if kind == "linear" and last == fused:
            whole, names = name, full
        present = [shard for shard in full if layers.get(shard) == "linear"]
        if name in present and len(present) >= 2 and f"{parent}.{fused}" not in layers:
            whole, names = f"{parent}.{fused}", present

    def of(patterns: list[str]) -> list[list[str]]:
        if whole is not None:
            direct = [pattern for pattern in patterns if _hits(pattern, whole)]
            if direct:
                return [direct]
        return [[pattern for pattern in patterns if _hits(pattern, each)] for each in names]

    ignored = [bool(found) for found in of(ignore)]
    targeted = of([name] if kind in ("head", "router") else list(targets))
    if len(set(ignored)) > 1 or any(len(found) > 1 for found in targeted):
        raise Wrong
    chosen = {targets[found[0]] if found else None for found in targeted}
    if ignored[0]:
        if chosen != {None}:
            raise Wrong
        return None
    if len(chosen) > 1:
        raise Wrong
    (shorthand,) = chosen
    if shorthand and SHORTHANDS[shorthand].request("moe" if kind == "moe" else "linear") is None:
        raise Wrong
    return shorthand


ATTENTION = [("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj"), ("v_proj",), ("qkv_proj",), ("qkv_proj", "q_proj", "k_proj")]
MLP = [("gate_proj", "up_proj"), ("gate_up_proj",), ("up_proj",)]
blocks = st.tuples(st.sampled_from(ATTENTION), st.sampled_from(MLP), st.booleans())


def _model(parts: list[tuple[tuple[str, ...], tuple[str, ...], bool]]) -> dict[str, str]:
    layers = {"embed": "embedding"}
    for index, (attention, mlp, experts) in enumerate(parts):
        layers |= {f"m.{index}.attn.{name}": "linear" for name in (*attention, "o_proj")}
        layers |= {f"m.{index}.mlp.{name}": "linear" for name in (*mlp, "down_proj")}
        layers |= {f"m.{index}.attn": "attention"}
        layers |= {f"m.{index}.mlp.experts": "moe", f"m.{index}.mlp.gate": "router"} if experts else {}
    return layers | {"head": "head"}


models = st.lists(blocks, min_size=1, max_size=2).map(_model)
LAST = [
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
    "experts",
    "gate",
]
lasts = st.sampled_from(LAST)
patterns = st.one_of(
    lasts.map("*.{}".format),
    lasts.map("*{}".format),
    lasts.map(r"re:.*\.{}$".format),
    lasts.map("re:.*{}".format),
    st.builds("m.{}.{}.{}".format, st.integers(0, 1), st.sampled_from(["attn", "mlp"]), lasts),
    st.sampled_from(
        ["*", "head", "m.0.*", "m.[1-9].*", "*mlp", r"re:m\.0", "re:(?i).*O_PROJ", "re:.*[qkv]_proj", "*.?_proj", "embed"]
    ),
)
shorthands = st.sampled_from(["mxfp8", "mxfp8", "mxfp4", "nvfp4_per_token"])


@settings(max_examples=500, deadline=None)
@given(models, st.dictionaries(patterns, shorthands, max_size=3), st.lists(patterns, max_size=3))
@example(_model([(ATTENTION[0], MLP[0], True)]), {"*": "mxfp8", "head": "mxfp4"}, [])
@example(_model([(ATTENTION[0], MLP[0], True)]), {"*v_proj": "mxfp8"}, ["*.gate_proj", "*.up_proj"])
def test_rules_against_an_independent_matcher(layers: dict[str, str], targets: dict[str, str], ignore: list[str]) -> None:
    config = {"targets": targets, "ignore": ignore} if targets else {"linear": "mxfp8", "moe": "mxfp8", "ignore": ignore}
    policy = resolve(None, config)
    expected: dict[str, str | None] = {}
    wrong = set()
    for name, kind in layers.items():
        try:
            chosen = _naive(name, layers, targets, ignore)
        except Wrong:
            wrong.add(name)
            continue
        if not targets and kind in ("linear", "moe"):
            chosen = None if _is_ignored(name, layers, ignore) else "mxfp8"
        expected[name] = chosen
    if wrong:
        with pytest.raises(RuleError) as caught:
            decide(layers, policy)
        assert set(caught.value.layers) == wrong
        return
    decisions = decide(layers, policy)
    assert list(decisions) == list(layers)
    for name, shorthand in expected.items():
        request = SHORTHANDS[shorthand].request("moe" if layers[name] == "moe" else "linear") if shorthand else None
        assert decisions[name].request == request, name
        assert bool(decisions[name].reason) == (request is None)


def _is_ignored(name: str, layers: Mapping[str, str], ignore: list[str]) -> bool:
    """Whether an ignore list that does not contradict itself covers the layer: making it targets must then hit."""
    unique = dict.fromkeys(ignore, "mxfp8")
    try:
        return any(_naive(name, layers, {pattern: "mxfp8"}, []) for pattern in unique) or bool(_naive(name, layers, unique, []))
    except Wrong:
        return True


@settings(max_examples=300, deadline=None)
@given(models, st.dictionaries(patterns, shorthands, max_size=3), st.lists(patterns, max_size=3))
def test_the_result_does_not_hang_on_the_spelling_of_the_model(
    layers: dict[str, str], targets: dict[str, str], ignore: list[str]
) -> None:
    """Fused layers and their separate shards get the same, error or scheme, whatever the rules."""
    packed = {fused: list(shards) for fused, shards in PACKED_MODULES.items()}
    fused = {name: kind for name, kind in layers.items() if not name.endswith((".q_proj", ".k_proj", ".v_proj"))}
    fused = {name: kind for name, kind in fused.items() if not name.endswith((".gate_proj", ".up_proj"))}
    assume(len(fused) > 1)
    split = _as_shards(fused, packed)
    separate = {shard: fused[name] for name, shards in split.items() for shard in shards}
    config = {"targets": targets, "ignore": ignore} if targets else {"linear": "mxfp8", "ignore": ignore}
    policy = resolve(None, config)
    assert _outcome(separate, policy) == {
        shard: outcome for name, outcome in _outcome(fused, policy).items() for shard in split[name]
    }


def _outcome(layers: Mapping[str, str], policy: Policy) -> dict[str, str]:
    try:
        wrong: tuple[str, ...] = ()
        decisions = decide(layers, policy)
    except RuleError as error:
        wrong = error.layers
        decisions = decide({name: kind for name, kind in layers.items() if name not in wrong}, policy)
    return {name: "error" if name in wrong else str(decisions[name].request) for name in layers}


@settings(max_examples=200, deadline=None)
@given(models, st.dictionaries(patterns, shorthands, max_size=2), st.lists(patterns, max_size=1), shorthands, shorthands)
def test_a_scale_search_changes_the_requests_of_4_bit_weights_and_their_rules_alone(
    layers: dict[str, str], targets: dict[str, str], ignore: list[str], linear: str, moe: str
) -> None:
    assume(linear != "nvfp4_per_token")
    config: dict[str, Any] = {"targets": targets} if targets else {"linear": linear, "moe": moe}
    policy = resolve(None, {**config, "ignore": ignore})
    try:
        plain = decide(layers, policy)
    except RuleError:
        assume(False)
    searched = decide(layers, resolve(None, {**config, "ignore": ignore, "scale_search": "mse"}))
    assert decide(layers, resolve(None, {**config, "ignore": ignore, "scale_search": "amax"})) == plain
    for name, decision in plain.items():
        request, expected = decision.request, decision
        if request and request.weight.name in ("mxfp4", "nvfp4"):
            request = dataclasses.replace(request, scale_search="mse")
            expected = dataclasses.replace(decision, request=request, rule=f"{decision.rule}, scale_search mse")
        assert searched[name] == expected


@settings(max_examples=300, deadline=None)
@given(patterns, models)
def test_a_pattern_is_unmatched_exactly_when_it_hits_nothing_that_counts(pattern: str, layers: dict[str, str]) -> None:
    names = [name for name, kind in layers.items() if kind != "attention"]
    for name in [name for name in names if layers[name] == "linear"]:
        parent, last = name.rsplit(".", 1)
        for fused, shards in PACKED_MODULES.items():
            if last == fused:
                names += [f"{parent}.{shard}" for shard in shards]
            present = [shard for shard in shards if layers.get(f"{parent}.{shard}") == "linear"]
            if len(present) > 1:
                names.append(f"{parent}.{fused}")
    messages = unmatched(layers, resolve("mxfp8", {"ignore": [pattern]}))
    assert bool(messages) == (not any(_hits(pattern, name) for name in names))


# --- patterns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "hit"),
    [
        ("model.0.o_proj", "model.0.o_proj", True),
        ("o_proj", "model.0.o_proj", False),
        ("*o_proj", "model.0.o_proj", True),
        ("*O_PROJ", "model.0.o_proj", False),
        ("*.mlp.gate", "model.0.mlp.gate", True),
        ("*.mlp.gate", "model.0.mlp.gate_proj", False),
        ("model.[0-2].x", "model.1.x", True),
        ("model[0].x", "model[0].x", True),
        ("re:o_proj", "model.0.o_proj", False),
        ("re:model.0", "model.0.o_proj", True),
        (r"re:.*\.gate$", "model.0.mlp.gate_up_proj", False),
        ("re:(?i).*O_PROJ", "model.0.o_proj", True),
        ("re:x", "re:x", False),
        ("*", "", True),
    ],
)
def test_pattern(pattern: str, name: str, hit: bool) -> None:
    assert Pattern(pattern).matches(name) is hit


def test_pattern_is_a_value_and_knows_whether_it_is_exact() -> None:
    assert Pattern("a.b") == Pattern("a.b")
    assert hash(Pattern("a.b")) == hash(Pattern("a.b"))
    assert [text for text in ("a.b", "a.*", "a.?", "a[b", "re:a", "") if Pattern(text).is_exact] == ["a.b", ""]
    with pytest.raises(ConfigError, match=r"'re:\(' is not a valid regular expression"):
        Pattern("re:(")


# --- fused names, in both spellings -----------------------------------------------------------------------------------

LLAMA = (
    {f"model.layers.{i}.self_attn.{name}": "linear" for i in range(2) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    | {f"model.layers.{i}.mlp.{name}": "linear" for i in range(2) for name in ("gate_proj", "up_proj", "down_proj")}
    | {"model.embed_tokens": "embedding", "lm_head": "head"}
)
MOE = {
    "model.layers.1.mlp.gate": "router",
    "model.layers.1.mlp.experts": "moe",
    "model.layers.1.mlp.shared_expert.gate_proj": "linear",
    "model.layers.1.mlp.shared_expert.up_proj": "linear",
    "model.layers.1.mlp.shared_expert_gate": "router",
}
EXPERTS = "model.layers.1.mlp.experts"
ALIASES = {EXPERTS: [f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"]}
QKV = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]


def _decide(config: dict[str, Any], layers: Mapping[str, str] = LLAMA, **options: Any) -> dict[str, Decision]:
    quantization = None if any(config.get(key) for key in ("targets", "linear", "moe")) else "fp8_per_tensor"
    return decide(layers, resolve(quantization, config), **options)


@pytest.mark.parametrize(
    "spelling",
    [
        ["model.layers.0.self_attn.qkv_proj"],
        QKV,
        ["*layers.0.self_attn.[qkv]_proj"],
        [r"re:.*\.0\.self_attn\.qkv_proj"],
        ["*.0.*v_proj"],
    ],
)
def test_separate_shards_are_ignored_in_either_spelling(spelling: list[str]) -> None:
    decisions = _decide({"ignore": spelling}, strict=True)
    assert [name for name, decision in decisions.items() if decision.request is None] == [*QKV, "model.embed_tokens", "lm_head"]
    assert {decisions[name].rule for name in QKV} == {f"ignored: {', '.join(spelling)}"}


def test_a_decision_tells_when_the_virtual_name_was_what_was_hit() -> None:
    fused = "model.layers.0.self_attn.qkv_proj"
    for pattern, through in (
        ("*v_proj", fused),
        (fused, fused),
        ("re:.*qkv_proj", fused),
        ("*", None),
        ("*.?_proj", None),
        ("re:.*self_attn", None),
    ):
        for config in ({"ignore": [pattern]}, {"targets": {pattern: "mxfp4"}}):
            assert {_decide(config)[name].fused_name for name in QKV} == {through}, (pattern, config)
    assert _decide({"targets": {"*.down_proj": "mxfp4"}})[QKV[0]] == Decision(request=None, rule="no rule")


def test_rules_are_told() -> None:
    decisions = _decide(
        {
            "targets": {r"re:.*self_attn\.o_proj": "mxfp4", "*.gate_proj": "mxfp8", "*.up_proj": "mxfp8"},
            "ignore": ["*down_proj"],
        }
    )
    rules = {name.removeprefix("model.layers.0."): decision.rule for name, decision in decisions.items()}
    assert rules["self_attn.o_proj"] == r"from targets: re:.*self_attn\.o_proj, mxfp4"
    assert rules["mlp.gate_proj"] == rules["mlp.up_proj"] == "from targets: *.gate_proj, *.up_proj, mxfp8"
    assert rules["mlp.down_proj"] == "ignored: *down_proj"
    assert rules["self_attn.q_proj"] == "no rule"
    assert rules["lm_head"] == "head"
    assert rules["model.embed_tokens"] == "embedding"
    assert _decide({})[QKV[0]].rule == "from quantization: fp8_per_tensor"
    assert _decide({"linear": "mxfp8"})[QKV[0]].rule == "from linear: mxfp8"
    assert _decide({"linear": "nvfp4", "scale_search": "mse"})[QKV[0]].rule == "from linear: nvfp4, scale_search mse"
    assert _decide({"scale_search": "mse"})[QKV[0]].rule == "from quantization: fp8_per_tensor"
    searched = _decide({"targets": {"*.o_proj": "mxfp4"}, "scale_search": "mse"})
    assert searched["model.layers.0.self_attn.o_proj"].rule == "from targets: *.o_proj, mxfp4, scale_search mse"


def test_half_of_a_fused_group_is_refused_with_the_remedy() -> None:
    with pytest.raises(RuleError) as caught:
        _decide({"ignore": ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"]})
    assert caught.value.layers == (*QKV, "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")
    message = str(caught.value)
    assert "ignore hits its shards q_proj (by 'model.layers.0.self_attn.q_proj') but not k_proj, v_proj" in message
    assert "name all of q_proj, k_proj, v_proj, or the fused name qkv_proj" in message
    assert "name all of gate_proj, up_proj, or the fused name gate_up_proj" in message
    with pytest.raises(RuleError, match="targets hits its shards"):
        _decide({"targets": {"*.k_proj": "mxfp8"}})


def test_only_shards_that_exist_make_a_group_and_one_alone_makes_none() -> None:
    two = {name: kind for name, kind in LLAMA.items() if not name.endswith("v_proj")}
    assert _decide({"ignore": ["*.q_proj", "*.k_proj"]}, two)[QKV[0]].request is None
    with pytest.raises(RuleError):
        _decide({"ignore": ["*.q_proj"]}, two)
    alone = {"a.q_proj": "linear", "a.k_proj": "head", "b.k_proj": "linear"}
    decisions = _decide({"ignore": ["*.q_proj", "*qkv_proj"]}, alone)
    assert decisions["a.q_proj"].request is None
    assert decisions["b.k_proj"].request is not None


def test_layers_at_the_root_and_shards_beside_a_real_fused_layer() -> None:
    root = {"q_proj": "linear", "k_proj": "linear", "v_proj": "linear"}
    assert plan_names(root, "mxfp8", {"ignore": ["qkv_proj"]}) == dict.fromkeys(root)
    both = {"a.qkv_proj": "linear", "a.q_proj": "linear", "a.k_proj": "linear"}
    assert plan_names(both, "mxfp8", {"ignore": ["a.qkv_proj"]}) == {
        "a.qkv_proj": None,
        "a.q_proj": "mxfp8",
        "a.k_proj": "mxfp8",
    }


def test_the_packed_table_can_be_extended_emptied_and_is_checked() -> None:
    layers = {"a.in_proj_b": "linear", "a.in_proj_a": "linear", "a.q_proj": "linear", "a.k_proj": "linear"}
    extended = {"in_proj_ba": ["in_proj_b", "in_proj_a"]}
    assert plan_names(layers, "mxfp8", {"ignore": ["*in_proj_ba", "*qkv_proj"]}, extended) == dict.fromkeys(layers)
    with pytest.raises(RuleError):
        plan_names(layers, "mxfp8", {"ignore": ["*in_proj_b"]}, extended)
    assert plan_names(layers, "mxfp8", {"ignore": ["*.q_proj", "*in_proj_b"]}, {})["a.k_proj"] == "mxfp8"
    overlapping = {"kv_proj": ["k_proj", "v_proj"]}
    shards = {"a.q_proj": "linear", "a.k_proj": "linear", "a.v_proj": "linear", "b.k_proj": "linear", "b.v_proj": "linear"}
    decisions = decide(shards, resolve("mxfp8", {"ignore": ["*.kv_proj"]}), overlapping)
    assert [name for name, decision in decisions.items() if decision.request is None] == ["b.k_proj", "b.v_proj"]
    malformed: list[Any] = [
        {"qkv_proj": "q_proj"},
        {"attn.qkv_proj": ["q_proj"]},
        {"qkv_proj": [3]},
        {3: ["q_proj"]},
        [("qkv_proj", [])],
    ]
    for wrong in malformed:
        with pytest.raises(ConfigError, match="packed_modules_mapping"):
            plan_names(layers, "mxfp8", None, wrong)


# --- heads, routers, experts ------------------------------------------------------------------------------------------


def test_heads_and_routers_stay_unless_a_target_is_their_name() -> None:
    layers = LLAMA | MOE
    for config in ({}, {"targets": {"*": "mxfp8"}}, {"targets": {"re:.*": "mxfp8"}}, {"targets": {"*mlp.gate": "mxfp8"}}):
        decisions = _decide(config, layers, strict=True)
        assert decisions["lm_head"] == Decision(request=None, rule="head")
        assert decisions["model.layers.1.mlp.gate"] == Decision(request=None, rule="router")
    decisions = _decide({"targets": {"*": "mxfp8", "lm_head": "mxfp4", "model.layers.1.mlp.gate": "fp8_per_block"}}, layers)
    assert decisions["lm_head"].request == SHORTHANDS["mxfp4"].linear
    assert decisions["model.layers.1.mlp.gate"].request == SHORTHANDS["fp8_per_block"].linear
    assert decisions[QKV[0]].request == SHORTHANDS["mxfp8"].linear
    with pytest.raises(RuleError, match="lm_head: hit by targets 'lm_head' and by ignore"):
        _decide({"targets": {"lm_head": "mxfp4"}, "ignore": ["*head"]}, layers)
    with pytest.raises(RuleError, match="defines no linear method"):
        _decide({"targets": {"lm_head": "nvfp4_per_token"}}, layers)


def test_a_router_rule_leaves_its_namesakes_alone() -> None:
    layers = dict.fromkeys(["m.mlp.gate", "m.mlp.gate_proj", "m.mlp.up_proj", "n.mlp.gate_up_proj", "n.mlp.gate"], "linear")
    for pattern in ("*mlp.gate", r"re:.*mlp\.gate$"):
        ignored = [name for name, scheme in plan_names(layers, "mxfp8", {"ignore": [pattern]}).items() if scheme is None]
        assert ignored == ["m.mlp.gate", "n.mlp.gate"]
    assert plan_names(layers, "mxfp8", {"ignore": ["m.mlp.gate"]})["m.mlp.gate_proj"] == "mxfp8"


def test_experts_are_reached_by_their_parameters_only_when_spelled_out() -> None:
    layers = LLAMA | MOE
    gate_up, down = ALIASES[EXPERTS]
    for config in ({"ignore": [gate_up]}, {"ignore": [gate_up, down]}):
        assert _decide(config, layers, aliases=ALIASES, strict=True)[EXPERTS].rule == f"ignored: {', '.join(config['ignore'])}"
    for glob in ("*gate_up_proj", r"re:.*gate_up_proj", "*.experts.*"):
        assert _decide({"ignore": [glob]}, layers, aliases=ALIASES)[EXPERTS].request is not None
    same = {"targets": {gate_up: "mxfp4", down: "mxfp4"}}
    assert _decide(same, layers, aliases=ALIASES, strict=True)[EXPERTS].request == SHORTHANDS["mxfp4"].moe
    with pytest.raises(RuleError, match="parameters of one expert layer share one scheme"):
        _decide({"targets": {gate_up: "mxfp4", down: "mxfp8"}}, layers, aliases=ALIASES)
    with pytest.raises(RuleError, match="different schemes"):
        _decide({"targets": {"*experts": "mxfp4", down: "mxfp8"}}, layers, aliases=ALIASES)
    with pytest.raises(RuleError, match=re.escape(f"Nearest: {EXPERTS}")):
        _decide({"ignore": [gate_up]}, layers, strict=True)


# --- contradictions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        (
            {"targets": {"*o_proj": "mxfp8", "re:.*o_proj": "mxfp8"}},
            ["self_attn.o_proj: hit by 2 targets: '*o_proj' (mxfp8), 're:.*o_proj' (mxfp8)", "even where their schemes agree"],
        ),
        (
            {"targets": {"*.q_proj": "mxfp8", "re:.*q_proj": "mxfp8"}},
            ["v_proj: q_proj is hit by 2 targets: '*.q_proj' (mxfp8), 're:.*q_proj' (mxfp8)"],
        ),
        (
            {"targets": {"*o_proj": "mxfp8"}, "ignore": ["*.0.self_attn.o_proj"]},
            ["hit by targets '*o_proj' and by ignore '*.0.self_attn.o_proj'", "either a target or ignored"],
        ),
        (
            {"targets": {"*qkv_proj": "mxfp8"}, "ignore": ["*.q_proj", "*.k_proj", "*.v_proj"]},
            ["hit by targets '*qkv_proj' and by ignore '*.q_proj', '*.k_proj', '*.v_proj'"],
        ),
        (
            {"targets": {"*.gate_proj": "mxfp8", "*.up_proj": "mxfp4"}},
            ["different schemes: gate_proj mxfp8 (by '*.gate_proj'), up_proj mxfp4 (by '*.up_proj')", "the same shorthand"],
        ),
        (
            {"targets": {"*o_proj": "nvfp4_per_token"}},
            ["'*o_proj' asks for nvfp4_per_token, which defines no linear method", "take one of fp8_per_tensor, fp8_per_block"],
        ),
    ],
)
def test_contradictions_say_what_to_do(config: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(RuleError) as caught:
        _decide(config)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_all_contradictions_and_stray_patterns_come_in_one_error() -> None:
    config = {"targets": {"*.q_proj": "mxfp8", "*o_proj": "mxfp8", "*.o_proj": "mxfp8", "nowhere": "mxfp8"}}
    with pytest.raises(RuleError) as caught:
        _decide(config, strict=True)
    at_fault = [name for name in LLAMA if "self_attn" in name]
    assert list(caught.value.layers) == at_fault
    assert all(name in str(caught.value) for name in [*at_fault, "'nowhere'"])
    assert str(caught.value).count("One name takes one target") == 1, "a remedy is said once"


# --- strictness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "fragments"),
    [
        ("*o_prj", ["ignore pattern '*o_prj' matches no layer", "Nearest: model.layers.0.self_attn.o_proj"]),
        (
            "model.layers.0.mlp.gate",
            ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"],
        ),
        ("layers.1.self_attn.o_proj", ["Nearest: model.layers.1.self_attn.o_proj"]),
        ("language_model.lm_head", ["Nearest: lm_head"]),
        ("model.layers.1.mlp.down_proj.weight", ["Nearest: model.layers.1.mlp.down_proj"]),
        (r"re:.*self_atn\.o_proj$", ["self_attn.o_proj"]),
        ("model.layers.1.self_attn.c_attn", ["model.layers.1.self_attn.k_proj"]),
        ("re:o_proj", ["matches no layer", "self_attn.o_proj"]),
        ("*", None),
        ("lm_head", None),
        ("*head", None),
        ("model.embed_tokens", None),
        ("model.layers.0.self_attn.qkv_proj", None),
        ("*gate_up_proj", None),
        ("model.layers.0.mlp", ["only modules that hold layers (model.layers.0.mlp)", "Write 'model.layers.0.mlp.*'"]),
        ("*mlp", ["(model.layers.0.mlp, model.layers.1.mlp)", "Write '*mlp.*'"]),
        ("re:.*mlp$", [r"Write 're:.*mlp\..*'"]),
        ("model", ["Write 'model.*'"]),
        (
            "*layernorm",
            ["only modules that have no weight to quantise (model.layers.0.input_layernorm)", "take the pattern out"],
        ),
    ],
)
def test_strict(pattern: str, fragments: list[str] | None) -> None:
    policy = resolve("fp8_per_tensor", {"ignore": [pattern]})
    containers = ["", "model", "model.layers", "model.layers.0", "model.layers.0.mlp", "model.layers.0.input_layernorm"]
    messages = unmatched(LLAMA, policy, containers=containers)
    assert len(messages) == (0 if fragments is None else 1)
    for fragment in fragments or []:
        assert fragment in messages[0]
    if fragments:
        with pytest.raises(RuleError, match=re.escape(pattern)) as caught:
            decide(LLAMA, policy, strict=True, containers=containers)
        assert caught.value.layers == ()
    else:
        decide(LLAMA, policy, strict=True, containers=containers)
    assert decide(LLAMA, policy), "without strict it is the caller's to warn"


def test_what_a_message_proposes_is_then_accepted() -> None:
    for pattern in ("model.layers.0.mlp", "*mlp", "re:.*mlp$", "model.layers.?"):
        (message,) = unmatched(LLAMA, resolve("mxfp8", {"ignore": [pattern]}))
        proposal = message.rpartition("Write '")[2].partition("'")[0]
        assert unmatched(LLAMA, resolve("mxfp8", {"ignore": [proposal]})) == []


def test_stray_targets_are_told_from_stray_ignores() -> None:
    messages = unmatched(LLAMA, resolve(None, {"targets": {"nowhere": "mxfp8", "*o_proj": "mxfp8"}, "ignore": ["nowhere"]}))
    assert [message.partition(" ")[0] for message in messages] == ["targets", "ignore"]


def test_kinds_that_are_no_layer_stay_and_do_not_count_as_matched() -> None:
    layers = {"attn": "attention", "norm": "norm", "o_proj": "row"}
    assert plan_names(layers, "mxfp8") == {"attn": None, "norm": None, "o_proj": "mxfp8"}
    assert decide(layers, resolve("mxfp8"))["attn"].reason == "attention"
    with pytest.raises(RuleError, match="no weight to quantise"):
        plan_names(layers, "mxfp8", {"ignore": ["attn"]}, strict=True)
    assert plan_names({"lm_head": "lm_head"}, None, {"targets": {"lm_head": "mxfp8"}}, strict=True) == {"lm_head": None}
    assert plan_names({}, "mxfp8") == {}


def test_long_lists_over_deep_models_are_quick() -> None:
    layers = {
        f"model.layers.{i}.mlp.experts.{j}.{name}_proj": "linear"
        for i in range(40)
        for j in range(40)
        for name in ("up", "gate")
    }
    ignore = list(layers)[:2000]
    decisions = decide(layers, resolve("mxfp8", {"ignore": ignore}), strict=True)
    assert sum(decision.request is None for decision in decisions.values()) == 2000
