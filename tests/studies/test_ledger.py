"""The ledger keeps what was written, and leaves what is not its own alone."""

from __future__ import annotations

import math
import os
import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from normwise.errors import StudyError
from normwise.studies._execute import Answer
from normwise.studies._ledger import Head, read, writing
from normwise.studies._trials import Trial

HEAD: dict[str, Any] = {"study": "toy", "version": 1, "data": {"digits": "a" * 64}, "quick": True, "seeds": 1}


def head(**changed: Any) -> Head:
    return Head(**{**HEAD, **changed})


def trials(many: int, *, seed: int = 0) -> list[Trial]:
    return [Trial("toy", 1, {"at": at, "seed": seed}) for at in range(many)]


def begin(path: Path, many: int = 3) -> None:
    with writing(path, head()) as ledger:
        ledger.add(trials(many), quick=True, seeds=1)
        ledger.keep(trials(1)[0].key, Answer(outcome="done", metrics={"loss": 0.5}), state="done")


def sql(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def test_what_is_written_is_read_as_it_was(tmp_path: Path) -> None:
    path, (trial, *_) = tmp_path / "new" / "folder" / "toy.sqlite", trials(1)
    metrics = {"nan": math.nan, "list": [math.inf, -math.inf, 0.1 + 0.2, 3]}
    answer = Answer(
        outcome="done", metrics=metrics, seconds=1.5, cpu_seconds=1.25, peak_bytes=7, conditions={"threads": 1}
    )
    with writing(path, head()) as ledger:
        ledger.add([trial], quick=True, seeds=1)
        ledger.keep(trial.key, answer, state="done")
    found, (record,) = read(path)
    assert (found.study, found.version, found.data, found.quick, found.seeds) == tuple(HEAD.values())
    assert math.isnan(record.metrics["nan"])
    assert {name: value for name, value in record.metrics.items() if name != "nan"} == {
        name: value for name, value in metrics.items() if name != "nan"
    }
    assert (record.key, record.params, record.state, record.attempts) == (trial.key, trial.params, "done", 1)
    assert (record.seconds, record.cpu_seconds, record.peak_bytes, record.conditions) == (1.5, 1.25, 7, {"threads": 1})


def test_at_rest_it_is_one_file_that_opens_where_nothing_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "toy.sqlite"
    begin(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["toy.sqlite", "toy.sqlite.lock"]
    content = path.read_bytes()
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        assert connection.execute("SELECT count(*) FROM trials").fetchone() == (3,)
    read(path)
    assert path.read_bytes() == content


def test_it_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "toy.sqlite"
    with writing(path, head()) as ledger:
        ledger.add(trials(2), quick=True, seeds=1)
        ledger.keep(trials(1)[0].key, Answer(outcome="done"), state="done")
        assert [record.state for record in read(path)[1]] == ["done", "open"]
        ledger.keep(trials(2)[1].key, Answer(outcome="done"), state="done")
        assert [record.state for record in read(path)[1]] == ["done", "done"]


def _write_for_ever(told: Connection, path: Path) -> None:
    with writing(path, head()) as ledger:
        for at in count():
            trial = Trial("toy", 1, {"at": at, "seed": 0})
            ledger.add([trial], quick=True, seeds=1)
            ledger.keep(trial.key, Answer(outcome="done", metrics={"at": at, "list": [0.1] * 100}), state="done")
            told.send(at)


@pytest.mark.parametrize("seed", range(10))
def test_what_was_committed_outlives_a_kill_at_any_moment(seed: int, tmp_path: Path) -> None:
    path, context = tmp_path / "toy.sqlite", get_context("fork")
    hears, tells = context.Pipe(duplex=False)
    writer = context.Process(target=_write_for_ever, args=(tells, path))
    writer.start()
    tells.close()
    told = hears.recv()
    deadline = time.monotonic() + random.Random(seed).uniform(0, 0.2)
    while time.monotonic() < deadline:
        told = hears.recv()
    writer.kill()
    writer.join()
    with suppress(EOFError):
        while True:
            told = hears.recv()
    kept = [record.metrics["at"] for record in read(path)[1] if record.state == "done"]
    assert kept[: told + 1] == list(range(told + 1))
    assert not list(tmp_path.glob("*.lock-*"))
    with writing(path, head()) as ledger:  # its lock has died with it
        assert ledger._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_asking_for_more_keeps_what_is_done_and_the_order_of_the_study(tmp_path: Path) -> None:
    path = tmp_path / "toy.sqlite"
    with writing(path, head()) as ledger:
        ledger.add(trials(4)[2:], quick=True, seeds=1)
        ledger.keep(trials(3)[2].key, Answer(outcome="done", metrics={"loss": 2}), state="done")
        ledger.add(trials(4), quick=False, seeds=1)
        ledger.add([*trials(4), *trials(4, seed=1)], quick=False, seeds=2)
        ledger.add(trials(4)[2:], quick=True, seeds=1)
        records = ledger.records()
        assert (ledger.head().quick, ledger.head().seeds) == (False, 2)
    assert [(r.params["seed"], r.params["at"]) for r in records] == [(seed, at) for seed in (0, 1) for at in range(4)]
    assert [r.metrics for r in records if r.state == "done"] == [{"loss": 2}]


def test_a_part_of_the_trials_comes_behind_the_others(tmp_path: Path) -> None:
    with writing(tmp_path / "toy.sqlite", head()) as ledger:
        ledger.add(trials(2), quick=True, seeds=1)
        ledger.add(trials(2, seed=1), quick=True, seeds=1)
        assert [record.params["seed"] for record in ledger.records()] == [0, 0, 1, 1]


def test_two_runs_cannot_write_it_and_the_second_says_so_at_once(tmp_path: Path) -> None:
    path = tmp_path / "toy.sqlite"
    with (
        writing(path, head()),
        pytest.raises(StudyError, match=r"toy\.sqlite: another run is writing it; wait until .*--ledger PATH"),
        writing(path, head()),
    ):
        pass
    begin(path)


def text_file(path: Path) -> None:
    path.write_text("rate,loss\n0.001,2.5\n" * 20)


def short_file(path: Path) -> None:
    path.write_bytes(b"SQLite")


def database_of_another_program(path: Path) -> None:
    sql(
        path,
        "PRAGMA journal_mode = WAL",
        "CREATE TABLE trials (key TEXT, params TEXT)",
        "INSERT INTO trials VALUES (1, 2)",
    )


def another_schema(path: Path) -> None:
    begin(path)
    sql(path, "PRAGMA user_version = 2")


def another_study(path: Path) -> None:
    with writing(path, head(study="warmup")) as ledger:
        ledger.add(trials(2), quick=True, seeds=1)


def another_version(path: Path) -> None:
    with writing(path, head(version=2, normwise="9.9")):
        pass


def another_corpus(path: Path) -> None:
    with writing(path, head(data={"digits": "b" * 64}, begun="2025-01-02T03:04:05+00:00")):
        pass


def cut_short(path: Path) -> None:
    begin(path, 500)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


FOREIGN = [
    (text_file, "no ledger of normwise and is left as it is; choose another"),
    (short_file, "no ledger of normwise and is left as it is; choose another"),
    (database_of_another_program, "another program's database, left as it is; choose another"),
    (another_schema, r"a ledger of schema 2, this normwise \([\d.]+\) reads 1; start another"),
    (another_study, "the ledger of warmup, not of toy; start another"),
    (another_version, r"version 2 of toy, begun by normwise 9\.9, and this is version 1: their figures differ; start"),
    (another_corpus, r"the digits data have changed since 2025-01-02 \(SHA-256 b{12}, now a{12}\); start another"),
]


@pytest.mark.parametrize(("make", "says"), [*FOREIGN, (cut_short, "it is damaged .*; restore it, or start another")])
def test_what_is_no_ledger_of_this_study_is_refused_and_left_as_it_is(
    make: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "toy.sqlite"
    make(path)
    content = path.read_bytes()
    with (
        pytest.raises(StudyError, match=rf"toy\.sqlite: (it is )?{says}.*--ledger PATH$"),
        writing(path, head()) as ledger,
    ):
        ledger.records()
    assert path.read_bytes() == content


@pytest.mark.parametrize(("make", "says"), FOREIGN[:4])
def test_reading_refuses_it_too(make: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    path = tmp_path / "toy.sqlite"
    make(path)
    content = path.read_bytes()
    with pytest.raises(StudyError, match=says):
        read(path)
    assert path.read_bytes() == content


def test_a_database_in_use_elsewhere_is_not_even_opened(tmp_path: Path) -> None:
    path = tmp_path / "toy.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE mine (a)")
        connection.execute("INSERT INTO mine VALUES (1)")
        before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
        with pytest.raises(StudyError, match="another program's database"), writing(path, head()):
            pass
        assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_a_ledger_that_is_not_there_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"toy\.sqlite: there is no such ledger; `normwise study NAME` begins one"):
        read(tmp_path / "toy.sqlite")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_ledger(tmp_path: Path) -> None:
    for use in (read, lambda path: writing(path, head()).__enter__()):
        with pytest.raises(StudyError, match="it is no file; choose another path with --ledger PATH"):
            use(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "toy.sqlite"
    os.mkfifo(path)
    for use in (read, lambda path: writing(path, head()).__enter__()):
        with pytest.raises(StudyError, match="it is no file"):
            use(path)
    assert [each.name for each in tmp_path.iterdir()] == ["toy.sqlite"]


def test_a_ledger_has_one_lock_whatever_link_leads_there(tmp_path: Path) -> None:
    path, link = tmp_path / "toy.sqlite", tmp_path / "link.sqlite"
    begin(path)
    link.symlink_to(path)
    with (
        writing(path, head()),
        pytest.raises(StudyError, match=r"link\.sqlite: another run is writing it"),
        writing(link, head()),
    ):
        pass
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.sqlite", "toy.sqlite", "toy.sqlite.lock"]


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE trials SET params = '{'", "it is damaged"),
        ("UPDATE trials SET params = '{}'", "its params have no seed"),
        ("UPDATE trials SET metrics = '[1]'", r"its metrics is \[1\]"),
        ("UPDATE trials SET metrics = '{\"a\": {}}'", "'a', of the metrics, is {}"),
        ("UPDATE trials SET metrics = replace(hex(zeroblob(50000)), '0', '[')", "it is damaged"),
        ("UPDATE trials SET seconds = 'long'", "its seconds is 'long'"),
        ("DELETE FROM meta WHERE key = 'study'", "its study is None"),
    ],
)
def test_what_is_no_head_and_no_trial_is_damage(tmp_path: Path, statement: str, says: str) -> None:
    path = tmp_path / "toy.sqlite"
    begin(path)
    sql(path, statement)
    with pytest.raises(StudyError, match=says) as failure:
        read(path)
    assert str(failure.value).endswith("restore it, or start another with --ledger PATH")


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StudyError, match=r"its folder cannot be made .*; choose another with --ledger PATH"),
        writing(tmp_path / "file" / "toy.sqlite", head()),
    ):
        pass


