"""Store the gain w of norms as w - 1, or back: the same function, with a gain that half precision can train.

## What it does
y = w * xhat becomes y = (1 + v) * xhat with v = w - 1 (``direction="to-offset"``; Gemma stores its gains so), and
back (``"from-offset"``). Next to 1.0 the smallest step of bfloat16 is 0.0078: a gain stored there does not move at
usual learning rates, while v next to 0 does. The 1 is added in the dtype of the statistics, but for conventions that
multiply after the value returned to half precision (Llama): those add it in the dtype of the gain, so that each
output stays what it was, and small steps add up in v before they show.

## When it is exact
v is computed in float64 and rounded once, to the dtype of the gain. A gain changes by no bit where v can be held:
w from 0.5 up to 2^p (256 in bfloat16, 2048 in float16, 2^24 in float32) always can; w below 0.5, or negative, only if
it is a multiple of the spacing of numbers near w - 1. A norm one of whose gains would change is left as it is, with
the largest change; ``rounding=True`` consents, and the plan is not exact then. From the offset, 1 + v must be held.

## What to know
Weight decay on v pulls the gain to 1, on w to 0. Every norm over the features of a position is converted: LayerNorm,
RMSNorm and relatives with one gain a feature, ours, torch's and foreign ones that ``swap-layers`` can replace; the
layer in the norm's place is ours. A second time there is nothing to do.

## Options
- ``direction``: "to-offset" stores w - 1, "from-offset" stores w.
- ``rounding``: consent to gains that change by the rounding of what is stored.

## Example
```python
converted = nw.convert("unit-offset", model)
```
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from normwise.conversions._arithmetic import holds_numbers
from normwise.conversions._edits import SwapNorm
from normwise.conversions._plan import Change, Plan, Recipe, Refusal, Step
from normwise.conversions._recognition.recogniser import Recognised, Recogniser
from normwise.errors import NoNorm, NotKnown
from normwise.facts.facts import Facts
from normwise.spec import PROMOTED, Cast, NormSpec, Scope, Weight

__all__ = ["ZH", "plan"]

ZH = """把归一化层的增益 w 存为 w - 1，或存回来：函数不变，而增益在半精度下可以训练。

## 做什么
y = w * xhat 变为 y = (1 + v) * xhat，其中 v = w - 1（``direction="to-offset"``；Gemma 就这样存增益），反方向为
``"from-offset"``。在 1.0 附近 bfloat16 的最小间隔是 0.0078：存在那里的增益在通常的学习率下不会移动，而 0 附近的 v
可以。1 在统计量的 dtype 中相加；只有先回到半精度再相乘的约定（Llama）例外：它在增益的 dtype 中相加，使每个输出保持
原样，而小步长先在 v 中累积，之后才显现。

## 何时精确
v 以 float64 计算，只舍入一次，舍入到增益的 dtype。凡是能存下 v 的地方，增益一位都不变：w 从 0.5 到 2^p（bfloat16 为
256，float16 为 2048，float32 为 2^24）总能存下；小于 0.5 或为负的 w，只有当它是 w - 1 附近数的间隔的整数倍时才行。
只要有一个增益会改变，该归一化层就保持原样，并报告最大的改变量；``rounding=True`` 表示同意舍入，此时计划不再是精确
的。从偏移存回来时，需要能存下 1 + v。

## 须知
对 v 做权重衰减会把增益拉向 1，对 w 则拉向 0。凡是对一个位置的特征做归一化、每个特征有一个增益的层都会转换：
LayerNorm、RMSNorm 及其变体，无论是我们的、torch 的，还是 ``swap-layers`` 能替换的外来层；放进去的是我们的层。再做一次
则无事可做。

## 选项
- ``direction``："to-offset" 存 w - 1，"from-offset" 存 w。
- ``rounding``：同意增益因所存数的舍入而改变。

