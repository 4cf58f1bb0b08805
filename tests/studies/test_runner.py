"""What a run gives, tries again and refuses."""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import normwise as nw
from normwise import studies
from normwise.errors import StudyError
from normwise.rendering import in_language
from normwise.studies import _trials, engines
from normwise.studies._execute import Answer, execute
from normwise.studies._ledger import Head, writing
from normwise.studies._progress import Progress
from tests.studies import toy
from tests.studies.running import Elsewhere, done, eventually, intact, starts

pytestmark = pytest.mark.usefixtures("registered")


# What a run gives


def test_a_study_runs_and_its_ledger_shows_the_same(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trials, "_START", 0.0)
    said: list[str] = []
    evidence = nw.study("toy", ledger=ledger, told=said.append)
    assert evidence.finished
    assert [row.metrics["value"] for row in evidence.rows] == [0, 10, 20, 30, 1, 11, 21, 31]
    assert (evidence.study, evidence.quick, evidence.seeds, evidence.ledger) == ("toy", False, 2, ledger)
    assert evidence.rows[0].peak_bytes > 0
    assert list(studies.show(ledger).rows) == list(evidence.rows)
    assert intact(ledger)
    assert said == [
        f"8 trials, about 1 second of CPU time: 1 second on {workers(ledger.parent)} workers; ledger {ledger}"
    ]
    assert in_language(said[0], "zh").startswith("8 个试验，CPU 时间约 1 秒：")


def workers(folder: Path) -> int:
    with engines.start("local", None, folder) as session:
        return session.workers


def test_the_ledger_is_under_the_current_folder_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: Callable[..., None]
) -> None:
    monkeypatch.chdir(tmp_path)
    asks({"does": "number"})
    assert studies.study("toy", quick=True).ledger == Path("normwise-studies/toy.sqlite")
    assert (tmp_path / "normwise-studies" / "toy.sqlite").exists()


