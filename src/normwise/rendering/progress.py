"""How far something has come, on standard error; nothing where that is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from normwise.rendering.cleaning import clean

__all__ = ["progress"]


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], Any]]:
    """Show a bar while the block runs.

    What it yields is told what is running, how much of it is done, and of how much (0: not known).
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda text, done, total: bar.update(task, description=clean(text), completed=done, total=total or None)
