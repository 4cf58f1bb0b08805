"""No payload of a pickle is ever run, whatever file it is in and whichever way it is given; pickle itself runs all."""

from __future__ import annotations

from itertools import cycle, islice, product
from pathlib import Path

import pytest

from tests.hostile.canaries import ENTRIES, SHAPES
from tests.hostile.payloads import PAYLOADS
from tests.hostile.warm import Warm

each_payload = pytest.mark.parametrize("payload", PAYLOADS)
# a process each: every third by default
a_sample = pytest.mark.parametrize(
    "payload", [pytest.param(p, marks=pytest.mark.slow if i % 3 else ()) for i, p in enumerate(PAYLOADS)]
)
_NUMBERS = {payload: number for number, payload in enumerate(PAYLOADS)}
_NO_ERROR = {0, 1}  # with what it was given for, a hostile file is never a clean one


def test_there_are_as_many_payloads_as_it_says() -> None:
    assert len(PAYLOADS) >= 30


@a_sample
def test_the_payload_works_where_it_is_unpickled(payload: str, warm: Warm, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    warm.do("canaries:unpickled", payload, str(canary))
    assert any(path.name.startswith("canary") for path in tmp_path.iterdir())


def _judge(warm: Warm, payload: str, entries: list[str], shapes: list[str], folder: Path) -> None:
    answer = warm.do("canaries:attacked", payload, entries, shapes, str(folder), limit=600)
    assert answer.status == 0
    assert answer.value["ran"] == []
    assert list(folder.iterdir()) == []
    taken = {entry for entry, said in answer.value["answers"].items() if said in _NO_ERROR}
    assert {
        entry for entry in taken if " with " not in entry
    } == set()  # a folder holds sound weights or none beside it


@a_sample
def test_some_entries_do_not_run_the_payload(payload: str, warm: Warm, tmp_path: Path) -> None:
    ways = list(product(ENTRIES, SHAPES))
    chosen = islice(cycle(ways), _NUMBERS[payload] * 5, _NUMBERS[payload] * 5 + 1)
    for number, (entry, shape) in enumerate(chosen):
        folder = tmp_path / str(number)
        folder.mkdir()
        _judge(warm, payload, [entry], [shape], folder)


@pytest.mark.slow
@each_payload
def test_no_entry_runs_the_payload(payload: str, warm: Warm, tmp_path: Path) -> None:
    _judge(warm, payload, list(ENTRIES), list(SHAPES), tmp_path)
