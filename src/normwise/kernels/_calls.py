"""When a call stays in plain torch whatever it asks for: transforms, tracers, foreign tensors."""

from __future__ import annotations

import sys

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from normwise.spec.definition import is_wanted_plain

__all__ = ["refusal_of_call"]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_KNOWN = (FakeTensor, FunctionalTensor)
_EXPORT = "an exported program keeps to operators that every runtime knows"


def refusal_of_call(x: torch.Tensor) -> str | None:
    """Return why compiled code must not compute this call, or None."""
    if torch._C._are_functorch_transforms_active():
        return "inside torch.func the transforms differentiate and batch plain torch"
    if torch.compiler.is_compiling():
        return _EXPORT if torch.compiler.is_exporting() else None
    if is_wanted_plain():
        return "plain torch was asked for, so that a tracer sees what is computed"
    if type(x) not in _PLAIN and not isinstance(x, _KNOWN) and not _is_distributed(x):
        return f"it does not know the tensor class {type(x).__name__}"
    if x.layout is not torch.strided or x.is_nested:
        return "it reads dense tensors"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives are those of plain torch"
    if torch._C._get_tracing_state() is not None:
        return _EXPORT
    return None


def _is_distributed(x: torch.Tensor) -> bool:
    """Return whether ``x`` is a DTensor, and see to it that the operators have sharding rules then."""
    if "torch.distributed.tensor" not in sys.modules:  # loading it takes long
        return False
    from normwise.kernels import _sharding

    return isinstance(x, _sharding.DTensor)
