"""LayerNorm against RMSNorm: quality, speed, and the way from one to the other

## Claim
RMSNorm trains as well as LayerNorm and makes a step 7 to 64 % faster. A trained LayerNorm model can never become an
RMSNorm model exactly: it needs fine-tuning.

## Source
Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467: the same quality, 7 to 64 % less time (6.9 % for their
Transformer). That the change needs fine-tuning is what common notes say; Jiang et al. 2023,
https://arxiv.org/abs/2305.14858, show that it is exact for Pre-Norm.

## Method
Quality: Pre-Norm decoders of 12 layers and 64 features, with LayerNorm and with RMSNorm, from the same initial matrices
and on the same windows: 250 steps of 8 windows of 64 bytes, AdamW at 1e-3.

Speed: forward, forward and backward of a norm alone, and whole training steps of a model, in one process on one
thread, the rivals in turn, so that a busy moment hits all alike: LayerNorm and RMSNorm of torch.nn and of normwise.

The way: everything that writes to the stream (embeddings, the last matrix of each branch and its bias) is recentred
over the features, gains and biases of the norms are folded into the matrices that read them. The stream then has a
mean of zero, where LayerNorm and RMSNorm with one eps are the same function. This is done to a trained Pre-Norm
model, and to small ones with gains, biases and means drawn at random: in a fresh model, with gains of 1 and biases of
0, more than that looks exact. Beside it stands the naive swap, which changes nothing but the norms.

## What would refute it
Losses whose ranges over seeds are apart; times that differ by less than 7 %; logits that stay the same up to rounding.
In return, the exact way would be refuted by an error that float64 does not shrink.

## Cost
6 CPU-minutes with 3 seeds; the quick set 1.5. Its trials run alone, since they measure time.

## What this cannot show
The times of 2019, which were of unfused kernels on GPUs of that time, and those of a GPU of today. Quality at the scale
of a language model: three seeds bound the difference by their spread, no more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normwise.models import Decoder
from normwise.rendering import Text, both
from normwise.rendering.plots import Chart
from normwise.studies._corpus import VOCABULARY, corpus
from normwise.studies._curves import along
from normwise.studies._norm_speed import KINDS, ROUNDS, race
from normwise.studies._norm_swap import naive, recentred
from normwise.studies._outcomes import joined, not_shown, outcome
from normwise.studies._seeds import mean, order, spelled
from normwise.studies._study import Claim, Judgement, Outcome, Params, Rows, Table
from normwise.studies._training import train, validation_loss

ZH = """LayerNorm 与 RMSNorm：质量、速度，以及从一个到另一个

## 主张
RMSNorm 的训练效果与 LayerNorm 一样好，每步快 7 % 至 64 %。训练好的 LayerNorm 模型不可能精确变成 RMSNorm 模型：需要微
调。

## 出处
Zhang 与 Sennrich 2019，https://arxiv.org/abs/1910.07467：质量相同，时间少 7 % 至 64 %（其 Transformer 为 6.9 %）。“转
换需要微调”是常见笔记的说法；Jiang 等 2023，https://arxiv.org/abs/2305.14858，证明对 Pre-Norm 是精确的。

## 方法
质量：12 层、64 个特征的 Pre-Norm 解码器，分别用 LayerNorm 与 RMSNorm，初始矩阵与窗口都相同：250 步，每步 8 个 64 字节
的窗口，AdamW，学习率 1e-3。

速度：单个归一化的前向、前向加反向，以及模型完整的训练步，都在一个进程、一个线程中，各对手轮流测量，使机器忙碌的时刻对
所有对手影响相同：torch.nn 与 normwise 的 LayerNorm 和 RMSNorm。

转换：把写入残差流的一切（嵌入、每个分支的最后一个矩阵及其偏置）在特征轴上去均值，把归一化的增益与偏置折叠进读取它们的
矩阵。此时流的均值为零，eps 相同的 LayerNorm 与 RMSNorm 是同一个函数。对训练好的 Pre-Norm 模型这样做，也对增益、偏置、
均值随机抽取的小模型这样做：在增益为 1、偏置为 0 的新模型中，看起来精确的不止这些。旁边是只换归一化、别的都不变的直接
替换。

## 什么会推翻它
各种子的损失范围互不重叠；时间相差不到 7 %；logits 除舍入外不变。反过来，若误差在 float64 下不缩小，则精确转换被推翻。

## 开销
3 个种子 6 CPU 分钟；快速集 1.5 分钟。因为测量时间，各试验单独运行。

