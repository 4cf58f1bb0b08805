"""Runs a target once under the tracer and returns what was recorded."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from normwise.errors import TraceError
from normwise.graph import fakes
from normwise.graph.capture import Tracer
from normwise.graph.data import Graph
from normwise.graph.guard import as_found
from normwise.graph.observing import Observer
from normwise.spec.definition import plain
from normwise.targets import unwrap
from normwise.targets.target import Target
from normwise.targets.wrapping import fully_sharded

__all__ = ["Recording", "eager", "trace"]

_ABOUT_GRADIENTS = re.compile(r"inference|require|\bgrad|differentia|backward", re.IGNORECASE)


@dataclass(slots=True)
class Recording:
    """A graph with the constants of its run, which replay needs."""

    graph: Graph
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    data: list[bool] = field(default_factory=list)  # by value: depends on an input of the model
    notes: tuple[str, ...] = ()
    observer: Observer | None = None  # what it kept of the values, where one was given


def trace(
    target: Target,
    *,
    evaluate: bool | None = True,
    partial: bool = False,
    mode: str | None = None,
    observer: Callable[[], Observer] | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
) -> Recording:
    """Run a target's model once in eval mode and record its dataflow.

    The model, its random state and the process are left as they were found.

    Args:
        target: a model with one call's inputs.
        evaluate: the mode to run in; None keeps the model's own.
        partial: return what was recorded up to where the forward raised.
        mode: of gradients, as an earlier run had it ("inference", "no_grad" or "grad"); found out by default.
        observer: makes what keeps or overwrites values, once for each attempt.
        prepare: called with the model before the run; what it changes is undone with the rest.

    Raises:
        TraceError: the forward raised; names the innermost module that was running.
    """
    _refuse_lazy(target)
    refused: TraceError | None = None
    # a sharded model would keep tensors of inference mode, and fail in every later run that is not in it
    sharded = fully_sharded(target.model)
    modes = ("no_grad", "grad") if sharded else ("inference", "no_grad", "grad")
    for attempt in (mode,) if mode else modes:
        with as_found(target.model, evaluate=evaluate, inputs=(target.args, target.kwargs)):
            if prepare is not None:
                prepare(target.model)
            try:
                return _run(target, attempt, partial, observer() if observer else None)
            except TraceError as error:
                refused = error
            finally:
                for module in sharded:  # the root keeps its parameters gathered, which are put back sharded
                    module.reshard()
        if attempt == "inference" and not _wants_gradients(refused):
            break
    assert refused is not None
    raise refused


def _run(target: Target, mode: str, partial: bool, observer: Observer | None) -> Recording:
    model = target.model
    runner, _ = unwrap(model)
    args, kwargs = target.args, dict(target.kwargs)
    fake = fakes.mode_of(model, (args, kwargs))
    stand_ins = {} if fake is not None else fakes.stand_ins(model)
    if stand_ins:
        fake = next(iter(stand_ins.values())).fake_mode
        args, kwargs = fakes.stand_in_inputs(fake, (args, kwargs))
    tracer = Tracer(model, inputs=(args, kwargs), fake=fake is not None, stand_ins=stand_ins, observer=observer)
    tracer.graph.mode = mode
    grad = torch.inference_mode() if mode == "inference" else torch.set_grad_enabled(mode == "grad")
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            torch.backends.mha.set_fastpath_enabled(False)
            stack.enter_context(eager())
            stack.enter_context(grad)
            if fake is not None:
                stack.enter_context(fake)
            stack.enter_context(tracer.calls.following(tracer.values_of, tracer.leave))
            stack.enter_context(tracer)
            output = fakes.call(model, runner, stand_ins, args, kwargs)
            tracer.finish(output)
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        if partial:
            return _recording(tracer, observer)
        where = tracer.calls.raised
        raise TraceError(_explain(target, error, where), path=where) from error
    finally:
        tracer.undo()
    return _recording(tracer, observer)


def _recording(tracer: Tracer, observer: Observer | None) -> Recording:
    return Recording(tracer.graph, tracer.constants, tracer.data, observer=observer)


def _explain(target: Target, error: Exception, where: str | None) -> str:
    said = str(error).strip().splitlines()
    at = f" in {where}" if where else ""
    detail = f"{type(error).__name__}: {said[0] if said else 'no message'}"
    return (
        f"the forward of {target.name} raised{at}: {detail}. "
        "Call the model yourself with the same inputs, then pass inputs it accepts"
    )


def _refuse_lazy(target: Target) -> None:
    tensors = [*target.model.named_parameters(), *target.model.named_buffers()]
    lazy = next((path for path, t in tensors if nn.parameter.is_lazy(t)), None)
    if lazy is not None:
        raise TraceError(
            f"{target.name} is not initialized: {lazy} has no shape before the first call. "
            "Call the model once with real inputs, then examine it",
            path=lazy.rpartition(".")[0],
        )


def _wants_gradients(error: TraceError) -> bool:
    """Whether a forward failed because it differentiates, or refuses inference mode by a message of its own."""
    return bool(_ABOUT_GRADIENTS.search(str(error.__cause__)))


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Keep compiled submodules from being compiled again, and norms in plain torch, for one traced run."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(plain())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
