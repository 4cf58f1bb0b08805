"""Baselines: findings that were there when the check was taken up. They stay quiet, new ones fail.

A baseline is a JSON file, one finding a line in a fixed order, so that a change of it reads as a diff. It holds the
findings of any number of targets. A finding is known by its fingerprint, in which layer numbers do not count: another
depth of the same model has the same baseline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from normwise.checkup.configuration import shown
from normwise.checkup.finding import Finding
from normwise.checkup.report import Report
from normwise.checkup.suppression import Suppression
from normwise.errors import ConfigurationError
from normwise.rendering import both
from normwise.rendering.files import replace as replace_file

__all__ = ["Baseline", "Known", "read"]

KIND, SCHEMA = "normwise-baseline", 1
LARGEST = 2**26  # bytes: 400,000 findings
REASON = both("known when the baseline was written", "写基线时已有")


@dataclass(frozen=True, slots=True, order=True)
class Known:
    """One finding of a baseline; ``path`` is for readers."""

    target: str
    code: str
    path: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The findings of a file, by target."""

    path: Path
    known: frozenset[Known] = frozenset()

    def suppressions(self, target: str) -> list[Suppression]:
        """Return what it keeps quiet in a target."""
        return [
            Suppression(
                code=each.code,
                codes=frozenset([each.code]),
                pattern=each.path,
                by="baseline",
                where=shown(self.path),
                reason=REASON,
                covers=lambda finding, place, known=each.fingerprint: finding.fingerprint == known,
            )
            for each in sorted(self.known)
            if each.target == target
        ]

    def updated(self, report: Report) -> Baseline:
        """Return the baseline with the findings of a report in place of those it had of the target.

        What the report keeps quiet for another reason is left out. Findings of rules that did not judge the target
        this time stay.
        """
        judged = {*report.passed, *(f.code for f in report.findings), *(s.finding.code for s in report.suppressed)}
        others = {each for each in self.known if each.target != report.target or each.code not in judged}
        return replace(self, known=frozenset(others | set(_known(report.target, report.findings))))

    def write(self) -> None:
        """Write the file, in one step."""
        lines = [json.dumps(asdict(each)) for each in sorted(self.known)]
        rows = ",\n".join(f"    {line}" for line in lines)
        findings = f"[\n{rows}\n  ]" if rows else "[]"
        head = f'  "kind": "{KIND}",\n  "schema": {SCHEMA},\n'
        replace_file(self.path, f'{{\n{head}  "findings": {findings}\n}}\n')


def read(path: str | os.PathLike[str], *, missing: bool = False) -> Baseline:
    """Return the baseline of a file.

    Args:
        path: the file.
        missing: a file that does not exist is an empty baseline: it is going to be written.

    Raises:
        ConfigurationError: the file is missing, cannot be read, or is no baseline of this schema.
    """
    path = Path(path)
    if missing and not path.exists() and path.parent.is_dir():
        return Baseline(path=path)
    document = _document(path)
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ConfigurationError(shown(path), "is no baseline of normwise: name another file, this one is left alone")
    if document.get("schema") != SCHEMA:
        reason = f"is a baseline of schema {document.get('schema')!r}, this version reads {SCHEMA}: write it again"
        raise ConfigurationError(shown(path), f"{reason} under another name with --write-baseline")
    findings = document.get("findings")
    if not isinstance(findings, list):
        raise ConfigurationError(shown(path), "has no list of findings: write it again under another name")
    return Baseline(path=path, known=frozenset(_entry(path, index, each) for index, each in enumerate(findings)))


def _document(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ConfigurationError(shown(path), f"is larger than {LARGEST // 2**20} MiB: is it a baseline?")
        return json.loads(content)
    except FileNotFoundError:
        said = f"there is no such file: write it first with --baseline {shown(path)} --write-baseline"
        raise ConfigurationError(shown(path), said) from None
    except OSError as error:
        said = error.strerror or type(error).__name__
        raise ConfigurationError(shown(path), f"cannot be read ({said}): name a file you may read") from None
    except json.JSONDecodeError as error:
        reason = f"is broken JSON ({error.msg}): restore it from version control, or delete it and write it again"
        raise ConfigurationError(f"{shown(path)}:{error.lineno}", reason) from None
    except UnicodeDecodeError:
        raise ConfigurationError(shown(path), "is no text: name the baseline that --write-baseline wrote") from None
    except (RecursionError, ValueError):  # nested too deeply; an integer of more digits than Python converts
        raise ConfigurationError(shown(path), "is no baseline of normwise: name another file") from None


def _entry(path: Path, index: int, entry: object) -> Known:
    names = [each.name for each in fields(Known)]
    values = [entry.get(name) for name in names] if isinstance(entry, dict) else []
    if not values or not all(isinstance(value, str) for value in values):
        reason = f"its finding {index + 1} lacks one of {', '.join(names)}: restore it from version control"
        raise ConfigurationError(shown(path), reason)
    return Known(*map(str, values))


def _known(target: str, findings: Iterable[Finding]) -> Iterable[Known]:
    return (Known(target=target, code=f.code, path=f.path, fingerprint=f.fingerprint) for f in findings)
