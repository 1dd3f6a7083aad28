"""Give freed memory back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def return_free_memory() -> None:
    """Ask the C library to return what was freed; does nothing where it cannot.

    Converting a layer leaves holes of its float size between small blocks that stay. glibc keeps such holes, so that without
    this the process grows while the model shrinks.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # no glibc
        return None
