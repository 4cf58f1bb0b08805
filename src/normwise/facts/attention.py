"""Where attention reads its queries, keys and values."""

from __future__ import annotations

from normwise.facts import vocabulary as ops
from normwise.facts.flow import Flow
from normwise.facts.records import Place
from normwise.facts.streams import Streams
from normwise.graph import Op

__all__ = ["AttentionOperands"]


class AttentionOperands:
    """The values that attention reads, by op and role."""

    def __init__(self, flow: Flow) -> None:
        self.flow, self.graph = flow, flow.graph
        self.role: dict[tuple[int, int], Place] = {}  # (op, value) -> QK or V
        self.scores: set[int] = set()
        for op in self.graph.ops:
            if op.short in ops.ATTENTION:
                for position, value in enumerate(op.inputs[:3]):
                    self.role.setdefault((op.id, value), Place.V if position == 2 else Place.QK)
            elif op.short in ops.SOFTMAX:
                self._softmax(op)
            elif op.short in ops.MATMUL and len(self.flow.acts(op)) > 1:
                self._bare(op)

    def _bare(self, score: Op) -> None:
        """Scores that weigh values without a softmax: (q k) v, also with a function of the scores in between."""
        weighing = [m for m, weights in self._matmuls_ahead(score.outputs[0]) if m.inputs[0] == weights]
        if any(len(self.flow.acts(m)) > 1 for m in weighing):
            for value in score.inputs:
                self.role.setdefault((score.id, value), Place.QK)

    def _softmax(self, op: Op) -> None:
        score = self.matmul_behind(op.inputs[0])
        if score is None:
            return
        self.scores.add(score.id)
        for value in score.inputs:
            self.role.setdefault((score.id, value), Place.QK)
        for reader in self._matmuls_ahead(op.outputs[0]):
            for value in reader[0].inputs:
                if value != reader[1]:
                    self.role.setdefault((reader[0].id, value), Place.V)

    def matmul_behind(self, value: int) -> Op | None:
        """Return the product of two activations that a value carries on."""
        for _ in range(16):
            op = self.graph.producer(value)
            if op is None:
                return None
            if op.short in ops.MATMUL:
                acts = self.flow.acts(op)
                return op if len(acts) >= 2 or (len(op.inputs) > len(acts) >= 1 and len(set(op.inputs)) == 1) else None
            if self.flow.mixes(op):
                return None
            acts = self.flow.acts(op)
            if not acts:
                return None
            value = max(acts)
        return None

    def _matmuls_ahead(self, value: int) -> list[tuple[Op, int]]:
        found, pending = [], [(value, 0)]
        while pending:
            current, depth = pending.pop()
            for op in self.graph.consumers(current):
                if op.short in ops.MATMUL:
                    found.append((op, current))
                elif not self.flow.mixes(op) and depth < 8:
                    pending.extend((o, depth + 1) for o in op.outputs)
        return found

    def is_attention(self, op: Op) -> bool:
        """Whether an op computes attention or its scores."""
        return op.short in ops.ATTENTION or op.id in self.scores

    def projected(self, value: int, streams: Streams) -> bool:
        """Whether a value reaches an attention operand through one linear map."""
        pending, seen = [value], set()
        while pending and len(seen) < 100:
            current = pending.pop()
            if current in seen or current in streams.made_by:
                continue
            seen.add(current)
            for op in self.graph.consumers(current):
                if op.short in ops.LINEAR and any(self.reached_from(o, streams) for o in op.outputs):
                    return True
                if not self.flow.mixes(op):
                    pending.extend(o for o in op.outputs if self.flow.act[o])
        return False

    def reached_from(self, value: int, streams: Streams) -> Place | None:
        """Return QK or V if a value reaches an attention operand without mixing or a residual add between."""
        pending, seen = [value], set()
        found: Place | None = None
        while pending and len(seen) < 400:
            current = pending.pop()
            if current in seen or current in streams.made_by:
                continue
            seen.add(current)
            for op in self.graph.consumers(current):
                role = self.role.get((op.id, current))
                if role is Place.QK:
                    return Place.QK
                found = role or found
                if role is None and not self.flow.mixes(op):
                    pending.extend(o for o in op.outputs if self.flow.act[o])
        return found
