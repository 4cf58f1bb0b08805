"""Every way in which a target can be wrong ends in one clear message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from normwise.errors import TargetError
from normwise.targets import load, target

FOLDER = Path(__file__).parents[1] / "data" / "targets"


@pytest.mark.parametrize(
    ("callable_name", "message"),
    [
        ("modle", r"there is no 'modle'; did you mean model\? it defines .*model_and_tuple.* and \d+ more"),
        ("NUMBER", r"is a int, not callable; name a function that returns a model"),
        ("needs", r"needs arguments \(depth\) and normwise gives none; .*defaults"),
        ("raises", r"raised at .*answers\.py:\d+: AttributeError: 'Net' object has no attribute 'no_such_attribute'"),
        ("exits", r"raised at .*answers\.py:\d+: SystemExit: usage: train\.py"),
        ("text", r"expected a model, \(model, inputs\), a dict of Target fields or a Target, got a str"),
        ("nothing", r"got None"),
        ("three", r"got a tuple of Net, Tensor, Tensor"),
        ("misspelt", r"'optimiser' is no evidence normwise knows; the names are .*optimizer"),
        ("without_model", r"needs 'model', a torch\.nn\.Module, got only inputs"),
        ("unknown_weights", r"'trained' is not a valid Weights"),
        ("bad_inputs", r"inputs are a tuple of positional .* got a int"),
    ],
)
def test_a_callable_that_gives_no_target(callable_name: str, message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        load(f"{FOLDER / 'answers.py'}:{callable_name}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import no_such_package_anywhere\n", r"failed at .*user\.py:1: ModuleNotFoundError: .*no_such_package"),
        ("\n\ndef f(:\n", r"failed at .*user\.py:3: SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)\n", r"failed at .*user\.py:2: SystemExit: 3"),
        ("import torch\ntorch.zeros(2) @ torch.zeros(3)\n", r"failed at .*user\.py:2: RuntimeError"),
        ("x = 1\n", r"there is no 'build'; it defines no callable"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "user.py"
    path.write_text(content)
    with pytest.raises(TargetError, match=message):
        load(f"{path}:build")
    assert [item.name for item in tmp_path.iterdir()] == ["user.py"]


def test_a_file_without_a_callable() -> None:
    with pytest.raises(TargetError, match=r"names a file but no callable in it; give .*answers\.py:NAME"):
        load(str(FOLDER / "answers.py"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("absent.py:build", r"there is no file absent\.py"),
        ("absent.pt", r"absent\.pt: there is no such file"),
        ("weights/absent.safetensors", r"there is no such file"),
        ("a sentence", r"no kind of target is written like this\nA target is one of: .*demo:faulty-decoder"),
        ("bert", r"did you mean hf:bert\?"),
        ("berd", r"did you mean hf:bert\?"),
        ("demo:faulty-decodr", r"did you mean demo:faulty-decoder\? the demos are .*healthy-resnet"),
    ],
)
def test_a_text_that_names_nothing(text: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        load(text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.pt", r"a pickle can run any code when it is opened, so normwise never loads one; .*safetensors"),
        ("pytorch_model.bin", r"normwise never loads one"),
        ("last.ckpt", r"normwise never loads one"),
        ("model.pkl", r"normwise never loads one"),
        ("model.safetensors", r"cannot check a checkpoint by itself yet"),
        ("model.safetensors.index.json", r"cannot check a checkpoint by itself yet"),
        ("notes.txt", r"is no Python file"),
    ],
)
def test_a_file_of_another_kind_is_not_opened(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"not even a real one")
    with pytest.raises(TargetError, match=message):
        load(str(tmp_path / name))


def test_a_pickle_that_would_run_code_does_not(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "model.pt").write_bytes(f"cos\nsystem\n(S'touch {mark}'\ntR.".encode())
    with pytest.raises(TargetError, match="pickle"):
        load(str(tmp_path / "model.pt"))
    assert not mark.exists()


def test_a_folder_is_pointed_to_its_prefix(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=f"this is a folder; for a transformers model in it give hf:{tmp_path}"):
        load(str(tmp_path))


@pytest.mark.parametrize("given", [3, None, nn.Linear, {"model": nn.Linear(1, 1)}])
def test_an_object_that_is_no_target_is_a_type_error(given: object) -> None:
    with pytest.raises(TypeError, match=r"a target is a torch\.nn\.Module, a Target or a TARGET string, got a"):
        target(given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimiser": None}, r"'optimiser' is no evidence .* optimizer, scheduler, checkpoint"),
        ({"inputs": 3}, r"inputs are a tuple of positional arguments.* got a int"),
        ({"dtype": "float17"}, r"'float17' is no torch dtype; give for example float16"),
        ({"reference": "a path"}, r"'reference' is a torch\.nn\.Module, got a str"),
    ],
)
def test_wrong_evidence_is_a_type_error(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        target(nn.Linear(2, 2), **arguments)


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(TargetError, match="'gpu' is no device; give for example cpu, cuda or cuda:1"):
        load(nn.Linear(2, 2), device="gpu")


def test_a_device_that_is_not_there() -> None:
    device = "mps" if not torch.backends.mps.is_available() else "cuda"
    with pytest.raises(TargetError, match=f"Linear cannot be moved to {device}"):
        load(nn.Linear(2, 2), device=device)
