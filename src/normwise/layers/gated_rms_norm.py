"""Gated RMSNorm: the norm of Mamba-2 and of gated linear attention."""

from __future__ import annotations

from dataclasses import replace

import torch

from normwise import kernels
from normwise.functional._checks import check_groups, size_of
from normwise.layers._norm_module import FamilyModule
from normwise.spec import Cast, Gate, NormSpec

__all__ = ["GatedRMSNorm"]

_GATED = NormSpec(eps=1e-6, gate=Gate.AFTER, cast=Cast.AFTER_WEIGHT)


class GatedRMSNorm(FamilyModule):
    """Compute RMSNorm(x) * act(z), or RMSNorm(x * act(z)) with ``norm_before_gate=False``.

    With the gate first, large gates change the statistic: the two orders are different functions, and a
    checkpoint trained with one is garbage in the other.

    Args:
        normalized_shape: H, size of the last axis.
        eps: added to the mean square.
        elementwise_affine: whether there is a gain.
        device: of the gain.
        dtype: of the gain.
        norm_before_gate: True normalizes x alone and gates the output (Qwen3-Next), False gates first (Mamba-2);
            None leaves it to ``spec``.
        groups: groups of features with a statistic each.
        activation: ``silu`` or ``sigmoid``; None leaves it to ``spec``.
        spec: another convention, such as one of ``normwise.layers.FAMILIES``.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.

    Shape:
        x and z [..., H] -> [..., H]

    Raises:
        ValueError: groups that do not divide H, an input with another last axis, a gate of another shape.
        TypeError: an input that is not floating point.

    Examples:
        >>> GatedRMSNorm(2)(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 100.0])).detach()
        tensor([  0.0000, 113.1371])
    """

    usual = _GATED

    def __init__(
        self,
        normalized_shape: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm_before_gate: bool | None = None,
        groups: int | None = None,
        activation: str | None = None,
        spec: NormSpec = _GATED,
        kernel: str = "auto",
    ) -> None:
        if norm_before_gate is not None:
            spec = replace(spec, gate=Gate.AFTER if norm_before_gate else Gate.BEFORE)
        if activation is not None:
            spec = replace(spec, gate_activation=activation)
        if groups is not None:
            check_groups(
                groups, size_of(normalized_shape, "normalized_shape", "GatedRMSNorm"), "groups", "GatedRMSNorm"
            )
            spec = replace(spec, groups=groups)
        super().__init__(normalized_shape, eps, elementwise_affine, False, device, dtype, spec=spec, kernel=kernel)

    def forward(self, input: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalize ``input`` and multiply by the activation of ``gate``, both [..., H]."""
        self._check(input)
        if gate.shape != input.shape:
            raise ValueError(
                f"GatedRMSNorm gates an input of shape {list(input.shape)}, given a gate of shape {list(gate.shape)}; "
                "expand the gate to the input's shape"
            )
        return kernels.forward(self.spec, input, self.weight, gate=gate, kernel=self.kernel)

    def extra_repr(self) -> str:
        """Return torch's words, groups, and what differs from the usual convention."""
        return super().extra_repr() + ("" if self.spec.groups is None else f", groups={self.spec.groups}")
