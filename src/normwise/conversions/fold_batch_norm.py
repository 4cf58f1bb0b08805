"""Fold batch norms into the layers beside them.

## What it does
In eval mode a BatchNorm with running statistics is y = s x + t by channel, with s = g / sqrt(v + eps) and
t = b - m s. A layer W x + c before it takes it over, or every layer that reads it:

    before:  W' = s W over the outputs,  c' = s c + t
    behind:  W' = W s over the inputs,   c' = c + sum of W t

in float64, rounded once. Layers are linear maps and convolutions in one to three dimensions, grouped, depthwise and
transposed ones included. Norms and layers are found in the dataflow, whatever the model calls them: frozen norms of
detection models, norms that apply an activation (which stays in their place), several norms in a row, and norms that
reach their layer through flattening, transposing or average pooling. A layer without bias gets one.

## When it is exact
Always before a norm. Behind a norm where the convolution pads with no zeros: the norm would have made t of them.
Padding with what is there (reflect, replicate, circular) is exact. Two repairs of zero padding are exact, too:
``border="pad"`` pads with -t / s, which the norm sends to zero, and ``border="map"`` adds the shift position by
position, for inputs of the size of the example alone. What a map adds also serves transposed convolutions.

## What is refused
Norms in training mode, without running statistics, or that did not run. Layers whose output, weight or bias
something else reads, whose weight is computed or quantised, or that see a hook. Channels that are not the features
of the layer: a BatchNorm1d of [N, C, L] behind a Linear. Anything nonlinear between (convolution, ReLU, norm, max
pooling). A gain of zero with ``border="pad"``. Under a weight norm its g is scaled; other parametrisations have to be
removed first.

## Options
- ``border``: "refuse", "pad" or "map", for convolutions behind a norm that pad with zeros.

## Example
```python
converted = nw.convert("fold-batch-norm", model.eval(), inputs)
```

## Sources
Ioffe and Szegedy 2015, Batch Normalization, https://arxiv.org/abs/1502.03167; pytorch/pytorch issue 180995
(transposed convolutions).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from normwise.conversions._batch_norms.arithmetic import AddShiftMap, PadWithValue
from normwise.conversions._batch_norms.layers import Layer, heeds_bias, heeds_padding, is_layer, read, returns_output
from normwise.conversions._batch_norms.norms import BatchNorm, find, held
from normwise.conversions._batch_norms.paths import NOT_EXACT, Paths, Segment
from normwise.conversions._edits import AddBias, Edit, Remove
from normwise.conversions._plan import Blocked, Change, Plan, Recipe, Refusal, Step
from normwise.facts.facts import Facts
from normwise.graph import Op

__all__ = ["plan"]

ZH = """将批归一化折叠进相邻的层。

## 做什么
在评估模式下，带运行统计量的 BatchNorm 按通道为 y = s x + t，其中 s = g / sqrt(v + eps)，t = b - m s。它由前面的层
W x + c 吸收，或由读取它的所有层吸收：

    在前：W' = s W（沿输出），c' = s c + t
    在后：W' = W s（沿输入），c' = c + W t 之和

以 float64 计算，只舍入一次。层可以是线性映射和一至三维卷积，包括分组、深度可分离与转置卷积。归一化和层从数据流中
找到，与模型的命名无关：检测模型中冻结的归一化、自带激活函数的归一化（激活函数留在原处）、连续的多个归一化，以及经
展平、转置或平均池化才到达层的归一化。没有偏置的层会得到一个偏置。

## 何时精确
在归一化之前的层总是精确。在归一化之后，仅当卷积不以零填充时精确：归一化本会把这些零变为 t。以已有的值填充
（reflect、replicate、circular）是精确的。零填充有两种精确的修复：``border="pad"`` 以 -t / s 填充，归一化会把它变为零；
``border="map"`` 逐位置加上平移量，只适用于示例输入的尺寸，也适用于转置卷积。

## 拒绝什么
处于训练模式、没有运行统计量或未被运行的归一化。输出、权重或偏置另有读取者的层，权重由计算得到或已量化的层，带有
hook 的层。归一化的通道不是层的特征轴：Linear 之后对 [N, C, L] 的 BatchNorm1d。之间有任何非线性运算（卷积、ReLU、
归一化、最大池化）。``border="pad"`` 时为零的增益。对 weight norm 缩放其 g；其他参数化须先移除。

