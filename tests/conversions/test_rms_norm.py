from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from normwise import conversions
from normwise.conversions.proof.twin import norms_of, redraw
from normwise.errors import ConversionRefused
from normwise.targets import load, target
from tests.conversions import streams as s

EXACT = 1e-12  # observed 1e-16 to 6e-15; a single omission is above 1e-2


def relative(a: Any, b: Any) -> float:
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
    return max(float((x - y).abs().max() / x.abs().max()) for x, y in pairs)


def judged(model: nn.Module, inputs: torch.Tensor, **options: Any) -> tuple[conversions.Plan, float]:
    """Return the plan of a redrawn model in float64, and how far the converted copy is from it."""
    model = model.double().eval()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    redraw(model, norms_of(target(model, inputs)))
    plan = conversions.plan("rms-norm", model, inputs, **options)
    converted = copy.deepcopy(model)
    conversions.apply_to_model(plan, converted)
    with torch.no_grad():
        return plan, relative(model(inputs), converted(inputs))


def norms(plan: conversions.Plan) -> list[str]:
    return [change.path for change in plan.changes if "RMSNorm" in change.what]


def subtractions(plan: conversions.Plan) -> list[str]:
    return [edit.path for edit in plan.edits if edit.kind in ("centre-output", "centre-input")]


FREE = {
    "pre": lambda: s.Model(s.Block(), s.Block()),
    "parallel with two norms": lambda: s.Model(s.ParallelBlock(), s.Block()),
    "layer scale": lambda: s.Model(s.LayerScaleBlock(), s.LayerScaleBlock()),
    "numbers on skip and branch": lambda: s.Model(s.NumberScaleBlock(), s.NumberScaleBlock()),
    "a norm without gain behind the branch": lambda: s.Model(s.BareSandwichBlock(), s.BareSandwichBlock()),
    "a mixture of experts": lambda: s.Model(s.MixtureBlock(), s.MixtureBlock()),
    "low-rank adapters": lambda: s.Model(s.AdapterBlock(), s.AdapterBlock()),
    "x @ W": lambda: s.Model(s.TransposedBlock(), s.TransposedBlock()),
    "one block run three times": s.Recurrent,
    "a mean over tokens before the final norm": lambda: s.Pooled(s.Block(), s.Block()),
}


@pytest.mark.parametrize("make", FREE.values(), ids=FREE.keys())
def test_every_norm_of_a_pre_norm_model_is_converted_for_nothing(make: Any) -> None:
    plan, error = judged(make(), s.ids())
    assert not plan.refused
    assert not subtractions(plan)
    assert len(norms(plan)) >= 2
    assert error < EXACT


@pytest.mark.parametrize("make", [s.Patches, s.ChannelsFirst])
def test_an_image_model_is_converted_for_nothing(make: Any) -> None:
    plan, error = judged(make(), s.images())
    assert norms(plan)
    assert not plan.refused
    assert not subtractions(plan)
    assert error < EXACT


def test_a_tied_embedding_stays_tied_and_costs_one_subtraction() -> None:
    model = s.Model(s.Block(), s.Block(), tied=True)
    plan, error = judged(model, s.ids())
    assert len(norms(plan)) == 3
    assert subtractions(plan) == ["tokens"]
    assert not plan.created
    assert error < EXACT


def test_a_tied_embedding_can_be_untied_instead() -> None:
    model = s.Model(s.Block(), s.Block(), tied=True)
    plan, error = judged(model, s.ids(), untie=True)
    assert len(norms(plan)) == 3
    assert not subtractions(plan)
    assert plan.created == ("head.weight",)
    assert "no longer tied: +" in plan.notes[0]
    assert error < EXACT


def test_the_first_norm_with_a_gain_writes_the_stream_and_costs_one_subtraction() -> None:
    plan, error = judged(s.EmbeddingNormed(s.Block(), s.Block()), s.ids())
    assert norms(plan) == ["first", "blocks.0.norm", "blocks.1.norm", "final"]
    assert subtractions(plan) == ["first"]
    assert error < EXACT


def test_a_stream_that_is_read_raw_is_converted_behind_the_reader() -> None:
    plan, error = judged(s.Unnormed(s.Block(), s.Block(), s.Block()), s.ids())
    assert subtractions(plan)
    assert "blocks.2.norm" in norms(plan)
    assert error < EXACT


