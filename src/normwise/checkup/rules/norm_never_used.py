"""A norm that is registered and never called.

## What it finds
Norms that a run through their own block does not reach, in eval mode and in train mode: the module that holds them was
called, everything else in it took part, they did not. A warning where several blocks of one class leave out the same
norm, where no norm runs at all, or where one block between others leaves out what at least four of its siblings call
(first and last blocks are often made otherwise on purpose); else a single one is only worth knowing.

A norm that is built in `forward` itself (`nn.LayerNorm(d)(x)`) is worth knowing too: its gain is made of ones in every
pass, depends on no parameter, and is in no `state_dict`.

Not meant are norms in a part that the input could not reach: a tower without its pixels, cross-attention without its
encoder (then its projections are idle as well), heads for training; nor a norm in whose place its wrapper calls another
of the same parameters (the original that PEFT keeps beside the copy it trains, the norms of other domains).

## Why it matters
The block computes something else than its author wrote down: `x + alpha * f(x)` for `norm(alpha * x + f(x))` grows
geometrically with depth. The parameters get no gradient, so nothing shows it but the growth.

## How to fix it
Call the norm where the definition says, or delete it. A model that was trained without it must keep running without it.

## Sources
Question 61. https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/145 (a DeepNorm layer that
never applies its norm); https://github.com/InternLM/InternLM-XComposer/issues/296 (a norm that is idle on purpose).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.facts import Facts, idle
from normwise.facts.calls import NormCall
from normwise.graph import ValueKind
from normwise.rendering import both
from normwise.targets import Target, Weights

CODE = "PAR006"
SEVERITY = Severity.WARNING
EXPLAINS = ("PLC007",)

SEVERAL = 2  # blocks that leave out the same norm
SIBLINGS = 4  # that call it, for one block to be the odd one out
# fused norms that take their gain after the input, and what makes one of a number
_GAIN_SECOND = frozenset({"layer_norm", "native_layer_norm", "group_norm", "native_group_norm", "rms_norm"})
_FILLS = frozenset({"ones", "full", "fill", "ones_like", "full_like"})

ZH = """已注册却从未调用的归一化。

## 发现什么
在 eval 和 train 模式下运行所属的块都没有到达的归一化：持有它的模块被调用了，其中其他部分都参与了计算，唯独它没有。
当同一类的多个块都漏掉同一个归一化，整个模型没有任何归一化运行，或中间的某一块漏掉了至少四个同类块都调用的归一化时为警告
（首块和末块常有意不同）；其余单独一个只作提示。

在 `forward` 中临时构建的归一化（`nn.LayerNorm(d)(x)`）也值得知道：它的增益在每次运行中都由 1 构成，不依赖任何参数，
也不在 `state_dict` 中。

不包括输入无法到达的部分中的归一化：没有像素输入的视觉塔、没有编码器的交叉注意力（其投影同样闲置）、仅用于训练的输出
头；也不包括包装模块改为调用另一个参数相同的归一化的情形（PEFT 在训练的副本旁保留的原归一化，其他域的归一化）。

## 为什么重要
这个块计算的不是作者写下的东西：把 `norm(alpha * x + f(x))` 写成 `x + alpha * f(x)`，会随深度几何增长。这些参数得不
到梯度，除了这种增长没有任何迹象。

## 如何修复
在定义要求的位置调用该归一化，或删除它。训练时没有用它的模型必须继续不用它。

## 来源
问题 61。https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/145（从不应用归一化的
DeepNorm 层）；https://github.com/InternLM/InternLM-XComposer/issues/296（有意闲置的归一化）。
"""


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms that their own blocks leave out."""
    yield from _made_anew(facts)
    unused = idle.left_out(facts)
    roles: dict[str, list[str]] = defaultdict(list)
    for path in unused:
        roles[re.sub(r"\d+", "*", path)].append(path)
    for paths in roles.values():
        several = len(paths) >= SEVERAL or not facts.norm_calls.norms
        siblings = 0 if several else _siblings(facts, paths[0])
        # the library's class, not the user's: what it registers for other configurations is its design
        loud = (several or siblings) and facts.target.weights is not Weights.RANDOM
        yield _finding(facts, paths, siblings, SEVERITY if loud else Severity.INFO)