def test_a_ledger_that_another_program_holds_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "toy.sqlite"
    begin(path)
    monkeypatch.setattr("normwise.studies._ledger._LOCK_WAIT", 0.1)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        with (
            pytest.raises(StudyError, match=r"another program holds it \(database is locked\); wait"),
            writing(path, head()),
        ):
            pass


def test_a_ledger_that_is_read_only_is_said(tmp_path: Path) -> None:
    path = tmp_path / "toy.sqlite"
    begin(path)
    with writing(path, head()) as ledger:
        ledger._connection.execute("PRAGMA query_only = TRUE")  # what a file without permissions does, also to root
        with pytest.raises(StudyError, match=r"it is read-only \(.*\); change its permissions, or choose another"):
            ledger.keep(trials(1)[0].key, Answer(outcome="done"), state="done")


def test_an_interrupt_in_the_middle_of_asking_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "toy.sqlite"
    with writing(path, head()) as ledger:
        ledger.add(trials(2), quick=True, seeds=1)
        with pytest.raises(TypeError):
            ledger.add([Trial("toy", 1, {"at": 5, "seed": 0}), Trial("toy", 1, {"at": object()})], quick=False, seeds=7)
        assert len(ledger.records()) == 2
        ledger.add(trials(3), quick=True, seeds=1)
    assert (len(read(path)[1]), read(path)[0].seeds) == (3, 1)
