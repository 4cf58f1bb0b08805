"""BatchNorm, GroupNorm, LayerNorm and none at batches of 2 to 128

## Claim
BatchNorm falls behind at small batches, GroupNorm does not; forgetting ``eval()`` costs accuracy.

## Source
Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167 (normalization trains faster); Wu and He 2018,
https://arxiv.org/abs/1803.08494 (ResNet-50 on ImageNet at a batch of 2: GroupNorm errs 10.6 points less).

## Method
Two networks learn 1200 handwritten digits of 8 x 8 in 4 epochs and are asked about 597 by other hands. In
``convolution`` (16, 32, 32 channels on 8 x 8, 4 x 4, 2 x 2 positions) a BatchNorm estimates each channel from batch *
positions values; in ``dense`` (two layers of 64) from as many values as the batch has. n independent values give a
variance with a relative deviation of sqrt(2 / (n - 1)): 1.41 at a batch of 2 in ``dense``, 0.13, 0.25 and 0.53 in
``convolution``, where positions of one image are not independent.

SGD with momentum 0.9, rate 0.05 * batch / 32 (as Wu and He scale it), cosine to zero, no weight decay, no
augmentation; the same order of images for all norms. GroupNorm has 8 groups. The nets with BatchNorm are then asked
again with statistics of the batch, in evaluation batches of 2 to 597 in mixed order and of 32 sorted by class.

A gap counts where it exceeds two standard errors of two shares of 597 images, and the ranges over seeds do not meet.

## What would refute it
BatchNorm at a batch of 2 as accurate as GroupNorm or LayerNorm, in both networks; the same accuracy in training mode.

## Cost
Full: 126 trials, 7 CPU-minutes. Quick: 1 CPU-minute.

## What this cannot show
ImageNet, deep networks, detection at high resolution: the tables of Wu and He. The digits are easy, and every net
comes near the others' accuracy. A fixed number of epochs gives large batches few steps (36 at 128): compare norms at
one batch, not batches at one norm. One rate, not the best rate of each norm.
"""

from __future__ import annotations

from math import sqrt
from statistics import fmean
from typing import Any

import torch

from normwise.rendering import both
from normwise.rendering.plots import Chart
from normwise.studies._curves import across, along, level
from normwise.studies._digits import digits
from normwise.studies._digits_training import classifier, left_training, share_right, train
from normwise.studies._outcomes import outcome
from normwise.studies._study import Claim, Judgement, Outcome, Params, Rows, Table

ZH = """批大小 2 到 128 时的 BatchNorm、GroupNorm、LayerNorm 与不归一化

## 主张
小批量时 BatchNorm 落后而 GroupNorm 不会；忘记 ``eval()`` 会损失准确率。

## 出处
Ioffe 与 Szegedy 2015，https://arxiv.org/abs/1502.03167（归一化使训练更快）；Wu 与 He 2018，
https://arxiv.org/abs/1803.08494（ImageNet 上的 ResNet-50，批大小 2：GroupNorm 的错误率低 10.6 个百分点）。

## 方法
两种网络用 4 轮学习 1200 个 8 x 8 的手写数字，再回答由其他人书写的 597 个。在 ``convolution`` 中（16、32、32 个
通道，位置 8 x 8、4 x 4、2 x 2），BatchNorm 用“批大小 * 位置数”个值估计每个通道；在 ``dense`` 中（两层，各 64）只有
批大小那么多的值。n 个独立值得到的方差，其相对标准差为 sqrt(2 / (n - 1))：批大小为 2 时，``dense`` 为 1.41，
``convolution`` 为 0.13、0.25 和 0.53，而同一图像的各位置并不独立。

SGD，动量 0.9，学习率 0.05 * 批大小 / 32（与 Wu 和 He 的缩放相同），余弦降到零，无权重衰减，无数据增强；所有归一化看到的
图像次序相同。GroupNorm 为 8 组。带 BatchNorm 的网络随后改用批统计量再测一次：打乱次序、批大小 2 到 597，以及按类别
排序、批大小 32。

只有超过 597 张图像上两个比例之差的两倍标准误差、并且各种子的范围不相交的差距才算数。

## 什么会推翻它
在两种网络中，批大小 2 的 BatchNorm 都与 GroupNorm 或 LayerNorm 一样准确；训练模式下准确率不变。

## 开销
完整集：126 次试验，7 CPU 分钟。快速集：1 CPU 分钟。

## 这里无法说明的
ImageNet、深层网络、高分辨率检测，即 Wu 与 He 的表格。这些数字很容易，各网络的准确率彼此接近。轮数固定，大批量的
步数很少（128 时为 36 步）：应在同一批大小下比较归一化，而不是比较同一归一化的不同批大小。只用一个学习率，而非每种
归一化各自最好的学习率。
"""

