"""LayerNorm where the weights were trained with RMSNorm, or the reverse.

## What it finds
Norms that take out the mean (seen in the graph, not by name) where the configuration (`rms_norm_eps`, a known
`model_type`) or the reference says RMSNorm, or norms that keep it where they say LayerNorm; and norms that keep the
mean although the checkpoint holds a shift for them that is not 0. The share of the mean in the mean square of the real
inputs is given, and the norms are computed the other way: how far the output moves decides between error, warning and,
below 1e-3, info.

## Why it matters
The two have the same gain, so nothing fails to load. They agree where inputs have mean 0, which trained streams
nearly do: a port looks right and is a little worse everywhere, most where a few channels carry large means.

## How to fix it
Use the kind that the weights were trained with. A LayerNorm becomes an RMSNorm exactly only if everything that writes
to the stream has mean 0 and the shift moves into the next linear map.

Silent: models of several parts that differ in kind; exact conversions, whose matrices differ from the checkpoint's or
whose output agrees with the reference.

## Sources
Questions 29, 30, 31 and 60. https://github.com/ggml-org/llama.cpp/issues/173 (a LLaMA port that took out the mean);
Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467 (RMSNorm).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.rules.norm_keys_defaulted import UNTOUCHED
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts, needs
from normwise.facts.divergence import mean_share
from normwise.facts.outcomes import MATTERS, apart, outputs_of
from normwise.facts.repairs import effect, respecified
from normwise.facts.sites import Site
from normwise.rendering import both
from normwise.spec import Kind, NormSpec, Statistic
from normwise.targets import Target
from normwise.targets.checkpoint import Stored, StoredNorm
from normwise.targets.checkpoint.keys import Keys

ZH = """权重用 RMSNorm 训练，模型却用 LayerNorm，或相反。

## 发现什么
配置（`rms_norm_eps`、已知的 `model_type`）或参考模型表明是 RMSNorm，而图中的归一化减去了均值（由图判断，不看名称）；
或表明是 LayerNorm 而均值被保留；以及检查点中有非零偏移而归一化保留均值。给出真实输入中均值占均方的份额，并换一种
方式计算这些归一化：输出移动多少决定是错误、警告，还是（低于 1e-3）只作提示。

## 为什么重要
两者的增益相同，加载不会失败。输入均值为 0 时两者一致，训练好的残差流几乎如此：移植看上去正确，却处处略差，在少数通道
均值很大的地方最差。

## 如何修复
使用训练权重时的那一种。只有写入残差流的一切均值为 0，且偏移并入下一线性层，LayerNorm 才精确等于 RMSNorm。

以下情况不报告：由种类不同的几部分组成的模型；精确的转换（其矩阵与检查点不同，或输出与参考一致）。

## 来源
问题 29、30、31 和 60。https://github.com/ggml-org/llama.cpp/issues/173（减去均值的 LLaMA 移植）；Zhang 和 Sennrich
2019，https://arxiv.org/abs/1910.07467（RMSNorm）。
"""

CODE = "CKP002"
SEVERITY = Severity.ERROR
READS_CHECKPOINTS = True
EXPLAINS = ("CKP006", "CKP004")

# Beyond the rounding of bfloat16 (4e-3) every output is another one; between it and MATTERS it is a loss of quality.
WRONG = 1e-2
_KINDS = (Kind.LAYER, Kind.RMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Norms of one kind that something says are of the other."""

    sites: tuple[Site, ...]
    expected: Kind
    says: str
    shifts: tuple[str, ...] = ()  # keys of the checkpoint


def check(facts: Facts) -> Iterator[Finding]:
    """Report norms whose kind is not that of the weights."""
    if not facts.target.weights.magnitudes_count:
        raise NotKnown(needs.REAL_WEIGHTS)
    if facts.target.stored is not None:
        yield from _in_checkpoint(facts, facts.target.stored)
        return
    reasons: list[NotKnown] = []
    for find in (_by_checkpoint, _by_config, _by_reference):
        try:
            found = find(facts)
        except NotKnown as why:
            reasons.append(why)
            continue
        if found is not None:
            yield _finding(facts, found)
            return
    if len(reasons) == 3:
        evidence = (facts.target.checkpoint, facts.target.config, facts.target.reference)
        given = [why for why, item in zip(reasons, evidence, strict=True) if item is not None]
        raise given[0] if given else NotKnown(_NEEDS)


