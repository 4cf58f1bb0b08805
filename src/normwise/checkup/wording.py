"""Words that every rule's messages share."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    Examples:
        >>> counted(1, "norm"), counted(64, "norm")
        ('1 norm', '64 norms')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
