"""An eps or running statistics that did not come along with the weights.

## What it finds
Norms whose eps, read from the graph, is at no place the one that the configuration states (`rms_norm_eps`,
`layer_norm_epsilon`, `batch_norm_eps`, ..., or the default of the framework that `source` names), where the output
moves by more than 1e-3 with the stated one; and running statistics that the checkpoint lacks, or that were not loaded
from it, where the checkpoint holds the norm's trained gain, or the reference (or the online model) has other
statistics and the output moves with them.

## Why it matters
Neither is a parameter, so neither is missed. eps scales every channel whose variance is not far above it: with 1e-5
for 1e-3 up to ten times. Running statistics move while everything is frozen, as long as the model is in train mode: an
adapter saved by `requires_grad`, or a file made from `named_parameters()`, reloads into another function.

## How to fix it
Build norms with the eps of the configuration. Save `state_dict()`, or the buffers beside the adapter; keep frozen batch
norms in eval mode, or estimate their statistics again from data.

Silent: an eps that some norms of the kind have (the others are another part of the model), or that changes nothing;
frozen statistics that are those of the reference; random weights.

## Sources
Questions 11 and 59. https://github.com/ggml-org/llama.cpp/issues/2373 (perplexity 5.90 with 1e-6, 5.83 with 1e-5);
https://github.com/gzuidhof/nn-transfer/pull/3 (Keras' 1e-3 in PyTorch);
https://github.com/huggingface/peft/issues/1732 (batch norm statistics outside the adapter).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts, needs
from normwise.facts.conventions import Stated
from normwise.facts.lost_buffers import LostBuffer, lost_buffers
from normwise.facts.outcomes import MATTERS, apart, outputs_of, outputs_with
from normwise.facts.repairs import effect, respecified
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.targets import Target

ZH = """eps 或运行统计量没有随权重一起恢复。

## 发现什么
从图中读出的 eps 没有一处等于配置所述（`rms_norm_eps`、`layer_norm_epsilon`、`batch_norm_eps` 等，或 `source` 所指框架
的默认值），而改用所述 eps 后输出移动超过 1e-3；以及检查点缺少或没有从中加载的运行统计量：检查点含该归一化
训练过的增益，或参考模型（或在线模型）的统计量不同，且换用后输出移动。

## 为什么重要
两者都不是参数，因此不会被发现缺失。eps 会缩放方差不远大于它的每个通道：以 1e-5 代替 1e-3 最多放大十倍。只要模型处于训
练模式，即使一切冻结，运行统计量也会变化：按 `requires_grad` 保存的适配器，或由 `named_parameters()` 生成的文件，重新
加载后是另一个函数。

## 如何修复
按配置的 eps 构建归一化。保存 `state_dict()`，或随适配器保存缓冲区；冻结的批归一化保持评估模式，或用数据重新估计统计
量。

以下情况不报告：同类中部分归一化具有该 eps（其余属于模型的另一部分），或改变 eps 没有影响；与参考一致的冻结统计量；随
机权重。

