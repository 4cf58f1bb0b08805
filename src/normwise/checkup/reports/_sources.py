"""Which line of the user's own files a finding is about, for formats that annotate files."""

from __future__ import annotations

import ast
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from normwise.rendering.cleaning import clean
from normwise.rendering.sources import FOREIGN, checkout, located
from normwise.targets import python_file, python_module

if TYPE_CHECKING:
    from normwise.checkup.report import Report

__all__ = ["Source", "Sources"]

_FOLDER, _CONFIG, _WEIGHTS = "hf:", "config.json", "*.safetensors*"


@dataclass(frozen=True, slots=True)
class Source:
    """A line of a file of the checkout; the file is relative to its root, with forward slashes."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Sources:
    """The lines of one report.

    A norm of an installed package has no line in the user's repository, and GitHub refuses a whole log for one result
    without a file (github/codeql-action issue 2459; "at least one location", docs.github.com, "SARIF support for code
    scanning"). No file of ours computes that norm, but one asked for the check: the file that the target names, the
    workflow that runs, or the configuration. There it can be mended or kept quiet, so the finding is put there.

    Args:
        report: for the norms, stacks and breaks with their lines, the target and the configuration.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._written: dict[str, str] = {}
        self._lengths: dict[str, int] = {}
        self._known: dict[str | None, Source | None] = {}
        for path, line in _lines(report):
            if path:
                self._written.setdefault(path, line)

    def of(self, path: str) -> Source | None:
        """Return the line that computes the norm, or makes the add, at a path of the model.

        Where that is not of the checkout it is the line that asked for the check; None where that is not known either.
        """
        return self._source(self._written.get(path)) or self._asked

    def code(self, path: str) -> str | None:
        """Return where the code at a path of the model is, also that of an installed package, None where not known."""
        written = self._written.get(path)
        foreign = written if written is not None and written.startswith(FOREIGN) else None
        return str(own) if (own := self._source(written)) else foreign

    @cached_property
    def _asked(self) -> Source | None:
        for file, line in _who_asked(self._report):
            if source := self._source(f"{file}:{line}"):
                return source
        return None

    def _source(self, written: str | None) -> Source | None:
        if written not in self._known:  # many modules run one line
            self._known[written] = self._look(written or "")
        return self._known[written]

    def _look(self, written: str) -> Source | None:
        file, _, line = written.rpartition(":")
        if not file or clean(file) != file or not line.isdecimal() or (number := int(line)) < 1:
            return None
        found = located(file)
        # the first line is in every file, and a file of weights is not read
        return Source(found, number) if found and (number == 1 or number <= self._length(file)) else None

    def _length(self, file: str) -> int:
        """Return how many lines a file has: a name alone may be that of another file."""
        if file not in self._lengths:
            try:
                self._lengths[file] = Path(file).read_bytes().count(b"\n") + 1
            except OSError:
                self._lengths[file] = 0
        return self._lengths[file]


def _lines(report: Report) -> Iterator[tuple[str | None, str]]:
    """Yield paths with ``file:line``, those that say most first."""
    for site in (*report.norms, *report.listed_apart):
        if site.source:
            yield from ((path, site.source) for path in (site.path, site.weight_path, site.bias_path))
    yield from ((each.path, each.source) for each in report.breaks if each.source)
    for stack in report.placement.stacks:
        yield from ((member.path, member.source) for member in stack.members if member.source)


def _who_asked(report: Report) -> Iterator[tuple[str, int]]:
    """Yield the files that asked for this check, each with its line, the nearest first."""
    yield from _of_target(report)
    yield from _of_workflow(report.target)
    if report.configuration:
        file, _, line = report.configuration.rpartition(":")
        yield file, int(line)


def _of_target(report: Report) -> Iterator[tuple[str, int]]:
    """Yield the files that a TARGET names: the callable, the weights, or what a folder is built from."""
    target = report.target
    head, _, name = target.rpartition(":")
    if python_file.claims(target):
        yield head, _line_of(name, head)
    elif python_module.claims(target):
        if file := getattr(sys.modules.get(head), "__file__", None):  # the one that was imported, wherever it lies
            yield file, _line_of(name, file)
    elif target:
        path = Path(target.removeprefix(_FOLDER))
        beside = [path.parent / _CONFIG] if report.checkpoint_only and path.suffix else []
        yield from ((str(each), 1) for each in (path / _CONFIG, *beside, path))
        with contextlib.suppress(OSError, ValueError):  # what no path can be
            yield from ((str(each), 1) for each in sorted(path.glob(_WEIGHTS)))


def _line_of(name: str, file: str) -> int:
    """Return the line that defines a name in a file of Python, the first line where that is not seen."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python said of this file what it had to say when it was imported
            body = ast.parse(Path(file).read_bytes()).body
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return 1
    return next((statement.lineno for statement in body if name in _defined(statement)), 1)


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else ()
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _of_workflow(target: str) -> Iterator[tuple[str, int]]:
    """Yield the workflow that GitHub runs, at the line that names the target.

    https://docs.github.com/actions/reference/workflows-and-actions/variables: ``GITHUB_WORKFLOW_REF`` is
    ``OWNER/NAME/.github/workflows/FILE.yml@refs/heads/BRANCH``. One that another repository holds is no file of ours.
    """
    repository = os.environ.get("GITHUB_REPOSITORY")
    reference = os.environ.get("GITHUB_WORKFLOW_REF", "")
    if not repository or not reference.startswith(f"{repository}/"):
        return
    path = Path(checkout(), reference.removeprefix(f"{repository}/").partition("@")[0])
    try:
        lines = path.read_text("utf-8", errors="replace").split("\n")
    except (OSError, ValueError):
        return
    yield str(path), next((number for number, line in enumerate(lines, 1) if target in line), 1)
