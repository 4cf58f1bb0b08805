"""Measures along each stack: the stream, its branches, and the gradients that reach it.

Branch gain v: the second moment of the branch as it is added (behind LayerScale, dropout and constants) over m, the
second moment of what the sublayer reads. m is 1 where a norm fixes it: in front of the sublayer, at the end of the
branch or inside it, or on the stream itself (post-norm). Gains of norms thus count into v. Without a norm m is the
second moment of the stream before the add. So with q the second moment of the stream and a the constant on the skip

    q_(s+1) = a^2 q_s + v_s      with a norm (in post-norm stacks q_s is that of the normalized stream)
    q_(s+1) = (a^2 + v_s) q_s    without one

hold but for 2 a E[stream * branch], whose mean over fresh weights is 0.

Block influence: 1 - cos(x_l, x_(l+1)), the mean over tokens, of the stream as the last add of a layer leaves it. A norm
behind that add does not count: it would turn the token by its gains and its mean, which is not the layer's work. The
first layer starts from the stream that its first add reads.

The gradient is that of a random unit projection of the model's outputs, so its level is
arbitrary and its shape by depth is what counts. In streams [..., T, H] it is also read token by token: the
root mean square of a whole layer hides that all of it sits on one position (SCIENCE: causal post-norm stacks). That of
the queries' weights vanishes first where tokens become alike.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map_only

from normwise.errors import NotKnown
from normwise.facts import shares
from normwise.facts.adds import Add, AddWatch, Seen, adds_of
from normwise.facts.queries import QueryWeight, query_weights
from normwise.facts.records import ProfileRow
from normwise.graph.capture import Overwritten, tensors_in
from normwise.graph.guard import as_found
from normwise.graph.observing import KEPT_BYTES
from normwise.graph.provenance import CallStack
from normwise.graph.trace import eager
from normwise.rendering import both
from normwise.targets import unwrap
from normwise.targets.guesses import sequence_first

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["SEED", "measure"]

SEED = 20261129
_Weights = dict[int, tuple[QueryWeight, ...]]  # of the queries, by the op of the residual add


def measure(facts: Facts) -> tuple[ProfileRow, ...]:
    """Run forward and backward once with gradients and read the stream at every residual add.

    Raises:
        NotKnown: no stack, no numbers (fake weights), or no gradient can be taken.
    """
    graph, placed, target = facts.traced.graph, facts.placed, facts.target
    if not placed.streams:
        raise NotKnown(both("no residual stream was found", "没有找到残差流"))
    if graph.fake:
        raise NotKnown(both("the weights hold no numbers", "权重没有数值"))
    adds = list(adds_of(graph, placed, facts.streams.residuals))
    try:
        queries = query_weights(facts)
    except Exception:  # pieces of the user's program are run again: without them the rest can still be measured
        queries = {}
    with as_found(target.model, inputs=(target.args, target.kwargs)):
        run = _run(facts, adds, queries)
    rows = []
    for add in adds:
        seen, gradient = run.seen.get(add.op, Seen()), run.gradients.get(add.op)
        rows.append(
            ProfileRow(
                stack=add.stack,
                sublayer=add.order,
                path=graph.path(graph.ops[add.op]),
                **asdict(seen),
                **(asdict(gradient) if gradient is not None else {"grad_rms": None}),
                query_grad=run.queries.get(add.op),
            )
        )
    return _with_eps_shares(facts, tuple(rows))


@dataclass(slots=True)
class _Run:
    """What one run gave, by the op of the residual add."""

    seen: dict[int, Seen]
    gradients: dict[int, Gradient]
    queries: dict[int, float]


def _run(facts: Facts, adds: list[Add], queries: _Weights) -> _Run:
    target = facts.target
    axis = 0 if sequence_first(unwrap(target.model)[0]) else 1
    calls = CallStack(target.model)
    overwritten = Overwritten(target.model, (target.args, target.kwargs))
    watch = AddWatch(facts.traced.graph, adds, calls, overwritten, axis)
    run = _Run(watch.seen, {}, {})
    # parameters made in inference mode can be run but not differentiated
    frozen = any(p.is_inference() for p in target.model.parameters())
    with warnings.catch_warnings(), eager(), torch.enable_grad(), torch.inference_mode(frozen):
        warnings.simplefilter("ignore")
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with calls.following(lambda tree: (), lambda call, output: ()), watch:
                args, kwargs = tree_map_only(torch.Tensor, _differentiable, (target.args, dict(target.kwargs)))
                output = unwrap(target.model)[0](*args, **kwargs)
            watch.settle()
            run = _differentiated(facts, watch, output, queries)
        except Exception as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            if not watch.seen:
                raise NotKnown(both(f"the run with gradients failed: {said}", f"求梯度的运行失败：{said}")) from error
        finally:
            overwritten.undo()
    return run


def _differentiable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that autograd may save; one made in inference mode is copied."""
    return tensor.clone() if tensor.is_inference() else tensor


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient at one add: of the whole value, of its median token, and the share of the first position."""

    grad_rms: float
    grad_median: float | None
    grad_first_share: float | None


def _gradient(gradient: torch.Tensor, position_axis: int) -> Gradient | None:
    if not gradient.is_floating_point() or gradient.numel() == 0:
        return None
    squares = gradient.detach().double().square()
    rms = float(squares.mean().sqrt())
    if gradient.dim() != 3 or gradient.shape[position_axis] < 2:
        return Gradient(rms, None, None)
    energy = squares.mean(-1)
    # a pooled or class-token output gives other tokens no gradient at the top: the median is over those that get any
    reached = energy[energy > 0]
    total = float(energy.sum())
    if total == 0:
        return Gradient(rms, None, None)
    return Gradient(rms, float(reached.median().sqrt()), float(energy.select(position_axis, 0).sum()) / total)


def _differentiated(facts: Facts, watch: AddWatch, output: Any, queries: _Weights) -> _Run:
    """Return the measures of a run with the gradients of a random projection of its outputs."""
    outputs = [t for t in tensors_in(output) if t.requires_grad and t.is_floating_point()]
    if not watch.edges or not outputs:
        return _Run(watch.seen, {}, {})
    generator = torch.Generator().manual_seed(SEED)
    total: torch.Tensor | float = 0.0
    for out in outputs:
        direction = torch.randn(out.shape, generator=generator, device="cpu").to(out)
        total = total + (out * direction).sum().float() / max(out.numel(), 1) ** 0.5
    names = dict.fromkeys(w.name for weights in queries.values() for w in weights)
    learned = {n: facts.parameters[n] for n in names if n in facts.parameters and facts.parameters[n].requires_grad}
    if sum(weight.nbytes for weight in learned.values()) > KEPT_BYTES:  # they are all held at once
        learned = {}
    wanted: list[GradientEdge | torch.Tensor] = [*watch.edges.values(), *learned.values()]
    found = torch.autograd.grad(total, wanted, allow_unused=True)  # type: ignore[arg-type]
    streams = zip(watch.edges, found, strict=False)
    read = {op: _gradient(g, watch.position_axis) for op, g in streams if g is not None}
    by_name = dict(zip(learned, found[len(watch.edges) :], strict=True))
    sizes = {op: _query_size(weights, by_name) for op, weights in queries.items()}
    return _Run(
        watch.seen,
        {op: gradient for op, gradient in read.items() if gradient is not None},
        {op: size for op, size in sizes.items() if size is not None},
    )


def _query_size(weights: tuple[QueryWeight, ...], gradients: dict[str, torch.Tensor | None]) -> float | None:
    """Return the root mean square of the gradient of the weights that make a sublayer's queries."""
    parts = [w.of(g) for w in weights if (g := gradients.get(w.name)) is not None]
    count = sum(part.numel() for part in parts)
    return (sum(float(part.double().square().sum()) for part in parts) / count) ** 0.5 if count else None


def _with_eps_shares(facts: Facts, rows: tuple[ProfileRow, ...]) -> tuple[ProfileRow, ...]:
    """Return the rows with the eps share of each sublayer's norms, where the traced run kept its values anyway."""
    observer = facts.traced.observer
    if observer is None or observer.full:
        return rows
    try:
        found = list(shares.shares(facts))
    except NotKnown:
        return rows
    largest: dict[int, float] = {}
    for each in found:
        for call in each.site.calls:
            add = facts.placed.seats[call.op.id].add
            if add is not None:
                largest[add] = max(largest.get(add, 0.0), each.share)
    adds = [[a.index for a in stream.adds] for stream in facts.placed.streams]
    return tuple(replace(r, eps_share=largest.get(adds[r.stack][r.sublayer])) for r in rows)
