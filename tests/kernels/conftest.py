"""What every test of the kernels needs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxquant.kernels import errors


@pytest.fixture(autouse=True, scope="session")
def compiled_from_these_sources() -> Iterator[None]:
    """torch keeps compiled graphs on disk by the names of their ops, not by what these do: no test may find older ones."""
    sources = sorted(Path(errors.__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    with torch.compiler.config.patch(cache_key_tag=digest):
        yield
