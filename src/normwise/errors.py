"""What can go wrong, and how the command line answers.

NormwiseError
├── TargetError         the target cannot be loaded or fed                  exit 2
├── TraceError          the model did not run to its end                    exit 2
├── NotKnown            a fact cannot be had here: "not checked: why"
│   └── NoNorm          a module that is no norm, where the convention of one is asked
├── ConversionRefused   a change would alter what the model computes        exit 1
├── StudyError          a study cannot be run: its ledger, engine or data   exit 2
├── CheckpointError     a file of weights that is broken, hostile or too large to be read here   exit 2
└── ConfigurationError  [tool.normwise], a baseline or a suppression that cannot be followed     exit 2

Wrong arguments stay ``ValueError`` and ``TypeError``, as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "ConversionRefused",
    "NoNorm",
    "NormwiseError",
    "NotKnown",
    "StudyError",
    "TargetError",
    "TraceError",
]


class NormwiseError(Exception):
    """Base of every error that normwise raises on purpose."""


class TargetError(NormwiseError):
    """A target that cannot be found, built or fed with inputs."""


class TraceError(NormwiseError):
    """A model that did not run to its end while it was traced."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class NotKnown(NormwiseError):
    """A fact that cannot be had for this target; ``why`` completes "not checked: ..."."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class NoNorm(NotKnown):
    """A module that is no norm, rather than one of a form that is not known."""


class ConversionRefused(NormwiseError):
    """A conversion that would change the function of the model; carries every reason."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)


class StudyError(NormwiseError):
    """A study that cannot be run: a ledger that is no ledger of it, an engine that is missing, data that changed."""


class CheckpointError(NormwiseError):
    """A file of weights that is not read: broken, hostile, or beyond a limit.

    Whatever the bytes are, reading them raises this or nothing.

    Args:
        code: the kind of defect in kebab-case, for programs: "truncated", "pickle-needs-code", "too-large", ...
        path: the file.
        reason: what is wrong, and one next step.
    """

    def __init__(self, code: str, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.code, self.path, self.reason = code, path, reason


class ConfigurationError(NormwiseError):
    """A configuration, a baseline or a suppression that cannot be followed; the message names file and line.

    Args:
        where: FILE or FILE:LINE.
        reason: what is wrong there, and one next step.
    """

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason
