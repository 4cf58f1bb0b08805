"""timm:NAME builds an architecture of timm with random weights and images it runs on, with or without torchvision."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import normwise as nw
from normwise import targets
from normwise.errors import TargetError
from normwise.targets import timm_model
from normwise.targets.target import InputsFrom, Weights

# name, the kinds of the norms, and what the map says of the first stack
ARCHITECTURES = (
    ("resnet18", {"batch"}, "res_post"),
    ("vit_tiny_patch16_224", {"layer"}, "pre"),
    ("convnext_atto", {"layer"}, None),
    ("mobilenetv3_small_050", {"batch"}, None),
    ("gcvit_xxtiny", {"layer"}, None),
    ("swinv2_cr_tiny_ns_224", {"layer", "scale"}, "res_post"),
    ("resnetv2_18", {"batch"}, "pre"),
)


@pytest.mark.parametrize(("name", "kinds", "placement"), ARCHITECTURES)
def test_an_architecture_is_mapped(name: str, kinds: set[str], placement: str | None) -> None:
    report = nw.map(f"timm:{name}")
    assert {site.spec.kind for site in report.norms if site.spec} == kinds
    assert all(site.evidence == "verified" for site in report.norms)
    if placement:
        assert report.placement.stacks[0].kind == placement


def test_the_note_says_what_was_made() -> None:
    target = targets.load("timm:resnet18")
    assert target.inputs_from is InputsFrom.INFERRED
    assert target.weights is Weights.RANDOM
    assert target.notes == ("random weights, inputs generated (2x3x64x96)",)
    assert not target.model.training


def test_a_model_of_one_image_size_is_built_for_a_smaller_one() -> None:
    (images,) = targets.load("timm:vit_tiny_patch16_224").args
    assert images.shape == (2, 3, 64, 96)


def test_inputs_may_be_a_shape() -> None:
    target = targets.load("timm:resnet18", inputs="1x3x32x32")
    assert target.inputs_from is InputsFrom.FROM_SHAPE
    assert target.notes == ("random weights",)


def test_a_giant_is_examined_without_storage() -> None:
    target = targets.load("timm:vit_giant_patch14_224")
    assert target.weights is Weights.FAKE
    assert "1,012," in target.notes[0]
    assert len(nw.map(target).norms) == 81


def test_weights_are_the_same_each_time_and_the_random_state_stays() -> None:
    state = torch.get_rng_state()
    first, second = (targets.load("timm:resnet18").model.state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["resnet-18", "ResNet18"])
def test_an_unknown_name_gives_the_nearest(name: str) -> None:
    if name == "ResNet18":
        assert targets.load(f"timm:{name}").notes
        return
    with pytest.raises(TargetError, match=r"timm .* has no model 'resnet-18'; the nearest are resnet18"):
        targets.load(f"timm:{name}")


def test_an_unknown_tag_is_named() -> None:
    with pytest.raises(TargetError, match="no_such_tag"):
        targets.load("timm:resnet18.no_such_tag")


@pytest.mark.parametrize("name", ["hf-hub:timm/resnet18", "local-dir:/tmp", "hf_hub:a/b", ""])
def test_what_timm_would_fetch_from_elsewhere_is_unknown(name: str) -> None:
    with pytest.raises(TargetError, match="has no model"):
        targets.load(f"timm:{name}")


def test_the_install_command_where_timm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "timm" else real(name))
    with pytest.raises(TargetError, match=r"pip install 'normwise\[timm\]'"):
        timm_model.load("timm:resnet18")


PROBE = """
import sys
from normwise import targets
target = targets.load("timm:resnet18")
assert type(target.model.bn1).__name__ == "BatchNorm2d"
assert not [name for name in sys.modules if name.partition(".")[0] == "torchvision"], "no stand-in stays"
assert not [name for name in sys.modules if name.startswith("timm.data")]
try:
    import torchvision
except {error}:
    print("as before")
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise ModuleNotFoundError('No module named torchvision')", "ModuleNotFoundError"),
        pytest.param(
            "raise RuntimeError('operator torchvision::nms does not exist')", "RuntimeError", marks=pytest.mark.slow
        ),
    ],
)
def test_models_are_built_where_torchvision_is_missing_or_broken(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(text)
    code = PROBE.format(error=error)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "as before\n", done.stderr


def test_a_torchvision_imported_before_stays(tmp_path: Path) -> None:
    misc = tmp_path / "torchvision" / "ops" / "misc.py"
    misc.parent.mkdir(parents=True)
    for folder in (misc.parent, misc.parent.parent):
        (folder / "__init__.py").write_text("")
    misc.write_text("raise RuntimeError('as broken as the other')")
    code = (
        "import sys, torchvision; mine = sys.modules['torchvision']\n"
        "from normwise import targets\n"
        "targets.load('timm:resnet18')\n"
        "assert sys.modules['torchvision'] is mine"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
