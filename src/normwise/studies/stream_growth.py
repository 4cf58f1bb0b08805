"""The residual stream grows as sqrt(l): when it does

## Claim
Three sentences about models at initialisation. In Pre-Norm the size of the stream grows as sqrt(l), l the number of
layers. Every add doubles the variance. GPT-2's start, with output matrices smaller by sqrt(2 L), keeps the stream's
size. And ours: the second moment after every add is q_0 + sum v, v what the branches add, and can be told from the
weights.

## Source
Xiong et al. 2020, https://arxiv.org/abs/2002.04745, Lemma 2: (1 + l/2) d <= E||x_l||^2 <= (1 + 3l/2) d. De and Smith
2020,
https://arxiv.org/abs/2002.10444: the variance of a residual network with normalized branches is l + 1. Su Jianlin,
https://kexue.fm/archives/8620: the sum of two vectors of variance 1 has variance 2. Radford et al. 2019, GPT-2:
output matrices
times 1/sqrt(N).

## Method
Fresh stacks read windows of 64 bytes of the standard library; the second moment of the stream per feature is measured
as it enters, q_0, and after every layer. Six placements of 24 layers, 128 wide, Xavier, ReLU, embeddings N(0, 1);
Pre-Norm of 6, 24 and 96 layers with Xavier and with N(0, 0.02^2); Pre-Norm of 12 layers with GPT-2's start, GELU, 128
to 768 wide, with GPT-2's embeddings (tokens and positions N(0, 0.02^2)) and with N(0, 1). Beside it stands
``normwise.theory.predict``, which reads the weights and what enters and fits nothing.

## What would refute it
An exponent of the size over the second half of the depth away from 1/2, at every start; adds whose factor is not 2; a
GPT-2 stream that leaves more than twice the second moment that entered; a second moment further from the prediction
than three times its own uncertainty.

## Cost
Full set: about 6 CPU-minutes, half of them to start 60 processes. Quick set: about 1.5.

## What this cannot show
Trained models: there the stream of a few features grows by thousands (massive activations), which no theory of
initialisation covers. Widths above 768.
"""

from __future__ import annotations

from math import log, log2, sqrt
from typing import Any

from normwise.rendering import Text, both
from normwise.rendering.plots import Chart, Line
from normwise.studies._initial import LENGTH, places, through
from normwise.studies._outcomes import Settings
from normwise.studies._seeds import span
from normwise.studies._study import Claim, Judgement, Params, Rows, Table

ZH = """残差流按 sqrt(l) 增长：何时成立

## 主张
关于初始化时模型的三句话。Pre-Norm 中残差流的大小按 sqrt(l) 增长，l 为层数。每次相加都使方差加倍。GPT-2 的初始化把输出
矩阵缩小 sqrt(2 L) 倍，使残差流的大小保持不变。以及我们的一句：每次相加之后的二阶矩为 q_0 + sum v，v 为各分支所加的
部分，可由权重读出。

## 出处
Xiong 等 2020，https://arxiv.org/abs/2002.04745，引理 2：(1 + l/2) d <= E||x_l||^2 <= (1 + 3l/2) d。De 与 Smith 2020，
https://arxiv.org/abs/2002.10444：分支归一化的残差网络方差为 l + 1。苏剑林，https://kexue.fm/archives/8620：
两个方差为 1 的向量之和
方差为 2。Radford 等 2019，GPT-2：输出矩阵乘以 1/sqrt(N)。

## 方法
刚初始化的网络读取标准库源码的 64 字节窗口；测量残差流进入时的每特征二阶矩 q_0 以及每层之后的二阶矩。六种放置方式，
24 层、宽 128、Xavier、ReLU、嵌入 N(0, 1)；6、24、96 层的 Pre-Norm，分别用 Xavier 与 N(0, 0.02^2)；12 层 GPT-2 初始化的
Pre-Norm，GELU，宽 128 至 768，分别用 GPT-2 的嵌入（词与位置均为 N(0, 0.02^2)）与 N(0, 1)。旁边是
``normwise.theory.predict``：它读取权重与输入，不做任何拟合。

## 什么会推翻它
在所有初始化下，后半深度上大小的指数都偏离 1/2；相加的倍数不是 2；GPT-2 的残差流离开时的二阶矩超过进入时的两倍；二阶矩
与预测的偏差超过其自身不确定度的三倍。

## 开销
完整集约 6 CPU 分钟，其中一半用于启动 60 个进程；快速集约 1.5 CPU 分钟。

## 这里无法说明的
训练后的模型：那里少数特征上的残差流会增长上千倍（巨量激活），初始化理论不涵盖。宽度超过 768 的模型。
"""

