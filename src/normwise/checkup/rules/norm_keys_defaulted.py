"""Norms still at their initial values although the checkpoint was loaded.

## What it finds
Gains that are exactly 1 (or 0 with a unit offset) and shifts that are exactly 0, where the checkpoint holds other
numbers for them, under their own name or under another (`gamma`, `beta`, another layer naming), or where
the load report lists them as missing, while the rest of the model holds the checkpoint's numbers. Or all of them, with
no tensor loaded at all, because every name of the checkpoint begins otherwise (`module.`, `model.`). A map of names
that would load them is proposed. The live weights decide: what holds the checkpoint's numbers was loaded, whatever its
name.

## Why it matters
`strict=False` and renamed keys fail in silence. A norm at its initial value between trained matrices rescales every
channel: the model runs, its loss is finite, and fine-tuning starts from a much worse place.

## How to fix it
Rename the keys before loading, with the map in the evidence, and load with `strict=True`, or read what
`load_state_dict` returns. Norms that are new on purpose can be ignored with `--ignore CKP003`.

Silent: adapters whose checkpoint holds only their own weights; new heads, whose linear maps are missing as well; a
shift that is missing where no shift is in the checkpoint; gains folded into matrices (those differ, too). Where
the checkpoint has no other numbers for them at all, it is a warning, unless a reference agrees.

## Sources
Question 60. https://github.com/NVIDIA/DeepLearningExamples/issues/1151 (BERT's gamma and beta, loaded with
strict=False); https://github.com/huggingface/transformers/issues/24243 (all gains 1, and nothing wrong).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.checkpoints import Checkpoints, NormTensor, Role, State
from normwise.facts.outcomes import MATTERS, apart, outputs_of, outputs_with
from normwise.facts.repairs import effect
from normwise.facts.state_dicts import pattern
from normwise.rendering import both
from normwise.targets import Target

ZH = """加载了检查点，归一化却仍是初始值。

## 发现什么
增益恰为 1（带单位偏移时为 0）、偏移恰为 0，而检查点中有它们的其他数值（同名或异名：`gamma`、`beta`、另一套层命
名），或加载报告将其列为缺失，同时模型其余部分与检查点一致；或者因为检查点的键名都以别的前缀开头
（`module.`、`model.`）而什么都没有加载。给出可以加载它们的键名映射。以模型中的实际权重为准：
数值与检查点相同即为已加载，无论名称。

## 为什么重要
`strict=False` 与改名的键会悄悄失败。训练好的矩阵之间夹着初始值的归一化，会重新缩放每个通道：模型能运行，损失有限，微
调却从差得多的起点开始。

## 如何修复
加载前按证据中的映射改名，并用 `strict=True` 加载，或阅读 `load_state_dict` 的返回值。有意新增的归一化可用
`--ignore CKP003` 忽略。

以下情况不报告：只含自身权重的适配器检查点；线性层同样缺失的新输出头；检查点中没有偏移时缺失的偏移；已折叠进
矩阵的增益（矩阵也会不同）。若检查点根本没有其数值，则为警告，除非参考模型一致。

