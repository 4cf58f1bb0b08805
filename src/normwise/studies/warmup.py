"""Who needs a warm-up, and why

## Claim
Post-Norm does not train without a learning rate warm-up, Pre-Norm does; DeepNorm and Sandwich do as well. Usually told
with it: the placement of the norm is the cause.

## Source
Xiong et al. 2020, https://arxiv.org/abs/2002.04745: Post-Norm on IWSLT14 reaches BLEU 8.45 without warm-up and about
34 with
4,000 steps; at rate 1e-3, 500 steps of warm-up leave it at 2.77. Noci et al. 2022, https://arxiv.org/abs/2206.03126:
tokens
become alike with depth, and the gradients of queries and keys vanish. Wang et al. 2022,
https://arxiv.org/abs/2203.00555:
DeepNorm. Ding et al. 2021, https://arxiv.org/abs/2105.13290: Sandwich.

## Method
A causal language model of bytes: 12 layers, hidden size 64, 4 heads, GELU, LayerNorm, Xavier's initialisation with
1/sqrt(2) on q, k and v as in torch.nn.MultiheadAttention and fairseq, embeddings from N(0, 1). AdamW(0.9, 0.98)
without weight decay and without clipping, 400 steps of 8 windows of 64 bytes, the rate constant after a linear warm-up.
Every placement runs at 3e-4, 1e-3 and 3e-3, with 0 and 100 steps of warm-up. Then Post-Norm alone, without warm-up at
1e-3, its branches made smaller at the start: v, out, up and down times a gain; queries and keys stay as they are.

A model that ends within 0.1 nat of the unigram loss, what it would reach by counting bytes, has learned nothing from
context. "Token cosine" is the mean cosine between the tokens of a window at the end of the stack, before training.

## What would refute it
Post-Norm that learns at 1e-3 without warm-up, or does not with it; another placement that is stuck without; and, for
the cause, Post-Norm with small branches that still needs the warm-up.

## Cost
About 41 CPU-minutes with 3 seeds, 3 with `--quick`.

## What this cannot show
400 steps say who starts to learn, not who is better in the end: "Post-Norm is better at convergence", BLEU scores and
the training of large models cannot be reproduced on two cores. Differences of 0.05 nat between models that learn are
noise here, and a warm-up of a quarter of all steps costs steps.
"""

from __future__ import annotations

from typing import Any

import torch

from normwise.errors import NotKnown
from normwise.rendering import both
from normwise.rendering.numbers import number
from normwise.rendering.plots import Chart, Line
from normwise.studies._corpus import corpus
from normwise.studies._curves import across, along, level
from normwise.studies._depth import token_cosine
from normwise.studies._model import LENGTH, conditions, language_model
from normwise.studies._study import Claim, Judgement, Outcome, Params, Rows, Table
from normwise.studies._training import train, unigram_loss

ZH = """谁需要预热，为什么

## 主张
没有学习率预热，Post-Norm 训练不起来，Pre-Norm 可以；DeepNorm 和 Sandwich 也可以。常见的说法还有：原因在于归一化的位置。

## 出处
Xiong 等 2020，https://arxiv.org/abs/2002.04745：IWSLT14 上 Post-Norm 不预热 BLEU 为 8.45，预热 4,000 步约为 34；
学习率 1e-3 时预热 500 步只有 2.77。Noci 等 2022，https://arxiv.org/abs/2206.03126：词元随深度变得彼此相同，
查询和键的梯度消失。Wang 等 2022，https://arxiv.org/abs/2203.00555：DeepNorm。
Ding 等 2021，https://arxiv.org/abs/2105.13290：Sandwich。

## 方法
字节级因果语言模型：12 层，隐藏维度 64，4 个头，GELU，LayerNorm，Xavier 初始化，q、k、v 乘 1/sqrt(2)
（与 torch.nn.MultiheadAttention 和 fairseq 相同），嵌入取自 N(0, 1)。AdamW(0.9, 0.98)，无权重衰减，无裁剪，
400 步，每步 8 个 64 字节的窗口，线性预热之后学习率不变。每种位置都在 3e-4、1e-3、3e-3 下以 0 步和 100 步预热训练。
然后只看 Post-Norm：不预热，学习率 1e-3，初始时把分支变小：
v、out、up、down 乘以一个增益，查询和键不变。

一元模型的损失是只数字节频率能达到的损失；结束时与它相差不到 0.1 奈特的模型没有从上下文学到任何东西。
“词元余弦”是训练前堆叠末端同一窗口内词元之间余弦的平均值。

## 什么会推翻它
Post-Norm 在 1e-3 不预热也能学，或预热了也学不了；别的放置方式不预热就停住；
至于原因：分支很小的 Post-Norm 仍然需要预热。

## 开销
3 个种子约 41 CPU 分钟，`--quick` 约 3 分钟。

## 这里无法说明的
400 步只说明谁开始学习，不说明最终谁更好：“Post-Norm 收敛后更好”、BLEU 分数和大模型的训练在两个核上无法重现。
能学的模型之间 0.05 奈特的差别在这里是噪声；占全部步数四分之一的预热本身也要花掉步数。
"""

