"""The grammar: what parses, how it merges with the shorthand, and what each refusal says."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxquant.config import QuantizationConfig, SlotConfig, parse_config, resolve
from fxquant.errors import ConfigError, FxQuantError
from fxquant.kernels.formats import ACTIVATION_FORMATS, FORMATS, WEIGHT_FORMATS
from fxquant.patterns import Pattern
from fxquant.schemes import DEFAULT, SHORTHANDS, SchemeRequest

REFUSED = {
    "unknown key": ({"linaer": "mxfp8"}, ["linaer", "accepted: linear, moe, ignore, targets", "Did you mean 'linear'?"]),
    "key of another tool": ({"linear": "mxfp8", "modules_to_not_convert": []}, ["modules_to_not_convert", "ignore"]),
    "key that is no string": ({3: "mxfp8"}, ["the key 3 (int)", "accepted: linear"]),
    "unknown key in a slot": ({"linear": {"wieght": "mxfp8"}}, ["quantization_config.linear.wieght", "Did you mean 'weight'?"]),
    "unknown name": ({"linear": "fp9"}, ["quantization_config.linear: got 'fp9'", "fp8_per_block_static", "int8_per_channel"]),
    "near name": ({"moe": "fp8_per_chanel"}, ["moe", "Did you mean 'fp8_per_channel'?"]),
    "wrong case": ({"linear": "FP8_PER_BLOCK"}, ["'FP8_PER_BLOCK'", "Did you mean 'fp8_per_block'?"]),
    "dashes": ({"linear": {"weight": "FP8-per-block-static"}}, ["weight", "Did you mean 'fp8_per_block_static'?"]),
    "moe shorthand in linear": (
        {"linear": "int8_per_channel_weight_only"},
        ["linear", "defines no linear method", "write the weight format 'int8_per_channel_static'"],
    ),
    "another moe shorthand in linear": ({"linear": "nvfp4_per_token"}, ["defines no linear method", "weight format 'nvfp4'"]),
    "online in a slot": ({"linear": "online"}, ["got 'online'"]),
    "activation format as a slot": ({"linear": "fp8_per_token"}, ["which is an activation format", "fp8_per_channel_static"]),
    "slot of a wrong type": ({"linear": 7}, ["got 7 (int)", "{'weight': ..., 'activation': ...}"]),
    "slot as a list": ({"linear": ["mxfp8"]}, ["['mxfp8'] (list)"]),
    "weight of a wrong type": ({"linear": {"weight": 3}}, ["quantization_config.linear.weight: got 3 (int)", "mxfp4"]),
    "weight is a flag": ({"moe": {"weight": True}}, ["quantization_config.moe.weight: got True (bool)"]),
    "shorthand as a weight": (
        {"linear": {"weight": "fp8_per_tensor"}},
        ["that is a shorthand", "write 'fp8_per_tensor_static' here", "'fp8_per_tensor' as the whole slot"],
    ),
    "unknown activation": (
        {"moe": {"weight": "mxfp4", "activation": "fp8_per_tokn"}},
        ["quantization_config.moe.activation", "'none' (weight-only)", "or null", "Did you mean 'fp8_per_token'?"],
    ),
    "weight format as activation": (
        {"linear": {"weight": "mxfp8", "activation": "fp8_per_channel_static"}},
        ["which is a weight format", ", ".join(ACTIVATION_FORMATS)],
    ),
    "activation beside a null weight": (
        {"linear": {"weight": None, "activation": "fp8_per_token"}},
        ["quantization_config.linear.activation: got 'fp8_per_token' beside a null weight"],
    ),
    "integers beside floats": (
        {"linear": {"weight": "mxfp8", "activation": "int8_per_token"}},
        ["quantization_config.linear.activation: got 'int8_per_token' beside the weight 'mxfp8'", "nvfp4, 'none'"],
    ),
    "floats beside integers": (
        {"moe": {"weight": "int8_per_channel_static", "activation": "fp8_per_token"}},
        ["quantization_config.moe.activation: got 'fp8_per_token'", "int8_per_channel_static: int8_per_token, 'none'"],
    ),
    "no weight to fall back on": ({"linear": {"activation": "none"}}, ["linear: gives no weight", "no shorthand", "mxfp8"]),
    "empty slot": ({"moe": {}}, ["moe: gives no weight"]),
    "ignore as a string": ({"linear": "mxfp8", "ignore": "lm_head"}, ["got the string 'lm_head'", "write a list: ['lm_head']"]),
    "ignore as a dict": ({"linear": "mxfp8", "ignore": {"lm_head": True}}, ["ignore", "write a list of patterns"]),
    "ignore holds no string": (
        {"linear": "mxfp8", "ignore": ["lm_head", None]},
        ["ignore[1]: got null", "a pattern is a string"],
    ),
    "bad regex in ignore": ({"linear": "mxfp8", "ignore": ["re:["]}, ["ignore[0]: 're:['", "not a valid regular expression"]),
    "huge repeat in ignore": ({"linear": "mxfp8", "ignore": [f"re:a{{{10**12}}}"]}, ["ignore[0]", "not a valid regular"]),
    "bad regex in targets": ({"targets": {"re:*(": "mxfp8"}}, ["targets['re:*(']", "nothing to repeat at position 0"]),
    "targets as a list": ({"targets": ["*o_proj"]}, ["targets: got ['*o_proj'] (list)", "dict of pattern -> shorthand"]),
    "target is a weight format": (
        {"targets": {"*o_proj": "fp8_per_block_static"}},
        ["'fp8_per_block_static'", "'fp8_per_block'?"],
    ),
    "target is a slot": ({"targets": {"*o_proj": {"weight": "mxfp8"}}}, ["targets['*o_proj']", "accepted: the shorthands"]),
    "target is null": ({"targets": {"*o_proj": None}}, ["targets['*o_proj']: got null"]),
    "target pattern is no string": ({"targets": {3: "mxfp8"}}, ["targets[3]", "a pattern is a string"]),
    "targets beside linear": (
        {"targets": {"*": "mxfp8"}, "linear": "mxfp8"},
        ["targets beside linear", "leave one of the two out"],
    ),
    "targets beside moe": ({"targets": {"*": "mxfp8"}, "moe": {"weight": None}}, ["targets beside moe"]),
    "near scale search": (
        {"linear": "mxfp4", "scale_search": "MSE"},
        ["quantization_config.scale_search: got 'MSE'; accepted: amax, mse.", "Did you mean 'mse'?"],
    ),
    "unknown scale search": ({"linear": "mxfp4", "scale_search": "best"}, ["got 'best'; accepted: amax, mse."]),
    "scale search of a wrong type": ({"linear": "mxfp4", "scale_search": True}, ["scale_search: got True (bool); accepted"]),
    "scale search in a list": ({"linear": "mxfp4", "scale_search": ["mse"]}, ["scale_search: got ['mse'] (list)"]),
    "scale search in a slot": (
        {"moe": {"weight": "mxfp4", "scale_search": "mse"}},
        ["quantization_config.moe.scale_search: unknown key", "stands beside the slots, not in one"],
    ),
    "only a scale search": ({"scale_search": "mse"}, ["nothing would be quantised"]),
    "nothing set": ({}, ["sets none of linear, moe and targets", "nothing would be quantised"]),
    "only ignore": ({"ignore": ["lm_head"]}, ["nothing would be quantised"]),
    "nulls and empty targets": ({"linear": None, "moe": None, "targets": {}}, ["nothing would be quantised"]),
    "no dict": (["mxfp8"], ["quantization_config: got ['mxfp8'] (list)", "linear, moe, ignore, targets"]),
    "a name for a config": ("mxfp4", ["a name alone goes into quantization", "{'linear': 'mxfp4'}"]),
    "broken JSON": ('{"linear": ', ["is not JSON"]),
    "JSON that is no object": ('["mxfp8"]', ["(list)"]),
    "JSON with a key twice": ('{"targets": {"*a": "mxfp8", "*a": "mxfp4"}}', ["the key '*a' is written more than once"]),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("quantization", ["online", None])
def test_refused(case: str, quantization: str | None) -> None:
    config, fragments = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        resolve(quantization, config)  # type: ignore[arg-type]
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("quantization", "fragments"),
    [
        (None, ["nothing is asked for", "fp8_per_tensor"]),
        ("fp8", ["got 'fp8'", "accepted: fp8_per_tensor", "online"]),
        ("FP8_PER_TENSOR", ["Did you mean 'fp8_per_tensor'?"]),
        ("mxpf4", ["Did you mean 'mxfp4'?"]),
        ("nvfp4", ["quantization='online', quantization_config={'linear': 'nvfp4'}"]),
        (3, ["got 3 (int)"]),
        ("online", ["nothing would be quantised"]),
    ],
)
def test_refused_quantization(quantization: Any, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(quantization)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_a_shorthand_excludes_targets() -> None:
    with pytest.raises(ConfigError, match=r"beside quantization='mxfp4'.*write quantization='online'"):
        resolve("mxfp4", {"targets": {"*": "mxfp8"}})
    assert resolve("mxfp4", {"targets": None}) == resolve("mxfp4", {"targets": {}}) == resolve("mxfp4")


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        QuantizationConfig.model_validate(
            {
                "linear": {"wieght": "a", "weight": "b"},
                "moe": 7,
                "ignore": ["re:(", "re:["],
                "targets": {"x": "y", "re:(": None},
            }
        )
    starts = ["linear.wieght:", "linear.weight:", "moe:", "ignore[0]:", "ignore[1]:", "targets['x']:", "targets['re:(']:"]
    for start in starts:
        assert f"quantization_config.{start}" in str(caught.value)


@pytest.mark.parametrize(
    "construct",
    [
        lambda data: QuantizationConfig(**data),
        QuantizationConfig.model_validate,
        lambda data: QuantizationConfig.model_validate_json(json.dumps(data)),
        parse_config,
        lambda data: parse_config(json.dumps(data)),
        lambda data: resolve(None, QuantizationConfig().model_copy(update=data)),
        lambda data: resolve(None, QuantizationConfig.model_construct(_fields_set=set(data), **data)),
    ],
)
@pytest.mark.parametrize(
    "data", [{"linear": "fp9"}, {"ignore": "lm_head"}, {"targets": {"*": "fp9"}}, {"linear": {"weight": 3}}]
)
def test_every_way_in_raises_config_error(construct: Any, data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        construct(data)


def test_config_error_is_both_a_value_error_and_ours() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, FxQuantError)
    with pytest.raises(ConfigError, match=r"slot\.weight"):
        SlotConfig(weight="fp9")
    with pytest.raises(ConfigError, match="unknown key"):
        QuantizationConfig.model_validate({"self": "mxfp8"})


def test_a_config_is_frozen() -> None:
    config = QuantizationConfig(linear="mxfp8")
    with pytest.raises(ValueError, match="frozen"):
        config.linear = "mxfp4"


def _request(weight: str, activation: Any = DEFAULT) -> SchemeRequest:
    return SchemeRequest(weight=FORMATS[weight], activation=FORMATS.get(activation, activation))


@pytest.mark.parametrize("name", SHORTHANDS)
def test_a_shorthand_alone(name: str) -> None:
    policy = resolve(name)
    assert (policy.linear, policy.moe) == (SHORTHANDS[name].linear, SHORTHANDS[name].moe)
    assert policy.moe_origin == f"from quantization: {name}"
    assert policy.linear_origin == (policy.moe_origin if policy.linear else f"{name} defines no linear method")


@pytest.mark.parametrize("slot", ["linear", "moe"])
@pytest.mark.parametrize("weight", WEIGHT_FORMATS)
def test_a_weight_format_works_in_either_slot(slot: str, weight: str) -> None:
    other = "moe" if slot == "linear" else "linear"
    for value in (weight, {"weight": weight}, {"weight": weight, "activation": None}, SlotConfig(weight=weight)):
        policy = resolve("online", {slot: value})
        assert getattr(policy, slot) == _request(weight)
        assert getattr(policy, other) is None
        assert getattr(policy, f"{slot}_origin").startswith(f"from {slot}: {weight}")
        assert getattr(policy, f"{other}_origin") == "no rule"
    assert resolve(None, {slot: weight}) == resolve("online", {slot: weight})


MERGED: dict[str, tuple[str, Any, SchemeRequest | None, str]] = {
    "left out": ("fp8_per_tensor", None, _request("fp8_per_tensor_static"), "from quantization: fp8_per_tensor"),
    "empty": ("fp8_per_tensor", {}, _request("fp8_per_tensor_static"), "from quantization: fp8_per_tensor"),
    "shorthand over shorthand": (
        "fp8_per_tensor",
        "fp8_per_block",
        _request("fp8_per_block_static"),
        "from {slot}: fp8_per_block",
    ),
    "weight format over shorthand": ("fp8_per_tensor", "nvfp4", _request("nvfp4"), "from {slot}: nvfp4"),
    "weight over shorthand": ("fp8_per_tensor", {"weight": "mxfp4"}, _request("mxfp4"), "from {slot}: mxfp4"),
    "weight-only": (
        "fp8_per_tensor",
        {"activation": "none"},
        _request("fp8_per_tensor_static", None),
        "from quantization: fp8_per_tensor, {slot}.activation none",
    ),
    "activation over shorthand": (
        "mxfp8",
        {"activation": "mxfp4"},
        _request("mxfp8", "mxfp4"),
        "from quantization: mxfp8, {slot}.activation mxfp4",
    ),
    "both": (
        "mxfp8",
        {"weight": "mxfp4", "activation": "mxfp8"},
        _request("mxfp4", "mxfp8"),
        "from {slot}: mxfp4, activation mxfp8",
    ),
    "null weight": ("mxfp4", {"weight": None}, None, "{slot}.weight is null"),
    "null weight and activation": ("mxfp4", {"weight": None, "activation": None}, None, "{slot}.weight is null"),
}


@pytest.mark.parametrize("slot", ["linear", "moe"])
@pytest.mark.parametrize("case", MERGED)
def test_merge(case: str, slot: str) -> None:
    quantization, value, request, origin = MERGED[case]
    policy = resolve(quantization, {slot: value})
    assert getattr(policy, slot) == request
    assert getattr(policy, f"{slot}_origin") == origin.format(slot=slot)
    other = "moe" if slot == "linear" else "linear"
    assert getattr(policy, other) == SHORTHANDS[quantization].request(other)  # type: ignore[arg-type]


def test_null_and_left_out_are_not_the_same() -> None:
    shorthand = "int8_per_channel_weight_only"
    assert resolve(shorthand, {"moe": {"weight": "mxfp8"}}).moe == _request("mxfp8", None), (
        "left out: the shorthand's, weight-only"
    )
    assert resolve(shorthand, {"moe": {"weight": "mxfp8", "activation": None}}).moe == _request("mxfp8"), "null: the default"
    assert resolve(shorthand, {"moe": {"activation": None}}).moe == _request("int8_per_channel_static")
    assert resolve(shorthand, {"moe": "mxfp8"}).moe == _request("mxfp8"), "a bare string is the whole slot"


def test_a_slot_that_the_shorthand_lacks_can_be_set_but_not_completed() -> None:
    assert resolve("nvfp4_per_token", {"linear": "nvfp4"}).linear == _request("nvfp4")
    with pytest.raises(ConfigError, match="quantization='nvfp4_per_token' defines no linear method"):
        resolve("nvfp4_per_token", {"linear": {"activation": "none"}})


@pytest.mark.parametrize("slot", ["linear", "moe"])
@pytest.mark.parametrize("activation", [*ACTIVATION_FORMATS, "none", None])
@pytest.mark.parametrize("weight", WEIGHT_FORMATS)
def test_a_pair_is_accepted_where_its_product_is_defined(weight: str, activation: str | None, slot: str) -> None:
    same_kind = (weight == "int8_per_channel_static") == (activation == "int8_per_token")
    requests = {name: getattr(shorthand, slot) for name, shorthand in SHORTHANDS.items()}
    beside = [name for name, request in requests.items() if request and request.weight.name == weight]
    given: list[tuple[str, dict[str, Any]]] = [
        ("online", {slot: {"weight": weight, "activation": activation}}),
        ("fp8_per_block", {slot: {"weight": weight, "activation": activation}}),
        *((name, {slot: {"activation": activation}}) for name in beside),
    ]
    for quantization, config in given:
        if activation in (None, "none") or same_kind:
            wanted = DEFAULT if activation is None else None if activation == "none" else activation
            assert getattr(resolve(quantization, config), slot) == _request(weight, wanted)
            continue
        with pytest.raises(ConfigError) as caught:
            resolve(quantization, config)
        accepted = [name for name in ACTIVATION_FORMATS if (name == "int8_per_token") != (activation == "int8_per_token")]
        assert f"quantization_config.{slot}.activation: got '{activation}' beside the weight '{weight}'" in str(caught.value)
        assert f"accepted beside {weight}: {', '.join(accepted)}, 'none'" in str(caught.value)
        assert (f"that of '{quantization}'" in str(caught.value)) == ("weight" not in config[slot])


@pytest.mark.parametrize("scale_search", ["amax", "mse"])
@pytest.mark.parametrize(
    ("quantization", "config"),
    [
        ("mxfp4", {}),
        ("mxfp4", {"ignore": ["lm_head"]}),
        ("fp8_per_block", {"moe": "nvfp4"}),
        (None, {"linear": {"weight": "mxfp4"}, "moe": {"weight": None}}),
        (None, {"targets": {"*": "mxfp4"}}),
    ],
)
def test_a_scale_search_stands_beside_everything(quantization: str | None, config: dict[str, Any], scale_search: str) -> None:
    plain = resolve(quantization, config or None)
    assert plain.scale_search == "amax"
    searched = resolve(quantization, {**config, "scale_search": scale_search})
    assert searched == dataclasses.replace(plain, scale_search=scale_search)
    assert resolve(quantization, {**config, "scale_search": None}) == plain


def test_patterns_keep_their_order() -> None:
    policy = resolve("online", {"targets": {"b": "mxfp8", "a": "mxfp4"}, "ignore": ["d", "c"], "linear": None})
    assert policy.targets == ((Pattern("b"), "mxfp8"), (Pattern("a"), "mxfp4"))
    assert policy.ignore == (Pattern("d"), Pattern("c"))


slot_values = st.one_of(
    st.none(),
    st.sampled_from(["fp8_per_tensor", "mxfp4", "nvfp4"]),
    st.fixed_dictionaries(
        {}, optional={"weight": st.sampled_from([None, *WEIGHT_FORMATS]), "activation": st.sampled_from([None, "none"])}
    ),
)
configs = st.fixed_dictionaries(
    {},
    optional={
        "linear": slot_values,
        "moe": slot_values,
        "ignore": st.lists(st.sampled_from(["lm_head", "*o_proj"])),
        "scale_search": st.sampled_from([None, "amax", "mse"]),
    },
)


@settings(max_examples=100, deadline=None)
@given(configs)
def test_a_config_survives_every_round_trip(data: dict[str, Any]) -> None:
    config = QuantizationConfig(**data)
    expected = resolve("fp8_per_channel", data)
    again = [
        config,
        config.model_dump(),
        config.model_dump_json(),
        json.dumps(data),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
    ]
    assert all(resolve("fp8_per_channel", form) == expected for form in again)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=4)
    | st.sampled_from(["mxfp8", "int8_per_token", "mse", "re:("]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["weight", "activation", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([None, "online", "mxfp8", "x"]),
    st.dictionaries(st.sampled_from(["linear", "moe", "ignore", "targets", "scale_search", "x"]), json_values, max_size=3),
)
def test_any_value_is_parsed_or_refused_as_a_config_error(quantization: str | None, data: dict[str, Any]) -> None:
    try:
        told = "quantization" if resolve(quantization, data) else ""
    except ConfigError as error:
        told = str(error)
    assert told.startswith("quantization")


def test_only_the_parser_brings_in_pydantic() -> None:
    modules = "fxquant.errors, fxquant.schemes, fxquant.rules, fxquant.planner"
    check = f"import sys, {modules}; assert not any(name.split('.')[0] == 'pydantic' for name in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
