"""Reads what ``normwise study NAME -o FILE.jsonl`` wrote: as much as its ledger holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from normwise.errors import StudyError
from normwise.studies._ledger import Head, Record
from normwise.studies._trials import Trial

__all__ = ["SCHEMA", "read_jsonl"]

SCHEMA = 1

_NOT_IN_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_OPTIONAL = {
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
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise StudyError(f"{path}: it cannot be read ({error.strerror}); give the path of an export") from None
    except UnicodeDecodeError:
        raise _foreign(path, 1, "it is no text") from None
    head = _parsed(path, 1, lines[0]) if lines else {}
    if head.get("schema") != SCHEMA:
        raise _foreign(path, 1, f"its schema is {head.get('schema')!r}, not {SCHEMA}" if head else "it is empty")
    try:
        found = {name: head[name] for name in ("study", "version", "data", "quick", "seeds")}
        parsed = [_parsed(path, number, line) for number, line in enumerate(lines[1:], 2)]
        records = [_record(found, values) for values in parsed]
    except (KeyError, TypeError) as error:
        raise _foreign(path, 1, f"a line lacks {error}") from None
    return Head(**found, normwise=_first(records, "normwise"), begun=""), records


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise _foreign(path, number, f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise _foreign(path, number, "no object")
    return value


def _record(head: dict[str, Any], values: dict[str, Any]) -> Record:
    key = Trial(head["study"], head["version"], values["params"]).key
    given = {name: values.get(name, default) for name, default in _OPTIONAL.items()}
    given["metrics"] = {name: _number(value) for name, value in given["metrics"].items()}
    return Record(key=key, params=values["params"], state=values["state"], **given)


def _number(value: Any) -> Any:
    """Undo what JSON has no numbers for; metrics are never text."""
    if isinstance(value, list):
        return [_number(inner) for inner in value]
    return _NOT_IN_JSON[value] if isinstance(value, str) else value


def _first(records: list[Record], condition: str) -> str:
    return next((str(each.conditions[condition]) for each in records if condition in each.conditions), "unknown")


def _foreign(path: Path, number: int, why: str) -> StudyError:
    return StudyError(
        f"{path}, line {number}: no export of a study ({why}); "
        "one is written with `normwise study show LEDGER -o FILE.jsonl`"
    )
