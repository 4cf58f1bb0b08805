"""The way between a batch norm and a layer: which ops carry channels unchanged, and who sees the values on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from normwise.conversions._dataflow.axes import SPATIAL
from normwise.conversions._dataflow.operands import reads_numbers
from normwise.conversions._edits import strange_hooks
from normwise.conversions._plan import Blocked
from normwise.errors import NotKnown
from normwise.facts import vocabulary as ops
from normwise.facts.facts import Facts
from normwise.facts.replay import Replayer
from normwise.graph import Call, Op

__all__ = ["NOT_EXACT", "Paths", "Segment"]

NOT_EXACT = "no rewrite is exact here: only a model trained with the norm beside a layer can lose it"

Segment = tuple[int, int]
"""Values (start, end) between which only ops that carry channels stand."""

# each output element is an average of input elements of one channel, which a map s x + t of channels commutes with;
# that its weights sum to one is seen by running it
_CARRIES = (ops.VIEW | ops.DROPOUT | SPATIAL | {"mean"}) - {"constant_pad_nd"}
_NO_HOOKS = "remove the hook, convert, and register it again"
_SEED = 20261129


class Paths:
    """The traced program as fold-batch-norm reads it."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.graph = facts, facts.graph
        self.replay = Replayer(facts.recording, facts.target.model)
        self._calls: dict[int, list[Call]] = defaultdict(list)
        for call in self.graph.calls:
            for value in {*call.inputs, *call.outputs}:
                self._calls[value].append(call)
        self._outputs = frozenset(self.graph.outputs)

    def where(self, op: Op) -> str:
        """Return the path of the module that runs an op, in words where that is the model itself."""
        return self.graph.path(op) or "the model"

    def readers(self, value: int) -> Iterator[Op]:
        """Yield the ops that read the elements of a value, not only its shape."""
        for op in self.graph.consumers(value):
            if reads_numbers(op, value):  # x.flatten(0, 1).reshape_as(x) does not read its second x
                yield op

    def carries(self, op: Op, value: int) -> bool:
        """Whether an op may be one that only moves, repeats or averages elements of one channel of a value."""
        if op.short == "pad" and (op.args[2:3] or ("constant",))[0] == "constant":
            return False
        alone = op.inputs[0] == value and not any(reads_numbers(op, other) for other in op.inputs[1:])
        return alone and op.short in _CARRIES and len(op.outputs) == 1

    def check_unwritten(self, value: int, first: int, last: int) -> None:
        """Check that nothing writes over a value between two ops: a norm made a new tensor, an identity does not.

        Raises:
            Blocked: an op does.
        """
        for op in self.graph.ops[first + 1 : last]:
            if op.name.endswith("_") and op.inputs and self._storage(op.inputs[0]) == self._storage(value):
                raise Blocked(f"{op.short} in {self.where(op)} writes over its input", op, "write into a new tensor")

    def _storage(self, value: int) -> int:
        """Return the value that a view or a write in place goes back to."""
        op = self.graph.producer(value)
        while op is not None and op.inputs and (op.short in ops.VIEW or op.name.endswith("_")):
            value = op.inputs[0]
            op = self.graph.producer(value)
        return value

    def check_unseen(self, value: int) -> None:
        """Check that nobody but ops sees a value that is about to change.

        Raises:
            Blocked: it is returned by the model, or a hook is registered where it passes.
        """
        if value in self._outputs:
            op = self.graph.producer(value)
            made = op.short if op else "its caller"
            raise Blocked(f"the model returns what {made} makes", op, "let the model return only what stands behind it")
        for call in self._calls[value]:
            module = self.facts.modules.get(call.path)
            if module is not None and strange_hooks(module):
                raise Blocked(f"{call.path or 'the model'} has a hook that would see another value", None, _NO_HOOKS)

    def check_read_by(self, value: int, members: Collection[int]) -> None:
        """Check that only certain ops read a value.

        Raises:
            Blocked: another op reads it, too.
        """
        for op in self.readers(value):
            if op.id not in members:
                made = self.graph.producer(value)
                what = f"{op.short} in {self.where(op)}"
                raise Blocked(
                    f"the output of {made.short if made else 'its input'} before it is also read by {what}",
                    op,
                    "give the other reader a layer of its own",
                )

    def carried(self, value: int, axis: int, segments: Sequence[Segment], end_axis: int) -> list[int] | None:
        """Return which channel of a value stands where on an axis at the end of a path; None where they agree.

        Args:
            value: the start, whose channels lie along ``axis``.
            axis: of the channels.
            segments: the path; norms and nothing else stand between one and the next.
            end_axis: along which the channels must lie at its end.

        Raises:
            Blocked: what stands there is not one channel everywhere, or no average of one.
        """
        shape = self.graph.values[value].shape
        axis, moves = axis % len(shape), [s for s in segments if s[0] != s[1]]
        if not moves and axis == end_axis % len(shape):
            return None
        size = shape[axis]
        channels = torch.arange(size, dtype=torch.float64)
        table = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(_SEED)) + 1
        found, looked_up = (self._moved(each, shape, axis, moves) for each in (channels, table))
        index = found.movedim(end_axis, 0).flatten(1)[:, 0].round().long()
        wide = [1] * found.dim()
        wide[end_axis] = -1
        for got, each in ((found, channels), (looked_up, table)):
            at = each[index.clamp(0, size - 1)].reshape(wide)
            if not torch.allclose(got, at.expand_as(got), rtol=0, atol=1e-9):
                raise Blocked(
                    "its channels do not lie along the feature axis of the layer",
                    self.graph.producer(segments[-1][1]),
                    "use a norm whose channels are the layer's features",
                )
        return None if torch.equal(index, torch.arange(size)) else index.tolist()

    def _moved(self, vector: torch.Tensor, shape: Sequence[int], axis: int, moves: Iterable[Segment]) -> torch.Tensor:
        wide = [1] * len(shape)
        wide[axis] = -1
        tensor = vector.reshape(wide).expand(*shape).contiguous()
        for start, end in moves:
            try:
                tensor = self.replay(end, {start: tensor})
            except NotKnown as error:
                raise Blocked(f"what stands between is not understood: {error.why}", self.graph.producer(end)) from None
        return tensor
