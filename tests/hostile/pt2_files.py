"""Thirty-odd exported programs, each with one defect: of the archive, of its JSON, or of what that describes."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.case import Case
from tests.hostile.torch_files import Tensor, archive, pickled

__all__ = ["CASES", "good", "with_examples"]

_ONES = struct.pack("<4f", 1, 1, 1, 1)


def _meta(*sizes: int, **more: Any) -> dict[str, Any]:
    strides = [1] * len(sizes)
    for i in range(len(sizes) - 1, 0, -1):
        strides[i - 1] = strides[i] * sizes[i]
    return {
        "dtype": 7, "sizes": [{"as_int": n} for n in sizes], "requires_grad": False, "layout": 7,
        "device": {"type": "cpu", "index": None}, "strides": [{"as_int": n} for n in strides],
        "storage_offset": {"as_int": 0}, **more,
    }  # fmt: skip


def _name(text: str) -> dict[str, Any]:
    return {"as_tensor": {"name": text}}


def _argument(name: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "arg": value, "kind": 1}


def _node(target: str = "torch.ops.aten.layer_norm.default", *inputs: dict[str, Any]) -> dict[str, Any]:
    given = inputs or (
        _argument("input", _name("x")), _argument("normalized_shape", {"as_ints": [4]}), _argument("weight", _name("w"))
    )  # fmt: skip
    return {"target": target, "inputs": list(given), "outputs": [_name("y")], "metadata": {}, "name": "y"}


def _parts() -> dict[str, Any]:
    """Return the members of a sound program: one layer norm."""
    graph = {
        "inputs": [_name("w"), _name("x")], "outputs": [_name("y")], "nodes": [_node()],
        "tensor_values": {"w": _meta(4), "x": _meta(2, 4), "y": _meta(2, 4)},
    }  # fmt: skip
    signature = {
        "input_specs": [
            {"parameter": {"arg": {"name": "w"}, "parameter_name": "norm.weight"}}, {"user_input": {"arg": _name("x")}}
        ],
        "output_specs": [{"user_output": {"arg": _name("y")}}],
    }  # fmt: skip
    weight = {"path_name": "weight_0", "is_param": True, "use_pickle": False, "tensor_meta": _meta(4)}
    return {
        "models/model.json": {"graph_module": {"graph": graph, "signature": signature}},
        "data/weights/model_weights_config.json": {"config": {"norm.weight": weight}},
        "data/constants/model_constants_config.json": {"config": {}},
        "data/weights/weight_0": _ONES,
        "archive_format": b"pt2",
        "byteorder": b"little",
    }


def _zipped(parts: dict[str, Any], packed: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", packed) as zipped:
        for name, held in parts.items():
            data = held if isinstance(held, bytes) else json.dumps(held).encode()
            zipped.writestr(zipfile.ZipInfo(f"archive/{name}"), data, packed)
    return made.getvalue()


def good() -> bytes:
    """Return a sound program."""
    return _zipped(_parts())


_MODEL, _WEIGHTS = "models/model.json", "data/weights/model_weights_config.json"


def _with(**members: Any) -> bytes:
    """Return a program in which members are replaced; None leaves one out."""
    names = {"model": _MODEL, "weights": _WEIGHTS, "numbers": "data/weights/weight_0"}
    parts = _parts() | {names.get(key, key): held for key, held in members.items()}
    return _zipped({name: held for name, held in parts.items() if held is not None})


def _changed(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> bytes:
    """Return a program after a change of its graph module and of the list of its weights."""
    parts = copy.deepcopy(_parts())
    change(parts[_MODEL]["graph_module"], parts[_WEIGHTS]["config"])
    return _zipped(parts)


def _weight(**fields: Any) -> bytes:
    return _changed(lambda module, weights: weights["norm.weight"].update(fields))


def _nodes(*nodes: dict[str, Any]) -> bytes:
    return _changed(lambda module, weights: module["graph"].update(nodes=list(nodes)))


def _input(meta: dict[str, Any]) -> bytes:
    return _changed(lambda module, weights: module["graph"]["tensor_values"].update(x=meta))


def _twice() -> bytes:
    return _with(**{"models/modeL.json": _parts()[_MODEL]}).replace(b"modeL.json", b"model.json")


def _many() -> bytes:
    """5,000 weights in one member of 1 MB, each a number further on: 5 GB, were each read by itself."""

    def change(module: dict[str, Any], weights: dict[str, Any]) -> None:
        for number in range(5_000):
            held = weights["norm.weight"] | {"tensor_meta": _meta(4, storage_offset={"as_int": number})}
            weights[f"w{number}"] = held

    parts = copy.deepcopy(_parts())
    change(parts[_MODEL]["graph_module"], parts[_WEIGHTS]["config"])
    return _zipped(parts | {"data/weights/weight_0": _ONES * 65536})


def with_examples(held: bytes) -> bytes:
    """Return a sound program with a file of example inputs."""
    return _zipped(_parts() | {"data/sample_inputs/model.pt": held})


class _Bytes:
    """What torch unpickles, and what takes as much memory as it says."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (2**30,)


class _System:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch evil",)


