"""Layers: every norm as a final ``nn.Module``, with torch.nn's argument order, names and state-dict names."""

from __future__ import annotations

from normwise.layers.add_norm import AddLayerNorm as AddLayerNorm
from normwise.layers.add_norm import AddRMSNorm as AddRMSNorm
from normwise.layers.batch_norm import BatchNorm as BatchNorm
from normwise.layers.batch_norm import BatchNorm1d as BatchNorm1d
from normwise.layers.batch_norm import BatchNorm2d as BatchNorm2d
from normwise.layers.batch_norm import BatchNorm3d as BatchNorm3d
from normwise.layers.centered_rms_norm import CenteredRMSNorm as CenteredRMSNorm
from normwise.layers.channel_norm import ChannelLayerNorm as ChannelLayerNorm
from normwise.layers.channel_norm import ChannelRMSNorm as ChannelRMSNorm
from normwise.layers.convention import convention_of as convention_of
from normwise.layers.convention import families_of as families_of
from normwise.layers.derf import Derf as Derf
from normwise.layers.dynamic_tanh import DynamicTanh as DynamicTanh
from normwise.layers.families import FAMILIES as FAMILIES
from normwise.layers.frozen_batch_norm import FrozenBatchNorm as FrozenBatchNorm
from normwise.layers.gated_rms_norm import GatedRMSNorm as GatedRMSNorm
from normwise.layers.group_norm import GroupNorm as GroupNorm
from normwise.layers.instance_norm import InstanceNorm1d as InstanceNorm1d
from normwise.layers.instance_norm import InstanceNorm2d as InstanceNorm2d
from normwise.layers.instance_norm import InstanceNorm3d as InstanceNorm3d
from normwise.layers.l2_norm import L2Norm as L2Norm
from normwise.layers.layer_norm import LayerNorm as LayerNorm
from normwise.layers.modulated_norm import AdaLayerNorm as AdaLayerNorm
from normwise.layers.modulated_norm import AdaRMSNorm as AdaRMSNorm
from normwise.layers.modulated_norm import ModulatedLayerNorm as ModulatedLayerNorm
from normwise.layers.modulated_norm import ModulatedRMSNorm as ModulatedRMSNorm
from normwise.layers.norm import Norm as Norm
from normwise.layers.partial_rms_norm import PartialRMSNorm as PartialRMSNorm
from normwise.layers.qk_norm import QKNorm as QKNorm
from normwise.layers.rms_norm import RMSNorm as RMSNorm
from normwise.layers.scale_norm import ScaleNorm as ScaleNorm
from normwise.layers.statistics import update_statistics as update_statistics
from normwise.layers.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

__all__ = [
    "FAMILIES",
    "AdaLayerNorm",
    "AdaRMSNorm",
    "AddLayerNorm",
    "AddRMSNorm",
    "BatchNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "CenteredRMSNorm",
    "ChannelLayerNorm",
    "ChannelRMSNorm",
    "Derf",
    "DynamicTanh",
    "FrozenBatchNorm",
    "GatedRMSNorm",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "L2Norm",
    "LayerNorm",
    "ModulatedLayerNorm",
    "ModulatedRMSNorm",
    "Norm",
    "PartialRMSNorm",
    "QKNorm",
    "RMSNorm",
    "ScaleNorm",
    "SyncBatchNorm",
    "convention_of",
    "families_of",
    "update_statistics",
]
