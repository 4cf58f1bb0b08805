"""A test that fails where a check finds something: ``assert_clean``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from normwise import checkup
from normwise.checkup import Configuration, Finding, Report
from normwise.checkup import configuration as configuration_file
from normwise.checkup.finding import FAIL_ON
from normwise.errors import TargetError
from normwise.rendering import clean, shorten
from normwise.rendering.collapse import collapse_paths
from normwise.targets import Target

__all__ = ["assert_clean", "examined", "require"]

_LONGEST_PLACES = 200


def assert_clean(
    model: nn.Module | Target | str,
    inputs: Any = None,
    *,
    select: str | Iterable[str] | None = None,
    ignore: str | Iterable[str] | None = None,
    fail_on: str | None = None,
    configuration: Configuration | str | os.PathLike[str] | bool = True,
    **evidence: Any,
) -> Report:
    """Check a model and raise if something is found: for tests.

    Args:
        model: a module, a Target, or any TARGET string.
        inputs: one call's inputs, as for ``nw.check``.
        select: codes, families or names of the rules to run.
        ignore: those to leave out.
        fail_on: the lowest severity that fails: "error", "warning", "info" or "never"; by default what the
            configuration says, "error" without one.
        configuration: a TOML file with ``[tool.normwise]`` or a ``Configuration``; True: of the nearest pyproject.toml
            that has one, from the current folder upwards; False: none.
        evidence: what ``nw.check`` takes besides: ``optimizer``, ``effort``, ...

    Returns:
        The report.

    Raises:
        AssertionError: something is found at or above ``fail_on``; the message names each finding and its fix.
        TargetError: the model could not be run, so nothing is known.
        ConfigurationError: the configuration or its baseline cannot be read or followed.

    Examples:
        >>> import torch
        >>> assert_clean(torch.nn.LayerNorm(8), torch.randn(2, 8), configuration=False).findings
        ()
    """
    report, threshold = examined(
        model, inputs, select=select, ignore=ignore, fail_on=fail_on, configuration=configuration, **evidence
    )
    require(report, threshold)
    return report


def examined(
    model: nn.Module | Target | str,
    inputs: Any = None,
    *,
    fail_on: str | None = None,
    configuration: Configuration | str | os.PathLike[str] | bool = True,
    folder: Path | None = None,
    **asked: Any,
) -> tuple[Report, str]:
    """Return the report of a check, and the severity that fails; ``folder`` is where the search for a file begins."""
    if fail_on is not None and fail_on not in FAIL_ON:
        raise ValueError(f"fail_on is one of {', '.join(FAIL_ON)}, got {fail_on!r}")
    if isinstance(configuration, bool):
        configuration = configuration_file.nearest(folder) if configuration else Configuration()
    elif not isinstance(configuration, Configuration):
        configuration = configuration_file.read(configuration)
    report = checkup.check(model, inputs, configuration=configuration, **asked)
    return report, fail_on or configuration.fail_on


def require(report: Report, fail_on: str) -> None:
    """Raise with every finding at or above a severity, or if nothing could be found out."""
    failing = [finding for finding in report.findings if finding.severity.reaches(fail_on)]
    if failing:
        count = f"{len(failing)} finding{'s' if len(failing) > 1 else ''}"
        lines = [line for finding in failing for line in _lines(finding)]
        raise AssertionError("\n".join([f"normwise: {count} in {clean(report.target)}", *lines]))
    if report.inputs == "none" and not report.checkpoint_only:
        raise TargetError(f"{report.target}: the model was not run, no inputs could be inferred; give inputs")


def _lines(finding: Finding) -> Iterator[str]:
    places = ", ".join(group.label for group in collapse_paths(finding.paths or (finding.path,)) if group.label)
    where = f" at {shorten(clean(places), _LONGEST_PLACES)}" if places else ""
    yield f"  {finding.code} {finding.name} ({finding.severity}){where}: {clean(finding.message)}"
    yield f"    fix: {clean(finding.fix)}"
    yield f"    why: normwise explain {finding.code}"
