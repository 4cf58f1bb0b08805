"""The map is a property of the model: not of its mode, inputs, dtype, or of what anything is called."""

from __future__ import annotations

import contextlib
import random
import string
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import normwise as nw

from .corpus_blocks import BLOCKS
from .tiny_families import NAMES, REFERENCE, VARIANTS, Map, Variant, build, fingerprint

pytest.importorskip("transformers")


@cache
def _reference(family: str) -> Map:
    model, inputs = build(family)
    return fingerprint(nw.map(model, inputs))


@pytest.mark.parametrize("family", NAMES)
def test_the_reference_map_is_complete(family: str) -> None:
    (stacks, *_), norms = _reference(family)
    assert len(stacks) == (2 if family == "t5" else 1)
    assert len(norms) >= 7
    assert all(form is not None and place != "unknown" for _, place, _, _, _, form in norms)


@pytest.mark.parametrize(
    ("family", "variant"),
    [(f, v) for f in NAMES for v in VARIANTS if v.suits(f)],
    ids=lambda value: value.name.replace(" ", "-") if isinstance(value, Variant) else value,
)
def test_the_map_is_the_same(family: str, variant: Variant) -> None:
    model, inputs = build(family, variant)
    placement, norms = fingerprint(nw.map(model, inputs))
    assert placement == _reference(family)[0]
    assert norms == _reference(family)[1]


def test_mapping_twice_says_the_same() -> None:
    model, inputs = build("gemma2")
    assert fingerprint(nw.map(model, inputs)) == fingerprint(nw.map(model, inputs))


@pytest.mark.parametrize("family", NAMES)
def test_names_are_not_consulted(family: str) -> None:
    model, inputs = build(family, REFERENCE)
    with scrambled(model) as original:
        assert "encoder" not in dict(model.named_modules())
        found = fingerprint(nw.map(model, inputs), path=original)
    assert found[0] == _reference(family)[0]
    assert _as_multiset(found[1]) == _as_multiset(_reference(family)[1])


SCRAMBLED = ("pre_by_hand", "sandwich", "res_post", "post_deep_norm", "pre_sub_layer_norm", "resnet_v2", "parallel")


@pytest.mark.parametrize("name", SCRAMBLED)
def test_names_are_not_consulted_in_hand_written_models(name: str) -> None:
    case = next(case for case in BLOCKS if case.name == name)
    torch.manual_seed(0)
    model = case.build().eval()
    wanted = fingerprint(nw.map(model, case.inputs()))
    with scrambled(model) as original:
        found = fingerprint(nw.map(model, case.inputs()), path=original)
    assert found[0] == wanted[0]
    assert _as_multiset(found[1]) == _as_multiset(wanted[1])


@pytest.mark.parametrize("family", NAMES)
def test_scrambling_names_leaves_the_outputs_alone(family: str) -> None:
    model, inputs = build(family)
    with torch.no_grad():
        wanted = model(**inputs)[0]
        before = [path for path, _ in model.named_modules()]
        with scrambled(model):
            torch.testing.assert_close(model(**inputs)[0], wanted, rtol=0, atol=0)
            assert not {type(m).__name__ for m in model.modules()} & {"LayerNorm", "BertLayer", "LlamaRMSNorm"}
    assert [path for path, _ in model.named_modules()] == before
    assert nn.LayerNorm.__name__ == "LayerNorm"


@contextlib.contextmanager
def scrambled(model: nn.Module) -> Iterator[Callable[[str], str]]:
    """Give random names to every class, submodule and parameter (containers keep their numbers); undo on leaving.

    Forwards still find what they ask for by its old name. Yields the map from new paths to old.
    """
    names = _Names()
    modules = list(model.modules())
    old_paths = [path for path, _ in model.named_modules()]
    undo: list[Callable[[], None]] = []
    try:
        for module in modules:
            undo.append(_rename_members(module, names))
        for cls in {c for module in modules for c in type(module).__mro__} - {object, nn.Module}:
            undo.append(_rename_class(cls, names))
        undo.append(_rename_config(model, names))
        # a tied submodule is visited once, under its first path, before and after
        back = dict(zip([path for path, _ in model.named_modules()], old_paths, strict=True))
        yield lambda path: back[path.partition("#")[0]] + "".join(path.partition("#")[1:])
    finally:
        for step in reversed(undo):
            step()


class _Names:
    """Draws names that no other module has, and that say nothing."""

    def __init__(self) -> None:
        self.random = random.Random(7)
        self.used: set[str] = set()

    def draw(self) -> str:
        while (name := "".join(self.random.choices(string.ascii_lowercase, k=9))) in self.used:
            pass
        self.used.add(name)
        return name


def _rename_members(module: nn.Module, names: _Names) -> Callable[[], None]:
    """Rename the entries of a module's tables; a fresh subclass answers to the old names."""
    container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential | nn.ParameterList)
    cls, tables = type(module), () if container else (module._modules, module._parameters)
    saved = [dict(table) for table in tables]
    new = {name: names.draw() for table in tables for name in table}

    def find(self: nn.Module, name: str) -> Any:
        return cls.__getattr__(self, new.get(name, name))

    for table in tables:
        _refill(table, {new[name]: value for name, value in table.items()})
    module.__class__ = type(names.draw(), (cls,), {"__getattr__": find})

    def undo() -> None:
        module.__class__ = cls
        for table, before in zip(tables, saved, strict=True):
            _refill(table, before)

    return undo


def _refill(table: dict[str, Any], content: Mapping[str, Any]) -> None:
    table.clear()
    table.update(content)


def _rename_class(cls: type, names: _Names) -> Callable[[], None]:
    old = cls.__name__, cls.__qualname__
    if not cls.__flags__ & (1 << 9):  # not a heap type: its name is fixed
        return lambda: None
    cls.__name__ = cls.__qualname__ = names.draw()

    def undo() -> None:
        cls.__name__, cls.__qualname__ = old

    return undo


def _rename_config(model: nn.Module, names: _Names) -> Callable[[], None]:
    config = getattr(model, "config", None)
    if config is None:
        return lambda: None
    saved = dict(vars(config))
    vars(config).update(model_type=names.draw(), architectures=[names.draw()])

    def undo() -> None:
        _refill(vars(config), saved)

    return undo


def _as_multiset(norms: list[tuple[Any, ...]]) -> list[str]:
    return sorted(map(repr, norms))
