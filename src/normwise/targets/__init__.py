"""What is examined, and how it is found: one module for each kind of TARGET text.

``load`` reads a TARGET as the command line gives it; ``target`` takes what ``nw.check`` is given. Both end
on the highest rung of the input ladder and cast a copy where a dtype or a device was asked for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from normwise.errors import TargetError
from normwise.targets import casting, cycles, exported_program, inputs, unclaimed
from normwise.targets._kinds import KINDS
from normwise.targets.answer import EVIDENCE, floating, split_inputs, with_evidence
from normwise.targets.target import InputsFrom, Target, Weights
from normwise.targets.wrapping import unwrap

__all__ = ["EVIDENCE", "KINDS", "InputsFrom", "Target", "Weights", "load", "target", "unwrap"]


def load(
    text_or_object: str | nn.Module | ExportedProgram | Target,
    *,
    inputs: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> Target:
    """Load a TARGET.

    Args:
        text_or_object: any TARGET string, a module, an exported program or a Target.
        inputs: a shape such as ``2x12:long``, in the grammar of ``normwise.targets.inputs``.
        dtype: what the model is cast to; a copy is cast, the object given stays as it is.
        device: where the copy goes.

    Raises:
        TargetError: the text names nothing that can be loaded, or the shape cannot be read.
        TypeError: the object is no module, or torch has no such dtype.
    """
    found = _found(text_or_object, inputs)
    for option, given in (("--dtype", dtype), ("--device", device)):
        if given is not None:
            _refuse_for_checkpoint(found, option)
    if dtype is not None:
        found = dataclasses.replace(found, dtype=floating(dtype))
    return _settled(found, inputs, device)


def target(model_or_text: str | nn.Module | ExportedProgram | Target, inputs: Any = None, **evidence: Any) -> Target:
    """Make the target of a check from a model and whatever else is known.

    Args:
        model_or_text: a module, an exported program, a Target or any TARGET string.
        inputs: a tuple of positional arguments, a dict of keyword arguments, one tensor, or a shape
            such as ``2x12:long``.
        evidence: further fields of ``Target``; the names are in ``EVIDENCE``.

    Raises:
        TargetError: the text names nothing that can be loaded.
        TypeError: an unknown kind of evidence (the message lists the known), or inputs of another type.
    """
    spec = inputs if isinstance(inputs, str) else None
    found = with_evidence(_found(model_or_text, spec), evidence)
    if inputs is not None and spec is None:
        _refuse_for_checkpoint(found, "inputs=")
        args, kwargs = split_inputs(inputs)
        found = dataclasses.replace(found, args=args, kwargs=kwargs, inputs_from=InputsFrom.GIVEN)
    return _settled(found, spec, None)


def _found(given: str | nn.Module | ExportedProgram | Target, spec: str | None) -> Target:
    if isinstance(given, Target):
        return given
    if isinstance(given, nn.Module):
        return Target(model=given, name=type(given).__name__)
    if isinstance(given, ExportedProgram):
        return exported_program.from_object(given)
    if not isinstance(given, str):
        raise TypeError(f"a target is a torch.nn.Module, a Target or a TARGET string, got a {type(given).__name__}")
    claiming = [kind for kind in KINDS.values() if kind.claims(given)]
    if len(claiming) != 1:
        raise unclaimed.error(given, KINDS, claiming)
    return claiming[0].load(given, inputs=spec)


def _refuse_for_checkpoint(found: Target, option: str) -> None:
    """Refuse what is about a run: a checkpoint is judged as it is stored."""
    if found.stored is not None:
        why = "a checkpoint holds no model that could run"
        raise TargetError(f"{found.name}: {option} has no meaning here, {why}; give FILE.py:callable that loads it")


def _settled(found: Target, spec: str | None, device: torch.device | str | None) -> Target:
    cycles.refuse(found.model, found.name)
    return casting.cast(inputs.fill(found, spec), device)
