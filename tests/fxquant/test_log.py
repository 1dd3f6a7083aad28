"""Warnings that are said once."""

from __future__ import annotations

import logging

from fxquant.log import warn_once


def test_once_a_text(caplog):
    with caplog.at_level(logging.WARNING, logger="fxquant"):
        for text in ("first of these", "first of these", "second of these"):
            warn_once(text)
    assert [record.message for record in caplog.records] == ["first of these", "second of these"]
