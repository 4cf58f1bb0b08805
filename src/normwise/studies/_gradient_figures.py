"""Tables and charts of the study ``gradient-by-depth``."""

from __future__ import annotations

from statistics import geometric_mean
from typing import Any

from normwise.errors import NotKnown
from normwise.rendering import both
from normwise.rendering.plots import Chart, Line
from normwise.studies._curves import along
from normwise.studies._initial import LENGTH, WINDOWS
from normwise.studies._study import Rows, Table

__all__ = ["last", "matrices", "stream", "streams", "token", "w_2"]

_CONDITIONS = both(
    f"At initialisation, float64; {WINDOWS} windows of {LENGTH} bytes of the standard library, 128 wide, causal, x_0 ~ "
    "N(0, 1) unless said. Bands: smallest and largest of the seeds.",
    f"初始化时，float64；标准库的 {WINDOWS} 个 {LENGTH} 字节窗口，宽 128，因果，除注明外 x_0 ~ N(0, 1)。色带：各种子的"
    "最小值与最大值。",
)
_TOLD = both(
    "Dashed: normwise.theory.predict, which supposes that the gradients of tokens at the end are independent; in text "
    "they are not, and what they share adds up on position 0.",
    "虚线：normwise.theory.predict，它假设末端各词元的梯度相互独立；文本中并非如此，共有的部分累积在位置 0 上。",
)


def stream(rows: Rows) -> Chart:
    """Return the gradient on the stream by layer."""
    return _curves(
        rows,
        "gradient",
        both("Gradient on the stream by layer, Xavier, 24 layers", "各层残差流上的梯度，Xavier，24 层"),
        both("root mean square over that at the end", "均方根与末端之比"),
    )


def token(rows: Rows) -> Chart:
    """Return the same of the median token."""
    return _curves(
        rows,
        "token_gradient",
        both("The same for the median token", "同上，中位词元"),
        both("median token over that at the end", "中位词元与末端之比"),
    )


def _curves(rows: Rows, metric: str, title: str, label: str) -> Chart:
    some = rows.where(init="xavier", depth=24)
    lines = list[Line]()
    for (placement,), each in some.groups("placement"):
        line, told = along(placement, each[0].metrics["layers"], each, metric), tuple(each.curve(f"told_{metric}")[0])
        predicted = both(f"{placement}, predicted", f"{placement}，预测")
        lines += [line, Line(name=predicted, x=line.x, y=told, theory=True, like=placement)]
    return Chart(
        title=title,
        x_label=both("layer", "层"),
        y_label=label,
        lines=tuple(lines),
        log_y=True,
        note=both(f"ReLU. {_CONDITIONS} {_TOLD}", f"ReLU。{_CONDITIONS.zh}{_TOLD.zh}"),
    )


def w_2(rows: Rows) -> Chart:
    """Return the gradients of W_2 by layer, in Pre-Norm with the law of 1/sqrt(q)."""
    lines = list[Line]()
    some = rows.where(init="xavier", depth=24)
    for (placement,), each in some.groups("placement"):
        lines.append(along(placement, each[0].metrics["layers"][1:], each, "down"))
        if placement == "pre":
            mean, told = each.curve("down")[0], each.curve("told_down")[0]
            law = tuple(geometric_mean(mean) / geometric_mean(told) * value for value in told)
            lines.append(Line(name="pre, c / sqrt(q)", x=lines[-1].x, y=law, theory=True, like=placement))
    return Chart(
        title=both("Gradient of W_2 by layer, Xavier, 24 layers", "各层 W_2 的梯度，Xavier，24 层"),
        x_label=both("layer", "层"),
        y_label=both("Frobenius norm", "Frobenius 范数"),
        lines=tuple(lines),
        log_y=True,
        note=both(
            f"ReLU. {_CONDITIONS} Dashed: one over the predicted size of the stream after the MLP, at the "
            "height of the geometric mean.",
            f"ReLU。{_CONDITIONS.zh}虚线：MLP 之后残差流预测大小的倒数，高度取几何平均。",
        ),
    )


