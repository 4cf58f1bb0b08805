"""The layers that ``fold-batch-norm`` folds into: linear maps and convolutions of every kind, read from the graph."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normwise.conversions._apply import has_storage
from normwise.conversions._batch_norms.paths import NOT_EXACT, Paths
from normwise.conversions._plan import Blocked
from normwise.graph import Op, Ref, Value, ValueKind

__all__ = ["Layer", "heeds_bias", "heeds_padding", "is_layer", "read", "returns_output"]

_ARGUMENTS = {
    "linear": "input weight bias",
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "input weight bias stride padding dilation groups"),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        "input weight bias stride padding output_padding groups dilation",
    ),
    "convolution": "input weight bias stride padding dilation transposed output_padding groups",
}
_FOLD_FIRST = "remove the parametrisation first: torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"
_UNTIE = "give the layer a weight of its own"
_SEED = 20261129


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A linear map or convolution whose weight is its own.

    Args:
        op: its execution.
        path: of the module that holds its weight.
        weight: key of the weight; None where the weight is computed, and only its output can be scaled.
        scaled: key of what is scaled with its output: the weight, or the g of a weight norm.
        bias: key of the bias, or None.
        dtype: of the weight.
        outputs: number of output channels.
        groups: of a convolution.
        transposed: whether its weight is [in, out / groups, ...].
        kernel: sizes of the window; none for a linear map.
        stride: of the window.
        padding: zeros (before, after) on each spatial axis.
        output_padding: of a transposed convolution.
        call: the torch function with its arguments after the bias, for the map of a shift.
    """

    op: Op
    path: str
    weight: str | None
    scaled: str
    bias: str | None
    dtype: str
    outputs: int
    groups: int
    transposed: bool
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    output_padding: tuple[int, ...]
    call: tuple[str, tuple[Any, ...]]

    @property
    def pads(self) -> bool:
        """Whether a shift of its input is not the same shift of its output everywhere."""
        if not self.transposed:
            return any(before or after for before, after in self.padding)
        one = all(k == 1 for k in self.kernel) and all(s == 1 for s in self.stride)
        return not one or any(p != (0, 0) for p in self.padding) or any(self.output_padding)

    @property
    def output_dim(self) -> int:
        """Axis of the weight on which the output channels lie."""
        return 1 if self.transposed else 0

    def axis(self, shape: Sequence[int]) -> int:
        """Return the axis of the channels in its input or output."""
        return len(shape) - 1 - len(self.kernel)


def is_layer(op: Op) -> bool:
    """Whether an op is a linear map or convolution of a kind that can be read."""
    return op.short in _ARGUMENTS