## 这里无法说明的
2019 年的时间（当时 GPU 上未融合的内核），以及今天 GPU 上的时间。语言模型规模下的质量：三个种子只能以其散布为差别的上
界。
"""

VERSION = 1
DATA = ("standard-library",)
SEEDS = 3
ALONE = True

_DEPTH, _WIDTH, _BATCH, _LENGTH, _STEPS, _RATE = 12, 64, 8, 64, 250, 1e-3
_SIZES = ((12, 64), (4, 256))  # layers and features of the models that are timed
_PUBLISHED = (0.07, 0.64)  # of the time of a step, Zhang and Sennrich 2019
_SMALL = 4  # layers of the models with drawn gains
_EPS = 1e-5


def seconds(params: Params) -> float:
    """Return the CPU-seconds of a trial."""
    return {"quality": 0.1 * params.get("steps", _STEPS), "exact": 1.0, "speed": 11.0}[params["part"]]


def trials(quick: bool) -> list[dict[str, Any]]:
    """Return trainings, conversions and races."""
    found: list[dict[str, Any]] = [{"part": "quality", "norm": norm} for norm in ("layer", "rms")]
    found += [{"part": "exact", "placement": placement} for placement in ("pre", "post")]
    sizes = _SIZES[:1] if quick else _SIZES
    return found + [{"part": "speed", "layers": depth, "features": width} for depth, width in sizes]


def measure(params: Params) -> dict[str, Any]:
    """Run one trial."""
    torch.manual_seed(params["seed"])
    return {"quality": _quality, "exact": _exact, "speed": _speed}[params["part"]](params)


def _decoder(depth: int, width: int, **options: Any) -> Decoder:
    chosen = {"norm": "layer", "eps": _EPS, "positions": "learned", "context": _LENGTH, "bias": True, **options}
    return Decoder(VOCABULARY, width, depth, 4, **chosen)


def _quality(params: Params) -> dict[str, Any]:
    text, steps = corpus(), params.get("steps", _STEPS)
    model = _decoder(params.get("layers", _DEPTH), _WIDTH, norm=params["norm"])
    run = train(
        model, text, rate=_RATE, warm_up_steps=0, steps=steps, seed=params["seed"], batch=_BATCH, length=_LENGTH
    )
    found: dict[str, Any] = {"validation": run.validation, "losses": run.losses, "steps": run.steps}
    if params["norm"] == "layer":
        found["validation_exact"] = validation_loss(recentred(model), text, length=_LENGTH)
        found["validation_naive"] = validation_loss(naive(model), text, length=_LENGTH)
    return found


@torch.no_grad()
def _exact(params: Params) -> dict[str, Any]:
    # As BERT, Post-Norm has a norm after the embedding: else its first layer reads the mean that recentring takes away.
    options = {"placement": params["placement"], "embedding_norm": params["placement"] == "post"}
    fresh, drawn = (_decoder(_SMALL, _WIDTH, init="xavier", tied=False, **options).double() for _ in range(2))
    for name, parameter in drawn.named_parameters():
        if parameter.ndim == 1:  # gains and biases, as a training moves them
            parameter.add_(0.2 * torch.randn_like(parameter))
        elif "embedding" in name:
            parameter.add_(0.2 * torch.randn(len(parameter), 1, dtype=parameter.dtype))
    ids = torch.randint(VOCABULARY, (_BATCH, _LENGTH))
    return {
        "naive": _error(drawn, naive(drawn), ids),
        "exact_double": _error(drawn, recentred(drawn), ids),
        "exact_fresh": _error(fresh, recentred(fresh), ids),
        "exact_single": _error(drawn.float(), recentred(drawn), ids),  # changed in place: last
    }


def _error(model: nn.Module, changed: nn.Module, ids: torch.Tensor) -> float:
    """Return the largest difference of logits, relative to the largest logit."""
    logits = model(ids)
    return float((changed(ids) - logits).abs().max() / logits.abs().max())


def _speed(params: Params) -> dict[str, Any]:
    def decoder() -> Decoder:
        torch.manual_seed(params["seed"])
        return _decoder(params["layers"], params["features"])

    found = race(decoder, params["features"], batch=_BATCH, length=_LENGTH, rounds=params.get("rounds", ROUNDS))
    return {"norms": 2 * params["layers"] + 1, **found}


def _judge_quality(rows: Rows) -> Judgement:
    layer, rms = (rows.where(part="quality", norm=norm) for norm in ("layer", "rms"))
    losses = [each.values("validation") for each in (layer, rms)]
    said, gap = [spelled(each, ".3f") for each in losses], mean(losses[1]) - mean(losses[0])
    says = both(
        f"validation loss {said[0]} with LayerNorm and {said[1]} with RMSNorm: {gap:+.3f} nats",
        f"验证损失：LayerNorm {said[0]}，RMSNorm {said[1]}：{gap:+.3f} 奈特",
    )
    if min(map(len, losses)) < 2:
        return not_shown(says, seeds=1)
    return Judgement(Outcome.REFUTED if order(*losses) < 0 else Outcome.CONFIRMED, says)


def _judge_speed(rows: Rows) -> Judgement:
    saved = _saved(rows, "step")
    found = outcome(mean(some) >= _PUBLISHED[0] for some in saved.values())
    return _faster(found, saved, both("a training step", "训练步"))


def _judge_layer_speed(rows: Rows) -> Judgement:
    saved = _saved(rows, "both")
    signs = {order(some, [0.0]) for some in saved.values()}
    found = Outcome.CONFIRMED if signs == {1} else Outcome.REFUTED if signs == {-1} else Outcome.DEPENDS
    return _faster(found, saved, both("forward and backward of the norm", "归一化前向加反向"))


def _faster(found: Outcome, saved: dict[Text, list[float]], of: Text) -> Judgement:
    figures = joined(both(f"{name} {spelled(some, '+.1%')}", f"{name.zh} {spelled(some, '+.1%')}")
                     for name, some in saved.items())  # fmt: skip
    says = both(f"RMSNorm saves of the time of {of}: {figures}", f"RMSNorm 省下的{of.zh}时间：{figures.zh}")
    if found is Outcome.DEPENDS:
        says = both(f"depends on the implementation and the width: {says}", f"取决于实现与宽度：{says.zh}")
    return Judgement(found, says)


def _judge_exactness(rows: Rows) -> Judgement:
    pre, post = (rows.where(part="exact", placement=placement) for placement in ("pre", "post"))
    double, single = pre.spread("exact_double")[1], pre.spread("exact_single")[1]
    told, zh = "", ""
    if rows.has(part="quality", norm="layer"):
        trained = rows.where(part="quality", norm="layer")
        before, after, swapped = (trained.mean(name) for name in ("validation", "validation_exact", "validation_naive"))
        told = f"; loss of the trained model {before:.4f} before, {after:.4f} after, {swapped:.4f} by the naive swap"
        zh = f"；训练好的模型验证损失：之前 {before:.4f}，之后 {after:.4f}，直接替换 {swapped:.4f}"
    says = both(
        f"error of logits, Pre-Norm with recentred writers: {double:.1e} in float64, {single:.1e} in float32 (naive "
        f"swap {pre.mean('naive'):.2f}); Post-Norm: {post.mean('exact_double'):.2f} (naive swap "
        f"{post.mean('naive'):.2f}), where gains and biases are on the stream{told}",
        f"logits 的误差：Pre-Norm 去均值后 float64 {double:.1e}、float32 {single:.1e}（直接替换 "
        f"{pre.mean('naive'):.2f}）；Post-Norm：{post.mean('exact_double'):.2f}（直接替换 "
        f"{post.mean('naive'):.2f}），因增益与偏置在残差流上{zh}",
    )
    exact = double < _rounding(torch.float64) and single < _rounding(torch.float32)
    return Judgement(Outcome.REFUTED if exact else Outcome.CONFIRMED, says)


def _rounding(dtype: torch.dtype) -> float:
    """Return what rounding alone may do: a unit in the last place for each sum, of features, in each sublayer."""
    return 2 * _SMALL * _WIDTH * torch.finfo(dtype).eps


def _saved(rows: Rows, race: str) -> dict[Text, list[float]]:
    """Return shares of the time that RMSNorm saves, one for each seed, by implementation and size."""
    found = {}
    speed = rows.where(part="speed")
    for width in speed.distinct("features"):
        for side, en in (("torch", "torch.nn"), ("ours", "normwise")):
            name = both(f"{en}, {width} features", f"{en}，{width} 个特征")
            found[name] = speed.where(features=width).values(f"time_saved_{race}_{side}")
    return found


CLAIMS = (
    Claim(
        text=both(
            "RMSNorm trains as well as LayerNorm: they differ by less than seeds do",
            "RMSNorm 的训练效果与 LayerNorm 一样好：差别小于种子之间的差别",
        ),
        source="Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467",
        judge=_judge_quality,
    ),
    Claim(
        text=both("RMSNorm makes a training step 7 to 64 % faster", "RMSNorm 使训练步快 7 % 至 64 %"),
        source="Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467",
        judge=_judge_speed,
    ),
    Claim(
        text=both("RMSNorm is faster than LayerNorm", "RMSNorm 比 LayerNorm 快"),
        source="Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467",
        judge=_judge_layer_speed,
    ),
    Claim(
        text=both(
            "LayerNorm to RMSNorm can never be exact and needs fine-tuning",
            "LayerNorm 到 RMSNorm 不可能精确，需要微调",
        ),
        source="common notes; against it Jiang et al. 2023, https://arxiv.org/abs/2305.14858",
        judge=_judge_exactness,
    ),
)


def _speeds(rows: Rows) -> Table:
    found = []
    speed = rows.where(part="speed")
    for width in speed.distinct("features"):
        some = speed.where(features=width)
        for kind in KINDS:
            step, each = some.mean(f"time_step_{kind}"), some.mean(f"time_both_{kind}")
            side, norm = kind.split("_")
            saved = some.mean(f"time_saved_step_{side}") if norm == "rms" else None
            name = f"{'torch.nn' if side == 'torch' else 'normwise'} {'RMSNorm' if norm == 'rms' else 'LayerNorm'}"
            share = some.mean("norms") * each / step
            found.append((name, width, 1e6 * some.mean(f"time_forward_{kind}"), 1e6 * each, 1e3 * step, share, saved))
    return Table(
        title=both("Times", "时间"),
        columns=(
            both("norm", "归一化"),
            both("features", "特征数"),
            both("forward, us", "前向（us）"),
            both("forward and backward, us", "前向加反向（us）"),
            both("training step, ms", "训练步（ms）"),
            both("share of the norms", "归一化所占比例"),
            both("saved by RMSNorm", "RMSNorm 省下"),
        ),
        rows=tuple(found),
        note=both(
            f"One thread, float32, {_BATCH} x {_LENGTH} tokens, medians of {ROUNDS} rounds in which the rivals take "
            f"turns; models of 12 layers with 64 features and of 4 with 256. Published: 7 to 64 %, the Transformer "
            f"6.9 %.",
            f"单线程，float32，{_BATCH} x {_LENGTH} 个词元，{ROUNDS} 轮（对手轮流）的中位数；模型为 12 层 64 个特征"
            f"与 4 层 256 个特征。已发表：7 % 至 64 %，Transformer 为 6.9 %。",
        ),
    )


def _errors(rows: Rows) -> Table:
    exact = rows.where(part="exact")
    names = ("naive", "exact_double", "exact_single", "exact_fresh")
    return Table(
        title=both(
            "LayerNorm to RMSNorm: largest error of the logits, relative", "LayerNorm 到 RMSNorm：logits 的最大相对误差"
        ),
        columns=(
            both("placement", "放置方式"),
            both("naive swap", "直接替换"),
            both("recentred, float64", "去均值，float64"),
            both("recentred, float32", "去均值，float32"),
            both("recentred, fresh model, float64", "去均值，新模型，float64"),
        ),
        rows=tuple(
            (placement, *(exact.where(placement=placement).spread(name)[1] for name in names))
            for placement in exact.distinct("placement")
        ),
        note=both(
            f"Largest over seeds; {_SMALL} layers, {_WIDTH} features, gains, biases and means of the embeddings "
            f"drawn at random. With gains of 1 and biases of 0 (fresh) Post-Norm is exact as well: what breaks it is "
            f"the gain on the stream.",
            f"取各种子最大值；{_SMALL} 层，{_WIDTH} 个特征，增益、偏置与嵌入均值随机抽取；Post-Norm 如 BERT 在嵌入后"
            f"有归一化。增益为 1、偏置为 0（新模型）时"
            " Post-Norm 也精确：破坏它的是流上的增益。",
        ),
    )


def _losses(rows: Rows) -> Chart:
    lines = []
    for norm, name in (("layer", "LayerNorm"), ("rms", "RMSNorm")):
        some = rows.where(part="quality", norm=norm)
        lines.append(along(name, some.curve("steps")[0], some, "losses"))
    return Chart(
        title=both("Training loss", "训练损失"),
        x_label=both("step", "步"),
        y_label=both("nats a byte", "奈特/字节"),
        lines=tuple(lines),
        note=both(
            f"Pre-Norm, {_DEPTH} layers, {_WIDTH} features, {_BATCH} x {_LENGTH} bytes, AdamW at {_RATE:g}; band: "
            f"seeds.",
            f"Pre-Norm，{_DEPTH} 层，{_WIDTH} 个特征，{_BATCH} x {_LENGTH} 字节，AdamW，学习率 {_RATE:g}；带：种子。",
        ),
    )


FIGURES = (_speeds, _errors, _losses)
