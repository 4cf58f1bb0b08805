"""Reads the graph of an exported program into a program of ATen operators.

Sizes are computed again from the inputs, so the expressions of dynamic shapes in the file (text, which torch hands to
``eval``) are never looked at.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from normwise.errors import TargetError
from normwise.rendering import clean
from normwise.targets.program import MOST_ELEMENTS, Name, Program, Step, safe_path
from normwise.targets.pt2_archive import DTYPES, Archive, whole

__all__ = ["Found", "read_program"]

_ATEN = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")
_PYTHON = {
    f"{module}.{name}": getattr(operator, name)
    for module in ("_operator", "operator")
    for name in (
        "add",
        "sub",
        "mul",
        "floordiv",
        "truediv",
        "mod",
        "neg",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "getitem",
    )
}
# Operators whose text argument is a word such as "tanh" or "floor"; of others it may name a file (aten::from_file).
_WORDS = frozenset(
    ("gelu", "div", "div_", "einsum", "pad", "scatter_reduce", "index_reduce", "searchsorted", "meshgrid")
)
_LAYOUTS = {1: torch.sparse_coo, 7: torch.strided}
_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format}
_MOST_NODES = 200_000


@dataclass(slots=True)
class Found:
    """A program, and what its inputs look like."""

    program: Program
    names: list[str]  # of the inputs
    described: dict[str, dict[str, Any]]  # sizes and types of values
    examples: Any
    given: bool = False

    def inputs(self) -> tuple[tuple[Any, ...], str]:
        """Return the example inputs of the file, or some of the sizes it was exported with, and the note about them."""
        leaves = [leaf for leaf in pytree.tree_leaves(self.examples) if isinstance(leaf, Tensor)]
        small = all(leaf.numel() <= MOST_ELEMENTS for leaf in leaves)
        self.given = bool(self.names) and len(leaves) == len(self.names) and small
        if self.given:
            return tuple(leaf.detach() for leaf in leaves), "with the example inputs of the file"
        generator = torch.Generator().manual_seed(0)
        made = tuple(self._made(self.described[name], generator) for name in self.names)
        shapes = ", ".join("x".join(map(str, value.shape)) for value in made)
        return made, f"inputs generated with the sizes of the export ({shapes or 'it takes none'})"

    def _made(self, meta: dict[str, Any], generator: torch.Generator) -> Tensor:
        dtype, sizes = DTYPES[meta["dtype"]], [whole(size) for size in meta["sizes"]]
        if (count := math.prod(sizes)) > MOST_ELEMENTS:
            raise TargetError(f"an input has {count:,} elements, more than the {MOST_ELEMENTS:,} allowed here")
        if dtype.is_floating_point:
            return torch.randn(sizes, generator=generator).to(dtype)
        return torch.ones(sizes, dtype=dtype) if dtype is torch.bool else torch.zeros(sizes, dtype=dtype)


def read_program(archive: Archive) -> Found:
    """Read the program of an archive.

    Raises:
        TargetError: something in it is not of the schema, or no operator of ATen.
    """
    module = archive.json(f"models/{archive.model}.json")["graph_module"]
    graph, signature = module["graph"], module["signature"]
    if len(graph["nodes"]) > _MOST_NODES:
        raise TargetError(f"the graph has {len(graph['nodes']):,} nodes, {_MOST_NODES:,} are allowed here")
    stored = {"weights": archive.tensors("weights"), "constants": archive.tensors("constants")}
    inputs: list[str] = []
    tensors: dict[str, Tensor] = {}
    paths: dict[str, str] = {}
    for spec in signature["input_specs"]:
        _take(spec, stored, inputs, tensors, paths)
    outputs = [
        item["user_output"]["arg"]["as_tensor"]["name"] for item in signature["output_specs"]
        if "as_tensor" in (item.get("user_output") or {}).get("arg", {})
    ]  # fmt: skip
    steps = [step for index, node in enumerate(graph["nodes"]) for step in _steps(index, node)]
    program = Program(steps, tensors=tensors, paths=paths, inputs=inputs, outputs=list(dict.fromkeys(outputs)))
    return Found(program, inputs, graph["tensor_values"], archive.examples())


def _take(
    spec: dict[str, Any], stored: dict[str, dict[str, Tensor]], inputs: list[str], tensors: dict[str, Tensor],
    paths: dict[str, str],
) -> None:  # fmt: skip
    ((kind, entry),) = spec.items()
    if kind == "user_input":
        if "as_tensor" in entry["arg"]:
            inputs.append(entry["arg"]["as_tensor"]["name"])
        elif set(entry["arg"]) & {"as_sym_int", "as_custom_obj", "as_graph"}:
            raise TargetError("not supported: an input that is no tensor")
        return
    if kind not in ("parameter", "buffer", "tensor_constant"):
        raise TargetError(f"not supported: an input of the kind {clean(kind)[:60]!r}")
    name, key = entry["arg"]["name"], entry[f"{kind}_name"]
    value = stored["weights"].get(key, stored["constants"].get(key))
    if value is None:
        raise TargetError(f"{clean(key)[:80]!r} has no value in the archive")
    tensors[name], paths[name] = value, safe_path(key) or "tensor"


def _steps(index: int, node: dict[str, Any]) -> Iterator[Step]:
    target = node["target"]
    label = f"node {index} ({clean(target)[:80]})"
    if target.startswith("torch.ops.aten._assert") or target == "torch.ops.aten.sym_constrain_range_for_size.default":
        return  # checks of the export: they compute nothing
    function = _function(target, label)
    args, kwargs = [], {}
    for item in node["inputs"]:
        value = _value(item["arg"], label)
        if item.get("kind") == 2:  # by name
            kwargs[item["name"]] = value
        else:
            args.append(value)
    outputs = tuple(name for item in node["outputs"] for name in _outputs(item, label))
    yield Step(
        function=function, args=tuple(args), kwargs=kwargs, outputs=outputs, label=label, path=_path(node),
        sketch=partial(function, device=torch.device("meta")) if _takes_device(function) else None,
    )  # fmt: skip


def _function(target: str, label: str) -> Any:
    if target in _PYTHON:
        return _PYTHON[target]
    match = _ATEN.fullmatch(target)
    name = f"aten::{match[1]}" if match else ""
    overload = "" if not match or match[2] == "default" else match[2]
    known = match and torch._C._dispatch_has_kernel(f"{name}.{overload}" if overload else name)
    if not match or not known:
        raise TargetError(f"not supported: {label}; only operators of ATen are run")
    function = getattr(getattr(torch.ops.aten, match[1]), match[2])
    text = any(str(argument.type) in ("str", "Optional[str]") for argument in function._schema.arguments)
    if text and match[1] not in _WORDS:
        raise TargetError(f"not supported: {label}, an operator that takes text")
    return function


def _takes_device(function: Any) -> bool:
    schema = getattr(function, "_schema", None)
    return schema is not None and any(argument.name == "device" for argument in schema.arguments)


def _value(arg: dict[str, Any], label: str) -> Any:
    ((kind, value),) = arg.items()
    simple = _SIMPLE.get(kind)
    if simple is None:
        raise TargetError(f"not supported: {label} with an argument of the kind {clean(kind)[:60]!r}")
    return simple(value)


def _named(value: dict[str, Any]) -> Name:
    return Name(value["name"])


def _symbol(value: dict[str, Any]) -> Any:
    """Return a size: the value of that name, or a number."""
    ((kind, held),) = value.items()
    return Name(held) if kind == "as_name" else held


def _optional(value: dict[str, Any]) -> Any:
    return Name(value["as_tensor"]["name"]) if "as_tensor" in value else None


_SIMPLE: dict[str, Any] = {
    "as_none": lambda value: None,
    "as_tensor": _named,
    "as_tensors": lambda value: [_named(item) for item in value],
    "as_optional_tensors": lambda value: [_optional(item) for item in value],
    **dict.fromkeys(("as_int", "as_float", "as_bool", "as_string"), lambda value: value),
    **dict.fromkeys(("as_ints", "as_floats", "as_bools"), list),
    **dict.fromkeys(("as_sym_int", "as_sym_bool", "as_sym_float"), _symbol),
    **dict.fromkeys(("as_sym_ints", "as_sym_floats"), lambda value: [_symbol(item) for item in value]),
    "as_scalar_type": lambda value: DTYPES[value],
    "as_device": lambda value: torch.device("cpu"),
    "as_layout": lambda value: _LAYOUTS[value],
    "as_memory_format": lambda value: _FORMATS[value],
}


def _outputs(item: dict[str, Any], label: str) -> Iterator[str]:
    ((kind, value),) = item.items()
    if kind == "as_tensor":
        yield value["name"]
    elif kind == "as_tensors":
        yield from (entry["name"] for entry in value)
    elif kind in ("as_sym_int", "as_sym_bool", "as_sym_float"):
        yield value["as_name"]
    elif kind == "as_none":
        yield ""
    else:
        raise TargetError(f"not supported: {label} with an output of the kind {clean(kind)[:60]!r}")


def _path(node: dict[str, Any]) -> str:
    """Return the path of the innermost module: ``key,path,class`` of each, from the root inwards."""
    last = str((node.get("metadata") or {}).get("nn_module_stack", "")).rpartition(";")[2].split(",")
    path = last[1] if len(last) > 1 else ""
    path = re.sub(r"^L\['self'\]\.?", "", path.partition("@")[0])  # "@1": called again
    return safe_path(re.sub(r"(?:\._modules)?\['?(\w+)'?\]", r".\1", path))
