"""The ledger: one SQLite file with everything that the trials of a study measured.

One process writes it, a transaction a result, so that a kill at any moment loses nothing that was written; anybody may
read it meanwhile. A file that is no ledger of the study is refused before anything is opened for writing.
"""

from __future__ import annotations

import json
import os
import platform
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from stat import S_ISREG
from typing import Any, TypeVar

from normwise.errors import StudyError
from normwise.studies._execute import Answer
from normwise.studies._trials import Trial

__all__ = ["Head", "Ledger", "Record", "checked", "read", "writing"]

_MAGIC = b"SQLite format 3\0"
_APPLICATION = 0x6E775374  # "nwSt", at byte 68 of the file: tells a ledger from other applications' files
_SCHEMA = 1
_LOCK_WAIT = 5.0  # s that a reader may hold up a commit

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE trials (
    key TEXT PRIMARY KEY,
    params TEXT NOT NULL,
    position INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'done', 'failed')),
    attempts INTEGER NOT NULL DEFAULT 0,
    metrics TEXT NOT NULL DEFAULT '{}',
    conditions TEXT NOT NULL DEFAULT '{}',
    seconds REAL NOT NULL DEFAULT 0,
    cpu_seconds REAL NOT NULL DEFAULT 0,
    peak_bytes INTEGER NOT NULL DEFAULT 0,
    error TEXT NOT NULL DEFAULT '',
    finished TEXT
);
"""

# Of what is read from a file, which anybody may have written.
_TYPES = {
    **dict.fromkeys(("study", "normwise", "begun", "key", "state", "error"), (str,)),
    **dict.fromkeys(("version", "seeds", "attempts", "peak_bytes"), (int,)),
    **dict.fromkeys(("data", "params", "metrics", "conditions"), (dict,)),
    **dict.fromkeys(("seconds", "cpu_seconds"), (int, float)),
    "quick": (bool,),
}
_VALUES = {  # or lists of them
    "data": (str,),
    "metrics": (int, float),
    **dict.fromkeys(("params", "conditions"), (str, int, float, bool, type(None))),
}
_Kind = TypeVar("_Kind", "Head", "Record")

# What went wrong and what to do, by SQLite's primary result code.
_FAULTS = {
    sqlite3.SQLITE_FULL: ("the disk is full", "make room and run it again: what is done stays"),
    sqlite3.SQLITE_IOERR: (
        "it cannot be written or read: a full disk, a quota, or a fault of the disk",
        "see to that and run it again: what is done stays",
    ),
    sqlite3.SQLITE_READONLY: ("it is read-only", "change its permissions, or choose another with --ledger PATH"),
    sqlite3.SQLITE_PERM: ("it is read-only", "change its permissions, or choose another with --ledger PATH"),
    sqlite3.SQLITE_CANTOPEN: ("it cannot be opened", "check the folder, or choose another with --ledger PATH"),
    sqlite3.SQLITE_BUSY: ("another program holds it", "wait until that is done"),
    sqlite3.SQLITE_LOCKED: ("another program holds it", "wait until that is done"),
    sqlite3.SQLITE_CORRUPT: ("it is damaged", "restore it, or start another with --ledger PATH"),
    sqlite3.SQLITE_NOTADB: ("it is no ledger", "choose another path with --ledger PATH"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a ledger says of itself.

    Args:
        study: its name.
        version: of the study.
        data: SHA-256 of what the study reads, by name.
        quick: whether only the small set was ever asked for.
        seeds: the most that were asked for.
        normwise: the version that began it.
        begun: when.
    """

    study: str
    version: int
    data: Mapping[str, str]
    quick: bool
    seeds: int
    normwise: str = field(default_factory=lambda: version("normwise"))
    begun: str = field(default_factory=lambda: _now())


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One trial as the ledger has it."""

    key: str
    params: Mapping[str, Any]
    state: str
    attempts: int
    metrics: Mapping[str, Any]
    conditions: Mapping[str, Any]
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    error: str


def checked(values: dict[str, Any], kind: type[_Kind]) -> _Kind:
    """Return a head or a record of what a file says.

    Raises:
        ValueError: something in it is missing, or not of the type that it has.
    """
    for name in kind.__slots__:
        if type(values.get(name)) not in _TYPES[name]:
            raise ValueError(f"its {name} is {values.get(name)!r:.80}")
    for group, kinds in _VALUES.items():
        for name, value in values.get(group, {}).items():
            if not all(isinstance(each, kinds) for each in (value if isinstance(value, list) else [value])):
                raise ValueError(f"{name!r:.80}, of the {group}, is {value!r:.80}")
    if "params" in values and type(values["params"].get("seed")) is not int:
        raise ValueError("its params have no seed")
    return kind(**values)


class Ledger:
    """An open ledger."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    def head(self) -> Head:
        """Return what it says of itself."""
        with _explained(self.path):
            found = {key: json.loads(value) for key, value in self._all("SELECT key, value FROM meta")}
            return checked({name: found.get(name) for name in Head.__slots__}, Head)

    def records(self) -> list[Record]:
        """Return every trial, in the order of the study."""
        columns = ", ".join(Record.__slots__)
        found = self._all(f"SELECT {columns} FROM trials ORDER BY position, rowid")
        with _explained(self.path):
            return [_record(dict(zip(Record.__slots__, values, strict=True))) for values in found]

    def add(self, trials: Sequence[Trial], *, quick: bool, seeds: int) -> None:
        """Ask for trials; those that it has stay as they are."""
        head = self.head()
        widest = {"quick": quick and head.quick, "seeds": max(seeds, head.seeds)}
        present = {key for (key,) in self._all("SELECT key FROM trials")}
        # A set that holds all that are here gives them its order; of another one, the new ones come last.
        whole = present <= {trial.key for trial in trials}
        new = [trial for trial in trials if whole or trial.key not in present]
        first = 0 if whole else len(present)
        with _explained(self.path), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(
                "INSERT INTO trials (key, params, position) VALUES (?, ?, ?) "
                "ON CONFLICT (key) DO UPDATE SET position = excluded.position",
                [(trial.key, json.dumps(dict(trial.params)), first + i) for i, trial in enumerate(new)],
            )
            self._connection.executemany(
                "UPDATE meta SET value = ? WHERE key = ?", [(json.dumps(value), key) for key, value in widest.items()]
            )

    def keep(self, key: str, answer: Answer, *, state: str) -> None:
        """Write what came of a trial: one statement, so that an interrupt comes before it or after it."""
        with _explained(self.path):
            self._connection.execute(
                "UPDATE trials SET state = ?, attempts = attempts + 1, metrics = ?, conditions = ?, seconds = ?, "
                "cpu_seconds = ?, peak_bytes = ?, error = ?, finished = ? WHERE key = ?",
                (
                    state,
                    json.dumps(dict(answer.metrics)),
                    json.dumps(dict(answer.conditions)),
                    answer.seconds,
                    answer.cpu_seconds,
                    answer.peak_bytes,
                    answer.error,
                    _now(),
                    key,
                ),
            )

    def _all(self, query: str) -> list[tuple[Any, ...]]:
        with _explained(self.path):
            return self._connection.execute(query).fetchall()


