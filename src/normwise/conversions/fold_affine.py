"""Fold gain and bias of a norm into the linear maps that read it.

## What it does
A norm returns y = (o + g) * xhat + b, with an offset o that is 1 in some families (Gemma, Nemotron) and 0 in most.
Where every reader of y is a linear map W y + c with a weight of its own, the same function is

    W' = W diag(o + g),    c' = c + W b,    g' = 1 - o,    b' = 0

in float64, rounded once. No gain is divided by, so one that is zero folds like any other. The readers are found in
the traced graph, whatever the model calls them: linear maps, ``addmm`` and Conv1D with [in, out], products with a
transposed parameter, the experts of a mixture, convolutions with groups; behind views, transposes, selections and
means over other axes.

## When it is exact
Always in evaluation, for every norm that is not refused. The last bits differ, since the products are rounded
elsewhere. In training, dropout between a norm and its reader no longer drops the bias.

## What is refused
A norm that is read by anything but such maps: a residual add (post-norm), an output of the model, an elementwise op,
an attention, another norm. A reader whose weight something else reads as well, an embedding above all (``untie``). A
bias in front of zero padding, and the gain with it: b / g would have to stay. Weights that are quantised or computed
when the model runs. Modules with hooks. Parameters that this run did not use where they could read the norm.

## Options
- ``what``: "gain", "bias" or "both".
- ``weightless``: drop the parameters of the norms; else they stay as 1 and 0, or 0 for an offset of 1, and the
  checkpoint keeps its keys.
- ``create_bias``: give readers a bias where they have none. By default only where the norm's bias is not zero; a
  checkpoint with new biases is no longer one of the stock class.
- ``untie``: give a reader that shares its weight with an embedding a copy of its own.

## Example
```python
converted = nw.convert("fold-affine", model, inputs)
```

## Sources
Elhage et al. 2021, A Mathematical Framework for Transformer Circuits, https://transformer-circuits.pub/2021/framework;
Graef et al. 2024, FlashNorm, https://arxiv.org/abs/2407.09577. Questions 60 and 63.
"""

from __future__ import annotations

from normwise.conversions._folding import fold
from normwise.conversions._plan import Plan
from normwise.facts.facts import Facts

__all__ = ["plan"]

ZH = """把归一化的增益与偏置折叠进读取它的线性映射。

## 做什么
归一化返回 y = (o + g) * xhat + b，其中偏移 o 在一些模型族（Gemma、Nemotron）中为 1，多数为 0。若 y 的每个读者都是
带有自己权重的线性映射 W y + c，则同一函数为

    W' = W diag(o + g),    c' = c + W b,    g' = 1 - o,    b' = 0

以 float64 计算，只舍入一次。从不除以增益，因此为零的增益同样可以折叠。读者从追踪到的计算图中找出，与模型的命名无关：
线性映射、``addmm`` 与 [in, out] 的 Conv1D、与转置参数的乘积、混合专家、分组卷积；其间可以隔着视图、转置、选择和
对其他轴的平均。

## 何时精确
凡未被拒绝的归一化，推理时都精确。最后几位会不同，因为乘积在别处舍入。训练时，归一化与读者之间的 dropout 不再丢弃偏置。

## 何时拒绝
归一化还被别的东西读取：残差相加（post-norm）、模型的输出、逐元素运算、注意力、另一个归一化。读者的权重还被别处读取，
尤其是嵌入（``untie``）。零填充之前的偏置，连同增益：否则须留下 b / g。量化的权重，或运行时算出的权重。带钩子的模块。
本次运行没有用到、却可能读取该归一化的参数。

## 选项
- ``what``："gain"、"bias" 或 "both"。
- ``weightless``：去掉归一化的参数；否则它们保留为 1 与 0（偏移为 1 时增益为 0），检查点的键不变。
- ``create_bias``：给没有偏置的读者加上偏置。默认只在归一化的偏置不为零时；带有新偏置的检查点不再属于原来的类。
- ``untie``：给与嵌入共享权重的读者一份自己的副本。

## 示例
```python
converted = nw.convert("fold-affine", model, inputs)
```

## 来源
Elhage 等 2021，A Mathematical Framework for Transformer Circuits，https://transformer-circuits.pub/2021/framework；
Graef 等 2024，FlashNorm，https://arxiv.org/abs/2407.09577。问题 60 和 63。
"""


def plan(
    facts: Facts,
    *,
    what: str = "both",
    weightless: bool = False,
    create_bias: bool | None = None,
    untie: bool = False,
) -> Plan:
    """Return how gains and biases are folded into their readers; the options are those of the page.

    Raises:
        ValueError: ``what`` is none of "gain", "bias" and "both".
    """
    done = fold(facts, facts.sites, what=what, weightless=weightless, create_bias=create_bias, untie=untie)
    return Plan(
        conversion="fold-affine",
        options={"what": what, "weightless": weightless, "create_bias": create_bias, "untie": untie},
        edits=(*done.edits, *done.swaps),
        recipes=tuple(done.recipes),
        changes=tuple(done.changes),
        refused=tuple(done.refused),
        constants=done.constants,
        ties=tuple(v.names for v in facts.graph.values if len(v.names) > 1),
        notes=tuple(done.notes),
    )