## 示例
```python
converted = nw.convert("unit-offset", model)
```
"""

_OFFSETS = {"to-offset": 1.0, "from-offset": 0.0}
_DECAY = {
    "to-offset": "weight decay on the stored gains now pulls the gains to 1, before to 0",
    "from-offset": "weight decay on the stored gains now pulls the gains to 0, before to 1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """A norm whose gain is to be stored otherwise."""

    path: str
    module: nn.Module
    found: Recognised
    keys: tuple[str, ...]  # of its gain

    @property
    def gain(self) -> torch.Tensor:
        return getattr(self.module, self.found.names["weight"])


def plan(facts: Facts, *, direction: str = "to-offset", rounding: bool = False) -> Plan:
    """Return the plan of the re-parametrisation.

    Args:
        facts: of the model; inputs are not needed.
        direction: "to-offset" stores w - 1, "from-offset" stores w.
        rounding: consent to gains that change by the rounding of what is stored.

    Raises:
        ValueError: no such direction.
    """
    if direction not in _OFFSETS:
        raise ValueError(f"unit-offset has no direction={direction!r}: choose from {', '.join(_OFFSETS)}")
    offset = _OFFSETS[direction]
    norms, refused, done = _norms(facts, offset)
    changes, kept, largest = [], [], 0.0
    for norm in norms:
        try:
            change = _change(norm, {id(each.module) for each in norms}, facts, offset, rounding)
        except NotKnown as why:
            refused.append(Refusal(path=norm.path, why=why.why))
            continue
        largest = max(largest, change)
        how = f"gains change by up to {change:.2g}, the rounding of what is stored" if change else "exact"
        kept.append(norm)
        changes.append(Change(path=norm.path, what="w -> 1 + v" if offset else "1 + v -> w", how=how))
    if not norms and done:
        stored = "with" if offset else "without"
        why = f"nothing to do: the gains of its {done} norms are stored {stored} the offset already"
        refused.append(Refusal(path="", why=why))
    recipes = {norm.keys: _recipe(norm, offset) for norm in kept}
    return Plan(
        conversion="unit-offset",
        options={"direction": direction, "rounding": rounding},
        edits=tuple(_edit(norm, offset) for norm in kept),
        recipes=tuple(recipes.values()),
        changes=tuple(changes),
        refused=tuple(refused),
        ties=tuple(keys for keys in recipes if len(keys) > 1),
        exact=not largest,
        notes=(_DECAY[direction],) if kept else (),
    )


def _norms(facts: Facts, offset: float) -> tuple[list[_Norm], list[Refusal], int]:
    """Return the norms to convert, those that cannot be, and how many need not be."""
    recognise, model = Recogniser(), facts.target.model
    keys = _keys(facts.tensors)
    norms, refused, done = [], [], 0
    for path, module in model.named_modules():
        try:
            found = recognise(module)
            if found.spec.weight is Weight.NONE:
                continue
            if found.spec.weight_offset == offset and found.spec.scope is Scope.HIDDEN:
                done += 1
                continue
            _check(path, found.spec, offset)
            gain = getattr(module, found.names["weight"])
            norms.append(_Norm(path=path, module=module, found=found, keys=keys[id(gain)]))
        except NoNorm:
            continue
        except NotKnown as why:
            refused.append(Refusal(path=path, why=why.why))
    return norms, refused, done


def _keys(tensors: Mapping[str, torch.Tensor]) -> Mapping[int, tuple[str, ...]]:
    """Return all names of each tensor."""
    names: dict[int, tuple[str, ...]] = defaultdict(tuple)
    for key, tensor in tensors.items():
        names[id(tensor)] += (key,)
    return names


def _check(path: str, spec: NormSpec, offset: float) -> None:
    if not path:
        raise NotKnown("the model itself is the norm: there is no module to put another one in")
    if spec.scope is not Scope.HIDDEN:
        raise NotKnown(f"it is a {spec.kind} norm, and our layer of those adds nothing to its gain")
    if spec.weight is Weight.SCALAR:
        raise NotKnown("its gain is one number, not one a feature")
    if spec.weight_offset not in (0.0, 1.0) or spec.weight_offset == offset:
        raise NotKnown(f"what is added to its gain is {spec.weight_offset:g}, neither 0 nor 1")


def _change(norm: _Norm, converted: set[int], facts: Facts, offset: float, rounding: bool) -> float:
    """Return the largest change of a gain; raise ``NotKnown`` where there must not be one, or something shares it."""
    for key in norm.keys:
        owner = facts.modules[key.rpartition(".")[0]]
        if id(owner) not in converted:
            raise NotKnown(f"its gain is shared with {key}, which is no norm that is converted")
    if not holds_numbers(norm.gain):
        if rounding:
            return 0.0
        raise NotKnown("its gain holds no numbers: whether it can be stored exactly is not known; load the weights")
    gain = norm.gain.detach().double()
    shift = _shift(offset)
    change = float(((gain + shift).to(norm.gain.dtype).double() - shift - gain).abs().max())
    if change and not rounding:
        dtype = str(norm.gain.dtype).removeprefix("torch.")
        raise NotKnown(
            f"a gain would change by {change:.2g}: {dtype} cannot hold it {'less' if offset else 'plus'} 1; "
            "rounding=True consents"
        )
    return change


def _shift(offset: float) -> float:
    """Return what is added to the stored number."""
    return -1.0 if offset else 1.0


def _recipe(norm: _Norm, offset: float) -> Recipe:
    return Recipe(keys=norm.keys, steps=(Step(function="add_number", numbers={"number": _shift(offset)}),))


def _edit(norm: _Norm, offset: float) -> SwapNorm:
    spec = norm.found.spec
    # where the dtype of the gain decides that of the output, the sum must have it
    early = bool(offset) and (spec.out_dtype == PROMOTED or spec.cast in (Cast.BEFORE_WEIGHT, Cast.TO_WEIGHT))
    return norm.found.swap(norm.path, spec=replace(spec, weight_offset=offset, offset_in_weight_dtype=early))
