"""What a norm makes of rows chosen to be hard for it, in the dtypes it really ran in and in float64."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from normwise.errors import NotKnown
from normwise.facts.norms import NormCall
from normwise.facts.replay import Replayer
from normwise.facts.sites import Site
from normwise.graph import Recording
from normwise.graph.guard import as_found
from normwise.rendering import both
from normwise.spec import Cast, Gate, Modulation, NormSpec, Weight, reference

__all__ = ["Rows", "alike"]

_SEED = 20261129
# bfloat16 keeps 8 bits: two roundings of a norm's output are 0.4 % of it, another function is tens of percent
_ROUNDED = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """What a norm makes of rows whose elements are all one number."""

    forward_finite: bool
    gradient_finite: bool


class Rows:
    """Replays the core of a norm (no gain, no shift) on chosen data."""

    def __init__(self, recording: Recording, model: torch.nn.Module) -> None:
        self.graph, self.model = recording.graph, model
        self.recorded = Replayer(recording, model, dtype=None)
        self.double = Replayer(recording, model)
        self.device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))

    def constant(self, call: NormCall, number: float, spec: NormSpec | None = None) -> Constant:
        """Feed rows of one number, forward and backward, in the recorded dtypes.

        Args:
            call: the norm.
            number: what the rows are made of.
            spec: judge this formula in place of what ran.

        Raises:
            NotKnown: the norm cannot be replayed by itself.
        """
        x = self._like_input(call).fill_(number).requires_grad_()
        y = self.core(call, x, spec, grad=True)
        if not y.requires_grad:
            raise NotKnown(
                both("the norm's output does not depend on its input in a replay", "回放时该归一化的输出不依赖输入")
            )
        (gradient,) = torch.autograd.grad(y, x, torch.randn(y.shape, generator=_generator(), device="cpu").to(y))
        return Constant(forward_finite=bool(y.isfinite().all()), gradient_finite=bool(gradient.isfinite().all()))

    def error(
        self, call: NormCall, *, scale: float = 1.0, spike: float | None = None, spec: NormSpec | None = None
    ) -> float:
        """Return the relative error of the norm against float64 on standard normal rows; inf if it is not finite.

        Args:
            call: the norm.
            scale: factor on every element.
            spike: value of the first element of each row.
            spec: judge this formula in place of what ran.

        Raises:
            NotKnown: the norm cannot be replayed by itself.
        """
        x = self._like_input(call)
        x = (torch.randn(x.shape, generator=_generator(), dtype=torch.float64, device="cpu") * scale).to(x)
        if spike is not None:
            x[..., 0] = spike
        return self.error_on(call, x, spec)

    def error_on(self, call: NormCall, x: torch.Tensor, spec: NormSpec | None = None) -> float:
        """Return the relative error of the norm against float64 on the given input; inf if it is not finite."""
        got = self.core(call, x, spec).cpu().double()
        expected = self.double(call.core, {call.input: x.cpu().double()})
        if not got.isfinite().all():
            return math.inf
        return float((got - expected).norm() / expected.norm())

    def parameter_error(self, call: NormCall, rows: int) -> float:
        """Return the largest relative error of the gradients of gain and shift over many rows.

        The module that is the norm is run as it is; a norm inside a larger one is replayed. The upstream gradient is
        1 + the normalized value, so that every sum is about the number of rows. It runs in one thread: each of several
        adds up its own rows, so that the error would depend on how many there are.

        Raises:
            NotKnown: the norm cannot be run by itself, or has no parameters.
        """
        record = self.graph.values[call.input]
        x = torch.randn((rows, *record.shape[-1:]), generator=_generator(), device="cpu")
        x = x.to(self.device, getattr(torch, record.dtype))
        held = {
            v: self.recorded.tensors[self.graph.values[v].names[0]] for v in (call.weight, call.bias) if v is not None
        }
        leaves = {v: p.detach().double().requires_grad_() for v, p in held.items()}
        true = self.double(call.output, {call.input: x.double(), **leaves}, grad=True)
        core = self.double(call.core, {call.input: x.double(), **leaves}).detach()
        holder = self.graph.calls[call.call]
        alone = holder.id > 0 and len(holder.inputs) == len(holder.outputs) == 1
        with _one_thread():
            made = self._module_gradients(holder.path, x, list(held.values()), core, true) if alone else None
            if made is None:
                made = self._replayed_gradients(call, x, held, core)
        if true.requires_grad:
            expected = torch.autograd.grad(true, list(leaves.values()), (1 + core).reshape(true.shape))
        else:  # a layer with a backward of its own detaches the parameters in its forward
            expected = [((1 + core) * (core if v == call.weight else 1)).sum(0) for v in held]
        pairs = [(a.double().cpu(), b.cpu().reshape(a.shape)) for a, b in zip(made, expected, strict=True)]
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)

    def _module_gradients(
        self, path: str, x: torch.Tensor, parameters: list[torch.Tensor], core: torch.Tensor, true: torch.Tensor
    ) -> tuple[torch.Tensor, ...] | None:
        """Return what the module that holds a norm gives; None where it is not the norm alone."""
        module = self.model.get_submodule(path)
        with as_found(module), torch.enable_grad():
            try:
                for parameter in parameters:
                    parameter.requires_grad_()
                y = module(x)
                if y.shape != true.shape or float((y - true).detach().norm() / true.detach().norm()) > _ROUNDED:
                    return None
                return torch.autograd.grad(y, parameters, (1 + core).to(y.dtype).reshape(y.shape))
            except Exception:  # the user's code may refuse these rows
                return None

    def _replayed_gradients(
        self, call: NormCall, x: torch.Tensor, held: dict[int, torch.Tensor], core: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        leaves = {v: p.detach().clone().requires_grad_() for v, p in held.items()}
        y = self.recorded(call.output, {call.input: x, **leaves}, grad=True)
        if not leaves or not y.requires_grad:
            raise NotKnown(both("the norm cannot be differentiated by itself", "该归一化无法单独求导"))
        return torch.autograd.grad(y, list(leaves.values()), (1 + core).to(y.dtype).reshape(y.shape))

    def core(self, call: NormCall, x: torch.Tensor, spec: NormSpec | None, *, grad: bool = False) -> torch.Tensor:
        """Return the normalized value of an input in the recorded dtypes, or what a spec makes of it."""
        if spec is None:
            return self.recorded(call.core, {call.input: x}, grad=grad)
        with torch.set_grad_enabled(grad):
            return reference(_core(spec), x)

    def _like_input(self, call: NormCall) -> torch.Tensor:
        record = self.graph.values[call.input]
        return torch.empty(record.shape, dtype=getattr(torch, record.dtype), device=self.device)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _core(spec: NormSpec) -> NormSpec:
    """Return the spec without what follows the quotient."""
    plain = replace(spec, weight_on_input=False, cast=Cast.NONE, out_dtype=None)
    return replace(plain, weight=Weight.NONE, bias=False, modulation=Modulation.NONE, gate=Gate.NONE)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


def alike(sites: Iterable[Site], recording: Recording) -> Iterator[tuple[Site, ...]]:
    """Group sites whose norms are the same ops on the same shapes and dtypes: one replay speaks for all."""
    graph = recording.graph
    groups: dict[object, list[Site]] = {}
    for site in sites:
        call = site.calls[0]
        record = graph.values[call.input]
        ops = tuple(graph.ops[m].name for m in sorted(call.members))
        groups.setdefault((site.row.spec, record.shape, record.dtype, ops), []).append(site)
    return (tuple(group) for group in groups.values())
