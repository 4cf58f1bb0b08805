"""Norms of the checkpoint that the model has no place for.

## What it finds
A norm in the checkpoint (vectors of one length, a gain with its shift or a key that says so) whose numbers are nowhere
in the model, under whatever name, while everything else of the same part of the checkpoint was loaded: a final norm, a
QK norm, the shift of a norm that keeps its gain. Where more of that part is missing (a head that was cut off on
purpose), it is only worth knowing; a part of which nothing was loaded is not mentioned.

## Why it matters
An unexpected key is a piece of the trained function that the model does not compute. The rest was trained behind that
norm: without it the head sees another scale, and text is odd rather than broken.

## How to fix it
Build the model with the norm (a config flag, or the right class), and load with `strict=True`. A norm that was folded
into its neighbours is not reported: their numbers then differ from the checkpoint's.

## Sources
Questions 52 and 60. https://github.com/huggingface/transformers/pull/17785 (OPT without the final norm that its
checkpoints hold).
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.rules.norm_keys_defaulted import COVERED, UNTOUCHED
from normwise.checkup.wording import counted
from normwise.facts import Facts
from normwise.facts.checkpoints import Checkpoints, Dropped, NormTensor
from normwise.rendering import both
from normwise.targets import Target

ZH = """检查点中有归一化，模型里却没有位置。

## 发现什么
检查点中的归一化（长度相同的向量：增益与偏移，或键名表明），其数值在模型中任何名称下都不存在，而检查点同一
部分的其余内容都已加载：末端归一化、QK 归一化、保留增益的归一化的偏移。若该部分还缺更多（有意去掉的输出头），只作提
示；完全没有加载的部分不提及。

## 为什么重要
多余的键是训练所得函数的一部分，而模型没有计算它。其余部分是在该归一化之后训练的：没有它，输出头看到另一种尺度，文本变
得奇怪而不是完全损坏。

## 如何修复
用含该归一化的模型（配置开关或正确的类），并用 `strict=True` 加载。已折叠进相邻层的归一化不报告：那些层的数值与
检查点不同。

## 来源
问题 52 和 60。https://github.com/huggingface/transformers/pull/17785（OPT 缺少检查点中的末端归一化）。
"""

CODE = "CKP004"
SEVERITY = Severity.WARNING
EXPLAINS = ("CKP006",)


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms of the checkpoint that were not loaded into the model."""
    found = facts.checkpoints
    if found.covered < COVERED or found.untouched < UNTOUCHED:
        return
    for alone in (True, False):
        norms = [d for d in found.dropped if d.alone is alone and _loaded_beside(d, found)]
        if norms:
            yield _finding(facts, norms, alone=alone)
    shifts = [n for n in found.norms if _lost_shift(n, found)]
    if shifts:
        yield _shifts(shifts, found)


def _loaded_beside(norm: Dropped, found: Checkpoints) -> bool:
    """Whether anything of the part of the checkpoint that holds the norm is in the model."""
    if not found.tensors:
        return True
    beside = f"{norm.within}." if norm.within else ""
    return any(k.startswith(beside) for k in found.matched.values())


def _lost_shift(norm: NormTensor, found: Checkpoints) -> bool:
    """Whether a centred norm lost a shift that is not 0; the shift of a norm that no longer centres is CKP002's."""
    key = found.shift_without_home(norm)
    return key is not None and norm.centred and bool(found.tensors[key].abs().max() > 0)


def _finding(facts: Facts, norms: list[Dropped], *, alone: bool) -> Finding:
    first = norms[0].path or norms[0].keys[0]
    homes = tuple(dict.fromkeys(_home(d.path or d.keys[0], facts.modules) for d in norms))
    return Finding(
        path=homes[0],
        paths=homes,
        severity=SEVERITY if alone else Severity.INFO,
        basis=Basis.MEASURED,
        message=both(
            f"{counted(len(norms), 'norm')} of the checkpoint not in the model: {first[-48:]}",
            f"检查点中的 {len(norms)} 个归一化不在模型中：{first[-48:]}",
        ),
        evidence={"unexpected": [k for n in norms for k in n.keys], "norms": len(norms)},
        fix=both(
            "Build the model with this norm, and load with strict=True.",
            "构建含此归一化的模型，并用 strict=True 加载。",
        ),
    )


def _home(path: str, modules: Container[str]) -> str:
    """Return the nearest module of the model in which the norm would stand."""
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return path


def _shifts(norms: list[NormTensor], found: Checkpoints) -> Finding:
    keys = [key for n in norms if (key := found.shift_without_home(n)) is not None]
    return Finding(
        path=norms[0].path.partition("#")[0],
        paths=tuple(dict.fromkeys(n.path for n in norms)),
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(keys), 'shift')} of the checkpoint have no place in the model's norms",
            f"检查点中的 {len(keys)} 个偏移在模型的归一化中没有位置",
        ),
        evidence={
            "unexpected": keys,
            "shifts": len(keys),
            "largest": max(float(found.tensors[k].abs().max()) for k in keys),
        },
        fix=both(
            "Build these norms with a bias, and load with strict=True.",
            "为这些归一化加上 bias，并用 strict=True 加载。",
        ),
    )


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(8), nn.Linear(8, 8)
        self.q_norm: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.q_norm(self.dense(self.norm(x))))


class _Model(nn.Module):
    def __init__(self, *, inner: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.final, self.head = nn.LayerNorm(8), nn.Linear(8, 3)
        for block in self.blocks if inner else ():
            block.q_norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


def _target(*, inner: bool) -> Target:
    trained, model = _Model(inner=True), _Model(inner=inner)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.3, generator=generator)
    info = model.load_state_dict(trained.state_dict(), strict=False)
    x = torch.randn(2, 4, 8, generator=generator)
    return Target(model=model.eval(), args=(x,), checkpoint=trained.state_dict(), load_info=info)


def bad() -> Target:
    """Return a model without the inner norms that its checkpoint holds."""
    return _target(inner=False)


def good() -> Target:
    """Return a model with them."""
    return _target(inner=True)
