"""The norm that a spec describes."""

from __future__ import annotations

import torch

from normwise import kernels
from normwise.functional._checks import check_broadcast, check_floating, check_groups, check_mask
from normwise.spec import NormSpec
from normwise.spec.definition import along, check_operands

__all__ = ["norm"]


def norm(
    spec: NormSpec,
    input: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """Compute what ``spec`` says, with the best kernel that takes it.

    Args:
        spec: what to compute; its axes count in the layout of ``input``.
        input: the tensor to normalize.
        weight: the gain.
        bias: the shift.
        mask: bool, broadcastable to ``input``; where it is False nothing counts and the output is 0.
        gate: z of a gated norm, shaped like ``input``.
        scale: scale of a modulated norm: the output is multiplied by 1 + scale.
        shift: shift of a modulated norm.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Returns:
        A tensor shaped like ``input``.

    Raises:
        TypeError: ``input`` is not floating point, or ``mask`` is not bool.
        ValueError: an operand the spec does not have, or one it lacks; axes that the input does not have, or that
            ``groups`` or ``partial`` do not fit.

    Examples:
        >>> import torch
        >>> from normwise import NormSpec
        >>> norm(NormSpec(eps=0.0), torch.tensor([3.0, 4.0]))
        tensor([0.8485, 1.1314])
    """
    check_floating(input, "norm()")
    check_operands(spec, weight, bias, gate, scale, shift)
    if min(spec.axes) < -input.ndim:
        raise ValueError(
            f"norm() of a spec over axes {list(spec.axes)}, given an input of {input.ndim} axes, shape "
            f"{list(input.shape)}; change spec.axes or add the missing axes"
        )
    _check_parts(spec, input.shape[min(spec.axes)])
    check_mask(mask, "norm()")
    for name, parameter in (("weight", weight), ("bias", bias)):
        check_broadcast(None if parameter is None else along(spec, parameter, input.ndim), input, name, "norm()")
    for name, operand in (("mask", mask), ("gate", gate), ("scale", scale), ("shift", shift)):
        check_broadcast(operand, input, name, "norm()")
    operands = {"gate": gate, "scale": scale, "shift": shift}
    return kernels.forward(spec, input, weight, bias, mask, **operands, kernel=kernel)


def _check_parts(spec: NormSpec, size: int) -> None:
    if spec.groups is not None:
        check_groups(spec.groups, size, "groups", "norm()")
    size //= spec.groups or 1
    if int(size * spec.partial) < 1 <= size:
        raise ValueError(
            f"norm() takes its statistic over int(n * partial) elements, given n = {size} and "
            f"partial={spec.partial}; change spec.partial so that it leaves at least one"
        )
