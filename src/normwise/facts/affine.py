"""What follows a norm's core: casts, gain, shift, modulation, gate, and where they stand."""

from __future__ import annotations

from dataclasses import dataclass

from normwise.facts import vocabulary as ops
from normwise.facts.flow import Flow, through_casts
from normwise.facts.promotions import rounds
from normwise.graph import Op, Ref
from normwise.spec import Cast, Gate, Modulation, Weight

__all__ = ["Affine", "follow", "offset_of", "pre_gated", "scaled_input"]


@dataclass(slots=True)
class Affine:
    """The chain from a core to the norm's output."""

    output: int
    weight: int | None = None
    weight_kind: Weight = Weight.NONE
    weight_offset: float = 0.0
    weight_axes: tuple[int, ...] = ()  # negative axes along which the gain varies
    bias: int | None = None
    factor: float = 1.0
    modulation: Modulation = Modulation.NONE
    gate: Gate = Gate.NONE
    cast: Cast = Cast.NONE
    groups: int | None = None
    viewed_back: bool = False
    members: frozenset[int] = frozenset()


def follow(flow: Flow, core: int, *, source: int) -> Affine:
    """Follow the single-use chain behind a core as long as it is the norm's own affine map.

    Args:
        flow: the graph with taints.
        core: the normalized value.
        source: the norm's input.
    """
    out, width = Affine(output=core), flow.graph.values[source].shape
    dtype = flow.graph.values[through_casts(flow, source)].dtype
    value, pending = core, []
    while True:
        if out.cast is Cast.NONE and rounds(flow, value, dtype):
            out.cast = Cast.AFTER_WEIGHT if out.weight is not None else Cast.BEFORE_WEIGHT
        consumers = list(flow.graph.consumers(value))
        if len(consumers) != 1:
            return out
        op = consumers[0]
        if op.short in ops.VIEW:
            if op.short not in ops.CAST and not _only_moves(flow, op):
                return out
            pending.append(op)
            value = op.outputs[0]
            if op.short in ops.RECAST:
                _commit(flow, out, pending, value, width)
            continue
        if not _apply(flow, out, op, value):
            return out
        value = op.outputs[0]
        _commit(flow, out, [*pending, op], value, width)
        pending = []


def _only_moves(flow: Flow, op: Op) -> bool:
    return flow.graph.values[op.outputs[0]].numel == flow.graph.values[op.inputs[0]].numel and len(op.outputs) == 1


def _commit(flow: Flow, out: Affine, chain: list[Op], value: int, width: tuple[int, ...]) -> None:
    """Accept the ops walked over so far; a view back to a merged axis shows a grouped norm."""
    shape = flow.graph.values[value].shape
    for op in chain:
        if (
            op.short in ("view", "reshape", "flatten", "_unsafe_view")
            and len(shape) == len(width) - 1
            and shape[:-1] == width[:-2]
        ):
            out.groups, out.viewed_back = width[-2], True
    out.members |= {op.id for op in chain}
    out.output = value


def _apply(flow: Flow, out: Affine, op: Op, value: int) -> bool:
    """Take one op into the affine map; False when the op is not part of it."""
    if op.short == "addcmul":
        return _addcmul(flow, out, op, value)
    if op.short not in ops.ADD | ops.MUL | ops.DIV | ops.SUB or len(op.args) < 2:
        return False
    other = op.args[1] if isinstance(op.args[0], Ref) and op.args[0].value == value else op.args[0]
    if isinstance(other, Ref) and other.value == value:
        return False
    if flow.graph.values[op.outputs[0]].shape != flow.graph.values[value].shape:
        return False
    if op.short in ops.MUL:
        return _multiply(flow, out, other, value)
    if op.short in ops.DIV:
        number = (
            other
            if isinstance(other, (int, float))
            else flow.graph.values[other.value].scalar
            if isinstance(other, Ref)
            else None
        )
        if number is None or (isinstance(other, Ref) and flow.learned[other.value]) or op.args[0] != Ref(value):
            return False
        out.factor /= number
        return True
    return op.short in ops.ADD and _shift(flow, out, other, value)


def _multiply(flow: Flow, out: Affine, other: object, value: int) -> bool:
    if isinstance(other, (int, float)):
        out.factor *= other
        return True
    if not isinstance(other, Ref):
        return False
    record = flow.graph.values[other.value]
    if flow.act[other.value]:
        return _by_data(flow, out, other.value, value)
    if flow.learned[other.value]:
        if out.weight is not None or out.bias is not None:
            return False
        out.weight, out.weight_offset = other.value, offset_of(flow, other.value)
        scalar = _is_one_number(flow, other.value) and not _one_wide(flow, value)
        out.weight_kind = Weight.SCALAR if scalar else Weight.VECTOR
        out.weight_axes = tuple(a for a in range(-len(record.shape), 0) if record.shape[a] > 1)
        return True
    if record.scalar is not None:
        out.factor *= record.scalar
        return True
    return False


def _is_one_number(flow: Flow, value: int) -> bool:
    """Whether a gain is a single number, perhaps repeated."""
    op = flow.graph.producer(value)
    while flow.graph.values[value].numel > 1 and op is not None and op.short in ops.VIEW:
        value = op.inputs[0]
        op = flow.graph.producer(value)
    return flow.graph.values[value].numel == 1


def _one_wide(flow: Flow, value: int) -> bool:
    shape = flow.graph.values[value].shape
    return bool(shape) and shape[-1] == 1


