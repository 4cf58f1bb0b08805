"""What the layers share: a spec, parameters that start neutral, and a representation that shows the convention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Self

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from normwise import kernels
from normwise.functional._checks import check_floating, check_trailing, shape_of
from normwise.functional.hidden import trailing
from normwise.layers.families import family_spec
from normwise.spec import NormSpec, Weight

__all__ = ["FamilyModule", "HiddenModule", "NormModule", "told_kernel"]

# Shown by the layer in torch's own words, or said by its name.
_TOLD = frozenset({"axes", "eps", "bias", "weight", "running", "momentum", "groups", "scope"})


def told_kernel(kernel: str) -> list[str]:
    """Return what a layer says about its kernel: nothing where the best is taken."""
    return [] if kernel == "auto" else [f"kernel={kernel!r}"]


class NormModule(nn.Module):
    """A layer that computes its ``spec``; abstract, every layer is final."""

    spec: NormSpec
    usual: NormSpec  # the spec of this class without options: what is not worth showing
    kernel: str = "auto"
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @property
    def eps(self) -> float | None:
        """Return the eps of ``spec``; setting it changes ``spec``, as ``module.eps = 1e-3`` does in torch."""
        return self.spec.eps

    @eps.setter
    def eps(self, value: float | None) -> None:
        self.spec = replace(self.spec, eps=value)

    def _follow(
        self,
        spec: NormSpec,
        shape: tuple[int, ...],
        eps: float | None,
        *,
        elementwise_affine: bool,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Take over ``spec`` with other options, and make the parameters of ``shape`` that it has."""
        for name, usual in (("gate", self.usual.gate), ("modulation", self.usual.modulation)):
            given = getattr(spec, name)
            if (given == "none") != (usual == "none"):
                raise ValueError(
                    f"{type(self).__name__} computes norms with {name}='{usual}', given a spec with {name}='{given}'; "
                    f"pass a spec with {name}='{usual}', or use the layer Norm, which computes any spec"
                )
        if spec.center != self.usual.center:
            raise ValueError(
                f"{type(self).__name__} computes norms with center={self.usual.center}, given a spec with "
                f"center={spec.center}; use {'LayerNorm' if spec.center else 'RMSNorm'}, or the layer Norm for any spec"
            )
        self.elementwise_affine = elementwise_affine and spec.weight is not Weight.NONE
        self.spec = replace(
            spec,
            eps=spec.eps if eps is None else eps,
            weight=spec.weight if self.elementwise_affine else Weight.NONE,
            bias=bias and elementwise_affine and spec.bias,
        )
        shape = () if spec.weight is Weight.SCALAR else shape
        self._register_affine(shape, weight=self.elementwise_affine, bias=self.spec.bias, device=device, dtype=dtype)

    def _register_affine(
        self,
        shape: tuple[int, ...],
        *,
        weight: bool,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.register_parameter("weight", nn.Parameter(torch.empty(shape, **made)) if weight else None)
        self.register_parameter("bias", nn.Parameter(torch.empty(shape, **made)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make gain and shift neutral: a gain of 1 (a weight of 0 with unit offset), a shift of 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.spec.weight_offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _convention(self) -> list[str]:
        """Return ``field=value`` for all that differs from the usual spec of this layer."""
        names = [field.name for field in fields(NormSpec) if field.name not in _TOLD]
        values = {name: getattr(self.spec, name) for name in names}
        told = [f"{name}={value}" for name, value in values.items() if value != getattr(self.usual, name)]
        return told + told_kernel(self.kernel)


class HiddenModule(NormModule):
    """A norm over the trailing axes; abstract.

    Args:
        normalized_shape: sizes of the trailing axes that share one statistic.
        eps: instead of the one of ``spec``.
        elementwise_affine: whether there are parameters.
        bias: whether there is a shift.
        device: of the parameters.
        dtype: of the parameters.
        spec: the convention.
        kernel: auto for the best that takes the call, or the name of one that must be used, see ``normwise.kernels``.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        spec: NormSpec,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        self.kernel = kernels.check_name(kernel)
        self.normalized_shape = shape_of(normalized_shape, type(self).__name__)
        spec = replace(spec, axes=trailing(self.normalized_shape))
        self._follow(
            spec,
            self.normalized_shape,
            eps,
            elementwise_affine=elementwise_affine,
            bias=bias,
            device=device,
            dtype=dtype,
        )

    def _normalize(self, input: torch.Tensor) -> torch.Tensor:
        """Compute ``spec`` over the trailing axes of ``input``."""
        held = self._parameters_at_hand()
        if held is not None:
            y = kernels.attempt(self.spec, self.normalized_shape[-1], input, *held)
            if y is not None:
                return y
        self._check(input)
        return kernels.forward(self.spec, input, self.weight, self.bias, kernel=self.kernel)

    def _parameters_at_hand(self) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """Return gain and shift for an attempt at an ordinary call, or None where there must not be one.

        Looked up where torch keeps parameters: through ``__getattr__`` two of them take a microsecond. They are not
        there where a parametrization, or a replica of the module, has them as attributes.
        """
        held = self._parameters
        if self.kernel != "auto" or is_dynamo_compiling() or "weight" not in held or "bias" not in held:
            return None
        return held["weight"], held["bias"]

    def _check(self, input: torch.Tensor) -> None:
        check_floating(input, type(self).__name__)
        check_trailing(input, self.normalized_shape, type(self).__name__)

    def extra_repr(self) -> str:
        """Return torch's words, and what differs from the usual convention of this layer."""
        told = [f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"]
        if self.usual.bias or self.bias is not None:
            told.append(f"bias={self.bias is not None}")
        return ", ".join(told + self._convention())


class FamilyModule(HiddenModule):
    """A norm over the trailing axes that takes any convention of its kind; abstract."""

    @classmethod
    def like(
        cls,
        family: str,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: str = "auto",
    ) -> Self:
        """Return the norm of a model family; ``normwise.layers.FAMILIES`` lists them.

        Raises:
            ValueError: no such family, or one whose norm is of another kind.
        """
        return cls(
            normalized_shape, eps, device=device, dtype=dtype, spec=family_spec(family, cls.usual), kernel=kernel
        )