def test_asking_for_more_runs_only_what_is_new(ledger: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [{"does": "number", "at": at, "log": str(log)} for at in range(4)]
    monkeypatch.setattr(toy, "trials", lambda quick: every[2:] if quick else every)
    said: list[str] = []
    quick = studies.study("toy", quick=True, ledger=ledger)
    assert [row.params["at"] for row in quick.rows] == [2, 3]
    full = studies.study("toy", seeds=1, ledger=ledger, told=said.append)
    assert [row.params["at"] for row in full.rows] == [0, 1, 2, 3]
    assert said[0].startswith("2 trials, ")
    seeds = studies.study("toy", seeds=2, ledger=ledger)
    assert [row.params["seed"] for row in seeds.rows] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len(starts(log)) == 8
    assert list(studies.study("toy", quick=True, ledger=ledger, told=said.append).rows) == list(quick.rows)
    assert said[-1] == f"all 2 trials are in {ledger}"
    assert len(starts(log)) == 8
    shown = studies.show(ledger)
    assert (shown.quick, shown.seeds, len(shown.rows)) == (False, 2, 8)


def test_what_diverged_is_kept_as_it_was(ledger: Path, asks: Callable[..., None]) -> None:
    asks({"does": "odd numbers"})
    (row,) = studies.study("toy", quick=True, ledger=ledger).rows
    assert math.isnan(row.metrics["nan"])
    assert studies.show(ledger).rows[0].metrics["inf"] == math.inf


def test_progress_is_told_in_expected_time(
    ledger: Path, asks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_trials, "_START", 0.0)
    asks({"does": "number"}, {"does": "raise"}, {"does": "number"})
    told: list[tuple[str, int, int]] = []
    studies.study("toy", quick=True, ledger=ledger, advance=lambda *said: told.append(said))
    assert [(at, total) for _, at, total in told] == [(0, 300), (100, 300), (200, 300), (300, 300)]
    assert told[0][0] == "0 of 3 trials, about 1 second left"
    assert in_language(told[3][0], "zh").startswith("3/3 个试验")


def test_the_time_left_follows_the_pace_but_not_the_first_trial_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr("normwise.studies._progress.monotonic", lambda: now[0])
    progress = Progress({str(at): 60.0 for at in range(20)}, 2, lambda text, *_: said.append(text))
    for at in range(19):
        now[0] += 60.0  # twice what two workers would take
        progress.finish(str(at))
    left = [int(text.split("about ")[1].split()[0]) for text in said]
    assert (left[0], left[1], left[10]) == (10, 13, 9)
    assert said[19] == "19 of 20 trials, about 57 seconds left"


def test_a_study_that_measures_time_runs_one_trial_at_a_time(
    ledger: Path, asks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "ALONE", True, raising=False)
    asks({"does": "number"}, {"does": "number"}, {"does": "number"})
    most: list[int] = []

    class Session:
        workers = 8

        def submit(self, function: Any, order: Any) -> Future[Answer]:
            most.append(order.params["at"])
            future: Future[Answer] = Future()
            future.set_result(function(order))
            return future

    @contextmanager
    def start(text: str, workers: int | None, folder: Path) -> Iterator[Session]:
        assert workers == 1
        yield Session()

    monkeypatch.setattr(engines, "start", start)
    said: list[str] = []
    assert studies.study("toy", quick=True, ledger=ledger, told=said.append).finished
    assert "on 1 worker;" in said[0]


def test_what_was_exported_is_shown_as_the_ledger_is(ledger: Path, tmp_path: Path, asks: Callable[..., None]) -> None:
    asks({"does": "odd numbers"}, {"does": "raise"})
    studies.study("toy", quick=True, ledger=ledger).save(tmp_path / "toy.jsonl")
    kept, exported = studies.show(ledger), studies.show(tmp_path / "toy.jsonl")
    assert repr(exported.rows[0]) == repr(kept.rows[0])  # NaN is not equal to itself
    assert exported.unrun == kept.unrun
    assert (exported.quick, exported.seeds, exported.ledger) == (True, 1, None)


# Trials that go wrong


def test_a_trial_that_raises_is_not_tried_again_and_the_others_run(
    ledger: Path, log: Path, asks: Callable[..., None]
) -> None:
    asks({"does": "raise", "log": str(log)}, {"does": "number"})
    evidence = studies.study("toy", quick=True, ledger=ledger, retries=3)
    assert [row.params["at"] for row in evidence.rows] == [1]
    (unrun,) = evidence.unrun
    assert (unrun.attempts, unrun.error) == (1, "ArithmeticError: trial 0 does not converge")
    assert len(starts(log)) == 1
    studies.resume(ledger)
    assert len(starts(log)) == 2


def test_a_worker_that_is_killed_loses_only_its_trial_which_is_tried_again(
    ledger: Path, log: Path, asks: Callable[..., None]
) -> None:
    asks({"does": "die once", "log": str(log)}, {"does": "number"}, {"does": "number"})
    evidence = studies.study("toy", quick=True, ledger=ledger)
    assert evidence.finished
    assert [row.attempts for row in evidence.rows] == [2, 1, 1]


def test_kill_9_of_a_worker_from_outside_loses_only_its_trial(
    ledger: Path, log: Path, asks: Callable[..., None]
) -> None:
    asks({"does": "sleep", "seconds": 0.5, "log": str(log)}, {"does": "number"})
    run = Elsewhere(ledger)
    assert eventually(lambda: starts(log))
    os.kill(starts(log)[0][0], signal.SIGKILL)
    assert run.result() == (2, 0)
    assert Counter(at for _, at in starts(log)) == {0: 2}


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (2, 3)])
def test_a_trial_that_is_always_killed_is_given_up(
    retries: int, attempts: int, ledger: Path, asks: Callable[..., None]
) -> None:
    asks({"does": "die"}, {"does": "number"})
    evidence = studies.study("toy", quick=True, ledger=ledger, retries=retries)
    (unrun,) = evidence.unrun
    assert unrun.attempts == attempts
    assert "killed by SIGKILL" in unrun.error
    assert len(evidence.rows) == 1


