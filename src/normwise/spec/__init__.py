"""What a norm computes (``NormSpec``), where it sits (``Wiring``), and ``reference``, which defines the former."""

from __future__ import annotations

from normwise.spec.definition import reference
from normwise.spec.description import (
    PROMOTED,
    Cast,
    Form,
    Gain,
    Gate,
    Kind,
    Modulation,
    NormSpec,
    Scope,
    Statistic,
    Weight,
    Wiring,
)
from normwise.spec.families import FAMILIES, family_name

__all__ = [
    "FAMILIES",
    "PROMOTED",
    "Cast",
    "Form",
    "Gain",
    "Gate",
    "Kind",
    "Modulation",
    "NormSpec",
    "Scope",
    "Statistic",
    "Weight",
    "Wiring",
    "family_name",
    "reference",
]
