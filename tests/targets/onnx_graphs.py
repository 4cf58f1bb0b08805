"""Models of ONNX made by hand, a node at a time: every form of a norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["EMBEDDED", "GAIN", "INTO", "NORMS", "STORED", "graph", "norm_node", "written"]


def graph(
    nodes: list[onnx.NodeProto], x: tuple[Any, ...], stored: dict[str, np.ndarray] | None = None, opset: int = 23
) -> onnx.ModelProto:
    return helper.make_model(
        helper.make_graph(
            nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(value, name) for name, value in (stored or {}).items()],
        ),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )  # fmt: skip


def written(model: onnx.ModelProto, folder: Path) -> str:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return str(path)


GAIN = np.linspace(0.5, 1.5, 8, dtype=np.float32)
ONE, AXIS = np.float32(1e-5), np.array([-1])
EMBEDDED = [helper.make_node("MatMul", ["x", "into"], ["h"])]
INTO = {"into": np.eye(8, dtype=np.float32) + 0.1}


def norm_node(kind: str, stored: list[str], **attributes: Any) -> list[onnx.NodeProto]:
    domain = attributes.pop("domain", "")
    return [*EMBEDDED, helper.make_node(kind, ["h", *stored], ["y"], domain=domain, **attributes)]


NORMS: dict[str, tuple[list[onnx.NodeProto], tuple[int, ...], str, float | None, bool, bool]] = {
    "LayerNormalization": (
        norm_node("LayerNormalization", ["w", "b"], epsilon=1e-6), (2, 5, 8), "layer", 1e-6, True, True),
    "RMSNormalization": (norm_node("RMSNormalization", ["w"], epsilon=1e-6), (2, 5, 8), "rms", 1e-6, True, False),
    "SimplifiedLayerNormalization": (
        norm_node("SimplifiedLayerNormalization", ["w"], epsilon=1e-6), (2, 5, 8), "rms", 1e-6, True, False),
    "SkipLayerNormalization": (
        [*EMBEDDED, helper.make_node("SkipLayerNormalization", ["h", "h", "w", "b"], ["y"], domain="com.microsoft")],
        (2, 5, 8), "layer", 1e-12, True, True),
    "SkipSimplifiedLayerNormalization": (
        [*EMBEDDED, helper.make_node("SkipSimplifiedLayerNormalization", ["h", "h", "w"], ["y"], domain="com.microsoft",
                                     epsilon=1e-6)],
        (2, 5, 8), "rms", 1e-6, True, False),
    "LpNormalization": (norm_node("LpNormalization", [], axis=-1), (2, 5, 8), "scale", 0.0, False, False),
    "BatchNormalization": (
        [helper.make_node("Conv", ["x", "kernel"], ["h"]),
         helper.make_node("BatchNormalization", ["h", "w", "b", "mean", "var"], ["y"], epsilon=1e-3)],
        (2, 3, 6, 7), "batch", 1e-3, True, True),
    "InstanceNormalization": (
        [helper.make_node("Conv", ["x", "kernel"], ["h"]),
         helper.make_node("InstanceNormalization", ["h", "w", "b"], ["y"], epsilon=1e-3)],
        (2, 3, 6, 7), "instance", 1e-3, True, True),
    "GroupNormalization": (
        [helper.make_node("Conv", ["x", "kernel"], ["h"]),
         helper.make_node("GroupNormalization", ["h", "w", "b"], ["y"], epsilon=1e-3, num_groups=2)],
        (2, 3, 6, 7), "group", 1e-3, True, True),
    "written out": (
        [*EMBEDDED, helper.make_node("ReduceMean", ["h", "axis"], ["m"]), helper.make_node("Sub", ["h", "m"], ["c"]),
         helper.make_node("Pow", ["c", "two"], ["s"]), helper.make_node("ReduceMean", ["s", "axis"], ["v"]),
         helper.make_node("Add", ["v", "eps"], ["e"]), helper.make_node("Sqrt", ["e"], ["r"]),
         helper.make_node("Div", ["c", "r"], ["n"]), helper.make_node("Mul", ["n", "w"], ["g"]),
         helper.make_node("Add", ["g", "b"], ["y"])],
        (2, 5, 8), "layer", 1e-5, True, True),
}  # fmt: skip
STORED = {
    "w": GAIN, "b": GAIN - 1, "mean": GAIN / 3, "var": GAIN, "kernel": np.ones((8, 3, 1, 1), np.float32), "axis": AXIS,
    "two": np.float32(2.0), "eps": ONE, **INTO,
}  # fmt: skip