VERSION = 1
DATA = ("standard-library",)
SEEDS = 3

_PLACEMENTS = ("pre", "post", "sandwich", "deep-norm", "layernorm-scaling", "residual-multiplier")
_WIDTHS = (128, 256, 512, 768)
_SURE = 2  # standard deviations
_BEYOND = 3  # the same, where the worst of many is looked at
# a finite eps and 1e-4 of a quadrature are left where the uncertainty of a width is 0: streams that a norm makes 1
_LEAST = 1e-3
# v of one net strays by sqrt(2/H) = 12.5 % at H = 128 where tokens have become alike; twice that around a factor of 2
_DOUBLE = (1.75, 2.25)
_HELD = 2.0  # what enters is half of what leaves, at least


def seconds(params: Params) -> float:
    """Return the CPU-seconds of a trial."""
    return params["depth"] * (0.09 + (params["width"] / 128) ** 2 * 0.006)


def trials(quick: bool) -> list[dict[str, Any]]:
    """Return the trials."""
    made = [_stack(placement, "xavier", 24) for placement in _PLACEMENTS]
    made.append(_stack("sandwich", "normal", 24))
    depths = (6, 24) if quick else (6, 24, 96)
    made += [_stack("pre", init, depth) for init in ("xavier", "normal") for depth in depths]
    widths = _WIDTHS[:2] if quick else _WIDTHS
    made += [_gpt_2(width, embeddings) for embeddings in ("gpt-2", "unit") for width in widths]
    return [each for index, each in enumerate(made) if each not in made[:index]]


def _stack(placement: str, init: str, depth: int) -> dict[str, Any]:
    usual = {"width": 128, "embeddings": "unit"}
    return {"placement": placement, "init": init, "mlp": "relu", "depth": depth, **usual}


def _gpt_2(width: int, embeddings: str) -> dict[str, Any]:
    return _stack("pre", "gpt-2", 12) | {"mlp": "gelu", "width": width, "embeddings": embeddings}


