"""Norm: the layer of any spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from normwise import kernels
from normwise.functional._checks import shape_of
from normwise.functional.general import norm
from normwise.layers._norm_module import NormModule, told_kernel
from normwise.spec import NormSpec, Statistic, Weight  # noqa: F401 - for the examples

__all__ = ["Norm"]


class Norm(NormModule):
    """Compute what a ``NormSpec`` says: every convention, also one that no other layer has.

    Args:
        spec: what to compute; its axes count in the layout of the input.
        shape: sizes of gain and shift: the normalized axes for the hidden scope, the channels for the others.
        device: of the parameters.
        dtype: of the parameters.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        whatever the axes fit -> the same

    Raises:
        ValueError: a spec with running statistics (BatchNorm keeps those), operands that the spec lacks.
        TypeError: an input that is not floating point, a mask that is not bool.

    Examples:
        >>> from normwise import NormSpec
        >>> annotated = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=1e-6, eps_inside=False, biased=False)
        >>> Norm(annotated, 3)(torch.tensor([1.0, 2.0, 3.0])).detach()
        tensor([-1.0000,  0.0000,  1.0000])
        >>> overtime = NormSpec(axes=(-2, -1))  # one statistic a sequence
        >>> x = torch.tensor([[[1.0], [1.0], [9.0]]])
        >>> Norm(overtime, (3, 1))(x, mask=torch.tensor([[[True], [True], [False]]])).flatten().detach()
        tensor([1.0000, 1.0000, 0.0000])
    """

    usual = NormSpec()

    def __init__(
        self,
        spec: NormSpec,
        shape: int | Sequence[int],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        self.kernel = kernels.check_name(kernel)
        if spec.running:
            raise ValueError("Norm keeps no running statistics, given a spec with running=True; use BatchNorm")
        self.spec, self.shape = spec, shape_of(shape, "Norm")
        sizes = () if spec.weight is Weight.SCALAR else self.shape
        self._register_affine(sizes, weight=spec.weight is not Weight.NONE, bias=spec.bias, device=device, dtype=dtype)

    def forward(
        self,
        input: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalize ``input``; operands as in ``normwise.functional.norm``."""
        operands = {"mask": mask, "gate": gate, "scale": scale, "shift": shift}
        return norm(self.spec, input, self.weight, self.bias, **operands, kernel=self.kernel)

    def extra_repr(self) -> str:
        """Return the shape and every field that differs from a plain RMSNorm."""
        values = {field.name: getattr(self.spec, field.name) for field in fields(NormSpec)}
        told = [f"{name}={value}" for name, value in values.items() if value != getattr(self.usual, name)]
        return ", ".join([f"{self.shape}", *told, *told_kernel(self.kernel)])
