"""What errors about arguments have in common: which numbers count, and which names are near."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

__all__ = ["advice", "is_whole", "kebab"]

_NEAR = 0.7  # difflib's measure of likeness: a swap or a missing letter in a name of six is above it


def is_whole(value: Any, least: int) -> bool:
    """Return whether a value is a whole number, ``least`` or more; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def kebab(name: Any) -> str:
    """Return a name in small letters with hyphens, and nothing for what is no name."""
    return name.lower().replace("_", "-") if isinstance(name, str) else ""


def advice(asked: Any, known: Iterable[str], listed: Iterable[str] | None = None) -> str:
    """Return what to do about an unknown name: take a near one, or one of those ``listed``.

    Args:
        asked: what was given.
        known: all names, aliases among them.
        listed: those to choose from; the known ones by default.
    """
    known = list(known)
    near = get_close_matches(kebab(asked), known, n=3, cutoff=_NEAR)
    return f"did you mean {' or '.join(near)}?" if near else f"choose from: {', '.join(listed or known)}"
