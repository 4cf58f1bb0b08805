"""What JSON can hold of what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

__all__ = ["plain"]

_KEPT = (bool, int, type(None))


def plain(value: Any) -> Any:
    """Reduce a value to what JSON has; numbers that are not finite become "nan", "inf" and "-inf".

    Examples:
        >>> plain({"gap": float("inf"), "shape": (2, 3)})
        {'gap': 'inf', 'shape': [2, 3]}
    """
    if isinstance(value, str):
        return str(value)
    if isinstance(value, _KEPT):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, Set):
        return [plain(inner) for inner in sorted(value, key=str)]
    # tensors and arrays, also of one number: without importing torch or numpy here
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)
