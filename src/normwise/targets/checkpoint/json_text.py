"""JSON of a stranger: size, number of items and depth are known to be small before it is parsed."""

from __future__ import annotations

import json
import re
from typing import Any

from normwise.targets.checkpoint.limits import DEPTH, ITEMS, broken

__all__ = ["parse", "unique"]

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's pairs as a dict.

    Raises:
        ValueError: a name occurs twice.
    """
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice!r:.80} occurs twice")
    return made


def parse(data: bytes, path: str, *, most: int) -> Any:
    """Return what a JSON text holds.

    Args:
        data: the text.
        path: the file, for the error.
        most: bytes that it may have.

    Raises:
        CheckpointError: it is no JSON, or too large, too deep, or has a name twice.
    """
    if len(data) > most:
        raise broken("json-too-large", path, f"{len(data):,} bytes of JSON, the limit is {most:,}")
    bare = _STRING.sub(b"", data)
    if (items := bare.count(b",") + bare.count(b"[") + bare.count(b"{")) > ITEMS:
        raise broken("json-too-large", path, f"{items:,} items of JSON, the limit is {ITEMS:,}")
    depth = 0
    for bracket in _BRACKET.finditer(bare):
        depth += 1 if bracket.group() in b"[{" else -1
        if depth > DEPTH:
            raise broken("json-too-large", path, f"JSON nested deeper than {DEPTH} levels")
    del bare
    try:
        # Infinity and NaN are no JSON, and Python writes them: a time_step_limit of Mamba-2 has no end
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise broken("bad-json", path, f"this is no valid JSON: {error!s:.200}") from None
