"""Measures along each stack: the stream, its branches, and the gradient that reaches it.

The gradient is that of a random unit projection of the model's outputs, so its level is
arbitrary and its shape by depth is what counts. In streams [..., T, H] it is also read token by token: the
root mean square of a whole layer hides that all of it sits on one position (SCIENCE: causal post-norm stacks).
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from normwise.errors import NotKnown
from normwise.facts import shares
from normwise.facts.placing import Placed
from normwise.facts.records import ProfileRow
from normwise.graph import Graph, Op
from normwise.graph.capture import Overwritten, tensors_in
from normwise.graph.guard import as_found
from normwise.graph.provenance import CallStack
from normwise.graph.trace import eager
from normwise.rendering import both
from normwise.targets import unwrap
from normwise.targets.guesses import sequence_first
from normwise.targets.target import Target

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["measure", "token_cosine", "tokens_apart", "with_eps_shares"]

_SEED = 20261129
# an op is found again by the module call it runs in, its name, its output shape, and its order among those
_Key = tuple[str, int, str, tuple[int, ...], int]


def measure(target: Target, graph: Graph, placed: Placed) -> tuple[ProfileRow, ...]:
    """Run forward and backward once with gradients and read the stream at every residual add.

    Raises:
        NotKnown: no stack, no numbers (fake weights), or no gradient can be taken.
    """
    if not placed.streams:
        raise NotKnown(both("no residual stream was found", "没有找到残差流"))
    if graph.fake:
        raise NotKnown(both("the weights hold no numbers", "权重没有数值"))
    keys = _keys(graph)
    wanted: dict[_Key, int] = {}
    for stream in placed.streams:
        for add in stream.adds:
            wanted[keys[add.op.id]] = add.op.id
    with as_found(target.model, inputs=(target.args, target.kwargs)):
        kept, gradients = _run(
            target, wanted, {a.op.id: _branch_position(graph, a.op, a.branches) for s in placed.streams for a in s.adds}
        )
    rows = []
    for index, stream in enumerate(placed.streams):
        for order, add in enumerate(stream.adds):
            seen = kept.get(add.op.id)
            rows.append(
                ProfileRow(
                    stack=index,
                    sublayer=order,
                    path=graph.path(add.op),
                    residual_rms=seen[0] if seen else None,
                    branch_rms=seen[1] if seen else None,
                    **(asdict(gradients[add.op.id]) if add.op.id in gradients else {"grad_rms": None}),
                    token_cosine=seen[2] if seen else None,
                )
            )
    return tuple(rows)


def _keys(graph: Graph) -> dict[int, _Key]:
    counts: Counter[tuple[str, int, str, tuple[int, ...]]] = Counter()
    keys = {}
    for op in graph.ops:
        if not op.outputs or op.namespace != "aten":
            continue
        call = graph.calls[op.call]
        key = (call.path, call.ordinal, op.short, graph.values[op.outputs[0]].shape)
        keys[op.id] = (*key, counts[key])
        counts[key] += 1
    return keys


def _branch_position(graph: Graph, op: Op, branches: list[int]) -> int:
    """Return which tensor argument of the add is the branch; -1 where it is a sum of several."""
    return next((i for i, value in enumerate(op.inputs) if value in branches), -1)


class _Watch(TorchDispatchMode):
    """Keeps the outputs of chosen adds while a run with gradients goes by."""

    def __init__(
        self,
        calls: CallStack,
        wanted: dict[_Key, int],
        branch: dict[int, int],
        overwritten: Overwritten,
        position_axis: int,
    ) -> None:
        super().__init__()
        self.position_axis = position_axis
        self.overwritten = overwritten
        self.calls, self.wanted, self.branch = calls, wanted, branch
        self.shapes = {(k[0], k[1], k[2], k[3]) for k in wanted}
        self.counts: Counter[Any] = Counter()
        self.rms: dict[int, tuple[float | None, float | None, float | None]] = {}
        self.edges: dict[int, GradientEdge] = {}
        self._latest: tuple[int, torch.Tensor] | None = None

    def settle(self) -> None:
        """Remember where the latest add stands in autograd's graph.

        Autograd records an op after this mode has seen it, and a later write in place moves the tensor on: the
        moment between is the next op.
        """
        if self._latest is not None and self._latest[1].requires_grad:
            self.edges[self._latest[0]] = get_gradient_edge(self._latest[1])
        self._latest = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.settle()
        self.overwritten.before(func, args, kwargs or {})
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and getattr(func, "namespace", "") == "aten":
            call = self.calls.calls[self.calls.current]
            key = (call.path, call.ordinal, func.overloadpacket.__name__.removesuffix("_"), tuple(output.shape))
            if key in self.shapes:
                op = self.wanted.get((*key, self.counts[key]))
                self.counts[key] += 1
                if op is not None:
                    self._keep(op, output, [a for a in args if isinstance(a, torch.Tensor)])
        return output

    def _keep(self, op: int, output: torch.Tensor, operands: list[torch.Tensor]) -> None:
        position = self.branch[op]
        branch = _rms(operands[position]) if 0 <= position < len(operands) else None
        self.rms[op] = (_rms(output), branch, token_cosine(output, self.position_axis))
        self._latest = (op, output)


def _rms(tensor: torch.Tensor) -> float | None:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    return float(tensor.detach().double().square().mean().sqrt())


def _run(
    target: Target, wanted: dict[_Key, int], branch: dict[int, int]
) -> tuple[dict[int, tuple[float | None, float | None, float | None]], dict[int, Gradient]]:
    axis = 0 if sequence_first(unwrap(target.model)[0]) else 1
    calls = CallStack(target.model)
    overwritten = Overwritten(target.model, (target.args, target.kwargs))
    watch = _Watch(calls, wanted, branch, overwritten, axis)
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
            gradients = _gradients(watch.edges, output, axis)
        except Exception as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            if not watch.rms:
                raise NotKnown(both(f"the run with gradients failed: {said}", f"求梯度的运行失败：{said}")) from error
            gradients = {}
        finally:
            overwritten.undo()
    return watch.rms, gradients


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
    rms = _rms(gradient)
    if rms is None:
        return None
    if gradient.dim() != 3 or gradient.shape[position_axis] < 2:
        return Gradient(rms, None, None)
    energy = gradient.detach().double().square().mean(-1)
    # a pooled or class-token output gives other tokens no gradient at the top: the median is over those that get any
    reached = energy[energy > 0]
    total = float(energy.sum())
    if total == 0:
        return Gradient(rms, None, None)
    return Gradient(rms, float(reached.median().sqrt()), float(energy.select(position_axis, 0).sum()) / total)


def token_cosine(stream: torch.Tensor, position_axis: int) -> float | None:
    """Return the mean cosine between the tokens of a sample; 1 means that they have become one vector."""
    if not stream.is_floating_point() or stream.dim() != 3 or stream.shape[position_axis] < 2:
        return None
    tokens = torch.nn.functional.normalize(stream.detach().double(), dim=-1, eps=torch.finfo(torch.float64).tiny)
    count = tokens.shape[position_axis]
    together = tokens.sum(position_axis).square().sum(-1).mean()
    return float((together - count) / (count * (count - 1)))


def tokens_apart(stream: torch.Tensor, position_axis: int) -> float | None:
    """Return the share of the squares that differs between the tokens of a sample, in the median channel.

    Tokens are brought to one length first, as a norm leaves them. The median keeps one massive channel, which every
    cosine is made of, from hiding what the others carry.
    """
    if not stream.is_floating_point() or stream.dim() != 3 or stream.shape[position_axis] < 2:
        return None
    tokens = torch.nn.functional.normalize(stream.detach().double(), dim=-1, eps=torch.finfo(torch.float64).tiny)
    squares = tokens.square().mean((0, position_axis))
    spread = tokens.var(position_axis, correction=0).mean(0)
    return float((spread / squares.clamp(min=torch.finfo(torch.float64).tiny)).median())


def _gradients(edges: dict[int, GradientEdge], output: Any, position_axis: int) -> dict[int, Gradient]:
    outputs = [t for t in tensors_in(output) if t.requires_grad and t.is_floating_point()]
    if not edges or not outputs:
        return {}
    generator = torch.Generator().manual_seed(_SEED)
    total: torch.Tensor | float = 0.0
    for out in outputs:
        direction = torch.randn(out.shape, generator=generator, device="cpu").to(out)
        total = total + (out * direction).sum().float() / max(out.numel(), 1) ** 0.5
    found = torch.autograd.grad(total, list(edges.values()), allow_unused=True)  # type: ignore[arg-type]
    read = {op: _gradient(g, position_axis) for op, g in zip(edges, found, strict=True) if g is not None}
    return {op: gradient for op, gradient in read.items() if gradient is not None}


def with_eps_shares(facts: Facts, rows: tuple[ProfileRow, ...]) -> tuple[ProfileRow, ...]:
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
