"""JSON for programs: schema 1, strict, in plain ASCII: verdicts, figures, trials.

Numbers JSON does not have are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from normwise.rendering import in_language
from normwise.rendering.cleaning import respelled
from normwise.rendering.plain import plain
from normwise.rendering.plots import Chart
from normwise.studies._study import Table
from normwise.studies.reports import _view

if TYPE_CHECKING:
    from normwise.studies._evidence import Evidence

__all__ = ["SCHEMA", "render"]

SUFFIXES = (".json",)
BINARY = False
SCHEMA = 1


def render(evidence: Evidence, *, lang: str = "en") -> str:
    """Return what a study found in JSON, schema 1."""
    page = json.dumps(plain(_document(evidence, lang)), indent=2, allow_nan=False)
    return respelled(page, "\\u{:04x}") + "\n"


def _document(evidence: Evidence, lang: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "study": evidence.study,
        "title": _view.title(evidence, lang),
        "version": evidence.part.VERSION,
        "quick": evidence.quick,
        "seeds": evidence.seeds,
        "finished": evidence.finished,
        "cpu_seconds": evidence.cpu_seconds,
        "ledger": None if evidence.ledger is None else str(evidence.ledger),
        "data": evidence.data,
        "verdicts": [
            {
                "claim": in_language(each.claim, lang),
                "source": in_language(each.source, lang),
                "outcome": each.outcome,
                "says": in_language(each.says, lang),
            }
            for each in evidence.verdicts
        ],
        "figures": [_figure(each, lang) for each in evidence.figures],
        "trials": [asdict(row) for row in evidence.rows],
        "unrun": [asdict(each) for each in evidence.unrun],
    }


def _figure(figure: Table | Chart, lang: str) -> dict[str, Any]:
    made = _translated(asdict(figure), lang)
    if isinstance(figure, Table):
        return {"kind": "table", **made}
    names = {line.name: in_language(line.name, lang) for line in figure.lines}
    for line in made["lines"]:
        line["like"] = names.get(line["like"], line["like"])
    return {"kind": "chart", **made}


def _translated(value: Any, lang: str) -> Any:
    if isinstance(value, str):
        return in_language(value, lang)
    if isinstance(value, dict):
        return {key: _translated(inner, lang) for key, inner in value.items()}
    return [_translated(inner, lang) for inner in value] if isinstance(value, (list, tuple)) else value
