"""Gains of one convention (w or 1 + w) in a norm of the other.

## What it finds
A plain norm (`x * weight`) that holds gains stored for a norm that computes `1 + weight`, and the reverse. What tells:
the family that the config names, the gains of the checkpoint or of the reference beside the live ones, and their
distribution (around 0 with both signs means stored for `1 + weight`). A loader that adds or subtracts the 1 is sound:
live gains are judged.

## Why it matters
The checkpoint loads strictly, because the shapes are the same. A plain norm multiplies by numbers near 0 and passes on
noise; a unit-offset norm fed plain gains doubles everything. Large gains of a unit-offset family (Gemma) prove nothing,
so a norm that computes `1 + weight` is reported only with a witness: the family, the checkpoint, or the loss on the
user's data (`eval_fn`, a loader with labels), which is clearly lower with 1 subtracted. Stored gains that all lie at 1
are a remark without one, and a warning in a checkpoint by itself, where at least four norms agree.

## How to fix it
Add 1 to the stored gains when loading into a plain norm (or use a norm that computes `1 + weight`), and subtract it the
other way round; both are exact in float32. Convert once: a converter that adds 1 for a norm that adds it again doubles.

## Sources
Question 60. https://github.com/pytorch/executorch/pull/19901 (one of two load paths did not add 1);
https://github.com/linkedin/Liger-Kernel/issues/74 (a kernel without the offset of Gemma).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.gains import Gain, regained, rms
from normwise.facts.losses import Losses, clearly_lower
from normwise.facts.repairs import effect
from normwise.facts.stored import NO_FAMILY
from normwise.rendering import both
from normwise.spec import Kind
from normwise.targets import Target, Weights

CODE = "PAR002"
SEVERITY = Severity.ERROR
READS_CHECKPOINTS = True
EXPLAINS = ("CKP006", "PAR010")

FEWEST = 8  # channels that make a distribution
# Of gains around 0 nearly half are negative, and |mean| / rms is 0: pooled over norms that is sharp. One norm of 16
# channels has 2 negative ones or fewer with probability 2e-3 and 0.7 or more with 5e-3; trained plain gains have
# one sign and 0.9 and more.
MINORITY, CENTRED = 0.3, 0.4
MINORITY_OF_ONE, CENTRED_OF_ONE = 0.1, 0.7
SEVERAL = 4  # norms of a checkpoint: two or three may agree by chance
MOST = 0.8  # of the norms: a few may be odd for reasons of their own
# Means of plain gains stored in a norm that adds 1
AROUND_ONE = (0.5, 1.5)
AT_ONE = 0.1  # from 1: where training leaves gains that started there; those of a Gemma differ by norm and depth

ZH = """一种约定（w 或 1 + w）的增益放进了另一种归一化。

## 发现什么
普通归一化（`x * weight`）中放着为 `1 + weight` 存储的增益，或相反。依据是：config 指出的模型族、检查点中的增
益与当前增益的对照，以及分布（以 0 为中心、正负都有，说明是为 `1 + weight` 存储的）。加载时自行加 1 或减 1 是健康的：
判断的是当前的增益。

## 为什么重要
形状相同，因此严格加载也能通过。普通归一化会乘以接近 0 的数，只传递噪声；带单位偏移的归一化放入普通增益则会把一切加
倍。带单位偏移的模型族（Gemma）增益大并不说明问题，所以对计算 `1 + weight` 的归一化，只有在有证据时才报告：家族、
检查点，或用户数据上的损失（`eval_fn`、带标签的 loader）在减 1 后明显更低。没有证据而存储的增益全在 1 附近时只作提
示；只有检查点且至少四个归一化一致时为警告。

## 如何修复
加载到普通归一化时给存储的增益加 1（或改用计算 `1 + weight` 的归一化），反之则减 1；在 float32 中两者都是精确的。只
转换一次：归一化自己会加 1 时，转换器再加 1 就会加倍。

