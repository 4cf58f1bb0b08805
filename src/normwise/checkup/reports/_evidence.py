"""The usual names of evidence in Chinese; a name that is not here is shown as the rule gives it."""

from __future__ import annotations

__all__ = ["EVIDENCE_ZH"]

EVIDENCE_ZH = {
    "norms": "归一化层数",
}
