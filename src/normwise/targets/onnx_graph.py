"""Reads the graph of an ONNX model into a program of torch functions.

Constants of one element become numbers where the code of a model would write one, so that an eps is an eps. Weights
keep the names of the file; a node lies in the module that its metadata, its name or its first weight tells.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError
from onnx import numpy_helper
from torch import Tensor, nn

from normwise.errors import TargetError
from normwise.rendering import clean
from normwise.targets.onnx_ops import DTYPES, OPERATORS, TAKES_NUMBERS, Node
from normwise.targets.program import Name, Program, Step, parents, safe_path

__all__ = ["Input", "Source", "read_program"]

_DOMAINS = ("", "ai.onnx", "com.microsoft")
_NEWEST = 26  # of the operator set; onnx 1.23 knows no later one
_SCOPES = "pkg.torch.onnx.name_scopes"  # written by torch.onnx.export(dynamo=True)
_STATISTICS = {"BatchNormalization": (3, 4)}  # inputs that are buffers in torch
_MOST_NODES = 200_000
_MOST_DRAWN = 2**28  # random numbers in all for weights that are not there: 1 GB


@dataclass(frozen=True, slots=True)
class Input:
    """One input as the file declares it; a size is a number, a name, or None."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int | str | None, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """What was read: the program, its inputs, and how far an integer input may reach."""

    program: Program
    inputs: tuple[Input, ...]
    below: Mapping[str, int]
    notes: tuple[str, ...]
    drawn: bool  # weights were not there and are random


def read_program(path: Path) -> Source:
    """Read a file.

    Raises:
        TargetError: no ONNX model, or one with operators, types or sizes that are not supported.
    """
    return _Reader(_parsed(path), path).source()


def _parsed(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except (DecodeError, ValueError, TypeError, UnicodeDecodeError) as error:
        raise TargetError("this is no ONNX model; export it again, or check the file in Netron") from error
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        raise TargetError("this is no ONNX model: it holds no graph")
    if len(model.graph.node) > _MOST_NODES:
        raise TargetError(f"the graph has {len(model.graph.node):,} nodes, {_MOST_NODES:,} are allowed here")
    return model


class _Reader:
    def __init__(self, model: onnx.ModelProto, path: Path) -> None:
        self.graph, self.folder = model.graph, path.parent
        self.opset = max((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), default=1)
        if self.opset > _NEWEST:
            raise TargetError(f"not supported: operator set {self.opset}; export with opset_version={_NEWEST} or lower")
        self.functions = {(item.domain, item.name) for item in model.functions}
        self.constants: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        self.drawn, self.numbers = 0, 0
        self.outside: dict[tuple[str, int, int], bytearray] = {}  # what was read of files beside the model
        self.taken = Counter[str]()  # how many bytes of each
        self.scopes: set[str] = set()

    def source(self) -> Source:
        statistics = {
            node.input[i] for node in self.graph.node for i in _STATISTICS.get(node.op_type, ()) if i < len(node.input)
        }  # fmt: skip
        absent = [each for each in self.graph.initializer if _is_outside(each) and not self._place(each).is_file()]
        if (numbers := sum(math.prod(each.dims) for each in absent)) > _MOST_DRAWN:
            raise TargetError(f"{len(absent):,} weights, {numbers:,} numbers, lie in files that are not there")
        for stored in self.graph.initializer:
            self._take(stored.name, self._tensor(stored), weight=stored.name not in statistics)
        self.scopes = parents(self.tensors)
        inputs = tuple(_inputs(self.graph, {*self.constants, *self.tensors}))
        steps = list(self._steps())
        program = Program(
            steps,
            tensors=self.tensors,
            paths={name: safe_path(name) or "tensor" for name in self.tensors},
            inputs=[item.name for item in inputs],
            outputs=[item.name for item in self.graph.output],
        )
        note = f"{self.drawn} weights lie in a file that is not there: random ones were drawn"
        return Source(program, inputs, self._below(steps), (note,) if self.drawn else (), bool(self.drawn))

    def _take(self, name: str, value: Tensor, *, weight: bool) -> None:
        """Keep a constant: as a parameter or a buffer where it holds numbers of the model, else by itself."""
        if name in self.constants or name in self.tensors:
            raise TargetError(f"{clean(name)[:80]!r} is stored twice")
        if value.is_floating_point() and value.numel() > 1:
            self.tensors[name] = nn.Parameter(value) if weight else value
        else:
            self.constants[name] = value

    def _steps(self) -> Iterator[Step]:
        for index, node in enumerate(self.graph.node):
            label = f"node {index} ({clean(node.op_type)[:60]})"
            if (node.domain, node.op_type) in self.functions:
                raise TargetError(f"not supported: {label} is a function of the model; inline it (onnx.inliner)")
            if node.op_type == "Constant" and node.output:
                self._take(node.output[0], self._constant(node, label), weight=False)
                continue
            if node.op_type not in OPERATORS or node.domain not in _DOMAINS:
                domain = f" of the domain {clean(node.domain)[:60]}" if node.domain else ""
                raise TargetError(f"not supported: {label}{domain}, operator set {self.opset}")
            yield self._step(node, label)

    def _step(self, node: onnx.NodeProto, label: str) -> Step:
        attributes = {item.name: self._attribute(item) for item in node.attribute}
        given = Node(kind=node.op_type, opset=self.opset, attributes=attributes, outputs=len(node.output))
        plain = node.op_type in TAKES_NUMBERS and not all(name in self.constants for name in node.input)
        args = tuple(self._argument(name, number=plain) for name in node.input)
        while args and args[-1] is None:
            args = args[:-1]
        function = partial(OPERATORS[node.op_type], given)
        return Step(function=function, args=args, outputs=tuple(node.output), path=self._path(node), label=label)

    def _argument(self, name: str, *, number: bool) -> Any:
        if not name:
            return None
        if name not in self.constants:
            return Name(name)
        value = self.constants[name]
        if number and value.numel() == 1 and (value.ndim == 0 or value.is_floating_point()):
            return _number(value)
        return value

    def _path(self, node: onnx.NodeProto) -> str:
        for item in node.metadata_props:
            if item.key == _SCOPES:
                scopes = [scope for scope in re.findall(r"'([^']*)'", item.value[:8192])[:-1] if scope]
                return safe_path(scopes[-1]) if scopes else ""
        if "/" in node.name:  # /encoder/layer.0/norm/ReduceMean, written by the exporter over TorchScript
            return self._slashed(node.name[:4096].strip("/").split("/")[:-1])
        weight = next((name for name in node.input if name in self.tensors and "." in name), "")
        return safe_path(weight.rpartition(".")[0])

    def _slashed(self, parts: list[str]) -> str:
        """Return the path: that exporter writes the child 0 of a Sequential ``down`` as ``down/down.0``."""
        pairs = zip(parts, [*parts[1:], ""], strict=False)
        short = ".".join(part for part, after in pairs if not after.startswith(f"{part}."))
        long = ".".join(parts)
        return safe_path(long if long in self.scopes and short not in self.scopes else short)

    def _attribute(self, item: onnx.AttributeProto) -> Any:
        if item.type == onnx.AttributeProto.TENSOR:
            return self._tensor(item.t)
        if item.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
            raise TargetError(f"not supported: the attribute {clean(item.name)[:60]!r} holds a graph (If, Loop, Scan)")
        value = onnx.helper.get_attribute_value(item)
        if item.type == onnx.AttributeProto.FLOAT:
            return float(str(np.float32(value)))
        return value if isinstance(value, int | float | str | bytes) else list(value)

    def _constant(self, node: onnx.NodeProto, label: str) -> Tensor:
        for item in node.attribute:
            value = self._attribute(item)
            if isinstance(value, Tensor):
                return value
            if item.name in ("value_float", "value_floats"):
                return torch.tensor(value, dtype=torch.float32)
            if item.name in ("value_int", "value_ints"):
                return torch.tensor(value, dtype=torch.int64)
        raise TargetError(f"not supported: {label} without a value of numbers")

    def _tensor(self, stored: onnx.TensorProto) -> Tensor:
        dtype = DTYPES.get(stored.data_type)
        if dtype is None:
            raise TargetError(f"not supported: {clean(stored.name)[:80]!r} has the type {stored.data_type} of ONNX")
        sizes = [int(size) for size in stored.dims]
        count = int(np.prod(sizes, dtype=object)) if sizes else 1
        if any(size < 0 for size in sizes) or stored.HasField("segment"):
            raise TargetError(f"{clean(stored.name)[:80]!r} has no sizes that can be")
        if _is_outside(stored):
            return self._external(stored, sizes, count, dtype)
        held = len(stored.raw_data) // dtype.itemsize or sum(
            len(getattr(stored, name)) for name in ("float_data", "int32_data", "int64_data", "double_data")
        )
        if held != count:
            raise TargetError(f"{clean(stored.name)[:80]!r} holds {held:,} numbers, its sizes make it {count:,}")
        if dtype is torch.bfloat16 and stored.raw_data:
            return torch.frombuffer(bytearray(stored.raw_data), dtype=dtype).reshape(sizes)
        return torch.from_numpy(np.array(numpy_helper.to_array(stored))).to(dtype).reshape(sizes)

    def _external(self, stored: onnx.TensorProto, sizes: list[int], count: int, dtype: torch.dtype) -> Tensor:
        """Return a weight that lies beside the file; a random one where that file is not there."""
        entry, place = _entry(stored), self._place(stored)
        offset, length = int(entry.get("offset", 0)), count * dtype.itemsize
        if not place.is_file():
            self.drawn, self.numbers = self.drawn + 1, self.numbers + count
            if self.numbers > _MOST_DRAWN or not dtype.is_floating_point:
                raise TargetError(f"{clean(stored.name)[:80]!r} lies in a file that is not there")
            return torch.randn(sizes).mul_(0.02).to(dtype)
        held = place.stat().st_size
        if offset < 0 or int(entry.get("length", length)) != length or offset + length > held:
            raise TargetError(f"{place.name} is too short for {clean(stored.name)[:80]!r}")
        if not count:
            return torch.empty(sizes, dtype=dtype)
        key = (place.name, offset, length)
        if key not in self.outside:
            self.taken[place.name] += length
            if self.taken[place.name] > held:
                raise TargetError(f"{clean(stored.name)[:80]!r} overlaps other weights in {place.name}")
            with place.open("rb") as file:
                file.seek(offset)
                self.outside[key] = bytearray(file.read(length))
        return torch.frombuffer(self.outside[key], dtype=dtype).reshape(sizes)

    def _place(self, stored: onnx.TensorProto) -> Path:
        location = _entry(stored).get("location", "")
        place = self.folder / location
        if not location or Path(location).name != location or place.is_symlink():
            raise TargetError("weights are kept outside the folder of the file, where nothing is read")
        return place

    def _below(self, steps: list[Step]) -> dict[str, int]:
        """Return for every value that picks rows of a table how many rows there are."""
        found: dict[str, int] = {}
        for step in steps:
            if _kind(step) == "Gather" and all(isinstance(arg, Name) for arg in step.args[:2]):
                table, index = step.args[0].text, step.args[1].text
                rows = len(self.tensors[table]) if table in self.tensors else 2**31
                found[index] = min(found.get(index, rows), rows)
        for step in reversed(steps):  # through what only changes type or shape
            if _kind(step) in ("Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity"):
                for output in step.outputs:
                    if output in found and step.args and isinstance(step.args[0], Name):
                        found.setdefault(step.args[0].text, found[output])
        return found


def _is_outside(stored: onnx.TensorProto) -> bool:
    return stored.data_location == onnx.TensorProto.EXTERNAL


def _entry(stored: onnx.TensorProto) -> dict[str, str]:
    return {item.key: item.value for item in stored.external_data}


def _kind(step: Step) -> str:
    return step.function.args[0].kind  # pyright: ignore[reportFunctionMemberAccess]


def _number(value: Tensor) -> int | float | bool:
    """Return a constant as a person would have written it: 1e-5, not the nearest float32."""
    if value.dtype in (torch.float32, torch.float16):
        return float(str(value.reshape(()).numpy()))
    return value.item()


def _inputs(graph: onnx.GraphProto, stored: set[str]) -> Iterator[Input]:
    for item in graph.input:
        if item.name in stored:
            continue
        kind = item.type.tensor_type
        if not item.type.HasField("tensor_type") or kind.elem_type not in DTYPES:
            raise TargetError(f"not supported: the input {clean(item.name)[:80]!r} is no tensor of numbers")
        sizes = tuple(
            size.dim_value if size.HasField("dim_value") and size.dim_value > 0 else size.dim_param or None
            for size in kind.shape.dim
        )
        yield Input(item.name, DTYPES[kind.elem_type], sizes)
