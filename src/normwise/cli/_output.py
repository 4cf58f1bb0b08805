"""What the commands print with, and how a target is kept from printing."""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import click

__all__ = ["COULD_NOT_RUN", "aside", "cleaned", "never_fail_to_encode", "no_collection", "say", "say_json"]

COULD_NOT_RUN = 2


def say(text: str) -> None:
    """Print to standard output."""
    try:
        click.echo(text, nl=not text.endswith("\n"))
    except BrokenPipeError:
        # The reader (`| head`) has seen enough: go on in silence, the exit code still counts.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as failure:
        raise click.ClickException(
            f"standard output cannot be written ({failure.strerror}): send it elsewhere"
        ) from failure


def say_json(value: object) -> None:
    """Print a value as JSON, in which a name or a reason is no command to a CI runner."""
    from normwise.rendering.cleaning import respelled
    from normwise.rendering.plain import plain

    say(respelled(json.dumps(plain(value), indent=2, allow_nan=False), "\\u{:04x}"))


def never_fail_to_encode() -> None:
    """Let a terminal that lacks a character show its escape instead."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def cleaned(line: str) -> str:
    """Return a line that is safe to show."""
    from normwise.rendering import clean, obeyed_by_none

    return obeyed_by_none(clean(line))


@contextmanager
def aside() -> Iterator[None]:
    """Keep what the target prints out of the report, and its warnings off the screen."""
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def no_collection() -> Iterator[None]:
    """Imports make a million objects and no garbage: Python need not look for it, nor later among those objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # until ``main`` returns
        if enabled:
            gc.enable()
