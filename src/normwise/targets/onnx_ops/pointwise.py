"""Operators of ONNX that work element by element, and the activations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normwise.targets.onnx_ops.node import Node

__all__ = ["OPERATORS", "TAKES_NUMBERS"]


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node, x: function(x)


def _binary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node, a, b: function(a, b)


def _many(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node, *values: functools.reduce(lambda a, b: function(*_tensors(a, b)), values)


def _tensors(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    like = a if isinstance(a, Tensor) else b
    return tuple(v if isinstance(v, Tensor) else torch.full((), v, dtype=like.dtype) for v in (a, b))  # type: ignore[return-value]


def _div(node: Node, a: Any, b: Any) -> Tensor:
    whole = not any(isinstance(v, float) or (isinstance(v, Tensor) and v.is_floating_point()) for v in (a, b))
    return torch.div(a, b, rounding_mode="trunc") if whole else a / b


def _mod(node: Node, a: Any, b: Any) -> Tensor:
    return torch.fmod(a, b) if node.get("fmod", 0) else torch.remainder(a, b)


def _mean(node: Node, *values: Tensor) -> Tensor:
    return functools.reduce(lambda a, b: a + b, values) / len(values)


def _clip(node: Node, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    low = node.get("min") if low is None else low
    high = node.get("max") if high is None else high
    low, high = (v.item() if isinstance(v, Tensor) else v for v in (low, high))
    return x if low is None and high is None else torch.clamp(x, low, high)


def _gelu(node: Node, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=node.text("approximate", "none"))


def _bias_gelu(node: Node, x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def _fast_gelu(node: Node, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def _hard_sigmoid(node: Node, x: Tensor) -> Tensor:
    return torch.clamp(x * node.get("alpha", 0.2) + node.get("beta", 0.5), 0, 1)


def _prelu(node: Node, x: Tensor, slope: Tensor) -> Tensor:
    if slope.ndim == 1 and x.ndim > 2 and slope.numel() == x.shape[1] != x.shape[-1]:  # early versions: one a channel
        slope = slope.reshape(-1, *[1] * (x.ndim - 2))
    return torch.where(x < 0, x * slope, x)


def _thresholded(node: Node, x: Tensor) -> Tensor:
    return torch.where(x > node.get("alpha", 1.0), x, torch.zeros_like(x))


def _where(node: Node, condition: Tensor, a: Any, b: Any) -> Tensor:
    return torch.where(condition, a, b)


def _softmax(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(node: Node, x: Tensor) -> Tensor:
        if node.opset >= 13:
            return function(x, dim=node.get("axis", -1))
        axis = node.get("axis", 1) % max(x.ndim, 1)  # earlier versions see a matrix, cut before this axis
        if axis == x.ndim - 1:
            return function(x, dim=-1)
        return function(x.flatten(axis), dim=-1).reshape(x.shape)

    return run


def _is_inf(node: Node, x: Tensor) -> Tensor:
    node.only(detect_negative=(1,), detect_positive=(1,))
    return torch.isinf(x)


def _pow(node: Node, a: Tensor, b: Any) -> Tensor:
    made = torch.pow(a, b)
    return made if made.dtype == a.dtype else made.to(a.dtype)


def _selu(node: Node, x: Tensor) -> Tensor:
    alpha, gamma = node.get("alpha", 1.6732632423543772), node.get("gamma", 1.0507009873554805)
    return gamma * F.elu(x, alpha)


_UNARY: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs, "Neg": torch.neg, "Exp": torch.exp, "Log": torch.log, "Sqrt": torch.sqrt, "Floor": torch.floor,
    "Reciprocal": torch.reciprocal, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Relu": torch.relu, "Erf": torch.erf,
    "Ceil": torch.ceil, "Round": torch.round, "Sign": torch.sign, "Sin": torch.sin, "Cos": torch.cos, "Tan": torch.tan,
    "Asin": torch.asin, "Acos": torch.acos, "Atan": torch.atan, "Sinh": torch.sinh, "Cosh": torch.cosh,
    "Asinh": torch.asinh, "Acosh": torch.acosh, "Atanh": torch.atanh, "Not": torch.logical_not, "IsNaN": torch.isnan,
    "Softplus": F.softplus, "Softsign": F.softsign, "HardSwish": F.hardswish, "Mish": F.mish,
}  # fmt: skip
_BINARY: dict[str, Callable[..., Any]] = {
    "Add": lambda a, b: a + b, "Sub": lambda a, b: a - b, "Mul": lambda a, b: a * b,
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor, "Equal": lambda a, b: a == b,
    "Greater": lambda a, b: a > b, "GreaterOrEqual": lambda a, b: a >= b, "Less": lambda a, b: a < b,
    "LessOrEqual": lambda a, b: a <= b,
}  # fmt: skip

OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: _unary(function) for name, function in _UNARY.items()},
    **{name: _binary(function) for name, function in _BINARY.items()},
    "Sum": _many(torch.add), "Max": _many(torch.maximum), "Min": _many(torch.minimum), "Mean": _mean,
    "Pow": _pow, "Div": _div, "Mod": _mod, "Clip": _clip, "Where": _where, "IsInf": _is_inf,
    "Softmax": _softmax(torch.softmax), "LogSoftmax": _softmax(torch.log_softmax),
    "Gelu": _gelu, "BiasGelu": _bias_gelu, "FastGelu": _fast_gelu,
    "QuickGelu": lambda node, x: x * torch.sigmoid(x * node.get("alpha", 1.702)),
    "Swish": lambda node, x: x * torch.sigmoid(x * node.get("alpha", 1.0)),
    "LeakyRelu": lambda node, x: F.leaky_relu(x, node.get("alpha", 0.01)),
    "Elu": lambda node, x: F.elu(x, node.get("alpha", 1.0)),
    "Celu": lambda node, x: F.celu(x, node.get("alpha", 1.0)),
    "Selu": _selu,
    "HardSigmoid": _hard_sigmoid, "PRelu": _prelu, "ThresholdedRelu": _thresholded,
}  # fmt: skip
"""The function of every operator here: ``function(node, *inputs)``."""

TAKES_NUMBERS = frozenset(_BINARY) | {"Pow", "Div", "Mod", "Max", "Min", "Clip"}
"""Operators that may be given a constant of one element as a number, as the code of a model writes it."""
