"""Straight ways and matrices of a traced model, found by dataflow, with their numbers: what sublayers are read with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from normwise.errors import NotKnown
from normwise.facts import vocabulary as ops
from normwise.facts.attention import AttentionOperands
from normwise.facts.replay import Replayer
from normwise.graph import Op, Ref, ValueKind
from normwise.rendering import both
from normwise.spec import Gate, Modulation, NormSpec, Scope, Statistic
from normwise.theory._branches import sigma
from normwise.theory._moments import Norm

if TYPE_CHECKING:
    from normwise.facts import Facts
    from normwise.facts.calls import NormCall

__all__ = ["Linear", "Path", "Reader", "what"]

_SEED = 20261129


@dataclass(frozen=True, slots=True)
class Path:
    """A straight way back from a value, over steps that keep second moments up to a factor.

    Args:
        end: the value it ends at.
        outer: mean square of the factors between the norm, or the end, and the start.
        norm: the norm on the way; None without one.
        inner: mean square of the factors between the end and the norm; 1 without a norm.
    """

    end: int
    outer: float
    norm: Norm | None
    inner: float


@dataclass(frozen=True, slots=True)
class Linear:
    """y = W x + b: an op of an activation and a matrix."""

    op: Op
    x: int
    out: int
    matrix: torch.Tensor  # [out, in]


class Reader:
    """Reads sublayers off a traced model.

    Raises:
        NotKnown: from every method, for whatever cannot be read, with the reason.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts, self.graph, self.flow = facts, facts.graph, facts.flow
        self.streams, self.heads = facts.streams, AttentionOperands(facts.flow)
        target = facts.target
        named = {str(i): a for i, a in enumerate(target.args)} | dict(target.kwargs)
        inputs = {
            v.id: named[v.names[0]].detach().cpu()
            for v in self.graph.values
            if v.kind is ValueKind.INPUT and v.names and isinstance(named.get(v.names[0]), torch.Tensor)
        }
        constants = {v: _saveable(t) for v, t in facts.recording.constants.items() if t.is_inference()}
        self.replay = Replayer(facts.recording, target.model).assuming(inputs | constants)
        self._last = set[tuple[float, float]]()
        self.repeated = False  # whether two sublayers end in equal matrices: no independent draws

    # -- straight ways -------------------------------------------------------------------------

    def back(self, value: int, stop: int | None = None) -> Path:
        """Walk back from a value until an op that mixes, joins two activations, or bends; or until ``stop``."""
        outer, norm, factor = 1.0, None, 1.0
        while value != stop and value not in self.streams.made_by:
            call = self.streams.norm_at(value)
            if call is not None and value != call.input:
                if norm is not None:
                    raise NotKnown(both("two norms in a row", "两个归一化相连"))
                outer, norm, factor = factor, self.norm(call), 1.0
                value = call.input
                continue
            op = self.graph.producer(value)
            step = self._scaled(op) if op is not None else None
            if op is None or step is None:
                break
            value, factor = self.flow.acts(op)[0], factor * step
        return Path(value, factor, None, 1.0) if norm is None else Path(value, outer, norm, factor)

    def _scaled(self, op: Op) -> float | None:
        """Return the mean square by which an op of one activation multiplies it; None if it does anything else."""
        if len(self.flow.acts(op)) != 1:
            return None
        if op.short in ops.VIEW | ops.DROPOUT | ops.JOIN:
            return 1.0
        others = [a for a in op.args if not (isinstance(a, Ref) and self.flow.act[a.value])]
        if op.short in ops.MUL | ops.DIV and others:
            number = self._number(others[0])
            if op.short in ops.DIV and not (isinstance(op.args[0], Ref) and self.flow.act[op.args[0].value]):
                return None
            return float((number.reciprocal() if op.short in ops.DIV else number).square().mean())
        if op.short in ops.ADD and others and float(self._number(others[0]).abs().max()) == 0:
            return 1.0
        return None

    def _number(self, argument: object) -> torch.Tensor:
        if isinstance(argument, Ref):
            return self.replay(argument.value, {}).double()
        return torch.tensor(float(argument), dtype=torch.float64)  # type: ignore[arg-type]

    def norm(self, call: NormCall) -> Norm:
        """Return a norm over features as second moments see it."""
        spec, shape = call.spec, self.graph.values[call.input].shape
        if spec is None or not _over_features(spec, len(shape)):
            raise NotKnown(both("a norm that is not one over features", "有归一化不是在特征维上"))
        weight = None if call.weight is None else self.replay(call.weight, {})
        norm = Norm.of(spec, weight, shape[-1])
        if call.bias is not None and _not_small(self.replay(call.bias, {}), norm.square, shape[-1]):
            raise NotKnown(both("a norm's shift is not small", "归一化的偏置不小"))
        return norm

    def note_last(self, matrix: torch.Tensor) -> None:
        """Take note of the matrix that a sublayer ends in."""
        known = (float(matrix.sum(dtype=torch.float64)), sigma(matrix))
        self.repeated = self.repeated or (known in self._last and known[1] > 0)
        self._last.add(known)

    # -- matrices ------------------------------------------------------------------------------

    def linear(self, value: int) -> Linear | None:
        """Return the linear map that makes a value, or None."""
        op = self.graph.producer(value)
        if op is None or op.short not in ops.LINEAR | {"matmul"} or len(op.outputs) != 1:
            return None
        inputs = list(op.inputs)
        shift = inputs.pop(0) if op.short == "addmm" else inputs.pop(2) if len(inputs) > 2 else None
        if len(inputs) != 2 or not self.flow.act[inputs[0]] or self.flow.act[inputs[1]]:
            return None
        if any(op.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
            return None
        matrix = self.replay(inputs[1], {})
        if matrix.dim() != 2:
            return None
        matrix = matrix if op.short == "linear" else matrix.T
        if shift is not None and _not_small(self.replay(shift, {}), sigma(matrix), matrix.shape[1]):
            raise NotKnown(both("the shift of a matrix is not small", "矩阵的偏置不小"))
        return Linear(op, inputs[0], value, matrix)

    def sources(self, value: int) -> tuple[list[Linear], bool]:
        """Return the linear maps that a value is made of element by element, and whether norms stand between."""
        found, normed, pending, seen = dict[int, Linear](), False, [value], set[int]()
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            call = self.streams.norm_at(current)
            if call is not None and current != call.input:
                normed = True
                pending.append(call.input)
                continue
            linear = self.linear(current)
            if linear is not None:
                found[current] = linear
                continue
            op = self.graph.producer(current)
            if op is None or self.flow.mixes(op) or current in self.streams.made_by:
                raise NotKnown(what(op))
            pending.extend(self.flow.acts(op))
        return [found[v] for v in sorted(found)], normed

    def rows(self, linear: Linear, value: int, *, normed: bool) -> tuple[torch.Tensor, float]:
        """Return the rows of a matrix that a value is made of, and the factor on their second moment.

        Args:
            linear: the only matrix behind the value.
            value: made of its rows by moving, turning, scaling.
            normed: a norm stands between; the factor is then the second moment itself.
        """
        h = self.random(linear.out).requires_grad_()
        made = self.replay(value, {linear.out: h}, grad=True)
        (gradient,) = torch.autograd.grad((made * self.random(value)).sum(), h)
        used = gradient.flatten(0, -2).abs().amax(0) > 0
        if not bool(used.any()):
            raise NotKnown(both("a matrix without effect", "有矩阵不起作用"))
        size = 1.0 if normed else float(h.detach()[..., used].square().mean())
        return linear.matrix[used], float(made.detach().square().mean()) / size

    def random(self, value: int) -> torch.Tensor:
        """Return normal numbers in the shape of a value."""
        generator = torch.Generator().manual_seed(_SEED + value)
        return torch.randn(self.graph.values[value].shape, generator=generator, dtype=torch.float64, device="cpu")


def _saveable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that autograd may save, as wide as a replay is."""
    return tensor.double().clone() if tensor.is_floating_point() else tensor.clone()


def _not_small(shift: torch.Tensor, square: float, width: int) -> bool:
    """Whether a shift counts for more than what a net of this width strays by anyway: 1 / sqrt(H), relative."""
    return float(shift.double().square().mean()) > square * width**-0.5


def _over_features(spec: NormSpec, dims: int) -> bool:
    plain = spec.gate is Gate.NONE and spec.modulation is Modulation.NONE and not spec.weight_on_input
    features = spec.scope is Scope.HIDDEN and tuple(spec.axes) == (-1,) and not spec.groups and dims > 1
    return plain and features and spec.statistic is not Statistic.OTHER


def what(op: Op | None) -> str:
    """Say which op the theory knows nothing of."""
    name = "an input" if op is None else op.short
    return both(f"a sublayer is made by {name}, of which the theory knows nothing", f"有子层由 {name} 得到，理论不涉及")