VERSION = 1
DATA = ("digits",)
SEEDS = 3

_NETWORKS = {"convolution": ("batch", "group", "layer", "none"), "dense": ("batch", "layer", "none")}
_BATCHES = (2, 4, 8, 16, 32, 128)
_QUICK_BATCHES = (2, 32)
_SMALL, _USUAL = 2, 32
_ASKED_IN = (2, 4, 8, 32, 597)
_EPOCHS = 4
_RATE = 0.05  # at a batch of 32
_RIVALS = {"convolution": "group", "dense": "layer"}
_DEVIATIONS = 2.0  # standard errors: 1 in 20 by chance


def trials(quick: bool) -> list[dict[str, Any]]:
    """Return every network with every norm at every batch."""
    return [
        {"network": network, "norm": norm, "batch": batch, "epochs": _EPOCHS}
        for network, norms in _NETWORKS.items()
        for norm in norms
        for batch in (_QUICK_BATCHES if quick else _BATCHES)
    ]


def seconds(params: Params) -> float:
    """Return the CPU-seconds of a trial: of its steps, and of its images."""
    steps = 1200 * params["epochs"] / params["batch"]
    asked_again = 2.0 if params["norm"] == "batch" else 0.0
    return 0.3 + asked_again + steps * (4.2e-3 if params["network"] == "convolution" else 1.4e-3)


