"""BatchNorm in sequence models: padding, a batch of one, the future, and evaluation

## Claim
BatchNorm does not suit sequences: padding falsifies its statistics, a batch of one has none, it shows a causal model
the future, and what it learns with one batch it forgets with another. LayerNorm has none of these problems.

## Source
Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450 (lengths that differ, small batches); Shen et al. 2020,
PowerNorm, https://arxiv.org/abs/2003.07845 (statistics that fluctuate in language make BatchNorm worse).

## Method
Padding: 32 sequences of 64 values with mean 1 and deviation 0.5, a share f of zeros behind them. The mean becomes
(1 - f) mu, the variance (1 - f) sigma^2 + f (1 - f) mu^2. The same with a mask, and 10000 in place of the zeros.

Few values: 4096 variances of n independent normal values; their relative deviation is sqrt(2 / (n - 1)).

Training: a causal Pre-Norm decoder (4 blocks of 64) learns bytes for 300 steps of 16 windows of 64, AdamW, rate 2e-3
after 30 steps of warm-up; with LayerNorm, and with BatchNorm over batch and time. Then 128 windows of other files:
in eval mode; with the statistics of batches of 1 to 64; and in batches of 16 sorted by their mean byte, so that the
same windows have other neighbours. The last byte of a window is changed, and how much the logits before it move is
told in units of their deviation.

## What would refute it
Masked statistics that depend on the padding; earlier logits that stand still in training mode, or move with
LayerNorm; one loss whatever shares the batch.

## Cost
Full: 36 trials, 3 CPU-minutes. Quick: 1 CPU-minute.

## What this cannot show
Translation and GLUE scores of Shen et al.; long trainings; padded training. A gap below 0.05 nats is not told from
noise at this length.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch

from normwise.rendering import both
from normwise.rendering.plots import Chart, Line
from normwise.studies._batch_norm_trials import (
    BATCHES,
    DEVIATION,
    DRAWS,
    HIDDEN,
    LENGTH,
    MEAN,
    WINDOWS,
    few_values,
    padding,
    training,
)
from normwise.studies._curves import across, along, level
from normwise.studies._seeds import mean, order
from normwise.studies._study import Claim, Judgement, Outcome, Params, Rows, Table

ZH = """序列模型中的 BatchNorm：补齐、批大小为一、未来与评估

## 主张
BatchNorm 不适合序列：补齐使统计量失真，批大小为一时没有统计量，它让因果模型看到未来，用一个批学到的换一个批就丢失。
LayerNorm 没有这些问题。

## 出处
Ba、Kiros 与 Hinton 2016，https://arxiv.org/abs/1607.06450（长度不一、批量小）；Shen 等 2020，PowerNorm，
https://arxiv.org/abs/2003.07845（语言中波动的统计量使 BatchNorm 变差）。

## 方法
补齐：32 个序列，各 64 个值，均值 1、标准差 0.5，其后有比例为 f 的零。均值变为 (1 - f) mu，方差变为
(1 - f) sigma^2 + f (1 - f) mu^2。再用掩码重做，并以 10000 代替零。

值很少：4096 个方差，各来自 n 个独立正态值；其相对标准差为 sqrt(2 / (n - 1))。

训练：因果 Pre-Norm 解码器（4 个 64 维的块）学习字节，300 步，每步 16 个长 64 的窗口，AdamW，30 步预热后学习率 2e-3；
一个用 LayerNorm，一个用对批与时间求统计量的 BatchNorm。然后是其他文件的 128 个窗口：评估模式；
用批大小 1 到 64 的批统计量；以及按字节均值排序、批大小 16，使同样的窗口有别的邻居。
改变窗口的最后一个字节，以其标准差为单位给出之前的 logits 移动了多少。

## 什么会推翻它
带掩码的统计量依赖于补齐；训练模式下之前的 logits 不动，或者用 LayerNorm 时移动；无论批里有什么，损失都一样。

## 开销
完整集：36 次试验，3 CPU 分钟。快速集：1 CPU 分钟。