def read(path: Path) -> tuple[Head, list[Record]]:
    """Return what a ledger holds; it is not changed, and may be in use.

    Raises:
        StudyError: it is no ledger, or cannot be read.
    """
    _check_file(path)
    with closing(_connect(path, "ro")) as connection:
        ledger = Ledger(path, connection)
        _check_schema(ledger)
        return ledger.head(), ledger.records()


@contextmanager
def writing(path: Path, head: Head) -> Iterator[Ledger]:
    """Open the ledger of a study for this process alone, or begin it.

    Raises:
        StudyError: it is no ledger of this study, or cannot be written.
    """
    if os.path.lexists(path) and not (path.is_file() and not path.stat().st_size):
        _check_file(path)
    else:
        _make_folder(path)
    with _locked(path), closing(_connect(path, "rwc")) as connection:
        ledger = Ledger(path, connection)
        _begin(ledger, connection, head)
        _check_schema(ledger)
        _check_head(ledger, head)
        with _explained(path):
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
        try:
            yield ledger
        finally:
            # At rest it is one file, which also opens where nothing can be written beside it.
            with suppress(sqlite3.Error):
                connection.execute("PRAGMA journal_mode = DELETE")


def _begin(ledger: Ledger, connection: sqlite3.Connection, head: Head) -> None:
    with _explained(ledger.path):
        if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            return
        versions = {"torch": version("torch"), "python": platform.python_version()}
        said = {name: getattr(head, name) for name in Head.__slots__} | versions
        with connection:
            # executescript() would commit before it began: a kill would leave tables without what they are of.
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {_SCHEMA}")
            for statement in filter(str.strip, _TABLES.split(";")):
                connection.execute(statement)
            rows = [(key, json.dumps(value)) for key, value in said.items()]
            connection.executemany("INSERT INTO meta VALUES (?, ?)", rows)


