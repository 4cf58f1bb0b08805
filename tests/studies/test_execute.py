"""One trial in a process of its own: whatever it does, the runner goes on."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normwise.studies._execute import Answer, Order, execute
from tests.studies import toy


def order(does: str, *, study: str = toy.__name__, version: int = 1, **given: Any) -> Order:
    limits = {name: given.pop(name) for name in ("time_limit", "memory_limit", "data") if name in given}
    return Order(study=study, version=version, params={"does": does, "at": 4, "seed": 1, **given}, **limits)


def eventually(holds: Callable[[], bool], within: float) -> bool:
    deadline = time.monotonic() + within
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def alive(pid: int) -> bool:
    """Return whether a process runs: one that is over and not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_trial_answers_with_what_it_measured_and_where() -> None:
    answer = execute(order("number"))
    assert (answer.outcome, answer.metrics, answer.error) == ("done", {"value": 41.0}, "")
    assert 0 <= answer.cpu_seconds < 5
    assert 0 <= answer.seconds < 5
    assert answer.conditions["threads"] == 1
    assert set(answer.conditions) >= {"normwise", "torch", "python", "system"}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says")
def test_the_memory_is_that_of_the_worker_and_not_of_whoever_started_it() -> None:
    held = bytearray(os.urandom(1)) * 300_000_000
    assert 1e6 < execute(order("number")).peak_bytes < 100e6 < len(held)
    assert 200e6 < execute(order("fill", bytes=200_000_000)).peak_bytes < 300e6


def test_what_diverged_comes_back_as_it_was() -> None:
    metrics = execute(order("odd numbers")).metrics
    assert math.isnan(metrics["nan"])
    assert metrics["inf"] == math.inf
    assert metrics["list"][:2] == [1, -math.inf]
    assert math.isnan(metrics["list"][2])
    assert metrics["list"][3] == 0.1 + 0.2


def test_what_a_study_prints_is_no_part_of_the_answer() -> None:
    assert execute(order("print")).metrics == {"value": 41.0}


def test_an_exception_is_told_in_one_line_and_the_trace_is_kept() -> None:
    answer = execute(order("raise"))
    assert (answer.outcome, answer.error) == ("failed", "ArithmeticError: trial 4 does not converge")
    assert "in _raise" in answer.conditions["printed"]


def test_a_metric_that_is_no_number_is_the_fault_of_the_study() -> None:
    answer = execute(order("text"))
    assert answer.outcome == "failed"
    assert answer.error == "TypeError: the metric value is no number and no list of numbers"


@pytest.mark.parametrize(
    ("does", "error"),
    [("exit", "ended with exit code 3 and without an answer"), ("die", "was killed by SIGKILL")],
)
def test_a_worker_that_is_gone_is_a_trial_that_was_killed(does: str, error: str) -> None:
    answer = execute(order(does))
    assert answer.outcome == "killed"
    assert error in answer.error


def test_a_module_that_is_not_there_is_a_failed_trial() -> None:
    answer = execute(order("number", study="tests.studies.nowhere"))
    assert (answer.outcome, answer.error) == ("failed", "ModuleNotFoundError: No module named 'tests.studies.nowhere'")


def test_another_version_of_the_study_is_refused() -> None:
    answer = execute(order("number", version=2))
    assert (answer.outcome, answer.metrics) == ("version", {})
    assert answer.error == "the worker has version 1 of the study, the runner has 2"


def test_other_data_are_refused() -> None:
    answer = execute(order("number", data={"standard-library": "0" * 64}))
    assert (answer.outcome, answer.metrics) == ("data", {})
    assert answer.error.startswith("the worker reads another standard-library: ")


def test_the_time_limit_ends_a_trial() -> None:
    started = time.monotonic()
    answer = execute(order("sleep", seconds=60, time_limit=0.5))
    assert (answer.outcome, answer.error) == ("timeout", "longer than the time limit of 0.5 s")
    assert time.monotonic() - started < 5


def test_the_memory_limit_ends_a_trial_and_is_named() -> None:
    answer = execute(order("fill", bytes=200_000_000, memory_limit=100_000_000))
    assert answer.outcome == "memory"
    assert answer.error.startswith("more than the memory limit of 100 MB: MemoryError")
    assert execute(order("fill", bytes=50_000_000, memory_limit=100_000_000)).metrics == {"length": 50_000_000}


def test_a_worker_reads_no_path_from_an_environment_that_its_runner_ignores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert execute(order("number")).error.endswith("not this one")  # as in the user's own python
    monkeypatch.setattr(sys, "flags", SimpleNamespace(ignore_environment=1))
    assert execute(order("number")).outcome == "done"


def test_a_memory_limit_beyond_what_the_system_counts_is_none() -> None:
    assert execute(order("number", memory_limit=10**30)).outcome == "done"


@pytest.mark.slow
def test_the_memory_limit_holds_for_tensors_and_leaves_torch_out() -> None:
    answer = execute(order("fill tensor", study=f"{toy.__name__}_of_torch", bytes=100_000_000, memory_limit=90_000_000))
    assert answer.outcome == "memory"
    assert answer.error.startswith("more than the memory limit of 90 MB: RuntimeError")
    fits = order("fill tensor", study=f"{toy.__name__}_of_torch", bytes=60_000_000, memory_limit=90_000_000)
    assert execute(fits).outcome == "done"


def test_a_runner_that_stops_ends_the_worker(tmp_path: Path) -> None:
    log = tmp_path / "log"
    answer = execute(order("sleep", seconds=60, log=str(log)), log.exists)
    assert (answer.outcome, answer.error) == ("stopped", "interrupted")
    assert not alive(int(log.read_text().split()[0]))


def test_processes_that_a_trial_leaves_behind_are_ended(tmp_path: Path) -> None:
    log = tmp_path / "child"
    started = time.monotonic()
    assert execute(order("leave a child", child=str(log))).metrics == {"value": 41.0}
    assert time.monotonic() - started < 10
    assert eventually(lambda: not alive(int(log.read_text())), 1)


def _starts(order: Order) -> None:
    execute(order)


@pytest.mark.parametrize("does", ["sleep", "spin"])
def test_a_worker_ends_when_whoever_started_it_is_killed(does: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    starter = get_context("fork").Process(target=_starts, args=(order(does, seconds=60, log=str(log)),))
    starter.start()
    assert eventually(lambda: log.exists() and bool(log.read_text()), 20)
    worker = int(log.read_text().split()[0])
    assert alive(worker)
    assert starter.pid is not None
    os.kill(starter.pid, signal.SIGKILL)
    starter.join()
    assert eventually(lambda: not alive(worker), 2)


def test_answers_and_orders_travel() -> None:
    import pickle

    for sent in (order("number"), Answer(outcome="done", metrics={"value": 1.0})):
        assert pickle.loads(pickle.dumps(sent)) == sent
