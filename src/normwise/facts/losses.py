"""The loss of a model on the user's own data, part by part, as it is and with its modules prepared otherwise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from normwise.errors import NotKnown
from normwise.facts import batches
from normwise.facts.trials import Trial
from normwise.graph.capture import tensors_in
from normwise.rendering import both
from normwise.targets.target import Target

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Losses", "clearly_lower", "leans_lower"]

Prepare = Callable[[nn.Module], object]

_PARTS = 4  # of a batch: the fewest from which a standard error means something, and together one pass
_MOST_PARTS = 8  # more cost time, and rows alone are noisier than they tell apart
_BATCHES = 4  # 16 rows of a small model reach 3 standard errors of their difference, 64 rows 6 (measured)
MARGIN = 10.0
"""Standard errors, over the parts, of the lower loss: what another batch would change (RULES CKP001)."""
PAIRED = 3.0  # standard errors of the difference: it is no chance of this batch either
# Or else the difference alone: hard and easy parts, which the lower loss varies over, leave it as it is. Lower on each
# of 8 parts is chance in 1 of 256 (sign test), 4 standard errors of 8 parts in 1 of 400 (Student's t).
ALONE = 4.0
_EACH = 8
MOSTLY = 0.75  # of the parts: a few hard rows do not make the difference
SHARE = 0.1  # and of the loss: less is what noise in training makes


class Losses:
    """Losses on parts of the user's data, by whatever the user gave that yields one."""

    def __init__(self, facts: Facts) -> None:
        """Find out how a loss can be had; runs nothing.

        Raises:
            NotKnown: it cannot.
        """
        self.facts = facts
        target = facts.target
        self.scored = target.eval_fn is not None  # higher may be better
        if self.scored:
            given = [target.args] if target.loader is None else facts.batches.arguments[:_BATCHES]
            self.batches: list[list[Target]] = _parts(target, given)
            return
        self.batches = _labelled(facts) if target.loader is not None else _parts(target, [target.args])

    def of(self, prepare: Prepare | None = None, *, batch: int = 0, repair: bool = False) -> tuple[float, ...]:
        """Return the loss of each part of a batch, in eval mode; counts as one pass.

        Raises:
            NotKnown: the user's code raised, or returns no loss.
        """
        self.facts.spend(repair=repair)

        def prepared(model: nn.Module) -> None:
            model.eval()
            if prepare is not None:
                prepare(model)

        return tuple(self._loss(part, prepared) for part in self.batches[batch])

    def is_score(self, prepare: Prepare, others: Sequence[float]) -> bool:
        """Whether what `eval_fn` returns is the better the higher it is: then damaged matrices lower it further.

        Args:
            prepare: with which ``others`` were measured.
            others: the losses that would be lower.
        """
        if not self.scored:
            return False

        def damaged(model: nn.Module) -> None:
            prepare(model)
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for p in (p for p in model.parameters() if p.dim() > 1 and p.is_floating_point()):
                    order = torch.randperm(p.numel(), generator=generator, device="cpu").to(p.device)
                    p.copy_(p.flatten()[order].view_as(p))

        found = self.of(damaged, repair=True)
        return sum(found) / len(found) <= sum(others) / len(others)

    def _loss(self, part: Target, prepare: Prepare) -> float:
        trials = type(self.facts)(part, "full").trials
        if self.scored:
            return _number(trials.evaluation_with(prepare))
        if self.facts.target.loader is None:
            return _number(trials.forward(prepare=prepare))
        inputs, labels = part.args[:-1], part.args[-1]
        return _from_labels(trials.forward(inputs, prepare=prepare).output, labels)


def clearly_lower(others: Sequence[float], losses: Sequence[float]) -> bool:
    """Whether losses on the same parts are lower on nearly all, and by far more than another batch would change."""
    gaps = [a - b for a, b in zip(losses, others, strict=True)]
    mean, paired = sum(gaps) / len(gaps), _standard_error(gaps)
    far = mean > MARGIN * _standard_error(others) and mean > PAIRED * paired
    each = len(gaps) >= _EACH and min(gaps) > 0 and mean > ALONE * paired
    return leans_lower(others, losses) and (far or each)


