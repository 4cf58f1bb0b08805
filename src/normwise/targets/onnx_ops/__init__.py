"""The operators of ONNX in torch, by name, for the programs that ``onnx_file`` reads.

Meaning: https://onnx.ai/onnx/operators/ ; those of ONNX Runtime's own domain:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from normwise.targets.onnx_ops import layers, pointwise, shapes
from normwise.targets.onnx_ops.node import Node
from normwise.targets.onnx_ops.pointwise import TAKES_NUMBERS
from normwise.targets.onnx_ops.shapes import DTYPES

__all__ = ["DTYPES", "OPERATORS", "TAKES_NUMBERS", "Node"]

OPERATORS = {**pointwise.OPERATORS, **shapes.OPERATORS, **layers.OPERATORS}
"""``function(node, *inputs)`` of every operator that is supported."""