def last(rows: Rows) -> Chart:
    """Return the gradient of the last W_2 by the depth of the model."""
    lines = list[Line]()
    for placement in ("pre", "post", "deep-norm", "sandwich"):
        some = rows.where(placement=placement, init="xavier", embeddings="unit")
        depths = sorted(some.distinct("depth"))
        if len(depths) < 2:
            raise NotKnown(both("one depth alone has been run", "只运行了一种深度"))
        each = [some.where(depth=depth) for depth in depths]
        y = tuple(geometric_mean(one.values("down_last")) for one in each)
        x = tuple(map(float, depths))
        spreads = [one.spread("down_last") for one in each]
        low, high = (tuple(spread[end] for spread in spreads) for end in (0, 1))
        lines.append(Line(name=placement, x=x, y=y, low=low, high=high))
        if placement in ("pre", "post"):
            power = -0.5 if placement == "pre" else 0.0
            told = tuple(y[0] * (depth / depths[0]) ** power for depth in depths)
            lines.append(Line(name=f"{placement}, Theorem 1", x=x, y=told, theory=True, like=placement))
    return Chart(
        title=both("Gradient of the last W_2 by depth, Xavier", "最后一个 W_2 的梯度随深度的变化，Xavier"),
        x_label=both("layers of the model", "模型的层数"),
        y_label=both("Frobenius norm", "Frobenius 范数"),
        lines=tuple(lines),
        log_x=True,
        log_y=True,
        note=both(
            f"ReLU. {_CONDITIONS} Theorem 1 gives the power, 1/sqrt(L) or none; it is drawn through the least depth.",
            f"ReLU。{_CONDITIONS.zh}定理 1 给出幂次：1/sqrt(L) 或无关；通过最小深度的点画出。",
        ),
    )


def streams(rows: Rows) -> Table:
    """Return the gradient on the stream in all settings."""
    return Table(
        title=both(
            "Gradients on the stream at initialisation, first layer over last", "初始化时残差流上的梯度，首层与末层之比"
        ),
        columns=(
            both("placement", "放置方式"),
            both("start", "初始化"),
            "x_0",
            "L",
            both("q at the end", "末端 q"),
            both("stream", "残差流"),
            both("predicted", "预测"),
            both("median token", "中位词元"),
            both("share of position 0", "位置 0 的份额"),
        ),
        rows=tuple(
            (
                *setting,
                each.mean("q_last"),
                geometric_mean(each.values("first_to_last")),
                each.curve("told_gradient")[0][0],
                geometric_mean([row.metrics["token_gradient"][0] for row in each]),
                each.curve("first_share")[0][0],
            )
            for setting, each in _settings(rows)
        ),
        note=both(
            f"Geometric means over seeds; share of the energy in the first layer. {_CONDITIONS} {_TOLD}",
            f"对种子取几何平均；份额指首层的能量。{_CONDITIONS.zh}{_TOLD.zh}",
        ),
    )


def matrices(rows: Rows) -> Table:
    """Return the gradients of W_2 and W_Q in all settings."""
    names = ("down_first", "down_middle", "down_last", "query_first", "query_last")
    return Table(
        title=both("Gradients of W_2 and W_Q at initialisation", "初始化时 W_2 与 W_Q 的梯度"),
        columns=(
            both("placement", "放置方式"),
            both("start", "初始化"),
            "x_0",
            "L",
            both("W_2, first", "W_2，首层"),
            both("W_2, middle", "W_2，中层"),
            both("W_2, last", "W_2，末层"),
            both("W_Q, first", "W_Q，首层"),
            both("W_Q, last", "W_Q，末层"),
        ),
        rows=tuple(
            (*setting, *(geometric_mean(each.values(name)) for name in names)) for setting, each in _settings(rows)
        ),
        note=both(
            f"Frobenius norms, geometric means over seeds. {_CONDITIONS}",
            f"Frobenius 范数，对种子取几何平均。{_CONDITIONS.zh}",
        ),
    )


def _settings(rows: Rows) -> list[tuple[tuple[Any, ...], Rows]]:
    return rows.groups("placement", "init", "embeddings", "depth")