VERSION = 2
DATA = ("standard-library",)
SEEDS = 3

_LAYERS, _STEPS, _BATCH, _WARM_UP = 12, 400, 8, 100
_PLACEMENTS = ("post", "pre", "deep-norm", "sandwich")
_RATES = (3e-4, 1e-3, 3e-3)
_RATE = 1e-3  # of the sweep over gains, and where the claims are judged
_GAINS = (0.1, 0.3, 0.5, 0.7)
_QUICK_GAIN = 0.3
# Runs that stay at the unigram loss end within 0.02 nat of it; one that has begun to use the byte before is at least
# 0.2 below it. Halfway on a log scale lies 0.06; 0.1 leaves room.
_STUCK = 0.1
_NO_SWEEP = both("no trial of Post-Norm with small branches has been run", "没有运行过小分支 Post-Norm 的试验")


def trials(quick: bool) -> list[dict[str, Any]]:
    """Return the grid: placements, warm-ups and rates, then the gains of Post-Norm."""
    if quick:
        return [*map(_trial, _PLACEMENTS), _trial("post", _WARM_UP), _trial("post", gain=_QUICK_GAIN)]
    rates = sorted(_RATES, key=lambda rate: rate != _RATE)  # where the claims are judged comes first
    grid = [_trial(each, steps, rate) for rate in rates for steps in (0, _WARM_UP) for each in _PLACEMENTS]
    return [*grid, *(_trial("post", gain=gain) for gain in _GAINS)]


def _trial(placement: str, warm_up: int = 0, rate: float = _RATE, gain: float = 1.0) -> dict[str, Any]:
    shape = {"layers": _LAYERS, "steps": _STEPS, "batch": _BATCH}
    return {"placement": placement, "warm_up": warm_up, "rate": rate, "gain": gain, **shape}


def seconds(params: Params) -> float:
    """Return the CPU-seconds of a trial."""
    return 0.0007 * params["layers"] * params["steps"] * params["batch"]


def measure(params: Params) -> dict[str, Any]:
    """Train one model."""
    torch.manual_seed(params["seed"])
    read = corpus()
    model = language_model(params["placement"], params["layers"], gain=params["gain"])
    ids = read.batch(4, LENGTH - 1, torch.Generator().manual_seed(0))
    with torch.no_grad():
        cosine = token_cosine(model.stack(model.embedding(ids)))
    trained = train(
        model, read, rate=params["rate"], warm_up_steps=params["warm_up"], steps=params["steps"], seed=params["seed"],
        batch=params["batch"],
    )  # fmt: skip
    return {
        "validation": trained.validation,
        "unigram": unigram_loss(read),
        "steps": trained.steps,
        "losses": trained.losses,
        "largest": trained.largest,
        "token_cosine": cosine,
    }


def _learned(rows: Rows) -> int:
    """Return how many of the runs ended below the unigram loss."""
    return sum(v < u - _STUCK for v, u in zip(rows.values("validation"), rows.values("unigram"), strict=True))


def _all_learn(rows: Rows) -> bool:
    return _learned(rows) == len(rows)


def _none_learns(rows: Rows) -> bool:
    return _learned(rows) == 0


def _at(rows: Rows, placement: str, warm_up: int = 0, rate: float = _RATE, gain: float = 1.0) -> Rows:
    return rows.where(placement=placement, warm_up=warm_up, rate=rate, gain=gain)


