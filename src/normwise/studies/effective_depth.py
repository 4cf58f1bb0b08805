"""Effective depth: how much each layer does, before and after training

## Claim
Deep layers of Pre-Norm do little: the stream has grown and they hardly turn it. Post-Norm uses its depth. LayerNorm
scaling, which divides the input of layer l by sqrt(l), cures Pre-Norm of it.

## Source
Gromov et al. 2024, https://arxiv.org/abs/2403.17887, and Men et al. 2024, https://arxiv.org/abs/2403.03853, drop deep
layers of large models at little cost; Li et al. 2024, https://arxiv.org/abs/2412.13795, find late layers weak in
Pre-Norm and early ones in Post-Norm; Sun et al. 2025, https://arxiv.org/abs/2502.05795, propose the scaling.

## Method
Decoders of 12 layers and 64 features with LayerNorm and Xavier's initialisation, in five placements, read bytes of
the standard library: 600 steps of 8 windows of 64 bytes, AdamW at 1e-3 after 100 steps of warm-up. Before and after,
on windows that were not trained on:

- block influence of layer l, 1 - E cos(x_l, x_{l+1}) over tokens (Men et al.);
- path angle, the sum over layers of arccos(1 - influence) / pi: how far the stream turns in all;
- cost of dropping one layer: the loss without it less the loss with it, after training.

At initialisation theory stands beside it: influence is 1 - (1 + v / (alpha^2 q))^(-1/2) for a branch of second moment v
on a stream of q, put together over a layer by the recursion of moments, with nothing fitted. It holds that norms do not
rotate; the first LayerNorm on the stream does, by the mean that it takes away: 1 / (2 H) = 0.008 of influence, little
beside most layers and 20 times what one of DeepNorm's does.

A third of the layers does little where its share is less than half of an equal share: less than a sixth of all.

## What would refute it
Deep Pre-Norm layers with a sixth or more of the influence and of the cost; a third of Post-Norm with less; scaling
under which deep layers turn the stream and matter no more than in plain Pre-Norm.

## Cost
11 CPU-minutes with 3 seeds; the quick set (Pre-Norm, Post-Norm and scaling, 150 steps, one seed) 1.

## What this cannot show
Models of billions of tokens, in which Pre-Norm streams grow far beyond their start; the published curves are of those.
What a layer does when several are dropped, or when the others are trained again.
"""

from __future__ import annotations

from typing import Any

import torch

from normwise.rendering import Text, both
from normwise.rendering.plots import Chart, Line
from normwise.studies._corpus import corpus
from normwise.studies._curves import along
from normwise.studies._depth import costs_of_dropping, influence, path_angle
from normwise.studies._model import LENGTH, conditions, language_model
from normwise.studies._outcomes import not_shown, outcome
from normwise.studies._seeds import mean, order, spelled
from normwise.studies._study import Claim, Judgement, Outcome, Params, Rows, Table
from normwise.studies._training import train, unigram_loss
from normwise.theory import predict

