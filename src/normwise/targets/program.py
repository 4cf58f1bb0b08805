"""A program read from a file (steps over named tensors), as a module that torch runs and that can be traced.

The steps of a file are a flat list; each says which module of the original model it came from. They are nested
again into one ``nn.Module`` for each such path, called once for each run of its steps, so that a map of the program has
the paths of the model. A module gets the values it reads and returns those that are read after it.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normwise.errors import TargetError
from normwise.rendering import clean

__all__ = ["MOST_ELEMENTS", "Name", "Program", "Step", "parents", "safe_path"]

MOST_ELEMENTS = 2**28  # of one value: 1 GB in float32; a file decides the sizes, not its own size
_DEEPEST, _LONGEST = 16, 80  # parts of a path, characters of a part


@dataclass(frozen=True, slots=True)
class Name:
    """Stands in the arguments of a step for the value of that name."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation: a function of tensors and the names of what it returns ("" for what nobody reads)."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    outputs: tuple[str, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""
    label: str = ""  # for messages
    sketch: Callable[..., Any] | None = None  # the function without storage, where meta inputs alone do not make it so

    def names(self) -> Iterator[str]:
        """Yield the names of the values that the step reads."""
        yield from _names((self.args, tuple(self.kwargs.values())))

    def run(self, value: Callable[[str], Any], *, sketch: bool = False) -> tuple[Any, ...]:
        """Return the outputs, given the values by name."""
        args = _filled(self.args, value)
        kwargs = {key: _filled(item, value) for key, item in self.kwargs.items()}
        function = self.function
        if sketch and self.sketch is not None:
            kwargs.pop("device", None)
            function = self.sketch
        try:
            found = function(*args, **kwargs)
        except TypeError as error:  # arguments of another number or kind: no input of the model would help
            raise TargetError(f"{self.label} does not take what the file gives it: {clean(error)[:200]}") from error
        made = tuple(found) if isinstance(found, tuple | list) else (found,)
        if len(made) < len(self.outputs):
            raise TargetError(f"not supported: {self.label} with {len(self.outputs)} outputs")
        return made


def safe_path(text: str) -> str:
    """Return a dotted path of a file made fit for submodules: bounded, letters, digits, "_" and "-" only."""
    parts = [re.sub(r"[^\w-]", "_", part)[:_LONGEST] for part in text[:4096].split(".")]
    return ".".join([part for part in parts if part][:_DEEPEST])


@dataclass(frozen=True, slots=True)
class _Segment:
    """The steps of one call of one module: what it reads, its steps and inner calls, and what is read afterwards."""

    path: str
    reads: tuple[str, ...]
    items: tuple[Any, ...]
    writes: tuple[str, ...]


class _Weights:
    """The tensors of a program by name; an object, so that they are no inputs of a module call."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self.held = held


class _Scope(nn.Module):
    """A module of the original model, of which only the steps are known."""

    def forward(self, run: Callable[..., tuple[Any, ...]], *values: Any) -> tuple[Any, ...]:
        return run(*values)


class Program(nn.Module):
    """The steps of a file over its tensors.

    Args:
        steps: in an order in which every value is there before it is read.
        tensors: parameters and constants by name; parameters are registered at ``paths``.
        paths: the dotted path of a parameter or buffer by its name.
        inputs: names of the arguments of ``forward``.
        outputs: names of what it returns.

    Raises:
        TargetError: a step reads what nothing produces.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        *,
        tensors: Mapping[str, torch.Tensor],
        paths: Mapping[str, str],
        inputs: Sequence[str],
        outputs: Sequence[str],
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.steps = tuple(inputs), tuple(outputs), tuple(steps)
        self._modules_of = {"": "", **self._scopes({step.path for step in steps})}
        self._homes = {name: self._hold(paths.get(name, name), tensor) for name, tensor in tensors.items()}
        self._made, self._used = self._lifetimes()
        self._whole = self._segment(0, len(self.steps), ())
        self.eval()

    def forward(self, *args: Any) -> Any:
        """Run the steps on the inputs, in their order, and return the outputs."""
        weights = _Weights({name: _held(self, *home) for name, home in self._homes.items()})
        found = self._run(self._whole, weights, args)
        return found[0] if len(found) == 1 else found

    def rehearse(self, *args: Any) -> None:
        """Run the steps once while looking at the sizes of what they make.

        Raises:
            TargetError: a value of more than ``MOST_ELEMENTS`` elements.
        """
        values: dict[str, Any] = {name: _held(self, *home) for name, home in self._homes.items()}
        values.update(zip(self.inputs, args, strict=True))
        for index, step in enumerate(self.steps):
            _refuse_large(step, values.__getitem__)
            values.update(zip(step.outputs, step.run(values.__getitem__), strict=False))
            for name in [*step.names(), *step.outputs]:
                if self._used.get(name, [index])[-1] <= index and name not in self._homes:
                    values.pop(name, None)

    def _run(self, segment: _Segment, weights: _Weights, args: tuple[Any, ...]) -> tuple[Any, ...]:
        values: dict[str, Any] = {**weights.held, **dict(zip(segment.reads, args, strict=True))}
        for item in segment.items:
            if isinstance(item, Step):
                values.update(zip(item.outputs, item.run(values.__getitem__), strict=False))
            else:
                scope = self.get_submodule(self._modules_of[item.path])
                given = tuple(values[name] for name in item.reads)
                made = scope(lambda *inner, item=item: self._run(item, weights, inner), *given)
                values.update(zip(item.writes, made, strict=True))
        return tuple(values[name] for name in segment.writes)

    def _scopes(self, paths: set[str]) -> dict[str, str]:
        """Make the modules, and return the path each is registered at by the path the steps give."""
        made: dict[str, str] = {}
        for path in sorted(parents(paths) | paths - {""}):
            parent, _, child = path.rpartition(".")
            owner = self.get_submodule(made.get(parent, ""))
            while hasattr(owner, child):  # a method of nn.Module
                child += "_"
            owner.add_module(child, _Scope())
            made[path] = f"{made[parent]}.{child}" if parent else child
        return made

    def _hold(self, path: str, tensor: torch.Tensor) -> tuple[str, str]:
        parent, _, name = path.rpartition(".")
        for known in sorted((parents([parent]) | {parent}) - self._modules_of.keys() - {""}):
            self._modules_of |= self._scope_beside(known)
        owner = self.get_submodule(home := self._modules_of[parent])
        while hasattr(owner, name):
            name += "_"
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(name, tensor)
        else:
            owner.register_buffer(name, tensor)
        return home, name

    def _scope_beside(self, path: str) -> dict[str, str]:
        parent, _, child = path.rpartition(".")
        owner = self.get_submodule(home := self._modules_of[parent])
        while hasattr(owner, child):
            child += "_"
        owner.add_module(child, _Scope())
        return {path: f"{home}.{child}" if home else child}

    def _lifetimes(self) -> tuple[dict[str, int], dict[str, list[int]]]:
        """Return where every value is made, and where it is read."""
        made, used = dict.fromkeys(self.inputs, -1), {}
        for index, step in enumerate(self.steps):
            for name in step.names():
                if name not in made and name not in self._homes:
                    raise TargetError(f"step {index} ({step.label}) reads {name[:80]!r}, which nothing before it makes")
                used.setdefault(name, []).append(index)
            for name in filter(None, step.outputs):
                if name in made or name in self._homes:
                    raise TargetError(f"step {index} ({step.label}) makes {name[:80]!r}, which is there already")
                made[name] = index
        for name in self.outputs:
            if name not in made and name not in self._homes:
                raise TargetError(f"the output {name[:80]!r} is made by no step")
            used.setdefault(name, []).append(len(self.steps))
        return made, used

    def _segment(self, start: int, end: int, path: tuple[str, ...]) -> _Segment:
        items, at = [], start
        while at < end:
            step = self.steps[at]
            inner = tuple(step.path.split(".")) if step.path else ()
            if inner == path:
                items.append(step)
                at += 1
                continue
            prefix, stop = inner[: len(path) + 1], at + 1
            while stop < end and tuple(self.steps[stop].path.split("."))[: len(prefix)] == prefix:
                stop += 1
            items.append(self._segment(at, stop, prefix))
            at = stop
        if not path:
            return _Segment("", self.inputs, tuple(items), self.outputs)
        reads = dict.fromkeys(
            name for step in self.steps[start:end] for name in step.names()
            if name not in self._homes and self._made[name] < start
        )  # fmt: skip
        writes = dict.fromkeys(
            name for step in self.steps[start:end] for name in step.outputs
            if name in self._used and bisect.bisect_left(self._used[name], end) < len(self._used[name])
        )  # fmt: skip
        return _Segment(".".join(path), tuple(reads), tuple(items), tuple(writes))


def _held(model: nn.Module, path: str, name: str) -> torch.Tensor:
    return getattr(model.get_submodule(path), name)


def parents(paths: Iterable[str]) -> set[str]:
    """Return every path above the given ones, without the root's."""
    found: set[str] = set()
    for path in paths:
        while (path := path.rpartition(".")[0]) and path not in found:
            found.add(path)
    return found


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Name):
        yield value.text
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _names(item)


def _filled(value: Any, found: Callable[[str], Any]) -> Any:
    if isinstance(value, Name):
        return found(value.text)
    if isinstance(value, tuple | list):
        return type(value)(_filled(item, found) for item in value)
    return value


def _refuse_large(step: Step, value: Callable[[str], Any]) -> None:
    """Run a step without storage first, and see how much it would make."""

    def bare(name: str) -> Any:
        found = value(name)
        return found.to("meta") if isinstance(found, torch.Tensor) else found

    try:
        made = step.run(bare, sketch=True)
    except Exception:  # its sizes depend on the values of its inputs; such steps look at them themselves
        return
    largest = max((item.numel() for item in made if isinstance(item, torch.Tensor)), default=0)
    if largest > MOST_ELEMENTS:
        raise TargetError(f"{step.label} would make {largest:,} elements, more than the {MOST_ELEMENTS:,} allowed here")