def measure(params: Params) -> dict[str, Any]:
    """Run a trial."""
    walked = through(params, backward=False)
    depth, told = params["depth"], walked.told
    at = places(depth)
    adds = [after / before for after, before in zip(walked.added, walked.before, strict=True)]
    return {
        "layers": at,
        "q": [walked.q[layer] for layer in at],
        "told_q": [told.q[2 * layer] for layer in at],
        "told_error": [told.error[2 * layer] for layer in at],
        "q_first": walked.q[0],
        "q_last": walked.q[-1],
        "growth": walked.q[-1] / walked.q[0],
        "exponent": log2(walked.q[-1] / walked.q[depth // 2]) / 2,
        "sum_v": sum(walked.branch),
        "rho_last": walked.rho[-1],
        "attention_add": sum(adds[depth::2]) / len(adds[depth::2]),
        "mlp_add": sum(adds[depth + 1 :: 2]) / len(adds[depth + 1 :: 2]),
    }


def _settings(rows: Rows) -> list[tuple[Text, Rows]]:
    """Return the rows of each setting, with what it is called."""
    return [
        (both(f"{placement}, {init}, {layers} x {width}", f"{placement}，{init}，{layers} x {width}"), each)
        for (placement, init, layers, width, _), each in rows.groups(
            "placement", "init", "depth", "width", "embeddings"
        )
    ]


def _error(rows: Rows) -> float:
    """Return the relative standard deviation of the mean second moment at the end over these seeds."""
    return max(_LEAST, rows.curve("told_error")[0][-1] / sqrt(len(rows)))


def _judge_root(rows: Rows) -> Judgement:
    """Compare the exponent of the size over the second half of the depth with 1/2."""
    settings = Settings()
    for name, each in _settings(rows.where(placement="pre")):
        exponent = each.mean("exponent")
        # d(log2(q) / 2) = dq / q / (2 ln 2)
        near = abs(exponent - 0.5) <= _SURE * _error(each) / (2 * log(2))
        settings.add(near, name, exponent=exponent, times=each.mean("sum_v") / each.mean("q_first"))
    found = settings.told(
        lambda some: both(
            f"about 1/2 ({some.span('exponent', 'z.2f')}) in {len(some)} settings, where the branches add "
            f"{some.span('times')} times what entered",
            f"{len(some)} 种设置约为 1/2（{some.span('exponent', 'z.2f')}），各分支所加为进入部分的 "
            f"{some.span('times')} 倍",
        ),
        lambda some: both(
            f"not 1/2 ({some.span('exponent', 'z.2f')}) in {len(some)}, where they add {some.span('times')} times",
            f"{len(some)} 种不是（{some.span('exponent', 'z.2f')}），所加为 {some.span('times')} 倍",
        ),
    )
    return Judgement(
        settings.outcome,
        both(
            f"exponent of the size over the second half of the depth: {found}",
            f"后半深度上大小的指数：{found.zh}",
        ),
    )


def _judge_double(rows: Rows) -> Judgement:
    """Compare the factors of the adds in the second half of the depth with 2."""
    settings = Settings()
    for (placement, init), each in rows.where(embeddings="unit", depth=24).groups("placement", "init"):
        for kind, zh in (("attention", "注意力"), ("mlp", "MLP")):
            factor = each.mean(f"{kind}_add")
            name = both(f"{zh if kind == 'mlp' else kind} of {placement}, {init}", f"{placement}（{init}）的{zh}")
            settings.add(_DOUBLE[0] <= factor <= _DOUBLE[1], name, factor=factor)
    found = settings.told(
        lambda some: both(
            f"about 2 ({some.span('factor')}) for {some.names}", f"约为 2（{some.span('factor')}）：{some.names.zh}"
        ),
        lambda some: both(
            f"{some.span('factor')} for {len(some)} other kinds of adds", f"其余 {len(some)} 种为 {some.span('factor')}"
        ),
    )
    return Judgement(
        settings.outcome,
        both(
            "an add multiplies the second moment by 1 + v / q, which is 2 only where the branch is as large as the "
            f"stream; over the second half of 24 layers: {found}",
            f"相加使二阶矩乘以 1 + v / q，只有分支与残差流一样大时才是 2；24 层的后半：{found.zh}",
        ),
    )


def _judge_held(rows: Rows) -> Judgement:
    """See whether a fresh GPT-2 leaves at most twice the second moment that entered."""
    settings = Settings()
    rows.where(init="gpt-2", embeddings="gpt-2")
    for name, each in _settings(rows.where(init="gpt-2")):
        growth, q_0 = each.mean("growth"), each.mean("q_first")
        settings.add(each.spread("growth")[1] <= _HELD, name, growth=growth, q_0=q_0)
    found = settings.told(
        lambda some: both(
            f"times {some.span('growth')} where embeddings enter with q_0 = {some.span('q_0', '.1g')}",
            f"嵌入以 q_0 = {some.span('q_0', '.1g')} 进入时为 {some.span('growth')} 倍",
        ),
        lambda some: both(
            f"times {some.span('growth')} where they enter with q_0 = {some.span('q_0', '.1g')}: even small branches "
            "are larger than that",
            f"以 q_0 = {some.span('q_0', '.1g')} 进入时为 {some.span('growth')} 倍：很小的分支也比它大",
        ),
    )
    widths = span(rows.where(init="gpt-2").distinct("width"))
    return Judgement(
        settings.outcome,
        both(
            f"second moment over 12 layers, {widths} wide: {found}. GPT-2's own embeddings enter with 8e-4",
            f"12 层、宽 {widths} 的二阶矩：{found.zh}。GPT-2 自己的嵌入以 8e-4 进入",
        ),
    )


def _judge_any_weights(rows: Rows) -> Judgement:
    """Compare Sandwich-Norm with q_0 + 2 l."""
    settings = Settings()
    for (init, layers), each in rows.where(placement="sandwich").groups("init", "depth"):
        size, want = each.mean("q_last"), each.mean("q_first") + 2 * layers
        name = both(f"{size:.3g} of {want:.3g} ({init})", f"{size:.3g}，应为 {want:.3g}（{init}）")
        settings.add(abs(size / want - 1) <= _SURE * _error(each), name)
    found = settings.told(
        lambda some: both(
            f"within {_SURE} standard deviations of a net this wide: {some.names}",
            f"在该宽度网络的 {_SURE} 个标准差之内：{some.names.zh}",
        ),
        lambda some: both(f"beyond: {some.names}", f"之外：{some.names.zh}"),
    )
    return Judgement(
        settings.outcome,
        both(f"second moment at the end against q_0 + 2 l, {found}", f"末端的二阶矩与 q_0 + 2 l 相比，{found.zh}"),
    )


def _judge_told(rows: Rows) -> Judgement:
    """Compare every measured end with the prediction."""
    settings, off = Settings(), dict[Text, float]()
    for name, each in _settings(rows):
        off[name] = each.mean("q_last") / each.curve("told_q")[0][-1] - 1
        settings.add(abs(off[name]) / _error(each) <= _BEYOND, name)
    outcome = settings.outcome
    worst = max(off, key=lambda name: abs(off[name]))
    found = settings.told(
        lambda some: both(f"{len(some)} settings are within", f"{len(some)} 种设置在内"),
        lambda some: both(f"beyond are {some.names}", f"之外：{some.names.zh}"),
    )
    return Judgement(
        outcome,
        both(
            f"against {_BEYOND} standard deviations of a net of that width: {found}. The furthest is {off[worst]:+.1%} "
            f"({worst})",
            f"与该宽度网络的 {_BEYOND} 个标准差相比：{found.zh}。最远的为 {off[worst]:+.1%}（{worst.zh}）",
        ),
    )


CLAIMS = (
    Claim(
        both("The stream of Pre-Norm grows as sqrt(l)", "Pre-Norm 的残差流按 sqrt(l) 增长"),
        "Xiong et al. 2020, https://arxiv.org/abs/2002.04745, Lemma 2; De and Smith 2020, https://arxiv.org/abs/2002.10444",
        _judge_root,
    ),
    Claim(
        both("Every residual add doubles the variance", "每次残差相加都使方差加倍"),
        "Su Jianlin, https://kexue.fm/archives/8620",
        _judge_double,
    ),
    Claim(
        both("GPT-2's start keeps the size of the stream", "GPT-2 的初始化使残差流的大小保持不变"),
        "Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
        _judge_held,
    ),
    Claim(
        both(
            "Sandwich-Norm's stream has q_0 + 2 l, independent of all weights",
            "Sandwich-Norm 的残差流为 q_0 + 2 l，与一切权重无关",
        ),
        "Kim et al. 2025 (Peri-LN), https://arxiv.org/abs/2502.02732",
        _judge_any_weights,
    ),
    Claim(
        both(
            "The second moment of the stream is q_0 + sum v, known from weights and embeddings",
            "残差流的二阶矩为 q_0 + sum v，可由权重与嵌入得知",
        ),
        "normwise.theory; De and Smith 2020, https://arxiv.org/abs/2002.10444",
        _judge_told,
    ),
)

_CONDITIONS = both(
    f"At initialisation; {LENGTH} bytes of the standard library a window. The dashed line is read off weights and "
    "embeddings, nothing is fitted. Bands: smallest and largest of the seeds.",
    f"初始化时；窗口为标准库的 {LENGTH} 字节。虚线由权重与嵌入读出，未做拟合。色带：各种子的最小值与最大值。",
)


def _pair(name: str, rows: Rows, scale: float = 1.0) -> tuple[Line, Line]:
    """Return the root of q by layer, over ``scale``, and its prediction."""
    x = tuple(map(float, rows[0].metrics["layers"]))
    mean, low, high = (tuple(sqrt(value) / scale for value in part) for part in rows.curve("q"))
    told = tuple(sqrt(value) / scale for value in rows.curve("told_q")[0])
    predicted = both(f"{name}, predicted", f"{name}，预测")
    measured = Line(name=name, x=x, y=mean, low=low, high=high)
    return measured, Line(name=predicted, x=x, y=told, theory=True, like=name)


def _by_placement(rows: Rows) -> Chart:
    some = rows.where(init="xavier", depth=24)
    lines = [line for name in some.distinct("placement") for line in _pair(name, some.where(placement=name))]
    return Chart(
        title=both("Size of the stream by layer, Xavier, 24 layers", "各层残差流的大小，Xavier，24 层"),
        x_label=both("layer", "层"),
        y_label=both("root mean square per feature", "每特征均方根"),
        lines=tuple(lines),
        log_y=True,
        note=both(f"128 wide, ReLU, x_0 ~ N(0, 1). {_CONDITIONS}", f"宽 128，ReLU，x_0 ~ N(0, 1)。{_CONDITIONS.zh}"),
    )


def _by_width(rows: Rows) -> Chart:
    lines = list[Line]()
    for embeddings in ("gpt-2", "unit"):
        some = rows.where(init="gpt-2", embeddings=embeddings)
        for width in some.distinct("width"):
            each = some.where(width=width)
            if embeddings == "gpt-2" or width == max(some.distinct("width")):
                lines += _pair(f"H={width}, x_0 {embeddings}", each, sqrt(each.mean("q_first")))
    return Chart(
        title=both("A fresh GPT-2: the stream over what entered", "刚初始化的 GPT-2：残差流与进入时之比"),
        x_label=both("layer", "层"),
        y_label=both("root mean square over that of x_0", "均方根与 x_0 的均方根之比"),
        lines=tuple(lines),
        log_y=True,
        note=both(f"12 layers, GELU, Pre-Norm. {_CONDITIONS}", f"12 层，GELU，Pre-Norm。{_CONDITIONS.zh}"),
    )


def _all(rows: Rows) -> Table:
    return Table(
        title=both("Second moments of the stream", "残差流的二阶矩"),
        columns=(
            both("placement", "放置方式"),
            both("start", "初始化"),
            "L x H",
            "q_0",
            both("q at the end", "末端 q"),
            both("predicted", "预测"),
            both("exponent", "指数"),
        ),
        rows=tuple(
            (
                placement,
                init,
                f"{layers} x {width}",
                each.mean("q_first"),
                each.said("q_last"),
                each.curve("told_q")[0][-1],
                each.mean("exponent"),
            )
            for (placement, init, layers, width, _), each in rows.groups(
                "placement", "init", "depth", "width", "embeddings"
            )
        ),
        note=both(
            f"{_CONDITIONS} L layers of width H; normal: N(0, 0.02^2). Exponent: log2 of the sizes at L and L/2.",
            f"{_CONDITIONS.zh}指数：L 与 L/2 处大小之比的 log2。L 层，宽 H；normal：N(0, 0.02^2)。",
        ),
    )


FIGURES = (_all, _by_placement, _by_width)