def _check_file(path: Path) -> None:
    """Refuse what is no ledger by its first bytes: SQLite may write to a file that it opens."""
    try:
        if not S_ISREG(path.stat().st_mode):  # to read from a pipe or a device may take for ever
            raise StudyError(f"{path}: it is no file; choose another path with --ledger PATH")
        with path.open("rb") as file:
            start = file.read(100)
    except FileNotFoundError:
        raise StudyError(f"{path}: there is no such ledger; `normwise study NAME` begins one") from None
    except OSError as error:
        raise StudyError(f"{path}: it cannot be read ({error.strerror}); check the path") from None
    if not start.startswith(_MAGIC):
        raise StudyError(f"{path}: it is no ledger of normwise and is left as it is; choose another with --ledger PATH")
    if int.from_bytes(start[68:72], "big") != _APPLICATION:
        raise StudyError(f"{path}: another program's database, left as it is; choose another path with --ledger PATH")


def _check_schema(ledger: Ledger) -> None:
    ((schema,),) = ledger._all("PRAGMA user_version")
    if schema != _SCHEMA:
        raise StudyError(
            f"{ledger.path}: a ledger of schema {schema}, this normwise ({version('normwise')}) reads {_SCHEMA}; "
            "start another with --ledger PATH"
        )


def _check_head(ledger: Ledger, head: Head) -> None:
    found, path = ledger.head(), ledger.path
    other = "; start another with --ledger PATH"
    if found.study != head.study:
        raise StudyError(f"{path}: the ledger of {found.study}, not of {head.study}{other}")
    if found.version != head.version:
        raise StudyError(
            f"{path}: version {found.version} of {found.study}, begun by normwise {found.normwise}, "
            f"and this is version {head.version}: their figures differ{other}"
        )
    for name, digest in head.data.items():
        if found.data.get(name) != digest:
            raise StudyError(
                f"{path}: the {name} data have changed since {found.begun[:10]} "
                f"(SHA-256 {found.data.get(name, 'none')[:12]}, now {digest[:12]}){other}"
            )


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    with _explained(path):
        return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_LOCK_WAIT)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other runners out: a lock of SQLite's on a file beside it, which ends with this process, however it ends."""
    real = path.resolve()  # one lock, whatever link leads there
    lock = real.with_name(f"{real.name}.lock")
    with closing(_connect(lock, "rwc")) as connection:
        try:
            connection.execute("PRAGMA busy_timeout = 0")
            connection.execute("PRAGMA journal_mode = MEMORY")  # nothing is written, and no journal is to stay
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise _fault(lock, error) from None
            raise StudyError(
                f"{path}: another run is writing it; wait until that is done, or choose another with --ledger PATH"
            ) from None
        except sqlite3.Error as error:
            raise _fault(lock, error) from None
        yield


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(
            f"{path}: its folder cannot be made ({error.strerror}); choose another with --ledger PATH"
        ) from None


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise _fault(path, error) from None
    except (ValueError, RecursionError) as error:
        raise StudyError(f"{path}: it is damaged ({error}); restore it, or start another with --ledger PATH") from None


def _fault(path: Path, error: sqlite3.Error) -> StudyError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    what, next_step = _FAULTS.get(code, ("SQLite cannot use it", "start another with --ledger PATH"))
    return StudyError(f"{path}: {what} ({error}); {next_step}")


def _record(values: dict[str, Any]) -> Record:
    columns = ("params", "metrics", "conditions")
    return checked({k: json.loads(v) if k in columns else v for k, v in values.items()}, Record)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