ZH = """有效深度：训练前后每一层做了多少

## 主张
Pre-Norm 的深层作用很小：残差流已经变大，它们几乎不能使其转向。Post-Norm 用上了自己的深度。LayerNorm 缩放把第 l 层
的输入除以 sqrt(l)，能治好 Pre-Norm。

## 出处
Gromov 等 2024，https://arxiv.org/abs/2403.17887，与 Men 等 2024，https://arxiv.org/abs/2403.03853：去掉大模型的深层代
价很小；Li 等 2024，https://arxiv.org/abs/2412.13795：Pre-Norm 的后层弱，Post-Norm 的前层弱；Sun 等 2025，
https://arxiv.org/abs/2502.05795：提出该缩放。

## 方法
12 层、64 个特征的解码器，LayerNorm，Xavier 初始化，五种放置方式，读标准库源码的字节：600 步，每步 8 个 64 字节的窗口，
100 步预热之后 AdamW 学习率 1e-3。训练前后，在没有训练过的窗口上：

- 第 l 层的块影响力，对词元平均的 1 - E cos(x_l, x_{l+1})（Men 等）；
- 路径角，各层 arccos(1 - 影响力) / pi 之和：残差流总共转了多少；
- 去掉一层的代价：训练后没有它与有它的损失之差。

初始化时旁边是理论：二阶矩为 v 的分支加到二阶矩为 q 的流上，影响力为 1 - (1 + v / (alpha^2 q))^(-1/2)，由矩的递推在层
内合成，没有拟合参数。理论认为归一化不旋转；流上的第一个 LayerNorm 会，因为去掉了均值：影响力 1 / (2 H) = 0.008，对多
数层很小，却是 DeepNorm 一层的 20 倍。

三分之一的层若占比不到平均份额的一半，即不到总量的六分之一，就称为作用很小。

## 什么会推翻它
Pre-Norm 的深层占影响力与代价的六分之一以上；Post-Norm 有三分之一的层不足；缩放之后深层的转向与重要性不超过普通
Pre-Norm。

## 开销
3 个种子 11 CPU 分钟；快速集（Pre-Norm、Post-Norm 与缩放，150 步，一个种子）1 分钟。

## 这里无法说明的
训练数十亿词元的模型，其 Pre-Norm 的流远大于初始时；已发表的曲线属于那些模型。同时去掉多层，或其余层重新训练之后，一层
的作用。
"""

VERSION = 2
DATA = ("standard-library",)
SEEDS = 3

_PLACEMENTS = ("pre", "post", "sandwich", "layernorm-scaling", "deep-norm")
_QUICK = ("pre", "post", "layernorm-scaling")
_DEPTH, _BATCH, _STEPS, _QUICK_STEPS, _RATE, _WARM_UP = 12, 8, 600, 150, 1e-3, 100
_WINDOWS = 32
_OTHER_WINDOWS_SEED = 1_000_004  # not those of the validation, the same in every trial
_LITTLE = 1 / 6  # of all, for a third of the layers: half of an equal share
_STUCK = 0.1  # nats: within it of counting bytes nothing has been learned from context, as in ``warmup``
_THEORY_ERROR = 0.15  # relative, of block influence: what the theory was found to keep at 24 blocks and 128 features


def seconds(params: Params) -> float:
    """Return the CPU-seconds of a trial."""
    return 6.0 + 0.07 * params["steps"]


def trials(quick: bool) -> list[dict[str, Any]]:
    """Return the placements."""
    steps = _QUICK_STEPS if quick else _STEPS
    return [{"placement": placement, "steps": steps} for placement in (_QUICK if quick else _PLACEMENTS)]


def measure(params: Params) -> dict[str, Any]:
    """Look at a model, train it and look again."""
    torch.manual_seed(params["seed"])
    text = corpus()
    windows = torch.Generator().manual_seed(_OTHER_WINDOWS_SEED)
    ids = text.batch(_WINDOWS, LENGTH, windows, held_out=True)[:, :-1]
    model = language_model(params["placement"], params.get("layers", _DEPTH))
    start, expected = influence(model, ids), predict(model.stack, model.embedding(ids))
    run = train(
        model,
        text,
        rate=_RATE,
        warm_up_steps=min(_WARM_UP, params["steps"]),
        steps=params["steps"],
        seed=params["seed"],
        batch=_BATCH,
        length=LENGTH,
    )
    end = influence(model, ids)
    return {
        "influence_start": start,
        "influence_theory": list(expected.block_influence),
        "influence_end": end,
        "angle_start": path_angle(start),
        "angle_theory": expected.path_angle,
        "angle_end": path_angle(end),
        "cost": costs_of_dropping(model, text, length=LENGTH),
        "validation": run.validation,
        "unigram": unigram_loss(text, length=LENGTH),
    }