def measure(params: Params) -> dict[str, Any]:
    """Train one network, and return its accuracy on the digits by other hands."""
    torch.manual_seed(params["seed"])
    model = classifier(params["network"], params["norm"])
    images, labels = digits().training
    losses = train(
        model, images, labels, batch=params["batch"], epochs=params["epochs"], rate=_rate(params), seed=params["seed"]
    )
    images, labels = digits().test
    model.eval()
    found: dict[str, Any] = {
        "accuracy": share_right(model(images), labels),
        "training_loss": fmean(losses[-max(1, len(losses) // 10) :]),
    }
    if params["norm"] == "batch":
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(params["seed"]))
        found["accuracy_in_training_mode"] = [left_training(model, images, labels, order, n) for n in _ASKED_IN]
        found["accuracy_sorted"] = left_training(model, images, labels, labels.argsort(stable=True), _USUAL)
    return found


def _rate(params: Params) -> float:
    return _RATE * params["batch"] / _USUAL


def _margin(first: float, second: float) -> float:
    """Return how far two shares of the test images may lie apart by chance."""
    return _DEVIATIONS * sqrt((first * (1 - first) + second * (1 - second)) / len(digits().test[1]))


def _ahead(better: list[float], worse: list[float]) -> bool:
    """Return whether the first accuracies stand above the second, over seeds and over images."""
    first, second = fmean(better), fmean(worse)
    return first - second > _margin(first, second) and min(better) > max(worse)


def _accuracies(rows: Rows, network: str, norm: str, batch: int) -> list[float]:
    return rows.where(network=network, norm=norm, batch=batch).values("accuracy")


def _falls_behind(rows: Rows) -> Judgement:
    behind, said = {}, []
    for network, rival in _RIVALS.items():
        cells = {
            (norm, batch): _accuracies(rows, network, norm, batch)
            for norm in ("batch", rival)
            for batch in (_SMALL, _USUAL)
        }
        small = _ahead(cells[rival, _SMALL], cells["batch", _SMALL])
        behind[network] = small and not _ahead(cells[rival, _USUAL], cells["batch", _USUAL])
        said.append((network, rival, *(fmean(cell) for cell in cells.values()), len(cells["batch", _SMALL])))
    found = outcome(behind.values())
    english = "; ".join(f"{n}: BatchNorm {b2:.1%} at 2 and {b32:.1%} at 32, {r} {r2:.1%} and {r32:.1%}"
                        for n, r, b2, b32, r2, r32, _ in said)  # fmt: skip
    chinese = "；".join(f"{n}：BatchNorm 批大小 2 为 {b2:.1%}、32 为 {b32:.1%}，{r} 为 {r2:.1%} 与 {r32:.1%}"
                        for n, r, b2, b32, r2, r32, _ in said)  # fmt: skip
    where = ", ".join(name for name, is_behind in behind.items() if is_behind) or both("neither", "均未")
    seeds = said[0][-1]
    if found is Outcome.DEPENDS:
        return Judgement(
            found,
            both(
                f"it falls behind in {where} alone: what counts is the number of values behind a statistic, batch * "
                f"positions, not the batch. {english} ({seeds} seeds)",
                f"只在 {where} 中落后：起作用的是一个统计量背后的值的个数，即批大小 * 位置数，而不是批大小。"
                f"{chinese}（{seeds} 个种子）",
            ),
        )
    return Judgement(
        found, both(f"behind: {where}. {english} ({seeds} seeds)", f"落后：{where}。{chinese}（{seeds} 个种子）")
    )


def _steady(rows: Rows) -> Judgement:
    small, usual = (_accuracies(rows, "convolution", "group", batch) for batch in (_SMALL, _USUAL))
    figures = f"{fmean(small):.1%}, {fmean(usual):.1%}"
    fell = _ahead(usual, small)
    return Judgement(
        Outcome.REFUTED if fell else Outcome.CONFIRMED,
        both(
            f"GroupNorm in convolution at a batch of 2 and of 32: {figures}; margin "
            f"{_margin(fmean(small), fmean(usual)):.1%} ({len(small)} seeds)",
            f"convolution 中的 GroupNorm，批大小 2 与 32：{figures}；误差范围 "
            f"{_margin(fmean(small), fmean(usual)):.1%}（{len(small)} 个种子）",
        ),
    )


def _forgotten(rows: Rows) -> Judgement:
    lost, said = {}, []
    for network in _NETWORKS:
        of = rows.where(network=network, norm="batch", batch=_USUAL)
        proper = of.values("accuracy")
        forgotten = [list(each) for each in zip(*of.values("accuracy_in_training_mode"), strict=True)]
        lost |= {(network, n): _ahead(proper, each) for n, each in zip(_ASKED_IN, forgotten, strict=True)}
        lost[network, 0] = _ahead(proper, of.values("accuracy_sorted"))
        few, all_at_once = (fmean(forgotten[place]) for place in (0, -1))
        said.append((network, fmean(proper), few, all_at_once, of.mean("accuracy_sorted")))
    found = outcome(lost.values())
    seeds = len(rows.where(network="dense", norm="batch", batch=_USUAL))
    english = "; ".join(
        f"{n} {p:.1%} in eval mode, in training mode {few:.1%} in batches of {_ASKED_IN[0]}, {whole:.1%} of "
        f"{_ASKED_IN[-1]} and {by_class:.1%} of {_USUAL} sorted by class"
        for n, p, few, whole, by_class in said
    )
    chinese = "；".join(
        f"{n} 评估模式 {p:.1%}，训练模式下批大小 {_ASKED_IN[0]} 为 {few:.1%}、{_ASKED_IN[-1]} 为 {whole:.1%}，"
        f"按类别排序、批大小 {_USUAL} 为 {by_class:.1%}"
        for n, p, few, whole, by_class in said
    )
    if found is Outcome.DEPENDS:
        english = f"it depends on what shares the evaluation batch, and on how much: {english}"
        chinese = f"取决于评估批里有什么、有多少：{chinese}"
    return Judgement(found, both(f"{english} ({seeds} seeds)", f"{chinese}（{seeds} 个种子）"))


def _faster(rows: Rows) -> Judgement:
    found, said = [], []
    for network, norms in _NETWORKS.items():
        none = _accuracies(rows, network, "none", _USUAL)
        for norm in norms[:-1]:
            with_it = _accuracies(rows, network, norm, _USUAL)
            found.append(_ahead(with_it, none))
            said.append(f"{network} {norm} {fmean(with_it):.1%} / {fmean(none):.1%}")
    figures, seeds = "; ".join(said), len(rows.where(network="dense", norm="none", batch=_USUAL))
    return Judgement(
        outcome(found),
        both(
            f"after {_EPOCHS} epochs at a batch of 32, with / without: {figures} ({seeds} seeds)",
            f"{_EPOCHS} 轮之后，批大小 32，有 / 无归一化：{figures}（{seeds} 个种子）",
        ),
    )


CLAIMS = (
    Claim(
        both("BatchNorm falls behind at small batches", "小批量时 BatchNorm 落后"),
        "Wu and He 2018, https://arxiv.org/abs/1803.08494",
        _falls_behind,
    ),
    Claim(
        both("GroupNorm is as accurate at a batch of 2 as at 32", "GroupNorm 在批大小 2 时与 32 时一样准确"),
        "Wu and He 2018, https://arxiv.org/abs/1803.08494",
        _steady,
    ),
    Claim(
        both(
            "A BatchNorm net that is left in training mode is less accurate",
            "带 BatchNorm 的网络若停留在训练模式，准确率会下降",
        ),
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html",
        _forgotten,
    ),
    Claim(
        both("A net with a norm learns faster than one without", "有归一化的网络比没有的学得更快"),
        "Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167",
        _faster,
    ),
)


_NOTE = both(
    f"1200 digits, {_EPOCHS} epochs, SGD 0.9, rate {_RATE} * batch / 32, cosine; 597 digits by other hands. "
    "Bands: smallest and largest of the seeds.",
    f"1200 个数字，{_EPOCHS} 轮，SGD 0.9，学习率 {_RATE} * 批大小 / 32，余弦；597 个由其他人书写的数字。"
    "带：各种子的最小与最大。",
)


def _by_batch(network: str) -> Any:
    def chart(rows: Rows) -> Chart:
        lines = []
        for norm in rows.where(network=network).distinct("norm"):
            of = rows.where(network=network, norm=norm)
            cells = [(batch, of.where(batch=batch)) for batch in sorted(of.distinct("batch"))]
            lines.append(across(norm, cells, "accuracy"))
        return Chart(
            title=both(f"Accuracy by batch: {network}", f"各批大小的准确率：{network}"),
            x_label=both("batch in training", "训练的批大小"),
            y_label=both("accuracy on the test digits", "测试数字上的准确率"),
            lines=tuple(lines),
            log_x=True,
            note=_NOTE,
        )

    return chart


def _training_mode(rows: Rows) -> Chart:
    lines = []
    for network in rows.where(norm="batch").distinct("network"):
        of = rows.where(network=network, norm="batch", batch=_USUAL)
        line = along(network, _ASKED_IN, of, "accuracy_in_training_mode")
        name = both(f"{network}, eval mode", f"{network}，评估模式")
        lines += [line, level(name, line, of, "accuracy")]
    return Chart(
        title=both("BatchNorm left in training mode", "停留在训练模式的 BatchNorm"),
        x_label=both("batch in evaluation, mixed order", "评估的批大小，打乱次序"),
        y_label=both("accuracy on the test digits", "测试数字上的准确率"),
        lines=tuple(lines),
        log_x=True,
        note=_NOTE,
    )


def _table(rows: Rows) -> Table:
    cells = [
        (network, norm, batch, rows.where(network=network, norm=norm, batch=batch))
        for network, norms in _NETWORKS.items()
        for norm in norms
        for batch in sorted(rows.distinct("batch"))
        if rows.has(network=network, norm=norm, batch=batch)
    ]
    return Table(
        title=both("Accuracy", "准确率"),
        columns=(
            both("network", "网络"),
            both("norm", "归一化"),
            both("batch", "批大小"),
            both("accuracy, %", "准确率，%"),
            both("smallest, %", "最小，%"),
            both("largest, %", "最大，%"),
            both("training loss", "训练损失"),
        ),
        rows=tuple(
            (
                network,
                norm,
                batch,
                100 * cell.mean("accuracy"),
                *(100 * each for each in cell.spread("accuracy")),
                cell.mean("training_loss"),
            )
            for network, norm, batch, cell in cells
        ),
        note=_NOTE,
    )


FIGURES = (_table, _by_batch("convolution"), _by_batch("dense"), _training_mode)