## 来源
问题 60。https://github.com/NVIDIA/DeepLearningExamples/issues/1151（BERT 的 gamma 和 beta，用 strict=False 加载）；
https://github.com/huggingface/transformers/issues/24243（增益全为 1，却并无问题）。
"""

CODE = "CKP003"
SEVERITY = Severity.ERROR
EXPLAINS = ("CKP006", "CKP004", "PAR009")

# An adapter's checkpoint holds a few percent of the model; a loaded model has nearly all of it from there.
COVERED = 0.5
# Below this share of matrices equal to the checkpoint's, the model was trained or converted since.
UNTOUCHED = 0.9


def check(facts: Facts) -> Iterator[Finding]:
    """Report gains and shifts that the loading left at their initial values."""
    found = facts.checkpoints
    if found.covered < COVERED or (found.untouched < UNTOUCHED and not found.nothing_loaded):
        return
    lost = [n for n in found.lost if n.role in (Role.GAIN, Role.SHIFT)]
    sure = [n for n in lost if _sure(n, found)]
    unsure = [n for n in lost if n not in sure and n.role is Role.GAIN and found.covered == 1.0]
    if sure:
        yield _finding(facts, found, sure, SEVERITY)
    elif unsure and not _agrees(facts):
        yield _finding(facts, found, unsure, Severity.WARNING)


def _sure(norm: NormTensor, found: Checkpoints) -> bool:
    """Whether the checkpoint has numbers for it, or for the same tensor of other layers."""
    if norm.state is State.DIFFERENT or norm.proposed is not None:
        return True
    loaded = (n for n in found.norms if n.state in (State.EQUAL, State.SHIFTED))
    return any(pattern(n.key) == pattern(norm.key) for n in loaded)


def _agrees(facts: Facts) -> bool:
    """Whether a reference shows that the initial values are right: a checkpoint of norms without gains, for example."""
    try:
        return not facts.reference.differs
    except NotKnown:
        return False


def _finding(facts: Facts, found: Checkpoints, lost: list[NormTensor], severity: Severity) -> Finding:
    gains = sum(n.role is Role.GAIN for n in lost)
    shifts = len(lost) - gains
    named = found.key_map
    said = counted(gains, "gain") + (f" and {counted(shifts, 'shift')}" if shifts else "")
    why, why_zh = "the loading did not reach them", "加载没有触及它们"
    if found.nothing_loaded:
        ours, theirs = (repr(p[-24:]) for p in (found.prefix.model, found.prefix.checkpoint))
        why = f"nothing was loaded, names begin with {theirs}, not {ours}"
        why_zh = f"什么都没有加载，键名以 {theirs} 而不是 {ours} 开头"
    return Finding(
        path=lost[0].path.partition("#")[0],
        paths=tuple(dict.fromkeys(n.path for n in lost)),
        severity=severity,
        basis=Basis.PROOF if severity is SEVERITY else Basis.MEASURED,
        message=both(
            f"{said} at their initial value: {why}",
            f"{gains} 个增益和 {shifts} 个偏移仍是初始值：{why_zh}",
        ),
        evidence={
            "missing": [n.key for n in lost],
            "tensors": len(lost),
            "key_map": named,
            "rest_loaded": 0.0 if found.nothing_loaded else found.covered,
        },
        counterfactual=_loaded(facts, found, lost),
        fix=both(
            "Rename the checkpoint's keys as in key_map, and load with strict=True."
            if named
            else "Load these keys, and load with strict=True so that a missing one raises.",
            "按 key_map 改名检查点的键，并用 strict=True 加载。"
            if named
            else "加载这些键，并用 strict=True，使缺失的键报错。",
        ),
    )


def _loaded(facts: Facts, found: Checkpoints, lost: list[NormTensor]) -> dict[str, Any] | None:
    """Load what was lost, and measure how far the output moves."""
    keys = [(n.key, n.source or n.proposed) for n in lost]
    values = {key: found.tensors[there] for key, there in keys if there is not None and there in found.tensors}
    if not values:
        return None
    try:
        before, after = outputs_of(facts.runs.base), outputs_with(facts, values)
        moved = apart(before, after)
    except NotKnown:
        return None
    if moved <= MATTERS:
        return None
    change = both(f"load {counted(len(values), 'tensor')} by key_map", f"按 key_map 加载 {len(values)} 个张量")
    return effect(change, "distance of the output from that of the checkpoint", moved, 0.0)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.dense(x))


def _target(*, renamed: bool) -> Target:
    torch.manual_seed(0)
    trained, model = (nn.Sequential(*(_Block() for _ in range(3))) for _ in range(2))
    for name, parameter in trained.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.3, 1.6)
    old = {k.replace("norm.weight", "norm.gamma").replace("norm.bias", "norm.beta"): t for k, t in _state(trained)}
    new = {k.replace("gamma", "weight").replace("beta", "bias"): t for k, t in old.items()} if renamed else old
    info = model.load_state_dict(new, strict=False)
    return Target(model=model.eval(), args=(torch.randn(2, 4, 8),), checkpoint=old, load_info=info)


def _state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(k, t.clone()) for k, t in model.state_dict().items()]


def bad() -> Target:
    """Return a model loaded with strict=False from a checkpoint that says gamma and beta."""
    return _target(renamed=False)


def good() -> Target:
    """Return the same model loaded after its keys were renamed."""
    return _target(renamed=True)
