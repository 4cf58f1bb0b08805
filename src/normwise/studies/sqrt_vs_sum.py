"""2^(-l/2) and sqrt(l + 1): when the notes' two factors hold

## Claim
Notes on Transformers argue so: x + F(x) has variance 2, so Post-Norm is (x + F(x)) / sqrt(2), and over l layers what
enters and the gradient that comes back are multiplied by 2^(-l/2): Post-Norm's gradient vanishes. Pre-Norm is a sum, so
its norm divides by sqrt(l + 1). Each step is put to the test: the coefficient of x_0, the gradient per layer and per
add, the norm that a check would print, and the divisor.

## Source
Su Jianlin, https://kexue.fm/archives/8620 and https://kexue.fm/archives/9009, and the notes that retell them.

## Method
Fresh Post-Norm stacks of 24 layers, 128 wide, on 8 windows of 64 bytes of the standard library, one pass forward and
back in float64 from the mean cross-entropy: attention and ReLU MLP with Xavier (attention's gain is 1, the MLP's 0.32),
the same with N(0, 0.02^2) (gains below 0.01), the same without the causal mask, attention alone, and an MLP alone with
ReLU, GELU and SwiGLU (N(0, 1 / fan_in)). The gradient on the stream is taken per token: root mean square, median token,
share of position 0. A factor per layer is the 16th root of the gradient after layer 8 over that after layer 24, where
tokens have become alike. Forward alone: Pre-Norm and Sandwich-Norm of 6 and 24 layers.

Theory (section 3 of the guide): the branch carries a gradient as well as a signal. An add followed by a norm multiplies
the mean square of the gradient by (1 + chi) / (1 + v), chi what the branch returns: 1 exactly for ReLU, 1.02 for GELU,
1.28 for SwiGLU. Attention returns to a token only what it shares with others: the rest gets 1 / (1 + v), 1/2 at v = 1.

## What would refute it
Factors are compared with 1/2 (2^(-1/2) for both adds of a layer), 2^(-1/2) (once a layer) and 1 (none): the nearest in
the logarithm is what was found.

## Cost
Full set: about 4 CPU-minutes. Quick set: about 1.5.

## What this cannot show
Trained models. Whether the vanished gradient of the median token is why deep Post-Norm fails to train: see ``warmup``.
"""

from __future__ import annotations

from math import fsum, log, log2, prod, sqrt
from statistics import geometric_mean
from typing import Any

from normwise.errors import NotKnown
from normwise.rendering import Text, both
from normwise.rendering.plots import Chart, Line
from normwise.studies._curves import along
from normwise.studies._initial import LENGTH, WINDOWS, places, through
from normwise.studies._outcomes import Settings
from normwise.studies._seeds import spelled
from normwise.studies._study import Claim, Judgement, Outcome, Params, Rows, Table

ZH = """2^(-l/2) 与 sqrt(l + 1)：笔记中的两个系数何时成立

## 主张
关于 Transformer 的笔记这样论证：x + F(x) 的方差为 2，所以 Post-Norm 就是 (x + F(x)) / sqrt(2)，经过 l 层，输入与返回的
梯度都乘以 2^(-l/2)：Post-Norm 的梯度消失。Pre-Norm 是求和，因此其归一化除以 sqrt(l + 1)。这里逐步检验：x_0 的系数，每层
与每次相加的梯度，检查工具会打印的范数，以及除数。

## 出处
苏剑林，https://kexue.fm/archives/8620 与 https://kexue.fm/archives/9009，以及转述它们的笔记。

## 方法
刚初始化的 24 层、宽 128 的 Post-Norm 网络，读取标准库的 8 个 64 字节窗口，从平均交叉熵做 float64 的一次前向与反向：
Xavier 的注意力加 ReLU MLP（注意力增益为 1，MLP 为 0.32），N(0, 0.02^2) 的同一网络（增益低于 0.01），去掉因果掩码的
同一网络，只有注意力，以及只有 MLP 的 ReLU、GELU、SwiGLU（N(0, 1 / fan_in)）。残差流上的梯度逐词元记录：均方根、中位
词元、位置 0 的份额。每层系数为第 8 层后与第 24 层后梯度之比的 16 次方根，此处各词元已趋于相同。只做前向：
6 层与 24 层的 Pre-Norm 与 Sandwich-Norm。

理论（指南第 3 节）：分支既传信号也传梯度。相加后再归一化使梯度的均方乘以 (1 + chi) / (1 + v)，chi 为分支传回的部分：
ReLU 恰为 1，GELU 为 1.02，SwiGLU 为 1.28。注意力只把词元与他者共有的部分传回：其余乘以 1 / (1 + v)，v = 1 时为 1/2。

## 什么会推翻它
系数与 1/2（每层两次相加各 2^(-1/2)）、2^(-1/2)（每层一次）、1（没有）比较：对数上最近者即为所得。

## 开销
完整集约 4 CPU 分钟，快速集约 1.5 CPU 分钟。

## 这里无法说明的
训练后的模型。中位词元的梯度消失是否就是深层 Post-Norm 训练失败的原因：见 ``warmup``。
"""

