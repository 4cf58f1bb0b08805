"""LayerNorm to RMSNorm, exactly: centre what writes to the residual stream.

## What it does
LN(x) = g * Cx / sqrt(|Cx|^2 / D + eps) + b, where C subtracts the mean over the D features. RMSNorm is the same
without C, so LN(x) = RMS(Cx) for the same eps, gain and bias, and what remains is to have Cx for nothing. Where every
reader of a residual stream is a LayerNorm, none of them notices a number added to all features of a token. Then each
writer is centred once and for all,

    W' = W - mean of W over its outputs,    c' = c - mean(c),    each row of an embedding less its mean

in float64, rounded once. A LayerScale s in front of the stream goes into the writer first: W' = C diag(s) W, s' = 1.
Gain and bias stay in the norm: no reader is touched, no key appears, tied weights stay tied.

## When it is exact
In evaluation always, for every norm that is not refused; in half precision the error even shrinks, since the stream
loses its mean. In training, dropout on the stream breaks the mean of zero, and gradients have a part along it.

A writer that cannot absorb a mean (a tied embedding, a norm with a gain, a buffer of positions taken in part) costs
one subtraction, made where a module returns or is given the value. Which are worth it is a minimum cut: a subtraction
must save more than one norm.

## What is refused
Norms of Post-Norm models: their stream holds the output of a norm with a gain, whose mean depends on the token, and
linear maps read it. A stream that a head, a hook or anything else but a LayerNorm reads. A stream multiplied by a
vector. Features joined before a norm. Norms computed inside a larger module, and those whose formula was not verified.

## Options
- ``weightless``: fold gain and bias into the readers, see ``fold-affine``, and drop both.
- ``fold_bias``: fold the bias alone.
- ``untie``: copy a tied embedding instead of subtracting its mean.
- ``consent``: ("hidden-states",) to convert where an output of the model shifts by a number a token.

## Example
```python
converted = nw.convert("rms-norm", model, inputs)
print(converted.proof)
```

## Sources
Jiang et al. 2023, Pre-RMSNorm and Pre-CRMSNorm Transformers, https://arxiv.org/abs/2305.14858; Ashkboos et al. 2024,
SliceGPT, https://arxiv.org/abs/2401.15024. Questions 60 and 63.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from inspect import signature

from normwise.conversions._dataflow.axes import carriers
from normwise.conversions._dataflow.idle import like_their_siblings, not_checked
from normwise.conversions._dataflow.streams import Cut, Hook, Streams, centred_axis
from normwise.conversions._edits import CentreInput, CentreOutput, Edit, SwapNorm, Untie, strange_hooks
from normwise.conversions._folding import Folding, fold, growth
from normwise.conversions._plan import Change, Plan, Recipe, Refusal, Step, merged
from normwise.conversions._specs import without_mean
from normwise.facts import vocabulary as ops
from normwise.facts.facts import Facts
from normwise.facts.norms import NormCall
from normwise.facts.records import Evidence
from normwise.facts.sites import Site
from normwise.graph import ALIAS, Graph, ValueKind

__all__ = ["plan"]

ZH = """把 LayerNorm 精确地换成 RMSNorm：让残差流的每个写入者均值为零。

## 做什么
LN(x) = g * Cx / sqrt(|Cx|^2 / D + eps) + b，其中 C 减去 D 个特征的均值。RMSNorm 就是没有 C 的同一公式，因此在 eps、
增益、偏置相同时 LN(x) = RMS(Cx)，剩下的只是免费得到 Cx。若残差流的每个读者都是 LayerNorm，那么给一个 token 的全部
特征加上同一个数，谁也察觉不到。于是每个写入者可以一劳永逸地中心化：

    W' = W - W 在输出维上的均值，    c' = c - mean(c)，    嵌入的每一行减去该行均值

以 float64 计算，只舍入一次。流前的 LayerScale s 先并入写入者：W' = C diag(s) W，s' = 1。
增益与偏置留在归一化中：不改动任何读者，不出现新的键，共享的权重仍然共享。

## 何时精确
凡未被拒绝的归一化，在推理时都精确；在半精度下误差甚至更小，因为流不再带有均值。训练时，流上的 dropout 会破坏零均值，
梯度也会多出沿均值方向的分量。

无法吸收均值的写入者（共享的嵌入、带增益的归一化、只取一部分的位置缓冲）需要一次显式减法，放在某个模块返回或接收该值的地方。是否值得由最小割
决定：一次减法必须省下多于一个归一化。

## 何时拒绝
Post-Norm 模型的归一化：它们的流里有带增益的归一化的输出，其均值因 token 而异，而且被线性映射读取。流还被输出头、钩子
或任何非 LayerNorm 读取。流乘以向量。归一化之前沿特征拼接。归一化写在更大的模块内部，或其公式未被验证。