def read(paths: Paths, op: Op) -> Layer:
    """Return the layer of an op.

    Raises:
        Blocked: its weight is shared, used elsewhere, computed, or quantised.
    """
    graph = paths.graph
    named = dict(zip(_ARGUMENTS[op.short].split(), op.args, strict=False)) | op.kwargs
    record = graph.values[named["weight"].value]
    transposed = bool(named.get("transposed", op.short.startswith("conv_transpose")))
    weight, scaled = _weight(paths, op, record, transposed)
    bias = _bias(paths, op, named.get("bias"))
    groups, n = named.get("groups", 1), len(record.shape) - 2

    def numbers(name: str, usual: int) -> tuple[int, ...]:
        given = named.get(name, usual)
        given = (given,) if isinstance(given, int) else tuple(given)
        return given * n if len(given) == 1 else given

    kernel, dilation, padding = record.shape[2:], numbers("dilation", 1), named.get("padding", 0)
    if isinstance(padding, str):
        totals = [0 if padding == "valid" else d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        pads = tuple((t // 2, t - t // 2) for t in totals)
    else:
        pads = tuple((p, p) for p in numbers("padding", 0))
    names = _ARGUMENTS[op.short].split()[3:]
    usual = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    return Layer(
        op=op,
        path=scaled.rpartition(".")[0] if weight else graph.path(op),
        weight=weight,
        scaled=scaled,
        bias=bias,
        dtype=record.dtype,
        outputs=record.shape[1] * groups if transposed else record.shape[0],
        groups=groups,
        transposed=transposed,
        kernel=kernel,
        stride=numbers("stride", 1),
        padding=pads,
        output_padding=numbers("output_padding", 0),
        call=(op.short, tuple(named.get(name, usual.get(name)) for name in names)),
    )


def _weight(paths: Paths, op: Op, record: Value, transposed: bool) -> tuple[str | None, str]:
    """Return the key of the weight, or None, and the key of what is scaled with the output."""
    graph = paths.graph
    made = graph.producer(record.id)
    by_output = made is not None and made.short == "_weight_norm" and made.args[2:] in ((), (0,)) and not transposed
    if made is not None and by_output and [o.id for o in graph.consumers(record.id)] == [op.id]:
        # W = g v / |v| with one g for each output
        return None, _own(paths, graph.values[made.args[1].value], made, "weight")
    if made is not None:
        raise Blocked(f"the weight of {op.short} in {paths.where(op)} is computed by {made.short}", made, _FOLD_FIRST)
    if not record.floating or type(paths.facts.tensors[record.names[0]]) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise Blocked(f"the weight of {op.short} in {paths.where(op)} is quantised", op, "fold before quantising")
    if len(record.shape) < 2:
        raise Blocked(f"the weight of {op.short} in {paths.where(op)} is a vector", op, NOT_EXACT)
    key = _own(paths, record, op, "weight")
    return key, key


def _bias(paths: Paths, op: Op, given: Any) -> str | None:
    if not isinstance(given, Ref):
        return None
    record = paths.graph.values[given.value]
    made = paths.graph.producer(record.id)
    if made is not None:
        raise Blocked(f"the bias of {op.short} in {paths.where(op)} is computed by {made.short}", made, _FOLD_FIRST)
    return _own(paths, record, op, "bias")


def _own(paths: Paths, record: Value, op: Op, what: str) -> str:
    """Return the key of a tensor that nothing but one op reads."""
    graph = paths.graph
    if record.kind not in (ValueKind.PARAM, ValueKind.BUFFER) or len(record.names) == 0:
        raise Blocked(f"the {what} of {op.short} in {paths.where(op)} is no parameter of the model", op, _UNTIE)
    if len(record.names) > 1:
        raise Blocked(f"the {what} of {op.short} is shared: {', '.join(record.names)}", op, _UNTIE)
    others = [o for o in graph.consumers(record.id) if o.id != op.id]
    if others:
        where = paths.where(others[0])
        raise Blocked(
            f"{record.names[0]} is used {len(others) + 1} times, also by {others[0].short} in {where}", op, _UNTIE
        )
    return record.names[0]


def heeds_bias(paths: Paths, layer: Layer) -> bool:
    """Whether a bias that is given to the module of a layer without one is added to its output; by running a copy."""
    bias = torch.rand(layer.outputs, generator=torch.Generator().manual_seed(_SEED))
    module = paths.facts.modules.get(layer.path)
    if module is None or module._parameters.get("bias", bias) is not None or not returns_output(paths, layer):
        return False
    deaf = _copy(module)
    deaf.register_parameter("bias", nn.Parameter(bias))
    made = _run(deaf, torch.zeros(_given(paths, layer)))
    if made is None:
        return False
    wide = [-1 if axis == layer.axis(made.shape) else 1 for axis in range(made.dim())]
    return torch.equal(made, bias.reshape(wide).expand_as(made))


def heeds_padding(paths: Paths, layer: Layer) -> bool:
    """Whether the module of a convolution pads as its ``padding`` says, and with zeros; by running a copy."""
    module: Any = paths.facts.modules.get(layer.path)
    alone = returns_output(paths, layer) and not layer.transposed
    if not alone or not hasattr(module, "padding"):
        return False
    padded, bare = _copy(module), _copy(module)
    bare.padding = (0,) * len(layer.padding)
    x = torch.rand(_given(paths, layer), generator=torch.Generator().manual_seed(_SEED))
    wide = nn.functional.pad(x, [pad for pads in reversed(layer.padding) for pad in pads])
    one, other = _run(padded, x), _run(bare, wide)
    return one is not None and other is not None and one.shape == other.shape and torch.allclose(one, other, atol=1e-4)


def returns_output(paths: Paths, layer: Layer) -> bool:
    """Whether a module runs once, on one tensor, and returns what its layer makes."""
    calls = [c for c in paths.graph.calls if c.path == layer.path]
    return len(calls) == 1 and len(calls[0].inputs) == 1 and calls[0].outputs == layer.op.outputs


def _given(paths: Paths, layer: Layer) -> tuple[int, ...]:
    """Return the shape that the module of a layer is given, with one sample."""
    call = next(c for c in paths.graph.calls if c.path == layer.path)
    return (1, *paths.graph.values[call.inputs[0]].shape[1:])


def _copy(module: nn.Module) -> Any:
    """Return a float32 copy, with ones where the module has no numbers."""
    copied = copy.deepcopy(module)
    if not has_storage(module):
        copied = copied.to_empty(device="cpu")
        for tensor in (*copied.parameters(), *copied.buffers()):
            nn.init.ones_(tensor)
    return copied.cpu().float()


def _run(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """Return what a module makes of data; None where its forward does not take them."""
    with torch.inference_mode():
        try:
            return module(x)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None
