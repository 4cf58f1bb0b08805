"""The gradients of norms, compared with autograd of the formula that their forward computes.

A backward pass written by hand (an ``autograd.Function``, a fused kernel) is invisible in a trace of the forward. So
the module that holds the norm is run by itself with gradients on random rows, and beside it the recorded ops in
float64, where autograd gives the true gradient. Whether the norm itself is written so is settled by where its value was
computed: under autograd, or with autograd switched off inside such a function.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normwise.errors import NotKnown
from normwise.facts import vocabulary as ops
from normwise.facts.calls import NormCall
from normwise.facts.gradients import (
    SAME_FORWARD,
    Truth,
    Watch,
    differentiable,
    distance,
    distinct,
    has_function,
    largest_error,
    leaf_of,
    refuses,
)
from normwise.facts.replay import Replayer
from normwise.facts.rows import alike
from normwise.facts.sites import Site
from normwise.graph import OPAQUE, Call, ValueKind
from normwise.graph.capture import tensors_in
from normwise.graph.guard import as_found
from normwise.graph.trace import eager
from normwise.rendering import both
from normwise.spec import Weight, reference

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["CUT", "Backward", "Probed", "probe"]

_SEED = 20261129
# What is computed under no_grad takes a term out of the gradient: several percent of it on random rows at any width
CUT = 1e-2
# A float32 gradient summed over a few hundred rows agrees to 1e-5; half precision to 1e-2 and 1e-1
ROUNDING = {torch.float16: 5e-2, torch.bfloat16: 2e-1, torch.float32: 1e-3, torch.float64: 1e-6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What the backward probe of one kind of norm showed."""

    sites: tuple[Site, ...]
    holder: str  # path of the module that was run
    custom: bool  # its backward is written by hand
    error: float  # largest relative error of a gradient against float64; inf where it is not finite or missing
    of: str  # the input or parameter it belongs to
    limit: float  # errors up to here are rounding
    overwrites: bool  # writes into the gradient it is given
    shared: bool  # in this model an add hands the same gradient to another branch
    second_order: float | None  # relative error of the second derivative; None where there is none to compare

    @property
    def wrong(self) -> bool:
        """Whether the gradient is another than that of the formula."""
        return self.error > self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """All that was probed, and why something was not."""

    probed: tuple[Probed, ...]
    unknown: tuple[str, ...]


def probe(facts: Facts) -> Backward:
    """Run every kind of hand-written norm forward and backward.

    Raises:
        NotKnown: the model holds no numbers.
    """
    if facts.traced.graph.fake:
        raise NotKnown(both("the model holds no numbers", "模型没有数值"))
    probed, unknown = [], []
    whole_model_is_plain = (
        False  # nothing in it has a backward of its own: one pass says so for all norms that it holds
    )
    for holder, sites in _kinds(facts):
        if holder.id == 0 and whole_model_is_plain:
            continue
        try:
            found = _Probe(facts, holder, sites).run()
        except NotKnown as why:
            unknown.append(why.why)
        else:
            probed.extend([found] if found is not None else [])
            whole_model_is_plain |= holder.id == 0 and found is None
    return Backward(probed=tuple(probed), unknown=tuple(dict.fromkeys(unknown)))


def _kinds(facts: Facts) -> Iterator[tuple[Call, tuple[Site, ...]]]:
    """Yield a module call and the sites alike that it speaks for: the same ops in modules of one class."""
    graph, modules = facts.traced.graph, facts.modules
    for group in alike((s for s in facts.sites if not s.row.native), facts.recording):
        kinds: dict[type | None, list[Site]] = {}
        for site in group:
            kinds.setdefault(type(modules.get(graph.calls[site.calls[0].call].path)), []).append(site)
        for sites in kinds.values():
            yield graph.calls[sites[0].calls[0].call], tuple(sites)