## 选项
- ``weightless``：把增益与偏置折叠进读者（见 ``fold-affine``），并去掉二者。
- ``fold_bias``：只折叠偏置。
- ``untie``：复制共享的嵌入，而不是减去它的均值。
- ``consent``：("hidden-states",) 表示同意模型的某个输出按 token 平移一个数。

## 示例
```python
converted = nw.convert("rms-norm", model, inputs)
print(converted.proof)
```

## 来源
Jiang 等 2023，Pre-RMSNorm and Pre-CRMSNorm Transformers，https://arxiv.org/abs/2305.14858；Ashkboos 等 2024，
SliceGPT，https://arxiv.org/abs/2401.15024。问题 60 和 63。
"""

_CONSENTS = ("hidden-states",)


def plan(
    facts: Facts,
    *,
    weightless: bool = False,
    fold_bias: bool = False,
    untie: bool = False,
    consent: str | Sequence[str] = (),
) -> Plan:
    """Return what turns LayerNorms of a model into RMSNorms, with what stays and why; the options are the page's."""
    consent = (consent,) if isinstance(consent, str) else tuple(consent)
    unknown = sorted(set(consent) - set(_CONSENTS))
    if unknown:
        raise ValueError(f"nothing to consent to is called {unknown[0]!r}: choose from {', '.join(_CONSENTS)}")
    sites = [site for site in facts.sites if all(centred_axis(norm) is not None for norm in site.calls)]
    reasons = {site.row.path: _in_the_way(facts, site) for site in sites}
    able = [site for site in sites if reasons[site.row.path] is None]
    streams = Streams(facts, able, shifted_outputs="hidden-states" in consent, untie=untie)
    cut = streams.cut()
    alike = _siblings(streams, cut)
    converted = {site.row.path for site in cut.norms}
    refused = [reasons[site.row.path] or _why(streams, site) for site in sites if site.row.path not in converted]
    folding = Folding()
    if weightless or fold_bias:
        folding = fold(facts, cut.norms, what="both" if weightless else "bias", weightless=weightless, untie=untie)
    options = {"weightless": weightless, "fold_bias": fold_bias, "untie": untie, "consent": list(consent)}
    return Plan(
        conversion="rms-norm",
        options={name: value for name, value in options.items() if value},
        edits=(*folding.edits, *(e for e in _edits(streams, cut, folding) if e not in folding.edits)),
        recipes=merged([*folding.recipes, *_recipes(streams, cut, folding, alike)]),
        changes=tuple(_changes(streams, cut, folding)),
        refused=(*refused, *folding.refused),
        constants=folding.constants,
        ties=tuple(v.names for v in facts.graph.values if len(v.names) > 1),
        notes=(*_notes(streams, cut, folding, alike), *folding.notes),
    )


def _in_the_way(facts: Facts, site: Site) -> Refusal | None:
    """Say why a norm cannot be replaced wherever it stands, or None."""
    row, graph = site.row, facts.graph

    def refusal(why: str, unblock: str) -> Refusal:
        return Refusal(path=row.path, why=why, source=row.source, unblock=unblock)

    module = facts.modules.get(row.path)
    if module is None or next(module.children(), None) is not None:
        return refusal("the norm is computed inside a larger module", "move it into a module of its own")
    if row.evidence is not Evidence.VERIFIED:
        return refusal("what it computes was not verified", "use torch.nn.LayerNorm or a norm of normwise.layers")
    if strange_hooks(module):
        return refusal("the module has hooks", "remove them and convert again")
    if len({_axis_in_module(facts, norm) for norm in site.calls} - {None}) != 1:
        return refusal("its module computes more than the norm", "move the norm into a module of its own")
    held = dict(module.named_parameters(recurse=False))
    known = {row.weight_path, row.bias_path}
    names = {**held, **module.state_dict()}
    strangers = [name for name in names if f"{row.path}.{name}" not in known and not _is_alias(graph, site, name)]
    if strangers:
        return refusal(f"its tensor {strangers[0]!r} is neither gain nor bias", "use torch.nn.LayerNorm")
    takes = ", ".join(signature(module.forward).parameters)
    if "," in takes:
        return refusal(f"its forward takes {takes}, of which this run shows one use", "use torch.nn.LayerNorm")
    if any(t.is_quantized or not t.is_floating_point() for t in held.values()):
        return refusal("its parameters are quantised", "convert before quantising")
    return None


