"""Every format, there and back: bit for bit the same, also while it generates with a cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import normwise as nw
from normwise.conversions import Converted
from normwise.conversions.saving import convert_checkpoint, formats
from normwise.errors import ConversionRefused, TargetError
from normwise.targets.hf_build import quiet
from tests.conversions.folders import IDS, generated, hashes, logits, saved

WAYS = ("in memory", "tensor by tensor")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("gpt2", tmp_path_factory.mktemp("gpt2") / "model")


@pytest.fixture(scope="module")
def converted(gpt2: Path) -> Converted:
    return nw.convert("rms-norm", f"hf:{gpt2}", IDS)


@pytest.fixture(scope="module")
def folded(gpt2: Path) -> Converted:
    return nw.convert("fold-affine", f"hf:{gpt2}", IDS)


def save(converted: Converted, out: Path, format: str | None, way: str) -> dict[str, Any]:
    if way == WAYS[0]:
        return converted.save(out, format)
    source, model = converted.target.name.removeprefix("hf:"), converted.target.model
    return convert_checkpoint(converted.plan, source, out, model=model, format=format, converted=converted)


def opened(folder: Path, format: str) -> Any:
    """Open a folder as its user will, in a process of its own where that runs the code of the folder."""
    if format == "manifest":
        return nw.load(folder)
    with quiet():
        from transformers import GPT2LMHeadModel

        return GPT2LMHeadModel.from_pretrained(folder)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format", ["manifest", "code", "safetensors"])
def test_a_converted_model_is_the_same_after_reload(
    converted: Converted, tmp_path: Path, format: str, way: str
) -> None:
    report = save(converted, tmp_path / "out", format, way)
    assert report["verified"]
    assert report["proof"]["passed"]
    assert report["proof"]["gates"][-1] | {"why": ""} == {
        "name": "reload", "passed": True, "why": "",
        "figures": {"missing": 0, "unexpected": 0, "other tensors": 0, "gap": 0.0},
    }  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_fold_that_needs_no_new_key_is_opened_by_the_stock_class(folded: Converted, tmp_path: Path, way: str) -> None:
    report = save(folded, tmp_path / "out", None, way)
    assert report["format"] == "stock"
    model = opened(tmp_path / "out", "stock")
    expected = logits(folded.target.model)
    assert (logits(model) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert model.lm_head.weight is model.transformer.wte.weight


def test_the_default_format_of_what_the_stock_class_lacks_is_a_manifest(converted: Converted, tmp_path: Path) -> None:
    assert converted.save(tmp_path / "out")["format"] == "manifest"


def test_a_manifest_generates_with_a_cache_what_the_original_generates(converted: Converted, tmp_path: Path) -> None:
    converted.save(tmp_path / "out", "manifest")
    model = nw.load(tmp_path / "out")
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())
    expected = generated(converted.target.model)
    assert generated(model) == expected
    assert generated(model, use_cache=False) == expected


@pytest.mark.slow
def test_the_code_of_a_folder_needs_no_normwise_and_generates_the_same(converted: Converted, tmp_path: Path) -> None:
    converted.save(tmp_path / "out", "code")
    script = """
import os, sys
os.environ["HF_MODULES_CACHE"] = sys.argv[2]
import torch
from transformers import AutoModelForCausalLM
sys.modules["normwise"] = None
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert not any(isinstance(module, torch.nn.LayerNorm) for module in model.modules())
ids = torch.arange(14).reshape(2, 7) % 61
for cache in (True, False):
    print(model.generate(ids, do_sample=False, max_new_tokens=8, use_cache=cache).tolist())
