"""The classes and functions that a pickle names, read off its opcodes: nothing is imported, nothing is run.

torch refuses all but a few of them itself, in a process of its own (``_unpickle``), and that is what protects. Here
they are found early, so that the refusal can name them without waiting for that process.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator

import torch._weights_only_unpickler as unpickler

from normwise.errors import CheckpointError
from normwise.rendering import clean, shorten
from normwise.targets.checkpoint.archive import convert
from normwise.targets.checkpoint.limits import broken

__all__ = ["examine", "named", "needs_code"]

_LOOKED_AT = 2_000_000  # bytes: a second; of larger ones torch reads the opcodes alone
_MEMO = frozenset({"BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"})
_RECALL = frozenset({"BINGET", "LONG_BINGET", "GET"})
_TEXT = frozenset(
    {"SHORT_BINUNICODE", "BINUNICODE", "UNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING", "STRING"}
)


def examine(pickle: bytes, path: str) -> None:
    """Refuse a pickle that is broken or names what is neither a tensor nor a part of one.

    Raises:
        CheckpointError: it does.
    """
    if len(pickle) > _LOOKED_AT:
        return
    allowed = unpickler._get_allowed_globals()
    try:
        unknown = next((n for n in named(pickle) if n not in allowed and not _storage(n)), None)
    except Exception as error:  # whatever the bytes lead pickletools to
        raise broken("bad-pickle", path, f"its pickle is broken: {type(error).__name__}: {error!s:.120}") from None
    if unknown is not None:
        raise needs_code(unknown, path)


def needs_code(name: str, path: str) -> CheckpointError:
    """Return the error for a pickle that needs a class or function."""
    said = shorten(clean(name), 120)
    return broken(
        "pickle-needs-code",
        path,
        f"its pickle needs {said}, and opening it would run code; convert it where you trust it:\n{convert(path)}",
    )


def _storage(name: str) -> bool:
    """Whether a name is that of a class of storages: torch reads the dtype off it."""
    module, _, last = name.rpartition(".")
    return module in ("torch", "torch.cuda", "torch.storage") and last.endswith("Storage")


def named(pickle: bytes) -> Iterator[str]:
    """Yield every class and function that a pickle names."""
    recent: list[str] = []
    memo: dict[int, str] = {}
    count = 0
    for code, argument, _ in pickletools.genops(pickle):
        if code.name == "GLOBAL" or code.name == "INST":
            yield str(argument).replace(" ", ".", 1)
        elif code.name == "STACK_GLOBAL":
            if len(recent) >= 2:
                yield f"{recent[-2]}.{recent[-1]}"
        elif code.name in _TEXT:
            recent = [*recent[-1:], str(argument)]
        elif code.name in _MEMO:
            key = count if code.name == "MEMOIZE" else int(str(argument))
            count += 1
            if recent:
                memo[key] = recent[-1]
        elif code.name in _RECALL and int(str(argument)) in memo:
            recent = [*recent[-1:], memo[int(str(argument))]]
