"""The options of a conversion: those that its ``plan`` takes by name, each of the type that is written there."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from inspect import signature
from types import ModuleType, NoneType
from typing import Any, get_args, get_origin, get_type_hints

__all__ = ["check_options"]

_SPELLED = {bool: "true or false", int: "a whole number", str: "a name"}


def check_options(name: str, part: ModuleType, options: Mapping[str, Any]) -> None:
    """Refuse options that a conversion does not take.

    Args:
        name: of the conversion, as it was asked for.
        part: the conversion.
        options: what it is given.

    Raises:
        ValueError: it has no such option; the nearest one, or all are given.
        TypeError: a value is of another type.
    """
    taken = [option for option in signature(part.plan).parameters if option != "facts"]
    hints = get_type_hints(part.plan)
    for option, value in options.items():
        if option not in taken:
            near = get_close_matches(option, taken, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(taken) or 'none'}"
            raise ValueError(f"{name} has no option {option!r}: {hint}")
        kinds = [get_origin(kind) or kind for kind in get_args(hints[option]) or (hints[option],)]
        if not any(_is(value, kind) for kind in kinds):
            spelled = " or ".join(_SPELLED.get(kind, "a list of names") for kind in kinds if kind is not NoneType)
            raise TypeError(f"{name}: {option}={value!r} is of the wrong type, it takes {spelled}")


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
