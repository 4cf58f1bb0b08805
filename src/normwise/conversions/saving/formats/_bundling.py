"""Gathers the source of objects and of everything in ``normwise.conversions`` that they use into one text.

A modeling file then does exactly what the package does, without the package.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

__all__ = ["Bundle", "bundle"]

_OURS = "normwise.conversions"


@dataclass(slots=True)
class Bundle:
    """Import lines, and definitions in the order in which they need each other."""

    imports: set[str] = field(default_factory=set)
    definitions: dict[str, str] = field(default_factory=dict)


def bundle(objects: Iterable[Any]) -> Bundle:
    """Gather classes and functions.

    Raises:
        ValueError: one of them uses another part of normwise, which a file without normwise cannot have.
    """
    found = Bundle()
    for each in objects:
        _add(each, found)
    return found


def _add(item: Any, found: Bundle) -> None:
    if item.__name__ in found.definitions:
        return
    try:
        source = inspect.getsource(item)
    except OSError as error:
        raise ValueError(f"the source of {item.__name__} is not at hand") from error
    tree = ast.parse(source)
    definition = tree.body[0]
    assert isinstance(definition, (ast.ClassDef, ast.FunctionDef))
    names = vars(sys.modules[item.__module__])
    if _registered(definition):
        bare = "".join(source.splitlines(keepends=True)[definition.lineno - 1 :])
        source = f"@dataclass(frozen=True, slots=True, kw_only=True)\n{bare}"
        definition.decorator_list = []
        found.imports.add("from dataclasses import dataclass")
    found.definitions[item.__name__] = ""  # breaks circles
    for name in dict.fromkeys(_used(definition)):
        if name in names:
            _need(name, names[name], item, found)
    del found.definitions[item.__name__]
    found.definitions[item.__name__] = source


def _registered(definition: ast.ClassDef | ast.FunctionDef) -> bool:
    """Tell whether a class is registered as an edit, which a modeling file has no register for."""
    called = [d.func for d in definition.decorator_list if isinstance(d, ast.Call)]
    return any(isinstance(func, ast.Name) and func.id == "edit" for func in called)


def _used(definition: ast.AST) -> Iterator[str]:
    for node in ast.walk(definition):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            raise ValueError("it imports when it is applied")


def _need(name: str, value: Any, user: Any, found: Bundle) -> None:
    if isinstance(value, ModuleType):
        parent, _, last = value.__name__.rpartition(".")
        line = f"from {parent} import {last}" if parent else f"import {last}"
        found.imports.add(line if last == name else f"{line} as {name}")
        return
    home = getattr(value, "__module__", None)
    if isinstance(home, str) and home.startswith(_OURS):
        _add(value, found)
    elif isinstance(home, str) and not home.startswith("normwise"):
        found.imports.add(f"from {home} import {name}")
    else:
        raise ValueError(f"{user.__name__} uses {name}, which is a part of normwise")
