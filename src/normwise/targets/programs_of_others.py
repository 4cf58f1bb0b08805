"""Programs in files that others made: which texts name one, and how a failure to read one is said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from normwise.errors import CheckpointError, TargetError
from normwise.targets.hf_inputs import one_line
from normwise.targets.offline import offline
from normwise.targets.python_file import PREFIXES

__all__ = ["names_file", "reading"]


def names_file(text: str, suffix: str) -> bool:
    """Tell whether a TARGET is the path of a file with an ending."""
    return text.lower().endswith(suffix) and not text.startswith(PREFIXES)


@contextmanager
def reading(text: str, what: str) -> Iterator[None]:
    """Read a file offline, so that whatever its contents lead to is said in one line.

    Args:
        text: the TARGET.
        what: is read: "model", "program".

    Raises:
        TargetError: anything went wrong.
    """
    with offline():
        try:
            yield
        except (TargetError, CheckpointError) as error:
            raise TargetError(f"{text}: {error}") from error
        except (MemoryError, RecursionError) as error:
            raise TargetError(f"{text}: the file asks for more memory than there is") from error
        except Exception as error:
            raise TargetError(f"{text}: the {what} cannot be read: {one_line(error)}") from error