_CONDITIONS = both(
    f"{_DEPTH} layers, {conditions()}, AdamW at {_RATE:g} after {_WARM_UP} steps of warm-up, {_BATCH} x {LENGTH} bytes",
    f"{_DEPTH} 层，{conditions().zh}，{_WARM_UP} 步预热后 AdamW 学习率 {_RATE:g}，{_BATCH} x {LENGTH} 字节",
)


def _longest(rows: Rows) -> Rows:
    """Return the rows of the longest training that there is: a full set beside a quick one."""
    return rows.where(steps=max(rows.where().distinct("steps")))


def _thirds(some: Rows, metric: str) -> list[list[float]]:
    """Return shares of the first, the middle and the last third of the layers, each by seed.

    What lowers the loss when it is dropped counts as nothing.
    """
    shares = []
    for each in some.values(metric):
        positive = [max(0.0, value) for value in each]
        size, whole = len(each) // 3, sum(positive) or 1.0
        shares.append([sum(positive[at : at + size]) / whole for at in (0, size, len(each) - size)])
    return [list(third) for third in zip(*shares, strict=True)]


def _untrained(some: Rows) -> Judgement | None:
    """Return that nothing is found out where the model has learned no context."""
    if some.mean("validation") < some.mean("unigram") - _STUCK:
        return None
    loss, entropy = some.mean("validation"), some.mean("unigram")
    return Judgement(
        Outcome.OPEN,
        both(
            f"the model did not learn: validation loss {loss:.3f}, unigram loss {entropy:.3f}",
            f"模型没有学会：验证损失 {loss:.3f}，一元模型的损失 {entropy:.3f}",
        ),
    )


def _depends(says: Text) -> Judgement:
    told = both(f"depends on what is measured, or on the seed: {says}", f"取决于测量什么，或种子：{says.zh}")
    return Judgement(Outcome.DEPENDS, told)


def _judge_pre(rows: Rows) -> Judgement:
    some = _longest(rows).where(placement="pre")
    turned, cost = _thirds(some, "influence_end")[-1], _thirds(some, "cost")[-1]
    shares = [spelled(each, ".0%") for each in (turned, cost)]
    says = both(
        f"the last third of the layers has {shares[0]} of the block influence and {shares[1]} of the cost of dropping "
        f"layers ({len(some)} seeds; little is less than {_LITTLE:.0%})",
        f"最后三分之一的层占块影响力的 {shares[0]}，占去掉层的代价的 {shares[1]}（{len(some)} 个种子；"
        f"少于 {_LITTLE:.0%} 为很小）",
    )
    return _untrained(some) or _little([turned, cost], says)


def _little(shares: list[list[float]], says: Text) -> Judgement:
    """Judge that all shares are little, in every seed."""
    if all(max(each) < _LITTLE for each in shares):
        return Judgement(Outcome.CONFIRMED, says)
    if all(min(each) >= _LITTLE for each in shares):
        return Judgement(Outcome.REFUTED, says)
    return _depends(says)


def _judge_post(rows: Rows) -> Judgement:
    some = _longest(rows).where(placement="post")
    turned, cost = _thirds(some, "influence_end"), _thirds(some, "cost")
    told = [", ".join(spelled(third, ".0%") for third in each) for each in (turned, cost)]
    says = both(
        f"first, middle and last third: {told[0]} of the block influence, {told[1]} of the cost of dropping layers "
        f"({len(some)} seeds)",
        f"前、中、后三分之一：块影响力 {told[0]}，去掉层的代价 {told[1]}（{len(some)} 个种子）",
    )
    if found := _untrained(some):
        return found
    if all(min(third) >= _LITTLE for third in (*turned, *cost)):
        return Judgement(Outcome.CONFIRMED, says)
    if any(max(a) < _LITTLE and max(b) < _LITTLE for a, b in zip(turned, cost, strict=True)):
        return Judgement(Outcome.REFUTED, says)
    return _depends(says)


