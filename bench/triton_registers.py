"""Registers, spills and shared memory of the Triton kernels, compiled ahead for GPUs that are not here.

The launch functions are called on meta tensors; each launch is compiled instead of run, exactly as it would be
specialized, and ptxas says what it takes. Writes ``bench/triton_registers.md``:

    python bench/triton_registers.py
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from normwise.kernels import _triton_rows as rows

ARCHITECTURES = (80, 90)  # A100; H100 and H200
SIZES = (64, 512, 1024, 2048, 4096, 8192, 16384, 65536)
KINDS = {"RMSNorm": 0, "LayerNorm": 1}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PAGE = Path(__file__).with_suffix(".md")
HEADING = """# What the Triton kernels take of a GPU

Written by `bench/triton_registers.py`: compiled with Triton {version} and its ptxas, never run on a GPU, so nothing
here says how fast they are. 128 registers a thread at 16 warps, or 64 at 32 warps, are all that one SM has; spills
are bytes of a thread's registers kept in memory instead (stores + loads). Weights are float32; add + norm adds a
residual of the input's dtype; backward returns all gradients, the one through the sum included.
"""


class Launch(NamedTuple):
    """One compiled launch and what ptxas says of it."""

    kernel: str
    registers: int
    spills: int
    shared: int
    warps: int


@contextmanager
def compiling(architecture: int) -> Iterator[list[Launch]]:
    """Compile for ``architecture`` what is launched in the body, instead of running it."""
    target = GPUTarget("cuda", architecture, 32)
    stub = SimpleNamespace(
        get_current_device=lambda: architecture,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    launches: list[Launch] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append(_measure(kernel, architecture))

    driver.set_active(stub)  # type: ignore[arg-type]
    with mock.patch.object(JITFunction, "run", compile_only):
        yield launches


def _measure(kernel: Any, architecture: int) -> Launch:
    suffix = "a" if architecture >= 90 else ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(kernel.asm["ptx"])
        source.flush()
        said = subprocess.run(
            [
                get_ptxas(architecture).path,
                *("-v", "-lineinfo", "--regAllocOptLevel=2", f"--gpu-name=sm_{architecture}{suffix}"),  # as Triton does
                *(source.name, "-o", "/dev/null"),
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    number = {
        key: sum(map(int, re.findall(pattern, said)))
        for key, pattern in {"registers": r"Used (\d+) registers", "spills": r"(\d+) bytes spill"}.items()
    }
    return Launch(kernel.metadata.name, **number, shared=kernel.metadata.shared, warps=kernel.metadata.num_warps)


def launches_of(architecture: int, size: int, kind: int, dtype: torch.dtype) -> dict[str, list[Launch]]:
    """Return what each launch function launches for an input of [4096, size]."""
    x = torch.empty(4096, size, dtype=dtype, device="meta")
    weight, bias = (torch.empty(size, device="meta") for _ in range(2))
    stats = torch.empty(2 if kind else 1, 4096, device="meta")
    plan = (size, kind, 1e-6, 0.0)
    calls = {
        "forward": lambda: rows.norm_rows(x, weight, bias, *plan),
        "add + norm": lambda: rows.add_norm_rows(x, x, weight, bias, *plan, wide=False),
        "backward": lambda: rows.norm_rows_backward(x, x, x, stats, weight, *plan, 7),
    }
    found = {}
    for name, call in calls.items():
        with compiling(architecture) as launches:
            call()
        found[name] = list(dict.fromkeys(launches))
    return found


def table() -> Iterator[str]:
    """Yield the lines of the page."""
    yield from HEADING.format(version=triton.__version__).splitlines()
    for architecture in ARCHITECTURES:
        yield from ("", f"## sm_{architecture}", "")
        yield "| width | dtype | norm | call | kernel | warps | registers | spills | shared |"
        yield "|--:|---|---|---|---|--:|--:|--:|--:|"
        for size, dtype, kind in itertools.product(SIZES, DTYPES, KINDS):
            found = launches_of(architecture, size, KINDS[kind], DTYPES[dtype])
            for call, each in ((call, each) for call, launches in found.items() for each in launches):
                yield (
                    f"| {size} | {dtype} | {kind} | {call} | `{each.kernel}` | {each.warps} | {each.registers} "
                    f"| {each.spills} | {each.shared} |"
                )


def main() -> None:
    """Print the page and write it."""
    lines = []
    for line in table():
        print(line, flush=True)
        lines.append(line)
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
