"""Publishes a folder or a file all at once: written beside, flushed, renamed; on failure nothing is left.

A process that is killed leaves at most a folder ``.normwise-PID-...`` beside the output; the next run removes those
of processes that are gone, and puts back what a kill between the two renames of ``--force`` had moved aside.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["check_output", "copy_file", "published", "write_text"]

_MARK = ".normwise-"
_OLD = "old"  # what stood in the way of the output, while it is replaced


def check_output(out: Path, sources: Iterable[Path], *, force: bool = False) -> None:
    """Refuse an output that could harm a source, or that would replace what is there.

    Args:
        out: a folder, or a file that ends in .safetensors.
        sources: files and folders that are read.
        force: what is there may be replaced.

    Raises:
        ValueError: it is, contains or lies in a source, or is not empty.
        NotADirectoryError: the folder in which it would lie is a file.
    """
    real = out.resolve()
    read = {source.resolve(): source for source in sources}
    if real in read:
        raise ValueError(f"{out} is the source itself, which is never written to: give another output")
    for given, source in read.items():
        if given.is_dir() and real.is_relative_to(given):
            raise ValueError(f"{out} lies inside the source {source}, which is never written to: give another output")
        if given.is_relative_to(real):
            raise ValueError(f"{out} contains the source {source}, which would be replaced: give another output")
    if out.is_symlink():
        raise ValueError(f"{out} is a symbolic link to {real}: give that path itself, or another output")
    if Path.cwd().is_relative_to(real):
        raise ValueError(f"{out} contains the folder you are in, and is never replaced: give another output")
    if next((parent for parent in real.parents if parent.exists()), real).is_file():
        raise NotADirectoryError(errno.ENOTDIR, "a file stands where the folder of the output would be", str(out))
    if out.is_file() and out.suffix != ".safetensors":
        raise ValueError(f"{out} is a file, and the output is a folder: give another output")
    if out.is_dir() and out.suffix == ".safetensors":
        raise ValueError(f"{out} is a folder, and the output is a file: give another output")
    if not force and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        is_what = "there already" if out.is_file() else "not empty"
        raise ValueError(f"{out} is {is_what}: give another output, or --force (force=True) to replace it as a whole")


@contextmanager
def published(out: Path, *, size: int, sources: Iterable[Path] = (), force: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside ``out``; at the end of the block what is in it becomes ``out``.

    A file is published by writing one of its name into that folder. Files must have been flushed (``write_text``).

    Args:
        out: see ``check_output``.
        size: bytes that will be written.
        sources: see there.
        force: see there.

    Raises:
        ValueError: see there.
        OSError: the disk has too little room, or is full; nothing was written.
    """
    parent = out.absolute().parent
    _sweep(parent)
    check_output(out, sources, force=force)
    made = _missing(parent)
    _check_room(made[-1].parent if made else parent, size)
    temporary = parent / f"{_MARK}{os.getpid()}-{secrets.token_hex(4)}-{out.name}"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _flush(temporary)
        _put(temporary / out.name if out.suffix == ".safetensors" else temporary, out)
        _flush(parent)
    except BaseException as failure:
        _clear(temporary, made)
        if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            why = f"the disk is full, or a limit of file size was met ({failure.strerror}); nothing was left there"
            raise OSError(failure.errno, why, str(out)) from failure
        raise
    if temporary.exists():
        shutil.rmtree(temporary)


def write_text(file: Path, text: str) -> None:
    """Write a text file and flush it to the disk."""
    with file.open("x", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def copy_file(source: Path, target: Path) -> None:
    """Copy a file as it is and flush it to the disk; a link is followed."""
    shutil.copyfile(source, target)
    with target.open("rb") as stream:
        os.fsync(stream.fileno())


def _put(written: Path, out: Path) -> None:
    """Move what was written to its place; what stood there goes when the new one stands."""
    if written.is_file():
        os.replace(written, out)
        return
    old = out.parent / f"{_MARK}{os.getpid()}-{_OLD}-{out.name}"
    moved = out.is_dir() and any(out.iterdir())
    if moved:
        os.rename(out, old)
    try:
        os.rename(written, out)
    except BaseException:
        if moved:
            os.rename(old, out)
        raise
    if moved:
        shutil.rmtree(old)


def _check_room(parent: Path, size: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < size:
        why = f"the disk has {free / 1e9:.2f} GB free and {size / 1e9:.2f} GB are needed: make room or choose another"
        raise OSError(errno.ENOSPC, why, str(parent))


def _sweep(parent: Path) -> None:
    """Remove what killed runs left here, and put back what they had moved aside."""
    for left in parent.glob(f"{_MARK}*"):
        pid, token, name = ([*left.name.removeprefix(_MARK).split("-", 2), "", ""])[:3]
        if not name or not pid.isdigit() or _runs(int(pid)):
            continue
        if token == _OLD and not (parent / name).exists():
            os.rename(left, parent / name)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _missing(folder: Path) -> list[Path]:
    """Return the folders that must be made, the deepest first."""
    return [each for each in (folder, *folder.parents) if not each.exists()]


def _clear(temporary: Path, made: Iterable[Path]) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    for folder in made:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
