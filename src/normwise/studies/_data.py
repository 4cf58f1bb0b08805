"""What studies read, by name, and the hash of it: rows of other data are not mixed."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["digests"]


def digests(names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of every data set that is named.

    Raises:
        ValueError: no such data.
    """
    return {name: _digest(name) for name in names}


def _digest(name: str) -> str:
    match name:
        case "standard-library":
            from normwise.studies._corpus import corpus

            return corpus().digest
        case "digits":
            from normwise.studies._digits import digits

            return digits().digest
    raise ValueError(f"no data is called {name!r}: choose from standard-library, digits")
