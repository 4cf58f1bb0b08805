"""Which module and which line of user code runs an op."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from normwise.graph.data import Call, Source
from normwise.rendering.sources import named

__all__ = ["CallStack", "SourceFinder"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
# what runs the tracer; our own layers and models are user code like anybody's
_MACHINERY = tuple(os.path.join(_PACKAGE, name) for name in ("graph", "facts", "checkup", "targets", "cli"))
_TRACER = os.path.join(_PACKAGE, "graph", "trace.py")  # calls the model


class CallStack:
    """Follows module calls with torch's global hooks; keyed by call, since modules may be shared."""

    def __init__(self, model: nn.Module) -> None:
        self.paths = {id(m): path for path, m in model.named_modules()}
        self.calls: list[Call] = [
            Call(id=0, path="", ordinal=0, class_name=type(model).__name__, parent=-1, leaf=False)
        ]
        self.current = 0
        self.raised: str | None = None  # path of the innermost module that an exception is leaving
        self._seen: dict[str, int] = {}

    @contextmanager
    def following(
        self, tensors: Callable[[Any], tuple[int, ...]], left: Callable[[Call, Any], tuple[int, ...]]
    ) -> Iterator[None]:
        """Record calls while the block runs.

        Args:
            tensors: gives the value ids inside an argument.
            left: called with a finished call and its output; returns the output's value ids.
        """

        def enter(module: nn.Module, args: Any) -> None:
            path = self.paths.get(id(module))
            if path is None or path == "":
                return
            self.raised = None
            ordinal = self._seen.get(path, -1) + 1
            self._seen[path] = ordinal
            leaf = next(module.children(), None) is None
            call = Call(len(self.calls), path, ordinal, type(module).__name__, self.current, leaf)
            self.calls.append(call)
            self.current = call.id

        def leave(module: nn.Module, args: Any, *rest: Any) -> None:
            call = self.calls[self.current]
            if self.paths.get(id(module)) != call.path or call.id == 0:
                return
            if len(rest) == 2:
                kwargs, output = rest
                call.inputs = tensors((args, kwargs))
                call.outputs = left(call, output)
            elif self.raised is None:  # torch leaves out the keyword arguments where the forward raised
                self.raised = call.path
            self.current = call.parent

        handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, with_kwargs=True, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
                hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch 2.13 leaves this entry behind


class SourceFinder:
    """Finds the innermost frame of the model outside torch; what called the tracer is none of the model's."""

    def __init__(self) -> None:
        self._files: dict[CodeType, str | None] = {}  # as a report names them; None: not the user's
        self._sources: dict[tuple[CodeType, int], Source] = {}

    def __call__(self) -> Source | None:
        """Return the line that called the tracer's caller."""
        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code not in self._files:
                name = code.co_filename
                user = not name.startswith((_TORCH, *_MACHINERY, "<")) and "importlib" not in name
                self._files[code] = named(name) if user else None
            if code.co_filename == _TRACER:
                return None
            if (file := self._files[code]) is not None:
                key = (code, frame.f_lineno)
                if key not in self._sources:
                    self._sources[key] = Source(file, frame.f_lineno, code.co_name)
                return self._sources[key]
            frame = frame.f_back
        return None