def _put(content: Callable[[], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.pt2").write_bytes(content())


_X = _argument("self", _name("x"))
_REFUSED: list[tuple[str, str, Callable[[], bytes]]] = [
    ("empty", "no exported program", lambda: b""),
    ("a page of HTML", "no exported program", lambda: b"<!DOCTYPE html><html>404</html>"),
    ("a pickle", "no exported program", lambda: pickle.dumps({"a": 1})),
    ("cut", "no exported program", lambda: good()[:-30]),
    ("packed members", "packed", lambda: _zipped(_parts(), zipfile.ZIP_DEFLATED)),
    ("a bomb of 300 MB", "packed", lambda: _zipped(_parts() | {"x": b"\0" * 300_000_000}, zipfile.ZIP_DEFLATED)),
    ("two members of one name", "twice", _twice),
    ("no program", "0 programs", lambda: _with(model=None)),
    ("two programs", "2 programs", lambda: _with(**{"models/other.json": {}})),
    ("a program that is no JSON", "JSON", lambda: _with(model=b"{")),
    ("a program that is a list", "TypeError", lambda: _with(model=[])),
    ("a program without a graph", "graph_module", lambda: _with(model={})),
    ("brackets 100,000 deep", "nested", lambda: _with(model=b'{"a":' + b"[" * 100_000)),
    ("JSON of 65 MB", "too large", lambda: _with(model=b'{"a":"' + b"x" * 2**26 + b'"}')),
    ("3,000,000 items", "items", lambda: _with(model=b"[" + b"0," * 3_000_000 + b"0]")),
    ("a name twice", "twice", lambda: _with(model=b'{"a":1,"a":2}')),
    ("no list of weights", "missing", lambda: _with(weights=None)),
    ("a weight that is not there", "missing", lambda: _with(numbers=None)),
    ("a weight in a pickle", "pickle", lambda: _weight(use_pickle=True)),
    ("a weight outside the archive", "missing", lambda: _weight(path_name="../../../etc/passwd")),
    ("an unknown type of numbers", "type", lambda: _weight(tensor_meta=_meta(4, dtype=99))),
    ("a negative size", "fit", lambda: _weight(tensor_meta=_meta(-4))),
    ("a size of 2**62", "size", lambda: _weight(tensor_meta=_meta(2**62))),
    ("a text for a size", "size", lambda: _weight(tensor_meta=_meta(4, sizes=[{"as_int": "4"}]))),
    ("code for a size", "size", lambda: _weight(tensor_meta=_meta(4, sizes=[{"as_expr": {"expr_str": "exit()"}}]))),
    ("sizes of more than it holds", "RuntimeError", lambda: _weight(tensor_meta=_meta(400))),
    ("a stride of 0 over 2**27 numbers", "holds 4", lambda: _weight(tensor_meta=_meta(2**27, strides=[{"as_int": 0}]))),
    ("an offset beyond its end", "RuntimeError", lambda: _weight(tensor_meta=_meta(4, storage_offset={"as_int": 99}))),
    ("15 bytes for 4 numbers", "fit", lambda: _with(numbers=b"\0" * 15)),
    ("a function of the system", "os.system", lambda: _nodes(_node("os.system", _X))),
    ("an operator of another library", "evil", lambda: _nodes(_node("torch.ops.evil.run.default", _X))),
    ("an operator that is not there", "exfiltrate", lambda: _nodes(_node("torch.ops.aten.exfiltrate.default", _X))),
    ("an operator that takes the name of a file", "text", lambda: _nodes(
     _node("torch.ops.aten.from_file.default", _argument("filename", {"as_string": "/etc/passwd"})))),
    ("a graph for an argument", "as_graph", lambda: _nodes(
     _node("torch.ops.aten.relu.default", _argument("self", {"as_graph": {}})))),
    ("an object for an argument", "as_custom_obj", lambda: _nodes(
     _node("torch.ops.aten.relu.default", _argument("self", {"as_custom_obj": {}})))),
    ("a value that nothing makes", "nowhere", lambda: _nodes(
     _node("torch.ops.aten.relu.default", _argument("self", _name("nowhere"))))),
    ("a node that reads what it makes", "'y'", lambda: _nodes(
     _node("torch.ops.aten.relu.default", _argument("self", _name("y"))))),
    ("a value of 2**60 numbers", "elements", lambda: _nodes(
     _node("torch.ops.aten.full.default", _argument("size", {"as_ints": [2**30, 2**30]}),
           _argument("fill_value", {"as_float": 0.0})))),
    ("arguments of another kind", "instead found type", lambda: _nodes(
     _node("torch.ops.aten.relu.default", _argument("self", {"as_string": "x"})))),
    ("an input of 2**40 numbers", "1,099,511,627,776", lambda: _input(_meta(2**20, 2**20))),
    ("an input that is no tensor", "tensor", lambda: _changed(lambda module, weights: module["signature"].update(
     input_specs=[{"user_input": {"arg": {"as_custom_obj": {}}}}]))),
]  # fmt: skip

_READ: list[tuple[str, Callable[[], bytes]]] = [
    ("names with markup and escape sequences", lambda: _nodes(
     _node() | {"metadata": {"nn_module_stack": "a,<script>\x1b[2J.norm,LayerNorm"}})),
    ("5,000 weights over one member", _many),
    ("example inputs that are code", lambda: with_examples(archive(pickled(((_System(),), {}))))),
    ("example inputs of 1 GB", lambda: with_examples(archive(pickled(((_Bytes(),), {}))))),
    ("example inputs of 400 GB over 16 bytes", lambda: with_examples(
     archive(pickled(((Tensor((10**11,), (0,)),), {}))))),
    ("example inputs that are no archive", lambda: with_examples(b"nothing")),
    ("example inputs that are a bare pickle", lambda: with_examples(pickle.dumps(_System()))),
]  # fmt: skip

CASES = [
    *(Case(defect, "model.pt2", word, _put(content)) for defect, word, content in _REFUSED),
    *(Case(defect, "model.pt2", "", _put(content)) for defect, content in _READ),
    Case("a folder", "model.pt2", "no such file", lambda folder: (folder / "model.pt2").mkdir()),
    Case("a pipe", "model.pt2", "no such file", lambda folder: os.mkfifo(folder / "model.pt2")),
]
