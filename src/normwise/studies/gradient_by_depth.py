"""Gradients by depth at initialisation, Pre-Norm against Post-Norm

## Claim
Xiong's Theorem 1: the gradient of the last W_2 falls as 1/sqrt(L) in Pre-Norm and does not depend on L in Post-Norm.
People add that Pre-Norm's gradients are of one size in all layers, that the rank collapse of deep Post-Norm stops W_Q
and W_K, and that with a start as small as GPT-2's the two cannot be told apart. And ours: in Pre-Norm the gradient of
W_2 times the size of the stream after it is the same in all layers.

## Source
Xiong et al. 2020, https://arxiv.org/abs/2002.04745, Theorem 1. Noci et al. 2022, https://arxiv.org/abs/2206.03126.

## Method
Fresh causal stacks of 6, 24 and 96 layers, 128 wide, ReLU, get one batch of 8 windows of 64 bytes of the standard
library and the mean cross-entropy of the next byte: one pass forward and back in float64, no training. Post-Norm,
Pre-Norm, DeepNorm and Sandwich-Norm with Xavier, the first two with N(0, 0.02^2) too; embeddings N(0, 1). Pre- and
Post-Norm of 12 layers with GPT-2's start and its small embeddings. Kept are the gradient on the stream by layer (root
mean square, median token, share of position 0) and the Frobenius norms of the gradients of W_2 and W_Q.

## What would refute it
Exponents of the last W_2's gradient in L nearer to 0 than to -1/2 in Pre-Norm, nearer to -1/2 than to 0 in Post-Norm; a
first and a last W_2 a factor of 2 apart; a product that changes with depth by more than the seeds do; W_Q no smaller
than a thousandth of W_2.

## Cost
Full set: about 8 CPU-minutes. Quick set: about 1.5.

## What this cannot show
What training makes of it. The predicted gradient supposes that the gradients of tokens at the end are independent; in
real text they are not, and the measured rise towards the first layer is up to five times the predicted one. The norms
and constants of Xiong's 512-wide translation models.
"""

from __future__ import annotations

from math import exp, log, sqrt
from statistics import geometric_mean
from typing import Any

from normwise.errors import NotKnown
from normwise.rendering import both
from normwise.rendering.languages import in_language
from normwise.studies._gradient_figures import last, matrices, stream, streams, token, w_2
from normwise.studies._initial import places, through
from normwise.studies._outcomes import Settings
from normwise.studies._seeds import span, spelled
from normwise.studies._study import Claim, Judgement, Outcome, Params, Rows

ZH = """初始化时各深度的梯度，Pre-Norm 对 Post-Norm

## 主张
Xiong 的定理 1：最后一个 W_2 的梯度在 Pre-Norm 中按 1/sqrt(L) 下降，在 Post-Norm 中与 L 无关。人们还说：Pre-Norm 各层的
梯度大小相同；深层 Post-Norm 的秩坍缩使 W_Q 与 W_K 停止学习；用 GPT-2 那样小的初始化时二者无法区分。以及我们的一句：
Pre-Norm 中 W_2 的梯度乘以其后残差流的大小，在各层相同。

## 出处
Xiong 等 2020，https://arxiv.org/abs/2002.04745，定理 1。Noci 等 2022，https://arxiv.org/abs/2206.03126。

## 方法
刚初始化的因果网络，6、24、96 层，宽 128，ReLU，读取标准库的 8 个 64 字节窗口，损失为下一字节的平均交叉熵：float64 的
一次前向与反向，不训练。Xavier 下的 Post-Norm、Pre-Norm、DeepNorm、Sandwich-Norm，前两者另加 N(0, 0.02^2)；嵌入
N(0, 1)。12 层的 Pre-Norm 与 Post-Norm 用 GPT-2 的初始化及其小嵌入。记录各层残差流上的梯度（均方根、中位词元、
位置 0 的份额）以及 W_2 与 W_Q 梯度的 Frobenius 范数。

## 什么会推翻它
最后一个 W_2 的梯度关于 L 的指数在 Pre-Norm 中更接近 0 而非 -1/2，在 Post-Norm 中更接近 -1/2 而非 0；首末 W_2 相差两倍；
乘积随深度的变化超过种子间的变化；W_Q 不小于 W_2 的千分之一。

## 开销
完整集约 8 CPU 分钟，快速集约 1.5 CPU 分钟。

## 这里无法说明的
训练会带来什么。预测的梯度假设末端各词元的梯度相互独立；真实文本并非如此，测得的向首层的增长可达预测的五倍。Xiong 的
512 宽翻译模型的范数与常数。
"""

