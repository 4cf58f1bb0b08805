from __future__ import annotations

import json
import struct
from importlib.resources import files
from pathlib import Path

import torch

from normwise.studies._digits import digits

# Of the test part, as its authors count them on archive.ics.uci.edu/dataset/80.
COUNTED = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_classes_are_as_many_as_the_authors_counted() -> None:
    assert torch.bincount(digits().labels.long()).tolist() == COUNTED


def test_the_hash_is_that_of_the_images_and_labels() -> None:
    assert digits().digest == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_the_parts_are_all_images_once_from_0_to_1() -> None:
    (seen, _), (asked, labels) = digits().training, digits().test
    assert torch.equal((torch.cat((seen, asked)).squeeze(1) * 16).to(torch.uint8), digits().images)
    assert (seen.min(), seen.max()) == (0, 1)
    assert asked.shape == (597, 1, 8, 8)
    assert labels.dtype == torch.int64


def test_file_and_notice_name_source_and_licences() -> None:
    content = files("normwise.studies").joinpath("digits.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    told = json.loads(content[8 : 8 + size])["__metadata__"]
    assert told["licence"].startswith("CC BY 4.0")
    assert "BSD-3-Clause" in told["taken_from"]
    notice = (Path(__file__).parents[2] / "NOTICE").read_text()
    assert "CC BY 4.0" in notice
    assert "Redistributions in binary form must reproduce the above copyright" in notice
