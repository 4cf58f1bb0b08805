"""The traced program of a model: ops in order, values with shape and dtype, module calls.

Plain data: no tensors are kept, and ``Graph.to_json`` writes all of it. An op's arguments
hold ``Ref`` where a tensor stood. In-place writes and views are already resolved: every
value is written once, and an ``alias`` op joins what a stale view sees.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

__all__ = ["ALIAS", "OPAQUE", "Call", "Graph", "Op", "Ref", "Source", "Value", "ValueKind", "refs"]

OPAQUE = "normwise.opaque"  # a module whose output was computed outside torch, joined to its inputs
ALIAS = "normwise.alias"  # joins an old value with the writes made through other views of its storage

# libraries whose op names mean what torch's do
_OURS = frozenset({"aten", "prims", "higher_order", "normwise"})


class ValueKind(StrEnum):
    """Where a value comes from."""

    OP = "op"
    PARAM = "param"
    BUFFER = "buffer"
    CONST = "const"  # a tensor that no traced op produced
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor argument: the id of the value."""

    value: int


@dataclass(frozen=True, slots=True)
class Source:
    """The line of user code that ran an op."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(slots=True)
class Value:
    """One tensor of the run."""

    id: int
    producer: int  # op id, -1 for parameters, buffers, constants and inputs
    shape: tuple[int, ...]
    dtype: str  # "float32"
    kind: ValueKind
    names: tuple[str, ...] = ()  # paths of a parameter or buffer; several where it is tied
    scalar: float | None = None  # the number in a one-element constant, parameter or buffer, where it can be read
    uses: list[int] = field(default_factory=list)  # ids of the ops that read it

    @property
    def floating(self) -> bool:
        """Whether it holds real or complex floating-point numbers."""
        return "float" in self.dtype or "complex" in self.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        n = 1
        for size in self.shape:
            n *= size
        return n


@dataclass(slots=True)
class Op:
    """One operation. An op that returned one of its own arguments (a no-op cast) has no outputs."""

    id: int
    name: str  # "aten.add"
    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]  # value ids in order of appearance
    outputs: tuple[int, ...]
    call: int
    source: Source | None

    @property
    def short(self) -> str:
        """The name with the in-place marker stripped: "add" for aten.add_; a foreign op keeps its namespace."""
        namespace, name = self.name.split(".", 1)
        # mylib.layer_norm has arguments of its own: it must not be read as torch's
        return (name if namespace in _OURS else self.name).removesuffix("_")

    @property
    def namespace(self) -> str:
        """The op's library: "aten", or that of a custom op."""
        return self.name.split(".", 1)[0]


@dataclass(slots=True)
class Call:
    """One call of one module. A shared module has several calls."""

    id: int
    path: str
    ordinal: int  # how many calls of the same module came before
    class_name: str  # for display only
    parent: int
    leaf: bool  # the module has no children
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(slots=True)
class Graph:
    """A model's dataflow for one call."""

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    modules: dict[str, str] = field(default_factory=dict)  # every registered path -> class name (display only)
    mode: str = "inference"  # or "no_grad", where composite ops arrive decomposed
    fake: bool = False

    def producer(self, value: int) -> Op | None:
        """Return the op that made a value, or None."""
        op = self.values[value].producer
        return None if op < 0 else self.ops[op]

    def consumers(self, value: int) -> Iterator[Op]:
        """Yield the ops that read a value and made something of it (no-op casts did not)."""
        for use in self.values[value].uses:
            if self.ops[use].outputs:
                yield self.ops[use]

    def ancestors(self, call: int) -> Iterator[Call]:
        """Yield a call and those around it, innermost first."""
        while call >= 0:
            yield self.calls[call]
            call = self.calls[call].parent

    def path(self, op: Op) -> str:
        """Return the path of the innermost module whose call holds the op."""
        return self.calls[op.call].path

    def to_json(self) -> str:
        """Return the graph as JSON."""
        return json.dumps(
            {
                "values": [_fields(v) for v in self.values],
                "ops": [_fields(o) for o in self.ops],
                "calls": [_fields(c) for c in self.calls],
                "outputs": list(self.outputs),
                "modules": self.modules,
                "mode": self.mode,
                "fake": self.fake,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Graph:
        """Rebuild a graph written by ``to_json``."""
        data = json.loads(text)
        return cls(
            values=[Value(**_tuples(v)) for v in data["values"]],
            ops=[Op(**_tuples(o)) for o in data["ops"]],
            calls=[Call(**_tuples(c)) for c in data["calls"]],
            outputs=tuple(data["outputs"]),
            modules=data["modules"],
            mode=data["mode"],
            fake=data["fake"],
        )


def refs(argument: Any) -> Iterator[int]:
    """Yield the value ids inside an argument, in order."""
    if isinstance(argument, Ref):
        yield argument.value
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from refs(item)


_TAGGED = (torch.dtype, torch.layout, torch.memory_format)


def _fields(record: Any) -> dict[str, Any]:
    return {name: _plain(getattr(record, name)) for name in record.__slots__}


def _plain(item: Any) -> Any:
    if isinstance(item, Ref):
        return {"$ref": item.value}
    if isinstance(item, Source):
        return {"$source": [item.file, item.line, item.function]}
    if isinstance(item, torch.device):
        return {"$device": str(item)}
    if isinstance(item, _TAGGED):
        return {"$torch": str(item)}
    if isinstance(item, complex):
        return {"$complex": [item.real, item.imag]}
    if isinstance(item, dict):
        return {str(k): _plain(v) for k, v in item.items()}
    if isinstance(item, (list, tuple)):
        return [_plain(i) for i in item]
    return item if isinstance(item, (int, float, str, bool)) or item is None else {"$repr": repr(item)}


def _revive(item: Any) -> Any:
    if isinstance(item, list):
        return tuple(_revive(i) for i in item)
    if isinstance(item, dict):
        if "$ref" in item:
            return Ref(item["$ref"])
        if "$source" in item:
            return Source(*item["$source"])
        if "$device" in item:
            return torch.device(item["$device"])
        if "$torch" in item:
            return getattr(torch, item["$torch"].removeprefix("torch."))
        if "$complex" in item:
            return complex(*item["$complex"])
        return {k: _revive(v) for k, v in item.items()}
    return item


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    revived = {k: _revive(v) for k, v in record.items()}
    if "uses" in revived:
        revived["uses"] = list(revived["uses"])
        revived["kind"] = ValueKind(revived["kind"])
    return revived
