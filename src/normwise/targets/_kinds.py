"""The kinds of target in service: one import line each."""

from __future__ import annotations

from normwise import _parts
from normwise.targets import checkpoint as checkpoint
from normwise.targets import demo as demo
from normwise.targets import exported_program as exported_program
from normwise.targets import folder as folder
from normwise.targets import hf as hf
from normwise.targets import onnx_file as onnx_file
from normwise.targets import packages as packages
from normwise.targets import python_file as python_file
from normwise.targets import python_module as python_module
from normwise.targets import timm_model as timm_model

__all__ = ["KINDS"]

# The package also holds modules that are no kinds (inputs, answer, ...), so the kinds have this module to themselves.
KINDS = _parts.collect({**globals(), "__name__": __package__}, needs=("claims", "load"))
