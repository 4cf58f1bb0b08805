"""Converted models on disk: formats, conversion tensor by tensor, atomic publication, and loading.

``convert_checkpoint`` and ``save_converted`` write; ``load`` opens what the format ``manifest`` wrote.
"""

from __future__ import annotations

from normwise.conversions.saving.loading import load as load
from normwise.conversions.saving.save import convert_checkpoint as convert_checkpoint
from normwise.conversions.saving.save import save_converted as save_converted

__all__ = ["convert_checkpoint", "load", "save_converted"]
