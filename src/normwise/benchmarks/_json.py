"""A benchmark for programs: every row with its conditions, keys as in ``Result`` and ``Row``."""

from __future__ import annotations

import json

from normwise.benchmarks._result import Result
from normwise.rendering.cleaning import respelled

__all__ = ["render"]


def render(result: Result, *, lang: str = "en") -> str:
    """Return JSON; it has no language."""
    return respelled(json.dumps(result.as_dict(), indent=1), "\\u{:04x}") + "\n"