## 来源
问题 11 和 59。https://github.com/ggml-org/llama.cpp/issues/2373（困惑度：1e-6 为 5.90，1e-5 为 5.83）；
https://github.com/gzuidhof/nn-transfer/pull/3（Keras 的 1e-3 用于 PyTorch）；
https://github.com/huggingface/peft/issues/1732（适配器之外的批归一化统计量）。
"""

CODE = "CKP005"
SEVERITY = Severity.ERROR
EXPLAINS = ("CKP006", "BNS003", "BNS004")

_SAME_EPS = 0.01  # relative: float32 rounds 1e-5 to 9.9999997e-06


def check(facts: Facts) -> Iterator[Finding]:
    """Report an eps other than the stated one, and running statistics that were not restored."""
    if not facts.target.weights.magnitudes_count:
        raise NotKnown(needs.REAL_WEIGHTS)
    if facts.target.config is None and facts.target.checkpoint is None and facts.target.load_info is None:
        raise NotKnown(_NEEDS)
    unknown: NotKnown | None = None
    for find in (_eps, _buffers):
        try:
            yield from find(facts)
        except NotKnown as why:
            unknown = unknown or why if _concerns(find is _eps, facts) else unknown
    if unknown is not None:
        raise unknown


_NEEDS = both(
    "needs what the weights came with: pass config=... or checkpoint=...",
    "需要权重的来源：传入 config=... 或 checkpoint=...",
)


def _concerns(eps: bool, facts: Facts) -> bool:
    """Whether the evidence that one half of the rule reads was given at all."""
    if eps:
        return facts.target.config is not None
    return facts.target.checkpoint is not None or facts.target.load_info is not None


# -- eps ----------------------------------------------------------------------------------------


def _eps(facts: Facts) -> Iterator[Finding]:
    by_kind: dict[object, list[Site]] = {}
    for site in facts.sites:
        spec = site.row.spec
        if spec is not None and spec.eps is not None and spec.eps_inside and not spec.eps_clamp:
            by_kind.setdefault(spec.kind, []).append(site)
    said = facts.conventions
    for sites in by_kind.values():
        spec = sites[0].row.spec
        stated = list(said.eps_of(spec.kind)) if spec is not None else []
        if len({s.value for s in stated}) == 1 and not any(_has(site, stated[0].value) for site in sites):
            yield _other_eps(facts, sites, stated[0])


def _has(site: Site, eps: float) -> bool:
    mine = site.row.spec.eps if site.row.spec else None
    return mine is not None and math.isclose(mine, eps, rel_tol=_SAME_EPS)


def _other_eps(facts: Facts, sites: list[Site], stated: Stated) -> Finding:
    calls = [c for s in sites for c in s.calls]
    before = outputs_of(facts.runs.base)
    moved = apart(before, outputs_of(respecified(facts, calls, lambda spec: replace(spec, eps=stated.value))))
    mine = sorted({s.row.spec.eps for s in sites if s.row.spec and s.row.spec.eps is not None})
    paths = tuple(dict.fromkeys(s.row.path.partition("#")[0] for s in sites))
    return Finding(
        paths=paths,
        severity=Severity.WARNING if moved > MATTERS else Severity.INFO,
        basis=Basis.MEASURED,
        message=both(
            f"eps {mine[0]:g} in {counted(len(paths), 'norm')}, stated is {stated.value:g}: output moves {moved:.2g}",
            f"{len(paths)} 个归一化的 eps 为 {mine[0]:g}，而非所述的 {stated.value:g}：输出变化 {moved:.2g}",
        ),
        evidence={
            "metric": "relative change of the output with the stated eps",
            "value": moved,
            "floor": MATTERS,
            "eps": mine,
            "stated": stated.value,
            "stated_by": stated.key,
        },
        counterfactual=effect(
            both(f"compute them with eps {stated.value:g}", f"用 eps {stated.value:g} 计算"),
            "distance of the output from that",
            moved,
            0.0,
        )
        if moved > MATTERS
        else None,
        fix=both(f"Build these norms with eps={stated.value:g}.", f"用 eps={stated.value:g} 构建这些归一化。"),
    )


# -- running statistics ---------------------------------------------------------------------------


def _buffers(facts: Facts) -> Iterator[Finding]:
    lost = lost_buffers(facts)
    if not lost:
        return
    values = {b.key: b.value for b in lost if b.value is not None}
    moved = apart(outputs_of(facts.runs.base), outputs_with(facts, values)) if values else None
    paths = tuple(dict.fromkeys(b.path for b in lost))
    yield Finding(
        path=paths[0].partition("#")[0],
        paths=tuple(dict.fromkeys(p.partition("#")[0] for p in paths)),
        severity=SEVERITY if moved is None or moved > MATTERS else Severity.INFO,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(lost), 'running statistic')} not restored: not those of {lost[0].source}",
            f"{len(lost)} 个运行统计量没有恢复：与{_ZH_SOURCES.get(lost[0].source, lost[0].source)}不同",
        ),
        evidence={
            "buffers": [b.key for b in lost],
            "norms": len(paths),
            "largest_change": max(_change(b) for b in lost),
            "output_change": moved,
        },
        counterfactual=None
        if moved is None or moved <= MATTERS
        else effect(
            both("restore them", "恢复这些统计量"), "distance of the output from the restored model's", moved, 0.0
        ),
        fix=both(
            "Save and load the buffers too (state_dict()), or estimate them again from data in train mode.",
            "同时保存并加载缓冲区（state_dict()），或在训练模式下用数据重新估计。",
        ),
    )


_ZH_SOURCES = {
    "the reference": "参考模型",
    "the online model": "在线模型",
    "the checkpoint": "检查点",
    "training": "训练后",
}


def _change(lost: LostBuffer) -> float:
    if lost.value is None:
        return 0.0
    return float((lost.live.double().cpu() - lost.value.double().cpu()).abs().max())


def _target(*, buffers: bool) -> Target:
    generator = torch.Generator().manual_seed(0)
    trained, model = (nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)) for _ in range(2))
    model.load_state_dict(trained.state_dict())
    trained.train()(torch.randn(16, 5, generator=generator) * 3 + 1)
    kept = {k: t.clone() for k, t in trained.state_dict().items() if buffers or k.startswith("2")}
    model.load_state_dict(kept, strict=False)
    x = torch.randn(4, 5, generator=generator)
    return Target(model=model.eval(), args=(x,), checkpoint=kept, reference=trained.eval())


def bad() -> Target:
    """Return a model reloaded from its trained head alone; the batch norm had moved on."""
    return _target(buffers=False)


def good() -> Target:
    """Return one reloaded with its buffers."""
    return _target(buffers=True)