VERSION = 1
DATA = ("standard-library",)
SEEDS = 3

_PRE, _POST = -0.5, 0.0  # exponents of the last W_2's gradient in L, by Theorem 1
_BETWEEN = (_PRE + _POST) / 2
_SAME = 2.0  # what is called one size
# W_Q learns nothing beside W_2; Adam hides it until its eps, and rounding in bfloat16 before
_COLLAPSED = 1e-3
_SURE = 2  # standard deviations


def seconds(params: Params) -> float:
    """Return the CPU-seconds of a trial."""
    return 0.5 + 0.09 * params["depth"]


def trials(quick: bool) -> list[dict[str, Any]]:
    """Return the trials."""
    depths = (6, 24) if quick else (6, 24, 96)
    made = [
        _stack(placement, init, depth)
        for init, placements in (("xavier", ("pre", "post", "deep-norm", "sandwich")), ("normal", ("pre", "post")))
        for placement in placements
        for depth in depths
    ]
    small = [
        _stack(placement, "gpt-2", 12) | {"mlp": "gelu", "embeddings": embeddings}
        for embeddings in ("gpt-2", "unit")
        for placement in ("pre", "post")
    ]
    return made + small


def _stack(placement: str, init: str, depth: int) -> dict[str, Any]:
    usual = {"width": 128, "embeddings": "unit"}
    return {"placement": placement, "init": init, "mlp": "relu", "depth": depth, **usual}


def measure(params: Params) -> dict[str, Any]:
    """Run a trial."""
    walked = through(params)
    depth, told = params["depth"], walked.told
    at = places(depth)
    kept = [max(0, layer - 1) for layer in at[1:]]
    middle = depth // 2
    return {
        "layers": at,
        "gradient": [walked.gradient[layer] / walked.gradient[-1] for layer in at],
        "told_gradient": [told.gradient[2 * layer] for layer in at],
        "token_gradient": [walked.token_gradient[layer] / walked.token_gradient[-1] for layer in at],
        "told_token_gradient": [told.token_gradient[2 * layer] for layer in at],
        "first_share": [walked.first_share[layer] for layer in at],
        "down": [walked.down[layer] for layer in kept],
        "told_down": [(told.q[2] / told.q[2 * layer + 2]) ** 0.5 for layer in kept],
        "down_first": walked.down[0],
        "down_middle": walked.down[middle],
        "down_last": walked.down[-1],
        "query_first": walked.query[0],
        "query_last": walked.query[-1],
        "query_share": min(query / down for query, down in zip(walked.query, walked.down, strict=True)),
        "product": [walked.down[layer] * sqrt(walked.q[layer + 1]) for layer in (0, middle, depth - 1)],
        "first_to_last": walked.gradient[0] / walked.gradient[-1],
        "after_first_norm": walked.gradient[1] / walked.gradient[-1],
        "q_last": walked.q[-1],
        "rho_last": walked.rho[-1],
        "error": told.error[-1],
    }


def _exponents(rows: Rows) -> list[float]:
    """Return, for each seed, d log(gradient of the last W_2) / d log L between the least and the greatest depth."""
    depths = sorted(rows.distinct("depth"))
    if len(depths) < 2:
        raise NotKnown(both("one depth alone has been run", "只运行了一种深度"))
    found = list[float]()
    for seed in rows.distinct("seed"):
        least, most = (rows.where(depth=depth, seed=seed).mean("down_last") for depth in (depths[0], depths[-1]))
        found.append(log(most / least) / log(depths[-1] / depths[0]))
    return found


def _fresh(rows: Rows, placement: str) -> Rows:
    return rows.where(placement=placement, embeddings="unit", mlp="relu")