VERSION = 1
DATA = ("standard-library",)
SEEDS = 3

_DEPTH, _FROM = 24, 8  # layers; the collapsed part begins after this one
_FACTORS = {"1/2": 0.5, "2^(-1/2)": 2**-0.5, "1": 1.0}  # a layer: two adds, one, none
_SURE = 2  # standard deviations
# v of one net strays by sqrt(2/H) = 12.5 % at H = 128 where tokens are alike; twice that around v = 1, in log2 an add
_HALF = (log2(1.75) / 2, log2(2.25) / 2)

# what a layer is made of: name in two languages, and the parameters
_KINDS: dict[str, tuple[Text, dict[str, Any]]] = {
    "full": (both("attention + ReLU MLP", "注意力 + ReLU MLP"), {"init": "xavier"}),
    "small": (both("the same, N(0, 0.02^2)", "同上，N(0, 0.02^2)"), {"init": "normal"}),
    "bidirectional": (both("the same, bidirectional", "同上，双向"), {"init": "xavier", "causal": False}),
    "attention": (both("attention alone", "只有注意力"), {"init": "xavier", "kinds": ["attention"]}),
    "relu": (both("ReLU MLP alone", "只有 ReLU MLP"), {"init": "fan-in", "kinds": ["mlp"]}),
    "gelu": (both("GELU MLP alone", "只有 GELU MLP"), {"init": "fan-in", "kinds": ["mlp"], "mlp": "gelu"}),
    "swiglu": (both("SwiGLU MLP alone", "只有 SwiGLU MLP"), {"init": "fan-in", "kinds": ["mlp"], "mlp": "swiglu"}),
}


def seconds(params: Params) -> float:
    """Return the CPU-seconds of a trial."""
    return params["depth"] * (0.09 if params["placement"] == "post" else 0.05)


def trials(quick: bool) -> list[dict[str, Any]]:
    """Return the trials."""
    usual = {"placement": "post", "mlp": "relu", "depth": _DEPTH, "width": 128, "embeddings": "unit"}
    made = [usual | {"of": name} | params for name, (_, params) in _KINDS.items()]
    depths = (_DEPTH,) if quick else (6, _DEPTH)
    for placement, init in (("pre", "xavier"), ("pre", "normal"), ("sandwich", "xavier")):
        made += [usual | {"of": "sum", "placement": placement, "init": init, "depth": depth} for depth in depths]
    return made