def _made_anew(facts: Facts) -> Iterator[Finding]:
    """Report norms whose gain the run makes of a number: no parameter, buffer or input is in it."""
    anew = [n for n in facts.norm_calls.norms if n.weight is None and _filled(facts, n)]
    if anew:
        yield Finding(
            paths=tuple(dict.fromkeys(facts.graph.calls[n.call].path for n in anew)),
            severity=Severity.INFO,
            basis=Basis.PROOF,
            message=both(
                f"{counted(len(anew), 'norm')} built in forward: a new gain of ones in every pass, no parameter",
                f"{len(anew)} 个归一化在 forward 中构建：每次运行都是新的全 1 增益，没有参数",
            ),
            evidence={"norms": len(anew), "norm_calls_in_the_model": len(facts.norm_calls.norms)},
            fix=both(
                "Build the norm in __init__ and call it in forward, or give it no gain (elementwise_affine=False).",
                "在 __init__ 中构建归一化并在 forward 中调用，或不给它增益（elementwise_affine=False）。",
            ),
        )


def _filled(facts: Facts, call: NormCall) -> bool:
    """Whether a fused norm's gain comes out of ``torch.ones`` or a fill within the run."""
    if call.op.short not in _GAIN_SECOND or len(call.op.inputs) < 2:
        return False
    made = facts.graph.producer(call.op.inputs[1])
    if made is None or made.short not in _FILLS:
        return False
    # what is filled in place must be of the run: a parameter or buffer stays one
    return all(facts.graph.values[v].kind is ValueKind.OP for v in made.inputs)


def _siblings(facts: Facts, path: str) -> int:
    """Return how many blocks around the norm's own call theirs; 0 where they are few or its block is at an end."""
    parts, idle_ones = path.split("."), set(facts.not_executed)
    for place, part in enumerate(parts):
        if not part.isdigit():
            continue
        before, after = (re.escape(".".join(p)) for p in ([*parts[:place], ""], ["", *parts[place + 1 :]]))
        same = re.compile(rf"{before}(\d+){after}")
        indices = [int(m[1]) for name in facts.modules if name not in idle_ones and (m := same.fullmatch(name))]
        if len(indices) >= SIBLINGS and min(indices) < int(part) < max(indices):
            return len(indices)
    return 0


def _finding(facts: Facts, paths: Sequence[str], siblings: int, severity: Severity) -> Finding:
    running = len(facts.norm_calls.norms)
    en, zh = (f"; {siblings} siblings call theirs", f"；{siblings} 个同类调用了自己的") if siblings else ("", "")
    return Finding(
        path=paths[0],
        paths=tuple(paths),
        severity=severity,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'norm')} registered in blocks that run, but never called{en}",
            f"{len(paths)} 个归一化注册在运行的块中，却从未调用{zh}",
        ),
        evidence={
            "norms": len(paths),
            "siblings": siblings,
            "norm_calls_in_the_model": running,
            "modes_run": ["eval", "train"],
        },
        fix=both(
            "Call the norm in forward where the block's definition puts it, or delete it.",
            "在 forward 中按块的定义调用该归一化，或删除它。",
        ),
    )


class _Block(nn.Module):
    def __init__(self, *, used: bool) -> None:
        super().__init__()
        self.norm, self.up, self.used = nn.LayerNorm(8), nn.Linear(8, 8), used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(self.norm(x) if self.used else x))


def _target(*, used: bool) -> Target:
    model = nn.Sequential(*[_Block(used=used) for _ in range(3)])
    return Target(model=model, args=(torch.randn(3, 8, generator=torch.Generator().manual_seed(0)),))


def bad() -> Target:
    """Return blocks that hold a norm and never call it."""
    return _target(used=False)


def good() -> Target:
    """Return blocks that call their norms."""
    return _target(used=True)
