"""Tables as text, and blocks of a file between marks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxquant.errors import ConfigError
from fxquant.markdown import replace_block, table

BEGIN, END = "<!-- begin -->", "<!-- end -->"


def test_a_table_is_markdown() -> None:
    text = table(("name", "MB"), [("a [b] *c*", "1.50"), ("d", "20.00")], numbers=("MB",))
    assert text.splitlines() == [
        "| name      |    MB |",
        "|-----------|-------|",
        "| a [b] *c* |  1.50 |",
        "| d         | 20.00 |",
    ]


@pytest.mark.parametrize("width", [20, 40, 200])
def test_cells_fold_at_the_width(width: int) -> None:
    cells = ("one two three four", "five six seven eight")
    lines = table(("left", "right"), [cells], width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) > 3 or width == 200
    for column, cell in enumerate(cells, 1):
        assert " ".join(" ".join(line.split("|")[column] for line in lines[2:]).split()) == cell


plain = st.text(st.characters(exclude_characters="<"), max_size=20)


@given(plain, plain, plain, plain)
def test_a_block_is_replaced_and_the_rest_stays(before: str, old: str, after: str, block: str) -> None:
    written = replace_block(f"{before}{BEGIN}{old}{END}{after}", BEGIN, END, block)
    assert written == f"{before}{BEGIN}\n{block.strip()}\n{END}{after}"
    assert replace_block(written, BEGIN, END, block) == written


@pytest.mark.parametrize(
    "text", ["", BEGIN, END, END + BEGIN, BEGIN + BEGIN + END, BEGIN + END + END, BEGIN + END + BEGIN + END, END + BEGIN + END]
)
def test_marks_that_are_missing_doubled_or_in_the_wrong_order(text: str) -> None:
    with pytest.raises(ConfigError, match=f"'{BEGIN}' and, further down, '{END}', each once"):
        replace_block(text, BEGIN, END, "x")
