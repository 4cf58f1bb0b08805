"""Reads the tensors of a pickle in a process of its own: an order on standard input, answers on standard output.

It is run as a file and imports torch alone. The limits of memory, time and files are set before the pickle is opened,
which torch does with ``weights_only=True`` and without a memory map. What comes back is no pickle: a JSON text with the
names, shapes and dtypes, and then the bytes of those tensors that are asked for.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

__all__: list[str] = []

_KNOWN_FIRST = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")
_DEEPEST = 4
_SAID = 4000  # characters of an error
_MOST = 200_000


def main() -> None:
    """Answer one order."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what torch prints is no part of the answer
    order = json.loads(_line())
    sys.path[:] = order["path"]
    try:
        tensors, head = _opened(order)
    except BaseException as error:
        memory = isinstance(error, MemoryError) or "alloc" in str(error)
        _send(answers, json.dumps({"error": type(error).__name__, "said": str(error)[:_SAID], "memory": memory}))
        os._exit(0)
    _send(answers, json.dumps(head))
    for name in json.loads(_line()):
        _send(answers, _bytes(tensors[name]))
    os._exit(0)


def _opened(order: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    torch.set_num_threads(1)
    _limit(order)
    with os.fdopen(order["file"], "rb", closefd=False) as file:
        file.seek(0)
        held = torch.load(file, map_location="cpu", weights_only=True, mmap=False)
    mappings = [m for m in _mappings(held, "", 0, set(), torch.Tensor) if m[1]]
    if not mappings:
        return {}, {"tensors": {}, "key": "", "others": []}
    path, tensors = max(mappings, key=_rank)
    others = [p for p, _ in sorted(mappings, key=_rank, reverse=True) if p != path][:50]
    listed = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    return tensors, {"tensors": listed, "key": path, "others": others}


def _limit(order: dict[str, Any]) -> None:
    import resource

    def lower(which: int, most: int) -> None:
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))

    lower(resource.RLIMIT_AS, _mapped() + order["memory"])
    lower(resource.RLIMIT_CPU, int(sum(os.times()[:2])) + order["seconds"])
    lower(resource.RLIMIT_FSIZE, 0)
    lower(resource.RLIMIT_NOFILE, 64)
    lower(resource.RLIMIT_CORE, 0)


def _mapped() -> int:
    """Return the bytes of address space that torch itself takes."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: what torch maps on macOS is below this
        return 1 << 40


def _mappings(held: Any, path: str, depth: int, seen: set[int], tensor: type) -> list[tuple[str, dict[str, Any]]]:
    """Return every mapping of names to tensors, also of those inside mappings, by the keys that lead to it."""
    if not isinstance(held, dict) or depth > _DEEPEST or id(held) in seen:
        return []
    seen.add(id(held))
    own = {k: v for k, v in held.items() if isinstance(k, str) and isinstance(v, tensor) and _dense(v)}
    if len(own) > _MOST:
        raise ValueError(f"more than {_MOST} tensors")
    inner = [m for k, v in held.items() for m in _mappings(v, f"{path}.{k}"[:512], depth + 1, seen, tensor)]
    return [(path.removeprefix("."), own), *inner]


def _dense(tensor: Any) -> bool:
    return tensor.layout.__str__() == "torch.strided" and not tensor.is_quantized and tensor.device.type == "cpu"


def _rank(mapping: tuple[str, dict[str, Any]]) -> tuple[int, int]:
    """Most tensors first; of copies of one model (an average beside it) the one under a usual name."""
    path, tensors = mapping
    last = path.rpartition(".")[2]
    return len(tensors), -_KNOWN_FIRST.index(last) if last in _KNOWN_FIRST else -len(_KNOWN_FIRST)


def _bytes(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _line() -> bytes:
    read = b""
    while not read.endswith(b"\n"):
        more = os.read(0, 1 << 16)
        if not more:
            os._exit(1)  # nobody waits any more
        read += more
    return read


def _send(to: int, answer: str | bytes) -> None:
    data = answer.encode("utf-8", "backslashreplace") if isinstance(answer, str) else answer
    data = len(data).to_bytes(8, "little") + data
    while data:
        data = data[os.write(to, data) :]


if __name__ == "__main__":
    main()
