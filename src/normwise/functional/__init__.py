"""Every norm as a function: torch's argument order where torch has the function, masks where padding matters.

``norm(spec, x, ...)`` computes any ``NormSpec``; the others build the spec from their arguments. All of them take
their statistics in float32 or wider, return the dtype of the input (unless the spec says otherwise) whatever autocast
says, accumulate gradients of gain and bias in float32, and can be differentiated twice, mapped with
``torch.func``, compiled and exported.
"""

from __future__ import annotations

from normwise.functional.batch import batch_norm, instance_norm
from normwise.functional.general import norm
from normwise.functional.group import group_norm
from normwise.functional.hidden import (
    add_layer_norm,
    add_rms_norm,
    centered_rms_norm,
    gated_rms_norm,
    l2_norm,
    layer_norm,
    modulated_layer_norm,
    modulated_rms_norm,
    partial_rms_norm,
    rms_norm,
    scale_norm,
)
from normwise.functional.lp import lp_norm
from normwise.functional.masks import mask_of_lengths
from normwise.functional.pointwise import derf, dynamic_tanh

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "batch_norm",
    "centered_rms_norm",
    "derf",
    "dynamic_tanh",
    "gated_rms_norm",
    "group_norm",
    "instance_norm",
    "l2_norm",
    "layer_norm",
    "lp_norm",
    "mask_of_lengths",
    "modulated_layer_norm",
    "modulated_rms_norm",
    "norm",
    "partial_rms_norm",
    "rms_norm",
    "scale_norm",
]