def _post_needs(rows: Rows) -> Judgement:
    cold, warm = _at(rows, "post"), _at(rows, "post", _WARM_UP)
    unigram = number(rows.mean("unigram"), 3)
    without, with_it = cold.said("validation", ".2f"), warm.said("validation")
    en = f"at 1e-3 it ends at {without} nats without warm-up and at {with_it} with 100 steps; unigram loss {unigram}"
    zh = f"学习率 1e-3 时，不预热结束于 {without} 奈特，预热 100 步结束于 {with_it}；一元模型的损失为 {unigram}"
    if not (_none_learns(cold) and _all_learn(warm)):
        if _all_learn(cold) or _none_learns(warm):
            return Judgement(Outcome.REFUTED, both(en, zh))
        seeds = f"{_learned(cold)}/{len(cold)}", f"{_learned(warm)}/{len(warm)}"
        return Judgement(
            Outcome.DEPENDS,
            both(
                f"the seed: {seeds[0]} learn without warm-up, {seeds[1]} with it; {en}",
                f"种子：不预热时 {seeds[0]} 能学，预热后 {seeds[1]} 能学；{zh}",
            ),
        )
    other = [rate for rate in _RATES if rows.has(placement="post", rate=rate, warm_up=_WARM_UP)]
    unneeded = [rate for rate in other if _all_learn(_at(rows, "post", 0, rate))]
    useless = [rate for rate in other if _none_learns(_at(rows, "post", _WARM_UP, rate))]
    if unneeded or useless:
        more = [(f"at {number(rate)} it learns without", f"{number(rate)} 时不预热也能学") for rate in unneeded]
        more += [(f"at {number(rate)} warm-up does not help", f"{number(rate)} 时预热也没有用") for rate in useless]
        en, zh = "; ".join([en, *(a for a, _ in more)]), "；".join([zh, *(b for _, b in more)])
        return Judgement(Outcome.DEPENDS, both(f"the rate: {en}", f"学习率：{zh}"))
    return Judgement(Outcome.CONFIRMED, both(en, zh))


def _others_learn(rows: Rows, placements: tuple[str, ...]) -> Judgement:
    found = {p: [(rate, _at(rows, p, 0, rate)) for rate in _RATES if rows.has(placement=p, rate=rate, warm_up=0)]
             for p in placements}  # fmt: skip
    if not all(found.values()):
        missing = [p for p in placements if not found[p]]
        raise NotKnown(
            both(f"no trial of {' and '.join(missing)} has been run", f"没有运行过 {'、'.join(missing)} 的试验")
        )
    en = "; ".join(
        f"{p} " + ", ".join(f"{r.said('validation', '.2f')} at {number(rate)}" for rate, r in f)
        for p, f in found.items()
    )
    zh = "；".join(
        f"{p} " + "，".join(f"{number(rate)} 时 {r.said('validation', '.2f')}" for rate, r in f)
        for p, f in found.items()
    )
    runs = [each for some in found.values() for each in some]
    stuck = [rate for rate, some in runs if not _all_learn(some)]
    outcome = Outcome.CONFIRMED if not stuck else Outcome.REFUTED if _RATE in stuck else Outcome.DEPENDS
    where_en, where_zh = ("the rate: ", "学习率：") if outcome is Outcome.DEPENDS else ("", "")
    return Judgement(outcome, both(f"{where_en}nats without warm-up: {en}", f"{where_zh}不预热的损失（奈特）：{zh}"))


def _pre_learns(rows: Rows) -> Judgement:
    return _others_learn(rows, ("pre",))


def _deep_norm_and_sandwich_learn(rows: Rows) -> Judgement:
    return _others_learn(rows, ("deep-norm", "sandwich"))


def _placement_is_the_cause(rows: Rows) -> Judgement:
    cold = _at(rows, "post")
    sweep = [(gain, _at(rows, "post", gain=gain)) for gain in _GAINS if rows.has(placement="post", gain=gain)]
    if not sweep:
        raise NotKnown(_NO_SWEEP)
    learning = [(gain, some) for gain, some in sweep if _all_learn(some)]
    gain, some = max(learning, default=sweep[0], key=lambda each: each[0])
    cosines = [number(each.mean("token_cosine"), 2) for each in (cold, some)]
    whole, small = cold.said("validation", ".2f"), some.said("validation", ".2f")
    en = f"it ends at {whole} nats, with branches times {number(gain)} at the start at {small}; "
    en += f"token cosine before training {cosines[0]} and {cosines[1]}"
    zh = f"结束于 {whole} 奈特，初始分支乘 {number(gain)} 时为 {small}；"
    zh += f"训练前词元余弦为 {cosines[0]} 与 {cosines[1]}"
    if _all_learn(cold):
        return Judgement(Outcome.DEPENDS, both(f"it learns as it is: {en}", f"原样也能学：{zh}"))
    if not learning:
        return Judgement(Outcome.CONFIRMED, both(f"small branches do not help: {en}", f"小分支没有帮助：{zh}"))
    top, seeds = number(gain), f"{_learned(cold)}/{len(cold)}"
    return Judgement(
        Outcome.REFUTED,
        both(
            f"the same Post-Norm without warm-up learns in {seeds} seeds as it is, in all when its branches start "
            f"smaller, up to gain {top}: {en}",
            f"同样不预热的 Post-Norm 原样有 {seeds} 个种子能学，初始分支更小（增益不超过 {top}）时全部能学：{zh}",
        ),
    )