@dataclass
class _Live:
    """A forward with gradients of the holder."""

    inputs: list[torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    outputs: list[torch.Tensor]
    untracked: bool  # the norm's value was computed with autograd switched off


@dataclass
class _Probe:
    facts: Facts
    holder: Call
    sites: tuple[Site, ...]
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(_SEED))

    @property
    def norm(self) -> NormCall:
        return self.sites[0].calls[0]

    @property
    def whole(self) -> bool:
        """Whether the module is the norm and nothing else."""
        return self._outputs == (self.norm.output,) and self.norm.input in self._inputs

    @property
    def _outputs(self) -> tuple[int, ...]:
        return self.holder.outputs if self.holder.id else self.facts.traced.graph.outputs

    @property
    def _inputs(self) -> tuple[int, ...]:
        values = self.facts.traced.graph.values
        return self.holder.inputs if self.holder.id else tuple(v.id for v in values if v.kind is ValueKind.INPUT)

    def run(self) -> Probed | None:
        """Return what the probe showed, None where autograd made the gradient anyway."""
        graph, model = self.facts.traced.graph, self.facts.target.model
        floating = [v for v in self.holder.inputs if graph.values[v].floating]
        if self.holder.id == 0 or len(self.holder.inputs) != 1 or len(floating) != 1:
            return self._run_on_record(floating)
        module = model.get_submodule(self.holder.path)
        record = graph.values[floating[0]]
        x = torch.randn(record.shape, generator=self.generator, device="cpu")
        x = x.to(self.facts.rows.device, getattr(torch, record.dtype)).requires_grad_()
        return self._compare(module, (x,), {}, (floating[0],))

    def _run_on_record(self, floating: list[int]) -> Probed | None:
        """Probe a norm in a module of several arguments, or in the model itself, on the values of the example run."""
        graph, target = self.facts.traced.graph, self.facts.target
        if self.holder.id == 0:
            given = [v.id for v in graph.values if v.kind is ValueKind.INPUT]
            self.facts.spend()
            return self._compare(target.model, target.args, dict(target.kwargs), tuple(given))
        if not floating or len(floating) != len(self.holder.inputs):
            raise NotKnown(
                both("the module that holds the norm takes more than tensors", "含该归一化的模块的参数不只是张量")
            )
        args = tuple(self.facts.runs.base.of(v) for v in floating)
        return self._compare(target.model.get_submodule(self.holder.path), args, {}, tuple(floating))

    # -- the comparison ----------------------------------------------------------------------------

    def _compare(self, module: nn.Module, args: Any, kwargs: Any, values: tuple[int, ...]) -> Probed | None:
        with as_found(module, inputs=(args, kwargs)), eager(), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args, kwargs = differentiable((args, kwargs))
            given = dict(zip(values, distinct((args, kwargs)), strict=False))
            truth = self._replayed(given, module)
            try:
                live = self._forward(module, args, kwargs, truth)
                if live is None or not (live.untracked or self.whole):
                    return None
                return self._judged(live, truth)
            except NotKnown:
                raise
            except Exception as error:  # the user's code may refuse to run alone, or without a GPU
                said = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise NotKnown(
                    both(
                        f"the module that holds the norm cannot be run by itself: {said}",
                        f"含该归一化的模块无法单独运行：{said}",
                    )
                ) from error

    def _forward(self, module: nn.Module, args: Any, kwargs: Any, truth: Truth) -> _Live | None:
        parameters = {n: p for n, p in module.named_parameters() if p.is_floating_point()}
        if any(p.is_inference() for p in parameters.values()):
            raise NotKnown(both("the parameters were made in inference mode", "参数是在推理模式下创建的"))
        for parameter in parameters.values():
            parameter.requires_grad_()
        watch = Watch(truth.core)
        with watch:
            output = module(*args, **kwargs)
        outputs = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
        if not outputs:
            return None
        inputs = [t for t in distinct((args, kwargs)) if t.requires_grad]
        untracked = watch.untracked or truth.opaque
        return _Live(inputs, parameters, outputs, untracked and has_function(outputs))

    def _judged(self, live: _Live, truth: Truth) -> Probed:
        expected = [truth.like(t) for t in live.outputs]
        dtype = self._narrowest(live)
        for made, true in zip(live.outputs, expected, strict=True):
            if distance(made, true) > SAME_FORWARD[dtype]:
                raise NotKnown(both("the norm run by itself gives other values", "单独运行时该归一化给出不同的值"))
        directions = [torch.randn(t.shape, generator=self.generator, device="cpu").to(t) for t in live.outputs]
        copies = [d.clone() for d in directions]
        names = [*(f"input {i}" for i in range(len(live.inputs))), *live.parameters]
        wanted = [*live.inputs, *live.parameters.values()]
        second = self._second_order(live, truth, directions) if live.untracked else None
        made = torch.autograd.grad(live.outputs, wanted, directions, allow_unused=True)
        true = truth.gradients(expected, wanted, copies)
        error, of = largest_error(names, made, true)
        overwrites = any(not torch.equal(a, b) for a, b in zip(directions, copies, strict=True))
        return Probed(
            sites=self.sites,
            holder=self.holder.path,
            custom=live.untracked,
            error=error,
            of=of,
            limit=ROUNDING[dtype] if live.untracked else max(ROUNDING[dtype], CUT),
            overwrites=overwrites,
            shared=any(self._shares(call) for site in self.sites for call in site.calls),
            second_order=second,
        )

    def _narrowest(self, live: _Live) -> torch.dtype:
        """Return the dtype that rounds most among what the gradient passes through."""
        values, graph_ops = self.facts.traced.graph.values, self.facts.traced.graph.ops
        inside = {values[o].dtype for m in self.norm.members for o in graph_ops[m].outputs if values[o].floating}
        seen = {t.dtype for t in (*live.outputs, *live.inputs, *live.parameters.values())}
        seen |= {getattr(torch, name) for name in inside}
        return max((d for d in seen if d in ROUNDING), key=lambda d: ROUNDING[d], default=torch.float32)

    def _second_order(self, live: _Live, truth: Truth, directions: list[torch.Tensor]) -> float | None:
        """Return the error of the gradient of the gradient; None where torch says that there is none."""
        if not self.whole or live.outputs[0].dtype not in (torch.float32, torch.float64):
            return None
        try:
            # "once_differentiable" refuses only where the gradient that it is given asks for a gradient too
            clones = [d.clone().requires_grad_() for d in directions]
            first = torch.autograd.grad(live.outputs, live.inputs[:1], clones, create_graph=True)
            direction = torch.randn(first[0].shape, generator=self.generator, device="cpu").to(first[0])
            made: tuple[torch.Tensor | None, ...] = (None,)  # constants: the second derivative is cut
            if refuses(first[0]):
                return None
            if first[0].requires_grad:
                made = torch.autograd.grad(
                    first, live.inputs[:1], [direction.clone()], retain_graph=True, allow_unused=True
                )
        except RuntimeError:  # torch says so itself: honest
            return None
        expected = [truth.like(t) for t in live.outputs]
        leaf = [truth.leaf(live.inputs[0])]
        once = torch.autograd.grad(expected, leaf, [d.double() for d in directions], create_graph=True)
        true = torch.autograd.grad(once, leaf, [direction.double()], retain_graph=True, allow_unused=True)
        return largest_error(["input 0"], made, true)[0]

    def _shares(self, call: NormCall) -> bool:
        """Whether a norm's output is added to something else that needs a gradient: both get the same one."""
        graph, data = self.facts.traced.graph, self.facts.traced.data
        pending = [call.output]
        while pending:
            value = pending.pop()
            for op in graph.consumers(value):
                if op.short in ops.ADD and any(data[i] for i in op.inputs if i != value):
                    return True
                if op.short in ops.VIEW:
                    pending.extend(op.outputs)
        return False

    # -- the truth ---------------------------------------------------------------------------------

    def _replayed(self, given: dict[int, torch.Tensor], module: nn.Module) -> Truth:
        """Compute in float64 what the holder's outputs are, by the recorded ops or by the norm's formula."""
        graph, recording = self.facts.traced.graph, self.facts.traced
        opaque = any(
            graph.ops[m].name == OPAQUE or graph.ops[m].namespace not in ("aten", "prims") for m in self.norm.members
        )
        leaves = {v: leaf_of(t) for v, t in given.items()}
        pairs = [(given[v], leaf) for v, leaf in leaves.items()]
        prefix = f"{self.holder.path}." if self.holder.path else ""
        by_name = {n: v.id for v in graph.values if v.kind is ValueKind.PARAM for n in v.names}
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point() and (value := by_name.get(prefix + name)) is not None:
                leaves[value] = leaf_of(parameter.detach(), grad=True)
                pairs.append((parameter, leaves[value]))
        ends = [v for v in self._outputs if graph.values[v].floating]
        if opaque:
            return self._by_formula(module, given, pairs)
        replayer = Replayer(recording, self.facts.target.model)
        memo = dict(leaves)
        core = replayer(self.norm.core, memo, grad=True)
        return Truth(core=core, outputs=[replayer(v, memo, grad=True) for v in ends], pairs=pairs, opaque=False)

    def _by_formula(
        self, module: nn.Module, given: dict[int, torch.Tensor], pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> Truth:
        spec, own = self.norm.spec, [p for p in module.parameters() if p.is_floating_point()]
        if spec is None or not self.whole or len(own) > 2 or self.norm.input not in given:
            raise NotKnown(both("the norm's formula is not known", "不知道该归一化的公式"))
        spec = dataclasses.replace(spec, weight=Weight.VECTOR if own else Weight.NONE, bias=len(own) == 2)
        leaf = {id(a): b for a, b in pairs}
        x = leaf[id(given[self.norm.input])]
        output = reference(spec, x, *(leaf[id(p)] for p in own if id(p) in leaf))
        return Truth(core=output, outputs=[output], pairs=pairs, opaque=True)
