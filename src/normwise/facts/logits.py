"""How sharp attention is on the data: the spread of its logits and the entropy of its weights, head by head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from normwise.errors import NotKnown
from normwise.facts import vocabulary as ops
from normwise.facts.attention import AttentionOperands
from normwise.facts.calls import NormCall
from normwise.facts.replay import Replayer, op_function
from normwise.facts.runs import Run
from normwise.graph import Op, Ref, ValueKind
from normwise.rendering import both

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["ENTROPY", "HEADS", "SPREAD", "Attention", "Sharpness", "again", "attentions"]

# Normalized queries and keys have logits of standard deviation 1. MiniLM's heads reach 2.2, and one of its 72, which
# looks at a single token, 10.8; the replayed divergence has 27 in every head.
SPREAD = 8.0
ENTROPY = 0.1
# of the heads of a layer: single sharp heads (previous token, separator) are what attention is for
HEADS = 0.75

# samples and queries that are enough for a mean: the cost stays that of a few rows at any length
_SAMPLES, _QUERIES = 4, 128
# Masks are added, -100 (Swin), -1e4 or less, and leave a gap between what is seen and what is not. No logits that mean
# something lie a thousand apart; a smaller gap is a mask's if it exceeds the spread of several keys above it by far.
_GAP, _GAPS, _SURE = 50.0, 4.0, 1000.0
# products that are query @ key, the keys transposed
_PLAIN = frozenset({"matmul", "bmm", "baddbmm"})
# keys that are alike spread nothing, however they are scaled
_SPREADS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharpness:
    """Of one attention, by head: a query's logits spread by ``spread``, its weights have ``entropy`` of the most."""

    spread: tuple[float, ...]  # standard deviation over the keys a query sees
    entropy: tuple[float, ...]  # mean over the queries, as a share of the logarithm of the number of keys

    def saturated(self, spread: float, entropy: float) -> float:
        """Return the share of heads whose logits spread by more, with an entropy below that share of the most."""
        pairs = list(zip(self.spread, self.entropy, strict=True))
        return sum(s > spread and e < entropy for s, e in pairs) / len(pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One execution of attention."""

    path: str
    op: int
    operands: tuple[int, int]  # query and key
    keys: int
    measured: Sharpness
    norms: tuple[NormCall, ...]  # that stand on queries or keys
    learned_scale: bool  # a parameter scales the logits: a temperature
    with_norm: Sharpness | None  # the same if queries and keys were RMS-normalized; None where they were not kept

    @property
    def scale(self) -> float | None:
        """The logits' spread relative to that of RMS-normalized queries and keys over sqrt(width): 1 is usual."""
        if self.with_norm is None:
            return None
        pairs = zip(self.measured.spread, self.with_norm.spread, strict=True)
        ratios = sorted(a / b for a, b in pairs if b > _SPREADS)
        return ratios[len(ratios) // 2] if ratios else None

    def saturated(self, spread: float, entropy: float) -> float:
        """Return the share of heads whose logits spread by more, with an entropy below that share of the most."""
        return self.measured.saturated(spread, entropy)

    @property
    def bare(self) -> bool:
        """Whether neither a norm nor a learned temperature keeps its logits in bounds."""
        return not self.norms and not self.learned_scale


def attentions(facts: Facts) -> tuple[Attention, ...]:
    """Return every softmax attention of the traced run with at least 4 keys.

    Raises:
        NotKnown: nothing was kept of the run, or no attention of it can be read.
    """
    run, heads = facts.runs.base, AttentionOperands(facts.flow)
    scores = [s for op in facts.graph.ops if (s := _Score.of(facts, heads, op)) is not None]
    found = tuple(read for s in scores if (read := s.read(run)) is not None)
    if scores and not found:
        raise NotKnown(
            both("needs attention over at least 4 keys whose mask is known", "需要至少 4 个键且掩码已知的注意力")
        )
    return found


def again(facts: Facts, attention: Attention, run: Run) -> Sharpness | None:
    """Return how sharp an attention is in an altered run that kept its operands and the op's inputs."""
    score = _Score.of(facts, AttentionOperands(facts.flow), facts.graph.ops[attention.op])
    read = score.read(run) if score is not None else None
    return read.measured if read is not None else None


@dataclass(frozen=True, slots=True)
class _Score:
    """Where the logits of one attention come from."""

    facts: Facts
    op: Op  # the fused attention or the softmax
    query: int
    key: int
    product: Op | None  # the matmul of query and key, where it is an op of its own

    @classmethod
    def of(cls, facts: Facts, heads: AttentionOperands, op: Op) -> _Score | None:
        inputs = list(op.inputs)
        if op.short in ops.ATTENTION:
            return cls(facts, op, inputs[0], inputs[1], None) if len(inputs) > 1 else None
        if op.short in ops.SOFTMAX and inputs:
            product = heads.matmul_behind(inputs[0])
            acts = facts.flow.acts(product) if product is not None else []
            if product is not None and len(acts) >= 2:
                return cls(facts, op, acts[-2], acts[-1], product)
        return None

    def read(self, run: Run) -> Attention | None:
        try:
            logits = self._logits(run, normed=False)
        except (NotKnown, RuntimeError):  # a mask or a layout of its own
            return None
        measured = _sharpness(logits)
        if measured is None:
            return None
        try:
            repaired = self._logits(run, normed=True)
        except (NotKnown, RuntimeError):
            repaired = None
        chains = [self.facts.streams.chain(v) for v in (self.query, self.key)]
        return Attention(
            path=self.facts.graph.path(self.op),
            op=self.op.id,
            operands=(self.query, self.key),
            keys=logits.shape[-1],
            measured=measured,
            norms=tuple({id(n): n for c in chains for n in c.norms}.values()),
            learned_scale=self._learned_scale(),
            with_norm=_sharpness(repaired) if repaired is not None else None,
        )

    def _logits(self, run: Run, *, normed: bool) -> torch.Tensor:
        """Return logits [samples, heads, queries, keys] in float64, masked ones at -inf."""
        if self.product is not None:
            shown = _four(run.of(self.op.inputs[0])).double()
            logits = self._product(run, shown.shape) if normed else shown
            hidden = ~_masked(shown).isfinite()
            return logits.masked_fill(hidden, -math.inf)[:_SAMPLES, :, -_QUERIES:]
        query, key = (_four(run.of(v)) for v in (self.query, self.key))
        if query.shape[-1] != key.shape[-1] or query.shape[-1] < 2 or query.shape[1] % key.shape[1]:
            raise NotKnown("queries and keys do not fit each other")
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)  # grouped queries
        rows = slice(max(query.shape[2] - _QUERIES, 0), query.shape[2])
        query, key = query[:_SAMPLES, :, rows].double(), key[:_SAMPLES].double()
        scale = self._scale(query.shape[-1])
        if normed:
            query, key, scale = _unit(query, -1), _unit(key, -1), 1 / math.sqrt(query.shape[-1])
        logits = query @ key.transpose(-1, -2) * scale
        return self._mask(run, logits, rows)

    def _product(self, run: Run, shape: torch.Size) -> torch.Tensor:
        """Return the product of RMS-normalized queries and keys, as the logits are laid out."""
        query, key = run.of(self.query).double(), run.of(self.key).double()
        if self.product is None or self.product.short not in _PLAIN or query.dim() < 3:
            raise NotKnown("the product is no plain one")
        logits = _unit(query, -1) @ _unit(key, -2) / math.sqrt(query.shape[-1])  # keys come transposed
        if logits.numel() != math.prod(shape) or logits.shape[-2:] != shape[-2:]:
            raise NotKnown("the logits are laid out otherwise")
        return logits.reshape(shape)

    def _scale(self, width: int) -> float:
        given = self._argument("scale")
        return float(given) if isinstance(given, (int, float)) else 1 / math.sqrt(width)

    def _mask(self, run: Run, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        mask = self._argument("attn_mask")
        if isinstance(mask, Ref):
            given = self._given_mask(run, mask.value)
            given = (given[: logits.shape[0]] if given.dim() == 4 else given)[
                ..., rows if given.shape[-2] > 1 else ..., :
            ]
            return (
                logits.masked_fill(~given, -math.inf) if given.dtype is torch.bool else _masked(logits + given.double())
            )
        if self._argument("is_causal") is True:
            keys = torch.arange(logits.shape[-1], device=logits.device)
            queries = torch.arange(rows.start, rows.stop, device=logits.device)
            return logits.masked_fill(keys > queries[:, None], -math.inf)
        return logits

    def _given_mask(self, run: Run, value: int) -> torch.Tensor:
        """Return a mask: kept if it is floating, else computed again from the inputs."""
        if self.facts.graph.values[value].floating:
            return run.of(value)
        recording, target = self.facts.traced, self.facts.target
        named = {str(i): a for i, a in enumerate(target.args)} | dict(target.kwargs)
        inputs = {
            v.id: named[v.names[0]]
            for v in recording.graph.values
            if v.kind is ValueKind.INPUT and v.names and isinstance(named.get(v.names[0]), torch.Tensor)
        }
        return Replayer(recording, target.model, dtype=None)(value, inputs)

    def _argument(self, name: str) -> object:
        """Return an argument of the op by its name; fused attentions order theirs differently."""
        try:
            schema = op_function(self.op)._schema
        except AttributeError as error:
            raise NotKnown("the op is not torch's") from error
        given = dict(zip((a.name for a in schema.arguments), self.op.args, strict=False)) | self.op.kwargs
        return given.get(name)

    def _learned_scale(self) -> bool:
        """Whether a parameter multiplies queries, keys or logits after the projections: a temperature."""
        flow, pending = self.facts.flow, [self.query, self.key]
        pending += [self.op.inputs[0]] if self.product is not None else []
        for _ in range(64):
            op = self.facts.graph.producer(pending.pop()) if pending else None
            if op is None or flow.mixes(op) or self.facts.streams.norm_at(op.outputs[0]) is not None:
                continue
            if op.short in ops.MUL | ops.DIV and any(flow.learned[i] and not flow.act[i] for i in op.inputs):
                return True
            pending.extend(flow.acts(op))
        return False


def _unit(vectors: torch.Tensor, axis: int) -> torch.Tensor:
    return vectors * torch.rsqrt(vectors.square().mean(axis, keepdim=True) + 1e-12)


def _four(tensor: torch.Tensor) -> torch.Tensor:
    """Bring [.., T, D] to [samples, heads, T, D]."""
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    return tensor.flatten(0, tensor.dim() - 4) if tensor.dim() > 4 else tensor


def _masked(logits: torch.Tensor) -> torch.Tensor:
    """Put logits that a mask has pushed far below the others of their row at -inf."""
    seen = logits.isfinite()
    lowest = logits.masked_fill(~seen, math.inf).amin(-1, keepdim=True)
    ordered = torch.where(seen, logits, lowest).sort(-1, descending=True).values
    if ordered.shape[-1] < 2:
        return logits
    gap, place = (ordered[..., :-1] - ordered[..., 1:]).max(-1, keepdim=True)
    above = torch.arange(ordered.shape[-1], device=logits.device) <= place
    count = above.sum(-1, keepdim=True)
    mean = (ordered * above).sum(-1, keepdim=True) / count
    spread = (((ordered - mean) * above).square().sum(-1, keepdim=True) / count).sqrt()
    apart = (gap > _SURE) | ((gap > _GAP) & (gap > _GAPS * spread) & (count >= 4))
    floor = torch.where(apart, ordered.gather(-1, place), lowest)
    return logits.masked_fill(logits < floor, -math.inf)


def _sharpness(logits: torch.Tensor) -> Sharpness | None:
    seen = logits.isfinite()
    count = seen.sum(-1)
    rows = count >= 4  # of fewer keys neither spread nor entropy says anything
    if not bool(rows.any()):
        return None
    filled = logits.masked_fill(~seen, 0.0)
    mean = filled.sum(-1) / count.clamp(min=1)
    variance = ((filled - mean[..., None]).square() * seen).sum(-1) / count.clamp(min=1)
    log = torch.log_softmax(logits, -1).masked_fill(~seen, 0.0)
    entropy = -(log.exp() * log * seen).sum(-1) / count.clamp(min=2).log()
    spread, share = [], []
    for head in range(logits.shape[1]):
        kept = rows[:, head]
        if bool(kept.any()):
            spread.append(float(variance[:, head][kept].mean().sqrt()))
            share.append(float(entropy[:, head][kept].mean()))
    return Sharpness(spread=tuple(spread), entropy=tuple(share))
