"""What the attributes of modules hold, so that counters, caches and logs that a run fills can be emptied again."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from normwise.graph.capture import tensors_in

__all__ = ["DICTS", "Contents"]

# dictionaries of a module that the guard keeps itself
DICTS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")

# objects looked into: enough for caches and counters, and a bound on what a data set kept in a module costs
_OBJECTS = 20_000
# elements of a tensor or array that is copied; larger ones are data, not state
_ELEMENTS = 2**22
# libraries whose objects have state of their own that is not a plain ``__dict__``
_FOREIGN = (
    "builtins",
    "torch",
    "numpy",
    "transformers",
    "typing",
    "types",
    "functools",
    "enum",
    "logging",
    "threading",
)


class Contents:
    """The containers, tensors, arrays and plain objects that modules hold outside parameters and buffers.

    Args:
        modules: every module of the model.
        inputs: the arguments of its call; their tensors are left to the tracer, which sees the writes.
    """

    def __init__(self, modules: Iterable[nn.Module], inputs: Any = ()) -> None:
        self._undo: list[Callable[[], object]] = []
        self._containers: list[tuple[Any, Any]] = []  # each with a copy of its items
        self._keep: list[Any] = []  # so that the ids stay taken
        modules = list(modules)
        self._seen = {id(m) for m in modules}
        self._seen |= {id(t) for m in modules for t in (*m._parameters.values(), *m._buffers.values())}
        self._seen |= {id(t) for t in tensors_in(inputs)}
        pending: deque[Any] = deque([inputs])
        for module in modules:
            pending.extend(v for n, v in module.__dict__.items() if type(v) not in _ATOMS and n not in DICTS)
        while pending and len(self._keep) < _OBJECTS:
            pending.extend(self._save(pending.popleft()))

    def restore(self) -> None:
        """Put back what was changed in place."""
        for item, items in self._containers:
            if not _same(item, items):
                item.clear()
                item.extend(items) if isinstance(item, (list, deque)) else item.update(items)
        for undo in self._undo:
            undo()

    def _save(self, item: Any) -> Iterable[Any]:
        """Remember one object and return what it holds."""
        if type(item) in _ATOMS or id(item) in self._seen:
            return ()
        self._seen.add(id(item))
        self._keep.append(item)
        if isinstance(item, (dict, list, set, deque)):
            items = dict(item) if isinstance(item, dict) else list(item)
            self._containers.append((item, items))
            return items.values() if isinstance(items, dict) else items
        if isinstance(item, tuple):
            return item
        if isinstance(item, torch.Tensor):
            self._tensor(item)
            return ()
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(item) is numpy.ndarray:
            self._array(item)
            return ()
        if numpy is not None and isinstance(item, numpy.random.Generator):
            self._undo.append(partial(setattr, item.bit_generator, "state", item.bit_generator.state))
            return ()
        if isinstance(item, (torch.Generator, random.Random)):
            self._generator(item)
            return ()
        return self._object(item)

    def _generator(self, item: torch.Generator | random.Random) -> None:
        if isinstance(item, random.Random):
            self._undo.append(partial(item.setstate, item.getstate()))
        else:
            self._undo.append(partial(item.set_state, item.get_state()))

    def _tensor(self, item: torch.Tensor) -> None:
        if item.device.type == "meta" or type(item) is not torch.Tensor or item.numel() > _ELEMENTS:
            return
        if item.is_inference() or item.layout != torch.strided:
            return
        version, copy = item._version, item.detach().clone()

        def undo() -> None:
            if item._version != version:
                with torch.no_grad():
                    item.detach().copy_(copy)

        self._undo.append(undo)

    def _array(self, item: Any) -> None:
        if item.size > _ELEMENTS or item.dtype == object or not item.flags.writeable:
            return
        copy = item.copy()

        def undo() -> None:
            item[...] = copy

        self._undo.append(undo)

    def _object(self, item: Any) -> Iterable[Any]:
        kind = type(item)
        own = getattr(item, "__dict__", None)
        # a torch optimizer is state; any other object of torch is machinery
        plain = isinstance(item, torch.optim.Optimizer | SimpleNamespace)
        if type(own) is not dict or (kind.__module__.partition(".")[0] in _FOREIGN and not plain):
            return ()
        if isinstance(item, (type, nn.Module, *_VALUES)) or callable(item):
            return ()
        return self._save(own)


def _same(container: Any, items: Any) -> bool:
    """Compare by identity: tensors have no truth value."""
    if not items or len(container) != len(items):
        return len(container) == len(items)
    if isinstance(items, dict):
        return list(container) == list(items) and all(container[k] is items[k] for k in items)
    return all(a is b for a, b in zip(container, items, strict=True))


_VALUES = (str, bytes, int, float, complex)
# by exact type, which is the quicker test
_ATOMS = frozenset((*_VALUES, bool, type(None), torch.dtype, torch.device, torch.Size))