def _axis_in_module(facts: Facts, norm: NormCall) -> int | None:
    """Return the normalized axis in the layout that the norm's module takes and returns, if it does nothing else."""
    graph, call, axis = facts.graph, facts.graph.calls[norm.call], centred_axis(norm)
    if len(call.inputs) != 1 or len(call.outputs) != 1 or axis is None:
        return None
    given = _followed(graph, norm.input, axis, call.inputs[0])
    if given is None or _followed(graph, call.outputs[0], given, norm.output) != axis:
        return None
    # what else it computes may only prepare its parameters
    others = (op for op in graph.ops if op.call == call.id and op.outputs and op.id not in norm.members)
    alone = all(op.short in ops.VIEW or not any(facts.flow.data[value] for value in op.inputs) for op in others)
    return given if alone else None


def _followed(graph: Graph, value: int, axis: int, to: int) -> int | None:
    """Return the axis of the value ``to`` that comes out as ``axis`` of another through views, or None."""
    while value != to:
        op = graph.producer(value)
        found = carriers(graph, op, value, axis) if op is not None and op.short in ops.VIEW else None
        if not found or len(found) != 1:
            return None
        value, axis = found[0]
    return axis


def _is_alias(graph: Graph, site: Site, name: str) -> bool:
    names = [graph.values[v].names for n in site.calls for v in (n.weight, n.bias) if v is not None]
    return any(f"{site.row.path}.{name}" in each for each in names)


def _edits(streams: Streams, cut: Cut, folding: Folding) -> Iterator[Edit]:
    graph = streams.graph
    for value, names in streams.untied.items():
        for name in sorted(names) if _is_centred(cut, value) else ():
            path, _, own = name.rpartition(".")
            kept = next(n for n in graph.values[value].names if n not in names)
            yield Untie(path=path, name=own, source=kept)
    bare = {swap.path: swap for swap in folding.swaps}
    for site in cut.norms:
        row, axis = site.row, _axis_in_module(streams.facts, site.calls[0])
        assert row.spec is not None
        assert axis is not None
        size = row.shape[row.spec.axes[0]]
        swap = bare.get(row.path) or _as_it_is(streams, site)
        spec = replace(without_mean(swap.norm_spec, size), axes=(axis,))
        yield replace(swap, spec=asdict(spec), shape=(size,))
    for hook in cut.hooks:
        call = graph.calls[hook.call]
        held = call.outputs if hook.output else call.inputs
        kind = CentreOutput if hook.output else CentreInput
        for index in (i for i, value in enumerate(held) if value == hook.value):  # (hidden, residual) may be one tensor
            yield kind(path=call.path, index=index, axis=hook.axis)


def _as_it_is(streams: Streams, site: Site) -> SwapNorm:
    """Return the edit that keeps gain and bias under the names they have."""
    row, norm = site.row, site.calls[0]
    assert row.spec is not None
    names: dict[str, str] = {}
    for word, value in (("weight", norm.weight), ("bias", norm.bias)):
        keys = streams.graph.values[value].names if value is not None else ()
        own = next((name for path, _, name in (key.rpartition(".") for key in keys) if path == row.path), None)
        if own is not None:
            names[word] = own
    other = {word: own for word, own in names.items() if word != own}
    return SwapNorm(path=row.path, spec=asdict(row.spec), shape=(), keeps=tuple(names), names=other)


def _is_centred(cut: Cut, value: int) -> bool:
    return any(value == v for v, _ in cut.parameters)


def _recipes(streams: Streams, cut: Cut, folding: Folding, alike: Mapping[str, int]) -> Iterator[Recipe]:
    values = streams.graph.values

    def keys(value: int) -> tuple[str, ...]:
        return tuple(n for n in values[value].names if n not in streams.untied.get(value, ()))

    for value, axis in cut.parameters:
        yield Recipe(keys=keys(value), steps=(_centre(axis),))
    for name, axis in alike.items():
        yield Recipe(keys=(name,), steps=(_centre(axis),))
    scaled: dict[str, tuple[Step, ...]] = {}
    for writer in cut.scaled:
        scale = values[writer.scale].names[0]
        steps = (Step(function="scale", reads=(scale,), numbers={"dim": writer.dim}), _centre(writer.dim))
        yield Recipe(keys=keys(writer.weight), steps=steps)
        steps = (Step(function="scale", reads=(scale,), numbers={"dim": -1}), _centre(-1))
        scaled |= dict.fromkeys(keys(writer.weight), steps)
        if writer.bias is not None:
            yield Recipe(keys=keys(writer.bias), steps=steps)
        yield Recipe(keys=keys(writer.scale), steps=(Step(function="fill", numbers={"number": 1.0}),))
    alone = {name: (_centre(-1),) for value, _ in cut.parameters for name in keys(value)}
    for recipe in folding.recipes:  # a reader that writes to a stream and was given a bias
        path, _, name = recipe.keys[0].rpartition(".")
        steps = (alone | scaled).get(f"{path}.weight")
        if recipe.shape is not None and name == "bias" and steps is not None:
            yield replace(recipe, steps=steps)


