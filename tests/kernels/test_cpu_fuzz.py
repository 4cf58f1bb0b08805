"""Random calls of the compiled kernels against the definition, with fresh memory full of garbage."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from normwise import kernels
from normwise.spec import NormSpec
from tests.kernels.cpu_cases import needs_library
from tests.kernels.fuzz_calls import FAMILIES, LARGE, Call, Draw
from tests.kernels.fuzz_judge import check, refusal
from tests.kernels.group_cases import threads

# Poisoned: torch fills what it hands out with NaN, glibc fills what the kernels take for themselves. The instruction
# set is chosen at the first call: a process a set is forked from one that has imported torch, which takes seconds.
_PROGRAM = """
import os, sys, torch
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
assert torch.empty(3).isnan().all()
from tests.kernels import fuzz
for instructions in sys.argv[1].split():
    child = os.fork()
    if not child:
        os.environ["NORMWISE_ISA"] = instructions
        code = fuzz.main(sys.argv[2:])
        sys.stdout.flush()
        os._exit(code)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{instructions} failed")
"""
SETS = ("baseline", "avx2", "avx512", "avx512bf16")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks a process an instruction set")


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no compiler here")
def test_the_kernels_were_compiled_where_they_can_be() -> None:
    assert kernels.cpu.unavailable() is None


def run(instructions: tuple[str, ...], seconds: float, seed: int, *options: str) -> str:
    arguments = [" ".join(instructions), "--seconds", str(seconds), "--seed", str(seed), *options]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        env={**os.environ, "MALLOC_PERTURB_": "77"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=seconds * 12 + 120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_library
@needs_fork
def test_random_calls_agree_with_the_definition_on_any_number_of_threads() -> None:
    said = run(SETS, 0.7, 0, "--large", "0")
    assert said.count(", 0 wrong, seed 0") == len(SETS)
    assert all(said.count(f"{family}: ") == len(SETS) for family in FAMILIES)


@needs_library
@needs_fork
@pytest.mark.slow
@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("seed", [1000, 1001])
def test_many_random_calls(seed: int, instructions: str) -> None:
    assert f", 0 wrong, seed {seed}" in run((instructions,), 60, seed)


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LARGE)
def test_outputs_that_are_written_past_the_cache(name: str, seed: int) -> None:
    with threads(1):
        call = LARGE[name](Draw(seed))
        assert call.x.nbytes + call.dy.nbytes >= 32 << 20  # dy is as large as y
        assert call.dy.nbytes <= 64 << 20
        assert refusal(call) is None
        assert check(call) is None, str(call)


def _larger(right: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **named: right(*args, **named) * 1.0001


def _steeper(right: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrong(*args: Any, **named: Any) -> torch.Tensor:
        y = right(*args, **named)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 1.0001)
        return y

    return wrong


def _writing(right: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrong(spec: NormSpec, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        y = right(spec, x, *args, **named)
        x.data.add_(1.0)
        return y

    return wrong


def _counting(right: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrong(*args: Any, **named: Any) -> torch.Tensor:
        y = right(*args, **named)
        return y * (1 + torch.finfo(y.dtype).eps) if torch.get_num_threads() == 8 else y

    return wrong


def _reduced(call: Call) -> int:
    """Return how many elements a statistic is of."""
    return math.prod(call.x.shape[axis] for axis in call.spec.axes) // (call.spec.groups or 1)


FAULTS = {
    "y": (_larger, "y is .* of what is allowed"),
    "gradients": (_steeper, "d[a-z]+ is .* of what is allowed"),
    "input": (_writing, "x was written to"),
    "threads": (_counting, "y changes with the number of threads"),
}


@needs_library
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_judge_sees_small_errors(family: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, calls = Draw(0), list[Call]()
    while len(calls) < 8:
        call = FAMILIES[family](draw, 5000)
        # of statistics of a few elements, or of nearly none that are real, most digits are lost
        few = call.x.numel() < 500 or call.mask is not None or _reduced(call) < 8
        if call.x.dtype is torch.float32 and not few and "residual" not in call.inputs and refusal(call) is None:
            calls.append(call)
    change, told = FAULTS[fault]
    with threads(1):
        assert [check(call) for call in calls] == [None] * len(calls)
        monkeypatch.setattr(kernels, "forward", change(kernels.forward))
        found = [check(call) or "" for call in calls]
    assert all(re.match(told, each) for each in found), found
