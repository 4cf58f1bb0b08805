"""Checkpoints converted tensor by tensor: what is written, what is copied, what it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import normwise as nw
from normwise.conversions import Plan, Recipe, Step
from normwise.conversions._edits import AddBias, SwapNorm, Untie
from normwise.conversions._plan import Change
from normwise.conversions.saving import convert_checkpoint
from normwise.conversions.saving.checkpoint import Checkpoint
from normwise.conversions.saving.tensors import Written, write
from normwise.errors import ConversionRefused, TargetError
from normwise.targets.hf_build import quiet
from tests.conversions.folders import IDS, built, hashes, saved

CENTRE = Step(function="centre", numbers={"dim": -1})


class Tied(nn.Module):
    """A head that is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def plan(*recipes: Recipe, edits: tuple = (), ties: tuple = ()) -> Plan:
    changes = (Change(path="norm", what="LayerNorm -> RMSNorm"),)
    return Plan(conversion="by-hand", recipes=recipes, edits=edits, ties=ties, changes=changes)


def stored(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name, metadata={"format": "pt", "by": "hand"})
    return folder / name


def sharded(folder: Path, *shards: dict[str, torch.Tensor]) -> Path:
    names = [f"model-{n}-of-{len(shards)}.safetensors" for n in range(1, len(shards) + 1)]
    for name, tensors in zip(names, shards, strict=True):
        stored(folder, tensors, name)
    weight_map = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
    total = sum(t.numel() * t.element_size() for tensors in shards for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_recipe_is_computed_in_float64_and_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = (torch.randn(5, 4) + 3).to(dtype)
    source = stored(tmp_path, {"embed.weight": weight, "norm.weight": torch.ones(4), "norm.bias": torch.ones(4)})
    convert_checkpoint(
        plan(Recipe(keys=("embed.weight",), steps=(CENTRE,))),
        source,
        tmp_path / "out",
        model=Tied(),
        format="safetensors",
    )
    held = load_file(tmp_path / "out" / "model.safetensors")
    exact = weight.double() - weight.double().mean(-1, keepdim=True)
    assert torch.equal(held["embed.weight"], exact.to(dtype))
    assert torch.equal(held["norm.bias"], torch.ones(4))


def test_a_tall_tensor_is_made_in_blocks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normwise.conversions.saving.streaming._BLOCK", 8)
    weight, gain = torch.randn(5, 4) + 3, torch.randn(4)
    source = stored(tmp_path, {"embed.weight": weight, "norm.weight": gain})
    scale = Step(function="scale", reads=("norm.weight",), numbers={"dim": -1})
    made = plan(Recipe(keys=("embed.weight",), steps=(CENTRE, scale)))
    convert_checkpoint(made, source, tmp_path / "out", model=Tied(), format="safetensors")
    exact = (weight.double() - weight.double().mean(-1, keepdim=True)) * gain.double()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["embed.weight"], exact.float())


def test_the_order_of_keys_the_metadata_and_odd_dtypes_stay(tmp_path: Path) -> None:
    tensors = {
        "norm.weight": Written.made(torch.float32, (4,), lambda: torch.ones(4)),
        "embed.weight": Written.made(torch.bfloat16, (5, 4), lambda: torch.ones(5, 4, dtype=torch.bfloat16)),
        "norm.steps": Written.made(torch.int64, (), lambda: torch.tensor(7)),
        "norm.mask": Written.made(torch.bool, (3,), lambda: torch.tensor([True, False, True])),
        "norm.small": Written.made(torch.float8_e4m3fn, (2,), lambda: torch.ones(2).to(torch.float8_e4m3fn)),
        "norm.none": Written.made(torch.float32, (0, 4), lambda: torch.empty(0, 4)),
    }
    write(tmp_path / "in.safetensors", tensors, {"format": "pt", "step": "7"})
    convert_checkpoint(
        plan(Recipe(keys=("embed.weight",), steps=(CENTRE,))),
        tmp_path / "in.safetensors",
        tmp_path / "out",
        model=Tied(),
        format="safetensors",
    )
    with safe_open(tmp_path / "out" / "in.safetensors", "pt") as written:
        assert written.metadata() == {"format": "pt", "step": "7"}
    made = Checkpoint.open(tmp_path / "out" / "in.safetensors").tensors
    assert list(made) == list(tensors)
    assert [(t.dtype, t.shape) for t in made.values()] == [(t.dtype, t.shape) for t in tensors.values()]
    assert made["norm.steps"].load() == 7


