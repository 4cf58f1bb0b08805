"""Operators of ONNX that are layers: norms, convolutions, pooling, products, reductions, attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normwise.errors import TargetError
from normwise.targets.onnx_ops.node import Node, integers

__all__ = ["OPERATORS"]


def _batch_norm(node: Node, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    node.only(training_mode=(0,), spatial=(1,))  # a model is exported in eval mode
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.1, node.get("epsilon", 1e-5))


def _instance_norm(node: Node, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias, eps=node.get("epsilon", 1e-5))


def _group_norm(node: Node, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    groups = node.get("num_groups", 1)
    if weight.numel() != x.shape[1]:  # until opset 20 one gain a group
        each = x.shape[1] // max(groups, 1)
        weight, bias = weight.repeat_interleave(each), bias.repeat_interleave(each)
    return F.group_norm(x, groups, weight, bias, node.get("epsilon", 1e-5))


def _layer_norm(
    node: Node, x: Tensor, weight: Tensor | None, bias: Tensor | None = None
) -> Tensor | tuple[Tensor, ...]:
    axis = node.get("axis", -1) % x.ndim
    return F.layer_norm(x, x.shape[axis:], weight, bias, node.get("epsilon", 1e-5))


def _rms_norm(node: Node, x: Tensor, weight: Tensor | None = None) -> Tensor:
    axis = node.get("axis", -1) % x.ndim
    return F.rms_norm(x, x.shape[axis:], weight, node.get("epsilon", 1e-5))


def _skip_layer_norm(
    node: Node, x: Tensor, skip: Tensor, weight: Tensor, beta: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Any, ...]:
    total = x + skip if bias is None else x + bias + skip
    normed = F.layer_norm(total, total.shape[-1:], weight, beta, node.get("epsilon", 1e-12))
    return normed, None, None, total


def _skip_rms_norm(node: Node, x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    total = x + skip if bias is None else x + bias + skip
    return F.rms_norm(total, total.shape[-1:], weight, node.get("epsilon", 1e-12)), None, None, total


def _lp_norm(node: Node, x: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(x, node.get("p", 2), node.get("axis", -1), keepdim=True)
    return (x / size).masked_fill(size == 0, 0.0)  # there is no eps: zeros stay zeros


def _mean_variance(node: Node, x: Tensor) -> Tensor:
    axes = list(node.get("axes", [0, 2, 3]))
    centred = x - x.mean(axes, keepdim=True)
    return centred / (centred.pow(2).mean(axes, keepdim=True).sqrt() + 1e-9)


def _local_response(node: Node, x: Tensor) -> Tensor:
    return F.local_response_norm(
        x, node.get("size", 1), node.get("alpha", 1e-4), node.get("beta", 0.75), node.get("bias", 1.0)
    )


def _reduction(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(node: Node, x: Tensor, axes: Any = None) -> Tensor:
        found = integers(node.get("axes", []) if axes is None else axes)
        if not found and node.get("noop_with_empty_axes", 0):
            return x
        return function(x, found or list(range(x.ndim)), bool(node.get("keepdims", 1)))

    return run


def _product(x: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _gemm(node: Node, a: Tensor, b: Tensor, c: Any = None) -> Tensor:
    left = a.T if node.get("transA", 0) else a
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    if alpha == 1.0 and node.get("transB", 0) and (c is None or (beta == 1.0 and c.ndim == 1)):
        return F.linear(left, b, c)
    made = left @ (b.T if node.get("transB", 0) else b)
    made = made if alpha == 1.0 else alpha * made
    return made if c is None else made + (c if beta == 1.0 else beta * c)


def _einsum(node: Node, *values: Tensor) -> Tensor:
    equation = node.get("equation", b"")
    return torch.einsum(equation.decode() if isinstance(equation, bytes) else equation, *values)


def _padded(node: Node, x: Tensor, kernel: Sequence[int], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """Return the input and the padding that torch does itself; where the two sides differ, it is padded before."""
    rank = len(kernel)
    strides, dilations = list(node.get("strides", [1] * rank)), list(node.get("dilations", [1] * rank))
    auto = node.text("auto_pad", "NOTSET")
    pads = list(node.get("pads", [0] * (2 * rank)))
    if auto.startswith("SAME"):
        pads = [0] * (2 * rank)
        for i, size in enumerate(x.shape[2:]):
            reach = dilations[i] * (kernel[i] - 1) + 1
            total = max((-(-size // strides[i]) - 1) * strides[i] + reach - size, 0)
            small, large = total // 2, total - total // 2
            pads[i], pads[rank + i] = (small, large) if auto == "SAME_UPPER" else (large, small)
    if pads[:rank] == pads[rank:] and all(2 * pad <= size for pad, size in zip(pads, kernel, strict=False)):
        return x, pads[:rank]
    flat = [width for i in reversed(range(rank)) for width in (pads[i], pads[rank + i])]
    return F.pad(x, flat, value=value), [0] * rank


def _conv(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = weight.ndim - 2
    x, padding = _padded(node, x, weight.shape[2:])
    function: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rank]
    strides, dilations = list(node.get("strides", [1] * rank)), list(node.get("dilations", [1] * rank))
    return function(x, weight, bias, strides, padding, dilations, node.get("group", 1))


def _conv_transpose(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = weight.ndim - 2
    pads = list(node.get("pads", [0] * (2 * rank)))
    if pads[:rank] != pads[rank:] or node.get("output_shape") or node.text("auto_pad", "NOTSET") != "NOTSET":
        raise TargetError("not supported: ConvTranspose with unequal padding, output_shape or auto_pad")
    function: Any = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[rank]
    ones = [1] * rank
    return function(
        x, weight, bias, list(node.get("strides", ones)), pads[:rank], list(node.get("output_padding", [0] * rank)),
        node.get("group", 1), list(node.get("dilations", ones)),
    )  # fmt: skip


def _max_pool(node: Node, x: Tensor) -> Tensor:
    kernel = list(node.get("kernel_shape", []))
    rank = len(kernel)
    x, padding = _padded(node, x, kernel, -torch.inf)
    function: Any = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[rank]
    strides, dilations = list(node.get("strides", [1] * rank)), list(node.get("dilations", [1] * rank))
    return function(x, kernel, strides, padding, dilations, bool(node.get("ceil_mode", 0)))


def _average_pool(node: Node, x: Tensor) -> Tensor:
    kernel = list(node.get("kernel_shape", []))
    rank = len(kernel)
    if any(dilation != 1 for dilation in node.get("dilations", [])):
        raise TargetError("not supported: AveragePool with dilations")
    shape = x.shape
    x, padding = _padded(node, x, kernel)
    function: Any = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[rank]
    strides = list(node.get("strides", [1] * rank))
    ceiling, counted = bool(node.get("ceil_mode", 0)), bool(node.get("count_include_pad", 0))
    made = function(x, kernel, strides, padding, ceiling, counted)
    if x.shape == shape or counted:
        return made
    inside, _ = _padded(node, x.new_ones((1, 1, *shape[2:])), kernel)  # the mean is over what is no padding
    return made / function(inside, kernel, strides, padding, ceiling, False)


def _global(function: str) -> Callable[..., Tensor]:
    def run(node: Node, x: Tensor) -> Tensor:
        axes = list(range(2, x.ndim))
        return x.mean(axes, keepdim=True) if function == "mean" else x.amax(axes, keepdim=True)

    return run


def _attention(node: Node, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *past: Any) -> Tensor:
    node.only(softcap=(0.0,), left_window_size=(-1,), right_window_size=(-1,), qk_matmul_output_mode=(0,))
    if any(item is not None for item in past) or node.outputs > 1:
        raise TargetError("not supported: Attention with a cache")
    flat = q.ndim == 3
    if flat:
        heads, kv_heads = node.get("q_num_heads", 1), node.get("kv_num_heads", 1)
        q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
        k, v = (x.unflatten(-1, (kv_heads, -1)).transpose(1, 2) for x in (k, v))
    made = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=bool(node.get("is_causal", 0)), scale=node.get("scale"),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return made.transpose(1, 2).flatten(-2) if flat else made


def _dequantize(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    scale, zero = _along(node, x, scale), None if zero is None else _along(node, x, zero)
    shifted = x.to(scale.dtype)
    return (shifted if zero is None else shifted - zero.to(scale.dtype)) * scale


def _quantize(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    dtype = torch.uint8 if zero is None else zero.dtype
    levels = torch.round(x / _along(node, x, scale)) + (0 if zero is None else _along(node, x, zero).to(x.dtype))
    limits = torch.iinfo(dtype)
    return levels.clamp(limits.min, limits.max).to(dtype)


def _along(node: Node, x: Tensor, value: Tensor) -> Tensor:
    if value.numel() == 1:
        return value.reshape(())
    axis = node.get("axis", 1) % x.ndim
    return value.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


OPERATORS: dict[str, Callable[..., Any]] = {
    "BatchNormalization": _batch_norm, "InstanceNormalization": _instance_norm, "GroupNormalization": _group_norm,
    "LayerNormalization": _layer_norm, "RMSNormalization": _rms_norm, "SimplifiedLayerNormalization": _rms_norm,
    "SkipLayerNormalization": _skip_layer_norm, "SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "LpNormalization": _lp_norm, "MeanVarianceNormalization": _mean_variance, "LRN": _local_response,
    "ReduceMean": _reduction(torch.mean), "ReduceSum": _reduction(torch.sum), "ReduceMax": _reduction(torch.amax),
    "ReduceMin": _reduction(torch.amin), "ReduceProd": _reduction(_product),
    "ReduceL2": _reduction(lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep)),
    "ReduceL1": _reduction(lambda x, axes, keep: x.abs().sum(axes, keep)),
    "ReduceSumSquare": _reduction(lambda x, axes, keep: x.pow(2).sum(axes, keep)),
    "ReduceLogSumExp": _reduction(torch.logsumexp),
    "MatMul": lambda node, a, b: torch.matmul(a, b), "Gemm": _gemm, "Einsum": _einsum,
    "Conv": _conv, "ConvTranspose": _conv_transpose, "MaxPool": _max_pool, "AveragePool": _average_pool,
    "GlobalAveragePool": _global("mean"), "GlobalMaxPool": _global("max"), "Attention": _attention,
    "DequantizeLinear": _dequantize, "QuantizeLinear": _quantize,
}  # fmt: skip
"""The function of every operator here: ``function(node, *inputs)``."""
