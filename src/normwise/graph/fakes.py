"""Models without storage: FakeTensor models as they are, meta models through stand-ins.

Plain meta tensors break on ordinary Python tests of tensor values, so a meta parameter is
replaced by a FakeTensor of the same shape for one call; the model itself is not touched.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from normwise.graph.capture import tensors_in

__all__ = ["call", "mode_of", "stand_in_inputs", "stand_ins"]


def mode_of(model: nn.Module, inputs: Any) -> Any:
    """Return the FakeTensorMode that a model's tensors or inputs live in, or None."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    if module is None:
        return None
    for tensor in [*model.parameters(), *model.buffers(), *tensors_in(inputs)]:
        if isinstance(tensor, module.FakeTensor):
            return tensor.fake_mode
    return None


def stand_ins(model: nn.Module) -> dict[str, Any]:
    """Return a FakeTensor by path for every parameter and buffer of a model that lives on meta; ties stay ties."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    if not any(tensor.device.type == "meta" for _, tensor in named):
        return {}
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, Any] = {}
    with mode:
        for _, tensor in named:
            if id(tensor) not in made:
                made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return {path: made[id(tensor)] for path, tensor in named}


def stand_in_inputs(mode: Any, inputs: Any) -> Any:
    """Return inputs with a FakeTensor for every tensor on meta, so that they meet the stand-ins on one device."""

    def fake(item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or item.device.type != "meta":
            return item
        return torch.empty(item.shape, dtype=item.dtype, device="cpu")

    with mode:
        return tree_map(fake, inputs)


def call(
    model: nn.Module, runner: nn.Module, replaced: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a model, with stand-ins for its parameters where there are any."""
    if not replaced:
        return runner(*args, **kwargs)
    return torch.func.functional_call(model, dict(replaced), args, kwargs)
