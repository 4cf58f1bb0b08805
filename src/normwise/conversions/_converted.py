"""What a conversion returns: the converted copy, its proof, and what was refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normwise.conversions._plan import Change, Plan, Refusal
from normwise.conversions.proof import Proof
from normwise.targets import Target

__all__ = ["Converted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A converted model with the evidence.

    Args:
        model: a copy, converted; the model given is as it was.
        proof: that the function is the same.
        plan: what was done.
        target: the original with its inputs.
    """

    model: nn.Module
    proof: Proof
    plan: Plan
    target: Target = field(repr=False)

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """Return what was left as it is, with the reasons."""
        return self.plan.refused

    @property
    def changes(self) -> tuple[Change, ...]:
        """Return what was converted."""
        return self.plan.changes

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the converted model."""
        return self.model.state_dict()

    def save(self, path: str | Path, format: str | None = None, **options: Any) -> dict[str, Any]:
        """Save the model and its report, and prove that it is the same when it is loaded again.

        Args:
            path: a folder, or a file that ends in .safetensors for weights alone.
            format: "stock", "code", "manifest" or "safetensors", see ``normwise.conversions.saving.formats``; by
                default "stock" where the class as it is holds the result, else "manifest" (``normwise.load``).
            options: ``force=True`` replaces what is there, ``shard_size`` is the largest size of a file in bytes,
                ``verify=False`` leaves the reload gate out, and the report says so.

        Returns:
            The report, as it lies beside the weights.

        Raises:
            ConversionRefused: the format cannot hold the result, or it was not the same when it was loaded again.
            ValueError: the output is there already, or is, contains or lies in the folder that was converted.
            OSError: the disk is full.
        """
        from normwise.conversions.saving import save_converted

        return save_converted(self, path, format=format, **options)
