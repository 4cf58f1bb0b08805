"""Norms of DTensors: two processes compute what one does, and rows that are sharded cost no communication."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

from tests import ranks
from tests.kernels.cpu_cases import needs_library

pytestmark = [
    needs_library,
    pytest.mark.skipif(not distributed.is_available(), reason="torch was built without distributed"),
]


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    assert ranks.run("tests.kernels.sharding_worker", 2, tmp_path, limit=240) == ["agrees", "agrees"]


def test_nothing_of_distributed_is_loaded_for_ordinary_tensors() -> None:
    program = (
        "import sys, torch, normwise.layers as n; n.RMSNorm(4)(torch.ones(2, 4));"
        "sys.exit(any(name in sys.modules for name in ('torch.distributed.tensor', 'torch._dynamo')))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
