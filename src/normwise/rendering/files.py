"""Files put in place whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["replace"]


def replace(path: Path, content: str | bytes) -> None:
    """Put a file in place in one step: readers see the old one or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
