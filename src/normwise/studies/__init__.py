"""Studies: claims of the field, measured on small trainings with the theory beside them; ``normwise study``.

A study is one file with a docstring and ``ZH`` (its page in two languages), ``VERSION``, ``DATA`` (what it reads),
``SEEDS``, ``trials(quick)`` (parameters), ``seconds(params)`` (CPU time of a trial), ``measure(params)`` (one trial),
``CLAIMS`` (each with its judge) and ``FIGURES`` (tables and charts).
"""

from __future__ import annotations

from types import ModuleType

from normwise._parts import collect, named
from normwise.studies import batch_norm_in_sequence_models as batch_norm_in_sequence_models
from normwise.studies import batch_size as batch_size
from normwise.studies import effective_depth as effective_depth
from normwise.studies import eps_and_precision as eps_and_precision
from normwise.studies import frozen_gains as frozen_gains
from normwise.studies import gradient_by_depth as gradient_by_depth
from normwise.studies import layer_vs_rms as layer_vs_rms
from normwise.studies import learning_rate_sensitivity as learning_rate_sensitivity
from normwise.studies import sqrt_vs_sum as sqrt_vs_sum
from normwise.studies import stream_growth as stream_growth
from normwise.studies import warmup as warmup
from normwise.studies._evidence import Evidence as Evidence
from normwise.studies._evidence import Unrun as Unrun
from normwise.studies._runner import resume as resume
from normwise.studies._runner import run as study
from normwise.studies._runner import show as show
from normwise.studies._study import Claim as Claim
from normwise.studies._study import Judgement as Judgement
from normwise.studies._study import Outcome as Outcome
from normwise.studies._study import Row as Row
from normwise.studies._study import Rows as Rows
from normwise.studies._study import Table as Table
from normwise.studies._study import Verdict as Verdict

__all__ = [
    "Claim",
    "Evidence",
    "Judgement",
    "Outcome",
    "Row",
    "Rows",
    "Table",
    "Unrun",
    "Verdict",
    "get",
    "names",
    "resume",
    "show",
    "study",
]

_STUDIES = collect(
    globals(),
    needs=("ZH", "VERSION", "DATA", "SEEDS", "seconds", "trials", "measure", "CLAIMS", "FIGURES"),
)


def names() -> tuple[str, ...]:
    """Return the names of the studies, in alphabetical order."""
    return tuple(_STUDIES)


def get(name: str) -> ModuleType:
    """Return a study by its name; underscores are hyphens.

    Raises:
        ValueError: no such study; the nearest name is given.
    """
    return named(name, _STUDIES, "study")