def _siblings(streams: Streams, cut: Cut) -> dict[str, int]:
    """Return idle parameters that are centred like their siblings, with their axes."""
    values = streams.graph.values
    axes = {name: 0 for value in values if value.kind is ValueKind.PARAM for name in value.names}
    axes = {name: axis for name, axis in axes.items() if name not in streams.idle}
    axes |= {name: axis for value, axis in cut.parameters for name in values[value].names}
    return like_their_siblings(streams.idle, axes)


def _centre(axis: int) -> Step:
    return Step(function="centre", numbers={"dim": axis})


def _changes(streams: Streams, cut: Cut, folding: Folding) -> Iterator[Change]:
    folded = {change.path: f"; {change.what} {change.how}" for change in folding.changes}
    for site in cut.norms:
        how = f"its stream is centred{folded.get(site.row.path, '')}"
        yield Change(path=site.row.path, what="LayerNorm -> RMSNorm", how=how)
    for hook in cut.hooks:
        yield Change(path=streams.graph.calls[hook.call].path, what="mean subtracted", how=_where(hook))


def _where(hook: Hook) -> str:
    return "from what it returns" if hook.output else "from what it is given"


def _notes(streams: Streams, cut: Cut, folding: Folding, alike: Mapping[str, int]) -> Iterator[str]:
    values = streams.graph.values
    told = any(isinstance(edit, Untie) for edit in folding.edits)
    for value in (v for v in streams.untied if _is_centred(cut, v) and not told):
        yield f"{values[value].names[0]} is no longer tied: {growth(streams.facts, streams.untied[value])}"
    widths = {site.row.shape[site.row.spec.axes[0]] for site in cut.norms if site.row.spec}
    yield from not_checked({n: shape for n, shape in streams.idle.items() if n not in alike}, widths)


def _why(streams: Streams, site: Site) -> Refusal:
    """Say what keeps the stream of a norm from being centred."""
    norm, row = site.calls[0], site.row
    axis = centred_axis(norm)
    assert axis is not None
    obstacles = streams.nearest(norm.input, axis)
    obstacle = next((o for o in obstacles if o.kind not in ("writer", "leaf")), obstacles[0] if obstacles else None)
    op = obstacle.op if obstacle is not None else None
    place = (streams.graph.path(op) or "the model itself") if op is not None else "the model itself"
    normed = next((o.op for o in obstacles if o.kind == "writer" and o.op and o.op.id in streams.member), None)
    unblock = None
    if normed is not None and (obstacle is None or obstacle.kind in ("reader", "writer")):
        op, place = normed, streams.graph.path(normed)
        why = f"its stream holds the output of another norm, {place}, whose gain gives every token a mean of its own"
    elif obstacle is None:
        why = "its stream needs as many subtractions of a mean as they would save"
    elif obstacle.kind == "output":
        why = "its stream is an output of the model, which would shift by a number a token"
        unblock = 'consent with consent=("hidden-states",), --consent hidden-states'
    elif obstacle.kind == "hook":
        why, unblock = "its stream is seen by a forward hook", "remove the hook and convert again"
    elif obstacle.kind == "reader" and op is not None and op.name == ALIAS:
        why = f"a part of its stream is overwritten in place, in {place}"
    elif obstacle.kind == "reader" and op is not None and op.id in streams.ends and op.name.endswith("_"):
        why = f"its stream is written over a buffer or an input, in {place}, and stays there after the call"
    elif obstacle.kind == "reader":
        why = f"its stream is also read by what is no LayerNorm, in {place}"
        tied = len(streams.graph.values[obstacle.value].names) > 1 and not streams.untie
        unblock = "untie=True, --untie, gives that reader a copy of the embedding" if tied else None
    elif obstacle.kind == "writer":
        why = f"its stream is written by what cannot absorb the mean, in {place}; a subtraction costs what it saves"
    elif streams.graph.values[obstacle.value].kind is ValueKind.PARAM:
        names = " and ".join(streams.graph.values[obstacle.value].names)
        why, unblock = f"its stream starts from {names}, one of which this run did not use", "give inputs that use it"
    else:
        why = "its stream starts from a tensor that is no parameter; a subtraction costs what it saves"
    if ".parametrizations." in f".{place}.":
        unblock = "torch.nn.utils.parametrize.remove_parametrizations leaves a plain weight"
    source = str(op.source) if op is not None and op.source else row.source
    return Refusal(path=row.path, why=why, op=op.short if op else None, source=source, unblock=unblock)
