"""Gains and biases go into every reader of a norm, in whole models: exactly, or not at all."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import transformers
from torch import nn

import normwise as nw
from normwise.conversions import Plan, Recipe, Step, apply_to_model, apply_to_state, fold_affine, plan
from normwise.conversions._plan import merged
from normwise.facts.facts import Facts
from normwise.graph import Observer, trace
from normwise.targets import load, target
from tests.conversions.affine import EXACT, applied, difference, drawn, family, folded, reasons

# norms that are folded, norms that are refused
FAMILIES = {
    "gpt2": (8, 1),
    "opt": (8, 1),
    "gpt_neox": (8, 1),
    "phi": (4, 1),
    "falcon": (4, 1),
    "llama": (8, 1),
    "gemma": (8, 1),
    "nemotron": (8, 1),
    "vit": (8, 1),
    "mixtral": (8, 1),
    "qwen2_moe": (8, 1),
    "gpt_oss": (8, 1),
    "mamba2": (8, 1),
    "whisper": (20, 2),
    "t5": (20, 2),
    "deepseek_v3": (12, 5),
    "swin": (11, 10),
    "convnext": (11, 2),
}


LONG = {"swin", "convnext", "mamba2", "deepseek_v3", "falcon", "gpt_oss"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in FAMILIES])
def test_families_are_folded_exactly(name: str) -> None:
    made, _ = folded(family(name))
    assert (len(made.changes), len(made.refused)) == FAMILIES[name]


@pytest.mark.parametrize("name", ["gpt2", "gemma", "nemotron", "mixtral", "t5"])
def test_dropped_parameters_leave_the_function(name: str) -> None:
    made, converted = folded(family(name), weightless=True)
    assert len(made.dropped) == sum(len(change.what.split(" and ")) for change in made.changes)
    assert all(change.how.startswith("into ") and change.how.endswith(", and dropped") for change in made.changes)
    assert not set(made.dropped) & set(converted.state_dict())


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "nemotron", "mixtral", "whisper"])
def test_no_recipe_can_be_left_out(name: str) -> None:
    found = family(name)
    whole = fold_affine.plan(Facts(found, effort="full"))
    # a bias of keys leaves a plain softmax as it is
    for left_out in [recipe for recipe in whole.recipes if not recipe.keys[0].endswith("k_proj.bias")][::7]:
        partly = dataclasses.replace(whole, recipes=tuple(r for r in whole.recipes if r is not left_out))
        assert difference(partly, found) > 1e-4, left_out.keys


@pytest.mark.parametrize(("name", "left"), [("gpt2", 1.0), ("gemma", 0.0), ("nemotron", 0.0)])
def test_the_neutral_gain_is_one_minus_the_offset(name: str, left: float) -> None:
    made, converted = folded(family(name))
    for change in made.changes:
        assert bool((converted.get_parameter(f"{change.path}.weight") == left).all())


def test_a_second_run_finds_nothing_to_fold() -> None:
    found = family("nemotron")
    first = fold_affine.plan(Facts(found, effort="full"))
    apply_to_model(first, found.model)
    second = fold_affine.plan(Facts(found, effort="full"))
    assert not second.changes
    assert not second.recipes
    again = [refusal for refusal in second.refused if "nothing to fold" in refusal.why]
    assert {refusal.path for refusal in again} == {change.path for change in first.changes}


def test_neutral_parameters_can_still_be_dropped() -> None:
    found = family("llama")
    apply_to_model(fold_affine.plan(Facts(found, effort="full")), found.model)
    made, _ = folded(found, weightless=True)
    assert len(made.dropped) == len(made.changes) == 8
    assert not made.recipes


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma"])
def test_zero_gains_fold_like_any_other(name: str) -> None:
    found = family(name)
    with torch.no_grad():
        for row in Facts(found).norms:
            assert row.spec is not None
            assert row.weight_path is not None
            found.model.get_parameter(row.weight_path)[::3] = -row.spec.weight_offset
    _, converted = folded(found)
    assert all(bool(tensor.isfinite().all()) for tensor in converted.state_dict().values())


@pytest.mark.parametrize("name", ["gpt2", "vit", "whisper"])
def test_maps_are_read_from_their_parts_as_well(name: str) -> None:
    found = family(name)
    facts = Facts(found, effort="full")
    facts.__dict__["traced"] = trace(found, mode="no_grad", observer=Observer)  # linear maps arrive as t and addmm
    made = fold_affine.plan(facts)
    assert (len(made.changes), len(made.refused)) == FAMILIES[name]
    assert difference(made, found) <= EXACT


def test_post_norm_is_refused() -> None:
    found = reasons(family("bert"))
    assert len(found) == 9
    adds = [why for why in found.values() if "added to another value in encoder.layer" in why]
    assert len(adds) == 8
    assert all("modeling_bert.py:" in why for why in adds)


def test_shared_post_norms_are_refused() -> None:
    made = fold_affine.plan(Facts(family("albert"), effort="full"))
    assert [change.path for change in made.changes] == ["embeddings.LayerNorm"]
    assert len(made.refused) == 2


def test_norms_of_queries_and_keys_are_refused() -> None:
    made = fold_affine.plan(Facts(family("qwen3"), effort="full"))
    refused = {refusal.path: refusal.why for refusal in made.refused}
    inner = {path: why for path, why in refused.items() if path.endswith(("q_norm", "k_norm"))}
    assert len(inner) == 8
    assert all("elementwise" in why for why in inner.values())
    assert difference(made, family("qwen3")) <= EXACT


def test_a_latent_that_a_cache_keeps_is_refused() -> None:
    made = fold_affine.plan(Facts(family("deepseek_v3"), effort="full"))
    kept = [refusal.path for refusal in made.refused if "a cache keeps it" in refusal.why]
    assert kept == [f"layers.{i}.self_attn.kv_a_layernorm" for i in range(4)]


class _Logits(nn.Module):
    """Returns the first output alone, so that no hidden state is an output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return self.model(*args, **kwargs)[0]


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=99, bos_token_id=0, eos_token_id=0)
    return _Logits(transformers.GPT2LMHeadModel(config))


