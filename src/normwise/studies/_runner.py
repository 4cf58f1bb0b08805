"""Runs the trials of a study that have no result yet, and reads what there is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from normwise import studies
from normwise.errors import StudyError
from normwise.rendering import both
from normwise.studies._data import digests
from normwise.studies._evidence import Evidence, Unrun
from normwise.studies._execute import Answer, Order, execute
from normwise.studies._exported import EXPORTED, read_jsonl
from normwise.studies._ledger import Head, Ledger, Record, read, writing
from normwise.studies._progress import Progress, cost
from normwise.studies._study import Row, Rows
from normwise.studies._trials import asked, seconds

if TYPE_CHECKING:
    from normwise.studies.engines import Session

__all__ = ["resume", "run", "show"]

_FOLDER = Path("normwise-studies")
_AGAIN = {"killed", "timeout", "memory"}  # may come out otherwise; an exception of a seeded trial comes again
_WRONG_WORKER = {"version", "data"}  # no trial can be right there

Advance = Callable[[str, int, int], Any]
Told = Callable[[str], Any]


def _silent(*_: Any) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """How trials are run."""

    engine: str = "local"
    workers: int | None = None
    retries: int = 1
    time_limit: float | None = None
    memory_limit: int | None = None
    advance: Advance = _silent
    told: Told = _silent

    def __post_init__(self) -> None:
        from normwise.studies import engines  # a package, which is no study: not there when those are collected

        engines.find(self.engine)
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"a study takes 1 worker or more, given {self.workers}")
        if self.retries < 0:
            raise ValueError(f"a trial is tried again 0 times or more, given {self.retries}")
        for name in ("time_limit", "memory_limit"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} is more than 0, given {limit}")


def run(
    name: str,
    *,
    quick: bool = False,
    seeds: int | None = None,
    ledger: str | Path | None = None,
    engine: str = "local",
    workers: int | None = None,
    retries: int = 1,
    time_limit: float | None = None,
    memory_limit: int | None = None,
    advance: Advance = _silent,
    told: Told = _silent,
) -> Evidence:
    """Run a study, or what of it is not in its ledger yet, and return what it found.

    Ctrl-C ends it: the workers are stopped, what is done stays in the ledger, and the evidence so far is returned.

    Args:
        name: of the study.
        quick: the small set, with one seed.
        seeds: how many; by default 1 for the small set and the study's own number for the full one.
        ledger: where results are kept; by default ``normwise-studies/NAME.sqlite`` under the current folder.
        engine: "local", or the address of another.
        workers: trials at a time; None leaves it to the engine. One for a study that measures time.
        retries: how often a trial is tried again that was killed or went over a limit. One that raised is not: its
            seeds are set, it would raise again. Both are tried when the study is asked for, or resumed, once more.
        time_limit: s a trial, from the start of its process.
        memory_limit: bytes a trial, beside the libraries that it loads; where the system has such a limit.
        advance: called with a sentence, what is done and of how much.
        told: called with sentences for whoever waits; the first one is the cost.

    Raises:
        ValueError: no such study, or arguments that make no sense, such as a ledger that is called like a report.
        StudyError: its ledger, engine or data cannot be used.
    """
    part = studies.get(name)
    how = _How(
        engine=engine,
        workers=workers,
        retries=retries,
        time_limit=time_limit,
        memory_limit=memory_limit,
        advance=advance,
        told=told,
    )
    name = _name(part)
    trials = asked(name, part, quick=quick, seeds=seeds)
    count = len({trial.params["seed"] for trial in trials})
    path = _FOLDER / f"{name}.sqlite" if ledger is None else _checked(Path(ledger))
    head = Head(study=name, version=part.VERSION, data=digests(part.DATA), quick=quick, seeds=count)
    with writing(path, head) as book:
        book.add(trials, quick=quick, seeds=count)
        keys = [trial.key for trial in trials]
        _work(part, head, book, keys, how)
        return _evidence(part, head, path, _of(book.records(), keys))


def resume(path: str | Path, **how: Any) -> Evidence:
    """Run the trials of a ledger that have no result, and return what the study found.

    Args:
        path: of the ledger.
        how: what of ``run`` is not about which trials: ``engine``, ``workers``, ``retries``, the limits,
            ``advance``, ``told``.

    Raises:
        StudyError: it is no ledger, or of a study, version or data that are not here.
    """
    path, settings = Path(path), _How(**how)
    said, _ = read(path)
    part = _part(path, said)
    head = Head(study=said.study, version=part.VERSION, data=digests(part.DATA), quick=said.quick, seeds=said.seeds)
    with writing(path, head) as book:
        if not book.records():  # a kill came between its beginning and the request for trials
            book.add(asked(said.study, part, quick=said.quick, seeds=said.seeds), quick=said.quick, seeds=said.seeds)
        _work(part, head, book, [record.key for record in book.records()], settings)
        return _evidence(part, head, path, book.records())


def show(path: str | Path) -> Evidence:
    """Return what a ledger holds, or what was written from one as ``.jsonl``; nothing is run.

    Raises:
        StudyError: it is neither, or of a study or version that is not here.
    """
    path = Path(path)
    exported = path.suffix.lower() == EXPORTED
    head, records = read_jsonl(path) if exported else read(path)
    return _evidence(_part(path, head), head, None if exported else path, records)


def _checked(ledger: Path) -> Path:
    """Refuse what a report would overwrite, and what would be read as one."""
    from normwise.studies import reports

    if ledger.suffix.lower() in reports.suffixes():
        raise ValueError(f"{ledger} names a report, not a ledger: let it end in .sqlite")
    return ledger


def _name(part: ModuleType) -> str:
    return part.__name__.rpartition(".")[2].replace("_", "-")


def _part(path: Path, head: Head) -> ModuleType:
    try:
        part = studies.get(head.study)
    except ValueError:
        raise StudyError(f"{path}: the ledger of {head.study}, a study that this normwise does not have") from None
    if head.version != part.VERSION:
        raise StudyError(
            f"{path}: version {head.version} of {head.study}, begun by normwise {head.normwise}, and this is version "
            f"{part.VERSION}: their figures differ; start another with --ledger PATH"
        )
    return part


def _of(records: Iterable[Record], keys: Iterable[str]) -> list[Record]:
    found = {record.key: record for record in records}
    return [found[key] for key in keys]


def _evidence(part: ModuleType, head: Head, path: Path | None, records: Sequence[Record]) -> Evidence:
    names = ("params", "metrics", "seconds", "cpu_seconds", "peak_bytes", "attempts", "conditions")
    done = [record for record in records if record.state == "done"]
    left = [record for record in records if record.state != "done"]
    return Evidence(
        study=head.study,
        part=part,
        rows=Rows(Row(**{name: getattr(record, name) for name in names}) for record in done),
        unrun=tuple(Unrun(params=each.params, attempts=each.attempts, error=each.error) for each in left),
        quick=head.quick,
        seeds=head.seeds,
        ledger=path,
        data=dict(head.data),
    )


class _Run:
    """The trials of one call that have no result, on their way to the ledger."""

    def __init__(self, part: ModuleType, head: Head, book: Ledger, how: _How, left: Sequence[Record]) -> None:
        self.part, self.head, self.book, self.how = part, head, book, how
        self.open = deque(left)
        self.costs = {record.key: seconds(part, record.params) for record in left}
        self.tries = dict.fromkeys(self.costs, 0)
        self.pending: dict[Future[Answer], Record] = {}

    def drive(self, session: Session) -> None:
        """Run them all."""
        # The engine queues them, so that workers which come later find some; those that measure time wait here.
        workers, at_a_time = (1, 1) if _alone(self.part) else (session.workers, len(self.costs))
        self.how.told(cost(len(self.costs), sum(self.costs.values()), workers, self.book.path))
        progress = Progress(self.costs, workers, self.how.advance)
        while self.open or self.pending:
            while self.open and len(self.pending) < at_a_time:
                self.submit(session, self.open.popleft())
            for future in wait(self.pending, return_when=FIRST_COMPLETED).done:
                record = self.pending[future]
                if self.keep(record, _result(future)):
                    self.open.append(record)
                else:
                    progress.finish(record.key)
                del self.pending[future]

    def submit(self, session: Session, record: Record) -> None:
        order = Order(
            study=self.part.__name__,
            version=self.head.version,
            params=record.params,
            data=self.head.data,
            time_limit=self.how.time_limit,
            memory_limit=self.how.memory_limit,
        )
        self.tries[record.key] += 1
        self.pending[session.submit(execute, order)] = record

    def keep(self, record: Record, answer: Answer) -> bool:
        """Write an answer; return whether the trial is to be tried again."""
        if answer.outcome in _WRONG_WORKER:
            raise StudyError(f"{answer.error}; use workers with the same Python and normwise as here")
        again = answer.outcome in _AGAIN and self.tries[record.key] <= self.how.retries
        self.book.keep(record.key, answer, state="done" if answer.outcome == "done" else "open" if again else "failed")
        return again

    def keep_finished(self) -> None:
        """Write what had been finished when an interrupt came."""
        for future, record in self.pending.items():
            if future.done() and _result(future).outcome == "done":
                self.keep(record, _result(future))


def _work(part: ModuleType, head: Head, book: Ledger, keys: Sequence[str], how: _How) -> None:
    from normwise.studies import engines

    left = [record for record in _of(book.records(), keys) if record.state != "done"]
    if not left:
        how.told(both(f"all {len(keys)} trials are in {book.path}", f"全部 {len(keys)} 个试验都在 {book.path} 中"))
        return
    run = _Run(part, head, book, how, left)
    try:
        with engines.start(how.engine, 1 if _alone(part) else how.workers, book.path.parent) as session:
            run.drive(session)
    except KeyboardInterrupt:
        run.keep_finished()


def _alone(part: ModuleType) -> bool:
    return getattr(part, "ALONE", False)


def _result(future: Future[Answer]) -> Answer:
    try:
        return future.result()
    except StudyError:
        raise
    except Exception as lost:
        return Answer(outcome="killed", error=f"the engine lost it: {type(lost).__name__}: {lost}")
