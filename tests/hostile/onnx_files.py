"""Twenty-odd ONNX files, each with one defect."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.hostile.case import Case

__all__ = ["CASES", "good"]


def _model(
    nodes: Sequence[Any] | None = None, initializers: Sequence[Any] | None = None, *, shape: Any = (2, 4)
) -> Any:
    from onnx import TensorProto, helper

    norm = helper.make_node("LayerNormalization", ["x", "w", "b"], ["y"], name="norm", axis=-1)
    gain = helper.make_tensor("w", TensorProto.FLOAT, [4], [1.0] * 4)
    bias = helper.make_tensor("b", TensorProto.FLOAT, [4], [0.0] * 4)
    graph = helper.make_graph(
        [norm] if nodes is None else nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [gain, bias] if initializers is None else initializers,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def good() -> bytes:
    """Return a sound model of one norm."""
    return _model().SerializeToString()


def _changed(change: Callable[[Any], object]) -> bytes:
    model = _model()
    change(model)
    return model.SerializeToString()


def _gain(**fields: Any) -> bytes:
    def change(model: Any) -> None:
        gain = model.graph.initializer[0]
        for name, value in fields.items():
            gain.ClearField(name)
            if isinstance(value, list):
                getattr(gain, name).extend(value)
            else:
                setattr(gain, name, value)

    return _changed(change)


def _outside(location: str, **more: Any) -> bytes:
    def change(model: Any) -> None:
        gain = model.graph.initializer[0]
        gain.ClearField("float_data")
        gain.data_location = 1
        for key, value in {"location": location, **more}.items():
            entry = gain.external_data.add()
            entry.key, entry.value = key, str(value)

    return _changed(change)


def _nodes(*rows: tuple[str, list[str], list[str]], domain: str = "", **attributes: Any) -> bytes:
    from onnx import helper

    return _model(
        [helper.make_node(op, takes, gives, domain=domain, **attributes) for op, takes, gives in rows]
    ).SerializeToString()


def _sized(kind: str, takes: list[str], sizes: list[int]) -> bytes:
    """Return a model of one operator that takes sizes from a constant."""
    from onnx import TensorProto, helper

    return _model(
        [helper.make_node(kind, takes, ["y"])], [helper.make_tensor("s", TensorProto.INT64, [len(sizes)], sizes)]
    ).SerializeToString()


def _weights(count: int, numbers: int) -> bytes:
    """Return a model with so many weights in one file, all over the same bytes but each a number longer."""
    from onnx import TensorProto

    def change(model: Any) -> None:
        for index in range(count):
            weight = model.graph.initializer.add(name=f"w{index}", data_type=TensorProto.FLOAT, data_location=1)
            weight.dims.append(numbers - index)
            weight.external_data.add(key="location", value="weights.bin")

    return _changed(change)


def _overlapping(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(_weights(200, 2**22))
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(2**24)


def _tied(folder: Path) -> None:
    from onnx import TensorProto

    def change(model: Any) -> None:
        for name in ("tied", "untied"):
            weight = model.graph.initializer.add(name=name, dims=[4], data_type=TensorProto.FLOAT, data_location=1)
            weight.external_data.add(key="location", value="weights.bin")

    (folder / "model.onnx").write_bytes(_changed(change))
    (folder / "weights.bin").write_bytes(b"\0" * 16)


def _branch() -> bytes:
    from onnx import helper

    body = helper.make_graph([], "b", [], [])
    return _nodes(("If", ["x"], ["y"]), then_branch=body, else_branch=body)


def _nested(levels: int) -> bytes:
    """Graphs in attributes of nodes of graphs, written from the inside, as protobuf itself refuses to build them."""
    held = b""
    for _ in range(levels):
        for tag in (b"\x32", b"\x2a", b"\x0a"):  # AttributeProto.g, NodeProto.attribute, GraphProto.node
            held = tag + _varint(len(held)) + held
    return b"\x08\x0a" + b"\x3a" + _varint(len(held)) + held


def _varint(number: int) -> bytes:
    made = b""
    while number > 127:
        made, number = made + bytes([number & 127 | 128]), number >> 7
    return made + bytes([number])


def _put(content: Callable[[], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.onnx").write_bytes(content())


def _linked(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(_outside("weights.bin", length=16))
    (folder / "weights.bin").symlink_to("/etc/hostname")


def _short(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(_outside("weights.bin", offset=8, length=16))
    (folder / "weights.bin").write_bytes(b"\0" * 16)


_LINE: list[tuple[str, str, Callable[[], bytes]]] = [
    ("empty", "no ", lambda: b""),
    ("random bytes", "ONNX", lambda: bytes(range(255, 0, -1))),
    ("cut", "ONNX", lambda: good()[:-20]),
    ("a page of HTML", "ONNX", lambda: b"<!DOCTYPE html><html>404</html>"),
    ("a pickle", "ONNX", lambda: b"\x80\x04}\x94."),
    ("no graph", "no ", lambda: _changed(lambda m: m.ClearField("graph"))),
    ("weights outside the folder", "outside", lambda: _outside("../../secret.bin", length=16)),
    ("weights with an absolute path", "outside", lambda: _outside("/etc/passwd", length=16)),
    ("fewer numbers than its sizes", "numbers", lambda: _gain(dims=[400])),
    ("bytes that are no whole numbers", "w", lambda: _gain(float_data=[], raw_data=b"\0" * 15)),
    ("a negative size", "sizes", lambda: _gain(dims=[-4])),
    ("a size of 2**62", "w", lambda: _gain(dims=[2**62])),
    ("sizes whose product overflows", "w", lambda: _gain(dims=[2**32, 2**32])),
    ("an unknown type of numbers", "type", lambda: _gain(data_type=99)),
    ("texts for numbers", "w", lambda: _gain(data_type=8, float_data=[], string_data=[b"a"] * 4)),
    ("a tensor stored twice", "twice", lambda: _changed(lambda m: m.graph.initializer.extend(m.graph.initializer[:1]))),
    ("an unknown operator", "Exfiltrate", lambda: _nodes(("Exfiltrate", ["x"], ["y"]))),
    ("an operator of a domain of its own", "evil", lambda: _nodes(("Run", ["x"], ["y"]), domain="evil")),
    ("a branch", "If", _branch),
    ("a node that reads what it makes", "y", lambda: _nodes(("Add", ["x", "y"], ["y"]))),
    ("a value that nothing makes", "nowhere", lambda: _nodes(("Add", ["x", "nowhere"], ["y"]))),
    ("an operator without its inputs", "missing", lambda: _nodes(("Add", [], ["y"]))),
    ("an eps that is NaN", "eps=nan", lambda: _changed(lambda m: m.graph.node[0].attribute.add(
     name="epsilon", type=1, f=float("nan")))),
    ("a text for an axis", "LayerNormalization", lambda: _nodes(
     ("LayerNormalization", ["x", "w", "b"], ["y"]), axis="x")),
    ("an operator set that is not there yet", "operator set", lambda: _changed(
     lambda m: setattr(m.opset_import[0], "version", 10**9))),
    ("a text for an offset", "'1e9'", lambda: _outside("weights.bin", offset="1e9")),
    ("an input of 2**40 numbers", "1,099,511,627,776", lambda: _model(shape=(2**20, 2**20)).SerializeToString()),
    ("a constant of 2**60 numbers", "elements", lambda: _sized("ConstantOfShape", ["s"], [2**30, 2**30])),
    ("an expansion to 2**43 numbers", "elements", lambda: _sized("Expand", ["x", "s"], [2**20, 2**20, 2, 4])),
    ("2**50 copies", "elements", lambda: _sized("Tile", ["x", "s"], [2**25, 2**25])),
    ("a margin of 2**30 rows", "elements", lambda: _sized("Pad", ["x", "s"], [2**30, 2**30, 0, 0])),
    ("products of 2**36 numbers", "elements", lambda: _nodes(
     ("Einsum", ["x"] * 12, ["y"]), equation="ab,cd,ef,gh,ij,kl,mn,op,qr,st,uv,wx->abcdefghijklmnopqrstuvwx")),
    ("a loop", "Loop", lambda: _nodes(("Loop", ["", "", "x"], ["y"]))),
    ("100 weights of 1 GB that are not there", "not there", lambda: _weights(100, 2**28)),
    ("graphs nested 10,000 deep", "ONNX", lambda: _nested(10_000)),
]  # fmt: skip


def _circle() -> bytes:
    return _nodes(("Add", ["x", "b1"], ["a1"]), ("Add", ["x", "a1"], ["b1"]), ("Add", ["a1", "b1"], ["y"]))


CASES = [
    *(Case(defect, "model.onnx", word, _put(content)) for defect, word, content in _LINE),
    Case("nodes in a circle", "model.onnx", "b1", _put(_circle)),
    Case("weights behind a link out of the folder", "model.onnx", "outside", _linked),
    Case("weights shorter than declared", "model.onnx", "short", _short),
    Case("200 weights of 16 MB over one file of 16 MB", "model.onnx", "overlaps", _overlapping),
    Case("two weights over the same bytes", "model.onnx", "", _tied),
    Case("a folder", "model.onnx", "no such file", lambda folder: (folder / "model.onnx").mkdir()),
    Case("a pipe", "model.onnx", "no such file", lambda folder: os.mkfifo(folder / "model.onnx")),
    Case("weights that are not there", "model.onnx", "", _put(lambda: _outside("weights.bin", length=16))),
    Case("names with markup and escape sequences", "model.onnx", "", _put(
        lambda: _changed(lambda m: setattr(m.graph.node[0], "name", "<script>\x1b[2J\u202e")))),
]  # fmt: skip