def _judge_exponent(placement: str, expected: float, rows: Rows) -> Judgement:
    """Decide, start by start, between the exponents of Theorem 1."""
    settings, unclear = Settings(), False
    some = _fresh(rows, placement)
    for (init,), each in some.groups("init"):
        found = _exponents(each)
        near = [(one < _BETWEEN) == (expected < _BETWEEN) for one in found]
        unclear |= any(near) and not all(near)
        exponent = spelled(found, "z.2f")
        settings.add(all(near), both(f"L^{exponent} with {init}", f"{init} 为 L^{exponent}"))
    found = settings.told(
        lambda some: both(f"as L^{expected:g} or near it: {some.names}", f"接近 L^{expected:g}：{some.names.zh}"),
        lambda some: both(
            f"nearer to L^{_PRE + _POST - expected:g}: {some.names}",
            f"更接近 L^{_PRE + _POST - expected:g}：{some.names.zh}",
        ),
    )
    depths = span(some.distinct("depth"))
    return Judgement(
        Outcome.OPEN if unclear else settings.outcome,
        both(
            f"gradient of the last W_2 at {depths} layers, {found}",
            f"{depths} 层时最后一个 W_2 的梯度，{found.zh}",
        ),
    )


def _judge_pre(rows: Rows) -> Judgement:
    found = _judge_exponent("pre", _PRE, rows)
    return Judgement(
        found.outcome,
        both(
            f"{found.says}. It is that of 1/sqrt(q_0 + L v): there is no fall where L v is small beside q_0",
            f"{in_language(found.says, 'zh')}。它按 1/sqrt(q_0 + L v) 变化：L v 远小于 q_0 时不下降",
        ),
    )


def _judge_post(rows: Rows) -> Judgement:
    return _judge_exponent("post", _POST, rows)


def _judge_flat(rows: Rows) -> Judgement:
    """Compare first and last W_2 of Pre-Norm."""
    settings = Settings()
    for (init, depth), each in _fresh(rows, "pre").groups("init", "depth"):
        first, last = (geometric_mean(each.values(name)) for name in ("down_first", "down_last"))
        ratio = first / last
        settings.add(max(ratio, 1 / ratio) <= _SAME, f"{init}, L={depth}", ratio=ratio, q=each.mean("q_last"))
    found = settings.told(
        lambda some: both(
            f"x{some.span('ratio')} where the stream ends at q = {some.span('q')}: one size",
            f"残差流末端 q = {some.span('q')} 时为 {some.span('ratio')} 倍，算相同",
        ),
        lambda some: both(
            f"x{some.span('ratio')} where it ends at {some.span('q')}: not",
            f"q = {some.span('q')} 时为 {some.span('ratio')} 倍，不同",
        ),
    )
    return Judgement(
        settings.outcome,
        both(
            f"W_2 of the first layer over that of the last: {found}. Gradients fall as 1/sqrt(q_l)",
            f"首层与末层 W_2 梯度之比：{found.zh}。梯度按 1/sqrt(q_l) 下降",
        ),
    )


def _judge_product(rows: Rows) -> Judgement:
    """See whether ||dW_2|| sqrt(q) is the same in the first, the middle and the last layer of Pre-Norm."""
    settings = Settings()
    for (init, depth), each in _fresh(rows, "pre").groups("init", "depth"):
        columns = [geometric_mean(list(column)) for column in zip(*each.values("product"), strict=True)]
        off = max(columns) / min(columns)
        # a root of q is uncertain by half of `error`; as much again is left for the gradient at that place
        allowed = exp(_SURE * each.mean("error") / sqrt(len(each)))
        name = both(f"x{off:.2f} ({init}, {depth} layers)", f"{off:.2f} 倍（{init}，{depth} 层）")
        settings.add(off <= allowed, name, off=off)
    found = settings.told(
        lambda some: both(
            f"x{some.span('off', '.2f')} in {len(some)} settings, within the uncertainty of the width",
            f"{len(some)} 种设置为 {some.span('off', '.2f')} 倍，在宽度的不确定度之内",
        ),
        lambda some: both(f"beyond it: {some.names}", f"之外：{some.names.zh}"),
    )
    return Judgement(
        settings.outcome,
        both(
            f"largest over smallest of ||dW_2|| sqrt(q) in the first, the middle and the last layer: {found}",
            f"首层、中层、末层的 ||dW_2|| sqrt(q)，最大与最小之比：{found.zh}",
        ),
    )


