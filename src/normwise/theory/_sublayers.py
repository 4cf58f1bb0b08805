"""What a traced sublayer computes: its matrices, its activation function or its mask, by running pieces of it again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from normwise.errors import NotKnown
from normwise.facts import vocabulary as ops
from normwise.facts.replay import op_function
from normwise.graph import Op
from normwise.rendering import both
from normwise.theory._branches import AttentionBranch, Branch, MLPBranch, sigma
from normwise.theory._gauss import Function
from normwise.theory._reading import Linear, Path, Reader, what

__all__ = ["branch_of"]

# functions of single numbers, known by what they do, however they are written
_ACTIVATIONS: tuple[Function, ...] = (
    functional.gelu,
    partial(functional.gelu, approximate="tanh"),
    functional.relu,
    functional.silu,
    lambda z: z * torch.sigmoid(1.702 * z),  # GELU, approximated: Hendrycks and Gimpel 2016, arxiv.org/abs/1606.08415
    lambda z: functional.relu(z).square(),  # So et al. 2021, arxiv.org/abs/2109.08668
    torch.tanh,
)
_RANGE = 6.0  # of unit normal numbers, and more than any net at initialisation sees
_SAME = 1e-9  # float64 against float64
_SMALL = 1e-3  # of queries: scores so small that a cap on them does nothing
_HIDDEN = -1e3  # scores at and below are of a mask, as in ``facts.masks``
_MATMUL = frozenset({"matmul", "bmm"})

_FORM = both("an MLP of another form", "MLP 的形式不是已知的")


def branch_of(reader: Reader, value: int, fork: int) -> tuple[Branch, Path, Path]:
    """Return what makes a value that is added, the way from its last matrix to the add, and the way into it.

    Args:
        reader: of the model.
        value: what is added.
        fork: the value of the stream that the sublayer reads.

    Raises:
        NotKnown: it is neither attention nor an MLP of a known form, or reads more than its stream.
    """
    leaving = reader.back(value)
    last = reader.linear(leaving.end)
    if last is None:
        raise NotKnown(what(reader.graph.producer(leaving.end)))
    reader.note_last(last.matrix)
    inside = reader.back(last.x)
    out = sigma(last.matrix) * leaving.inner * inside.outer * (1.0 if inside.norm is None else inside.norm.square)
    weighing = _Weighing.of(reader, inside.end)
    branch, inputs = _mlp(reader, inside, out) if weighing is None else _attention(reader, weighing, inside, out)
    ways = {reader.back(x, fork) for x in inputs}
    if len(ways) != 1 or next(iter(ways)).end != fork:
        raise NotKnown(both("a sublayer reads more than its stream", "有子层读取了残差流以外的值"))
    return branch, leaving, ways.pop()


# -- MLPs --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """Columns of what one of the first matrices makes."""

    linear: Linear
    columns: slice

    @property
    def matrix(self) -> torch.Tensor:
        return self.linear.matrix[self.columns]


def _mlp(reader: Reader, inside: Path, out: float) -> tuple[Branch, list[int]]:
    linears, normed = reader.sources(inside.end)
    if normed or len(linears) > 2:
        raise NotKnown(_FORM)
    up, gate, activation = _first_matrices(reader, inside.end, linears)
    branch = MLPBranch(
        activation=activation,
        up=sigma(up),
        down=out * inside.inner if inside.norm is None else out,
        gate=0.0 if gate is None else sigma(gate),
        inner_norm=inside.norm is not None,
    )
    return branch, [linear.x for linear in linears]


def _first_matrices(
    reader: Reader, value: int, linears: list[Linear]
) -> tuple[torch.Tensor, torch.Tensor | None, Function]:
    """Return up, gate and the function between, by what the piece of program makes of numbers put in for them."""
    record = reader.graph.values[value]
    grid = torch.linspace(-_RANGE, _RANGE, record.numel, dtype=torch.float64)
    widths = [len(linear.matrix) for linear in linears]
    if widths == [record.shape[-1]]:
        made = reader.replay(value, {linears[0].out: grid.reshape(reader.graph.values[linears[0].out].shape)})
        return linears[0].matrix, None, _function(made.flatten(), grid)
    if sum(widths) != 2 * record.shape[-1]:
        raise NotKnown(_FORM)
    for one, other in _factors(linears, record.shape[-1]):
        for up, gate in ((one, other), (other, one)):
            if (made := _gated(reader, value, up, gate, grid)) is not None:
                return up.matrix, gate.matrix, _function(made, grid)
    raise NotKnown(_FORM)


def _factors(linears: list[Linear], width: int) -> Iterator[tuple[_Part, _Part]]:
    """Yield how two factors may lie in what the matrices make: one each, one behind the other, or in turn."""
    if len(linears) == 2:
        yield _Part(linears[0], slice(None)), _Part(linears[1], slice(None))
        return
    yield _Part(linears[0], slice(0, width)), _Part(linears[0], slice(width, None))
    yield _Part(linears[0], slice(0, None, 2)), _Part(linears[0], slice(1, None, 2))


def _gated(reader: Reader, value: int, up: _Part, gate: _Part, grid: torch.Tensor) -> torch.Tensor | None:
    """Return f(grid) if the value is f(gate) * up, else None."""
    made = []
    for factor in (1.0, 2.0):
        given = {
            part.linear.out: torch.zeros(reader.graph.values[part.linear.out].shape, dtype=torch.float64)
            for part in (up, gate)
        }
        of_gate = given[gate.linear.out][..., gate.columns]
        of_gate.copy_(grid.reshape(of_gate.shape))
        given[up.linear.out][..., up.columns] = factor
        made.append(reader.replay(value, given).flatten())
    once, twice = made
    return once if float((twice - 2 * once).abs().max()) <= _SAME and float(once.abs().max()) > 0 else None


def _function(made: torch.Tensor, grid: torch.Tensor) -> Function:
    for function in _ACTIVATIONS:
        if float((made - function(grid)).abs().max()) <= _SAME:
            return function
    raise NotKnown(both("an activation function that is not known", "激活函数不是已知的"))


# -- attention ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Weighing:
    """Where values are weighed: one fused op, or scores, a softmax and a product."""

    out: int
    query: int
    key: int
    value: int
    scores: tuple[int, int] | None  # q k^T, and what the softmax is given; None where all is one op

    @classmethod
    def of(cls, reader: Reader, out: int) -> _Weighing | None:
        op = reader.graph.producer(out)
        if op is None or not (op.short in ops.ATTENTION or (op.short in _MATMUL and len(reader.flow.acts(op)) == 2)):
            return None
        if op.short in ops.ATTENTION:
            query, key, value = op.inputs[:3]
            return cls(out, query, key, value, None)
        softmax = _softmax_behind(reader, op.inputs[0])
        score = None if softmax is None else reader.heads.matmul_behind(softmax.inputs[0])
        if softmax is None or score is None or score.short not in _MATMUL:
            raise NotKnown(what(op))
        return cls(out, score.inputs[0], score.inputs[1], op.inputs[1], (score.outputs[0], softmax.inputs[0]))


def _softmax_behind(reader: Reader, value: int) -> Op | None:
    op = reader.graph.producer(value)
    while op is not None and op.short not in ops.SOFTMAX:
        acts = reader.flow.acts(op)
        if reader.flow.mixes(op) or len(acts) != 1:
            return None
        op = reader.graph.producer(acts[0])
    return op


def _attention(reader: Reader, weighing: _Weighing, inside: Path, out: float) -> tuple[Branch, list[int]]:
    queries, keys = (reader.graph.values[v].shape[-2] for v in (weighing.query, weighing.value))
    if queries != keys:
        raise NotKnown(both("attention to other tokens than those of its stream", "注意力看的不是自身残差流的 token"))
    matrices, factors, norms, inputs = [], [], [], []
    for operand in (weighing.query, weighing.key, weighing.value):
        linears, normed = reader.sources(operand)
        if len(linears) != 1:
            raise NotKnown(both("queries, keys or values of several matrices", "查询、键或值由多个矩阵得到"))
        matrix, factor = reader.rows(linears[0], operand, normed=normed)
        matrices.append(sigma(matrix))
        factors.append(factor)
        norms.append(normed)
        inputs.append(linears[0].x)
    if norms[0] != norms[1]:
        raise NotKnown(both("a norm on queries or keys alone", "只有查询或键有归一化"))
    # behind a norm the size of the values is that of its gain, which ``out`` takes
    values, out = (matrices[2], out * factors[2]) if norms[2] else (matrices[2] * factors[2], out)
    branch = AttentionBranch(
        visible=_visible(reader, weighing),
        query=matrices[0],
        key=matrices[1],
        value=values,
        out=out if inside.norm is not None else out * inside.inner,
        scale=_scale(reader, weighing) * math.sqrt(factors[0] * factors[1]),
        qk_norm=norms[0],
        value_norm=norms[2],
        inner_norm=inside.norm is not None,
    )
    return branch, inputs


def _scale(reader: Reader, weighing: _Weighing) -> float:
    """Return the factor on q k^T, times the root of the width of a head."""
    root = math.sqrt(reader.graph.values[weighing.query].shape[-1])
    if weighing.scores is None:
        op = reader.graph.producer(weighing.out)
        assert op is not None
        given = _argument(op, "scale")
        return float(given) * root if isinstance(given, (int, float)) else 1.0
    product, logits = weighing.scores
    queries, keys = reader.random(weighing.query) * _SMALL, reader.random(weighing.key)
    made, bare = (
        reader.replay(logits, {weighing.query: q, weighing.key: keys}).flatten()
        for q in (queries, torch.zeros_like(queries))
    )
    plain = reader.replay(product, {weighing.query: queries, weighing.key: keys}).flatten()
    shown = bare > _HIDDEN
    if made.shape != plain.shape or not bool(shown.any()):
        raise NotKnown(both("attention scores of another form", "注意力分数的形式不是已知的"))
    return math.sqrt(float((made - bare)[shown].square().sum() / plain[shown].square().sum())) * root


def _visible(reader: Reader, weighing: _Weighing) -> torch.Tensor:
    """Return [T, T], 1 where a query sees a key: equal scores, and values that are 1 at one key each, show it."""
    zeros = {v: torch.zeros(reader.graph.values[v].shape, dtype=torch.float64) for v in (weighing.query, weighing.key)}
    shape = reader.graph.values[weighing.value].shape
    steps, width = shape[-2:]
    seen = []
    for start in range(0, steps, width):
        key = torch.arange(start, min(start + width, steps))
        values = torch.zeros(shape, dtype=torch.float64)
        values[..., key, key - start] = 1.0
        seen.append(reader.replay(weighing.out, zeros | {weighing.value: values})[..., : len(key)].flatten(0, -3))
    weights = torch.cat(seen, -1)  # [samples * heads, T, T]
    if not float((weights - weights[0]).abs().max()) <= _SAME:
        raise NotKnown(both("samples or heads do not see the same keys", "各样本或各头看到的键不同"))
    visible = (weights[0] > 0).double()
    uniform = visible / visible.sum(1, keepdim=True)
    if not float((weights[0] - uniform).abs().max()) <= _SAME:
        raise NotKnown(both("attention scores have a bias of their own", "注意力分数另有偏置"))
    return visible


def _argument(op: Op, name: str) -> object:
    """Return an argument of a torch op by its name."""
    given = dict(zip((a.name for a in op_function(op)._schema.arguments), op.args, strict=False)) | op.kwargs
    return given.get(name)