def _judge_scaling(rows: Rows) -> Judgement:
    pre, scaled = (_longest(rows).where(placement=placement) for placement in ("pre", "layernorm-scaling"))
    told, zh, wins = [], [], []
    for metric, en, chinese in (
        ("influence_end", "block influence", "块影响力"),
        ("cost", "cost of dropping one", "去掉一层的代价"),
    ):
        plain, ours = (_deep(some, metric) for some in (pre, scaled))
        told.append(f"{en} {mean(ours):.4f} with scaling, {mean(plain):.4f} without")
        zh.append(f"{chinese}：有缩放 {mean(ours):.4f}，无 {mean(plain):.4f}")
        wins.append(order(ours, plain))
    start = [mean(_deep(some, "influence_start")) for some in (scaled, pre)]
    says = both(
        f"mean of the last third after training: {'; '.join(told)}; block influence at the start {start[0]:.4f} with "
        f"scaling, {start[1]:.4f} without",
        f"训练后最后三分之一的平均：{'；'.join(zh)}；初始时的块影响力：有缩放 {start[0]:.4f}，无 {start[1]:.4f}",
    )
    if found := _untrained(pre) or _untrained(scaled):
        return found
    if min(len(pre), len(scaled)) < 2:
        return not_shown(says, seeds=1)
    if set(wins) == {1}:
        return Judgement(Outcome.CONFIRMED, says)
    if 1 in wins:
        return Judgement(Outcome.DEPENDS, both(f"depends on what is measured: {says}", f"取决于测量什么：{says.zh}"))
    return Judgement(Outcome.REFUTED, says) if -1 in wins else not_shown(says, seeds=len(pre))


