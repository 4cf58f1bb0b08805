"""Operators of ONNX that move, cut and join values, make constants, or deal with shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normwise.errors import TargetError
from normwise.targets.onnx_ops.node import Node, integers, sized

__all__ = ["DTYPES", "OPERATORS"]

DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
"""The types of torch by the numbers of ONNX."""


def _dtype(number: int) -> torch.dtype:
    if number not in DTYPES:
        raise TargetError(f"not supported: the type {number} of ONNX")
    return DTYPES[number]


def _axes(node: Node, axes: Any, x: Tensor) -> list[int]:
    found = integers(node.get("axes", []) if axes is None else axes)
    return [axis % x.ndim if x.ndim else 0 for axis in found]


def _shape(node: Node, x: Tensor) -> Tensor:
    return torch.tensor(list(x.shape)[node.get("start", 0) : node.get("end")], dtype=torch.int64)


def _reshape(node: Node, x: Tensor, shape: Any = None) -> Tensor:
    sizes = integers(node.get("shape", []) if shape is None else shape)
    if not node.get("allowzero", 0):
        sizes = [x.shape[i] if size == 0 and i < x.ndim else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(node: Node, x: Tensor) -> Tensor:
    axis = node.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    rows = 1
    for size in x.shape[:axis]:
        rows *= size
    return x.reshape(rows, -1)


def _transpose(node: Node, x: Tensor) -> Tensor:
    return x.permute(list(node.get("perm", range(x.ndim)[::-1])))


def _squeeze(node: Node, x: Tensor, axes: Any = None) -> Tensor:
    found = _axes(node, axes, x)
    return x.squeeze(tuple(found)) if found else x.squeeze()


def _unsqueeze(node: Node, x: Tensor, axes: Any = None) -> Tensor:
    found = integers(node.get("axes", []) if axes is None else axes)
    rank = x.ndim + len(found)
    for axis in sorted(axis % rank for axis in found):
        x = x.unsqueeze(axis)
    return x


def _concat(node: Node, *values: Tensor) -> Tensor:
    return torch.cat(values, dim=node.get("axis", 1))


def _split(node: Node, x: Tensor, split: Any = None) -> tuple[Tensor, ...]:
    axis = node.get("axis", 0)
    sizes = node.get("split") if split is None else split
    if sizes is not None:
        return tuple(torch.split(x, integers(sizes), dim=axis))
    each = -(-x.shape[axis] // node.outputs)
    return tuple(torch.split(x, each, dim=axis))


def _slice(node: Node, x: Tensor, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None) -> Tensor:
    begin = integers(node.get("starts", []) if starts is None else starts)
    stop = integers(node.get("ends", []) if ends is None else ends)
    which = node.get("axes") if axes is None else axes
    over = integers(which) if which is not None else list(range(len(begin)))
    by = integers(steps) if steps is not None else [1] * len(begin)
    for first, last, axis, step in zip(begin, stop, over, by, strict=True):
        x = _cut(x, first, last, axis % x.ndim, step)
    return x


def _cut(x: Tensor, first: int, last: int, axis: int, step: int) -> Tensor:
    size = x.shape[axis]
    if step > 0:
        index: list[Any] = [slice(None)] * axis + [slice(first, last, step)]
        return x[tuple(index)]
    picked = range(size)[slice(first, None if last < -size else last, step)]
    return x.index_select(axis, torch.tensor(list(picked), dtype=torch.int64, device=x.device))


def _gather(node: Node, x: Tensor, index: Any) -> Tensor:
    axis = node.get("axis", 0) % max(x.ndim, 1)
    if isinstance(index, int):
        return x.select(axis, index)
    index = torch.where(index < 0, index + x.shape[axis], index)
    if axis == 0 and x.ndim == 2 and x.is_floating_point():
        return F.embedding(index, x)  # what was exported as one
    if index.ndim == 0:
        return x.select(axis, int(index))
    return x.index_select(axis, index.reshape(-1)).reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _gather_elements(node: Node, x: Tensor, index: Tensor) -> Tensor:
    axis = node.get("axis", 0)
    return torch.gather(x, axis, torch.where(index < 0, index + x.shape[axis], index))


def _gather_nd(node: Node, x: Tensor, index: Tensor) -> Tensor:
    node.only(batch_dims=(0,))
    return x[tuple(index.unbind(-1))]


def _scatter_elements(node: Node, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    node.only(reduction=("none",))
    axis = node.get("axis", 0)
    return x.scatter(axis, torch.where(index < 0, index + x.shape[axis], index), updates)


def _scatter_nd(node: Node, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    node.only(reduction=("none",))
    return torch.index_put(x, tuple(index.unbind(-1)), updates)


def _expand(node: Node, x: Tensor, shape: Any) -> Tensor:
    return x.expand(sized(torch.broadcast_shapes(x.shape, torch.Size(integers(shape)))))


def _tile(node: Node, x: Tensor, repeats: Any) -> Tensor:
    times = integers(repeats)
    sized([size * n for size, n in zip(x.shape, times, strict=True)])
    return x.repeat(times)


def _pad(node: Node, x: Tensor, pads: Any = None, value: Any = None, axes: Any = None) -> Tensor:
    widths = integers(node.get("pads", []) if pads is None else pads)
    over = [axis % x.ndim for axis in integers(axes)] if axes is not None else list(range(x.ndim))
    mode = node.text("mode", "constant")
    before, after = dict(zip(over, widths[: len(over)], strict=True)), dict(zip(over, widths[len(over) :], strict=True))
    sized([size + before.get(i, 0) + after.get(i, 0) for i, size in enumerate(x.shape)])
    flat = [width for axis in reversed(range(x.ndim)) for width in (before.get(axis, 0), after.get(axis, 0))]
    if mode == "constant":
        fill = node.get("value", 0.0) if value is None else value
        return F.pad(x, flat, value=fill.item() if isinstance(fill, Tensor) else fill)
    while len(flat) > 2 and flat[-2:] == [0, 0]:  # torch pads the last axes only in the other modes
        flat = flat[:-2]
    return F.pad(x, flat, mode={"edge": "replicate", "reflect": "reflect", "wrap": "circular"}.get(mode, mode))


def _constant_of_shape(node: Node, shape: Any) -> Tensor:
    value = node.get("value")
    sizes = sized(integers(shape))
    return torch.zeros(sizes) if value is None else value.reshape(()).expand(sizes).clone()


def _range(node: Node, start: Any, limit: Any, delta: Any) -> Tensor:
    first, last, step = (v.item() if isinstance(v, Tensor) else v for v in (start, limit, delta))
    sized([int((last - first) / step) + 1])
    dtype = next((v.dtype for v in (start, limit, delta) if isinstance(v, Tensor)), None)
    return torch.arange(first, last, step, dtype=dtype)


def _one_hot(node: Node, index: Tensor, depth: Any, values: Tensor) -> Tensor:
    classes = integers(depth)[0]
    sized([*index.shape, classes])
    hot = F.one_hot(index.long() % classes, classes).to(values.dtype)
    return (hot * (values[1] - values[0]) + values[0]).movedim(-1, node.get("axis", -1))


def _trilu(node: Node, x: Tensor, k: Any = None) -> Tensor:
    diagonal = 0 if k is None else integers(k)[0]
    return torch.triu(x, diagonal) if node.get("upper", 1) else torch.tril(x, diagonal)


def _non_zero(node: Node, x: Tensor) -> Tensor:
    return torch.nonzero(x).T


def _depth_to_space(node: Node, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b = node.get("blocksize", 1)
    if node.text("mode") == "CRD":
        return F.pixel_shuffle(x, b)
    return x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // (b * b), h * b, w * b)


def _space_to_depth(node: Node, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b = node.get("blocksize", 1)
    return x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, c * b * b, h // b, w // b)


# What torch computes too, by mode, coordinate_transformation_mode and nearest_mode: its mode, and align_corners.
_RESIZES: dict[tuple[str, str, str], tuple[str, bool | None]] = {
    ("nearest", "asymmetric", "floor"): ("nearest", None),
    ("nearest", "half_pixel", "round_prefer_floor"): ("nearest-exact", None),
    ("nearest", "pytorch_half_pixel", "round_prefer_floor"): ("nearest-exact", None),
    ("linear", "half_pixel", ""): ("linear", False),
    ("linear", "pytorch_half_pixel", ""): ("linear", False),
    ("linear", "align_corners", ""): ("linear", True),
    ("cubic", "half_pixel", ""): ("bicubic", False),
    ("cubic", "pytorch_half_pixel", ""): ("bicubic", False),
    ("cubic", "align_corners", ""): ("bicubic", True),
}


def _resize(node: Node, x: Tensor, *rest: Any) -> Tensor:
    node.only(
        antialias=(0,), exclude_outside=(0,), cubic_coeff_a=(-0.75,), axes=(), keep_aspect_ratio_policy=("stretch",)
    )
    mode = node.text("mode", "nearest")
    where = node.text("coordinate_transformation_mode", "half_pixel" if node.opset >= 11 else "asymmetric")
    rounding = node.text("nearest_mode", "round_prefer_floor" if node.opset >= 11 else "floor")
    key = (mode, where, rounding if mode == "nearest" else "")
    if key not in _RESIZES:
        raise TargetError(f"not supported: {node.kind} with {', '.join(filter(None, key))}")
    sizes = _new_sizes(node, x, rest)
    torch_mode, corners = _RESIZES[key]
    if torch_mode == "linear":
        torch_mode = {1: "linear", 2: "bilinear", 3: "trilinear"}.get(x.ndim - 2, "linear")
    whole = all(new % old == 0 for new, old in zip(sizes, x.shape, strict=True))
    if (torch_mode == "nearest-exact" and not whole) or (where == "pytorch_half_pixel" and 1 in sizes[2:]):
        raise TargetError(f"not supported: {node.kind} of {tuple(x.shape)} to {tuple(sizes)} with {where}")
    if sizes[:2] != list(x.shape[:2]):
        raise TargetError(f"not supported: {node.kind} over the batch or the channels")
    return F.interpolate(x, size=sizes[2:], mode=torch_mode, align_corners=corners)


def _new_sizes(node: Node, x: Tensor, rest: tuple[Any, ...]) -> list[int]:
    given = [value for value in rest if isinstance(value, Tensor) and value.numel()]  # left out: an empty tensor
    last = given[-1] if given else torch.tensor(node.get("scales", []))
    if not last.is_floating_point():
        return sized(integers(last))
    exact = [size * scale for size, scale in zip(x.shape, last.tolist(), strict=True)]
    if any(abs(size - round(size)) > 1e-3 for size in exact):
        raise TargetError(f"not supported: {node.kind} to a size that is no whole number")
    return sized([round(size) for size in exact])


def _cast(node: Node, x: Any) -> Any:
    return x.to(_dtype(node.get("to", 1)))


def _cumsum(node: Node, x: Tensor, axis: Any) -> Tensor:
    node.only(exclusive=(0,), reverse=(0,))
    return torch.cumsum(x, integers(axis)[0], dtype=x.dtype)


def _top_k(node: Node, x: Tensor, k: Any = None) -> tuple[Tensor, Tensor]:
    count = integers(node.get("k", 1) if k is None else k)[0]
    axis = node.get("axis", -1)
    values, index = torch.sort(x, dim=axis, descending=bool(node.get("largest", 1)), stable=True)
    return values.narrow(axis, 0, count), index.narrow(axis, 0, count)


def _dropout(node: Node, x: Tensor, ratio: Any = None, training: Any = None) -> tuple[Tensor, ...]:
    if training is not None and bool(training):
        raise TargetError("not supported: Dropout in training mode; export the model in eval mode")
    return (x, torch.ones_like(x, dtype=torch.bool))[: node.outputs]


def _arg(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(node: Node, x: Tensor) -> Tensor:
        node.only(select_last_index=(0,))
        return function(x, dim=node.get("axis", 0), keepdim=bool(node.get("keepdims", 1)))

    return run


OPERATORS: dict[str, Callable[..., Any]] = {
    "Shape": _shape, "Size": lambda node, x: torch.tensor(x.numel()), "Reshape": _reshape, "Flatten": _flatten,
    "Transpose": _transpose, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Concat": _concat, "Split": _split,
    "Slice": _slice, "Gather": _gather, "GatherElements": _gather_elements, "GatherND": _gather_nd,
    "ScatterElements": _scatter_elements, "ScatterND": _scatter_nd, "Expand": _expand, "Tile": _tile, "Pad": _pad,
    "ConstantOfShape": _constant_of_shape, "Range": _range, "OneHot": _one_hot, "Trilu": _trilu, "NonZero": _non_zero,
    "DepthToSpace": _depth_to_space, "SpaceToDepth": _space_to_depth, "Resize": _resize, "Upsample": _resize,
    "Cast": _cast, "CastLike": lambda node, x, like: x.to(like.dtype), "Identity": lambda node, x: x,
    "Dropout": _dropout, "CumSum": _cumsum,
    "TopK": _top_k, "ArgMax": _arg(torch.argmax), "ArgMin": _arg(torch.argmin),
}  # fmt: skip
"""The function of every operator here: ``function(node, *inputs)``."""
