"""The input ladder: inputs that were given, made from a shape, inferred, or none; and their variations.

Shapes are written as the user thinks of them::

    SPEC   :=  INPUT { ("," | ";") INPUT }        positional inputs first, then named ones
    INPUT  :=  [ NAME "=" ] SHAPE [ ":" DTYPE ]
    SHAPE  :=  SIZE { "x" SIZE }                  the batch is the first size
    DTYPE  :=  float32, bfloat16, long, bool, ...  the model's own floating dtype unless given

    2x3x64x64        2x12:long        2x12x64:bfloat16        ids=2x12:long,mask=2x12:bool

Floating inputs are standard normal, integers lie below the size of the model's first embedding, a mask
hides nothing; the values are the same in every run. Which rung was used stands in every report.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from normwise.errors import TargetError
from normwise.targets.answer import as_dtype
from normwise.targets.guesses import Maker, candidates, channels_first, sequence_first
from normwise.targets.target import InputsFrom, Target
from normwise.targets.wrapping import unwrap

__all__ = [
    "axis_of",
    "fill",
    "from_shape",
    "infer",
    "lengths_of",
    "map_tensors",
    "size_of",
    "tensors_of",
    "vary",
    "with_batch",
    "with_shorter_times",
    "with_time",
]

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of one call."""

_EXAMPLES = "2x3x64x64, 2x12:long or ids=2x12:long,mask=2x12:bool"
_INPUT = re.compile(r"(?:(?P<name>[^\W\d]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")
_NO_INPUTS = f"no inputs were given and none could be inferred: give them, or a shape such as {_EXAMPLES}"


def fill(target: Target, spec: str | None = None) -> Target:
    """Return the target on the highest rung that can be reached.

    Args:
        target: with or without inputs.
        spec: a shape in the grammar of this module; it wins over inputs the target has.

    Raises:
        TargetError: the spec cannot be read.
    """
    if spec is not None:
        args, kwargs = from_shape(spec, target.model)
        return dataclasses.replace(target, args=args, kwargs=kwargs, inputs_from=InputsFrom.FROM_SHAPE)
    if target.args or target.kwargs or target.inputs_from is not InputsFrom.GIVEN:
        return target
    args = infer(target.model)
    if args is None:
        return dataclasses.replace(target, inputs_from=InputsFrom.NONE, notes=(*target.notes, _NO_INPUTS))
    note = f"inputs inferred from the modules of the model: {', '.join(map(_shape, args)) or 'it takes none'}"
    return dataclasses.replace(target, args=args, inputs_from=InputsFrom.INFERRED, notes=(*target.notes, note))


def from_shape(spec: str, model: nn.Module) -> Call:
    """Make the inputs that a SPEC describes.

    Args:
        spec: for example ``ids=2x12:long,mask=2x12:bool``.
        model: decides device, floating dtype and the bound of integers.

    Raises:
        TargetError: the spec does not follow the grammar.
    """
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    maker = Maker.of(model)
    below = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)), 2)
    for item in re.split(r"[,;]", spec):
        name, tensor = _one_input(item.strip(), spec, maker, below)
        if name in kwargs:
            raise TargetError(f"--inputs {spec}: {name!r} is given twice")
        if name:
            kwargs[name] = tensor
        elif kwargs:
            raise TargetError(f"--inputs {spec}: {item.strip()!r} comes after a named input; put it before")
        else:
            args.append(tensor)
    return tuple(args), kwargs


def infer(model: nn.Module) -> tuple[Any, ...] | None:
    """Return positional arguments with which the model runs, or None.

    Candidates are run on a copy in eval mode, so the model, its buffers and the random state stay as they are.
    """
    inner, _ = unwrap(model)
    try:
        trial = copy.deepcopy(inner).eval()
        return next((args for args in candidates(inner) if _runs(trial, args)), None)
    except Exception:  # a model that cannot be copied or has no readable forward: there is no guess
        return None


def vary(target: Target) -> Target | None:
    """Return the target with another batch size and, where it has a time axis, another time length.

    Two traces that differ in these sizes tell the axes of every value apart. Time gets shorter where it
    can: a position table is never overrun.
    """
    batch, time = _size(target, _batch_axis), _size(target, _time_axis)
    call = with_batch(target, 4 if batch == 3 else 3)
    varied = target if call is None else dataclasses.replace(target, args=call[0], kwargs=call[1])
    later = with_time(varied, time - 5 if time > 8 else time + 3) if time else None
    if later is not None:
        return dataclasses.replace(target, args=later[0], kwargs=later[1])
    return None if call is None else varied


def with_batch(target: Target, n: int) -> Call | None:
    """Return the inputs with a batch of ``n``, cut or repeated; None where the batch axis cannot be told."""
    return _resized(target, _batch_axis, n)


def with_time(target: Target, n: int) -> Call | None:
    """Return the inputs with ``n`` time steps, cut or repeated (masks: True); None where there is no time axis.

    Time is axis 1 of integer and bool tensors [B, T] and of floating ones [B, T, H]; all must agree.
    """
    time = _size(target, _time_axis)
    if time and any(t.ndim > 3 and time in t.shape[1:] for t in _tensors((target.args, target.kwargs))):
        return None  # a mask [B, 1, T, T] would have to follow
    return _resized(target, _time_axis, n)


