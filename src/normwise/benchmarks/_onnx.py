"""ONNX Runtime as a rival: one operator of its CPU provider, forward only, on as many threads as torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from normwise.benchmarks._contest import Setting

__all__ = ["NAME", "installed", "session"]

NAME = "ONNX Runtime"
_OPSET, _IR = 23, 10  # the first opset with RMSNormalization, and what goes with it
_EXTRA = "com.microsoft"  # the fused residual adds are ONNX Runtime's own operators
_OPERATORS = {
    ("RMSNorm", False): ("RMSNormalization", {"axis": -1}, ["y"]),
    ("LayerNorm", False): ("LayerNormalization", {"axis": -1}, ["y"]),
    ("RMSNorm", True): ("SkipSimplifiedLayerNormalization", {}, ["y", "", "", "sum"]),
    ("LayerNorm", True): ("SkipLayerNormalization", {}, ["y", "", "", "sum"]),
    ("GroupNorm", False): ("GroupNormalization", {}, ["y"]),
    ("BatchNorm2d", False): ("BatchNormalization", {"training_mode": 1}, ["y", "mean", "variance"]),
}


def installed() -> bool:
    """Return whether both ONNX Runtime and onnx, which writes its model, are here."""
    return find_spec("onnxruntime") is not None and find_spec("onnx") is not None


def session(module: nn.Module, setting: Setting) -> Callable[..., Any]:
    """Return a call of the operator that computes what torch's module does; it takes tensors and returns arrays.

    Args:
        module: of torch.nn.
        setting: what the contest is about.

    Raises:
        ValueError: a dtype that numpy does not have, such as bfloat16.
        Exception: whatever ONNX Runtime says about an operator it does not have in this dtype.
    """
    if setting.dtype is torch.bfloat16:
        raise ValueError("its CPU operators do not take bfloat16")
    if setting.layout is not None:
        raise ValueError(f"it takes NCHW only, not {setting.layout}")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = setting.threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # threads that spin slow the next rival
    options.log_severity_level = 4
    run = onnxruntime.InferenceSession(_model(module, setting), options, providers=["CPUExecutionProvider"]).run
    names = ["x", "residual"]

    def call(*inputs: torch.Tensor) -> Any:
        return run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=False)})

    return call


def _model(module: nn.Module, setting: Setting) -> bytes:
    """Return an ONNX model of one node, with the module's parameters and buffers in it."""
    from onnx import helper, numpy_helper

    operator, attributes, outputs = _OPERATORS[type(module).__name__, setting.residual]
    attributes = {**attributes, "epsilon": float(getattr(module, "eps", None) or 1e-5)}
    if isinstance(module, nn.GroupNorm):
        attributes["num_groups"] = module.num_groups
    names = ("weight", "bias", "running_mean", "running_var")
    held = {name: value for name in names if (value := getattr(module, name, None)) is not None}
    inputs = ["x", "residual"] if setting.residual else ["x"]
    dtype = helper.np_dtype_to_tensor_dtype(torch.zeros((), dtype=setting.dtype).numpy().dtype)
    graph = helper.make_graph(
        [
            helper.make_node(
                operator, [*inputs, *held], outputs, domain=_EXTRA if setting.residual else "", **attributes
            )
        ],
        "norm",
        [helper.make_tensor_value_info(name, dtype, list(setting.shape)) for name in inputs],
        [helper.make_tensor_value_info(name, dtype, None) for name in outputs if name],
        [numpy_helper.from_array(value.detach().to(setting.dtype).numpy(), name) for name, value in held.items()],
    )
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_EXTRA, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_IR).SerializeToString()
