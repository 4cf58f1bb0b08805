"""Norms of DTensors: two processes compute what one does, and rows that are sharded cost no communication."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

from tests.kernels.cpu_cases import needs_library

ROOT = Path(__file__).parents[2]
pytestmark = [
    needs_library,
    pytest.mark.skipif(not distributed.is_available(), reason="torch was built without distributed"),
]


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.kernels.sharding_worker"]
    running = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store")],
            cwd=ROOT,
            env=dict(os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [each.communicate(timeout=240)[0] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0, 0], "\n".join(said)


def test_nothing_of_distributed_is_loaded_for_ordinary_tensors() -> None:
    program = (
        "import sys, torch, normwise.layers as n; n.RMSNorm(4)(torch.ones(2, 4));"
        "sys.exit(any(name in sys.modules for name in ('torch.distributed.tensor', 'torch._dynamo')))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
