"""The table of schemes against the plans that are made of them, and its own text and dict."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fxquant
from fxquant.errors import ConfigError, UnsupportedError
from fxquant.kernels import capability
from fxquant.kernels.capability import Kernel, Problem, choose
from fxquant.kernels.formats import ACTIVATION_FORMATS, FORMATS, WEIGHT_FORMATS, Scheme
from fxquant.scheme_table import SHAPES, SchemeTable, scheme_table
from fxquant.schemes import NAMES, SHORTHANDS, SLOTS


@pytest.fixture(scope="module")
def on_cpu() -> SchemeTable:
    return scheme_table("cpu")


def test_a_row_for_each_name_in_each_slot(on_cpu: SchemeTable) -> None:
    assert [(row.name, row.slot) for row in on_cpu.rows] == [(name, slot) for name in NAMES for slot in SLOTS]
    assert {size % 128 for shape in SHAPES.values() for key, size in shape.items() if key != "experts"} == {0}


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_the_linear_slot_say_what_a_plan_says(name: str, on_cpu: SchemeTable) -> None:
    (row,) = [row for row in on_cpu.rows if (row.name, row.slot) == (name, "linear")]
    sizes = SHAPES["linear"]
    model = nn.Sequential(nn.Linear(sizes["columns"], sizes["rows"], device="meta", dtype=torch.bfloat16))
    if row.scheme is None:
        with pytest.raises(ConfigError, match=row.reason):
            fxquant.plan(model, None, {"linear": name})
        return
    (planned,) = fxquant.plan(model, None, {"linear": name}, device="cpu").layers
    assert (row.scheme, row.kernel, row.reason) == (planned.scheme, planned.kernel, "")


def test_rows_of_the_moe_slot_are_those_of_the_grouped_product(on_cpu: SchemeTable) -> None:
    for row in on_cpu.rows:
        if row.slot == "moe":
            assert row.scheme is not None
            assert row.kernel == choose(Problem(scheme=row.scheme, **SHAPES["moe"]))


@pytest.mark.parametrize("name", [name for name in SHORTHANDS if not SHORTHANDS[name].linear])
def test_a_shorthand_without_a_linear_method_says_what_to_write(name: str, on_cpu: SchemeTable) -> None:
    (row,) = [row for row in on_cpu.rows if (row.name, row.slot) == (name, "linear")]
    weight = row.reason.split("'")[1]
    assert row.reason == f"defines no linear method; write the weight format '{weight}'"
    assert fxquant.plan_names({"a": "linear"}, None, {"linear": weight}) == {"a": weight}
    assert weight in " ".join(str(on_cpu).replace("|", " ").split())


def test_another_device_has_other_defaults_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxquant.scheme_table.device_key", lambda _: ("cuda", (10, 0)))
    table = scheme_table("cpu")
    rows = {(row.name, row.slot): row for row in table.rows}
    assert str(rows["mxfp4", "linear"].scheme) == "mxfp4 x mxfp4"
    assert rows["int8_per_channel_static", "linear"].kernel != choose(
        Problem(scheme=Scheme(weight=FORMATS["int8_per_channel_static"]), **SHAPES["linear"])
    )
    assert str(table).startswith("On cuda, compute capability 10.0, with torch")
    assert table.to_dict()["capability"] == [10, 0]


def test_the_one_table_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that is added there shows here, and the reasons where none serves."""
    kernel = Kernel(family="new", widths="W1A1", runs="something new")
    monkeypatch.setattr(capability, "_TABLE", (("new", lambda problem: "no experts" if problem.experts else kernel),))
    table = scheme_table("cpu")
    assert {row.kernel for row in table.rows if row.slot == "linear" and row.scheme} == {kernel}
    assert {row.reason for row in table.rows if row.slot == "moe"} == {"new: no experts"}
    assert "new W1A1" in str(table)
    assert "something new" in str(table)
    assert "new: no experts" in str(table)


def test_the_activations_are_the_defined_ones(on_cpu: SchemeTable) -> None:
    listed = on_cpu.to_dict()["activations"]
    assert list(listed) == list(WEIGHT_FORMATS)
    for weight, activations in listed.items():
        accepted = []
        for name in (*ACTIVATION_FORMATS, "none"):
            try:
                fxquant.plan_names({"a": "linear"}, None, {"linear": {"weight": weight, "activation": name}})
            except ConfigError:
                continue
            accepted.append(name)
        assert activations == accepted


def test_text_and_dict(on_cpu: SchemeTable) -> None:
    lines = str(on_cpu).splitlines()
    assert max(map(len, lines)) <= 120
    for name in NAMES:
        assert sum(line.startswith(f"| {name} ") for line in lines) >= 2
    assert "Slot linear, asked for N=4096, K=4096:" in lines
    assert "Slot moe, asked for 8 experts of N=2048, K=4096:" in lines
    content = on_cpu.to_dict()
    assert json.loads(json.dumps(content)) == content
    first = content["schemes"][0]
    assert (first["name"], first["slot"], first["weight"]) == ("fp8_per_tensor", "linear", "fp8_per_tensor_static")
    assert set(first["families"]) == {"triton", "torch", "reference"}
    assert first["widths"] == "W8A8"


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="device: got 'gpu'"):
        scheme_table("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="no CUDA device"):
            scheme_table("cuda")
