"""The first value that is not finite, and whether a norm made it or only shows it.

## What it finds
Outputs of the example run, or of a norm in it, that are NaN or infinite. The search goes backward from there, along
values that are not finite, to the op that made the first of them from finite ones. For a half-precision model the
same op is looked up in a float32 copy: a magnitude beyond the range of the dtype is the cause, and the norm that
later turns inf into NaN is its victim. Named are the kind (overflow, 0/0, inf-inf, 0*inf, domain), the norms on the
way, and the norms whose gains made the sum large. Infinity that nobody computed (masks of -inf) does not count, nor
an output of -inf that is the logarithm of 0.

## Why it matters
NaN is reported where it is seen, most often a norm or the loss, and the norm gets repaired. In float16 the source is
usually a linear map or a residual add one or more ops earlier: inf * rsqrt(inf) is NaN in a norm that is sound.

## How to fix it
Overflow: run in bfloat16, or keep that op in float32, or scale down what writes the stream (a pre-norm model computes
the same if the embedding and the gains on its branches are divided by one number). 0/0: put eps inside the root.
Domain: clamp before the root or the logarithm. Masked rows: leave one position of each row open.

Where the origin is a norm that another finding explains (eps lost, bad buffers, half-precision statistics) this one
is only worth knowing.

## Sources
Questions 61, 41 and 64. https://github.com/huggingface/transformers/issues/5651 (T5 in float16: the linear map before
the norm); https://github.com/huggingface/transformers/pull/37226 (Gemma 3 in float16: gains on the branches).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.ranges import HALF, Failure, How, Origin
from normwise.facts.repairs import effect
from normwise.facts.shares import need_true_weights
from normwise.rendering import Text, both
from normwise.targets import Target
from normwise.targets.checkpoint import Stored

ZH = """第一个非有限值的来源：是归一化造成的，还是只在它那里显现。

## 发现什么
示例运行的输出（或某个归一化的输出）出现 NaN 或无穷。从那里沿着非有限的值向回搜索，直到找到由有限输入产生第一个非有限
值的操作。对半精度模型，会在 float32 副本中查看同一个操作：数值超出该 dtype 的范围就是原因，而之后把 inf 变成 NaN 的归
一化只是受害者。报告给出类型（溢出、0/0、inf-inf、0*inf、定义域）、沿途的归一化，以及增益使求和变大的归一化。没有人计
算出的无穷（-inf 掩码）不算，作为 log(0) 的 -inf 输出也不算。

## 为什么重要
NaN 总是在被看到的地方报告，通常是归一化或损失，于是人们去修归一化。在 float16 中，源头往往是更早的线性层或残差相加：
inf * rsqrt(inf) 在一个完全正确的归一化里也是 NaN。

## 如何修复
溢出：用 bfloat16 运行，或让该操作保持 float32，或缩小写入残差流的数值（pre-norm 模型把嵌入和分支增益除以同一个数，函
数不变）。0/0：把 eps 放进根号内。定义域：在开方或取对数之前截断。全掩码行：每行至少保留一个位置。

若源头是另一条发现已经解释的归一化（eps 丢失、坏缓冲区、半精度统计量），本条只作提示。

