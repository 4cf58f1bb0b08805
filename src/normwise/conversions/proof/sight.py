"""Which changed tensors a twin does not see: where its outputs do not depend on one, their agreement says nothing."""

from __future__ import annotations

import torch
from torch import nn

from normwise.conversions._apply import tensors_of
from normwise.conversions._plan import Plan
from normwise.conversions.proof.compare import attached_floats
from normwise.conversions.proof.double import double, in_double
from normwise.targets import Target

__all__ = ["unseen"]

_SEEN = 1e-7  # a mistake of the size of the tensor then moves an output by at least a thousand times the bound


def unseen(plan: Plan, converted: nn.Module, target: Target) -> list[str] | None:
    """Return the tensors made by a plan that move no output, from one backward pass; None where that cannot be run.

    A tensor may be unseen for a good reason: the bias of keys cancels in the softmax.

    Args:
        plan: what made the tensors.
        converted: the converted twin; it is left with other ``requires_grad``.
        target: gives the inputs.
    """
    tensors = tensors_of(converted)
    made = {recipe.keys[0]: tensors[recipe.keys[0]] for recipe in plan.recipes if recipe.keys[0] in tensors}
    if not all(tensor.is_leaf for tensor in tensors.values()):
        return None  # those of a scripted module, and of torch's first weight norm
    for tensor in tensors.values():
        tensor.requires_grad_(False)
    for tensor in made.values():
        tensor.requires_grad_(True)
    args, kwargs = in_double((target.args, dict(target.kwargs)))
    try:
        with double(gradients=True):
            outputs = [t for _, t in attached_floats(converted(*args, **kwargs)) if t.requires_grad]
            score = torch.stack([_probed(t) for t in outputs]).sum()
            slopes = torch.autograd.grad(score, list(made.values()), allow_unused=True)
    except Exception:  # the model's own code: it cuts the gradient, or writes in place
        return None
    sight = zip(made.items(), slopes, strict=True)
    return [key for (key, tensor), slope in sight if slope is None or _moves(slope, tensor.detach()) < _SEEN]


def _moves(slope: torch.Tensor, tensor: torch.Tensor) -> float:
    """Return by how much a change of the size of the tensor moves the outputs; of zeros, one of half a unit."""
    size = float(tensor.square().mean().sqrt()) or 0.5
    return size * float(slope.norm())


def _probed(output: torch.Tensor) -> torch.Tensor:
    """Return one random number that depends on every finite entry, of about the size 1."""
    finite = output.real if output.is_complex() else output
    finite = finite[finite.isfinite()]
    size = finite.detach().abs().max() if finite.numel() else torch.ones(())
    return (finite * torch.randn_like(finite)).sum() / (size.clamp_min(1e-300) * max(finite.numel(), 1) ** 0.5)
