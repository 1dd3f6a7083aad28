"""SQNR and the report's text and dict."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import fxquant
from fxquant.report import Energy, sqnr_db


def test_sqnr_adds_energies_not_decibels():
    assert sqnr_db([Energy(signal=100.0, noise=1.0), Energy(signal=900.0, noise=9.0)]) == pytest.approx(20.0)
    assert sqnr_db([Energy(signal=1.0, noise=0.0)]) == math.inf
    assert math.isnan(sqnr_db([]))
    assert sqnr_db([Energy(signal=0.0, noise=1.0)]) == -math.inf


def test_sqnr_is_that_of_the_weights():
    model = nn.Sequential(nn.Linear(128, 128))
    exact = model[0].weight.detach().clone()
    report = fxquant.quantize_(model, "fp8_per_channel")
    noise = (model[0].weight.dequantize() - exact).square().sum()
    expected = 10 * torch.log10(exact.square().sum() / noise).item()
    assert report.to_dict()["groups"][0]["sqnr_db"] == pytest.approx(expected, abs=1e-3)


def test_zero_weights_have_no_noise():
    model = nn.Linear(16, 16)
    nn.init.zeros_(model.weight)
    report = fxquant.quantize_(model, "fp8_per_tensor")
    assert "inf" in str(report)


def test_report_is_json(llama):
    report = fxquant.quantize_(llama(), "fp8_per_block")
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def test_the_search_for_scales_shows_in_text_and_dict(llama):
    report = fxquant.quantize_(llama(), "mxfp4", {"scale_search": "mse"})
    plain = fxquant.quantize_(llama(), "mxfp4")
    text, groups = str(report), report.to_dict()["groups"]
    assert text.count("from quantization: mxfp4, scale_search mse") == 7
    assert "scale_search" not in str(plain)
    assert [group["scale_search"] for group in groups] == ["mse"] * 7 + [None]
    assert {group["scale_search"] for group in plain.to_dict()["groups"]} == {"amax", None}
    for searched, other in zip(groups[:7], plain.to_dict()["groups"], strict=False):
        assert searched["sqnr_db"] > other["sqnr_db"]
        assert searched["bytes_after"] == other["bytes_after"]