def measure(params: Params) -> dict[str, Any]:
    """Run a trial."""
    walked = through(params, backward=params["of"] != "sum")
    told = walked.told
    depth, adds = params["depth"], len(walked.added)
    step = adds // depth
    ratios = [skip / (skip + branch) for skip, branch in zip(walked.before, walked.branch, strict=True)]
    found: dict[str, Any] = {
        "adds": adds,
        "branch": fsum(walked.branch[-step * depth // 2 :]) / (step * depth // 2),
        "input_share": prod(ratios) ** 0.5,
        "size": sqrt(walked.q[-1]),
        "told_size": sqrt(told.q[-1]),
        "error": told.error[-1],
    }
    if params["of"] == "sum":
        return found
    at = places(depth)
    start = min(_FROM, depth // 2)
    for name, values, predicted in (
        ("token", walked.token_gradient, told.token_gradient[::step]),
        ("norm", walked.gradient, told.gradient[::step]),
    ):
        found |= {
            name: [values[layer] / values[-1] for layer in at],
            f"told_{name}": [predicted[layer] for layer in at],
            f"{name}_factor": (values[start] / values[-1]) ** (1 / (depth - start)),
            f"{name}_factor_below": (values[0] / values[start]) ** (1 / start),
            f"told_{name}_factor": predicted[start] ** (1 / (depth - start)),
        }
    return found | {"layers": at, "first_share": [walked.first_share[layer] for layer in at]}


def _nearest(factor: float) -> str:
    return min(_FACTORS, key=lambda name: abs(log(factor / _FACTORS[name])))


def _found(rows: Rows, metric: str) -> tuple[float, set[str]]:
    """Return the mean factor over seeds, and what each seed is nearest to."""
    values = rows.values(metric)
    return geometric_mean(values), {_nearest(value) for value in values}


def _by_kind(rows: Rows) -> list[tuple[Text, Rows]]:
    return [(title, rows.where(of=kind)) for kind, (title, _) in _KINDS.items() if rows.has(of=kind)]


def _judge_layer(rows: Rows) -> Judgement:
    """Compare the factors of the median token and of the norm, setting by setting, with 2^(-1/2)."""
    settings = Settings()
    rows.where(of="full")
    for title, each in _by_kind(rows):
        for metric, en, zh in (("token", "median token", "中位词元"), ("norm", "norm", "范数")):
            factor, near = _found(each, f"{metric}_factor")
            settings.add(near == {"2^(-1/2)"}, both(f"{title} ({en})", f"{title.zh}（{zh}）"), factor=factor)
    found = settings.told(
        lambda some: both(
            f"near it, {some.span('factor', '.2f')}, for {some.names}",
            f"接近它，为 {some.span('factor', '.2f')}：{some.names.zh}",
        ),
        lambda some: both(
            f"{some.span('factor', '.2f')} in {len(some)} others, in which a branch returns what the norm takes",
            f"其余 {len(some)} 种为 {some.span('factor', '.2f')}，归一化拿走的由分支传回",
        ),
    )
    return Judgement(
        settings.outcome,
        both(f"factor a layer, where 2^(-1/2) = 0.71: {found}", f"每层系数，2^(-1/2) = 0.71：{found.zh}"),
    )


def _judge_add(rows: Rows) -> Judgement:
    """See whether a layer of two adds has the factor 1/2."""
    factor, near = _found(rows.where(of="full"), "token_factor")
    alone, _ = _found(rows.where(of="relu"), "token_factor")
    names = " / ".join(sorted(near))
    one = Outcome.CONFIRMED if near == {"1/2"} else Outcome.REFUTED
    return Judgement(
        Outcome.OPEN if len(near) > 1 else one,
        both(
            f"a layer of attention and ReLU MLP has {factor:.2f} for the median token, nearest to {names}, where two "
            f"adds would have 1/2; an MLP alone has {alone:.2f}: its branch returns what the norm takes",
            f"注意力加 ReLU MLP 的一层对中位词元为 {factor:.2f}，最接近 {names}，而两次相加应为 1/2；只有 MLP 时为 "
            f"{alone:.2f}：归一化拿走的由分支传回",
        ),
    )


def _judge_norm(rows: Rows) -> Judgement:
    """See whether the root mean square over all tokens falls with 2^(-l/2) to the input."""
    each = rows.where(of="full")
    norms, tokens = ([row.metrics[name][0] for row in each] for name in ("norm", "token"))
    vanished = [norm < 2 ** (-_DEPTH / 4) for norm in norms]  # nearer to 2^(-L/2) than to 1
    share = each.curve("first_share")[0][0]
    expected = f"2^(-{_DEPTH}/2) = {2 ** (-_DEPTH / 2):.2g}"
    norm, token = spelled(norms, ".2f"), f"{geometric_mean(tokens):.2g}"
    one = Outcome.CONFIRMED if all(vanished) else Outcome.REFUTED
    return Judgement(
        Outcome.OPEN if any(vanished) and not all(vanished) else one,
        both(
            f"first of {_DEPTH} layers over the last: {norm} for the norm of the layer, {token} for the median token, "
            f"where {expected}; at the input {share:.1%} of the energy is on position 0",
            f"{_DEPTH} 层的首末之比：整层范数 {norm}，中位词元 {token}，而 {expected}；"
            f"入口处 {share:.1%} 的能量在位置 0 上",
        ),
    )


def _judge_input(rows: Rows) -> Judgement:
    """Compare the coefficient of x_0 with 2^(-1/2) an add."""
    settings = Settings()
    for title, each in _by_kind(rows):
        power = -log2(geometric_mean(each.values("input_share"))) / each.mean("adds")
        settings.add(_HALF[0] <= power <= _HALF[1], title, power=-power, v=each.mean("branch"))
    found = settings.told(
        lambda some: both(
            f"2^p with p = {some.span('power', 'z.2f')} where v = {some.span('v')} ({some.names})",
            f"v = {some.span('v')} 时为 2^p，p = {some.span('power', 'z.2f')}（{some.names.zh}）",
        ),
        lambda some: both(
            f"p = {some.span('power', 'z.2f')} where v = {some.span('v')}",
            f"v = {some.span('v')} 时 p = {some.span('power', 'z.2f')}",
        ),
    )
    return Judgement(
        settings.outcome,
        both(
            f"an add multiplies by (1 + v)^(-1/2): {found}. It is not the factor of the gradient, for the branch "
            "carries one too",
            f"每次相加乘以 (1 + v)^(-1/2)：{found.zh}。它不是梯度的系数，因为分支也传递梯度",
        ),
    )


def _judge_divisor(rows: Rows) -> Judgement:
    """Compare the size of summed streams with sqrt(adds + 1)."""
    settings = Settings()
    for (placement, init, _), each in rows.where(of="sum").groups("placement", "init", "depth"):
        size, want = each.mean("size"), sqrt(1 + each.mean("adds"))
        # a root of q is uncertain by half of what q is
        near = abs(size / want - 1) <= _SURE * each.mean("error") / 2 / sqrt(len(each))
        settings.add(near, f"{placement} {init}", ratio=size / want, told=each.mean("told_size") / want)
    found = settings.told(
        lambda some: both(
            f"{some.span('ratio', '.2f')} in {some.names}", f"{some.names.zh} 为 {some.span('ratio', '.2f')}"
        ),
        lambda some: both(
            f"{some.span('ratio', '.2f')} (sqrt(q_0 + sum v) says {some.span('told', '.2f')}) in {some.names}",
            f"{some.names.zh} 为 {some.span('ratio', '.2f')}（由 sqrt(q_0 + sum v) 得 {some.span('told', '.2f')}）",
        ),
    )
    return Judgement(
        settings.outcome,
        both(f"measured over sqrt(l + 1), l adds: {found}", f"测得值与 sqrt(l + 1) 之比，l 为相加次数：{found.zh}"),
    )


_NOTES = "Su Jianlin, https://kexue.fm/archives/8620 and https://kexue.fm/archives/9009, as commonly retold"
CLAIMS = (
    Claim(
        both("The gradient of Post-Norm decays as 2^(-l/2) over l layers", "Post-Norm 的梯度经 l 层按 2^(-l/2) 衰减"),
        _NOTES,
        _judge_layer,
    ),
    Claim(
        both("Every add costs the gradient a factor 2^(-1/2)", "每次相加都使梯度乘以 2^(-1/2)"),
        _NOTES,
        _judge_add,
    ),
    Claim(
        both(
            "The gradient norm of early Post-Norm layers vanishes at initialisation",
            "初始化时 Post-Norm 前几层的梯度范数消失",
        ),
        _NOTES,
        _judge_norm,
    ),
    Claim(
        both("What enters Post-Norm is multiplied by 2^(-1/2) at every add", "Post-Norm 的输入每次相加都乘以 2^(-1/2)"),
        _NOTES,
        _judge_input,
    ),
    Claim(
        both("Pre-Norm divides the sum of l branches by sqrt(l + 1)", "Pre-Norm 把 l 个分支之和除以 sqrt(l + 1)"),
        _NOTES,
        _judge_divisor,
    ),
)

_CONDITIONS = both(
    f"Post-Norm at initialisation, {_DEPTH} layers, 128 wide, float64; {WINDOWS} windows of {LENGTH} bytes of the "
    "standard library, x_0 ~ N(0, 1). Bands: smallest and largest of the seeds.",
    f"初始化时的 Post-Norm，{_DEPTH} 层，宽 128，float64；标准库的 {WINDOWS} 个 {LENGTH} 字节窗口，x_0 ~ N(0, 1)。"
    "色带：各种子的最小值与最大值。",
)


def _token(rows: Rows) -> Chart:
    return _curves(rows, "token", both("Gradient of the median token by layer", "各层中位词元的梯度"))


def _norm(rows: Rows) -> Chart:
    return _curves(rows, "norm", both("Gradient of the whole layer by layer", "各层整层的梯度"))


def _curves(rows: Rows, metric: str, title: str) -> Chart:
    lines = list[Line]()
    for kind in ("full", "small", "attention", "relu", "swiglu"):
        each, name = rows.where(of=kind), _KINDS[kind][0]
        line, told = along(name, each[0].metrics["layers"], each, metric), tuple(each.curve(f"told_{metric}")[0])
        predicted = both(f"{name}, predicted", f"{name.zh}，预测")
        lines += [line, Line(name=predicted, x=line.x, y=told, theory=True, like=name)]
    x = lines[0].x
    notes = tuple(2 ** ((layer - x[-1]) / 2) for layer in x)
    lines.append(Line(name=both("the notes: 2^(-l/2)", "笔记：2^(-l/2)"), x=x, y=notes, theory=True))
    return Chart(
        title=title,
        x_label=both("layer", "层"),
        y_label=both("root mean square over that at the end", "均方根与末端之比"),
        lines=tuple(lines),
        log_y=True,
        note=both(
            f"{_CONDITIONS} Dashed: normwise.theory.predict.", f"{_CONDITIONS.zh}虚线：normwise.theory.predict。"
        ),
    )


def _factors(rows: Rows) -> Table:
    names = ("token_factor_below", "token_factor", "told_token_factor", "norm_factor", "told_norm_factor")
    return Table(
        title=both("Factors of the gradient a layer", "每层的梯度系数"),
        columns=(
            both("layer", "层"),
            "v",
            both(f"median token, up to {_FROM}", f"中位词元，前 {_FROM} 层"),
            both(f"median token, from {_FROM}", f"中位词元，{_FROM} 层后"),
            both("predicted", "预测"),
            both(f"norm, from {_FROM}", f"范数，{_FROM} 层后"),
            both("predicted", "预测"),
        ),
        rows=tuple(
            (title, each.mean("branch"), *(geometric_mean(each.values(name)) for name in names))
            for title, each in _post(rows)
        ),
        note=both(f"{_CONDITIONS} 2^(-1/2) = 0.707.", f"{_CONDITIONS.zh}2^(-1/2) = 0.707。"),
    )


def _through(rows: Rows) -> Table:
    return Table(
        title=both(f"Through all {_DEPTH} layers", f"穿过全部 {_DEPTH} 层"),
        columns=(
            both("layer", "层"),
            both("median token, first / last", "中位词元，首 / 末"),
            both("norm, first / last", "范数，首 / 末"),
            both("share of position 0, first", "位置 0 的份额，首层"),
            both("coefficient of x_0", "x_0 的系数"),
        ),
        rows=tuple(
            (
                title,
                *(geometric_mean([row.metrics[name][0] for row in each]) for name in ("token", "norm")),
                each.curve("first_share")[0][0],
                geometric_mean(each.values("input_share")),
            )
            for title, each in _post(rows)
        ),
        note=both(
            f"{_CONDITIONS} 2^(-{_DEPTH}/2) = {2 ** (-_DEPTH / 2):.2g}.",
            f"{_CONDITIONS.zh}2^(-{_DEPTH}/2) = {2 ** (-_DEPTH / 2):.2g}。",
        ),
    )


def _post(rows: Rows) -> list[tuple[Text, Rows]]:
    if found := _by_kind(rows):
        return found
    raise NotKnown(both("no Post-Norm has been run", "没有运行过 Post-Norm"))


FIGURES = (_factors, _through, _token, _norm)
