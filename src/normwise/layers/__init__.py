"""Layers: every norm as a final ``nn.Module``, with torch.nn's argument order, names and state-dict names."""

from __future__ import annotations

from normwise.layers.batch_norm import BatchNorm as BatchNorm
from normwise.layers.batch_norm import BatchNorm1d as BatchNorm1d
from normwise.layers.batch_norm import BatchNorm2d as BatchNorm2d
from normwise.layers.batch_norm import BatchNorm3d as BatchNorm3d
from normwise.layers.families import FAMILIES as FAMILIES
from normwise.layers.layer_norm import LayerNorm as LayerNorm
from normwise.layers.rms_norm import RMSNorm as RMSNorm

__all__ = ["FAMILIES", "BatchNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm", "RMSNorm"]
