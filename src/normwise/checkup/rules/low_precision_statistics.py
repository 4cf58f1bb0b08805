"""A norm that takes its statistics in half precision.

## What it finds
A norm written by hand whose squares, mean or variance are computed in float16 or bfloat16. The norm is run by itself
on three kinds of rows, in the dtypes it really has and in float64: standard normal rows, rows with one element of
400, and rows of 400 times standard normal; and, with true weights, on the rows of the example run. A float16 norm
that loses its row to one large element is an error; one that loses only large rows, or errs by more than 1 % on
ordinary ones or 3 % on yours, a warning. Anything else is worth knowing, as are cosine similarities off the residual
stream. Torch's own norms, and reductions such as `std` or `vector_norm`, accumulate in float32 and are reported only
where they fail.

## Why it matters
float16 ends at 65504, so the square of any element of 256 or more is infinite. Then `rsqrt(inf)` is 0 and the whole
row comes out as *exactly zero*: finite, silent, with zero gradients, seen neither by anomaly mode nor by a search for
NaN. Single channels of several hundred are normal in trained transformers. bfloat16 has the range, but 8 bits of
precision: a mean that is large against the spread cancels in `x - mean`.

## How to fix it
Take the statistics in float32 and cast back:

```python
y = x.float()
y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
return weight * y.to(x.dtype)
```

`torch.nn.LayerNorm` and `torch.nn.RMSNorm` do this inside. The repair is tried on the same rows.

## Sources
Questions 35, 41, 58 and 61. https://github.com/meta-llama/llama/issues/1048 (generation collapses without the
upcast); Sun et al. 2024, Massive Activations in Large Language Models, https://arxiv.org/abs/2402.17762 (single
channels of hundreds to thousands in every model they look at).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.records import Place
from normwise.facts.repairs import effect
from normwise.facts.rows import alike
from normwise.facts.sites import Site
from normwise.rendering import Text, both
from normwise.spec import NormSpec, Statistic
from normwise.targets import Target

ZH = """用半精度计算统计量的归一化。

## 发现什么
平方、均值或方差在 float16 或 bfloat16 中计算的手写归一化。归一化被单独在三种行上运行，既用它真实的 dtype，也用
float64：标准正态的行、含一个 400 的行、400 倍标准正态的行，以及（权重真实时）示例运行中的行。float16 归一化因一个大元
素就丢失整行，为错误；只丢失整体很大的行、或误差在普通行上超过 1%、在你的行上超过 3%，为警告。其余作提示，残差流之外的
余弦相似度也只作提示。torch 自带的归一化以及 `std`、`vector_norm` 等归约在 float32 中累加，只有真正出错时才报告。

## 为什么重要
float16 的上限是 65504，所以 256 以上元素的平方就是无穷。于是 `rsqrt(inf)` 为 0，整行输出*恰好为零*：有限、无声、梯度
为零，anomaly mode 和查找 NaN 都看不到。训练好的 Transformer 中，个别通道达到几百是常事。bfloat16 范围足够，但只有 8
位精度：均值远大于离散程度时，`x - mean` 会相消。

## 如何修复
在 float32 中计算统计量，再转回；报告会在同样的行上试验这一修复：

```python
y = x.float()
y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
return weight * y.to(x.dtype)
```

`torch.nn.LayerNorm` 和 `torch.nn.RMSNorm` 内部就是这样做的。

