"""Which placements forgive a wrong learning rate

## Claim
Pre-Norm, Sandwich (Peri-LN) and DeepNorm train over a wide range of learning rates, Post-Norm only at small ones;
normalizing queries and keys widens the range of Pre-Norm.

## Source
Wortsman et al. 2023, https://arxiv.org/abs/2309.14322: the measure, and QK norm. Xiong et al. 2020,
https://arxiv.org/abs/2002.04745:
Post-Norm. Kim et al. 2025, https://arxiv.org/abs/2502.02732: Peri-LN, the wiring of Sandwich.
Wang et al. 2022, https://arxiv.org/abs/2203.00555: DeepNorm, made for stable training.

## Method
Learning rate sensitivity is the mean, over rates spread evenly in the logarithm, of min(loss(rate), loss at the start)
minus the smallest loss over the rates, in nats: 0 for a model to which the rate is all the same. Rates 3e-4, 1e-3,
3e-3, 1e-2, 3e-2, 0.1. A causal language model of bytes: 6 layers, hidden size 64, 4 heads, GELU, RMSNorm, Xavier's
initialisation with 1/sqrt(2) on q, k and v, embeddings from N(0, 1). AdamW(0.9, 0.98) without weight decay and without
clipping, 400 steps of 8 windows of 64 bytes, the rate rising over 80 steps and constant from there on. A run whose loss
is not finite counts as the loss at the start.

## What would refute it
A sensitivity of Post-Norm that is not above Pre-Norm's by more than the seeds spread; the same for Pre-Norm with and
without QK norm.

## Cost
About 21 CPU-minutes with 3 seeds, 4 with `--quick`.

## What this cannot show
How the range shrinks with the size of the model, which is Wortsman's point: his models have up to 10^10 parameters and
10^5 steps, his figures are printed as curves only. Logits of attention that grow over 10^4 steps do not occur in 400.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch

from normwise.errors import NotKnown
from normwise.rendering import both
from normwise.rendering.numbers import number
from normwise.rendering.plots import Chart, Line
from normwise.studies._corpus import corpus
from normwise.studies._model import LENGTH, conditions, language_model
from normwise.studies._seeds import mean, spelled
from normwise.studies._study import Claim, Judgement, Outcome, Params, Rows, Table
from normwise.studies._training import train, validation_loss

ZH = """哪些放置方式能容忍不合适的学习率

## 主张
Pre-Norm、Sandwich（Peri-LN）和 DeepNorm 在很宽的学习率范围内都能训练，Post-Norm 只能用小学习率；
对查询和键做归一化会加宽 Pre-Norm 的范围。

## 出处
Wortsman 等 2023，https://arxiv.org/abs/2309.14322：度量与 QK 归一化。Xiong 等 2020，
https://arxiv.org/abs/2002.04745：Post-Norm。
Kim 等 2025，https://arxiv.org/abs/2502.02732：Peri-LN，接线与 Sandwich 相同。
Wang 等 2022，https://arxiv.org/abs/2203.00555：DeepNorm，为稳定训练而设计。

## 方法
学习率敏感度：在对数上等距的学习率上，取 min(该学习率的损失, 初始损失) 减去各学习率中最小的损失，再求平均，单位 奈特；
对学习率完全无所谓的模型为 0。学习率 3e-4、1e-3、3e-3、1e-2、3e-2、0.1。字节级因果语言模型：6 层，隐藏维度 64，
4 个头，GELU，RMSNorm，Xavier 初始化，q、k、v 乘 1/sqrt(2)，嵌入取自 N(0, 1)。AdamW(0.9, 0.98)，无权重衰减，
无裁剪，400 步，每步 8 个 64 字节的窗口，学习率用 80 步升上去，之后不变。损失不是有限数的训练按初始损失计。

## 什么会推翻它
Post-Norm 的敏感度没有超过 Pre-Norm（差别不大于种子之间的差别）；有无 QK 归一化 的 Pre-Norm 同理。

## 开销
3 个种子约 21 CPU 分钟，`--quick` 约 4 分钟。

