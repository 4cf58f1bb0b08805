"""Collects the modules of a family (rules, reports, targets, placements, ...).

A part is one module; one explicit import line in the package's ``__init__`` puts
it in service. ``collect(globals(), needs=...)`` checks that every such module has
a docstring (its documentation page) and the names its family needs. ``lazy`` is for packages whose names load when
they are first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["collect", "lazy", "named", "page", "page_title"]


def collect(namespace: Mapping[str, Any], *, needs: Iterable[str]) -> dict[str, ModuleType]:
    """Return the parts imported into a package, keyed by their kebab-case names.

    Args:
        namespace: ``globals()`` of the package.
        needs: names that every part of this family must define.

    Raises:
        TypeError: a part lacks its docstring or a needed name.
    """
    package = namespace["__name__"]
    parts = {}
    for name, module in sorted(namespace.items()):
        if not isinstance(module, ModuleType) or module.__name__ != f"{package}.{name}" or name.startswith("_"):
            continue
        missing = [need for need in needs if not hasattr(module, need)]
        if missing:
            raise TypeError(f"{module.__file__}: a part of {package} needs {missing[0]!r}")
        if not module.__doc__:
            raise TypeError(f"{module.__file__}: a part of {package} needs a docstring, it is its page")
        parts[name.replace("_", "-")] = module
    return parts


def named(name: str, parts: Mapping[str, ModuleType], kind: str) -> ModuleType:
    """Return the part of a name that a user wrote; capitals are small letters, underscores are hyphens.

    Args:
        name: as it was written.
        parts: of the family by name, in the order in which they are listed.
        kind: what one of them is called.

    Raises:
        ValueError: none is called so; the nearest name is given.
    """
    asked = name.lower().replace("_", "-")
    if asked not in parts:
        near = get_close_matches(asked, parts, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(parts)}"
        raise ValueError(f"no {kind} is called {name!r}: {hint}")
    return parts[asked]


def page(part: ModuleType, lang: str = "en") -> str:
    """Return the page of a part: its docstring, or its ``ZH`` in Chinese where it has one."""
    chinese = getattr(part, "ZH", "") if lang == "zh" else ""
    return (chinese or part.__doc__ or "").strip()


def page_title(part: ModuleType, lang: str = "en") -> str:
    """Return the first line of a part's page."""
    return page(part, lang).splitlines()[0]


def lazy(namespace: dict[str, Any], homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose public names load when they are first used (PEP 562).

    Args:
        namespace: ``globals()`` of the package.
        homes: the module below the package that holds each name; "" where the name is the module.
    """
    package = namespace["__name__"]

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value = getattr(import_module(f"{package}.{home}"), name) if home else import_module(f"{package}.{name}")
        namespace[name] = value
        return value

    def listed() -> list[str]:
        return sorted({*namespace, *homes})

    return load, listed
