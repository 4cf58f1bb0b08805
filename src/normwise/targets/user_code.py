"""Runs the user's code for a target and says in one sentence where it failed."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from normwise.errors import NormwiseError, TargetError
from normwise.targets.answer import from_answer
from normwise.targets.target import Target

__all__ = ["blame", "build", "running_in"]

_LISTED = 12  # names listed in an error message
_LIBRARY = (sysconfig.get_path("stdlib"), "<")


@contextlib.contextmanager
def running_in(folder: Path) -> Iterator[None]:
    """Run the user's code: import from ``folder`` first, write no bytecode, and leave both as they were.

    The random state is seeded, so that an unseeded builder makes the same model each time, and restored.
    """
    entry, bytecode = str(folder), sys.dont_write_bytecode
    sys.path.insert(0, entry)
    sys.dont_write_bytecode = True
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        sys.dont_write_bytecode = bytecode
        with contextlib.suppress(ValueError):  # the user's code may have removed it
            sys.path.remove(entry)


def build(module: ModuleType, attribute: str, *, text: str) -> Target:
    """Call ``module.attribute`` without arguments and make a Target of what it returns.

    An attribute that is a model or a Target already is taken as it is.

    Raises:
        TargetError: the attribute is missing, not callable, needs arguments, raises or returns something else.
    """
    answer = _find(module, attribute, text)
    if not isinstance(answer, nn.Module | Target):
        answer = _call(answer, text)
    try:
        return from_answer(answer, name=text)
    except (TypeError, ValueError) as error:
        raise TargetError(f"{text} returned what is no target: {error}") from error


def blame(error: BaseException) -> str:
    """Return ``file:line: Type: message`` of the deepest line of the user's own code in a traceback."""
    message = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {message}" if frames else message


def _is_users(filename: str) -> bool:
    if {"site-packages", "dist-packages"} & set(Path(filename).parts):
        return False
    return not filename.startswith((str(Path(__file__).parent), *_LIBRARY))


def _find(module: ModuleType, attribute: str, text: str) -> Any:
    if hasattr(module, attribute):
        return getattr(module, attribute)
    names = _callables(module)
    near = difflib.get_close_matches(attribute, names, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    raise TargetError(f"{text}: there is no {attribute!r}; {guess}{_listing(names)}")


def _callables(module: ModuleType) -> list[str]:
    """Return the names of the callables and models that the module defines itself."""

    def offered(value: object) -> bool:
        own = getattr(value, "__module__", None) == module.__name__
        return isinstance(value, nn.Module) or (callable(value) and own)

    return [name for name, value in vars(module).items() if not name.startswith("_") and offered(value)]


def _listing(names: list[str]) -> str:
    if not names:
        return "it defines no callable: add a function without arguments that returns a model"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"it defines {', '.join(names[:_LISTED])}{more}"


def _call(function: Any, text: str) -> Any:
    if not callable(function):
        raise TargetError(f"{text} is a {type(function).__name__}, not callable; name a function that returns a model")
    needed = _needed_arguments(function)
    if needed:
        raise TargetError(
            f"{text} needs arguments ({', '.join(needed)}) and normwise gives none; "
            "name a function without arguments that calls it, or give them defaults"
        )
    try:
        return function()
    except (NormwiseError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too: scripts call sys.exit()
        raise TargetError(f"{text} raised at {blame(error)}") from error


def _needed_arguments(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
