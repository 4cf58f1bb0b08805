"""Why a post-norm model cannot be made pre-norm, with the measured gap between the two.

## What it does
Nothing is ever converted. In a post-norm stream every sublayer ends in x = norm(x + f(x)); pre-norm is
x = x + f(norm(x)). In the first the skip carries a normalized value, whose size is that of the gain at every depth;
in the second it carries the plain sum, which grows. No choice of weights makes one into the other for every input:
the factor that norm(x + f(x)) takes out of the skip depends on the data. The plan says so for every residual stream,
in the model's own words, and how far the outputs move on the inputs given if every skip is taken from before its norm
while all weights stay. A stream that is pre-norm already needs no change.

## How the gap is measured
The model runs once more with its residual adds computed otherwise: the norm that stood behind one add now stands
before the next branch only, and the last one is the final norm. The relative difference is |y' - y| / |y| over the
whole output. For an output that a linear map made, as logits are, the share of positions with the same largest entry
is given, too.

## What to do instead
Train the pre-norm model anew: `normwise.models` has both placements. To make the norms of a post-norm model cheaper,
use `swap-layers`, which leaves them where they are.

## Example
```python
nw.conversions.plan("post-to-pre", model, inputs).refused
```

## Sources
Xiong et al. 2020, On Layer Normalization in the Transformer Architecture, https://arxiv.org/abs/2002.04745.
Questions 43, 45 and 60.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from normwise.conversions._plan import Plan, Refusal
from normwise.errors import NotKnown
from normwise.facts import vocabulary as ops
from normwise.facts.chains import Residual
from normwise.facts.facts import Facts
from normwise.facts.records import Stack, StackKind
from normwise.facts.rewiring import relative, rewired
from normwise.rendering import both

__all__ = ["plan"]

ZH = """为什么 post-norm 模型不能变成 pre-norm，以及两者之间实测的差距。

## 做什么
从不转换任何东西。post-norm 的残差流中，每个子层以 x = norm(x + f(x)) 结束；pre-norm 是 x = x + f(norm(x))。
前者的跳连携带归一化后的值，各层大小都由增益决定；后者携带不断增长的和。没有任何权重能让两者对所有输入相等：
norm(x + f(x)) 从跳连中除去的因子取决于数据。计划对每条残差流如实说明，并给出在所给输入上，若每个跳连都取自其归一化
之前而权重不变，输出会移动多少。已经是 pre-norm 的流无需改变。

## 如何测量差距
以另一种方式计算残差加法，再运行一次模型：原来位于一次加法之后的归一化，现在只位于下一个分支之前，最后一个成为最终
归一化。相对差为整个输出上的 |y' - y| / |y|。若输出由线性映射产生（如 logits），还给出最大项相同的位置所占比例。
刚初始化的模型中分支远小于跳连，差距也小：这不代表训练之后的情形。

## 替代办法
重新训练 pre-norm 模型：`normwise.models` 两种放置都有。若要让 post-norm 模型的归一化更快，用 `swap-layers`，
它不改变位置。

## 示例
```python
nw.conversions.plan("post-to-pre", model, inputs).refused
```

