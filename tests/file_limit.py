"""A limit on the size of the files that a process writes, as ``ulimit -f`` sets one."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["file_limit"]


@contextmanager
def file_limit(most: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``most`` bytes.

    No bytecode is written meanwhile: Python does not look how much of it was, and what it leaves torn breaks every
    later import.
    """
    before, wrote = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = wrote