## 这里无法说明的
Shen 等的翻译与 GLUE 分数；长时间的训练；带补齐的训练。低于 0.05 奈特的差距在这个长度上无法与噪声区分。
"""

VERSION = 1
DATA = ("standard-library",)
SEEDS = 3

_PADDED = (0.0, 0.25, 0.5, 0.75)
_FEW = (1, 2, 4, 8, 32, 128)
_STEPS = 300
_NOISE = 0.05  # nats: below it, single runs of some hundred steps of such a model differ by their seed
_ROUNDING = 1e-5  # of float32 over 2048 values near 1: sqrt(2048) * 2^-24 is 3e-6


def trials(quick: bool) -> list[dict[str, Any]]:
    """Return the shares of padding, the numbers of values, and the two trainings."""
    return [
        *({"part": "padding", "padded": share} for share in _PADDED),
        *({"part": "few", "values": n} for n in _FEW),
        *({"part": "training", "norm": norm, "steps": _STEPS} for norm in ("layer", "batch")),
    ]


def seconds(params: Params) -> float:
    """Return the CPU-seconds of a trial."""
    return 1.5 + 0.085 * params["steps"] if params["part"] == "training" else 0.1


def measure(params: Params) -> dict[str, Any]:
    """Run one trial."""
    torch.manual_seed(params["seed"])
    match params["part"]:
        case "padding":
            return padding(params["padded"])
        case "few":
            return few_values(params["values"])
        case _:
            return training(params["norm"], params["steps"], params["seed"])


def _theory_of_few(n: int) -> float:
    return sqrt(2 / (n - 1))


def _theory_of_padding(share: float) -> tuple[float, float]:
    """Return mean and variance over those without padding."""
    return 1 - share, (1 - share) * (1 + share * (MEAN / DEVIATION) ** 2)


def _padding_falsifies(rows: Rows) -> Judgement:
    cells = {share: rows.where(part="padding", padded=share) for share in _PADDED}
    means = {share: cell.mean("mean") for share, cell in cells.items()}
    masked = max(
        cell.spread(metric)[1] for cell in cells.values() for metric in ("masked_change", "masked_running_change")
    )
    shifted = all(abs(mean - (1 - share)) < _ROUNDING for share, mean in means.items())
    outcome = Outcome.REFUTED
    if shifted:
        outcome = Outcome.DEPENDS if masked < _ROUNDING else Outcome.CONFIRMED
    said = ", ".join(f"{share:.0%}: {mean:.3f}" for share, mean in means.items())
    return Judgement(
        outcome,
        both(
            f"without a mask the mean shrinks as 1 - f ({said}); with one, outputs and running "
            f"statistics change by at most {masked:.1e}, whatever the padding holds",
            f"没有掩码时均值按 1 - f 缩小（{said}）；有掩码时，无论补齐内容如何，输出与运行统计至多改变 {masked:.1e}",
        ),
    )


def _batch_of_one(rows: Rows) -> Judgement:
    refused = rows.where(part="few", values=1).spread("refused")[0] == 1
    of = rows.where(part="training", norm="batch")
    costs = [one - proper for one, proper in zip(of.values("with_batch_of_1"), of.values("evaluation"), strict=True)]
    cost = mean(costs)
    outcome = Outcome.REFUTED
    if refused:
        outcome = Outcome.CONFIRMED if min(costs) > _NOISE else Outcome.DEPENDS
    pair = rows.where(part="few", values=2)
    said = both("refused", "被拒绝") if refused else both("taken", "被接受")
    return Judgement(
        outcome,
        both(
            f"one value a channel is {said}; a variance of two deviates by {pair.mean('deviation'):.2f} (theory 1.41), "
            f"and what is normalized is {pair.mean('magnitude'):.3f} in size. One sequence has {LENGTH} values: used "
            f"alone it costs {cost:+.3f} nats",
            f"每通道一个值{said.zh}；两个值的方差偏差 {pair.mean('deviation'):.2f}（理论 1.41），归一化之后大小总是 "
            f"{pair.mean('magnitude'):.3f}。一个序列有 {LENGTH} 个值：单独使用的代价为 {cost:+.3f} 奈特",
        ),
    )


def _leaks(rows: Rows) -> Judgement:
    of = rows.where(part="training", norm="batch")
    leaks, still = of.curve("leak")[0], of.spread("leak_in_evaluation")[1]
    outcome = Outcome.REFUTED
    if min(min(each) for each in of.values("leak")) > 0:
        outcome = Outcome.DEPENDS if still == 0 else Outcome.CONFIRMED
    least, most = min(BATCHES), max(BATCHES)
    alone, among = leaks[BATCHES.index(least)], leaks[BATCHES.index(most)]
    return Judgement(
        outcome,
        both(
            f"with statistics of the batch another last byte moves the logits before it by {alone:.2g} deviations in a "
            f"batch of {least} and {among:.2g} in one of {most}; in eval mode by {still:.2g}",
            f"用批统计量时，换掉最后一个字节使之前的 logits 移动："
            f"批大小 {least} 时 {alone:.2g} 个标准差，{most} 时 {among:.2g}；评估模式下 {still:.2g}",
        ),
    )


def _layer_is_alone(rows: Rows) -> Judgement:
    of = rows.where(part="training", norm="layer")
    leak = max(max(each) for each in of.values("leak"))
    losses = [[row.metrics["evaluation"], row.metrics["sorted"], *row.metrics["with_batch"]] for row in of]
    apart = max(max(each) - min(each) for each in losses)
    outcome = Outcome.CONFIRMED if leak == 0 and apart < _ROUNDING else Outcome.REFUTED
    return Judgement(
        outcome,
        both(
            f"earlier logits move by {leak:.2g}; losses in both modes and in batches of 1 to 64 lie within "
            f"{apart:.1e} nats",
            f"之前的 logits 移动 {leak:.2g}；两种模式、批大小 1 到 64 的损失相差不超过 {apart:.1e} 奈特",
        ),
    )


def _gap(rows: Rows) -> Judgement:
    of = rows.where(part="training", norm="batch")
    proper, used = of.values("evaluation"), of.values("with_batch_of_16")
    others = of.values("sorted")
    gaps = [p - u for p, u in zip(proper, used, strict=True)]
    shifts = [s - u for s, u in zip(others, used, strict=True)]
    large, moved = (min(each) > _NOISE for each in (gaps, shifts))
    outcome = Outcome.CONFIRMED if large else Outcome.DEPENDS if moved else Outcome.REFUTED
    gap, shift = map(mean, (gaps, shifts))
    return Judgement(
        outcome,
        both(
            f"eval mode costs {gap:+.3f} nats against batches of 16 like those of the training; the same windows "
            f"sorted by content, with statistics of the batch: {shift:+.3f} (noise {_NOISE})",
            f"与训练时那样的 16 个一批相比，评估模式的代价为 {gap:+.3f} 奈特；"
            f"同样的窗口按内容排序、用批统计量：{shift:+.3f}"
            f"（噪声 {_NOISE}）",
        ),
    )


def _worse(rows: Rows) -> Judgement:
    batch, layer = (rows.where(part="training", norm=norm).values("evaluation") for norm in ("batch", "layer"))
    gap = mean(batch) - mean(layer)
    apart = order(batch, layer) if abs(gap) > _NOISE else 0
    outcome = {1: Outcome.CONFIRMED, -1: Outcome.REFUTED, 0: Outcome.OPEN}[apart]
    return Judgement(
        outcome,
        both(
            f"BatchNorm {mean(batch):.3f}, LayerNorm {mean(layer):.3f} nats in eval mode: {gap:+.3f} (noise {_NOISE})",
            f"评估模式下 BatchNorm {mean(batch):.3f}、LayerNorm {mean(layer):.3f} 奈特：{gap:+.3f}（噪声 {_NOISE}）",
        ),
    )


_BA = "Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450"
_SHEN = "Shen et al. 2020, https://arxiv.org/abs/2003.07845"
CLAIMS = (
    Claim(both("Padding falsifies BatchNorm's statistics", "补齐使 BatchNorm 的统计量失真"), _BA, _padding_falsifies),
    Claim(both("BatchNorm fails with a batch of one", "批大小为一时 BatchNorm 失效"), _BA, _batch_of_one),
    Claim(
        both("BatchNorm shows a causal model the future", "BatchNorm 让因果模型看到未来"),
        "Question 14 of docs/questions.md",
        _leaks,
    ),
    Claim(
        both(
            "LayerNorm treats every token alone, in training as in evaluation", "LayerNorm 逐词元独立，训练与评估相同"
        ),
        _BA,
        _layer_is_alone,
    ),
    Claim(
        both("BatchNorm loses in evaluation what it had in training", "BatchNorm 在评估时失去训练时的表现"), _SHEN, _gap
    ),
    Claim(
        both("BatchNorm is worse than LayerNorm in a language model", "语言模型中 BatchNorm 比 LayerNorm 差"),
        _SHEN,
        _worse,
    ),
)


def _padding_chart(rows: Rows) -> Chart:
    shares = [share for share in _PADDED if rows.has(part="padding", padded=share)]
    cells = [rows.where(part="padding", padded=share) for share in shares] or [rows.where(part="padding")]
    lines = []
    for metric, name, which in (("mean", both("mean", "均值"), 0), ("variance", both("variance", "方差"), 1)):
        lines.append(across(name, zip(shares, cells, strict=True), metric))
        theory = tuple(_theory_of_padding(share)[which] for share in shares)
        formula = ("1 - f", "(1 - f)(1 + f mu^2 / sigma^2)")[which]
        lines.append(Line(name=formula, x=tuple(shares), y=theory, theory=True, like=name))
    return Chart(
        title=both("Statistics of padded sequences, without a mask", "带补齐序列的统计量，无掩码"),
        x_label=both("share of padding, f", "补齐的比例 f"),
        y_label=both("relative to no padding", "相对于无补齐"),
        lines=tuple(lines),
        note=both(
            f"32 sequences of 64, mean {MEAN}, deviation {DEVIATION}, padded with zeros",
            f"32 个长 64 的序列，均值 {MEAN}，标准差 {DEVIATION}，以零补齐",
        ),
    )


def _few_chart(rows: Rows) -> Chart:
    numbers = [n for n in _FEW if n > 1 and rows.has(part="few", values=n)]
    cells = [rows.where(part="few", values=n) for n in numbers] or [rows.where(part="few")]
    measured = across(both("measured", "测得"), zip(numbers, cells, strict=True), "deviation")
    theory = tuple(map(_theory_of_few, numbers))
    return Chart(
        title=both("How uncertain a variance of few values is", "少数几个值的方差有多不确定"),
        x_label=both("values behind the statistic, n", "统计量背后的值的个数 n"),
        y_label=both("relative deviation of the variance", "方差的相对标准差"),
        lines=(
            measured,
            Line(name="sqrt(2 / (n - 1))", x=measured.x, y=theory, theory=True, like=measured.name),
        ),
        log_x=True,
        log_y=True,
        note=both(f"{DRAWS} variances of independent normal values", f"{DRAWS} 个独立正态值的方差"),
    )


def _losses_chart(rows: Rows) -> Chart:
    lines = []
    for norm in rows.where(part="training").distinct("norm"):
        of = rows.where(part="training", norm=norm)
        line = along(norm, BATCHES, of, "with_batch")
        name = both(f"{norm}, eval mode", f"{norm}，评估模式")
        lines += [line, level(name, line, of, "evaluation")]
    return Chart(
        title=both("Loss with statistics of the batch", "使用批统计量的损失"),
        x_label=both("windows that share a batch", "同一批里的窗口数"),
        y_label=both("loss, nats a byte", "损失，奈特/字节"),
        lines=tuple(lines),
        log_x=True,
        note=_NOTE,
    )


def _losses_table(rows: Rows) -> Table:
    columns = (
        ("training_loss", both("training, last 20 steps", "训练，最后 20 步")),
        ("evaluation", both("eval mode", "评估模式")),
        ("with_batch_of_16", both("statistics of 16", "16 个窗口的统计量")),
        ("sorted", both("of 16 sorted", "排序后 16 个")),
        ("with_batch_of_1", both("of 1", "1 个")),
    )
    return Table(
        title=both("Loss by what the statistics are of, nats a byte", "按统计量的来源，损失，奈特/字节"),
        columns=(both("norm", "归一化"), *(heading for _, heading in columns)),
        rows=tuple(
            (norm, *(cell.mean(metric) for metric, _ in columns))
            for (norm,), cell in rows.where(part="training").groups("norm")
        ),
        note=_NOTE,
    )


def _leaks_table(rows: Rows) -> Table:
    return Table(
        title=both(
            "What another last byte moves before it, deviations of the logits",
            "换掉最后一个字节，之前的 logits 移动多少个标准差",
        ),
        columns=(
            both("norm", "归一化"),
            both("eval mode", "评估模式"),
            *(both(f"batch of {n}", f"批大小 {n}") for n in BATCHES),
        ),
        rows=tuple(
            (norm, cell.mean("leak_in_evaluation"), *cell.curve("leak")[0])
            for (norm,), cell in rows.where(part="training").groups("norm")
        ),
        note=_NOTE,
    )


_NOTE = both(
    f"4 blocks of {HIDDEN}, Pre-Norm, GPT-2 init, {_STEPS} steps of {WINDOWS} windows of {LENGTH}, AdamW 2e-3, 30 "
    "steps of warm-up; 128 windows of other files. Bands: smallest and largest of the seeds.",
    f"4 个 {HIDDEN} 维的块，Pre-Norm，GPT-2 初始化，{_STEPS} 步，每步 {WINDOWS} 个长 {LENGTH} 的窗口，"
    f"AdamW 2e-3，预热 30 步；"
    "其他文件的 128 个窗口。带：各种子的最小与最大。",
)


FIGURES = (_losses_table, _leaks_table, _losses_chart, _padding_chart, _few_chart)