def _by_data(flow: Flow, out: Affine, other: int, value: int) -> bool:
    """A factor computed from data: a modulation if it is 1 + something or is broadcast, else a gate."""
    if out.gate is not Gate.NONE or out.modulation is not Modulation.NONE:
        return False
    full = flow.graph.values[other].shape == flow.graph.values[value].shape
    if offset_of(flow, other) == 1.0 or not full:
        out.modulation = Modulation.SCALE
        return True
    if _is_gate(flow, other):
        out.gate = Gate.AFTER
        return True
    return False


def _is_gate(flow: Flow, value: int) -> bool:
    """Whether a value is a squashed activation (silu, sigmoid, gelu), not another norm's output or a product."""
    op = flow.graph.producer(value)
    for _ in range(4):
        if op is None or op.short not in ops.VIEW:
            break
        op = flow.graph.producer(op.inputs[0])
    return op is not None and op.short in ("silu", "sigmoid", "gelu", "relu", "tanh", "softplus", "elu")


def _shift(flow: Flow, out: Affine, other: object, value: int) -> bool:
    if not isinstance(other, Ref):
        return False
    if flow.act[other.value]:
        if out.modulation is Modulation.SCALE and _spreads(flow, other.value, value):
            full = flow.graph.values[other.value].numel == flow.graph.values[value].numel
            if full and offset_of(flow, other.value) != 1.0 and not _shares_source(flow, other.value):
                return False
            out.modulation = Modulation.SCALE_SHIFT
            return True
        return False
    if flow.learned[other.value] and out.bias is None and _broadcasts(flow, other.value, value):
        out.bias = other.value
        return True
    return False


def _broadcasts(flow: Flow, other: int, value: int) -> bool:
    """A shift is one vector for all positions; a learned table of positions is none."""
    shape, full = flow.graph.values[other].shape, flow.graph.values[value].shape
    return sum(1 for s in shape if s > 1) <= 1 or len(shape) < len(full) - 1


def _spreads(flow: Flow, other: int, value: int) -> bool:
    """Whether a shift fits a value axis by axis, and says something about its channels: [B, 1, H] or [N, C, 1, 1]."""
    shape, full = flow.graph.values[other].shape, flow.graph.values[value].shape
    fits = all(a in (1, b) for a, b in zip(reversed(shape), reversed(full), strict=False))
    return shape[-1:] == full[-1:] or (fits and len(shape) > 2 and shape[-1] == 1 and shape[1:2] == full[1:2])


def _shares_source(flow: Flow, value: int) -> bool:
    """Whether a full-size shift was split off the same tensor as something else (scale, shift = chunk(2))."""
    op = flow.graph.producer(value)
    return op is not None and op.short in ("chunk", "split", "unbind", "slice", "split_with_sizes", "select", "getitem")


def _addcmul(flow: Flow, out: Affine, op: Op, value: int) -> bool:
    refs = [a.value for a in op.args if isinstance(a, Ref)]
    if len(refs) != 3 or out.weight is not None:
        return False
    base, one, two = refs
    gain = two if one == value else one
    if base == value or not flow.learned[gain] or flow.act[gain] or flow.act[base]:
        return False
    out.weight, out.weight_kind, out.weight_offset = gain, Weight.VECTOR, offset_of(flow, gain)
    out.bias = base
    return True


def offset_of(flow: Flow, value: int) -> float:
    """Return the constant that was added to a gain: 1 in (1 + weight)."""
    offset = 0.0
    for _ in range(6):
        op = flow.graph.producer(value)
        if op is None:
            return offset
        if op.short in ops.ADD:
            numbers = [a for a in op.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
            numbers += [
                s for a in op.args if isinstance(a, Ref) and (s := flow.graph.values[a.value].scalar) is not None
            ]
            tensors = [a.value for a in op.args if isinstance(a, Ref) and flow.graph.values[a.value].scalar is None]
            if len(numbers) != 1 or len(tensors) != 1:
                return offset
            offset, value = offset + numbers[0], tensors[0]
        elif op.short in ops.VIEW:
            value = op.inputs[0]
        else:
            return offset
    return offset


def pre_gated(flow: Flow, value: int) -> bool:
    """Whether a norm's input is x * silu(z), the gate of Mamba-2 style norms."""
    op = flow.graph.producer(value)
    for _ in range(3):
        if op is None or op.short not in ops.VIEW or len(op.inputs) != 1:
            break
        op = flow.graph.producer(op.inputs[0])
    if op is None or op.short not in ops.MUL or len(flow.acts(op)) != 2:
        return False
    a, b = flow.acts(op)
    return _is_gate(flow, a) != _is_gate(flow, b)


def scaled_input(flow: Flow, norm: Op, value: int, members: frozenset[int]) -> tuple[int, int, int] | None:
    """Return (x, gain, op) where a norm's input is gain * x, taken for the norm alone in its own module."""
    op = flow.graph.producer(value)
    if op is None or op.short not in ops.MUL or op.call != norm.call or not flow.graph.calls[op.call].leaf:
        return None
    if any(o.id not in members and o.short not in ops.RECAST for o in flow.graph.consumers(value)):
        return None
    acts, gains = flow.acts(op), [i for i in op.inputs if flow.learned[i] and not flow.act[i]]
    return (acts[0], gains[0], op.id) if len(acts) == len(gains) == 1 else None