## 来源
问题 61、41、64。https://github.com/huggingface/transformers/issues/5651（float16 的 T5：归一化之前的线性层）；
https://github.com/huggingface/transformers/pull/37226（float16 的 Gemma 3：分支上的增益）。
"""

CODE = "NUM009"
SEVERITY = Severity.ERROR
READS_CHECKPOINTS = True
EXPLAINS = ("NUM002", "NUM005", "NUM008")

_LARGE_GAIN = 100.0  # a row of size 1 is multiplied to a thousandth of float16's range and more

_ROLES = {
    "origin": both("origin", "源头"),
    "victim": both("victim", "受害者"),
    "not involved": both("not involved", "无关"),
}
_WORDS = {
    How.OVERFLOW: both("overflow", "溢出"),
    How.ZERO_BY_ZERO: both("0/0", "0/0"),
    How.BY_ZERO: both("division by 0", "除以 0"),
    How.DIFFERENCE: both("inf - inf", "inf - inf"),
    How.PRODUCT: both("0 * inf", "0 * inf"),
    How.DOMAIN: both("root or log of a negative number", "负数的根或对数"),
    How.LOG_OF_ZERO: both("log of 0", "0 的对数"),
    How.MASKED_ROW: both("a row masked everywhere", "有全掩码的行"),
    How.GIVEN: both("held by what was given", "给定的数据中就有"),
    How.UNKNOWN: both("first NaN", "第一个 NaN"),
}

_FIXES = {
    How.OVERFLOW: both(
        "Run in bfloat16, keep this op in float32, or scale down what it adds up (weights, gains on the branches).",
        "用 bfloat16 运行，或让该操作保持 float32，或缩小它所相加的数值（权重、分支增益）。",
    ),
    How.MASKED_ROW: both(
        "Leave one position of every row unmasked, or mask with a large finite number.",
        "每行至少保留一个未掩码的位置，或用很大的有限数做掩码。",
    ),
    How.GIVEN: both(
        "Replace what is not finite in the named input, parameter or buffer before the run.",
        "运行前替换所列输入、参数或缓冲区中的非有限值。",
    ),
}
_GUARD = both(
    "Guard the op: eps inside the root, a clamp before a division, root or logarithm.",
    "为该操作加保护：eps 放进根号内，或在除法、开方、取对数之前截断。",
)


def check(facts: Facts) -> Iterator[Finding]:
    """Report where the first value comes from that is not finite."""
    if facts.target.stored is not None:
        yield from _in_checkpoint(facts.target.stored)
        return
    failure = facts.ranges.failure
    if failure is None or (failure.only_negative and failure.origin.how is How.LOG_OF_ZERO):
        return
    need_true_weights(facts)
    severity = Severity.ERROR if failure.reached == "outputs" else Severity.WARNING
    yield _finding(facts, failure, Severity.INFO if _told(facts, failure.origin) else severity)


def _in_checkpoint(stored: Stored) -> Iterator[Finding]:
    """Report gains and shifts of a checkpoint that are not finite; its running statistics are BNS011's.

    Raises:
        NotKnown: they are all finite; nothing else of the checkpoint was read.
    """
    held = {n.names[r]: t for n in stored.norms for r, t in n.tensors.items() if r in ("weight", "bias")}
    bad = {name: int((~t.isfinite()).sum()) for name, t in held.items()}
    bad = {name: count for name, count in bad.items() if count}
    if not bad:
        raise NotKnown(_NORMS_ALONE)
    paths = tuple(dict.fromkeys(n.path for n in stored.norms if not bad.keys().isdisjoint(n.names.values())))
    yield Finding(
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=both(
            f"{counted(len(paths), 'norm')} store a gain or shift that is not finite: {sum(bad.values())} elements",
            f"{len(paths)} 个归一化存储的增益或偏移不是有限数：{sum(bad.values())} 个元素",
        ),
        evidence={"norms": len(paths), "of": len(stored.norms), "elements_at_origin": sum(bad.values())},
        fix=_FIXES[How.GIVEN],
    )


_NORMS_ALONE = both(
    "the numbers of the norms are finite; no other tensor of the checkpoint was read",
    "归一化的数值都是有限的；检查点的其他张量没有读取",
)


def _told(facts: Facts, origin: Origin) -> bool:
    """Whether a rule about that norm says more: its buffers, its eps, its statistics in half precision."""
    if origin.op is None and {*origin.path.split(", ")} & {n for r in facts.running for n in _buffers(r)}:
        return True
    norm = origin.norm
    if norm is None:
        return False
    if norm.running_var is not None and not norm.uses_batch:
        return True
    statistics_in_half = facts.graph.values[norm.statistic_value].dtype in HALF
    if origin.how is How.OVERFLOW:
        return statistics_in_half and not norm.native and origin.value not in (norm.core, norm.output)
    eps = norm.spec.eps if norm.spec is not None else None
    try:
        return bool(eps) and not facts.rows.constant(norm, 0.0).forward_finite
    except NotKnown:
        return False


def _buffers(running: object) -> Iterator[str]:
    path = getattr(running, "path", "")
    yield from (f"{path}.{name}".strip(".") for name in ("running_mean", "running_var"))


def _finding(facts: Facts, failure: Failure, severity: Severity) -> Finding:
    origin, graph = failure.origin, facts.traced.graph
    victims = tuple(dict.fromkeys(graph.calls[n.call].path for n in failure.victims))
    path = origin.path if origin.op is not None else _module_of(origin.path, graph.modules)
    large = facts.ranges.contributors(origin) if origin.how is How.OVERFLOW else []
    verdict = "origin" if origin.norm is not None else "victim" if victims else "not involved"
    counterfactual = None
    if failure.bad32 is not None:
        change = both("the same run in float32", "同样的运行改用 float32")
        counterfactual = effect(change, "elements that are not finite", failure.bad, failure.bad32)
    return Finding(
        path=path,
        paths=tuple(dict.fromkeys((path, *victims))),
        severity=severity,
        basis=Basis.PROOF,
        message=_message(origin, verdict, victims, large),
        evidence={
            "kind": str(origin.how),
            "op": origin.op.name if origin.op is not None else f"given: {origin.path}",
            "source": str(origin.op.source) if origin.op is not None and origin.op.source else None,
            "dtype": origin.dtype,
            "limit": origin.limit,
            "float32_peak": _finite(origin.peak32),
            "elements_at_origin": origin.bad,
            "norm_is": _ROLES[verdict],
            "norms_on_the_way": list(victims),
            "surfaces_as_nan_in": failure.surfaced,
            "largest_contributors": large,
            "metric": "elements that are not finite where it arrives",
            "value": failure.bad,
            "floor": 0,
        },
        counterfactual=counterfactual,
        fix=_FIXES.get(origin.how, _GUARD),
    )


def _message(origin: Origin, verdict: str, victims: tuple[str, ...], large: list[dict[str, object]]) -> Text:
    kind = _WORDS[origin.how]
    en, zh = f"{kind}", f"{kind.zh}"
    if origin.op is not None:
        en, zh = f"{kind} in {origin.op.short}", f"{origin.op.short} 中{kind.zh}"
    if origin.how is How.OVERFLOW and origin.peak32 is not None and math.isfinite(origin.peak32):
        en += f": {origin.peak32:.0f} in float32, {origin.dtype} ends at {origin.limit:.5g}"
        zh += f"：float32 下为 {origin.peak32:.0f}，{origin.dtype} 上限为 {origin.limit:.5g}"
    else:
        en, zh = f"{en}: {origin.bad} elements ({origin.dtype})", f"{zh}：{origin.bad} 个元素（{origin.dtype}）"
    gains = [row["max_gain"] for row in large if isinstance(row["max_gain"], float)]
    if gains and max(gains) > _LARGE_GAIN:
        return both(f"{en}; gains up to {max(gains):.3g}", f"{zh}；增益达 {max(gains):.3g}")
    if verdict == "origin":
        return both(f"{en}; the norm is the origin", f"{zh}；归一化是源头")
    if victims:
        return both(f"{en}; the norm is the victim", f"{zh}；归一化是受害者")
    return both(en, zh)


def _module_of(name: str, modules: dict[str, str]) -> str:
    """Return the module that holds a parameter or buffer; the model itself for an input."""
    holder = name.split(", ")[0].rpartition(".")[0]
    return holder if holder in modules else ""


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _target(dtype: torch.dtype) -> Target:
    first = nn.Linear(4, 8, bias=False)
    nn.init.constant_(first.weight, 300.0)
    model = nn.Sequential(first, nn.LayerNorm(8), nn.Linear(8, 2))
    return Target(model=model.to(dtype).eval(), args=(torch.full((2, 4), 100.0, dtype=dtype),))


def bad() -> Target:
    """Return a float16 model whose linear map leaves the range, before a norm that makes NaN of it."""
    return _target(torch.float16)


def good() -> Target:
    """Return the same model in bfloat16."""
    return _target(torch.bfloat16)