def _judge_collapse(rows: Rows) -> Judgement:
    """See whether W_Q gets a thousandth of W_2's gradient or less in Post-Norm of 24 layers and more."""
    settings = Settings()
    for (init, depth), each in _fresh(rows, "post").groups("init", "depth"):
        if depth >= 24:
            share, rho = geometric_mean(each.values("query_share")), each.mean("rho_last")
            settings.add(each.spread("query_share")[1] < _COLLAPSED, init, share=share, rho=rho)
    found = settings.told(
        lambda some: both(
            f"{some.span('share', '.1g')} where tokens correlate by {some.span('rho')} ({some.names})",
            f"词元相关性为 {some.span('rho')} 时为 {some.span('share', '.1g')}（{some.names.zh}）",
        ),
        lambda some: both(
            f"{some.span('share', '.1g')}, not stopped, where by {some.span('rho')} ({some.names})",
            f"相关性为 {some.span('rho')} 时为 {some.span('share', '.1g')}，未停止（{some.names.zh}）",
        ),
    )
    return Judgement(
        settings.outcome,
        both(
            f"least gradient of W_Q over that of W_2, 24 layers and more: {found}. The branches' gain decides",
            f"24 层以上，W_Q 与 W_2 梯度之比的最小值：{found.zh}。起决定作用的是分支的增益",
        ),
    )


def _judge_small(rows: Rows) -> Judgement:
    """Compare the rise of the gradient towards the input in Pre- and Post-Norm of GPT-2's start."""
    settings = Settings()
    for embeddings, q_0 in (("unit", "1"), ("gpt-2", "8e-4")):
        some = rows.where(init="gpt-2", embeddings=embeddings)
        pre, post = (some.where(placement=name) for name in ("pre", "post"))
        sizes = [geometric_mean(each.values("first_to_last")) for each in (pre, post)]
        inner = geometric_mean(post.values("after_first_norm"))
        name = both(
            f"x{sizes[0]:.2f} in Pre-Norm and x{sizes[1]:.2f} in Post-Norm (x{inner:.2f} behind its first layer) with "
            f"q_0 = {q_0}",
            f"q_0 = {q_0} 时 Pre-Norm 为 {sizes[0]:.2f} 倍，Post-Norm 为 {sizes[1]:.2f} 倍（首层之后 {inner:.2f} 倍）",
        )
        settings.add(max(sizes) / min(sizes) <= _SAME, name)
    found = settings.told(
        lambda some: both(f"alike: {some.names}", f"相近：{some.names.zh}"),
        lambda some: both(f"not alike: {some.names}", f"不同：{some.names.zh}"),
    )
    return Judgement(
        settings.outcome,
        both(
            f"gradient where the stream enters over that at its end, 12 layers; {found}",
            f"12 层，残差流入口与末端梯度之比；{found.zh}",
        ),
    )


CLAIMS = (
    Claim(
        both("The last layer's gradient falls as 1/sqrt(L) in Pre-Norm", "Pre-Norm 中末层的梯度按 1/sqrt(L) 下降"),
        "Xiong et al. 2020, https://arxiv.org/abs/2002.04745, Theorem 1",
        _judge_pre,
    ),
    Claim(
        both("The last layer's gradient does not depend on L in Post-Norm", "Post-Norm 中末层的梯度与 L 无关"),
        "Xiong et al. 2020, https://arxiv.org/abs/2002.04745, Theorem 1",
        _judge_post,
    ),
    Claim(
        both("Gradients of Pre-Norm are of one size in all layers", "Pre-Norm 各层的梯度大小相同"),
        "Xiong et al. 2020, https://arxiv.org/abs/2002.04745, as commonly retold",
        _judge_flat,
    ),
    Claim(
        both(
            "In Pre-Norm the gradient of W_2 times the size of the stream after it is the same in all layers",
            "Pre-Norm 中 W_2 的梯度乘以其后残差流的大小，在各层相同",
        ),
        "normwise.theory",
        _judge_product,
    ),
    Claim(
        both("In deep Post-Norm rank collapse stops W_Q and W_K", "深层 Post-Norm 的秩坍缩使 W_Q 与 W_K 停止学习"),
        "Noci et al. 2022, https://arxiv.org/abs/2206.03126",
        _judge_collapse,
    ),
    Claim(
        both(
            "With GPT-2's start Pre- and Post-Norm have the same gradients at initialisation",
            "用 GPT-2 的初始化时，Pre-Norm 与 Post-Norm 初始的梯度相同",
        ),
        "normwise's own science sheet, before it was measured with real embeddings",
        _judge_small,
    ),
)

FIGURES = (streams, matrices, stream, token, w_2, last)
