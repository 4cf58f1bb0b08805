"""Words that every rule's messages share."""

from __future__ import annotations

__all__ = ["counted", "percent"]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    Examples:
        >>> counted(1, "norm"), counted(64, "norm")
        ('1 norm', '64 norms')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def percent(share: float) -> str:
    """Return a share in percent: with one decimal, or with its first digit where that would be zeros.

    Examples:
        >>> percent(0.123), percent(0.00006), percent(0.0)
        ('12.3%', '0.006%', '0%')
    """
    return f"{share:.1%}" if share >= 0.001 else f"{100 * share:.1g}%"
