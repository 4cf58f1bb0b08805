"""hf:TYPE builds a small model of the same structure and inputs it runs on."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import nn

from normwise.errors import TargetError
from normwise.targets import hf
from normwise.targets.hf_build import build_fake, build_model, quiet
from normwise.targets.hf_config import build_config
from normwise.targets.target import InputsFrom, Target, Weights

pytest.importorskip("transformers")

EVERY_KIND = (
    "llama", "bert", "t5", "bart", "vit", "swin", "resnet", "wav2vec2", "whisper", "clip", "mamba", "jamba", "mixtral",
    "deepseek_v3", "gpt2", "audio-spectrogram-transformer", "videomae",
)  # fmt: skip


def executed(target: Target) -> set[str]:
    """Return the paths of the modules that run."""
    seen: set[str] = set()
    hooks = [
        module.register_forward_hook(lambda *_, path=path: seen.add(path))
        for path, module in target.model.named_modules()
    ]
    with torch.no_grad():
        target.run()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("model_type", EVERY_KIND)
def test_a_model_of_every_kind_is_built_small_and_runs(model_type: str) -> None:
    target = hf.load(f"hf:{model_type}")
    with torch.no_grad():
        target.run()
    assert sum(parameter.numel() for parameter in target.model.parameters()) < 40_000_000
    assert not target.model.training
    assert target.weights is Weights.RANDOM
    assert target.inputs_from is InputsFrom.INFERRED
    assert "reduced" in target.notes[0]


def test_grouped_query_heads_and_flags_keep_their_structure() -> None:
    with quiet():
        small, full = build_config("mistral"), build_config("mistral", reduced=False)
        opt = build_config("opt")
    assert 1 < small.num_key_value_heads < small.num_attention_heads
    assert small.num_hidden_layers == 4
    assert small.hidden_act == full.hidden_act
    assert small.rms_norm_eps == full.rms_norm_eps
    assert opt.do_layer_norm_before


def test_every_kind_of_block_of_a_hybrid_is_kept() -> None:
    for model_type in ("qwen3_next", "recurrent_gemma", "gemma3_text", "zamba2"):
        with quiet():
            small, full = build_config(model_type), build_config(model_type, reduced=False)
        kinds = "layers_block_type" if hasattr(full, "layers_block_type") else "layer_types"
        assert set(getattr(small, kinds)) == set(getattr(full, kinds)), model_type


def test_a_second_size_changes_batch_and_time() -> None:
    model = hf.load("hf:llama").model
    other = hf.example_inputs(model, batch=3, time=9)
    assert other["input_ids"].shape == (3, 9)
    assert other["attention_mask"].shape == (3, 9)
    model(**other)


@pytest.mark.parametrize(
    ("model_type", "tower"), [("llava", "vision_tower"), ("qwen2_5_vl", "visual"), ("idefics3", "vision_model")]
)
def test_the_vision_tower_of_a_multimodal_model_runs(model_type: str, tower: str) -> None:
    assert any(path.startswith(tower) for path in executed(hf.load(f"hf:{model_type}")))


def test_two_loads_are_the_same_model_and_leave_the_random_state() -> None:
    before = torch.get_rng_state()
    first, second = hf.load("hf:gpt2"), hf.load("hf:gpt2")
    assert torch.equal(before, torch.get_rng_state())
    pairs = zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(first.kwargs["input_ids"], second.kwargs["input_ids"])


def test_loading_is_silent_and_restores_environment_and_verbosity(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import logging

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    verbosity = logging.get_verbosity()
    hf.load("hf:bert")
    assert capfd.readouterr() == ("", "")
    assert "HF_HUB_OFFLINE" not in os.environ
    assert logging.get_verbosity() == verbosity


def test_hyphens_underscores_and_case_are_all_understood() -> None:
    assert hf.load("hf:GPT-NeoX").name == "hf:GPT-NeoX"


def test_an_unknown_type_names_the_nearest() -> None:
    with pytest.raises(TargetError, match=r"no model type 'lama'.*llama"):
        hf.load("hf:lama")


def test_a_type_that_needs_a_missing_package_says_which() -> None:
    with pytest.raises(TargetError, match="timm: pip install timm torchvision pillow") as caught:
        hf.load("hf:gemma3n_vision")
    assert "\n" not in str(caught.value)


def test_a_type_without_a_class_of_its_own_says_so() -> None:
    with pytest.raises(TargetError, match="no model class of its own"):
        hf.load("hf:sam_mask_decoder")


def test_missing_transformers_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r"pip install 'normwise\[hf\]'"):
        hf.load("hf:llama")


def test_folders_are_not_types() -> None:
    assert hf.claims("hf:llama")
    assert not hf.claims("hf:./llama")
    assert not hf.claims("hf:models/llama")
    assert not hf.claims("llama")


def llama_70b_shape() -> object:
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8,
        intermediate_size=28672, vocab_size=128256,
    )  # fmt: skip


def test_a_llama_70b_shape_runs_without_its_weights_in_seconds() -> None:
    start = time.perf_counter()
    model = build_fake(llama_70b_shape())
    with torch.no_grad():
        answer = model(input_ids=torch.zeros(1, 16, dtype=torch.long))
    assert sum(parameter.numel() for parameter in model.parameters()) > 69e9
    assert answer.last_hidden_state.shape == (1, 16, 8192)
    assert time.perf_counter() - start < 20  # 2 s on an idle core


def test_a_fake_model_has_no_storage_and_keeps_ties_and_dtypes() -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    with quiet():
        config = build_config("gpt2")
        model, real = build_fake(config), build_model(config)
    tensors = [*model.parameters(), *model.buffers()]
    assert all(isinstance(tensor, FakeTensor) for tensor in tensors)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    shapes = {name: parameter.shape for name, parameter in real.named_parameters()}
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes


def test_shared_parameters_stay_shared_in_a_fake_model() -> None:
    with quiet():
        model = build_fake(build_config("albert"))
    assert isinstance(model, nn.Module)
    assert len(list(model.parameters())) == len({id(parameter) for parameter in model.parameters()})
