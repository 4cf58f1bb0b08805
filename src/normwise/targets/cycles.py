"""Refuses what torch's own ``eval()``, ``to()`` and ``state_dict()`` do not end on: they call themselves by level.

A module that contains itself is one such, modules nested deeper than Python's calls may be the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

from normwise.errors import TargetError
from normwise.rendering import clean

__all__ = ["refuse"]

_OTHERS = 200  # calls between the start of the program and those of torch, and within them


def refuse(model: nn.Module, name: str) -> None:
    """Walk the tree of modules once.

    Raises:
        TargetError: a module is below itself; both places are named. Or the tree is too deep.
    """
    deepest = sys.getrecursionlimit() - _OTHERS
    above: dict[int, str] = {id(model): ""}
    done: set[int] = set()
    way: list[tuple[nn.Module, str, Iterator[tuple[str, nn.Module]]]] = [(model, "", model.named_children())]
    while way:  # no recursion: a deep model is no cycle
        module, path, children = way[-1]
        for child_name, child in children:
            child_path = f"{path}.{child_name}" if path else child_name
            if id(child) in above:
                raise TargetError(
                    f"{clean(name)}: the module at {clean(child_path)!r} is the one at {clean(above[id(child)])!r} "
                    "that contains it, and torch's eval() and state_dict() do not end on it; keep such a reference out "
                    "of the registered modules, in a tuple for example"
                )
            if id(child) not in done:
                above[id(child)] = child_path
                way.append((child, child_path, child.named_children()))
                if len(way) > deepest:
                    raise TargetError(
                        f"{clean(name)}: its modules are nested more than {deepest} levels deep, and torch's eval() "
                        "and state_dict() call themselves for each; raise sys.setrecursionlimit() before the check"
                    )
                break
        else:
            done.add(id(module))
            del above[id(module)]
            way.pop()