## 选项
- ``border``：``"refuse"``、``"pad"`` 或 ``"map"``，用于归一化之后以零填充的卷积。

## 示例
```python
converted = nw.convert("fold-batch-norm", model.eval(), inputs)
```

## 来源
Ioffe 与 Szegedy 2015，Batch Normalization，https://arxiv.org/abs/1502.03167；
https://github.com/pytorch/pytorch/issues/180995（转置卷积）。
"""

_BORDERS = ("refuse", "pad", "map")


def plan(facts: Facts, *, border: str = "refuse") -> Plan:
    """Return how every batch norm that can be folded is folded.

    Args:
        facts: of the model, in eval mode.
        border: what to do where a convolution behind a norm pads with zeros: "refuse", "pad" or "map".

    Raises:
        ValueError: another ``border``.
    """
    if border not in _BORDERS:
        raise ValueError(f"border={border!r} is none of {', '.join(map(repr, _BORDERS))}")
    return _Folding(facts, border).plan()


@dataclass(slots=True)
class _Fold:
    """What one layer takes over: norms in front of its input and behind its output, each with its index."""

    layer: Layer
    before: list[tuple[BatchNorm, list[int] | None]] = field(default_factory=list)
    behind: list[tuple[BatchNorm, list[int] | None]] = field(default_factory=list)
    border: str = ""


@dataclass(frozen=True, slots=True)
class _Reader:
    """A layer that reads a norm, and the path from the norm's output to its input."""

    op: Op
    path: tuple[Segment, ...]


