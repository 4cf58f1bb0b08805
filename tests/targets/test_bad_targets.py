"""Every way in which a target can be wrong ends in one clear message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from normwise.errors import CheckpointError, TargetError
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


@pytest.mark.parametrize(
    ("folder", "target", "content", "hint"),
    [
        (".", "kit/nets/model.py:build", "import kit.parts\n", "'kit'; give kit.nets.model:build"),
        (".", "kit/nets/model.py", "import kit.parts\n", "'kit'; give kit.nets.model:NAME"),
        (".", "kit/nets/model.py:build", "from ..parts import x\n", "package; give kit.nets.model:build"),
        ("kit", "nets/model.py:build", "import kit.parts\n", "'kit'; give kit.nets.model:build in the folder {root}"),
        (".", "kit/nets/model.py:build", "import beside\n", "'beside'; give kit.nets.model:build"),
        (".", "kit/no-name/model.py:build", "import beside\n", "'beside'"),
        (".", "kit/nets/model.py:build", "import no_such_package_anywhere\n", "'no_such_package_anywhere'"),
        (".", "kit/nets/model.py:build", "from torch import no_such_name\n", "/__init__.py)"),
    ],
)
def test_a_file_that_needs_its_package_is_named_as_a_module(
    folder: str, target: str, content: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kit/__init__.py", "kit/parts.py", "kit/nets/__init__.py", "beside.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    for place in ("nets", "no-name"):
        (tmp_path / "kit" / place).mkdir(exist_ok=True)
        (tmp_path / "kit" / place / "model.py").write_text(f"{content}build = 1\n")
    monkeypatch.chdir(tmp_path / folder)
    with pytest.raises(TargetError) as caught:
        load(target)
    assert str(caught.value).endswith(hint.format(root=tmp_path))


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
    ("name", "error", "message"),
    [
        ("model.pt", CheckpointError, "no zip archive"),
        ("pytorch_model.bin", CheckpointError, "no zip archive"),
        ("last.ckpt", CheckpointError, "no zip archive"),
        ("model.safetensors", CheckpointError, "a header of"),
        ("model.safetensors.index.json", CheckpointError, "no valid JSON"),
        ("model.pkl", TargetError, r"a pickle can run any code when it is opened, .* safetensors"),
        ("notes.txt", TargetError, "is no Python file"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(tmp_path: Path, name: str, error: type[Exception], message: str) -> None:
    (tmp_path / name).write_bytes(b"not even a real one, whatever its name says")
    with pytest.raises(error, match=message):
        load(str(tmp_path / name))


@pytest.mark.parametrize("name", ["model.pt", "model.pkl"])
def test_a_pickle_that_would_run_code_does_not(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "ran"
    (tmp_path / name).write_bytes(f"cos\nsystem\n(S'touch {mark}'\ntR.".encode())
    with pytest.raises((TargetError, CheckpointError)):
        load(str(tmp_path / name))
    assert not mark.exists()


def test_a_folder_without_weights_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"has no weights \(\.safetensors, .*\) and no config\.json"):
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