def test_limits_end_a_trial_and_the_others_run(ledger: Path, asks: Callable[..., None]) -> None:
    asks({"does": "sleep", "seconds": 60}, {"does": "fill", "bytes": 300_000_000}, {"does": "number"})
    evidence = studies.study(
        "toy", quick=True, ledger=ledger, retries=0, time_limit=1.5, memory_limit=100_000_000, workers=3
    )
    slow, large = evidence.unrun
    assert slow.error == "longer than the time limit of 1.5 s"
    assert large.error.startswith("more than the memory limit of 100 MB")
    assert len(evidence.rows) == 1


def test_a_trial_that_the_engine_loses_is_tried_again(
    ledger: Path, asks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asks({"does": "number"})
    lost = [RuntimeError("worker 7 went away")]

    class Session:
        workers = 1

        def submit(self, function: Any, order: Any) -> Future[Answer]:
            future: Future[Answer] = Future()
            if lost:
                future.set_exception(lost.pop())
            else:
                future.set_result(function(order))
            return future

    @contextmanager
    def start(text: str, workers: int | None, folder: Path) -> Iterator[Session]:
        yield Session()

    monkeypatch.setattr(engines, "start", start)
    assert studies.study("toy", quick=True, ledger=ledger).rows[0].attempts == 2


@pytest.mark.parametrize(
    ("outcome", "error"),
    [("data", "the worker reads another digits: 12"), ("version", "the worker has version 2 of the study")],
)
def test_a_worker_with_other_data_or_code_ends_the_run(
    outcome: str, error: str, ledger: Path, asks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asks({"does": "number"}, {"does": "number"})
    monkeypatch.setattr("normwise.studies._runner.execute", _Gives(Answer(outcome=outcome, error=error)))
    with pytest.raises(StudyError, match=f"{error}; use workers with the same Python and normwise as here"):
        studies.study("toy", quick=True, ledger=ledger)
    assert done(ledger) == {}
    monkeypatch.setattr("normwise.studies._runner.execute", execute)
    assert studies.resume(ledger).finished


class _Gives:
    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def __call__(self, order: Any, stop: Any) -> Answer:
        return self.answer


# What cannot be run


def test_an_unknown_engine_is_said_before_anything_runs(ledger: Path) -> None:
    with pytest.raises(StudyError, match=r"no engine is called 'cloud': choose from .*local"):
        studies.study("toy", quick=True, ledger=ledger, engine="cloud")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"workers": 0}, "1 worker or more, given 0"),
        ({"retries": -1}, "0 times or more, given -1"),
        ({"time_limit": 0.0}, r"time_limit is more than 0, given 0\.0"),
        ({"memory_limit": -5}, "memory_limit is more than 0, given -5"),
        ({"seeds": 0}, "1 or more, given 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(given: dict[str, Any], says: str, ledger: Path) -> None:
    with pytest.raises(ValueError, match=says):
        studies.study("toy", ledger=ledger, **given)
    assert not ledger.exists()


def test_a_study_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="no study is called 'toi': did you mean 'toy'"):
        studies.study("toi")


def _of(path: Path, **changed: Any) -> None:
    given = {"study": "toy", "version": 1, "data": {}, "quick": True, "seeds": 1} | changed
    with writing(path, Head(**given)):
        pass


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"study": "depth"}, "the ledger of depth"),
        ({"version": 7, "normwise": "0.7"}, r"version 7 of toy, begun by normwise 0\.7, and this is version 1"),
    ],
)
def test_a_ledger_of_something_else_is_refused_however_it_is_used(
    changed: dict[str, Any], says: str, ledger: Path
) -> None:
    _of(ledger, **changed)
    content = ledger.read_bytes()
    for use in (studies.show, studies.resume, lambda path: studies.study("toy", quick=True, ledger=path)):
        with pytest.raises(StudyError, match=says):
            use(ledger)
    assert ledger.read_bytes() == content


def test_a_corpus_that_has_changed_is_refused_but_its_rows_can_be_shown(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "DATA", ("digits",))
    _of(ledger, data={"digits": "b" * 64})
    content = ledger.read_bytes()
    for use in (studies.resume, lambda path: studies.study("toy", quick=True, ledger=path)):
        with pytest.raises(StudyError, match=r"the digits data have changed since .*; start another with --ledger"):
            use(ledger)
    assert studies.show(ledger).data == {"digits": "b" * 64}
    assert ledger.read_bytes() == content
