"""Blocks: attention, MLP, and how a placement puts them on the residual stream."""

from __future__ import annotations

from normwise.blocks.attention import Attention as Attention
from normwise.blocks.cache import Cache as Cache
from normwise.blocks.layer import Layer as Layer
from normwise.blocks.mlp import ACTIVATIONS as ACTIVATIONS
from normwise.blocks.mlp import MLP as MLP
from normwise.blocks.ngpt import NGPTLayer as NGPTLayer
from normwise.blocks.norms import norm_maker as norm_maker
from normwise.blocks.residual import Residual as Residual
from normwise.blocks.rotary import Rotary as Rotary
from normwise.blocks.stack import Stack as Stack

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Attention",
    "Cache",
    "Layer",
    "NGPTLayer",
    "Residual",
    "Rotary",
    "Stack",
    "norm_maker",
]