## 这里无法说明的
范围如何随模型变大而缩小，而这正是 Wortsman 的要点：他的模型大到 10^10 个参数、10^5 步，数值只以曲线给出。
注意力分数在 10^4 步里慢慢变大的现象不会出现在 400 步里。
"""

VERSION = 2
DATA = ("standard-library",)
SEEDS = 3

_LAYERS, _STEPS, _BATCH, _WARM_UP = 6, 400, 8, 80
_ARRANGEMENTS = ("post", "pre", "pre + QK norm", "sandwich", "deep-norm")
_QK = " + QK norm"
_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)
_QUICK_RATES = (1e-3, 1e-2, 0.1)
_FORM = ".2f"  # of a sensitivity
_NOISE = 0.05  # nat; losses of one model over the seeds differ by up to this, so smaller gaps show nothing


def trials(quick: bool) -> list[dict[str, Any]]:
    """Return every arrangement at every rate."""
    shape = {"layers": _LAYERS, "steps": _STEPS, "batch": _BATCH, "warm_up": _WARM_UP}
    rates = _QUICK_RATES if quick else _RATES
    return [{"arrangement": name, "rate": rate, **shape} for rate in rates for name in _ARRANGEMENTS]


def seconds(params: Params) -> float:
    """Return the CPU-seconds of a trial."""
    return 0.0007 * params["layers"] * params["steps"] * params["batch"]


def measure(params: Params) -> dict[str, Any]:
    """Train one model."""
    torch.manual_seed(params["seed"])
    read, arrangement = corpus(), params["arrangement"]
    qk_norm = "head" if arrangement.endswith(_QK) else None
    model = language_model(arrangement.removesuffix(_QK), params["layers"], norm="rms", qk_norm=qk_norm)
    start = validation_loss(model, read, length=LENGTH)
    trained = train(
        model, read, rate=params["rate"], warm_up_steps=params["warm_up"], steps=params["steps"], seed=params["seed"],
        batch=params["batch"],
    )  # fmt: skip
    return {"validation": trained.validation, "start": start, "largest": trained.largest}


def _sensitivities(rows: Rows, arrangement: str) -> list[float]:
    """Return the sensitivity of each seed whose rates are all there."""
    some = rows.where(arrangement=arrangement)
    rates = set(rows.distinct("rate"))
    found = []
    for seed in some.distinct("seed"):
        ran = some.where(seed=seed)
        if set(ran.distinct("rate")) == rates:
            losses = [_capped(row.metrics) for row in ran]
            found.append(mean(losses) - min(losses))
    if not found or len(rates) < 2:
        raise NotKnown(both(f"not every rate of {arrangement} has been run", f"{arrangement} 的学习率没有全部运行"))
    return found


def _capped(metrics: Any) -> float:
    validation, start = metrics["validation"], metrics["start"]
    return min(validation, start) if isfinite(validation) else start


def _compare(rows: Rows, worse: str, better: tuple[str, ...]) -> Judgement:
    """Confirm where every seed of ``worse`` is clearly more sensitive than every seed of all of ``better``."""
    bad, good = _sensitivities(rows, worse), {name: _sensitivities(rows, name) for name in better}
    said = ", ".join(f"{name} {spelled(values, _FORM)}" for name, values in [(worse, bad), *good.items()])
    margin = _NOISE if len(bad) == 1 else 0.0  # several seeds show their own spread
    apart = [name for name, values in good.items() if min(bad) > max(values) + margin]
    against = [name for name, values in good.items() if max(bad) < min(values) - margin]
    if len(apart) == len(good):
        return Judgement(Outcome.CONFIRMED, both(f"sensitivity in nats: {said}", f"敏感度（奈特）：{said}"))
    if not apart:
        en = "the opposite is measured" if against else "no difference beyond the seeds"
        zh = "测得的正好相反" if against else "差别不超过种子之间的差别"
        return Judgement(Outcome.REFUTED, both(f"{en}; sensitivity in nats: {said}", f"{zh}；敏感度（奈特）：{said}"))
    names = ", ".join(apart)
    en, zh = f"it holds against {names}; sensitivity in nats: {said}", f"只对 {names} 成立；敏感度（奈特）：{said}"
    return Judgement(Outcome.DEPENDS, both(en, zh))


def _post_is_sensitive(rows: Rows) -> Judgement:
    return _compare(rows, "post", ("pre", "sandwich", "deep-norm"))


def _qk_norm_helps(rows: Rows) -> Judgement:
    return _compare(rows, "pre", ("pre" + _QK,))


CLAIMS = (
    Claim(
        both(
            "Post-Norm is more sensitive to the rate than Pre-Norm, Sandwich and DeepNorm",
            "Post-Norm 对学习率比 Pre-Norm、Sandwich 和 DeepNorm 更敏感",
        ),
        "Xiong et al. 2020, https://arxiv.org/abs/2002.04745; Kim et al. 2025, https://arxiv.org/abs/2502.02732",
        _post_is_sensitive,
    ),
    Claim(
        both("QK norm makes Pre-Norm less sensitive to the rate", "QK 归一化 让 Pre-Norm 对学习率更不敏感"),
        "Wortsman et al. 2023, https://arxiv.org/abs/2309.14322",
        _qk_norm_helps,
    ),
)

_NOTE = both(
    f"{_LAYERS} layers, {conditions('RMSNorm')}; AdamW, {_STEPS} steps of {_BATCH} x {LENGTH} bytes, "
    f"{_WARM_UP} of them warm-up",
    f"{_LAYERS} 层，{conditions('RMSNorm').zh}；AdamW，{_STEPS} 步，每步 {_BATCH} x {LENGTH} 字节，预热 {_WARM_UP} 步",
)


def _table(rows: Rows) -> Table:
    rates = sorted(rows.distinct("rate"))
    lines = []
    for name in rows.distinct("arrangement"):
        some = rows.where(arrangement=name)
        cells = [some.where(rate=rate).said("validation", ".2f") if some.has(rate=rate) else None for rate in rates]
        lines.append((name, spelled(_sensitivities(rows, name), _FORM), *cells))
    return Table(
        title=both("Sensitivity, and validation loss by rate, nats", "敏感度，以及各学习率的验证损失，奈特"),
        columns=(both("placement", "放置方式"), both("sensitivity", "敏感度"), *map(number, rates)),
        rows=tuple(lines),
        note=_NOTE,
    )


def _chart(rows: Rows) -> Chart:
    return Chart(
        title=both("Validation loss by learning rate", "验证损失与学习率"),
        x_label=both("learning rate after the warm-up", "预热之后的学习率"),
        y_label=both("loss, nats a byte; not above the loss at the start", "损失，奈特/字节；不超过初始损失"),
        lines=tuple(_line(name, rows.where(arrangement=name)) for name in rows.distinct("arrangement")),
        log_x=True,
        note=_NOTE,
    )


def _line(name: str, rows: Rows) -> Line:
    rates = sorted(rows.distinct("rate"))
    capped = [[_capped(row.metrics) for row in rows.where(rate=rate)] for rate in rates]
    return Line(
        name=name,
        x=tuple(rates),
        y=tuple(map(mean, capped)),
        low=tuple(map(min, capped)),
        high=tuple(map(max, capped)),
    )


FIGURES = (_table, _chart)
