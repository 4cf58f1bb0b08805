"""Registered norms that a run never called, recognised by running them alone."""

from __future__ import annotations

import torch
from torch import nn

from normwise.errors import NormwiseError
from normwise.facts import norms
from normwise.facts.flow import Flow
from normwise.facts.plain import plain
from normwise.graph import Graph, trace
from normwise.targets.target import Target, numberless

__all__ = ["find"]

_SEED = 20261129
# layouts in which norms with a gain of C elements are called
_LAYOUTS = ((2, 3, -1), (2, -1, 5), (2, -1, 5, 4), (2, -1))


def find(graph: Graph, model: nn.Module) -> tuple[str, ...]:
    """Return the paths of leaf modules that were never called and compute a norm when called alone."""
    called = {c.path for c in graph.calls}
    scripts = (path for path, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule))
    inside_called = tuple(f"{path}." if path else "" for path in scripts if path in called)
    verdicts: dict[object, bool] = {}
    idle = []
    for path, module in model.named_modules():
        if path in called or next(module.children(), None) is not None or not path:
            continue
        if path.startswith(inside_called):
            continue  # a script runs its children without calling them as modules
        width = _width(module)
        if width is None:
            continue
        key = (type(module), width, _settings(module))
        if key not in verdicts:
            verdicts[key] = _is_norm(module, width)
        if verdicts[key]:
            idle.append(path)
    return tuple(idle)


def _settings(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the plain attributes of a module: two of one class and width compute the same if these agree."""
    plain = {n: v for n, v in vars(module).items() if isinstance(v, (str, int, float, tuple, torch.dtype, type(None)))}
    return tuple((name, repr(value)) for name, value in sorted(plain.items()))


def _width(module: nn.Module) -> int | None:
    """Return the number of channels of a module that holds only vectors, as norms do."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if any(map(numberless, tensors)):
        return None
    vectors = {t.numel() for t in tensors if t.dim() >= 1}
    if len(vectors) != 1 or any(sum(s > 1 for s in t.shape) > 1 for t in tensors):
        return None
    return vectors.pop()


def _is_norm(module: nn.Module, width: int) -> bool:
    held = next(
        (t for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()), torch.empty(0, device="cpu")
    )
    generator = torch.Generator().manual_seed(_SEED)
    for layout in _LAYOUTS:
        shape = tuple(width if s == -1 else s for s in layout)
        target = Target(model=module, args=(torch.randn(shape, generator=generator, device="cpu").to(held),))
        try:
            recording = plain(trace(target), module)
            found = norms.find(recording, Flow(recording.graph, recording.data), module)
        except NormwiseError:
            continue
        outputs = set(recording.graph.outputs)
        if any(n.output in outputs or n.core in outputs for n in found.norms):
            return True
    return False
