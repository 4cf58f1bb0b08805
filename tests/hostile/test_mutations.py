"""Whatever a file holds, reading it succeeds or ends in the one error of its reader, soon and in little memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.mutations import FORMATS
from tests.hostile.warm import Warm

_MANY, _FEW = 20_000, 300
_DEAR = {"pickle": 100, "hf": 300}  # each starts a process of torch, or builds a model
_SECONDS, _MEGABYTES = 2.0, 300.0
_DEAREST = 10.0  # seconds: a changed digit makes a model a hundred times as wide


def _judge(warm: Warm, format: str, count: int, seed: int, folder: Path) -> None:
    answer = warm.do("mutations:run", format, count, seed, str(folder), limit=3000)
    assert answer.status == 0
    found = answer.value
    assert found["wrong"] == []
    assert found["wrongs"] == 0
    assert sum(found["said"].values()) == count
    assert len(found["said"]) > 1
    assert found["slowest"] < (_DEAREST if format in _DEAR else _SECONDS)
    assert format in _DEAR or answer.megabytes < _MEGABYTES
    print(f"{format}: {count:,}, {answer.seconds:.0f} s, {answer.megabytes:.0f} MB, {found}")


@pytest.mark.parametrize("format", sorted(FORMATS.keys() - _DEAR.keys()))
def test_three_hundred_mutations(format: str, warm: Warm, tmp_path: Path) -> None:
    _judge(warm, format, _FEW, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_twenty_thousand_mutations(format: str, warm: Warm, tmp_path: Path) -> None:
    _judge(warm, format, _DEAR.get(format, _MANY), 2, tmp_path)