def test_a_new_tensor_goes_where_those_of_its_module_are(tmp_path: Path) -> None:
    weight = torch.randn(5, 4, dtype=torch.bfloat16)
    source = sharded(
        tmp_path / "in",
        {"embed.weight": weight, "norm.weight": torch.ones(4)},
        {"head.weight": weight, "norm.bias": torch.ones(4)},
    )
    bias = Recipe(
        keys=("head.bias",), shape=(5,), dtype="float32",
        steps=(Step(function="add_product", reads=("head.weight", "norm.bias"), numbers={"dim": -1}),),
    )  # fmt: skip
    made = plan(bias, edits=(AddBias(path="head", size=5, dtype="float32"),), ties=(("embed.weight", "head.weight"),))
    convert_checkpoint(made, source, tmp_path / "out", model=Tied(), format="safetensors")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    held = load_file(tmp_path / "out" / "model-2-of-2.safetensors")
    assert index["weight_map"]["head.bias"] == "model-2-of-2.safetensors"
    assert index["metadata"]["total_size"] == 2 * 40 + 2 * 16 + 10
    assert list(index["weight_map"])[:2] == ["embed.weight", "norm.weight"]
    assert held["head.bias"].dtype == torch.bfloat16  # as the weight beside it
    assert torch.equal(held["head.bias"], weight.double().sum(1).bfloat16())


def test_a_dropped_tensor_is_not_written(tmp_path: Path) -> None:
    source = stored(
        tmp_path, {"embed.weight": torch.ones(5, 4), "norm.weight": torch.ones(4), "norm.bias": torch.ones(4)}
    )
    swap = SwapNorm(path="norm", spec={"weight": "none"}, shape=(4,), drops=("weight", "bias"))
    convert_checkpoint(plan(edits=(swap,)), source, tmp_path / "out", model=Tied(), format="safetensors")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"embed.weight"}


def test_an_untied_head_is_the_matrix_as_it_was(tmp_path: Path) -> None:
    weight = torch.randn(5, 4) + 1
    source = stored(tmp_path, {"embed.weight": weight, "norm.weight": torch.ones(4), "norm.bias": torch.ones(4)})
    made = plan(
        Recipe(keys=("embed.weight",), steps=(CENTRE,)),
        edits=(Untie(path="head", name="weight", source="embed.weight"),),
        ties=(("embed.weight", "head.weight"),),
    )
    convert_checkpoint(made, source, tmp_path / "out", model=Tied(), format="safetensors")
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(held["head.weight"], weight)
    assert held["embed.weight"].mean(-1).abs().max() < 1e-6


