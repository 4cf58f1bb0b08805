"""Runs models wholly in float64: what their code casts to a lower precision stays in float64 as well."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from normwise.graph.process import Process
from normwise.targets.inputs import map_tensors

__all__ = ["double", "doubled", "in_double", "seed"]

_PROMOTED = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_BITS = frozenset({"view", "view_copy"})  # with a dtype they read the same bits as other numbers


class _Promote(TorchDispatchMode):
    """Lets every op compute and return float64 where it would have used a lower precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = list(args), dict(kwargs or {})
        if func.overloadpacket.__name__ not in _BITS:
            args, kwargs = _promoted(args, func), _promoted(kwargs, func)
        if func.overloadpacket.__name__ == "_grouped_mm":  # torch has it for low precision only
            return _grouped_mm(*args, **kwargs)
        given = {id(item) for item in (*args, *kwargs.values())}
        result = func(*args, **kwargs)
        return map_tensors(result, lambda t: t if id(t) in given else _wide(t))


def _promoted(item: Any, func: Any) -> Any:
    """Return the arguments of an op in float64; what it writes to stays the tensor that it is."""
    if isinstance(item, torch.dtype):
        return _PROMOTED.get(item, item)
    if isinstance(item, torch.Tensor):
        return item if func._schema.is_mutable else _wide(item)
    if isinstance(item, dict):
        return {key: _promoted(value, func) for key, value in item.items()}
    return type(item)(_promoted(i, func) for i in item) if type(item) in (list, tuple) else item


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_PROMOTED[tensor.dtype]) if tensor.dtype in _PROMOTED else tensor


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, bias: Any = None, out_dtype: Any = None) -> Any:
    """Multiply each group of rows [offs[g-1]:offs[g]] of ``a`` by its matrix b[g]; of two matrices, sum by group."""
    spans = list(itertools.pairwise([0, *offs.tolist()]))
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in spans])
    if (a.dim(), b.dim()) != (2, 3) or bias is not None:
        raise NotImplementedError("grouped matrix products of this layout in float64")
    groups = [a[start:end] @ b[g] for g, (start, end) in enumerate(spans)]
    return torch.cat([*groups, a.new_zeros(a.shape[0] - spans[-1][1], b.shape[-1])])


@contextlib.contextmanager
def double(*, gradients: bool = False) -> Iterator[None]:
    """Run a block in float64 with fixed random numbers; the state of the process is put back, also on errors."""
    around = Process()
    try:
        torch.set_default_dtype(torch.float64)
        seed()
        with _Promote(), torch.set_grad_enabled(gradients), torch.autocast("cpu", enabled=False):
            yield
    finally:
        around.restore()


def seed() -> None:
    """Let every source of random numbers start anew: models that draw some in evaluation draw the same."""
    torch.manual_seed(0)
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


def doubled(model: nn.Module) -> nn.Module:
    """Cast a model in place to float64, complex buffers as well, and return it."""
    model.double()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in _PROMOTED:
                module._buffers[name] = _wide(buffer)
    return model


def in_double(inputs: Any) -> Any:
    """Return a nest of inputs with their floating tensors in float64."""
    return map_tensors(inputs, lambda t: _wide(t.detach()))
