"""What stands before every figure: our layers compute what their specs say, or nothing is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from normwise.errors import NormwiseError
from normwise.spec import NormSpec
from normwise.testing import CHECKS, conformance

__all__ = ["Wrong", "check_layer"]

# Of the conformance suite: values and gradients against float64 in the dtype that is timed, and what a fast kernel is
# tempted to get wrong. The other checks do not depend on the width and are run by the tests.
_OF_DTYPE = (
    "the definition",
    "large finite rows",
    "gradient of the input",
    "gradients of gain and shift",
)
_ALWAYS = (
    "gradient through an added residual",
    "the input is left alone",
    "the upstream gradient is left alone",
    "a gradient shared with a residual",
    "a retained graph",
    "the same bits twice",
    "every number is written",
)
_MOST_ROWS = 257  # no multiple of a vector or of a block of rows
_MOST_IMAGES = 3


class Wrong(NormwiseError):
    """A layer that does not compute what it should: its speed is not worth knowing."""


class _Placed(nn.Module):
    """A layer with its parameters on the CPU that computes on another device or in another layout of memory.

    The conformance suite makes its inputs on the CPU and compares there.
    """

    def __init__(self, inner: Any, device: str, layout: str | None) -> None:
        super().__init__()
        self.inner = inner.to(device)
        self.weight = None if inner.weight is None else nn.Parameter(inner.weight.detach().cpu())
        self.bias = None if inner.bias is None else nn.Parameter(inner.bias.detach().cpu())
        self.device = device
        self.memory_format = torch.channels_last if layout == "channels_last" else torch.preserve_format

    def forward(self, *inputs: torch.Tensor) -> Any:
        own = {"weight": self.weight, "bias": self.bias}
        held = {name: each.to(self.device) for name, each in own.items() if each is not None}
        placed = tuple(x.to(self.device, memory_format=self.memory_format) for x in inputs)
        found = torch.func.functional_call(self.inner, held, placed)
        return tuple(y.cpu() for y in found) if isinstance(found, tuple) else found.cpu()


def check_layer(
    factory: Callable[[], Any],
    spec: NormSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    residual: bool = False,
    layout: str | None = None,
    device: str = "cpu",
) -> None:
    """Hold a layer to the conformance suite, on fewer rows of the same width and dtype.

    Args:
        factory: makes the layer.
        spec: what it should compute.
        shape: of the input that will be timed.
        dtype: of the same.
        residual: whether it takes a residual and returns the sum too.
        layout: of memory, where it is not the usual one.
        device: where it will be timed.

    Raises:
        Wrong: it failed; the message says what was measured and what is allowed.
    """
    most = _MOST_ROWS if len(shape) == 2 else _MOST_IMAGES
    rows = (min(shape[0], most), *shape[1:])
    name = str(dtype).removeprefix("torch.")
    wanted = {*(f"{check} in {name}" for check in _OF_DTYPE), *_ALWAYS}
    made = factory if (layout, device) == (None, "cpu") else lambda: _Placed(factory(), device, layout)
    try:
        conformance(made, spec, shape=rows, residual=residual, without=[each for each in CHECKS if each not in wanted])
    except AssertionError as failed:
        where = f"{'x'.join(map(str, rows))} {name}{f' {layout}' if layout else ''}"
        told = str(failed).partition(" failed ")[2]
        raise Wrong(f"nothing was timed, {type(factory()).__name__} is wrong on {where}: it failed {told}") from failed
