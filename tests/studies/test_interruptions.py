"""A run loses nothing that was written, whatever ends it, and a second one runs only what is open."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from normwise import studies
from normwise.errors import StudyError
from tests.studies.running import Elsewhere, alive, done, eventually, intact, starts

pytestmark = pytest.mark.usefixtures("registered")


def _many(asks: Callable[..., None], log: Path, *, count: int = 12, seconds: float = 0.15) -> None:
    asks(*[{"does": "sleep", "seconds": seconds, "log": str(log)} for _ in range(count)])


def _killed_at(ledger: Path, log: Path, count: int, moment: float) -> None:
    """Kill a run after some seconds; check that nothing is lost, then resume it to its end."""
    run = Elsewhere(ledger)
    time.sleep(moment)
    before = done(ledger)
    run.kill()
    after = done(ledger)
    assert before.items() <= after.items()
    if ledger.exists() and ledger.stat().st_size:
        assert intact(ledger)
    assert eventually(lambda: not any(alive(pid) for pid, _ in starts(log)), 2), "a worker outlives its runner"
    earlier = len(starts(log))
    begun = ledger.exists() and ledger.stat().st_size
    evidence = studies.resume(ledger) if begun else studies.study("toy", seeds=1, ledger=ledger)
    assert evidence.finished
    assert [row.metrics["value"] for row in evidence.rows] == [10.0 * at for at in range(count)]
    again = {at for _, at in starts(log)[earlier:]}
    assert again == set(range(count)) - set(after), "what is open is run, and nothing else"


@pytest.mark.parametrize("moment", [0.3, 0.65])
def test_kill_9_of_the_runner_loses_nothing_and_resume_runs_what_is_open(
    moment: float, ledger: Path, log: Path, asks: Callable[..., None]
) -> None:
    _many(asks, log, count=4)
    _killed_at(ledger, log, 4, moment)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_kill_9_of_the_runner_at_random_moments(seed: int, ledger: Path, log: Path, asks: Callable[..., None]) -> None:
    _many(asks, log, count=10, seconds=0.05)
    # A third of them while the ledger is begun: the first 50 ms.
    _killed_at(ledger, log, 10, random.Random(seed).uniform(0, 0.05 if seed % 3 == 0 else 2.5))


def test_ctrl_c_gives_what_there_is_and_leaves_no_process(ledger: Path, log: Path, asks: Callable[..., None]) -> None:
    asks({"does": "number", "log": str(log)}, *[{"does": "sleep", "seconds": 60, "log": str(log)}] * 3)
    run = Elsewhere(ledger, workers=2)
    assert eventually(lambda: len(starts(log)) == 3 and done(ledger))
    started = time.monotonic()
    run.signal(signal.SIGINT)
    assert run.result() == (1, 3)
    assert time.monotonic() - started < 5
    assert done(ledger) == {0: 0.0}
    assert intact(ledger)
    assert not any(alive(pid) for pid, _ in starts(log))
    shown = studies.show(ledger)
    assert {(each.attempts, each.error) for each in shown.unrun} == {(0, "")}


def test_a_second_ctrl_c_ends_the_wait_for_the_first(ledger: Path, log: Path, asks: Callable[..., None]) -> None:
    asks(*[{"does": "sleep", "seconds": 60, "log": str(log)}] * 2)
    run = Elsewhere(ledger, workers=2)
    assert eventually(lambda: len(starts(log)) == 2)
    run.signal(signal.SIGINT)
    run.signal(signal.SIGINT)
    assert run.result() in [(0, 2), ("KeyboardInterrupt", "")]
    assert eventually(lambda: not any(alive(pid) for pid, _ in starts(log)), 2)
    assert intact(ledger)


def test_a_full_disk_is_one_clear_error_and_the_ledger_stays_whole(
    ledger: Path, log: Path, asks: Callable[..., None]
) -> None:
    asks(*[{"does": "bulk", "log": str(log)}] * 6)
    kind, message = Elsewhere(ledger, largest_file=250_000).result()
    assert kind == "StudyError"
    assert message.startswith(f"{ledger}: ")
    assert "full disk" in message or "disk is full" in message
    assert message.endswith("run it again: what is done stays")
    assert intact(ledger)
    kept = done(ledger)
    assert 0 < len(kept) < 6
    assert kept == {at: 10.0 * at for at in kept}
    assert eventually(lambda: not any(alive(pid) for pid, _ in starts(log)), 2)
    before = len(starts(log))
    assert studies.resume(ledger).finished
    assert {at for _, at in starts(log)[before:]} == set(range(6)) - set(kept)


def test_a_disk_that_is_full_from_the_start_is_said(ledger: Path) -> None:
    kind, message = Elsewhere(ledger, largest_file=1000).result()
    assert kind == "StudyError"
    assert message.startswith(f"{ledger}: ")
    assert studies.study("toy", quick=True, ledger=ledger).finished


def test_a_second_run_on_a_ledger_is_refused_while_the_first_goes_on(
    ledger: Path, log: Path, asks: Callable[..., None]
) -> None:
    asks({"does": "sleep", "seconds": 60, "log": str(log)})
    run = Elsewhere(ledger)
    assert eventually(lambda: starts(log))
    for use in (lambda: studies.study("toy", seeds=1, ledger=ledger), lambda: studies.resume(ledger)):
        with pytest.raises(StudyError, match="another run is writing it"):
            use()
    assert len(studies.show(ledger).unrun) == 1
    run.kill()
    asks({"does": "number"})
    assert studies.study("toy", seeds=1, ledger=ledger).rows
