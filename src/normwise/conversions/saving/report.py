"""The report beside the weights: what was changed, what was not and why, the proof, and the hashes of every file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from normwise.conversions.proof import Proof
from normwise.conversions.proof.report import cell
from normwise.conversions.saving.output import Output, is_transformers
from normwise.conversions.saving.publishing import write_text
from normwise.rendering import both, clean, in_language, obeyed_by_none
from normwise.rendering.plain import plain

__all__ = ["markdown", "read_report", "record", "text", "write_manifest", "write_report"]

REPORT = "normwise_report.json"
_NOT_VERIFIED = both(
    "not verified: what was written was not loaded again and compared", "未验证：写出的内容没有重新加载并比较"
)
_WROTE, _NOTE = both("wrote {out}, format {format}", "已写入 {out}，格式 {format}"), both("note", "说明")
_OPENED = both("; open it with normwise.load({arguments})", "；用 normwise.load({arguments}) 打开")


def record(
    output: Output,
    *,
    format: str,
    proof: Proof | None,
    source: Mapping[str, str],
    files: Mapping[str, str],
    left_out: tuple[str, ...],
    notes: tuple[str, ...],
) -> dict[str, Any]:
    """Return the report as JSON-able data.

    Args:
        output: what was saved.
        format: its name.
        proof: None where it was left out.
        source: SHA-256 of the files that were read.
        files: SHA-256 of the weight files that were written.
        left_out: files of the source that were not copied.
        notes: further sentences for the user.
    """
    plan = output.plan
    return {
        "schema": 1,
        "conversion": plan.conversion,
        "options": dict(plan.options),
        "exact": plan.exact,
        "format": format,
        "class": output.class_name,
        "library": "transformers" if is_transformers(output.model) else None,
        "versions": {name: found for name in ("normwise", "torch", "transformers") if (found := _version(name))},
        "changes": [asdict(change) for change in plan.changes],
        "refused": [asdict(refusal) for refusal in plan.refused],
        "notes": [*plan.notes, *notes],
        "verified": proof is not None and proof.gate("reload").passed is True,
        "proof": None if proof is None else proof.to_json(),
        "source": dict(source),
        "files": dict(files),
        "not_copied": list(left_out),
    }


def write_report(folder: Path, report: Mapping[str, Any], proof: Proof | None) -> None:
    """Write normwise_report.json and report.md."""
    write_text(folder / "report.md", markdown(report, proof))
    write_text(folder / REPORT, json.dumps(plain(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_manifest(file: Path, report: Mapping[str, Any], output: Output) -> None:
    """Write the manifest: the report with the whole plan."""
    write_text(file, json.dumps({**report, "plan": output.plan.to_json()}, indent=2, ensure_ascii=False) + "\n")


def read_report(folder: Path) -> dict[str, Any] | None:
    """Return the report of a folder that a conversion wrote, None of any other."""
    try:
        found = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "conversion" in found else None


def markdown(report: Mapping[str, Any], proof: Proof | None) -> str:
    """Return the report for people."""
    parts = [f"# {report['class']} after {report['conversion']}", _sentence(report)]
    changes = [(c["path"], c["what"], c["how"]) for c in report["changes"]]
    refused = [(r["path"], r["why"], r["op"] or "", r["source"] or "", r["unblock"] or "") for r in report["refused"]]
    parts += _section("Changed", ("module", "what", "how"), changes)
    parts += _section("Left as it is", ("module", "why", "op", "line", "what would change that"), refused)
    parts.append("## Proof")
    parts += [] if report["verified"] else [f"**{_NOT_VERIFIED}**"]
    parts += [] if proof is None else [proof.to_markdown().strip()]
    if report["notes"]:
        parts += ["## Notes", "\n".join(f"- {cell(note)}" for note in report["notes"])]
    if report["not_copied"]:
        parts += ["## Not copied", "\n".join(f"- {cell(name)}" for name in report["not_copied"])]
    parts += _section("SHA-256 of the source", ("file", "hash"), list(report["source"].items()))
    parts += _section("SHA-256 of the weights", ("file", "hash"), list(report["files"].items()))
    return "\n\n".join(parts) + "\n"


def text(report: Mapping[str, Any], out: Path, *, told: Iterable[str] = (), lang: str = "en") -> str:
    """Return the report for the terminal: the proof, what was written, and how to open it.

    Args:
        report: of what was saved.
        out: where that is.
        told: notes that were shown before.
        lang: "en" or "zh".
    """
    arguments = repr(str(out)) if report["library"] else f"{str(out)!r}, model"
    opened = in_language(_OPENED, lang).format(arguments=clean(arguments)) if report["format"] == "manifest" else ""
    parts = [] if report["proof"] is None else [Proof.from_json(report["proof"]).to_text(lang=lang)]
    parts.append(in_language(_WROTE, lang).format(out=clean(out), format=report["format"]) + opened)
    parts += [] if report["verified"] else [in_language(_NOT_VERIFIED, lang)]
    before = set(told)
    parts += [
        f"{in_language(_NOTE, lang)}: {clean(in_language(note, lang))}"
        for note in report["notes"]
        if note not in before
    ]
    return obeyed_by_none("\n".join(parts))


def _sentence(report: Mapping[str, Any]) -> str:
    made = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    options = ", ".join(f"{name}={value}" for name, value in report["options"].items()) or "none"
    return f"Format `{report['format']}`, options: {cell(options)}. Written with {made}."


def _section(title: str, heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    lines = [heads, ("---",) * len(heads), *(tuple(map(cell, row)) for row in rows)]
    return [f"## {title}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
