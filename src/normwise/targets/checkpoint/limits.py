"""What a file of weights may be, and the errors for one that is not: the only way in which reading one fails.

Each code names one kind of defect (``CODES``). The limits are far beyond every published checkpoint; they bound the
memory and the time that a hostile one can cost.
"""

from __future__ import annotations

from normwise.errors import CheckpointError

__all__ = [
    "CODES",
    "CONFIG_BYTES",
    "DEPTH",
    "HEADER_BYTES",
    "INDEX_BYTES",
    "ITEMS",
    "METADATA_BYTES",
    "NAME",
    "NORM_BYTES",
    "NORM_ELEMENTS",
    "PICKLE_BYTES",
    "SHARDS",
    "TENSORS",
    "broken",
]

HEADER_BYTES = 100_000_000  # the limit of the safetensors library
METADATA_BYTES = 10_000_000
TENSORS = 200_000  # of one file: the largest mixtures of experts have about 100,000 in all their shards
NAME = 512  # characters
INDEX_BYTES = 32_000_000  # of DeepSeek-V3, with 91,000 tensors: 9 MB
CONFIG_BYTES = 10_000_000
ITEMS = 2_000_000  # of a JSON text
DEPTH = 64  # of a JSON text
SHARDS = 4096
NORM_ELEMENTS = 2**22  # of one gain: no width comes near it
NORM_BYTES = 2**27  # of all norms; those of a model with 405 billion parameters take 8 MB
PICKLE_BYTES = 100_000_000  # of the pickle in a .pt file, without its tensors

CODES = {
    "not-a-file": "a pipe, a device, or a folder where a file has to be",
    "unreadable": "the system does not let it be read",
    "too-short": "shorter than the smallest file of its kind",
    "header-size": "a safetensors header larger than the file or than the limit",
    "bad-header": "a safetensors header that is no JSON object of tensors",
    "bad-name": "a name that is no valid text",
    "name-too-long": "a name beyond the limit",
    "duplicate-name": "a name that occurs twice",
    "too-many-tensors": "more tensors than the limit",
    "bad-metadata": "metadata that do not map text to text, or beyond the limit",
    "bad-dtype": "a dtype that safetensors does not have",
    "bad-shape": "a shape that is no list of numbers from 0, or whose size overflows",
    "bad-offsets": "tensors that overlap, leave a hole, or lie outside the file",
    "size-mismatch": "bytes of a tensor that are not its shape times its dtype",
    "length-mismatch": "data longer or shorter than the header says",
    "truncated": "a file that ends before what is to be read",
    "bad-json": "a JSON text that is broken",
    "json-too-large": "a JSON text beyond the limits of size, items or depth",
    "bad-index": "an index without a weight_map of tensors to files",
    "bad-shard-name": "an index that names what is no plain file name of safetensors",
    "too-many-shards": "more shards than the limit",
    "shard-missing": "a shard that is not there",
    "tensor-missing": "a tensor that the index names and its shard lacks",
    "bad-config": "a config.json that is no object",
    "no-weights": "a folder without weights that are read here",
    "several-weights": "a folder with several files of weights and no index",
    "norms-too-large": "norms beyond the limit in all",
    "not-zip": "a .pt, .pth, .bin or .ckpt file that is no zip archive",
    "legacy-pickle": "a bare pickle, as torch saved before 1.6",
    "bad-zip": "a zip archive that is broken or contradicts itself",
    "compressed": "members of a zip archive that are compressed or encrypted",
    "bad-member": "members of a zip archive with hostile or duplicate names",
    "too-large": "a file beyond the limit of size or of free memory",
    "torchscript": "a TorchScript archive, which holds code",
    "bad-pickle": "a pickle that torch cannot read",
    "pickle-needs-code": "a pickle that needs more than tensors",
    "no-tensors": "a pickle without tensors under names",
    "pickled-shards": "shards that are pickles",
    "no-limits": "a system that cannot limit a process, as pickles need",
    "memory": "a pickle that needs more memory than its size allows",
    "timeout": "a pickle that takes longer than its size allows",
    "killed": "a pickle whose reader was ended by the system",
}
"""Every code of a ``CheckpointError`` and the defect that it names."""


def broken(code: str, path: str, reason: str) -> CheckpointError:
    """Return the error for a defect.

    Args:
        code: one of ``CODES``.
        path: the file.
        reason: what is wrong, and one next step.
    """
    if code not in CODES:
        raise KeyError(code)
    return CheckpointError(code, path, reason)