_NEEDS = both(
    "needs what the weights were trained with: pass config=..., checkpoint=... or reference=...",
    "需要训练权重时的约定：传入 config=...、checkpoint=... 或 reference=...",
)


def _in_checkpoint(facts: Facts, stored: Stored) -> Iterator[Finding]:
    """Report a checkpoint in which every norm has a shift, or none has, although its family says otherwise.

    Raises:
        NotKnown: it has no norm of either kind, or its configuration names no family.
    """
    norms = [n for n in stored.norms if n.keys is not Keys.RUNNING]
    families = facts.conventions.families  # a key such as rms_norm_eps is only a name, and of a part of the model
    kinds = {spec.kind for _, spec in families}
    if not norms or kinds not in ({Kind.RMS}, {Kind.LAYER}):
        raise NotKnown(_NEEDS)
    says = f"model_type {families[0][0]}"
    shifts = [n for n in norms if n.keys is Keys.WEIGHT_AND_BIAS]
    if kinds == {Kind.RMS} and len(shifts) == len(norms):
        moved = any(bool((n.tensors["bias"] != 0).any()) for n in shifts)
        severity = SEVERITY if moved else Severity.INFO
        yield _kind_of_keys(norms, says, "RMSNorm", shifts=len(shifts), severity=severity)
    elif kinds == {Kind.LAYER} and all(spec.bias for _, spec in families) and not shifts:
        yield _kind_of_keys(norms, says, "LayerNorm", shifts=0, severity=Severity.WARNING)


def _kind_of_keys(norms: list[StoredNorm], says: str, kind: str, *, shifts: int, severity: Severity) -> Finding:
    have, have_zh = ("a shift", "有偏移") if shifts else ("no shift", "没有偏移")
    return Finding(
        paths=tuple(n.path for n in norms),
        severity=severity,
        basis=Basis.PATTERN,
        message=both(
            f"{counted(len(norms), 'norm')} have {have}, config ({says}) says {kind}"[:99],
            f"{len(norms)} 个归一化{have_zh}，而配置（{says}）表明是 {kind}",
        ),
        evidence={"norms": len(norms), "shifts": shifts},
        fix=both(
            "Take config.json and weights of one model: the family computes another norm than these were made for.",
            "使用同一模型的 config.json 与权重：该模型族计算的归一化与这些权重所用的不同。",
        ),
    )


def _by_checkpoint(facts: Facts) -> Mismatch | None:
    """Norms without centring for which the checkpoint holds a shift."""
    found = facts.checkpoints
    if found.untouched < UNTOUCHED:
        return None
    keys = {n.path: k for n in found.norms if not n.centred and (k := found.shift_without_home(n)) is not None}
    sites = tuple(s for s in facts.sites if s.row.path in keys and s.row.spec and s.row.spec.kind is Kind.RMS)
    if not sites or all(bool((found.tensors[k] == 0).all()) for k in keys.values()):
        return None
    return Mismatch(sites=sites, expected=Kind.LAYER, says="the checkpoint", shifts=tuple(keys.values()))


def _by_config(facts: Facts) -> Mismatch | None:
    """All norms of the kind that the configuration excludes."""
    said = facts.conventions.kind
    sites = tuple(s for s in facts.sites if s.row.spec is not None and s.row.spec.kind in _KINDS)
    if said is None or not sites or any(s.row.spec and s.row.spec.kind is said[0] for s in sites):
        return None  # some are of the kind it speaks of: the others are another part of the model
    if not said[1].startswith("model_type") and all(s.row.spec and s.row.spec.bias for s in sites):
        return None  # a key is only a name: ERNIE 4.5's vision tower keeps the eps of LayerNorms in rms_norm_eps
    return Mismatch(sites=sites, expected=said[0], says=f"config ({said[1]})")


