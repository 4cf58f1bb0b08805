"""What users hand over (a model, ``(model, inputs)``, a dict of fields, a Target), made into a Target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from normwise.targets.target import InputsFrom, Target, Weights

__all__ = ["EVIDENCE", "as_dtype", "floating", "from_answer", "from_fields", "split_inputs", "with_evidence"]

_FIELDS = tuple(field.name for field in dataclasses.fields(Target))
_NOT_EVIDENCE = ("model", "args", "kwargs", "inputs_from", "weights", "notes", "stored")

EVIDENCE = tuple(name for name in _FIELDS if name not in _NOT_EVIDENCE)
"""The names that ``target(model, inputs, **evidence)`` takes."""


def from_answer(answer: Any, *, name: str) -> Target:
    """Make a Target of what a callable returned.

    Args:
        answer: a module, ``(model, inputs)``, a dict of Target fields or a Target.
        name: the target's name unless the answer brings its own.

    Raises:
        TypeError: the answer, or something inside it, is of another type.
    """
    if isinstance(answer, Target):
        return answer
    if isinstance(answer, nn.Module):
        return from_fields({"model": answer}, name=name)
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], nn.Module):
        return from_fields({"model": answer[0], "inputs": answer[1]}, name=name)
    if isinstance(answer, Mapping):
        return from_fields(answer, name=name)
    raise TypeError(f"expected a model, (model, inputs), a dict of Target fields or a Target, got {_describe(answer)}")


def from_fields(fields: Mapping[str, Any], *, name: str) -> Target:
    """Make a Target of a dict with ``model``, ``inputs`` (or ``args`` and ``kwargs``) and any evidence.

    Raises:
        TypeError: no model, an unknown name, or a value of the wrong type.
    """
    fields = dict(fields)
    if not isinstance(fields.get("model"), nn.Module):
        given = _describe(fields["model"]) if "model" in fields else f"only {', '.join(map(str, fields)) or 'nothing'}"
        raise TypeError(f"a dict of Target fields needs 'model', a torch.nn.Module, got {given}")
    _refuse_unknown(fields, ("inputs", *_FIELDS))
    if "inputs" in fields:
        if "args" in fields or "kwargs" in fields:
            raise TypeError("give 'inputs', or 'args' and 'kwargs', not both")
        fields["args"], fields["kwargs"] = split_inputs(fields.pop("inputs"))
    return Target(**{"name": name, **_cleaned(fields)})


def with_evidence(target: Target, evidence: Mapping[str, Any]) -> Target:
    """Return the target with further fields filled.

    Raises:
        TypeError: a name that is no evidence; the message lists the valid ones.
    """
    _refuse_unknown(evidence, EVIDENCE)
    return dataclasses.replace(target, **_cleaned(evidence))


def split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of one call.

    Args:
        inputs: a tuple or list of positional arguments, a dict of keyword arguments, one tensor, or None.

    Raises:
        TypeError: anything else.
    """
    if inputs is None:
        return (), {}
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    raise TypeError(
        "inputs are a tuple of positional arguments, a dict of keyword arguments or one tensor, "
        f"got {_describe(inputs)}"
    )


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the torch dtype of a name such as ``float16`` or ``torch.float16``.

    Raises:
        TypeError: torch has no such dtype.
    """
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{dtype!r} is no torch dtype; give for example float16, bfloat16, float32 or float64")
    return found


def _cleaned(fields: Mapping[str, Any]) -> dict[str, Any]:
    cleaned = dict(fields)
    for name in ("reference", "online"):
        if not isinstance(cleaned.get(name), nn.Module | None):
            raise TypeError(f"{name!r} is a torch.nn.Module, got {_describe(cleaned[name])}")
    if cleaned.get("dtype") is not None:
        cleaned["dtype"] = floating(cleaned["dtype"])
    for name in {"args", "claims", "notes"} & cleaned.keys():
        value = cleaned[name]
        if name == "claims" and not _names(value):
            raise TypeError(f"'claims' is a tuple of names such as ('causal',), got {_describe(value)}")
        cleaned[name] = (value,) if isinstance(value, str | torch.Tensor) else tuple(value or ())
    for name, kind in (("inputs_from", InputsFrom), ("weights", Weights)):
        if name in cleaned:
            cleaned[name] = kind(cleaned[name])
    return cleaned


def floating(dtype: torch.dtype | str) -> torch.dtype:
    """Return the torch dtype of a name that a model can be cast to.

    Raises:
        TypeError: torch has no such dtype, or it is no floating-point one.
    """
    found = as_dtype(dtype)
    if not found.is_floating_point:
        raise TypeError(f"a model is not cast to {found}; give for example float16, bfloat16, float32 or float64")
    return found


def _names(value: Any) -> bool:
    if value is None or isinstance(value, str):
        return True
    return isinstance(value, tuple | list | set | frozenset) and all(isinstance(name, str) for name in value)


def _refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        raise TypeError(f"{unknown[0]!r} is no evidence normwise knows; the names are {', '.join(known)}")


def _describe(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, tuple | list):
        return f"a {kind} of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    if isinstance(value, Mapping):
        return f"a {kind} with {', '.join(map(str, value)) or 'nothing'}"
    return "None" if value is None else f"a {kind}"
