"""Weights of one placement in a model of another: they load strictly, and the loss tells.

## What it finds
A model that was loaded from a checkpoint without a missing or an unexpected key, whose blocks have a flag that
moves their norms (`norm_first` of torch's layers, `normalize_before`, `do_layer_norm_before`, whatever its name: it is
flipped, and the placement read again from the graph), and whose loss on the user's data is clearly lower the other way:
by more than 10 %, and either on three parts of the data in four, by more than 10 standard errors of that loss over the
parts and 3 of the difference, or on each of at least 8 parts, by more than 4 standard errors of the difference; where
one batch leans that way without being enough, up to three more are taken. A score that rises instead is told apart by
damaged weights, which must be worse.

## Why it matters
Pre-norm and post-norm blocks have the same parameters under the same names. Nothing fails: the model computes another
function with trained weights, and a fine-tuning that starts there looks like a bad learning rate.

## How to fix it
Build the blocks with the flag as it was in training, and keep it in the configuration beside the weights. There is no
conversion: no weights make x + F(N(x)) out of N(x + F(x)).

Not checked without a loss (`eval_fn`, a loader with labels, a model that returns its loss), without a checkpoint, with
gains that never moved, or where no flag moves the norms.

## Sources
Question 63. https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoderLayer.html (norm_first); Xiong et
al. 2020, https://arxiv.org/abs/2002.04745 (both placements).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.rules.norm_keys_defaulted import UNTOUCHED
from normwise.errors import NotKnown
from normwise.facts import Facts, needs
from normwise.facts.checkpoints import Checkpoints, Role
from normwise.facts.losses import Losses, clearly_lower, leans_lower
from normwise.facts.repairs import effect
from normwise.facts.switches import Switch, switch_of
from normwise.rendering import both
from normwise.targets import Target

ZH = """一种放置方式的权重装进了另一种放置方式的模型：严格加载能通过，损失会说明问题。

## 发现什么
从检查点加载、既无缺失键也无多余键的模型，其块有一个会移动归一化的开关（torch 层的 `norm_first`、
`normalize_before`、`do_layer_norm_before`，名称不限：翻转它并重新从图中读取放置方式），而在用户数据上翻转后的损失明显
更低：超过 10 %，并且要么在四分之三的数据部分上更低，超过该损失在各部分间的 10 个标准误和差值的 3 个标准误，要么在
至少 8 个部分的每一个上都更低，且超过差值的 4 个标准误；一个批次倾向如此但还不够时，最多再取三个批次。若返回的是越高
越好的分数，则用损坏的权重（必然更差）来区分。

## 为什么重要
Pre-Norm 与 Post-Norm 的块参数相同、名称相同。什么都不会失败：模型用训练好的权重计算另一个函数，从那里开始的微调看起来
像学习率不对。

## 如何修复
按训练时的开关构建块，并把它与权重一起保存在配置中。无法转换：没有任何权重能让 x + F(N(x)) 等于 N(x + F(x))。

没有损失（`eval_fn`、带标签的 loader、返回损失的模型）、没有检查点、增益从未移动，或没有开关能移动归一化时，不检
查。

## 来源
问题 63。https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoderLayer.html（norm_first）；Xiong 等
2020，https://arxiv.org/abs/2002.04745（两种放置方式）。
"""

CODE = "CKP001"
SEVERITY = Severity.ERROR
EXPLAINS = ("CKP006", "PLC001")


def check(facts: Facts) -> Iterator[Finding]:
    """Report a placement under which the loaded weights lose more than under the other."""
    if not facts.target.weights.magnitudes_count:
        raise NotKnown(needs.REAL_WEIGHTS)
    if not _loaded_strictly(facts.checkpoints):
        return
    measured = Losses(facts)
    switch = switch_of(facts)
    if switch is None:
        raise NotKnown(both("no flag of the blocks moves their norms", "块中没有能移动归一化的开关"))
    now, other = measured.of(), measured.of(switch.flip)
    first = other
    for batch in range(1, len(measured.batches)):
        if clearly_lower(other, now) or not leans_lower(other, now):
            break
        now, other = now + measured.of(batch=batch), other + measured.of(switch.flip, batch=batch)
    if clearly_lower(other, now) and not measured.is_score(switch.flip, first):
        yield _finding(switch, _mean(now), _mean(other), len(now))


def _loaded_strictly(found: Checkpoints) -> bool:
    """Whether all came from the checkpoint, and was trained there.

    Raises:
        NotKnown: the gains are where they started: untrained weights prefer no placement.
    """
    if found.covered < 1.0 or found.untouched < UNTOUCHED or found.lost or found.dropped:
        return False
    if all(n.initial for n in found.norms if n.role is Role.GAIN):
        raise NotKnown(
            both("the gains are all at their initial value: untrained weights", "增益都是初始值：未训练的权重")
        )
    return True


def _mean(numbers: tuple[float, ...]) -> float:
    return sum(numbers) / len(numbers)


def _finding(switch: Switch, now: float, other: float, parts: int) -> Finding:
    here, there = ", ".join(dict.fromkeys(switch.kinds)), ", ".join(dict.fromkeys(switch.others))
    return Finding(
        path=switch.paths[0],
        paths=switch.paths,
        severity=SEVERITY,
        basis=Basis.MEASURED,
        message=both(
            f"the weights fit {there} blocks, these are {here}: loss {now:.3g}, with {there} {other:.3g}"[:99],
            f"权重适合 {there} 块，而这里是 {here}：损失 {now:.3g}，换为 {there} 后 {other:.3g}",
        ),
        evidence={
            "metric": "loss on the given data",
            "value": now,
            "with_the_flag_flipped": other,
            "parts_of_the_batch": parts,
            "flag": f"{switch.name}={switch.value}",
            "placement": here,
            "placement_of_the_weights": there,
        },
        counterfactual=effect(
            both(f"{switch.name}={not switch.value} in the blocks", f"块中 {switch.name}={not switch.value}"),
            "loss on the given data",
            now,
            other,
        ),
        fix=both(
            f"Build the blocks with {switch.name}={not switch.value}, as the weights were trained.",
            f"用 {switch.name}={not switch.value} 构建这些块，与训练权重时一致。",
        ),
    )


class _Block(nn.Module):
    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.norm, self.mlp, self.norm_first = nn.LayerNorm(8), nn.Linear(8, 8), norm_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mlp(self.norm(x))) if self.norm_first else self.norm(x + torch.tanh(self.mlp(x)))


def _model(*, norm_first: bool) -> nn.Module:
    blocks = (_Block(norm_first=norm_first) for _ in range(3))
    return nn.Sequential(nn.Linear(5, 8), *blocks, nn.LayerNorm(8), nn.Linear(8, 3)).eval()


def _target(*, norm_first: bool) -> Target:
    trained, model = _model(norm_first=False), _model(norm_first=norm_first)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.normal_(0.5, 0.7, generator=generator)
    model.load_state_dict(trained.state_dict())
    x = torch.randn(16, 4, 5, generator=generator)
    with torch.no_grad():
        y = trained(x)
    return Target(model=model, args=(x,), checkpoint=trained.state_dict(), loader=[(x, y), (x, y)])


def bad() -> Target:
    """Return pre-norm blocks that hold the weights of post-norm blocks."""
    return _target(norm_first=True)


def good() -> Target:
    """Return post-norm blocks with them."""
    return _target(norm_first=False)