def leans_lower(others: Sequence[float], losses: Sequence[float]) -> bool:
    """Whether losses on the same parts are lower on most and on average, so that another batch may make it clear."""
    gaps = [a - b for a, b in zip(losses, others, strict=True)]
    mean, size = sum(gaps) / len(gaps), abs(sum(losses) / len(losses))
    return sum(g > 0 for g in gaps) >= MOSTLY * len(gaps) and mean > SHARE * size


def _standard_error(numbers: Sequence[float]) -> float:
    return float(torch.tensor(list(numbers), dtype=torch.float64).std()) / math.sqrt(len(numbers))


def _parts(target: Target, batches: Sequence[tuple[Any, ...]]) -> list[list[Target]]:
    """Return for each batch the target with parts of its rows as inputs; batches after the first may not fit."""
    made = []
    for args in batches:
        try:
            made.append(_cut(target, args))
        except NotKnown:
            if not made:
                raise
    return made


def _cut(target: Target, args: tuple[Any, ...]) -> list[Target]:
    tensors = [*tensors_in(args), *tensors_in(dict(target.kwargs))]
    rows = {t.shape[0] for t in tensors if t.dim() > 0}
    if len(rows) != 1 or min(rows) < _PARTS or (target.kwargs and any(t.dim() == 0 for t in tensors)):
        raise NotKnown(_ROWS)
    total = rows.pop()
    parts = min(total, _MOST_PARTS)
    bounds = [i * total // parts for i in range(parts + 1)]

    def cut(item: Any, part: slice) -> Any:
        return item[part] if isinstance(item, torch.Tensor) and item.dim() else item

    return [
        dataclasses.replace(
            target,
            args=tuple(cut(a, slice(*ends)) for a in args),
            kwargs={k: cut(v, slice(*ends)) for k, v in target.kwargs.items()},
            loader=None,
        )
        for ends in pairwise(bounds)
    ]


_ROWS = both(f"needs inputs with at least {_PARTS} rows to compare losses on", f"需要至少 {_PARTS} 行输入来比较损失")
_NO_LOSS = both(
    "needs a loss: pass eval_fn=..., a loader with labels, or a model that returns its loss",
    "需要损失：传入 eval_fn=...、带标签的 loader，或返回损失的模型",
)


def _labelled(facts: Facts) -> list[list[Target]]:
    """Return for the first batches the target with parts of the batch and its labels as arguments."""
    more = dataclasses.replace(facts.target, args=(*facts.target.args, None))
    first = batches.read(type(facts)(more, "full")).first[:_BATCHES]
    if not first or len(first[0]) <= len(facts.target.args) or not isinstance(first[0][-1], torch.Tensor):
        raise NotKnown(_NO_LOSS)
    return _parts(dataclasses.replace(facts.target, kwargs={}), first)


def _number(trial: Trial) -> float:
    if trial.raised is not None:
        raise NotKnown(both(f"the evaluation raised {trial.raised!r}"[:120], f"评估抛出异常 {trial.raised!r}"[:120]))
    output = trial.output
    loss = getattr(output, "loss", output.get("loss") if isinstance(output, dict) else None)
    value = output if loss is None else loss
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, (int, float)) for v in value):
        return sum(value) / len(value)
    if isinstance(value, torch.Tensor) and value.is_floating_point() and (value.dim() == 0 or value.numel() == 1):
        return float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise NotKnown(_NO_LOSS)


def _from_labels(output: Any, labels: torch.Tensor) -> float:
    """Return the cross entropy with class labels, or the squared error of numbers."""
    scores = next((t for t in tensors_in(output) if t.is_floating_point()), None)
    if scores is None:
        raise NotKnown(_NO_LOSS)
    scores = scores.detach().float()
    if labels.is_floating_point() and labels.shape == scores.shape:
        return float(F.mse_loss(scores, labels.float()))
    classes = not labels.is_floating_point() and labels.dim() == scores.dim() - 1
    if classes and labels.shape == scores.shape[:-1] and int(labels.max()) < scores.shape[-1]:
        return float(F.cross_entropy(scores.flatten(0, -2), labels.long().flatten()))
    raise NotKnown(_NO_LOSS)