class _Folding:
    def __init__(self, facts: Facts, border: str) -> None:
        self.paths, self.border = Paths(facts), border
        self.graph = self.paths.graph
        self.folds: dict[int, _Fold] = {}  # by the op of the layer
        self.upward: dict[int, BatchNorm] = {}  # by output: went into the layer before it
        self.downward: dict[int, tuple[BatchNorm, list[_Reader]]] = {}  # by input: went into the layers behind it
        self.changes: dict[str, Change] = {}

    def plan(self) -> Plan:
        found, refused = find(self.paths)
        reasons: dict[str, Blocked] = {}
        for norm in found:
            try:
                self._into_layer_before(norm)
            except Blocked as blocked:
                reasons[norm.path] = blocked
        for norm in reversed(found):
            if norm.path in reasons:
                try:
                    self._into_layers_behind(norm)
                    del reasons[norm.path]
                except Blocked as blocked:
                    reasons[norm.path] = _both(reasons[norm.path], blocked)
        refused += [blocked.refusal(path) for path, blocked in reasons.items()]
        gone = [norm for norm in found if norm.path in self.changes]
        if not found and not refused:
            refused.append(Refusal(path="", why="no batch norm with running statistics is left: nothing to fold"))
        edits = [edit for fold in self.folds.values() for edit in self._edits(fold)]
        return Plan(
            conversion="fold-batch-norm",
            options={"border": self.border},
            edits=(*edits, *(Remove(path=norm.path, keys=norm.drops, keep=norm.keep) for norm in gone)),
            recipes=tuple(recipe for fold in self.folds.values() for recipe in self._recipes(fold)),
            changes=tuple(self.changes[norm.path] for norm in gone),
            refused=tuple(refused),
            notes=tuple(self._notes()),
        )

    # -- where a norm goes ------------------------------------------------------------------------------

    def _into_layer_before(self, norm: BatchNorm) -> None:
        """Fold a norm into the layer whose output it normalizes."""
        op, path = self._source(norm)
        layer = read(self.paths, op)
        start = op.outputs[0]
        axis = layer.axis(self.graph.values[start].shape)
        index = self.paths.carried(start, axis, path, norm.axis)
        if index is not None:
            if sorted(index) != list(range(layer.outputs)):
                raise Blocked(f"it reads a part of the channels of {layer.path}", op, "normalize them all")
            index = sorted(range(len(index)), key=index.__getitem__)  # the norm's channel for each of the layer's
        if layer.bias is None and not heeds_bias(self.paths, layer):
            raise Blocked(f"{layer.path or 'the model'} takes no bias", op, "give the layer a bias")
        self.folds.setdefault(op.id, _Fold(layer)).behind.append((norm, index))
        self.upward[norm.output] = norm
        self.changes[norm.path] = _change(norm, f"into {layer.path} before it")

    def _source(self, norm: BatchNorm) -> tuple[Op, list[Segment]]:
        """Return the layer that makes a norm's input, and the path from there."""
        value, end, members = norm.input, norm.input, norm.members
        path: list[Segment] = []
        passed = [(value, members)]
        while True:
            op = self.graph.producer(value)
            if value in self.upward:
                earlier = self.upward[value]
                path.insert(0, (value, end))
                value = end = earlier.input
                members = earlier.members
            elif op is None:
                raise Blocked("no layer stands before it", norm.norm.op, NOT_EXACT)
            elif is_layer(op):
                break
            elif op.inputs and self.paths.carries(op, op.inputs[0]):
                value, members = op.inputs[0], frozenset({op.id})
            else:
                raise Blocked(f"{op.short} stands between it and the layer before it", op, NOT_EXACT)
            passed.append((value, members))
        for read_value, readers in passed:
            self.paths.check_read_by(read_value, readers)
        for seen, _ in passed:
            self.paths.check_unseen(seen)
        return op, [(value, end), *path]

    def _into_layers_behind(self, norm: BatchNorm) -> None:
        """Fold a norm into every layer that reads it."""
        readers = list(self._readers(norm.output, norm.output))
        if not readers:
            raise Blocked("no layer stands behind it", norm.norm.op, NOT_EXACT)
        self.paths.check_unwritten(norm.input, norm.norm.op.id, max(reader.op.id for reader in readers))
        taken = []
        for reader in readers:
            layer = read(self.paths, reader.op)
            given = self.graph.values[reader.op.inputs[0]].shape
            index = self.paths.carried(norm.output, norm.axis, reader.path, layer.axis(given))
            self._check_takes_input(layer, norm)
            taken.append((layer, index))
        for layer, index in taken:
            fold = self.folds.setdefault(layer.op.id, _Fold(layer))
            fold.before.insert(0, (norm, index))
            fold.border = self.border if layer.pads else ""
        self.downward[norm.input] = (norm, readers)
        where = ", ".join(layer.path for layer, _ in taken)
        how = {"pad": ", which pads with -t / s", "map": ", with a map of the shift"}
        border = how[self.border] if any(layer.pads for layer, _ in taken) else ""
        self.changes[norm.path] = _change(norm, f"into {where} behind it{border}")

    def _readers(self, value: int, start: int) -> Iterator[_Reader]:
        """Yield every layer that reads a value, through norms that were folded and what carries channels."""
        self.paths.check_unseen(value)
        for op in self.paths.readers(value):
            later, behind = self.downward.get(value, (None, []))
            if later is not None and op.id in later.members:
                yield from (_Reader(r.op, ((start, value), *r.path)) for r in behind)
                continue
            if is_layer(op) and op.inputs[0] == value and value not in op.inputs[1:]:
                yield _Reader(op, ((start, value),))
            elif self.paths.carries(op, value):
                yield from self._readers(op.outputs[0], start)
            else:
                raise Blocked(f"{op.short} in {self.paths.where(op)} reads its output", op, NOT_EXACT)

    def _check_takes_input(self, layer: Layer, norm: BatchNorm) -> None:
        """Check that a layer can take over a norm in front of it."""
        op = layer.op
        if layer.weight is None:
            raise Blocked(f"the weight of {layer.path} is computed", op, "remove its parametrisation first")
        if layer.pads:
            repairs = {
                "pad": "border='pad', which pads with -t / s",
                "map": "border='map', which adds a map of the shift for inputs of this size",
            }
            if layer.transposed:
                del repairs["pad"]
            if self.border not in repairs:
                raise Blocked(
                    f"{layer.path} pads with zeros, where the norm would have put its shift",
                    op,
                    f"choose {' or '.join(repairs.values())}",
                )
            numbers = held(self.paths, norm)
            if self.border == "pad" and numbers is not None and bool((numbers[0] == 0).any()):
                raise Blocked("a gain is zero: no padding value is sent to zero by the norm", op, repairs["map"])
            heeds = heeds_padding if self.border == "pad" else returns_output
            if not heeds(self.paths, layer):
                raise Blocked(
                    f"{layer.path} pads in a way of its own", op, "use a layer that pads as its attribute says"
                )
        if layer.bias is None and not (layer.pads and self.border == "map") and not heeds_bias(self.paths, layer):
            raise Blocked(f"{layer.path or 'the model'} takes no bias", op, "give the layer a bias")

    # -- the plan -----------------------------------------------------------------------------------------

    def _edits(self, fold: _Fold) -> Iterator[Edit]:
        layer = fold.layer
        if layer.bias is None and (fold.behind or fold.border != "map"):
            yield AddBias(path=layer.path, size=layer.outputs, dtype=layer.dtype)
        if fold.border == "pad":
            channels = self._shape(layer, layer.op.inputs[0])[0]
            yield PadWithValue(path=layer.path, pads=layer.padding, channels=channels, dtype=layer.dtype)
        if fold.border == "map":
            yield AddShiftMap(path=layer.path, shape=self._shape(layer, layer.op.outputs[0]), dtype=layer.dtype)

    def _recipes(self, fold: _Fold) -> Iterator[Recipe]:
        layer = fold.layer
        inner = {"dim": 1 - layer.output_dim, "groups": layer.groups}
        outer = {"dim": layer.output_dim, "groups": layer.groups}
        scaled = [*_steps("scale_by_norms", fold.before, **inner), *_steps("scale_by_norms", fold.behind, **outer)]
        yield Recipe(keys=(layer.scaled,), steps=tuple(scaled))
        behind = _steps("pass_through_norms", fold.behind)
        shifted = [] if fold.border == "map" else _steps("add_shift_of_norms", fold.before, layer.weight, **inner)
        if shifted or behind:
            created = {} if layer.bias else {"shape": (layer.outputs,), "dtype": layer.dtype}
            yield Recipe(keys=(layer.bias or f"{layer.path}.bias",), steps=(*shifted, *behind), **created)
        if fold.border == "pad":
            channels = self._shape(layer, layer.op.inputs[0])[:1]
            steps = _steps("value_under_norms", fold.before)
            yield Recipe(keys=(f"{layer.path}.pad_value",), steps=steps, shape=channels, dtype=layer.dtype)
        if fold.border == "map":
            size, (op, arguments) = self._shape(layer, layer.op.inputs[0])[1:], layer.call
            steps = (
                *_steps("shift_map_of_norms", fold.before, layer.weight, size=size, op=op, arguments=arguments),
                *_steps("scale_by_norms", fold.behind, dim=0),
            )
            shape = self._shape(layer, layer.op.outputs[0])
            yield Recipe(keys=(f"{layer.path}.shift_map",), steps=steps, shape=shape, dtype=layer.dtype)

    def _shape(self, layer: Layer, value: int) -> tuple[int, ...]:
        """Return channels and positions of the input or output of a convolution."""
        return self.graph.values[value].shape[-1 - len(layer.kernel) :]

    def _notes(self) -> Iterator[str]:
        for fold in self.folds.values():
            if fold.border == "map":
                size = " x ".join(map(str, self._shape(fold.layer, fold.layer.op.inputs[0])[1:]))
                yield f"{fold.layer.path} takes only inputs of {size} positions now."
            if fold.border == "pad":
                yield f"{fold.layer.path} pads with -t / s, which is large where a gain is small: mind float16."


def _steps(
    function: str, norms: list[tuple[BatchNorm, list[int] | None]], *reads: str | None, **numbers: Any
) -> tuple[Step, ...]:
    """Return one function for norms that follow each other; none where there are none."""
    if not norms:
        return ()
    keys = (*(key for key in reads if key), *(key for norm, _ in norms for key in norm.reads))
    return (Step(function=function, reads=keys, numbers={"norms": [n.numbers(i) for n, i in norms], **numbers}),)


def _change(norm: BatchNorm, how: str) -> Change:
    kept = f"; {norm.keep} stays in its place" if norm.keep else ""
    return Change(path=norm.path, what="BatchNorm folded", how=how + kept)


def _both(one: Blocked, other: Blocked) -> Blocked:
    """Return why neither the layer before a norm nor those behind it can take it over."""
    hints = dict.fromkeys(hint for hint in (one.unblock, other.unblock) if hint and hint != NOT_EXACT)
    return Blocked(f"{one.why}, and {other.why}", one.op or other.op, ", or ".join(hints) or NOT_EXACT)