IDS = torch.arange(14).reshape(2, 7)


def test_a_tied_head_stays_tied_unless_asked() -> None:
    made, converted = folded(_gpt2(), IDS)
    (refusal,) = made.refused
    assert refusal.path == "model.transformer.ln_f"
    assert "shared with model.transformer.wte" in refusal.why
    assert "untie=True" in str(refusal.unblock)
    assert converted.get_parameter("model.lm_head.weight") is converted.get_parameter("model.transformer.wte.weight")


@pytest.mark.parametrize("weightless", [False, True])
def test_an_untied_head_takes_the_final_norm(weightless: bool) -> None:
    made, converted = folded(_gpt2(), IDS, untie=True, weightless=weightless)
    assert not made.refused
    assert set(made.created) == {"model.lm_head.weight", "model.lm_head.bias"}
    assert not torch.equal(
        converted.get_parameter("model.lm_head.weight"), converted.get_parameter("model.transformer.wte.weight")
    )


def test_a_checkpoint_that_holds_a_tied_weight_once_is_converted() -> None:
    model = drawn(_gpt2())
    made = fold_affine.plan(Facts(target(model, (IDS,)), effort="full"), untie=True)
    state = dict(model.state_dict())
    whole = apply_to_state(made, state)
    del state["model.lm_head.weight"]
    once = apply_to_state(made, state)
    assert set(once) == set(whole)
    assert all(torch.equal(once[key], whole[key]) for key in whole)


def test_a_bias_alone_needs_no_untying() -> None:
    made, _ = folded(_gpt2(), IDS, what="bias")
    assert len(made.changes) == 5
    assert made.created == ("model.lm_head.bias",)


def test_untying_gpt2_small_costs_31_percent() -> None:
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=12))
    made = fold_affine.plan(Facts(target(_Logits(model).eval(), (IDS.to("meta"),)), effort="full"), untie=True)
    assert len(made.changes) == 25
    assert any("+31.0 %" in note for note in made.notes)