"""
    arguments = [sys.executable, "-c", script, str(tmp_path / "out"), str(tmp_path / "cache")]
    found = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    expected = str(generated(converted.target.model))
    assert found.stdout.splitlines() == [expected, expected]


def test_the_code_of_a_folder_is_never_run_unasked(converted: Converted, tmp_path: Path) -> None:
    converted.save(tmp_path / "out", "code")
    with quiet():
        from transformers import AutoModelForCausalLM
    with quiet(), pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=False)
    with pytest.raises(TargetError, match="code of its own"):
        nw.map(f"hf:{tmp_path / 'out'}")


def test_the_stock_class_finds_no_weights_beside_a_manifest(converted: Converted, tmp_path: Path) -> None:
    converted.save(tmp_path / "out", "manifest")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        opened(tmp_path / "out", "stock")


@pytest.mark.parametrize("way", WAYS)
def test_the_stock_format_refuses_what_the_class_would_drop(converted: Converted, tmp_path: Path, way: str) -> None:
    with pytest.raises(ConversionRefused, match=r"transformer\.h\.0\.ln_1; the formats manifest and code hold it"):
        save(converted, tmp_path / "out", "stock", way)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format", ["manifest", "code"])
def test_an_untied_head_is_stored_and_the_configuration_says_so(
    gpt2: Path, tmp_path: Path, way: str, format: str
) -> None:
    untied = nw.convert("fold-affine", f"hf:{gpt2}", IDS, untie=True)
    report = save(untied, tmp_path / "out", format, way)
    assert report["verified"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    (weights,) = (tmp_path / "out").glob("*.safetensors")
    assert {"lm_head.weight", "lm_head.bias", "transformer.wte.weight"} <= load_file(weights).keys()


@pytest.mark.parametrize("way", WAYS)
def test_a_tied_head_is_stored_once_and_stays_tied(converted: Converted, tmp_path: Path, way: str) -> None:
    save(converted, tmp_path / "out", "manifest", way)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.normwise.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    model: Any = nw.load(tmp_path / "out")
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("kind", ["gpt_neox", "mixtral"])
@pytest.mark.parametrize("format", ["manifest", "code"])
def test_names_that_transformers_changes_as_it_loads_are_found(kind: str, format: str, tmp_path: Path) -> None:
    source = saved(kind, tmp_path / "in")
    converted = nw.convert("unit-offset", f"hf:{source}", IDS)
    assert save(converted, tmp_path / "out", format, WAYS[1])["verified"]
    (before,), (after,) = source.glob("*.safetensors"), (tmp_path / "out").glob("*.safetensors")
    assert list(load_file(after)) == list(load_file(before))


def test_a_tensor_that_is_stored_in_parts_is_refused_tensor_by_tensor(tmp_path: Path) -> None:
    source = saved("mixtral", tmp_path / "in")
    converted = nw.convert("fold-affine", f"hf:{source}", IDS)
    with pytest.raises(ConversionRefused, match=r"stores this tensor in parts.*\.save\(OUT\)"):
        save(converted, tmp_path / "out", None, WAYS[1])
    assert save(converted, tmp_path / "out", None, WAYS[0])["verified"]


def test_the_tokenizer_is_copied_verbatim_and_a_pickle_is_not(converted: Converted, gpt2: Path, tmp_path: Path) -> None:
    report = converted.save(tmp_path / "out")
    assert hashes(tmp_path / "out")["tokenizer.json"] == hashes(gpt2)["tokenizer.json"]
    assert report["not_copied"] == ["training_args.bin"]
    assert not (tmp_path / "out" / "training_args.bin").exists()


def test_the_report_lies_beside_the_weights_with_gates_and_hashes(
    converted: Converted, gpt2: Path, tmp_path: Path
) -> None:
    report = save(converted, tmp_path / "out", "manifest", WAYS[1])
    assert json.loads((tmp_path / "out" / "normwise_report.json").read_text()) == report
    assert report["source"] == {"model.safetensors": hashes(gpt2)["model.safetensors"]}
    name = "model.normwise.safetensors"
    assert report["files"] == {name: hashes(tmp_path / "out")[name]}
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| transformer.ln_f | LayerNorm -> RMSNorm |" in page
    assert "| twin | passed |" in page
    assert report["files"][name] in page


def test_weights_alone_are_one_file_in_the_place_asked_for(converted: Converted, tmp_path: Path) -> None:
    assert converted.save(tmp_path / "it.safetensors")["format"] == "safetensors"
    assert [path.name for path in tmp_path.iterdir()] == ["it.safetensors"]
    held = load_file(tmp_path / "it.safetensors")
    assert all(torch.equal(held[key], tensor) for key, tensor in converted.state_dict().items() if key in held)


def test_shards_have_the_size_asked_for_and_an_index(converted: Converted, tmp_path: Path) -> None:
    report = converted.save(tmp_path / "out", "safetensors", shard_size=8_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(report["files"])
    assert len(report["files"]) > 2
    assert all((tmp_path / "out" / name).stat().st_size < 12_000 for name in report["files"])
    assert report["verified"]


class Own(nn.Module):
    """A model that is not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(ids)))


@pytest.fixture
def own() -> Converted:
    torch.manual_seed(0)
    model = Own()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) + 0.5
    return nw.convert("rms-norm", model, torch.arange(6).reshape(2, 3))


def test_a_model_of_ones_own_is_loaded_into_a_fresh_one(own: Converted, tmp_path: Path) -> None:
    assert own.save(tmp_path / "out")["verified"]
    model, ids = nw.load(tmp_path / "out", Own()), torch.arange(6)
    assert torch.equal(model(ids), own.model(ids))
    assert not isinstance(model.norm, nn.LayerNorm)
    with pytest.raises(TypeError, match="load\\(PATH, model\\)"):
        nw.load(tmp_path / "out")


@pytest.mark.parametrize("format", ["stock", "code"])
def test_a_model_of_ones_own_has_no_transformers_folder(own: Converted, tmp_path: Path, format: str) -> None:
    with pytest.raises(ConversionRefused, match="Own is no transformers model"):
        own.save(tmp_path / "out", format)


def test_tensors_that_are_not_those_of_the_model_are_not_loaded(own: Converted, tmp_path: Path) -> None:
    own.save(tmp_path / "out")
    other: Any = Own()
    other.more = nn.Linear(2, 2)
    with pytest.raises(TargetError, match=r"the tensor more\.bias is missing"):
        nw.load(tmp_path / "out", other)


def test_a_model_that_is_built_otherwise_is_named(own: Converted, tmp_path: Path) -> None:
    own.save(tmp_path / "out", "manifest")
    with pytest.raises(TargetError, match="a Linear, is not built as the one that was converted"):
        nw.load(tmp_path / "out", nn.Linear(2, 2))


def test_a_size_of_shards_is_a_number_of_bytes(own: Converted, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="give a number of bytes"):
        own.save(tmp_path / "out", shard_size="5GB")
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"there is no normwise\.json here"):
        nw.load(tmp_path)


def test_every_format_has_a_page_and_unknown_ones_are_named() -> None:
    assert formats.names() == ("code", "manifest", "safetensors", "stock")
    with pytest.raises(ValueError, match="did you mean 'manifest'"):
        formats.get("manifst")
