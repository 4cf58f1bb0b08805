"""Crafted files through the command line: one message that names the defect, exit 2, nothing written, little spent.

Processor time and memory are those of a process of its own, above what a sound file of the kind takes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.hostile import config_files, onnx_files, pt2_files, safetensors_files, torch_files
from tests.hostile.case import Case
from tests.hostile.commands import contents
from tests.hostile.warm import Answer, Warm

SECONDS, MEGABYTES = 2.0, 300.0
_IN_THE_CHILD = ("cannot read", "no tensors", "limit", "operand")  # torch is started to read these: a second each
_QUICK = 3  # of those, by default


def _cases() -> list[object]:
    torch = [case for case in torch_files.CASES if case.sound or case.word.startswith(_IN_THE_CHILD)]
    slow = set(torch[:: max(1, len(torch) // _QUICK)]) ^ set(torch)
    every = [*safetensors_files.CASES, *torch_files.CASES, *onnx_files.CASES, *pt2_files.CASES]
    return [
        pytest.param(case, id=f"{case.file}: {case.defect}", marks=pytest.mark.slow if case in slow else ())
        for case in every
    ]


GOOD = {
    "model.safetensors": safetensors_files.file(safetensors_files.header(safetensors_files.GOOD)),
    "model.pt": torch_files.good(),
    "model.onnx": onnx_files.good(),
    "model.pt2": pt2_files.good(),
}


@pytest.fixture(scope="module")
def sound(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> object:
    """Give what a sound file of a kind costs."""

    @cache
    def cost(kind: str) -> Answer:
        folder = tmp_path_factory.mktemp("sound")
        if kind in GOOD:
            (folder / kind).write_bytes(GOOD[kind])
            return _checked(warm, folder, str(folder / kind))
        config_files.CASES[-1].make(folder, weights=kind == "DIR")
        (folder / "config.json").write_bytes(config_files.GOOD)
        return _checked(warm, folder, str(folder) if kind == "DIR" else f"hf:{folder}")

    return cost


def _checked(warm: Warm, folder: Path, target: str) -> Answer:
    return warm.do("commands:run", ["check", target, "--isolated"], str(folder))


def _judge(warm: Warm, folder: Path, target: str, word: str, sound: Answer) -> None:
    before = contents(folder)
    answer = _checked(warm, folder, target)
    assert answer.status == 0, "the process ended"
    assert contents(folder) == before
    said = answer.value["err"]
    assert "Traceback" not in said
    assert "bug in normwise" not in said
    assert not any(ord(c) < 32 and c != "\n" for c in said + answer.value["out"])
    assert answer.seconds < SECONDS + sound.seconds
    assert answer.megabytes < MEGABYTES + sound.megabytes
    if not word:
        assert answer.value["code"] in (0, 1), said
        return
    assert answer.value["code"] == 2
    assert answer.value["out"] == ""
    assert said.startswith("normwise: ")
    assert said.count("\nnormwise: ") == 0  # one message, which may bring lines of code to copy
    assert str(folder) in said
    assert word in said.replace(target, "").replace(str(folder), "")  # and not in the name of the file


@pytest.mark.parametrize("case", _cases())
def test_a_crafted_file_is_refused_by_its_defect_or_read(case: Case, warm: Warm, sound, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    case.make(tmp_path)
    _judge(warm, tmp_path, str(tmp_path / case.file), case.word, sound(case.file))


@pytest.mark.parametrize("kind", ["DIR", "hf"])
@pytest.mark.parametrize("case", config_files.CASES, ids=lambda case: case.defect)
def test_a_crafted_configuration_is_refused_by_its_defect_or_read(  # type: ignore[no-untyped-def]
    case: config_files.ConfigCase, kind: str, warm: Warm, sound, tmp_path: Path
) -> None:
    case.make(tmp_path, weights=kind == "DIR")
    target, word = (str(tmp_path), case.word) if kind == "DIR" else (f"hf:{tmp_path}", case.word_hf)
    _judge(warm, tmp_path, target, word, sound(kind))


def test_the_corpus_is_as_large_as_it_says() -> None:
    refused = [sum(not case.sound for case in part.CASES) for part in (safetensors_files, torch_files, onnx_files)]
    assert [count >= least for count, least in zip(refused, (40, 40, 20), strict=True)] == [True] * 3
    assert sum(not case.sound for case in pt2_files.CASES) >= 40
    assert len(config_files.CASES) >= 20


def test_no_two_defects_are_the_same() -> None:
    for part in (safetensors_files, torch_files, onnx_files, pt2_files, config_files):
        defects = [case.defect for case in part.CASES]
        assert len(set(defects)) == len(defects)
