"""The functions of recipes: float64 tensors in, one float64 tensor out.

Each takes the tensor as it was made so far, further tensors of the source, and numbers. ``dim`` counts from the end
or from the start. A new function is one definition with the decorator ``function``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from normwise.conversions._plan import Recipe
from normwise.errors import ConversionRefused

__all__ = ["FUNCTIONS", "function", "holds_numbers", "make"]

Arithmetic = Callable[..., torch.Tensor]
FUNCTIONS: dict[str, Arithmetic] = {}


def function(compute: Arithmetic) -> Arithmetic:
    """Register a function under its name."""
    FUNCTIONS[compute.__name__] = compute
    return compute


def make(recipe: Recipe, source: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return the tensor of a recipe in the dtype it has in the source.

    Args:
        recipe: what to make.
        source: gives a tensor of the source by its key.

    Raises:
        ConversionRefused: the result leaves the range of its dtype.
    """
    if recipe.shape is None:
        given = source(recipe.start or recipe.keys[0])
        dtype, tensor = given.dtype, given.detach().double()
    else:
        assert recipe.dtype is not None
        read = [source(key).dtype for step in recipe.steps for key in step.reads]
        # a copy in float64, on which the conversion is proved, is made of nothing else
        dtype = torch.float64 if read and set(read) == {torch.float64} else getattr(torch, recipe.dtype)
        tensor = torch.zeros(recipe.shape, dtype=torch.float64)
    finite = holds_numbers(tensor) and bool(tensor.isfinite().all())
    for step in recipe.steps:
        further = [source(key).detach().double() for key in step.reads]
        tensor = FUNCTIONS[step.function](tensor, *further, **step.numbers)
    made = tensor.to(dtype)
    if finite and not bool(made.isfinite().all()):
        name = str(dtype).removeprefix("torch.")
        raise ConversionRefused([f"{recipe.keys[0]}: the converted numbers leave the range of {name}; use float32"])
    return made


def holds_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor has storage: it is neither on the meta device nor fake."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _along(vector: torch.Tensor, like: torch.Tensor, dim: int, groups: int = 1) -> torch.Tensor:
    """Return a vector in the shape in which it multiplies ``like`` along ``dim``.

    The weight of a grouped convolution has only the channels of a row's group along ``dim``, groups along axis 0.
    """
    shape = [1] * like.dim()
    shape[dim] = -1
    if groups == 1:
        return vector.reshape(shape)
    shape[0] = like.shape[0]
    return vector.reshape(groups, -1).repeat_interleave(like.shape[0] // groups, 0).reshape(shape)


@function
def centre(tensor: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Return tensor - its mean over ``dim``."""
    return tensor - tensor.mean(dim, keepdim=True)


@function
def scale(
    tensor: torch.Tensor, vector: torch.Tensor, *, dim: int, offset: float = 0.0, groups: int = 1
) -> torch.Tensor:
    """Return tensor * (offset + vector), the vector along ``dim``."""
    return tensor * _along(vector + offset, tensor, dim, groups)


@function
def fill(tensor: torch.Tensor, *, number: float) -> torch.Tensor:
    """Return a tensor of one number."""
    return torch.full_like(tensor, number)


@function
def add_number(tensor: torch.Tensor, *, number: float) -> torch.Tensor:
    """Return tensor + number."""
    return tensor + number


@function
def add_product(
    tensor: torch.Tensor, weight: torch.Tensor, vector: torch.Tensor, *, dim: int, sign: float = 1.0, groups: int = 1
) -> torch.Tensor:
    """Return tensor + sign * the sum over ``dim`` of weight * vector; further axes of the weight are summed, too."""
    product = weight * _along(vector, weight, dim, groups)
    out = next(d for d in range(weight.dim()) if d != dim % weight.dim())
    return tensor + sign * product.sum([d for d in range(weight.dim()) if d != out])
