"""Runs a piece of a graph again on other data, in float64: the graph proposes, execution disposes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from normwise.errors import NotKnown
from normwise.graph import ALIAS, Graph, Op, Recording, Ref, Value, ValueKind
from normwise.rendering import both
from normwise.targets.target import numberless

__all__ = ["Replayer", "op_function", "program"]

T = TypeVar("T")
# a norm's region has a few dozen ops; more means the walk left it
_LIMIT = 400
_LEFT = both("the replay left the norm", "回放走出了该归一化")


def op_function(op: Op) -> Any:
    """Return the torch function of a traced op."""
    namespace, name = op.name.split(".", 1)
    return getattr(getattr(getattr(torch.ops, namespace), name), op.overload or "default")


def program(graph: Graph, members: Iterable[int], given: Mapping[int, str], *, of: int) -> tuple[object, ...] | None:
    """Return what identifies a piece of program, so that the same code is run once; None if weights enter it.

    Args:
        graph: the traced program.
        members: ids of its ops, in order.
        given: a name for each value it starts from.
        of: the value it computes.
    """
    members = list(members)
    names = dict(given) | {o: f"{i}.{j}" for i, m in enumerate(members) for j, o in enumerate(graph.ops[m].outputs)}

    def plain(item: object) -> object:
        if isinstance(item, Ref):
            return names.get(item.value, graph.values[item.value].scalar)
        return tuple(plain(i) for i in item) if isinstance(item, (list, tuple)) else repr(item)

    if any(graph.values[i].scalar is None for m in members for i in graph.ops[m].inputs if i not in names):
        return None
    ops = (graph.ops[m] for m in members)
    return names.get(of), *((op.name, plain(op.args), plain(tuple(sorted(op.kwargs.items())))) for op in ops)


class Replayer:
    """Evaluates values of a recording with chosen replacements.

    Floating-point tensors and casts become ``dtype``, so that what is compared is the formula
    and not its rounding; ``dtype=None`` keeps every dtype as recorded. All of it runs on the device of the
    given tensors, wherever the model is.
    """

    def __init__(self, recording: Recording, model: nn.Module, *, dtype: torch.dtype | None = torch.float64) -> None:
        self.graph, self.constants, self.dtype = recording.graph, recording.constants, dtype
        self.tensors = dict[str, torch.Tensor](model.named_parameters(remove_duplicate=False))
        self.tensors |= dict(model.named_buffers(remove_duplicate=False))
        self._assumed: Mapping[int, torch.Tensor] = {}
        self._opened: frozenset[int] = frozenset()
        self._memo: dict[Hashable, Any] = {}
        self._device = torch.device("cpu")

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return what was computed for the same program before, or compute it."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]

    def assuming(self, values: Mapping[int, torch.Tensor]) -> Replayer:
        """Return a replayer that takes some values as given in every run."""
        other = copy.copy(self)
        other._assumed = values
        return other

    def opening(self, ops: Iterable[int]) -> Replayer:
        """Return a replayer that skips some ops of one input, such as those that cut the gradient."""
        other = copy.copy(self)
        other._opened = frozenset(ops)
        return other

    def __call__(self, value: int, given: Mapping[int, torch.Tensor], *, grad: bool = False) -> torch.Tensor:
        """Return the value when the given values are replaced.

        Args:
            value: id of the value to compute.
            given: tensors by the id of the value they stand for.
            grad: record the ops for autograd, so that the result can be differentiated by a given tensor.

        Raises:
            NotKnown: the value needs something that was not kept, or an op that cannot run again.
        """
        memo = {**self._assumed, **given}
        self._device = next((t.device for t in given.values()), torch.device("cpu"))
        with torch.enable_grad() if grad else torch.inference_mode():
            try:
                return self._value(value, memo, [0])
            except RecursionError:
                raise NotKnown(_LEFT) from None

    def _value(self, value: int, memo: dict[int, torch.Tensor], count: list[int]) -> torch.Tensor:
        if value not in memo:
            record = self.graph.values[value]
            if record.producer < 0:
                memo[value] = self._leaf(record)
            else:
                self._run(self.graph.ops[record.producer], memo, count)
        return memo[value]

    def _leaf(self, record: Value) -> torch.Tensor:
        if record.kind in (ValueKind.PARAM, ValueKind.BUFFER):
            tensor = self.tensors.get(record.names[0])
        else:
            tensor = self.constants.get(record.id)
        if tensor is None:
            what = f"{record.kind} {', '.join(record.names)}"
            raise NotKnown(
                both(f"the replay needs a tensor that was not kept ({what})", f"回放需要一个没有保留的张量（{what}）")
            )
        if numberless(tensor):
            raise NotKnown(both("the model holds no numbers to replay with", "模型没有可供回放的数值"))
        return self._cast(tensor.detach())

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(self._device, dtype)

    def _run(self, op: Op, memo: dict[int, torch.Tensor], count: list[int]) -> None:
        count[0] += 1
        if count[0] > _LIMIT or op.name == ALIAS:
            raise NotKnown(
                both("the replay cannot follow a write through another view", "回放无法跟踪经另一视图的写入")
                if op.name == ALIAS
                else _LEFT
            )
        if op.id in self._opened:
            memo[op.outputs[0]] = self._value(op.inputs[0], memo, count)
            return
        try:
            function = op_function(op)
            writes = function._schema.is_mutable
        except AttributeError as error:
            raise NotKnown(both(f"the replay does not know {op.name}", f"回放不认识 {op.name}")) from error

        def plain(item: Any) -> Any:
            if isinstance(item, Ref):
                tensor = self._value(item.value, memo, count)
                return tensor.clone() if writes else tensor
            if isinstance(item, (list, tuple)):
                return [plain(i) for i in item]
            if isinstance(item, torch.dtype) and self.dtype is not None and item.is_floating_point:
                return self.dtype
            return self._device if isinstance(item, torch.device) else item

        args = [plain(a) for a in op.args]
        kwargs = {k: plain(v) for k, v in op.kwargs.items()}
        try:
            result = function(*args, **kwargs)
        except Exception as error:  # a custom op is the user's code
            said = str(error).splitlines()[0] if str(error) else repr(error)
            raise NotKnown(both(f"the replay of {op.name} failed: {said}", f"回放 {op.name} 失败：{said}")) from error
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        for out, tensor in zip(op.outputs, results, strict=False):
            memo[out] = tensor