## 来源
问题 35、41、58、61。https://github.com/meta-llama/llama/issues/1048（去掉提升精度后生成崩溃）；Sun 等 2024，Massive
Activations in Large Language Models，https://arxiv.org/abs/2402.17762（所考察的每个模型都有几百到几千的通道）。
"""

CODE = "NUM001"
SEVERITY = Severity.ERROR
EXPLAINS = ("NUM002", "NUM005", "NUM009")

HALF = ("float16", "bfloat16")
# One element of a row: 400^2 = 160000 is beyond float16; massive activations are larger still (Sun et al. 2024)
SPIKE = 400.0
# All elements of a row: a variance of 400^2 = 160000 is beyond float16 also where few elements make it 60 % smaller
LOUD = 400.0
# Relative to the whole output; a mean square rounded once to bfloat16 costs at most 2^-9 = 0.2 %, and two more
# roundings as much again. More than 1 % is another mechanism: cancellation, or underflow.
ACCURATE = 0.01
# The same on your own rows, which may hold a mean of a few deviations: bfloat16 rounds that to 2^-9 of itself
ACCURATE_GIVEN = 0.03
# Rows at less than half the usual size are constant but for rounding: their error is noise
_USUAL = 0.25
# An output that has lost its row: 0 instead of x gives a relative error of 1
COLLAPSED = 0.5
# Reductions that square and sum in float32 inside, whatever dtype they return (torch 2.13)
FUSED = frozenset({"var", "std", "var_mean", "std_mean", "linalg_vector_norm", "linalg_norm", "norm", "frobenius_norm"})
# Where massive activations live. An L2 norm elsewhere (cosine similarity of embeddings, of queries and keys) reads what
# a norm and a projection bounded: CLIP squares in float16 there, and is sound.
STREAM = frozenset({Place.PRE, Place.POST, Place.BRANCH, Place.FINAL, Place.EMBEDDING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The errors of one kind of norm against float64, relative."""

    dtype: str
    ordinary: float
    given: float  # on the rows of the example run that come out at their usual size
    spike: float
    loud: float
    fused: bool
    bounded: bool

    @property
    def severity(self) -> Severity | None:
        """How bad it is, None where the op is fused and exact enough."""
        if self.ordinary > ACCURATE or self.given > ACCURATE_GIVEN:
            return Severity.WARNING
        if self.spike > COLLAPSED and not self.bounded:
            return Severity.ERROR
        if self.loud > COLLAPSED and not (self.bounded or self.fused):
            return Severity.WARNING
        exact = self.spike <= COLLAPSED and self.loud <= COLLAPSED
        return None if self.fused and exact else Severity.INFO


def check(facts: Facts) -> Iterator[Finding]:
    """Report every hand-written norm whose statistic is reduced from a half-precision value."""
    values = facts.graph.values
    suspects = [s for s in facts.sites if not s.row.native and values[s.calls[0].statistic_value].dtype in HALF]
    found: dict[tuple[str, Severity], list[tuple[Judged, tuple[Site, ...]]]] = {}
    unknown: NotKnown | None = None
    for group in alike(suspects, facts.recording):
        try:
            judged = judge(facts, group)
        except NotKnown as why:
            unknown = why
            continue
        if judged.severity is not None:
            found.setdefault((judged.dtype, judged.severity), []).append((judged, group))
    for (dtype, severity), groups in found.items():
        yield _finding(facts, dtype, severity, groups)
    if unknown is not None and not found:
        raise unknown


def judge(facts: Facts, group: tuple[Site, ...]) -> Judged:
    """Run one kind of norm by itself on three kinds of rows, and each of them on its own."""
    site, call = group[0], group[0].calls[0]
    readers = {facts.graph.ops[m].short for m in call.members if call.statistic_value in facts.graph.ops[m].inputs}
    return Judged(
        dtype=facts.graph.values[call.statistic_value].dtype,
        ordinary=facts.rows.error(call),
        given=max(_error_given(facts, each) for each in group),
        spike=facts.rows.error(call, spike=SPIKE),
        loud=facts.rows.error(call, scale=LOUD),
        fused=bool(readers & FUSED),
        bounded=site.row.spec is not None
        and site.row.spec.statistic is Statistic.L2
        and site.row.placement not in STREAM,
    )


def _error_given(facts: Facts, site: Site, spec: NormSpec | None = None) -> float:
    """Return the error on the rows of the example run, those left out that are constant or lost altogether."""
    call = site.calls[0]
    if site.row.spec is None or not facts.target.weights.magnitudes_count:
        return 0.0
    try:
        x = facts.runs.base.of(call.input)
        made = facts.rows.core(call, x, spec).cpu().double()
        true = facts.rows.double(call.core, {call.input: x.cpu().double()})
    except NotKnown:
        return 0.0
    axes = site.row.spec.axes
    kept = (true.square().mean(axes, keepdim=True) > _USUAL) & (made != 0).any(-1, keepdim=True) & made.isfinite()
    size = float((true * kept).norm())
    return float(((made - true).nan_to_num() * kept).norm()) / size if size > 0 else 0.0