## 来源
Xiong 等 2020，On Layer Normalization in the Transformer Architecture，https://arxiv.org/abs/2002.04745。
问题 43、45 和 60。
"""

_FORMULAS = {
    StackKind.PRE: "pre-norm, x = x + f(norm(x))",
    StackKind.POST: "post-norm, x = norm(x + f(x))",
    StackKind.SANDWICH: "sandwich, x = x + norm(f(norm(x)))",
    StackKind.RES_POST: "normed on its branches, x = x + norm(f(x))",
    StackKind.PARALLEL: "parallel and pre-norm, x = x + f(norm(x)) + g(norm(x))",
    StackKind.PARALLEL_SHARED: "parallel and pre-norm, x = x + f(norm(x)) + g(norm(x))",
    StackKind.NONE: "without norms, x = x + f(x)",
}
_PRE = (StackKind.PRE, StackKind.PARALLEL, StackKind.PARALLEL_SHARED)
_INSTEAD = "train a pre-norm model anew; swap-layers makes the norms faster where they are"


def plan(facts: Facts) -> Plan:
    """Return a plan without changes: a refusal for every residual stream, with the measured gap if it is post-norm."""
    refused = tuple(_refusals(facts))
    if not refused:
        refused = (Refusal(path="", why="no residual stream was found, so no norm has a placement on one"),)
    return Plan(conversion="post-to-pre", refused=refused)


def _refusals(facts: Facts) -> Iterator[Refusal]:
    measured: str | None = None
    for stack in facts.placement.stacks:
        path, what = _place(stack), _FORMULAS.get(stack.kind, f"{stack.kind} ({_mixture(stack)})")
        if any(member.wiring.after_add for member in stack.members):
            measured = measured or _gap(facts)
            why = (
                f"its {stack.sublayers} sublayers are {what}; as pre-norm they would be another function for any "
                f"weights, since their skips would carry what was never normalized: {measured}"
            )
            yield Refusal(path=path, why=why, unblock=_INSTEAD)
        elif stack.kind in _PRE:
            yield Refusal(path=path, why=f"its {stack.sublayers} sublayers are {what} already: there is nothing to do")
        else:
            why = f"its {stack.sublayers} sublayers are {what}: none is post-norm, and any move is another function"
            yield Refusal(path=path, why=why, unblock=_INSTEAD)


def _mixture(stack: Stack) -> str:
    return ", ".join(f"{kind} x{count}" for kind, count in stack.mixture)


def _place(stack: Stack) -> str:
    """Return the module around all sublayers of a stack."""
    paths = [member.path.split(".") for member in stack.members]
    shared = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    return ".".join(shared)


def _gap(facts: Facts) -> str:
    """Say how far the outputs move with every skip of a post-norm sublayer taken from before its norm."""
    try:
        return _measured(facts)
    except NotKnown as unknown:
        return f"how far the outputs move was not measured, {unknown.why}"


def _measured(facts: Facts) -> str:
    adds = [a for s in facts.placed.streams for a in s.adds if a.skip.norms and a.skip.residual is not None]
    scales = {math.prod(add.skip.scales) for add in adds}
    if len(scales) != 1:
        raise NotKnown(both("the skips are scaled by different factors", "各跳连的系数不同"))
    scale = scales.pop()
    skips = {add.index: _before_norm(facts, add) for add in adds}
    outputs = [v for v in facts.graph.outputs if facts.graph.values[v].floating]
    base, run = facts.runs.base, rewired(facts, adds, lambda skip, branch: scale * skip + branch, outputs, skips=skips)
    gaps = {value: relative(run.of(value), base.of(value)) for value in outputs}
    if not gaps:
        raise NotKnown(both("the model returns no floating-point tensor", "模型不返回浮点张量"))
    said = f"measured on these inputs, with the weights as they are, the outputs move by {_percent(max(gaps.values()))}"
    logits = [value for value in outputs if _is_linear(facts, value)]
    if not logits:
        return said
    first = logits[0]
    same = (run.of(first).argmax(-1) == base.of(first).argmax(-1)).double().mean()
    return f"{said} and {float(same):.0%} of the positions keep their largest entry"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2g} %" if ratio < 1 else f"{100 * ratio:.0f} %"


def _before_norm(facts: Facts, add: Residual) -> int:
    """Return the value that the norm on an add's skip reads."""
    value, values = add.skip.norms[-1].input, facts.graph.values
    if values[value].shape != values[add.skip.values[0]].shape:
        raise NotKnown(both("a norm on a skip changes the shape", "跳连上的归一化改变了形状"))
    return value


def _is_linear(facts: Facts, value: int) -> bool:
    """Whether a linear map made a value."""
    op = facts.graph.producer(value)
    while op is not None and op.short in ops.VIEW and op.inputs:
        op = facts.graph.producer(op.inputs[0])
    return op is not None and op.short in ops.LINEAR
