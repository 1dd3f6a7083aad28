"""Markdown that commands print, and blocks of a Markdown file that a command writes."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .errors import ConfigError


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[str] = (), width: int = 120) -> str:
    """A table as text; cells fold where it would be wider than ``width``. Columns in ``numbers`` are aligned to the right."""
    drawn = Table(box=MARKDOWN)
    for heading in headings:
        drawn.add_column(heading, justify="right" if heading in numbers else "left")
    for row in rows:
        drawn.add_row(*map(Text, row))
    page = io.StringIO()
    Console(file=page, width=width).print(drawn)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines() if line.strip())


def replace_block(text: str, begin: str, end: str, block: str) -> str:
    """``text`` with ``block`` in the lines between the marks ``begin`` and ``end``, which stay.

    Raises:
        ConfigError: the text does not hold each mark once, the begin before the end.
    """
    counts = text.count(begin), text.count(end)
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if counts != (1, 1) or not found:
        raise ConfigError(
            f"the file needs the lines '{begin}' and, further down, '{end}', each once; got {counts[0]} and {counts[1]}"
        )
    return f"{before}{begin}\n{block.strip()}\n{end}{after}"