def _deep(some: Rows, metric: str) -> list[float]:  # mean over the last third of the layers, by seed
    return [mean(each[-(len(each) // 3) :]) for each in some.values(metric)]


def _judge_theory(rows: Rows) -> Judgement:
    off = {}
    for placement in _longest(rows).distinct("placement"):
        some = _longest(rows).where(placement=placement)
        pairs = zip(some.curve("influence_start")[0], some.curve("influence_theory")[0], strict=True)
        off[placement] = mean([abs(found / expected - 1) for found, expected in pairs])
    told = ", ".join(f"{placement} {error:.0%}" for placement, error in off.items())
    says = both(
        f"block influence at the start is off by (mean over layers): {told}; {_THEORY_ERROR:.0%} is claimed",
        f"初始时块影响力的偏差（各层平均）：{told}；声称 {_THEORY_ERROR:.0%}",
    )
    found = outcome(error <= _THEORY_ERROR for error in off.values())
    if found is Outcome.DEPENDS:
        says = both(f"depends on the placement: {says}", f"取决于放置方式：{says.zh}")
    return Judgement(found, says)


CLAIMS = (
    Claim(
        text=both("Deep layers of Pre-Norm do little", "Pre-Norm 的深层作用很小"),
        source="Gromov et al. 2024, https://arxiv.org/abs/2403.17887; Sun et al. 2025, https://arxiv.org/abs/2502.05795",
        judge=_judge_pre,
    ),
    Claim(
        text=both("Post-Norm uses its depth: no third of it does little", "Post-Norm 用上了每三分之一的深度"),
        source="Li et al. 2024, https://arxiv.org/abs/2412.13795, who find its early layers weak",
        judge=_judge_post,
    ),
    Claim(
        text=both("LayerNorm scaling makes deep layers do more", "LayerNorm 缩放使深层作用更大"),
        source="Sun et al. 2025, https://arxiv.org/abs/2502.05795",
        judge=_judge_scaling,
    ),
    Claim(
        text=both(
            "At initialisation block influence follows 1 - (1 + v / (alpha^2 q))^(-1/2), within 15 %",
            "初始时块影响力符合 1 - (1 + v / (alpha^2 q))^(-1/2)，误差 15 % 以内",
        ),
        source="normwise.theory; measured there at 24 blocks of 128 features",
        judge=_judge_theory,
    ),
)


def _turns(rows: Rows) -> Table:
    longest = _longest(rows)
    return Table(
        title=both("How far the stream turns", "残差流转了多少"),
        columns=(
            both("placement", "放置方式"),
            both("validation loss, nats", "验证损失，奈特"),
            both("path angle / pi, theory", "路径角 / pi，理论"),
            both("at the start", "初始"),
            both("trained", "训练后"),
        ),
        rows=tuple(
            (placement, *(some.mean(name) for name in ("validation", "angle_theory", "angle_start", "angle_end")))
            for (placement,), some in longest.groups("placement")
        ),
        note=both(
            f"{_CONDITIONS}, {_steps(rows)} steps; means over seeds; unigram loss {longest.mean('unigram'):.3f} nats.",
            f"{_CONDITIONS.zh}，{_steps(rows)} 步；种子平均；一元模型的损失为 {longest.mean('unigram'):.3f} 奈特。",
        ),
    )


def _shares(rows: Rows) -> Table:
    parts = (both("first", "前"), both("middle", "中"), both("last", "后"))
    return Table(
        title=both("Which thirds of the layers matter, after training", "训练后，哪三分之一的层重要"),
        columns=(
            both("placement", "放置方式"),
            *(both(f"influence, {part}", f"影响力，{part.zh}") for part in parts),
            *(both(f"cost of dropping, {part}", f"去掉的代价，{part.zh}") for part in parts),
        ),
        rows=tuple(
            (placement, *(mean(third) for metric in ("influence_end", "cost") for third in _thirds(some, metric)))
            for (placement,), some in _longest(rows).groups("placement")
        ),
        note=both(
            f"{_CONDITIONS}, {_steps(rows)} steps; means over seeds; shares of the sum over layers.",
            f"{_CONDITIONS.zh}，{_steps(rows)} 步；种子平均；占各层总和的比例。",
        ),
    )


def _steps(rows: Rows) -> int:
    return _longest(rows)[0].params["steps"]


def _start(rows: Rows) -> Chart:
    lines = _lines(rows, "influence_start")
    theory = [
        Line(name=both(f"{line.name}, theory", f"{line.name}，理论"), x=line.x, y=line.y, theory=True, like=line.name)
        for line in _lines(rows, "influence_theory")
    ]
    return _by_layer(
        rows, both("Block influence at the start", "初始时的块影响力"), "1 - cos", [*lines, *theory], log_y=True
    )


def _end(rows: Rows) -> Chart:
    title = both("Block influence after training", "训练后的块影响力")
    return _by_layer(rows, title, "1 - cos", _lines(rows, "influence_end"), log_y=True)


def _dropped(rows: Rows) -> Chart:
    title = both("Loss when one layer is dropped, less the loss with it", "去掉一层后损失的增加")
    return _by_layer(rows, title, both("nats a byte", "奈特/字节"), _lines(rows, "cost"))


def _lines(rows: Rows, metric: str) -> list[Line]:
    groups = _longest(rows).groups("placement")
    return [along(name, range(1, len(some.curve(metric)[0]) + 1), some, metric) for (name,), some in groups]


def _by_layer(rows: Rows, title: str, y_label: str, lines: list[Line], *, log_y: bool = False) -> Chart:
    return Chart(
        title=title,
        x_label=both("layer", "层"),
        y_label=y_label,
        lines=tuple(lines),
        log_y=log_y,
        note=both(
            f"{_CONDITIONS}, {_steps(rows)} steps; band: seeds.", f"{_CONDITIONS.zh}，{_steps(rows)} 步；带：种子。"
        ),
    )


FIGURES = (_turns, _shares, _start, _end, _dropped)
