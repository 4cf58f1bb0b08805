"""Engines: what runs the trials of a study, on this machine or on others.

An engine is one file with a docstring, ``EXAMPLE`` (how it is written), ``claims(text)`` (whether ``--engine text``
means it), ``check(text)`` (refuses what is no address of it) and ``start(text, workers, folder)``: a context manager
that gives a ``Session`` and ends what still runs when it is left.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Protocol

from normwise._parts import collect
from normwise.errors import StudyError
from normwise.studies._execute import Answer, Order
from normwise.studies.engines import dask as dask
from normwise.studies.engines import local as local
from normwise.studies.engines import slurm as slurm

__all__ = ["Execute", "Session", "find", "forms", "names", "start"]

_ENGINES = collect(globals(), needs=("EXAMPLE", "claims", "check", "start"))


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


def forms() -> tuple[str, ...]:
    """Return how each is written."""
    return tuple(engine.EXAMPLE for engine in _ENGINES.values())


def find(text: str) -> ModuleType:
    """Return the engine that a text means.

    Raises:
        StudyError: no engine is called so, the nearest is given; or it is no address of one.
    """
    for engine in _ENGINES.values():
        if engine.claims(text):
            engine.check(text)
            return engine
    near = get_close_matches(text.lower().partition(":")[0], _ENGINES, n=1)
    hint = f"did you mean {_ENGINES[near[0]].EXAMPLE}? " if near else ""
    raise StudyError(f"no engine is called {text!r}: {hint}choose from {', '.join(forms())}")


def start(text: str, workers: int | None, folder: Path) -> AbstractContextManager[Session]:
    """Return the engine that a text means, to be entered.

    Args:
        text: "local", or the address of another.
        workers: trials at a time; None leaves it to the engine.
        folder: the ledger's, for files that an engine needs while it works.

    Raises:
        StudyError: no engine is called so; or, on entering, it is not installed or cannot be reached.
    """
    return find(text).start(text, workers, folder)
