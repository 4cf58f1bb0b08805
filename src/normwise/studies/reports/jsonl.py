"""JSON lines, complete: a line on the study, then one a trial; ``normwise study show FILE.jsonl`` reads it back.

Strict JSON: numbers it does not have are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from normwise.rendering.cleaning import respelled
from normwise.rendering.plain import plain
from normwise.studies._exported import SCHEMA

if TYPE_CHECKING:
    from normwise.studies._evidence import Evidence

__all__ = ["render"]

SUFFIXES = (".jsonl",)
BINARY = False

_OF_A_ROW = ("params", "metrics", "seconds", "cpu_seconds", "peak_bytes", "attempts", "conditions")


def render(evidence: Evidence) -> str:
    """Return the trials as JSON lines."""
    head = {
        "schema": SCHEMA,
        "study": evidence.study,
        "version": evidence.part.VERSION,
        "data": evidence.data,
        "quick": evidence.quick,
        "seeds": evidence.seeds,
    }
    done = [{"state": "done", **{name: getattr(row, name) for name in _OF_A_ROW}} for row in evidence.rows]
    left = [{"state": "failed" if each.error else "open", **asdict(each)} for each in evidence.unrun]
    return "".join(_line(each) for each in (head, *done, *left))


def _line(value: dict[str, Any]) -> str:
    return respelled(json.dumps(plain(value), allow_nan=False, separators=(", ", ": ")), "\\u{:04x}") + "\n"