def _finding(facts: Facts, dtype: str, severity: Severity, groups: list[tuple[Judged, tuple[Site, ...]]]) -> Finding:
    paths = tuple(site.row.path for _, group in groups for site in group)
    judged = [j for j, _ in groups]
    numbers = {name: max(getattr(j, name) for j in judged) for name in ("ordinary", "given", "spike", "loud")}
    return Finding(
        paths=paths,
        severity=severity,
        basis=Basis.PROOF if severity is Severity.ERROR else Basis.MEASURED,
        message=_message(dtype, len(paths), numbers),
        evidence={
            "norms": len(paths),
            "dtype": dtype,
            # JSON has no infinity: an error that is not finite is None
            **{f"relative_error_{name}_rows": _number(number) for name, number in numbers.items()},
            "spike": SPIKE,
            "loud": LOUD,
        },
        counterfactual=_repair(facts, max(groups, key=lambda g: g[0].given)[1], numbers),
        fix=both(
            "Take the statistics of x.float() and cast the normalized value back: y = x.float(); ...; y.to(x.dtype).",
            "在 x.float() 上计算统计量，再把归一化后的值转回：y = x.float(); ...; y.to(x.dtype)。",
        ),
    )


def _repair(facts: Facts, group: tuple[Site, ...], numbers: dict[str, float]) -> dict[str, object] | None:
    """Judge the same formula with statistics in float32 on the rows that were worst."""
    site = group[0]
    if site.row.spec is None or site.row.spec.statistic is Statistic.OTHER:
        return None
    wide = replace(site.row.spec, stats_dtype="float32")
    change = both("the statistics in float32", "用 float32 计算统计量")
    if numbers["ordinary"] <= ACCURATE and numbers["given"] > ACCURATE_GIVEN:
        site = max(group, key=lambda s: _error_given(facts, s))
        errors = [_error_given(facts, site, spec) for spec in (None, wide)]
        return effect(change, "relative error on your rows", *errors)
    worst = max((n for n in numbers if n != "given"), key=lambda name: numbers[name])
    rows = {"ordinary": {}, "spike": {"spike": SPIKE}, "loud": {"scale": LOUD}}[worst]
    try:
        after = facts.rows.error(site.calls[0], spec=wide, **rows)
    except (NotKnown, ValueError, RuntimeError):
        return None
    # an output that is not finite has lost its row
    return effect(
        change,
        f"relative error on {worst} rows",
        min(numbers[worst], 1.0),
        min(after, 1.0),
    )


def _message(dtype: str, norms: int, numbers: dict[str, float]) -> Text:
    en, zh = f"{counted(norms, 'norm')} in {dtype}", f"{norms} 个 {dtype} 归一化"
    if numbers["ordinary"] <= ACCURATE and numbers["given"] > ACCURATE_GIVEN:
        off = numbers["given"]
        return both(
            f"{en}: statistics are off by {off:.1%} of the output on your rows",
            f"{zh}：在你的数据上统计量误差为输出的 {off:.1%}",
        )
    if numbers["ordinary"] > ACCURATE or max(numbers["spike"], numbers["loud"]) <= COLLAPSED:
        off = numbers["ordinary"]
        return both(f"{en}: statistics are off by {off:.2%} of the output", f"{zh}：统计量误差为输出的 {off:.2%}")
    if numbers["spike"] > COLLAPSED:
        return both(
            f"{en}: one element of {SPIKE:.0f} overflows the squares, its whole row is lost",
            f"{zh}：一个 {SPIKE:.0f} 的元素使平方溢出，整行丢失",
        )
    return both(
        f"{en}: rows of {LOUD:.0f} overflow the variance and are lost",
        f"{zh}：大小为 {LOUD:.0f} 的行使方差溢出而丢失",
    )


def _number(number: float) -> float | None:
    return number if math.isfinite(number) else None


class _RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, *, float32: bool) -> None:
        super().__init__()
        self.weight, self.float32 = nn.Parameter(torch.ones(hidden_size)), float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() if self.float32 else x
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * y.to(x.dtype)


def _target(*, float32: bool) -> Target:
    model = nn.Sequential(nn.Linear(16, 16), _RMSNorm(16, float32=float32), nn.Linear(16, 4)).half().eval()
    return Target(model=model, args=(torch.ones(2, 16, dtype=torch.float16),))


def bad() -> Target:
    """Return a float16 model whose mean square overflows."""
    return _target(float32=False)


def good() -> Target:
    """Return the same model with its statistics in float32."""
    return _target(float32=True)
