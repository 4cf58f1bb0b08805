"""Engines: what runs the trials of a study, on this machine or on others.

An engine is one file with a docstring, ``claims(text)`` (whether it is what ``--engine text`` means) and
``start(text, workers)``: a context manager that gives a ``Session`` and ends what still runs when it is left.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Protocol

from normwise._parts import collect
from normwise.errors import StudyError
from normwise.studies._execute import Answer, Order
from normwise.studies.engines import local as local

__all__ = ["Execute", "Session", "names", "start"]

_ENGINES = collect(globals(), needs=("claims", "start"))


class Execute(Protocol):
    """What runs one trial: ``normwise.studies._execute.execute``."""

    def __call__(self, order: Order) -> Answer:
        """Run it in a process of its own."""
        ...


class Session(Protocol):
    """An engine at work."""

    @property
    def workers(self) -> int:
        """Return how many trials it runs at a time, as far as it knows."""
        ...

    def submit(self, function: Execute, order: Order) -> Future[Answer]:
        """Queue a trial; a future that raises anything but ``StudyError`` is a trial that was lost."""
        ...


def names() -> tuple[str, ...]:
    """Return the names of the engines, in alphabetical order."""
    return tuple(_ENGINES)


def start(text: str, workers: int | None) -> AbstractContextManager[Session]:
    """Return the engine that a text means, to be entered.

    Args:
        text: "local", or the address of another.
        workers: trials at a time; None leaves it to the engine.

    Raises:
        StudyError: no engine is called so; or, on entering, it is not installed or cannot be reached.
    """
    for engine in _ENGINES.values():
        if engine.claims(text):
            return engine.start(text, workers)
    raise StudyError(f"no engine is called {text!r}: choose from {', '.join(names())}")