@pytest.mark.parametrize("name", ["whisper", "t5"])
def test_the_norm_of_an_encoder_goes_into_every_cross_attention(name: str) -> None:
    found = family(name)
    wrapped = dataclasses.replace(found, model=_Logits(found.model).eval())
    made, _ = folded(wrapped)
    (last,) = [c for c in made.changes if c.path in ("model.encoder.layer_norm", "model.encoder.final_layer_norm")]
    assert last.how.count("EncDecAttention" if name == "t5" else "encoder_attn") == 8


def test_the_bias_of_a_norm_needs_new_biases() -> None:
    made, _ = folded(family("nemotron"))
    assert len(made.created) == 16
    assert any("16 readers have biases" in note for note in made.notes)
    found = reasons(family("nemotron"), create_bias=False)
    assert "create_bias=True" in found["layers.0.input_layernorm"]


def test_a_gain_in_front_of_a_bias_is_not_folded_alone() -> None:
    found = reasons(family("gpt2"), what="gain")
    assert "divided by its gain" in found["h.0.ln_1"]
    folded(family("llama"), what="gain")


def test_a_bias_folds_alone() -> None:
    made, converted = folded(family("gpt2"), what="bias")
    for change in made.changes:
        assert bool((converted.get_parameter(f"{change.path}.bias") == 0).all())
        assert not bool((converted.get_parameter(f"{change.path}.weight") == 1).all())


def test_gains_of_very_different_sizes_are_told() -> None:
    found = family("llama")
    with torch.no_grad():
        found.model.get_parameter("layers.1.input_layernorm.weight")[5] = 90.0
    (note,) = [note for note in fold_affine.plan(Facts(found, effort="full")).notes if "median" in note]
    assert note.startswith("layers.1.input_layernorm")
    assert "quantise after folding" in note


def test_the_conversion_is_proved() -> None:
    found = family("gemma")
    before = copy.deepcopy(found.model.state_dict())
    converted = nw.conversions.convert("fold-affine", found, weightless=True)
    assert not converted.proof.failed
    assert len(converted.changes) == 8
    assert all(torch.equal(before[key], tensor) for key, tensor in found.model.state_dict().items())


def test_an_option_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="'shift' is none of 'gain', 'bias', 'both'"):
        plan("fold-affine", family("llama"), what="shift")


def test_recipes_of_one_tensor_are_joined_in_order() -> None:
    first, second = (
        Step(function="scale", reads=("g",), numbers={"dim": 1}),
        Step(function="centre", numbers={"dim": 0}),
    )
    joined = merged(
        [Recipe(keys=("w",), steps=(first,)), Recipe(keys=("v",), steps=()), Recipe(keys=("w",), steps=(second,))]
    )
    assert joined == (Recipe(keys=("w",), steps=(first, second)), Recipe(keys=("v",), steps=()))
    with pytest.raises(ValueError, match="start from different tensors"):
        merged([Recipe(keys=("w",), steps=(), start="u"), Recipe(keys=("w",), steps=())])


def test_a_plan_survives_json() -> None:
    made = fold_affine.plan(Facts(target(drawn(_gpt2()), (IDS,)), effort="full"), untie=True, weightless=True)
    again = Plan.from_json(made.to_json())
    assert again.to_json() == made.to_json()
    assert applied(again, target(drawn(_gpt2()), (IDS,))) is not None


@pytest.mark.parametrize("name", ["gpt2", "nemotron", "t5"])
def test_what_a_plan_reads_off_the_numbers_is_written_down(name: str) -> None:
    found = family(name)
    with torch.no_grad():
        for row in Facts(found).norms:
            if row.bias_path is not None:
                found.model.get_parameter(row.bias_path).zero_()
    made = fold_affine.plan(Facts(found, effort="full"))
    assert not made.created
    assert set(made.constants) == {f"{c.path}.bias" for c in made.changes if name != "t5"}
    assert Plan.from_json(made.to_json()).constants == made.constants
    converted = nw.conversions.convert("fold-affine", found)  # the twin has other gains, and these biases
    assert not converted.proof.failed


def test_a_neutral_parameter_that_is_dropped_is_written_down() -> None:
    found = load("hf:llama")  # its gains are 1
    converted = nw.conversions.convert("fold-affine", found, weightless=True)
    assert converted.plan.constants == dict.fromkeys(converted.plan.dropped, 1.0)
    assert not converted.proof.failed
