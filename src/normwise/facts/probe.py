"""Judges modules whose arithmetic the graph does not show (custom ops, foreign kernels, numpy) by what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import nn

from normwise.facts.flow import Flow
from normwise.facts.norms import NormCall
from normwise.facts.records import Evidence
from normwise.graph import ALIAS, OPAQUE, Call, Op, Recording
from normwise.graph.guard import as_found
from normwise.rendering import both
from normwise.spec import NormSpec, Scope, Statistic, Weight

__all__ = ["opaque_norms"]

# A norm's output does not move when its input is scaled; measured noise of half-precision kernels is below this
_SAME = 2e-2
# below this share of the output's energy, eps is measured to the second digit in fp32
_SHRUNK = 0.5
# rows must tell the same eps; the guard is then inside the root
_SPREAD = 0.05
_SEED = 20261129


def opaque_norms(recording: Recording, flow: Flow, model: nn.Module, known: frozenset[int]) -> Iterator[NormCall]:
    """Yield the leaf modules that hold an opaque op and behave like a norm.

    Args:
        recording: the traced run.
        flow: its taints.
        model: the model, for its modules.
        known: ops that belong to norms already found.
    """
    graph = recording.graph
    modules = dict(model.named_modules(remove_duplicate=False))
    device = _device(model, torch.device("cpu"))
    verdicts: dict[str, NormSpec | None] = {}
    held: dict[int, list[Op]] = {}
    for op in graph.ops:
        held.setdefault(op.call, []).append(op)
    for call in graph.calls:
        ops = held.get(call.id, [])
        opaque = [o for o in ops if _is_opaque(o)]
        if not call.leaf or not opaque or any(o.id in known for o in ops):
            continue
        spec = verdicts[call.path] if call.path in verdicts else _judge(flow, call, modules.get(call.path), device)
        verdicts[call.path] = spec
        if spec is not None:
            source, output = _activation(flow, call.inputs), call.outputs[0]
            assert source is not None
            yield NormCall(
                op=opaque[-1],
                input=source,
                core=output,
                output=output,
                spec=spec,
                call=call.id,
                native=False,
                evidence=Evidence.PROBED,
                members=frozenset(o.id for o in ops),
                note=both(
                    f"opaque ({opaque[-1].name}): judged by behaviour", f"不透明（{opaque[-1].name}）：按行为判断"
                ),
                statistic_value=source,
                inner_values=frozenset({output}),
            )


def _is_opaque(op: Op) -> bool:
    return op.name == OPAQUE or (op.namespace not in ("aten", "prims") and op.name != ALIAS)


def _activation(flow: Flow, values: tuple[int, ...]) -> int | None:
    acts = [v for v in values if flow.data[v] and flow.graph.values[v].floating]
    return acts[0] if len(set(acts)) == 1 else None


def _judge(flow: Flow, call: Call, module: nn.Module | None, device: torch.device) -> NormSpec | None:
    source = _activation(flow, call.inputs)
    if module is None or source is None or len(call.outputs) != 1 or flow.graph.fake:
        return None
    record = flow.graph.values[source]
    if record.shape != flow.graph.values[call.outputs[0]].shape or record.numel == 0:
        return None
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(record.shape, generator=generator, device="cpu") * 2 + 0.5
    x = x.to(_device(module, device), getattr(torch, record.dtype))
    with as_found(module), torch.no_grad():
        try:
            return _spec_by_behaviour(module, x)
        except Exception:  # the user's code may refuse these numbers in any way
            return None


def _device(module: nn.Module, otherwise: torch.device) -> torch.device:
    held = next(chain(module.parameters(), module.buffers()), None)
    return otherwise if held is None else held.device


def _spec_by_behaviour(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> NormSpec | None:
    y = f(x)
    if not torch.isfinite(y).all() or _same(y, torch.zeros_like(y)) or not _same(f(x * 3), y):
        return None
    if _same(f(-x), y):
        return None  # ignores its input
    centred = _same(f(x + 5), y)
    axes = _axes(f, x, y)
    if not axes:
        return None
    statistic = Statistic.VARIANCE if centred else Statistic.MEAN_SQUARE
    scope = Scope.BATCH if -x.ndim in axes and x.ndim > 1 else Scope.HIDDEN
    return NormSpec(
        scope=scope,
        axes=axes,
        center=centred,
        statistic=statistic,
        eps=_eps(f, x, axes, centred),
        weight=Weight.NONE,
        stats_dtype=None,
    )


def _eps(
    f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, axes: tuple[int, ...], centred: bool
) -> float | None:
    """Measure eps where it matters: on an input so small that the output shrinks by sqrt(v / (v + eps))."""
    shift = f(torch.zeros_like(x)).double()
    if not torch.isfinite(shift).all():
        return 0.0
    full = (f(x).double() - shift).square().mean(axes)
    for exponent in range(1, 8):
        small = x * 10.0**-exponent
        v = small.double().var(axes, correction=0) if centred else small.double().square().mean(axes)
        ratio = (f(small).double() - shift).square().mean(axes) / full
        if float(ratio.median()) < _SHRUNK:
            eps = (v * (1 / ratio - 1)).flatten()
            agree = bool(((eps - eps.median()).abs() <= _SPREAD * eps.median()).all())
            return float(f"{float(eps.median()):.2g}") if agree else None
    return None


def _axes(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> tuple[int, ...]:
    """Return the axes along which a change of one element spreads."""
    moved = x.clone()
    origin = tuple(0 for _ in x.shape)
    moved[origin] += 10 * (x.abs().max() + 1)
    changed = (f(moved) - y).abs() > 1e-6 * y.abs().max()
    return tuple(a for a in range(-x.ndim, 0) if bool(changed.movedim(a, 0)[1:].any()))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.float() - b.float()).abs().max() <= _SAME * (b.float().abs().max() + 1e-12))