def lengths_of(target: Target) -> tuple[int, ...]:
    """Return the lengths of the inputs' time axes: several where encoder and decoder read sequences of their own."""
    return tuple(sorted(_sizes(target, _time_axis)))


def with_shorter_times(target: Target, steps: int) -> Call | None:
    """Return the inputs with every sequence cut by ``steps``; None where that leaves nothing, or there is none."""
    lengths = lengths_of(target)
    if not lengths or lengths[0] <= steps:
        return None
    model, _ = unwrap(target.model)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        axis = _time_axis(tensor, model)
        if axis is None and tensor.ndim == 2 and tensor.size(1) in lengths:
            axis = 1  # a floating mask beside the ids
        return tensor if axis is None else tensor.detach().narrow(axis, 0, tensor.size(axis) - steps).clone()

    return map_tensors(target.args, change), map_tensors(dict(target.kwargs), change)


def size_of(target: Target, name: str) -> int:
    """Return the size of the inputs' "batch" or "time" axis, on which all that have one agree; 0 where they do not."""
    return _size(target, _AXES[name])


def tensors_of(target: Target) -> list[torch.Tensor]:
    """Return the tensors of the example inputs."""
    return _tensors((target.args, dict(target.kwargs)))


def axis_of(target: Target, name: str, tensor: torch.Tensor) -> int | None:
    """Return the "batch" or "time" axis of one input; None where it has none."""
    model, _ = unwrap(target.model)
    axis = _AXES[name](tensor, model)
    if axis is None and name == "time" and tensor.ndim == 2 and tensor.size(1) == size_of(target, "time"):
        return 1  # a floating mask beside the ids
    return axis


def _one_input(item: str, spec: str, maker: Maker, below: int) -> tuple[str | None, torch.Tensor]:
    match = _INPUT.fullmatch(item)
    if match is None:
        raise TargetError(f"--inputs {spec}: {item!r} is no shape; write {_EXAMPLES}")
    shape = tuple(int(size) for size in match["shape"].split("x"))
    if 0 in shape:
        raise TargetError(f"--inputs {spec}: {item!r} has a size of 0; sizes start at 1")
    try:
        dtype = as_dtype(match["dtype"]) if match["dtype"] else maker.dtype
    except TypeError as error:
        raise TargetError(f"--inputs {spec}: {error}; integers are long, masks bool") from None
    return match["name"], _values(match["name"] or "", shape, dtype, maker, below)


def _values(name: str, shape: tuple[int, ...], dtype: torch.dtype, maker: Maker, below: int) -> torch.Tensor:
    if dtype is torch.bool or "mask" in name:
        return maker.full(shape, 1, dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return maker.floats(*shape, dtype=dtype)
    return maker.ids(*shape, below=1 if "type" in name else below, dtype=dtype)


def _runs(model: nn.Module, args: tuple[Any, ...]) -> bool:
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode():
            model(*args)
    except Exception:
        return False
    return True


def _shape(value: Any) -> str:
    return f"{'x'.join(map(str, value.shape))}:{str(value.dtype).removeprefix('torch.')}"


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a structure of tuples, lists and dicts with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, change) for item in value)
    return value


_Axis = Callable[[torch.Tensor, nn.Module], int | None]


def _batch_axis(tensor: torch.Tensor, model: nn.Module) -> int | None:
    axis = 1 if sequence_first(model) else 0
    return axis if tensor.ndim > axis else None


def _time_axis(tensor: torch.Tensor, model: nn.Module) -> int | None:
    if tensor.ndim == 3 and tensor.is_floating_point():
        return 0 if sequence_first(model) else 2 if channels_first(model) else 1
    return 1 if tensor.ndim == 2 and not tensor.is_floating_point() else None


_AXES: dict[str, _Axis] = {"batch": _batch_axis, "time": _time_axis}


def _size(target: Target, axis_of: _Axis) -> int:
    """Return the size on which all tensors with such an axis agree, else 0."""
    sizes = _sizes(target, axis_of)
    return sizes.pop() if len(sizes) == 1 else 0


def _sizes(target: Target, axis_of: _Axis) -> set[int]:
    model, _ = unwrap(target.model)
    axes = [(t, axis_of(t, model)) for t in _tensors((target.args, target.kwargs))]
    return {t.size(axis) for t, axis in axes if axis is not None}


def _resized(target: Target, axis_of: _Axis, n: int) -> Call | None:
    model, _ = unwrap(target.model)
    size = _size(target, axis_of)
    if not size:
        return None

    def change(tensor: torch.Tensor) -> torch.Tensor:
        axis = axis_of(tensor, model)
        if axis is None and axis_of is _time_axis and tensor.ndim == 2 and tensor.size(1) == size:
            axis = 1  # a floating mask beside the ids
        return tensor if axis is None else _resize(tensor.detach(), axis, n)

    return map_tensors(target.args, change), map_tensors(dict(target.kwargs), change)


def _resize(tensor: torch.Tensor, axis: int, n: int) -> torch.Tensor:
    missing = n - tensor.size(axis)
    if missing <= 0:
        return tensor.narrow(axis, 0, n).clone()
    if tensor.dtype is torch.bool:
        shape = [*tensor.shape[:axis], missing, *tensor.shape[axis + 1 :]]
        return torch.cat([tensor, tensor.new_ones(shape)], axis)
    return tensor.index_select(axis, torch.arange(n, device=tensor.device) % tensor.size(axis))