def test_numbers_that_leave_the_range_of_their_dtype_are_refused(tmp_path: Path) -> None:
    source = stored(tmp_path / "in", {"embed.weight": torch.full((5, 4), 3e4, dtype=torch.float16)})
    recipe = Recipe(keys=("embed.weight",), steps=(Step(function="add_number", numbers={"number": 6e4}),))
    with pytest.raises(ConversionRefused, match="leave the range of float16"):
        convert_checkpoint(plan(recipe), source, tmp_path / "out", model=Tied(), format="safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_checkpoint_of_a_model_around_the_planned_one_is_refused(tmp_path: Path) -> None:
    source = saved("gpt2", tmp_path / "in")
    with quiet():
        base = built("gpt2").get_submodule("transformer")
    made = nw.conversions.plan("rms-norm", base, IDS)
    recipe = Recipe(keys=("wte.weight",), steps=(CENTRE,))
    with pytest.raises(ConversionRefused, match=r"wte\.weight: .* whose head may share this tensor; plan the class"):
        convert_checkpoint(plan(recipe), source, tmp_path / "out", model=base)
    assert made.changes


def centred(source: Path, out: Path) -> None:
    centre = plan(Recipe(keys=("embed.weight",), steps=(CENTRE,)))
    convert_checkpoint(centre, source, out, model=Tied(), format="safetensors")


def test_modules_that_the_plan_did_not_see_are_refused(tmp_path: Path) -> None:
    source = stored(tmp_path, {"embed.weight": torch.ones(5, 4), "decoder.norm.weight": torch.ones(4)})
    with pytest.raises(ConversionRefused, match=r"decoder\.norm\.weight: the checkpoint holds it and Tied"):
        centred(source, tmp_path / "o")


def test_a_checkpoint_without_a_tensor_that_is_needed_is_refused(tmp_path: Path) -> None:
    source = stored(tmp_path, {"norm.weight": torch.ones(4)})
    with pytest.raises(ConversionRefused, match=r"embed\.weight: the checkpoint has no tensor of this name"):
        centred(source, tmp_path / "o")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "model-1-of-2.safetensors").unlink(), "the shard model-1-of-2.safetensors is missing"),
        (lambda f: (f / "model-1-of-2.safetensors").write_bytes(b"x" * 40), "no sound safetensors file"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "no index of shards"),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'), "is missing"),
        (lambda f: stored(f, {"norm.weight": torch.ones(1)}, "model-1-of-2.safetensors"), "is in two shards"),
        (lambda f: stored(f, {"else": torch.ones(1)}, "model-1-of-2.safetensors"), "do not hold the same tensors"),
    ],
)  # fmt: skip
def test_a_broken_checkpoint_is_an_error_with_a_reason(tmp_path: Path, break_it: object, message: str) -> None:
    folder = sharded(tmp_path / "in", {"embed.weight": torch.ones(5, 4)}, {"norm.weight": torch.ones(4)})
    break_it(folder)  # type: ignore[operator]
    with pytest.raises(TargetError, match=message):
        Checkpoint.open(folder)


def test_weights_in_a_pickle_only_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(TargetError, match=r"pytorch_model\.bin, which normwise never opens"):
        Checkpoint.open(tmp_path)


MEASURED = """
import re, sys
from pathlib import Path
import torch
from torch import nn
from normwise.conversions import Plan, Recipe, Step
from normwise.conversions.saving import convert_checkpoint

class Many(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(54))

keys = [f"layers.{n}.weight" for n in range(54)]
centre = [Step(function="centre", numbers={"dim": dim}) for dim in (0, -1)]
plan = Plan(conversion="by-hand", recipes=tuple(
    Recipe(keys=(key,), steps=(centre[n % 2],)) for n, key in enumerate(keys)))
def peak():  # of this program; ru_maxrss counts the parent's, too
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

model, start = Many(), peak()
convert_checkpoint(plan, sys.argv[1], sys.argv[2], model=model, format='safetensors')
print(start, peak())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_memory_stays_below_twice_the_largest_shard(tmp_path: Path) -> None:
    """Three shards of 72 MB, of tensors of 4 MB: a few of the largest tensor in float64."""
    shards = [{f"layers.{n}.weight": torch.zeros(1024, 1024) for n in range(18 * s, 18 * s + 18)} for s in range(3)]
    folder = sharded(tmp_path / "in", *shards)
    arguments = [sys.executable, "-c", MEASURED, str(folder), str(tmp_path / "out")]
    found = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    start, peak = map(int, found.stdout.split())
    assert (peak - start) * 1024 < 2 * 18 * 4 * 2**20
    assert hashes(tmp_path / "out").keys() >= {"model-1-of-3.safetensors", "model.safetensors.index.json"}
