"""hf:DIR loads config.json and safetensors, and nothing that could run code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from normwise.errors import CheckpointError, TargetError
from normwise.targets import folder
from normwise.targets.hf_build import build_model, quiet
from normwise.targets.hf_config import build_config
from normwise.targets.target import Weights

pytest.importorskip("transformers")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a folder with a small BERT."""
    with quiet():
        build_model(build_config("bert")).save_pretrained(tmp_path)  # type: ignore[operator]
    return tmp_path


def test_a_folder_gives_its_own_weights(saved: Path) -> None:
    from safetensors.torch import load_file

    target = folder.load(f"hf:{saved}")
    stored = load_file(saved / "model.safetensors")
    assert target.weights is Weights.REAL
    assert torch.equal(target.model.state_dict()["embeddings.LayerNorm.weight"], stored["embeddings.LayerNorm.weight"])
    target.run()


def test_a_sharded_folder_loads(tmp_path: Path) -> None:
    with quiet():
        model = build_model(build_config("bert"))
        model.save_pretrained(tmp_path, max_shard_size="200KB")  # type: ignore[operator]
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = folder.load(f"hf:{tmp_path}").model
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_pickle_is_refused_with_the_way_to_convert_it(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    (saved / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(TargetError, match=r"pickle \(pytorch_model.bin\).*save_pretrained"):
        folder.load(f"hf:{saved}")


def test_code_beside_the_weights_is_never_run(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "my_own", "auto_map": {"AutoModel": "modeling.Mine", "AutoConfig": "modeling.Config"}}
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "modeling.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    with pytest.raises(TargetError, match="auto_map"):
        folder.load(f"hf:{saved}")
    assert not (saved / "ran").exists()


def _indexed(folder: Path, shard: str) -> None:
    """Let an index say where every tensor lies; a sound file beside it makes the folder one with safetensors."""
    from safetensors import safe_open

    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with safe_open(folder / "other.safetensors", framework="pt") as file:
        placed = dict.fromkeys(file.keys(), shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def _configured(folder: Path, **settings: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))


def _pipe(folder: Path) -> None:
    _indexed(folder, "pipe.safetensors")
    os.mkfifo(folder / "pipe.safetensors")


def _adapted(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.bin").write_bytes(b"a pickle")


def _long_settings(folder: Path) -> None:
    with (folder / "generation_config.json").open("wb") as file:
        file.truncate(2**31)


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "an index that leads to a pickle": (lambda f: _indexed(f, "evil.bin"), "names 'evil.bin'"),
    "an index that leads out of the folder": (lambda f: _indexed(f, "../other.safetensors"), r"names '\.\./other"),
    "an index that leads to a pipe": (_pipe, "pipe.safetensors: this is no regular file"),
    "a header that is broken": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 99), "a header of"),
    "a pickle for weights": (lambda f: _configured(f, transformers_weights="adapter_model.bin"), "adapter_model.bin"),
    "weights elsewhere": (lambda f: _configured(f, transformers_weights="../a.safetensors"), r"\.\./a.safetensors"),
    "no name for weights": (lambda f: _configured(f, transformers_weights=["a.safetensors"]), "no safetensors file"),
    "attention from a hub": (lambda f: _configured(f, attn_implementation="evil/flash"), "code from a hub .*evil"),
    "attention of a part from a hub": (lambda f: _configured(f, attn_implementation={"": "evil/flash"}), "evil/flash"),
    "experts from a hub": (lambda f: _configured(f, text={"_experts_implementation": "evil/moe"}), "evil/moe"),
    "an adapter in a pickle": (_adapted, r"pickle \(adapter_model.bin\)"),
    "settings of 2 GB": (_long_settings, "generation_config.json: 2,147,483,648 bytes"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_transformers_would_follow_or_run_is_refused_before(
    kind: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModel

    spoil, said = HOSTILE[kind]
    spoil(saved)
    monkeypatch.setattr(AutoModel, "from_pretrained", lambda *_, **__: pytest.fail("transformers was asked"))
    with pytest.raises((TargetError, CheckpointError), match=said) as caught:
        folder.load(f"hf:{saved}")
    assert str(saved) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Trainer", "pipeline", "NoSuchModel", "<b>\x1b[2J"])
def test_a_class_that_is_no_model_is_not_built(name: str, saved: Path) -> None:
    _configured(saved, architectures=[name])
    with pytest.raises(TargetError, match="no model of transformers") as caught:
        folder.load(f"hf:{saved}", whole=True)
    assert "\x1b" not in str(caught.value)


def test_named_weights_in_the_folder_are_read(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "consolidated.safetensors")
    _configured(saved, transformers_weights="consolidated.safetensors")
    assert folder.load(f"hf:{saved}").weights is Weights.REAL


def test_a_configuration_alone_gets_random_weights_and_says_so(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    target = folder.load(f"hf:{saved}")
    assert target.weights is Weights.RANDOM
    assert "no weights" in target.notes[0]
    target.run()


def test_a_large_configuration_alone_is_built_without_storage(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 40, "hidden_size": 5120, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = folder.load(f"hf:{tmp_path}")
    assert target.weights is Weights.FAKE
    assert "input_ids" in target.kwargs
    with torch.no_grad():
        assert target.run().last_hidden_state.shape[-1] == 5120


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: None, "no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "no valid JSON"),
        (lambda path: (path / "config.json").write_text('{"model_type": ["llama"]}'), "model_type .* is no name"),
        (
            lambda path: (path / "config.json").write_text('{"a": [{"n_layers": 1000000000}]}'),
            "n_layers is 1,000,000,000",
        ),
        (lambda path: (path / "config.json").write_text('{"depths": [1, 20000]}'), "the limit is 10,000"),
        (lambda path: (path / "config.json").write_text('{"model_type": "no-such"}'), "cannot be loaded"),
    ],
)
def test_a_folder_that_is_no_model_gives_one_line(tmp_path: Path, prepare: object, words: str) -> None:
    prepare(tmp_path)  # type: ignore[operator]
    with pytest.raises((TargetError, CheckpointError), match=words) as caught:
        folder.load(f"hf:{tmp_path}")
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(TargetError, match="there is no folder nowhere/at-all"):
        folder.load("hf:nowhere/at-all")


def test_only_folders_and_paths_are_claimed(tmp_path: Path) -> None:
    assert folder.claims(f"hf:{tmp_path}")
    assert folder.claims("hf:.")
    assert not folder.claims("hf:llama")
    assert not folder.claims("hf:")
    assert not folder.claims(str(tmp_path))
