"""The tensors of a .pt, .pth, .bin or .ckpt file, unpickled by torch in a process that can do no harm.

Before that the archive and its pickle are looked at (``archive``, ``globals_of``). The process has limits of memory,
processor time, open files and written bytes, and is ended when it takes too long; it is fed through pipes and answers
with plain bytes. A system without such limits gets no pickles read.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Timer

import torch

from normwise.errors import CheckpointError
from normwise.rendering import both, clean, shorten
from normwise.targets.checkpoint import json_text
from normwise.targets.checkpoint.archive import convert, pickle_of
from normwise.targets.checkpoint.files import File
from normwise.targets.checkpoint.globals_of import examine, needs_code
from normwise.targets.checkpoint.limits import INDEX_BYTES, NAME, NORM_BYTES, broken
from normwise.targets.checkpoint.safetensors_header import Entry

__all__ = ["SUFFIXES", "Pickled"]

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

_WORKER = str(Path(__file__).with_name("_unpickle.py"))
_HEADROOM = 512_000_000  # bytes beside the tensors, which are read whole
_SECONDS, _RATE = 30, 50_000_000  # and a second for so many bytes: a slow disk
_OF_FREE = 0.8  # of the memory that is free
_DTYPES = {
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_WIDTHS = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_REFUSED = re.compile(r"GLOBAL ([^\s]+)|[Uu]nsupported (?:class|function) ([^\s]+)")
_BEHIND_ADVICE = re.compile(r"WeightsUnpickler error:\s*(.+)")  # what is wrong, behind what torch advises to do
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip
_UNSAFE = ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD")


class Pickled:
    """One archive of ``torch.save``.

    Raises:
        CheckpointError: it is anything else, needs code, or needs more than its size allows.
    """

    files = 1

    def __init__(self, path: Path) -> None:
        self._file = File(path)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._path, self.size = self._file.path, self._file.size
            examine(pickle_of(self._file), self._path)
            self._start()
            self._head()
        except BaseException:
            self.close()
            raise
        self.bytes_read = self.size  # torch reads it whole

    # -- the process ----------------------------------------------------------------------

    def _start(self) -> None:
        if os.name != "posix":
            why = "this system cannot limit a process, so pickles are not read here; convert it where you trust it:\n"
            raise broken("no-limits", self._path, why + convert(self._path))
        memory = self.size + _HEADROOM
        if (free := _free_memory()) is not None and memory > _OF_FREE * free:
            why = f"torch reads it whole, {self.size:,} bytes, and {free:,} are free; convert it to safetensors:\n"
            raise broken("too-large", self._path, why + convert(self._path))
        self._seconds = _SECONDS + self.size // _RATE
        environment = {k: v for k, v in os.environ.items() if k not in _UNSAFE} | _ENVIRONMENT
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        command = [sys.executable, "-P", "-W", "ignore", _WORKER]
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=nothing, env=environment, start_new_session=True,
            pass_fds=[self._file.fileno()],
        )  # fmt: skip
        self._late = False
        self._timer = Timer(self._seconds, self._end_late)
        self._timer.daemon = True
        self._timer.start()
        order = {"path": _path(), "file": self._file.fileno(), "memory": memory, "seconds": self._seconds}
        self._tell(order)

    def _tell(self, order: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead: the answer will be missing
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def _answer(self, most: int) -> bytes:
        length = int.from_bytes(self._exactly(8), "little")
        if length > most:
            raise broken("too-large", self._path, f"an answer of {length:,} bytes, the limit is {most:,}")
        return self._exactly(length)

    def _exactly(self, length: int) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        data = self._process.stdout.read(length)
        if len(data) == length:
            return data
        if self._late:
            raise broken("timeout", self._path, f"torch took longer than {self._seconds} s; convert it to safetensors")
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            raise broken("timeout", self._path, f"torch took longer than {self._seconds} s; convert it to safetensors")
        ended = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
        raise broken("killed", self._path, f"the process that read it ended with {ended}; convert it to safetensors")

    def _end_late(self) -> None:
        self._late = True
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and close the file."""
        if self._process is not None:
            self._timer.cancel()
            self._kill()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            self._process.wait()
        self._file.close()

    # -- what it says ---------------------------------------------------------------------

    def _head(self) -> None:
        head = json_text.parse(self._answer(INDEX_BYTES), self._path, most=INDEX_BYTES)
        if "error" in head:
            raise self._refusal(head)
        self.entries: Mapping[str, Entry] = {n: _entry(d, tuple(s)) for n, (d, s) in head["tensors"].items()}
        if not self.entries:
            raise broken("no-tensors", self._path, "it holds no tensors under names; save the model's state_dict()")
        if any(len(name) > NAME for name in self.entries):
            raise broken("name-too-long", self._path, f"a name beyond the limit of {NAME} characters")
        self.notes: tuple[str, ...] = _key_note(head["key"], head["others"])

    def _refusal(self, head: Mapping[str, str]) -> CheckpointError:
        said = head["said"]
        if head["memory"]:
            return broken("memory", self._path, f"its tensors need more memory than its {self.size:,} bytes say")
        if (refused := _REFUSED.search(said)) is not None:
            return needs_code(refused[1] or refused[2], self._path)
        found = _BEHIND_ADVICE.search(said)
        first = clean(" ".join((found[1] if found else said).split()))
        return broken("bad-pickle", self._path, f"torch cannot read it: {head['error']}: {shorten(first, 160)}")

    def fetch(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of some tensors."""
        wanted = list(names)
        self._tell(wanted)
        found = {name: self._answer(NORM_BYTES) for name in wanted}
        for name, data in found.items():
            if len(data) != self.entries[name].end:
                raise broken("size-mismatch", self._path, f"{name!r:.120} has {len(data):,} bytes")
        return found


def _path() -> list[str]:
    """Return where the process looks for torch: where it is here, and never the folder that the file may lie in."""
    here = os.getcwd()
    return [str(Path(torch.__file__).parents[1]), *(p for p in sys.path if p and os.path.abspath(p) != here)]


def _entry(dtype: str, shape: tuple[int, ...]) -> Entry:
    known = _DTYPES.get(dtype, dtype)
    return Entry(known, shape, 0, math.prod(shape) * _WIDTHS.get(known, 0))


def _key_note(key: str, others: list[str]) -> tuple[str, ...]:
    if not key and not others:
        return ()
    name, rest = clean(key) or "-", ", ".join(shorten(clean(o) or "-", 40) for o in others[:4])
    more, more_zh = (f"; not under {rest}", f"；未读取 {rest}") if rest else ("", "")
    return (both(f"the tensors under the key {name} were read{more}", f"读取了键 {name} 下的张量{more_zh}"),)


def _free_memory() -> int | None:
    """Return the bytes of memory that are free, where the system says."""
    try:
        text = Path("/proc/meminfo").read_text()
        return int(text.partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return None