## 来源
问题 60。https://github.com/pytorch/executorch/pull/19901（两条加载路径之一没有加 1）；
https://github.com/linkedin/Liger-Kernel/issues/74（内核缺少 Gemma 的偏移）。
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What is wrong with some gains, and what says so."""

    gains: tuple[Gain, ...]
    severity: Severity
    witness: str
    losses: tuple[float, float] | None = None  # as it is, and with 1 subtracted


def check(facts: Facts) -> Iterator[Finding]:
    """Report gains stored for the other convention."""
    if facts.target.weights is Weights.RANDOM:
        return
    if facts.target.stored is not None and facts.gains.family_offset is None:
        raise NotKnown(NO_FAMILY)
    held = [g for g in facts.gains.of(Kind.LAYER, Kind.RMS) if len(g.effective) >= FEWEST and g.direct]
    gains = [g for g in held if g.constant is None]
    plain, offset = ([g for g in gains if g.offset == number] for number in (0, 1))
    if (case := _missing(facts, plain, knows=any(g.offset == 1 for g in held))) is not None:
        yield _finding(facts, case, len(gains), added=1.0)
    if (case := _twice(facts, offset, [g for g in held if g.offset == 1])) is not None:
        yield _finding(facts, case, len(gains), added=0.0)


def _centred(gains: Sequence[Gain], minority: float, limit: float) -> bool:
    """Whether stored gains lie around 0 with both signs."""
    stored = torch.cat([g.stored.double().cpu() for g in gains])
    negative = float((stored < 0).double().mean())
    return minority <= negative <= 1 - minority and abs(float(stored.mean())) <= limit * rms(stored)


def _missing(facts: Facts, plain: list[Gain], *, knows: bool) -> _Case | None:
    """Return plain norms whose gains need 1 added.

    A model that ``knows`` of the offset has norms with it: its plain ones may be plain in the family too, as the gated
    norms of Qwen3-Next are.
    """
    short = [g for g in plain if facts.gains.short_of_reference(g) == 1]
    if short:
        return _case(short, Severity.ERROR, _REFERENCE)
    as_stored = [g for g in plain if facts.gains.shift(g) == 0]
    shifted = [g for g in plain if facts.gains.shift(g) == 1]
    around = [g for g in plain if _centred([g], MINORITY_OF_ONE, CENTRED_OF_ONE) and g not in shifted]
    most = bool(around) and len(around) >= MOST * len(plain) and _centred(around, MINORITY, CENTRED)
    if facts.gains.family_offset == 1 and as_stored and (most or not (shifted or knows)):
        return _case(as_stored, Severity.ERROR, _FAMILY)
    if facts.gains.family_offset == 1 and most:
        return _case(around, Severity.ERROR, _FAMILY)
    if most and any(g in as_stored for g in around):
        return _case(around, Severity.ERROR, _CHECKPOINT)
    forgotten = [g for g in as_stored if g in around]
    if shifted and forgotten:
        return _case(forgotten, Severity.ERROR, _SIBLINGS)
    if most and len(around) > 1 and facts.gains.trained:
        return _case(around, Severity.WARNING, _TRAINED)
    return None


def _twice(facts: Facts, offset: list[Gain], held: list[Gain]) -> _Case | None:
    """Return norms that compute 1 + weight with gains to which 1 belongs no more.

    Args:
        facts: of the target.
        offset: the gains of norms that add 1.
        held: the same with those that are one number throughout.
    """
    beyond = [g for g in offset if facts.gains.short_of_reference(g) == -1]
    if beyond:
        return _case(beyond, Severity.ERROR, _REFERENCE)
    shifted = [g for g in offset if facts.gains.shift(g) == 1]
    if shifted and facts.gains.family_offset != 0:
        return _case(shifted, Severity.ERROR, _CHECKPOINT)
    unshifted = [g for g in offset if facts.gains.shift(g) != -1]
    plain = [g for g in unshifted if AROUND_ONE[0] <= float(g.stored.double().mean()) <= AROUND_ONE[1]]
    if not plain or len(plain) < MOST * len(offset):
        return None
    if facts.gains.family_offset == 0:
        return _case(plain, Severity.ERROR, _FAMILY)
    if (losses := _better_without(facts, plain)) is not None:
        return _Case(gains=tuple(plain), severity=Severity.ERROR, witness=_LOSS, losses=losses)
    sure = facts.target.stored is not None and len(offset) >= SEVERAL
    at_one = all(abs(float(g.stored.double().mean()) - 1) <= AT_ONE for g in (held if sure else offset))
    # of a checkpoint by itself nothing else can be a witness, and no family was trained to gains that all are 2
    return _case(plain, Severity.WARNING if sure else Severity.INFO, _SPREAD) if at_one and len(offset) > 1 else None


def _better_without(facts: Facts, gains: list[Gain]) -> tuple[float, float] | None:
    """Return the loss as it is and with 1 subtracted from the gains, where that is clearly lower."""
    names = [g.path for g in gains]

    def subtracted(model: nn.Module) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name in names:
                parameters[name].sub_(1.0)

    try:
        measured = Losses(facts)
        now, other = measured.of(), measured.of(subtracted, repair=True)
        if not clearly_lower(other, now) or measured.is_score(subtracted, other):
            return None
    except (NotKnown, KeyError):  # a gain that is a buffer
        return None
    return sum(now) / len(now), sum(other) / len(other)


_FAMILY = both("family", "模型族")
_CHECKPOINT = both("checkpoint", "检查点")
_REFERENCE = both("reference", "参考模型")
_SIBLINGS = both("its siblings", "同类归一化")
_TRAINED = both("trained weights", "已训练的权重")
_LOSS = both("loss on your data", "你的数据上的损失")
_SPREAD = both("their distribution", "它们的分布")


_ADD = both(
    "Add 1 to these gains when loading, or use a norm that computes 1 + weight.",
    "加载时给这些增益加 1，或改用计算 1 + weight 的归一化。",
)
_SUBTRACT = both(
    "Subtract 1 from these gains when loading, or use a plain norm.", "加载时把这些增益减 1，或改用普通归一化。"
)


_LESS = both("these gains less 1", "这些增益减 1")


def _case(gains: Sequence[Gain], severity: Severity, witness: str) -> _Case:
    return _Case(gains=tuple(gains), severity=severity, witness=witness)


def _finding(facts: Facts, case: _Case, of: int, *, added: float) -> Finding:
    """Return the finding on gains to which ``added`` has to be added by the norm."""
    gains, missing = case.gains, added == 1
    pooled = torch.cat([g.stored.double().cpu() for g in gains])
    mean = float(pooled.mean())
    said = both("compute 1 + weight", "改为计算 1 + weight") if missing else both("compute weight", "改为直接用 weight")
    paths = tuple(dict.fromkeys(g.site.row.path for g in gains))
    return Finding(
        paths=paths,
        severity=case.severity,
        basis=Basis.MEASURED if case.severity is not Severity.INFO else Basis.PATTERN,
        message=both(
            f"{counted(len(gains), 'gain')} of {of} stored for 1 + weight (mean {mean:.2g}), used as weight"
            if missing
            else f"{counted(len(gains), 'gain')} of {of} hold the 1 already (mean {mean:.2g}), used as 1 + weight",
            f"{of} 个增益中有 {len(gains)} 个为 1 + weight 存储（均值 {mean:.2g}），却直接使用"
            if missing
            else f"{of} 个增益中有 {len(gains)} 个已含 1（均值 {mean:.2g}），却按 1 + weight 使用",
        ),
        evidence={
            "metric": "stored gain",
            "value": mean,
            "sd": float(pooled.std(unbiased=False)),
            "negative_share": float((pooled < 0).double().mean()),
            "effective_rms": float(torch.cat([g.effective for g in gains]).square().mean().sqrt()),
            "gains": len(gains),
            "of": of,
            "witness": str(case.witness),
        },
        counterfactual=effect(_LESS, "loss on the given data", *case.losses)
        if case.losses
        else regained(facts, gains, said, spec=lambda s: replace(s, weight_offset=added)),
        fix=_ADD if missing else _SUBTRACT,
    )


def _target(*, add: float) -> Target:
    random = torch.Generator().manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.RMSNorm(16, eps=1e-6))]
    model = nn.Sequential(*layers)
    stored = {
        key: torch.randn(16, generator=random) * 0.2 if tensor.ndim == 1 and ".bias" not in key else tensor.clone()
        for key, tensor in model.state_dict().items()
    }
    gains = {k for k, t in stored.items() if t.ndim == 1 and ".bias" not in k}
    model.load_state_dict({k: t + add if k in gains else t for k, t in stored.items()})
    x = torch.randn(3, 16, generator=random)
    return Target(model=model, args=(x,), checkpoint=stored, config={"model_type": "gemma"})


def bad() -> Target:
    """Return plain norms loaded with the gains of a unit-offset family as they are stored."""
    return _target(add=0.0)


def good() -> Target:
    """Return the same norms loaded with 1 added."""
    return _target(add=1.0)