def test_behind_an_auxiliary_head_everything_is_converted_with_one_subtraction() -> None:
    plan, error = judged(s.Tapped(s.Block(), s.Block(), s.Block()), s.ids())
    assert norms(plan) == ["blocks.1.norm", "blocks.2.norm", "final"]
    assert len(subtractions(plan)) == 1
    assert [refusal.path for refusal in plan.refused] == ["blocks.0.norm"]
    assert "aside" in plan.refused[0].why
    assert error < EXACT


def test_a_stream_that_is_an_output_needs_consent() -> None:
    plan, _ = judged(s.Streaming(s.Block(), s.Block()), s.ids())
    assert not norms(plan)
    assert "output of the model" in plan.refused[0].why
    assert "consent" in (plan.refused[0].unblock or "")


def test_with_consent_the_logits_are_the_same_and_the_stream_is_shifted_by_a_number_a_token() -> None:
    model = s.Streaming(s.Block(), s.Block()).double().eval()
    redraw(model, norms_of(target(model, s.ids())))
    plan = conversions.plan("rms-norm", model, s.ids(), consent=("hidden-states",))
    converted = copy.deepcopy(model)
    conversions.apply_to_model(plan, converted)
    with torch.no_grad():
        (logits, stream), (same, shifted) = model(s.ids()), converted(s.ids())
    assert relative(logits, same) < EXACT
    shift = stream - shifted
    assert shift.abs().max() > 1e-2
    assert float((shift - shift.mean(-1, keepdim=True)).abs().max()) < EXACT


def test_unknown_consents_are_named() -> None:
    with pytest.raises(ValueError, match="hidden-states"):
        conversions.plan("rms-norm", s.Model(s.Block()), s.ids(), consent=("everything",))


REFUSED = {
    "post-norm": (lambda: s.Model(s.PostBlock(), s.PostBlock(), final=False), "another norm"),
    "no final norm": (lambda: s.Model(s.Block(), s.Block(), final=False), "head"),
    "a vector on the stream": (lambda: s.Model(s.VectorStreamBlock(), s.VectorStreamBlock()), "no LayerNorm"),
}


