"""The error for a TARGET that no kind claims: what was given, why it is none, and the nearest that would be."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from normwise.errors import TargetError

__all__ = ["error"]

_PICKLES = (".pkl", ".pickle")
_TYPE = re.compile(r"[a-zA-Z][\w-]*")


def error(text: str, kinds: Mapping[str, ModuleType], claiming: Sequence[ModuleType]) -> TargetError:
    """Return the error to raise for a text that not exactly one kind claims.

    Args:
        text: the TARGET.
        kinds: the kinds in service.
        claiming: those that claim it.
    """
    if claiming:
        names = " and ".join(kind.__name__.rpartition(".")[2] for kind in claiming)
        return TargetError(f"{text} can be read as more than one kind of target ({names}); write it out in full")
    return TargetError(f"{text}: {_reason(text)}\n{_forms(kinds)}")


def _reason(text: str) -> str:
    if text.endswith(_PICKLES):
        return _missing(text) or (
            "a pickle can run any code when it is opened, so normwise never loads one; "
            "give FILE.py:callable that builds the model, or save the tensors as safetensors"
        )
    if Path(text).is_dir():
        return "this folder has no weights (.safetensors, .pt, .pth, .bin, .ckpt) and no config.json"
    if Path(text).name == "config.json" and Path(text).is_file():
        return f"a configuration is checked by its folder; give hf:{Path(text).absolute().parent}"
    if Path(text).is_file():
        return "this file is no Python file; give FILE.py:callable"
    return _guess(text) or _missing(text) or "no kind of target is written like this"


def _missing(text: str) -> str | None:
    looks_like_a_path = "/" in text or "\\" in text or bool(Path(text).suffix)
    return "there is no such file" if looks_like_a_path and not Path(text).exists() else None


def _guess(text: str) -> str | None:
    if not _TYPE.fullmatch(text):
        return None
    types = _transformers_types()
    near = difflib.get_close_matches(text.lower().replace("-", "_"), types, n=1, cutoff=0.75)
    return f"did you mean hf:{near[0]}?" if near else None


def _transformers_types() -> list[str]:
    """Return the model types of transformers without importing it all; none where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return []
    mapping = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    return list(mapping)


def _forms(kinds: Mapping[str, ModuleType]) -> str:
    return "A target is one of: " + ", ".join(getattr(kind, "EXAMPLE", name) for name, kind in kinds.items())