def _by_reference(facts: Facts) -> Mismatch | None:
    """Norms whose counterpart in the reference is of the other kind, in a model with the same matrices."""
    reference = facts.reference
    if not reference.differs or reference.same_weights < UNTOUCHED:
        return None
    ops = {
        p.mine.op.id: p.theirs.spec.kind
        for p in reference.pairs
        if p.mine.spec and p.theirs.spec and {p.mine.spec.kind, p.theirs.spec.kind} == set(_KINDS)
    }
    sites = tuple(s for s in facts.sites if s.calls[0].op.id in ops)
    return Mismatch(sites=sites, expected=ops[sites[0].calls[0].op.id], says="the reference") if sites else None


def _finding(facts: Facts, found: Mismatch) -> Finding:
    calls = [c for s in found.sites for c in s.calls]
    base = facts.runs.base
    shares = sorted(mean_share(base.of(c.input)) for c in calls)
    try:
        other = respecified(facts, calls, lambda spec: _as(spec, found.expected))
        moved: float | None = apart(outputs_of(base), outputs_of(other))
    except NotKnown:
        moved = None
    paths = tuple(dict.fromkeys(s.row.path for s in found.sites))
    kinds = {Kind.LAYER: "LayerNorm", Kind.RMS: "RMSNorm"}
    mine, theirs = kinds[Kind.RMS if found.expected is Kind.LAYER else Kind.LAYER], kinds[found.expected]
    return Finding(
        path=paths[0].partition("#")[0],
        paths=tuple(dict.fromkeys(p.partition("#")[0] for p in paths)),
        severity=_severity(moved, shares[-1], found),
        basis=Basis.MEASURED,
        message=both(
            f"{counted(len(paths), 'norm')} compute {mine}, {found.says} says {theirs}"[:99],
            f"{len(paths)} 个归一化按 {mine} 计算，{found.says} 表明是 {theirs}",
        ),
        evidence={
            "metric": "share of the mean in the mean square of the inputs",
            "value": shares[-1],
            "median": shares[len(shares) // 2],
            "norms": len(paths),
            "output_change": moved,
            "shifts_without_home": list(found.shifts),
        },
        counterfactual=None
        if moved is None or moved <= MATTERS
        else effect(
            both(f"compute them as {theirs}", f"按 {theirs} 计算"), "distance of the output from that", moved, 0.0
        ),
        fix=both(f"Use {theirs} here, as the weights were trained.", f"此处使用 {theirs}，与训练权重时一致。"),
    )


def _severity(moved: float | None, share: float, found: Mismatch) -> Severity:
    if found.shifts:
        return SEVERITY  # a learned shift is gone
    if moved is None:
        return Severity.WARNING if share > MATTERS else Severity.INFO
    return SEVERITY if moved >= WRONG else Severity.WARNING if moved > MATTERS else Severity.INFO


def _as(spec: NormSpec, kind: Kind) -> NormSpec:
    centred = kind is Kind.LAYER
    return replace(spec, center=centred, statistic=Statistic.VARIANCE if centred else Statistic.MEAN_SQUARE)


class _Norm(nn.Module):
    def __init__(self, *, centred: bool) -> None:
        super().__init__()
        self.weight, self.centred = nn.Parameter(torch.ones(8)), centred

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _target(*, centred: bool) -> Target:
    model = nn.Sequential(nn.Linear(5, 8), _Norm(centred=centred), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.3, 0.5, generator=generator)
    config = {"model_type": "llama", "rms_norm_eps": 1e-6}
    return Target(model=model.eval(), args=(torch.randn(4, 5, generator=generator),), config=config)


def bad() -> Target:
    """Return a port that takes out the mean where the configuration says RMSNorm."""
    return _target(centred=True)


def good() -> Target:
    """Return the same port with RMSNorm."""
    return _target(centred=False)