@pytest.mark.parametrize(("make", "word"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_exact_is_refused_with_the_reason(make: Any, word: str) -> None:
    model = make()
    plan, _ = judged(model, s.ids())
    refused = {refusal.path: refusal for refusal in plan.refused}
    assert "blocks.1.norm" in refused
    assert word in str(refused["blocks.1.norm"]), refused["blocks.1.norm"]
    assert refused["blocks.1.norm"].source


def test_a_post_norm_model_refuses_as_a_whole() -> None:
    model = s.Model(s.PostBlock(), s.PostBlock(), tied=True, final=False)
    with pytest.raises(ConversionRefused, match="gain gives every token a mean of its own"):
        conversions.convert("rms-norm", model, s.ids())


def test_norms_behind_the_branch_keep_the_stream_uncentred() -> None:
    plan, error = judged(s.Model(s.SandwichBlock(), s.SandwichBlock(), s.SandwichBlock()), s.ids())
    # behind a branch a norm reads a linear map, and the first block the embeddings: both absorb the mean
    assert norms(plan) == ["blocks.0.norm", "blocks.0.after", "blocks.1.after", "blocks.2.after"]
    assert error < EXACT


def test_features_joined_before_a_norm_stay_uncentred() -> None:
    plan, error = judged(s.Merged(s.Block(), s.Block()), s.ids())
    assert "final" in [refusal.path for refusal in plan.refused]
    assert error < EXACT


def test_a_variance_of_d_minus_1_and_an_eps_outside_the_root_are_kept() -> None:
    model = s.Model(s.Block(), s.Block())
    for block in model.blocks:
        block.norm = s.UnbiasedNorm()
    plan, error = judged(model, s.ids())
    assert len(norms(plan)) == 3
    assert error < EXACT


def test_a_gain_with_an_offset_is_kept() -> None:
    model = s.Model(s.Block(), s.Block())
    model.final = s.OffsetNorm(s.SIZE)
    plan, error = judged(model, s.ids())
    assert "final" in norms(plan)
    assert error < EXACT


def test_a_norm_inside_a_larger_module_is_refused_and_does_no_harm() -> None:
    class Inline(s.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mlp(nn.functional.layer_norm(x, (s.SIZE,)))

    plan, error = judged(s.Model(Inline(), s.Block(), s.Block()), s.ids())
    assert [refusal.why for refusal in plan.refused] == ["the norm is computed inside a larger module"]
    assert len(norms(plan)) == 3
    assert error < EXACT


def test_a_hook_of_the_user_on_the_stream_is_respected() -> None:
    model = s.Model(s.Block(), s.Block(), s.Block())
    model.blocks[0].register_forward_hook(lambda module, args, output: None)
    plan, error = judged(model, s.ids())
    assert "blocks.0.norm" in [refusal.path for refusal in plan.refused]
    assert "hook" in " ".join(map(str, plan.refused))
    assert error < EXACT


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_norm_whose_hook_would_be_lost_with_it_is_refused(hook: str) -> None:
    model = s.Model(s.Block(), s.Block(), s.Block())
    getattr(model.blocks[1].norm, f"register_{hook}_hook")(lambda *given: None)
    plan, error = judged(model, s.ids())
    assert {refusal.path: refusal.why for refusal in plan.refused}["blocks.1.norm"] == "the module has hooks"
    assert error < EXACT


def test_residual_dropout_in_evaluation_does_not_matter_and_forced_dropout_does() -> None:
    class Dropping(s.Block):
        training_too = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + nn.functional.dropout(self.mlp(self.norm(x)), 0.1, self.training or self.training_too)

    assert len(norms(judged(s.Model(Dropping(), Dropping()), s.ids())[0])) == 3

    class Forced(Dropping):
        training_too = True

    plan = conversions.plan("rms-norm", s.Model(Forced(), Forced()).eval(), s.ids())
    assert "final" not in norms(plan)


def test_converting_twice_does_nothing() -> None:
    model = s.Model(s.Block(), s.Block(), tied=True).eval()
    plan = conversions.plan("rms-norm", model, s.ids())
    conversions.apply_to_model(plan, model)
    again = conversions.plan("rms-norm", model, s.ids())
    assert not again.changes
    assert not again.recipes
    assert not again.edits


def test_a_plan_survives_json_and_converts_a_state_dict() -> None:
    model = s.Model(s.LayerScaleBlock(), s.Block(), tied=True).double().eval()
    redraw(model, norms_of(target(model, s.ids())))
    plan = conversions.Plan.from_json(conversions.plan("rms-norm", model, s.ids()).to_json())
    converted = copy.deepcopy(model)
    conversions.apply_to_model(plan, converted)
    state = conversions.apply_to_state(plan, model.state_dict())
    assert list(state) == list(model.state_dict())
    for key, tensor in converted.state_dict().items():
        assert torch.equal(tensor, state[key]), key


EXPECTED = {  # norms, converted, subtractions
    "gpt2": (9, 9, 0),
    "gpt_neox": (9, 9, 0),
    "phi": (5, 5, 0),
    "nemotron": (9, 9, 0),
    "vit": (9, 9, 0),
    "whisper": (22, 22, 1),
    "bloom": (6, 6, 1),
    "bert": (9, 1, 0),
    "modernbert": (9, 8, 1),
    "llama": (0, 0, 0),
}


@pytest.mark.parametrize("family", EXPECTED)
def test_architectures_of_transformers_are_converted_without_an_adapter(family: str) -> None:
    plan = conversions.plan("rms-norm", load(f"hf:{family}"))
    found = len(norms(plan)) + len(plan.refused), len(norms(plan)), len(subtractions(plan))
    assert found == EXPECTED[family]


@pytest.mark.parametrize("options", [{"weightless": True}, {"fold_bias": True}], ids=["weightless", "fold_bias"])
@pytest.mark.parametrize("make", FREE.values(), ids=FREE.keys())
def test_gain_and_bias_can_go_into_the_readers_as_well(make: Any, options: dict[str, Any]) -> None:
    model = make().double().eval()
    redraw(model, norms_of(target(model, s.ids())))
    plan = conversions.plan("rms-norm", model, s.ids(), **options)
    converted = copy.deepcopy(model)
    conversions.apply_to_model(plan, converted)
    assert any("folded into" in change.how or "dropped" in change.how for change in plan.changes)
    with torch.no_grad():
        assert relative(model(s.ids()), converted(s.ids())) < EXACT
    if "weightless" in options:
        kept = {refusal.path for refusal in plan.refused}
        bare = [m for path, m in converted.named_modules() if hasattr(m, "spec") and path not in kept]
        assert bare
        assert all(not list(m.parameters()) for m in bare)


def test_an_expert_that_got_no_token_is_centred_like_its_siblings() -> None:
    class Routed(s.Block):
        choice = torch.tensor([0, 1] * s.TOKENS)

        def __init__(self) -> None:
            super().__init__()
            self.experts: Any = nn.ModuleList(s.MLP() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.norm(x).flatten(0, 1)
            total = torch.zeros_like(rows)
            for chosen in self.choice.unique().tolist():
                at = torch.where(self.choice == chosen)[0]
                total.index_add_(0, at, self.experts[chosen](rows[at]))
            return x + total.view_as(x)

    model = s.Model(Routed(), Routed()).double().eval()
    redraw(model, norms_of(target(model, s.ids())))
    plan = conversions.plan("rms-norm", model, s.ids())
    converted = copy.deepcopy(model)
    conversions.apply_to_model(plan, converted)
    Routed.choice = torch.tensor([3, 1] * s.TOKENS)
    with torch.no_grad():
        assert len(norms(plan)) == 3
        assert relative(model(s.ids()), converted(s.ids())) < EXACT


def test_what_the_run_did_not_use_is_named() -> None:
    model = s.Model(s.Block(), s.Block())
    model.unused = nn.Linear(s.SIZE, s.SIZE)
    plan = conversions.plan("rms-norm", model, s.ids())
    assert "not checked: this run did not use unused.weight" in plan.notes[0]


def test_parameters_of_other_names_keep_them() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma, self.beta = nn.Parameter(torch.ones(s.SIZE)), nn.Parameter(torch.zeros(s.SIZE))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.layer_norm(x, (s.SIZE,), self.gamma, self.beta)

    model = s.Model(s.Block(), s.Block())
    model.final = Renamed()
    plan, error = judged(model, s.ids())
    converted = copy.deepcopy(model)
    conversions.apply_to_model(plan, converted)
    assert list(converted.state_dict()) == list(model.state_dict())
    assert "final" in norms(plan)
    assert error < EXACT


def test_the_map_reads_an_explicit_subtraction_as_part_of_the_stream() -> None:
    model = s.EmbeddingNormed(s.Block(), s.Block()).eval()
    plan = conversions.plan("rms-norm", model, s.ids())
    conversions.apply_to_model(plan, model)
    assert {site.path: str(site.spec.kind) for site in norms_of(target(model, s.ids())) if site.spec} == {
        "first": "rms",
        "blocks.0.norm": "rms",
        "blocks.1.norm": "rms",
        "final": "rms",
    }


def unbiased() -> nn.Module:
    model = s.Model(s.Block(), s.Block())
    for block in model.blocks:
        block.norm = s.UnbiasedNorm()
    return model


@pytest.mark.parametrize("make", [unbiased, s.ChannelsFirst, lambda: s.Model(s.LayerScaleBlock(), tied=True)])
def test_what_is_converted_is_proved(make: Any) -> None:
    model = make().eval()
    inputs = s.images() if isinstance(model, s.ChannelsFirst) else s.ids()
    proof = conversions.convert("rms-norm", model, inputs).proof
    assert proof.passed
    assert proof.gate("structure").passed
    assert proof.gate("twin").passed
    assert proof.gate("dtype").passed


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_untied_and_weightless_at_once(family: str) -> None:
    from transformers import AutoModelForCausalLM

    small = load(f"hf:{family}")
    model = AutoModelForCausalLM.from_config(small.config).eval()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    converted = conversions.convert("rms-norm", model, dict(small.kwargs), untie=True, weightless=True)
    assert converted.proof.passed
    assert not converted.refused
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_an_option_that_there_is_not_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="rms-norm has no option 'weightles': did you mean 'weightless'"):
        conversions.convert("rms-norm", s.Model(s.Block()), s.ids(), weightles=True)


def test_a_model_of_fake_tensors_is_planned_and_not_converted() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = s.Model(s.Block(), s.Block(), tied=True).eval()
    assert subtractions(conversions.plan("rms-norm", model, s.ids())) == ["tokens"]
    with pytest.raises(ConversionRefused, match="FakeTensor"):
        conversions.convert("rms-norm", model, s.ids())
