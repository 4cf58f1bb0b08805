"""Files put in place whole or not at all, and the endings that name what they hold."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

__all__ = ["replace", "suffix"]

# what ``replace`` writes to first: the process that writes is in the name, so that a later one knows what is stale
_TEMPORARY = re.compile(r"\.normwise-([1-9][0-9]*)-[0-9a-f]{8}\.tmp")


def replace(path: Path, content: str | bytes) -> None:
    """Put a file in place in one step: readers see the old one or the new one, never half of it.

    What killed processes left in the same folder is removed.

    Raises:
        OSError: it cannot be written, a full disk for example; its ``filename`` is the path.
    """
    _sweep(path.parent)
    temporary = path.with_name(f".normwise-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException as failure:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(failure, OSError) and failure.errno is not None:  # the system names the temporary file, or none
            raise OSError(failure.errno, failure.strerror, str(path)) from failure
        raise


def suffix(path: Path, known: Iterable[str]) -> str | None:
    """Return the longest known ending of a file's name in small letters, None if it has none of them.

    Examples:
        >>> suffix(Path("a/v1.2.SARIF.json"), [".json", ".sarif.json"]), suffix(Path("a.json.gz"), [".json"])
        ('.sarif.json', None)
    """
    parts = path.suffixes
    endings = ("".join(parts[start:]).lower() for start in range(len(parts)))
    return next((ending for ending in endings if ending in set(known)), None)


def _sweep(folder: Path) -> None:
    """Remove the temporary files of processes that are gone; a number in use again keeps its file.

    Nothing depends on it: a folder that cannot be listed is left as it is.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            named = _TEMPORARY.fullmatch(entry.name)
            if named and entry.is_file(follow_symlinks=False) and _gone(int(named[1])):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def _gone(process: int) -> bool:
    if os.name != "posix":  # elsewhere asking for a process by signal 0 would end it
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it runs and is not ours; no process can have this number
        return False
    return False