CLAIMS = (
    Claim(
        both("Post-Norm trains only with warm-up", "Post-Norm 只有预热才能训练"),
        "Xiong et al. 2020, https://arxiv.org/abs/2002.04745",
        _post_needs,
    ),
    Claim(
        both("Pre-Norm needs no warm-up", "Pre-Norm 不需要预热"),
        "Xiong et al. 2020, https://arxiv.org/abs/2002.04745",
        _pre_learns,
    ),
    Claim(
        both("DeepNorm and Sandwich need no warm-up", "DeepNorm 和 Sandwich 不需要预热"),
        "Wang et al. 2022, https://arxiv.org/abs/2203.00555; Ding et al. 2021, https://arxiv.org/abs/2105.13290",
        _deep_norm_and_sandwich_learn,
    ),
    Claim(
        both("The placement of the norm is why Post-Norm needs it", "Post-Norm 需要预热的原因是归一化的位置"),
        "common notes; against it: Noci et al. 2022, https://arxiv.org/abs/2206.03126",
        _placement_is_the_cause,
    ),
)

_NOTE = both(
    f"{_LAYERS} layers, {conditions()}; AdamW, {_STEPS} steps of {_BATCH} x {LENGTH} bytes, no clipping",
    f"{_LAYERS} 层，{conditions().zh}；AdamW，{_STEPS} 步，每步 {_BATCH} x {LENGTH} 字节，无裁剪",
)


def _losses(rows: Rows) -> Table:
    grid = rows.where(gain=1.0)
    rates = sorted(grid.distinct("rate"))
    lines = []
    for placement in grid.distinct("placement"):
        for warm_up in sorted(grid.where(placement=placement).distinct("warm_up")):
            asked = [{"placement": placement, "warm_up": warm_up, "rate": rate} for rate in rates]
            cells = [grid.where(**params).said("validation", ".2f") if grid.has(**params) else None for params in asked]
            lines.append((placement, str(warm_up), *cells))
    unigram = number(rows.mean("unigram"), 3)
    return Table(
        title=both(
            "Validation loss by placement, warm-up and rate, nats", "验证损失（奈特）：放置方式、预热步数、学习率"
        ),
        columns=(both("placement", "放置方式"), both("warm-up", "预热"), *map(number, rates)),
        rows=tuple(lines),
        note=both(f"{_NOTE}; unigram loss {unigram}", f"{_NOTE.zh}；一元模型的损失 {unigram}"),
    )


def _curves(rows: Rows) -> Chart:
    lines = [_curve(both(f"{p}, no warm-up", f"{p}，不预热"), _at(rows, p)) for p in _PLACEMENTS]
    lines.append(_curve(both("post, 100 steps", "post，预热 100 步"), _at(rows, "post", _WARM_UP)))
    return Chart(
        title=both("Training loss at 1e-3", "学习率 1e-3 时的训练损失"),
        x_label=both("step", "步"),
        y_label=both("loss, nats a byte", "损失，奈特/字节"),
        lines=(*lines, _unigram(lines[0], rows)),
        note=_NOTE,
    )


def _curve(name: str, rows: Rows) -> Line:
    longest = max(rows.values("steps"), key=len)
    return along(name, longest[: len(rows.curve("losses")[0])], rows, "losses")


def _unigram(beside: Line, rows: Rows) -> Line:
    return level(both("unigram loss", "一元模型的损失"), beside, rows, "unigram", theory=True)


def _gains(rows: Rows) -> Chart:
    sweep = rows.where(placement="post", warm_up=0, rate=_RATE)
    gains = sorted(sweep.distinct("gain"))
    if len(gains) < 2:
        raise NotKnown(_NO_SWEEP)
    cells = [(gain, sweep.where(gain=gain)) for gain in gains]
    measured = across(both("Post-Norm, no warm-up", "Post-Norm，不预热"), cells, "validation")
    return Chart(
        title=both("The same Post-Norm with smaller branches at the start", "初始分支更小的同一个 Post-Norm"),
        x_label=both("gain of v, out, up and down", "v、out、up、down 的增益"),
        y_label=both("validation loss, nats", "验证损失，奈特"),
        lines=(measured, _unigram(measured, rows)),
        log_x=True,
        note=both(f"{_NOTE}; rate 1e-3", f"{_NOTE.zh}；学习率 1e-3"),
    )


FIGURES = (_losses, _curves, _gains)
