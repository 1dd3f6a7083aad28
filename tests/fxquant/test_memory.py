"""Conversion must shrink the process, not only the tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fxquant.memory import return_free_memory

CODE = """
import torch, fxquant

def anonymous_mb():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous")) / 1024

model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(24)))
fxquant.quantize_(torch.nn.Linear(16, 16), "fp8_per_channel")  # imports what conversion needs
before = anonymous_mb()
fxquant.quantize_(model, "fp8_per_channel")
print(before, anonymous_mb())
"""


def test_it_can_be_called_anywhere():
    return_free_memory()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's memory accounting")
def test_the_process_shrinks_with_the_model():
    before, after = map(float, subprocess.check_output([sys.executable, "-c", CODE], text=True).split())
    assert after < before - 0.75 * 24 * 4  # 24 weights of 8 MB give back 4 MB each
