"""LayerNorm to RMSNorm, exactly: centre what writes to the residual stream.

LN(x) = g * Cx / sqrt(|Cx|^2 / D + eps) + b, where C subtracts the mean over the D features; RMSNorm is the same without
C. So LN(x) = RMS(Cx) for the same eps, gain and bias, and what remains is to have Cx instead of x for nothing. Where
every reader of a residual stream is a LayerNorm, none of them notices a number added to all features of a token.
Then each writer may be centred for good: W' = W - mean over its outputs, embeddings and biases likewise. The
model computes the same function; every norm saves a reduction, and in half precision the error becomes smaller.

A writer that cannot absorb the mean (a tied embedding, a norm with a gain) costs one explicit subtraction, made where
a module returns or takes the value; a region is converted only where it saves more norms than it costs subtractions.
Post-Norm models stay as they are: their norms write the stream with a gain, and what is read from it is not a norm.

By default gain and bias stay in the norm: no reader is touched, no key appears, tied weights stay tied. The result is
the same function in evaluation; in training, dropout on the stream breaks the zero mean.

Options:
    weightless: fold gain and bias into the readers and drop both.
    fold_bias: fold the bias alone.
    untie: copy a tied embedding instead of subtracting its mean; the growth is said.
    consent: ("hidden-states",) to convert where an output of the model shifts by a number a token.

References:
    Jiang et al. 2023, arxiv.org/abs/2305.14858
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from normwise.conversions._axes import carriers
from normwise.conversions._edits import CentreInput, CentreOutput, Edit, SwapNorm, Untie
from normwise.conversions._plan import Change, Plan, Recipe, Refusal, Step
from normwise.conversions._regions import Cut, Hook, Streams, centred_axis
from normwise.facts import vocabulary as ops
from normwise.facts.facts import Facts
from normwise.facts.norms import NormCall
from normwise.facts.records import Evidence
from normwise.facts.sites import Site
from normwise.graph import Graph
from normwise.spec import Form, NormSpec, Statistic

__all__ = ["plan"]

_CONSENTS = ("hidden-states",)


def plan(
    facts: Facts,
    *,
    weightless: bool = False,
    fold_bias: bool = False,
    untie: bool = False,
    consent: tuple[str, ...] = (),
) -> Plan:
    """Return what turns LayerNorms of a model into RMSNorms, with what stays and why."""
    unknown = sorted(set(consent) - set(_CONSENTS))
    if unknown:
        raise ValueError(f"nothing to consent to is called {unknown[0]!r}: choose from {', '.join(_CONSENTS)}")
    sites = [site for site in facts.sites if all(centred_axis(norm) is not None for norm in site.calls)]
    reasons = {site.row.path: _in_the_way(facts, site) for site in sites}
    able = [site for site in sites if reasons[site.row.path] is None]
    streams = Streams(facts, able, shifted_outputs="hidden-states" in consent, untie=untie)
    cut = streams.cut()
    converted = {site.row.path for site in cut.norms}
    refused = [reasons[site.row.path] or _why(streams, site) for site in sites if site.row.path not in converted]
    options = {"weightless": weightless, "fold_bias": fold_bias, "untie": untie, "consent": list(consent)}
    made = Plan(
        conversion="rms-norm",
        options={name: value for name, value in options.items() if value},
        edits=tuple(_edits(streams, cut)),
        recipes=tuple(_recipes(streams, cut)),
        changes=tuple(_changes(streams, cut)),
        refused=tuple(refused),
        ties=tuple(v.names for v in facts.graph.values if len(v.names) > 1),
        notes=tuple(_notes(streams, cut)),
    )
    return made


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
    if module._forward_hooks or module._forward_pre_hooks:
        return refusal("the module has hooks", "remove them and convert again")
    if len({_axis_in_module(facts, norm) for norm in site.calls} - {None}) != 1:
        return refusal("its module computes more than the norm", "move the norm into a module of its own")
    held = dict(module.named_parameters(recurse=False))
    known = {row.weight_path, row.bias_path}
    strangers = [name for name in held if f"{row.path}.{name}" not in known and not _is_alias(graph, site, name)]
    if strangers:
        return refusal(f"its parameter {strangers[0]!r} is neither gain nor bias", "use torch.nn.LayerNorm")
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
    return (
        given
        if all(op.short in ops.VIEW or not any(map(facts.flow.data.__getitem__, op.inputs)) for op in others)
        else None
    )


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


def without_mean(spec: NormSpec, size: int) -> NormSpec:
    """Return the spec of the RMSNorm that a LayerNorm is on centred input.

    A variance that divides by D - 1 is the mean square times D / (D - 1): the factor goes to the output and to eps.
    """
    bare = replace(spec, center=False, statistic=Statistic.MEAN_SQUARE, biased=True, form=Form.RECIPROCAL)
    if spec.biased:
        return bare
    root = (size / (size - 1)) ** 0.5
    eps = None if spec.eps is None else spec.eps / (root * root if spec.eps_inside else root)
    return replace(bare, factor=spec.factor / root, eps=eps)


def _edits(streams: Streams, cut: Cut) -> Iterator[Edit]:
    graph = streams.graph
    for value, names in streams.untied.items():
        for name in sorted(names) if _is_centred(cut, value) else ():
            path, _, own = name.rpartition(".")
            kept = next(n for n in graph.values[value].names if n not in names)
            yield Untie(path=path, name=own, source=kept)
    for site in cut.norms:
        row, module = site.row, streams.facts.modules[site.row.path]
        spec = row.spec
        assert spec is not None
        size, axis = row.shape[spec.axes[0]], _axis_in_module(streams.facts, site.calls[0])
        assert axis is not None
        rms = replace(without_mean(spec, size), axes=(axis,))
        keeps = tuple(name for name, _ in module.named_parameters(recurse=False))
        yield SwapNorm(path=row.path, spec=asdict(rms), shape=(size,), keeps=keeps)
    for hook in cut.hooks:
        call = graph.calls[hook.call]
        held = call.outputs if hook.output else call.inputs
        kind = CentreOutput if hook.output else CentreInput
        yield kind(path=call.path, index=held.index(hook.value), axis=hook.axis)


def _is_centred(cut: Cut, value: int) -> bool:
    return any(value == v for v, _ in cut.parameters)


def _recipes(streams: Streams, cut: Cut) -> Iterator[Recipe]:
    values = streams.graph.values

    def keys(value: int) -> tuple[str, ...]:
        return tuple(n for n in values[value].names if n not in streams.untied.get(value, ()))

    for value, axis in cut.parameters:
        yield Recipe(keys=keys(value), steps=(_centre(axis),))
    for writer in cut.scaled:
        scale = values[writer.scale].names[0]
        steps = (Step(function="scale", reads=(scale,), numbers={"dim": writer.dim}), _centre(writer.dim))
        yield Recipe(keys=keys(writer.weight), steps=steps)
        if writer.bias is not None:
            steps = (Step(function="scale", reads=(scale,), numbers={"dim": -1}), _centre(-1))
            yield Recipe(keys=keys(writer.bias), steps=steps)
        yield Recipe(keys=keys(writer.scale), steps=(Step(function="fill", numbers={"number": 1.0}),))


def _centre(axis: int) -> Step:
    return Step(function="centre", numbers={"dim": axis})


def _changes(streams: Streams, cut: Cut) -> Iterator[Change]:
    for site in cut.norms:
        yield Change(path=site.row.path, what="LayerNorm -> RMSNorm", how="its stream is centred")
    for hook in cut.hooks:
        yield Change(path=streams.graph.calls[hook.call].path, what="mean subtracted", how=_where(hook))


def _where(hook: Hook) -> str:
    return "from what it returns" if hook.output else "from what it is given"


def _notes(streams: Streams, cut: Cut) -> Iterator[str]:
    values = streams.graph.values
    for value in (v for v in streams.untied if _is_centred(cut, v)):
        total = sum(v.numel for v in values if v.kind == "param")
        growth = 100 * values[value].numel * len(streams.untied[value]) / total
        yield f"{values[value].names[0]} is no longer tied: +{growth:.1f} % parameters"


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
    elif obstacle.kind == "reader":
        why = f"its stream is also read by what is no LayerNorm, in {place}"
    elif obstacle.kind == "writer":
        why = f"its stream is written by what cannot absorb the mean, in {place}; a subtraction costs what it saves"
    else:
        why = "its stream starts from a tensor that is no parameter; a subtraction costs what it saves"
    source = str(op.source) if op is not None and op.source else row.source
    return Refusal(path=row.path, why=why, op=op.short if op else None, source=source, unblock=unblock)
