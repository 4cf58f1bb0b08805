"""Random calls of the compiled kernels against the definition, with fresh memory full of garbage."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normwise import kernels
from tests.kernels import fuzz
from tests.kernels.cpu_cases import needs_library

# Poisoned: torch fills what it hands out with NaN, glibc fills what the kernels take for themselves.
_PROGRAM = """
import sys, torch
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
assert torch.empty(3).isnan().all()
from tests.kernels import fuzz
from tests.kernels.cpu_cases import needs_library
sys.exit(fuzz.main(sys.argv[1:]))
"""


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no compiler here")
def test_the_kernels_were_compiled_where_they_can_be() -> None:
    assert kernels.cpu.unavailable() is None


def run(seconds: float, seed: int, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "--seconds", str(seconds), "--seed", str(seed)],
        env={**os.environ, "MALLOC_PERTURB_": "77", **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=seconds * 4 + 120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_library
@pytest.mark.parametrize("instructions", ["baseline", "avx2", "avx512"])
def test_random_calls_agree_with_the_definition_on_any_number_of_threads(instructions: str) -> None:
    said = run(3, seed=len(instructions), NORMWISE_ISA=instructions)
    assert ", 0 wrong" in said


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_random_calls(seed: int) -> None:
    assert ", 0 wrong" in run(60, seed=1000 + seed)


@needs_library
def test_the_judge_sees_small_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.forward

    def wrong(*args: object, **named: object) -> torch.Tensor:
        return right(*args, **named) * 1.0001  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "forward", wrong)
    draw = random.Random(0)
    calls = [fuzz.drawn(draw, 5000) for _ in range(40)]
    calls = [call for call in calls if call.residual is None and call.x.numel() and call.x.dtype is torch.float32]
    assert calls
    assert all(fuzz.check(call) is not None for call in calls)
