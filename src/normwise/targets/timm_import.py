"""Imports timm where torchvision is missing or broken, for the models alone.

timm's models use one class of torchvision, FrozenBatchNorm2d, and only to freeze a trained model; the rest of
torchvision serves timm.data, of which the models need nothing but constants. A torchvision made for another build of
torch fails at its import ("operator torchvision::nms does not exist"). Then both names are held by stand-ins
while timm is imported, and released: an ``import torchvision`` afterwards says what it said before.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from normwise.errors import TargetError
from normwise.targets.user_code import blame

__all__ = ["import_timm"]

_HELD = ("timm.data", "torchvision")  # what stand-ins are put for
_INSTALL = "pip install 'normwise[timm]', or pip install --no-deps timm to leave out torchvision"


def import_timm(text: str) -> ModuleType:
    """Return the module ``timm``.

    Args:
        text: the TARGET, for the message.

    Raises:
        TargetError: it is not installed, or cannot be imported.
    """
    if importlib.util.find_spec("timm") is None:
        raise TargetError(f"{text}: this needs timm, which is not installed; {_INSTALL}")
    before = set(sys.modules)
    try:
        return importlib.import_module("timm")
    except Exception as error:  # torchvision raises RuntimeError where its operators are missing
        _forget(("timm", "torchvision"), before)
        with _stand_ins(before):
            try:
                return importlib.import_module("timm")
            except Exception:
                _forget(("timm",), before)
                raise TargetError(f"{text}: timm cannot be imported: {blame(error)}") from error


def _forget(roots: tuple[str, ...], before: set[str]) -> None:
    """Drop what a failed import left behind, so that the next one starts afresh."""
    for name in set(sys.modules) - before:
        if name.startswith(tuple(f"{root}." for root in roots)) or name in roots:
            del sys.modules[name]


@contextlib.contextmanager
def _stand_ins(before: set[str]) -> Iterator[None]:
    held = {name: module for name, module in sys.modules.items() if name.startswith("torchvision")}
    for name in held:
        del sys.modules[name]
    sys.modules.update(_torchvision())
    sys.modules["timm.data"] = _constants()
    try:
        yield
    finally:
        _forget(_HELD, before)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules.update(held)


def _torchvision() -> dict[str, ModuleType]:
    """Return a torchvision that holds one class; whatever else is imported from it is not found."""
    made: dict[str, Any] = {name: ModuleType(name) for name in ("torchvision", "torchvision.ops")}
    for module in made.values():
        module.__path__ = []
    made["torchvision.ops.misc"] = misc = ModuleType("torchvision.ops.misc")
    misc.FrozenBatchNorm2d = _FrozenBatchNorm2d  # type: ignore[attr-defined]
    return made


def _constants() -> ModuleType:
    """Return timm.data with its constants; its other modules are found in its folder and run when asked for."""
    spec = importlib.util.find_spec("timm")
    folder = Path(next(iter(spec.submodule_search_locations or ()))) / "data" if spec else Path()
    data: Any = ModuleType("timm.data")
    data.__path__ = [str(folder)]
    found = importlib.util.spec_from_file_location("timm.data.constants", folder / "constants.py")
    if found is None or found.loader is None:
        raise ImportError("timm has no data/constants.py")
    found.loader.exec_module(constants := importlib.util.module_from_spec(found))
    vars(data).update({name: value for name, value in vars(constants).items() if name.isupper()})
    return data


class _FrozenBatchNorm2d(nn.Module):
    """Stands where timm asks whether a layer is frozen; none is, and none can be made."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError("torchvision is missing or broken here, so timm cannot freeze a BatchNorm with its class")
