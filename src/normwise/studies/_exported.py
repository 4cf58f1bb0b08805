"""Reads what ``normwise study NAME -o FILE.jsonl`` wrote: as much as its ledger holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from normwise.errors import StudyError
from normwise.studies._ledger import Head, Record, checked
from normwise.studies._trials import Trial

__all__ = ["EXPORTED", "SCHEMA", "read_jsonl"]

EXPORTED = ".jsonl"
SCHEMA = 1

_NOT_IN_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_RECORD = {
    "params": None,
    "state": None,
    "metrics": {},
    "conditions": {},
    "seconds": 0.0,
    "cpu_seconds": 0.0,
    "peak_bytes": 0,
    "attempts": 0,
    "error": "",
}


def read_jsonl(path: str | Path) -> tuple[Head, list[Record]]:
    """Return what an export says of itself and its trials, as the ledger it came from would.

    Raises:
        StudyError: it cannot be read, or is no export of a study.
    """
    path = Path(path)
    try:
        lines = path.read_text("utf-8").split("\n")
    except OSError as error:
        raise StudyError(f"{path}: it cannot be read ({error.strerror}); give the path of an export") from None
    except UnicodeDecodeError:
        raise _foreign(path, 1, "it is no text") from None
    with _explained(path, 1):
        head = _head(_parsed(lines[0]))
    records: list[Record] = []
    for number, line in enumerate(lines[1:], 2):
        with _explained(path, number):
            records += [_record(head, _parsed(line))] if line else []
    return replace(head, normwise=_first(records, "normwise")), records


@contextmanager
def _explained(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except (json.JSONDecodeError, RecursionError) as error:
        raise _foreign(path, number, f"no JSON: {error}") from None
    except ValueError as error:
        raise _foreign(path, number, str(error)) from None


def _parsed(line: str) -> dict[str, Any]:
    if not line:
        raise ValueError("it is empty")
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _head(values: dict[str, Any]) -> Head:
    if values.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {values.get('schema')!r:.80}, not {SCHEMA}")
    found = {name: values.get(name) for name in ("study", "version", "data", "quick", "seeds")}
    return checked({**found, "normwise": "", "begun": ""}, Head)


def _record(head: Head, values: dict[str, Any]) -> Record:
    given = {name: values.get(name, default) for name, default in _RECORD.items()}
    key = Trial(head.study, head.version, given["params"]).key
    return checked({**given, "key": key, "metrics": _number(given["metrics"])}, Record)


def _number(value: Any) -> Any:
    """Undo what JSON has no numbers for; metrics are never text."""
    if isinstance(value, dict):
        return {name: _number(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_number(inner) for inner in value]
    return _NOT_IN_JSON.get(value, value) if isinstance(value, str) else value


def _first(records: list[Record], condition: str) -> str:
    return next((str(each.conditions[condition]) for each in records if condition in each.conditions), "unknown")


def _foreign(path: Path, number: int, why: str) -> StudyError:
    return StudyError(
        f"{path}, line {number}: no export of a study ({why}); "
        "one is written with `normwise study show LEDGER -o FILE.jsonl`"
    )
