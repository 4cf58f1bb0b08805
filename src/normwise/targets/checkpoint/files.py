"""Plain files, read in pieces: nothing is loaded that was not asked for, and every byte is counted."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType

from normwise.targets.checkpoint.limits import broken

__all__ = ["File", "whole"]


class File:
    """A regular file that is open for reading.

    Args:
        path: links are followed, as the cache of a hub consists of them.

    Raises:
        CheckpointError: it is missing, no regular file, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.bytes_read = str(path), 0
        # without O_NONBLOCK a pipe would wait for somebody to write
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        try:
            self._fd = os.open(path, flags)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise broken("unreadable", self.path, f"it cannot be opened: {why}") from None
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise broken("not-a-file", self.path, "this is no regular file")
        self.size = found.st_size

    def read(self, start: int, length: int) -> bytes:
        """Return some bytes.

        Raises:
            CheckpointError: the file ends before, or the disk fails.
        """
        pieces: list[bytes] = []
        missing = length
        try:
            os.lseek(self._fd, start, os.SEEK_SET)
            while missing > 0 and (piece := os.read(self._fd, min(missing, 1 << 24))):
                pieces.append(piece)
                missing -= len(piece)
        except OSError as error:
            raise broken("unreadable", self.path, f"it cannot be read: {error.strerror}") from None
        self.bytes_read += length - missing
        if missing:
            raise broken("truncated", self.path, f"the file ends {missing:,} bytes too early; copy it again")
        return b"".join(pieces)

    def fileno(self) -> int:
        """Return the descriptor, to hand it to another process."""
        return self._fd

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> File:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def whole(path: Path, most: int) -> tuple[bytes, int]:
    """Return a small file, one byte over the limit where it is larger, and how many bytes were read.

    Raises:
        CheckpointError: it cannot be read.
    """
    with File(path) as file:
        data = file.read(0, min(file.size, most + 1))
        return data, file.bytes_read
