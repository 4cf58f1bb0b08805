"""Formats of a converted model on disk: one module each.

A format has a docstring (its page), ``refusal(output) -> str | None`` (what it cannot hold), ``file_name(name)`` (what
it calls a weight file of the source), ``finish(folder, output)`` (what it writes beside the weights), and
``load(folder, output, original)`` (the loader its users will use, for the reload gate). It may have ``NOTE``, a
sentence for the report, and ``expected(converted, output)``, what is loaded where that has norms of its own.
"""

from __future__ import annotations

from difflib import get_close_matches
from types import ModuleType

from normwise._parts import collect
from normwise.conversions.saving.formats import code as code
from normwise.conversions.saving.formats import manifest as manifest
from normwise.conversions.saving.formats import safetensors as safetensors
from normwise.conversions.saving.formats import stock as stock
from normwise.conversions.saving.output import Output

__all__ = ["choose", "get", "names"]

_FORMATS = collect(globals(), needs=("refusal", "finish", "load", "file_name"))
_PREFERRED = ("stock", "manifest")  # the first that can hold it, where none was asked for


def names() -> tuple[str, ...]:
    """Return the names of the formats."""
    return tuple(_FORMATS)


def get(name: str) -> ModuleType:
    """Return a format by its name.

    Raises:
        ValueError: no such format; the nearest name is given.
    """
    if name not in _FORMATS:
        near = get_close_matches(name, _FORMATS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(_FORMATS)}"
        raise ValueError(f"no format is called {name!r}: {hint}")
    return _FORMATS[name]


def choose(output: Output) -> str:
    """Return the simplest format that holds an output: the stock class, or a manifest."""
    return next(name for name in _PREFERRED if get(name).refusal(output) is None)
