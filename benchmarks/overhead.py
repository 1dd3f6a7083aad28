"""Host cost per call of a compiled model with 224 linears: guards, argument handling and runtime wrappers, without the kernels.

Three models in one process: plain bf16 under torch.compile, the same converted and under ``fxquant.compile``, and converted
under ``torch.compile(backend="fxquant")``, where Dynamo checks every quantised parameter itself. Inductor's code is replaced
by a function that returns ready-made outputs, so that what is left is what the host does before the first kernel.

    python benchmarks/overhead.py [--layers 32] [--scheme fp8_per_channel] [--json overhead.json]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

import fxquant


class Block(nn.Module):
    """A decoder block's seven linears with a norm in front of each half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.o_proj(self.q_proj(h) + self.k_proj(h) + self.v_proj(h))
        h = self.norm2(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h))


class Model(nn.Module):
    def __init__(self, layers: int, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def ready_outputs(gm: fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Callable[[list[Any]], list[Any]]:
    """Stand-in for Inductor's inner compile: a function that returns outputs made once."""
    (output,) = gm.graph.find_nodes(op="output")
    values = [torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype) for node in output.args[0]]

    def run(inputs: list[Any]) -> list[Any]:
        inputs.clear()
        return values

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Compile without Inductor's code."""
    import torch._inductor.compile_fx as module

    with mock.patch.object(module, "compile_fx", functools.partial(module.compile_fx, inner_compile=ready_outputs)):
        yield


def microseconds(call: Callable[[], object], rounds: int = 30, repeats: int = 50) -> float:
    """Median over rounds of the mean time of a call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - start) / repeats * 1e6)
    return statistics.median(times)


def measure(layers: int, scheme: str) -> dict[str, float]:
    """Microseconds per call of each road."""
    x = torch.randn(1, 32, dtype=torch.bfloat16)
    torch.manual_seed(0)
    plain = Model(layers).bfloat16().eval().requires_grad_(False)
    results = {}
    with torch.no_grad(), without_kernels(), torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = torch.compile(plain)
        compiled(x)
        results["bf16 torch.compile"] = microseconds(lambda: compiled(x))
        torch.compiler.reset()
        fxquant.quantize_(plain, scheme)
        filtered = fxquant.compile(plain)
        filtered(x)
        results["fxquant.compile"] = microseconds(lambda: filtered(x))
        torch.compiler.reset()
        guarded = torch.compile(plain, backend="fxquant")
        guarded(x)
        results["torch.compile(backend='fxquant')"] = microseconds(lambda: guarded(x))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--scheme", default="fp8_per_channel")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(args.layers, args.scheme)
    base = results["bf16 torch.compile"]
    print(f"{7 * args.layers} linears, {args.scheme}; torch {torch.__version__}, Python {platform.python_version()}\n")
    print("| road | host cost per call, us | ratio to bf16 |\n|---|---|---|")
    for road, value in results.items():
        print(f"| {road} | {value:.0f} | {value / base:.2f} |")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"linears": 7 * args.layers, "scheme": args.scheme, "microseconds": results}, file, indent=1)


if __name__ == "__main__":
    main()
