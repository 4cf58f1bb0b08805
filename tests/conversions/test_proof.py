"""The gates of a proof: what each one sees, what it leaves as it was, and what it says where it cannot judge."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import random
from typing import Any

import pytest
import torch
from torch import nn

from normwise import conversions
from normwise.conversions import Plan
from normwise.conversions._edits import SwapNorm
from normwise.conversions.proof import Gate, Proof, prove, reload_gate
from normwise.conversions.proof import twin as twins
from normwise.conversions.proof.double import double, doubled, in_double
from normwise.conversions.proof.twin import calibrate, norms_of, redraw
from normwise.errors import ConversionRefused
from normwise.facts import running
from normwise.graph.capture import tensors_in
from normwise.graph.guard import tensor_state
from normwise.targets import Target, Weights, load, target
from tests.conversions import streams


def replan(other: Target) -> Plan:
    return conversions.plan("rms-norm", other)


def small() -> Target:
    torch.manual_seed(0)
    return target(streams.Model(streams.Block(), streams.Block()).eval(), streams.ids())


def proved(given: Target, plan: Plan | None = None) -> Proof:
    plan = plan or replan(given)
    converted = copy.deepcopy(given.model)
    conversions.apply_to_model(plan, converted)
    return prove(plan, given, converted, replan=replan)


def states(proof: Proof) -> dict[str, bool | None]:
    return {gate.name: gate.passed for gate in proof.gates}


# -- float64 ---------------------------------------------------------------------------------


_MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("olmo", "mpt", "bloom", "gemma")]


@pytest.mark.parametrize("name", ["cohere", "t5", "mixtral", *_MORE])
def test_what_models_cast_to_float32_stays_in_float64(name: str) -> None:
    given = load(f"hf:{name}")
    model = doubled(copy.deepcopy(given.model)).eval()
    kwargs = in_double(dict(given.kwargs))
    embedding = next(p for p in model.parameters() if p.dim() > 1)
    start, step = embedding.data.clone(), 1e-8 * torch.randn_like(embedding) * embedding.std()
    outputs = []
    for steps in range(3):
        embedding.data = start + steps * step
        with double():
            outputs.append([t for t in tensors_in(model(**kwargs)) if t.is_floating_point()])
    for one, two, three in zip(*outputs, strict=True):
        # a function that is smooth down to rounding has no second difference; float32 inside leaves 1e-7
        assert one.dtype == torch.float64
        assert float((one - 2 * two + three).abs().max() / one.abs().max()) < 1e-14
        assert float((one - two).abs().max()) > 0


def test_the_process_is_left_as_it_was_also_after_an_error() -> None:
    torch.manual_seed(7)
    random.seed(7)
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(ZeroDivisionError), double():
        torch.rand(int(1 / 0))
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.ones(1).to(torch.float16).dtype is torch.float16  # the mode is gone


# -- the twin --------------------------------------------------------------------------------


def test_gains_biases_and_means_of_the_twin_are_redrawn_and_buffers_stay() -> None:
    given = load("hf:gemma")
    before = {name: t.clone() for name, t in given.model.state_dict().items()}
    buffers = {name: t.clone() for name, t in given.model.named_buffers()}
    redraw(given.model, norms_of(given))
    after = given.model.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in dict(given.model.named_parameters()))
    assert all(torch.equal(t, buffers[name]) for name, t in given.model.named_buffers())
    gains = torch.cat([1 + t for name, t in after.items() if "norm" in name])  # stored less 1
    assert float(gains.mean()) == pytest.approx(1, abs=0.05)
    assert float(gains.std()) == pytest.approx(0.4, abs=0.05)
    matrix = after["layers.0.mlp.down_proj.weight"]
    assert all(float(matrix.mean(axis).abs().mean()) > 0.3 * float(matrix.std()) for axis in (0, 1))
    assert float(matrix.std()) == pytest.approx(0.5 / matrix.shape[1] ** 0.5, rel=0.1)  # its own is too small


def test_a_trained_matrix_keeps_its_spread_in_the_twin() -> None:
    model = nn.Linear(64, 64)
    nn.init.normal_(model.weight, mean=3, std=2)
    redraw(model, ())
    weight = model.weight.detach()
    assert float(weight.std()) == pytest.approx(2, rel=0.05)
    assert all(float(weight.mean(axis).abs().mean()) > 0.5 for axis in (0, 1))


def test_running_statistics_of_the_twin_lie_about_those_of_its_data() -> None:
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU6()) for _ in range(6)]
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 4, 6, 6)
    redraw(model, norms_of(target(model, x)))
    other = torch.randn(2, 4, 6, 6)
    calibrate(model, lambda m: m(x))
    with torch.no_grad():
        changed = (model(x) - model(other)).abs().max()
    assert float(changed) > 1e-2  # the signal reaches the end
    assert len({float(r.var[0]) for r in running.read(model)}) == 6


def test_a_large_model_is_proved_on_a_small_one_of_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "_SMALL", 0)
    proof = proved(load("hf:gpt2"))
    assert proof.passed
    assert "small model of the same class" in proof.gate("twin").why
    assert proof.gate("twin").figures["gap"] < 1e-12


def test_a_plan_that_forgets_one_block_of_a_large_model_is_not_proved_by_the_small_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(twins, "_SMALL", 0)
    monkeypatch.setattr(twins, "fits", lambda model: False)
    given = load("hf:gpt2")
    right = replan(given)
    wrong = dataclasses.replace(right, recipes=right.recipes[:-1])
    twin = proved(given, wrong).gate("twin")
    assert twin.passed is None
    assert "converted in another way" in twin.why


@pytest.mark.slow
def test_a_model_without_numbers_is_proved_on_its_structure_and_a_small_one() -> None:
    transformers = pytest.importorskip("transformers")
    from normwise.targets.hf_build import build_fake
    from normwise.targets.hf_inputs import generated_inputs

    config = transformers.GPTNeoXConfig(
        hidden_size=4096, num_hidden_layers=2, num_attention_heads=32, intermediate_size=16384
    )
    model = build_fake(config)
    given = Target(model=model, kwargs=generated_inputs(model), weights=Weights.FAKE)
    proof = prove(replan(given), given, _converted_fake(config, replan(given)), replan=replan)
    assert states(proof) == {"structure": True, "twin": True, "weights": None, "dtype": None, "reload": None}
    assert proof.passed


def _converted_fake(config: Any, plan: Plan) -> nn.Module:
    from normwise.targets.hf_build import build_fake

    converted = build_fake(config)
    for edit in plan.edits:
        edit.apply(converted)
    return converted


class Deaf(nn.Module):
    """A model whose answer hardly depends on what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = streams.Model(streams.Block(), streams.Block())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 1 + 1e-15 * self.inner(ids)


def test_a_twin_whose_outputs_depend_on_nothing_proves_nothing() -> None:
    proof = proved(target(Deaf().eval(), streams.ids()))
    assert proof.gate("twin").passed is None
    assert "do not depend on" in proof.gate("twin").why


def test_the_twin_sees_every_tensor_that_is_changed() -> None:
    assert proved(load("hf:gpt2")).gate("twin").figures["unseen tensors"] == []


# -- the gates -------------------------------------------------------------------------------


def test_a_right_conversion_passes_every_gate_but_reload() -> None:
    proof = proved(small())
    assert states(proof) == {"structure": True, "twin": True, "weights": True, "dtype": True, "reload": None}
    probes = proof.gate("twin").figures["probes"]
    assert {"inputs", "constant inputs", "batch of 1", "variance about eps 1e-05"} <= probes.keys()
    assert max(probes.values()) < 1e-13


def test_eps_is_seen_by_the_structure_and_by_the_probe_at_its_size() -> None:
    given = target(streams.Model(streams.Block(), streams.Block()).eval(), streams.ids())
    for module in given.model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-12  # on ordinary inputs ten times as much changes 1e-12
    right = replan(given)
    edits = [
        dataclasses.replace(e, spec={**e.spec, "eps": 1e-11}) if isinstance(e, SwapNorm) else e for e in right.edits
    ]
    proof = proved(given, dataclasses.replace(right, edits=tuple(edits)))
    assert "eps 1e-12 -> 1e-11" in proof.gate("structure").why
    assert "variance about eps" in proof.gate("twin").why
    probes = proof.gate("twin").figures["probes"]
    assert probes["inputs"] < 1e-9
    assert probes["variance about eps 1e-12"] > 1e-3


def test_an_op_that_no_plan_names_is_seen_by_the_structure() -> None:
    given = small()
    plan = replan(given)
    converted = copy.deepcopy(given.model)
    conversions.apply_to_model(plan, converted)
    converted.register_forward_hook(lambda module, args, output: output.relu().sub(0))
    gate = prove(plan, given, converted, replan=replan).gate("structure")
    assert gate.passed is False
    assert "relu" in gate.why


def test_a_norm_that_no_plan_names_must_stay_what_it_is() -> None:
    given = small()
    plan = replan(given)
    converted = copy.deepcopy(given.model)
    conversions.apply_to_model(plan, converted)
    shorter = dataclasses.replace(plan, edits=plan.edits[1:], changes=plan.changes[1:])
    gate = prove(shorter, given, converted, replan=replan).gate("structure")
    assert gate.passed is False
    assert plan.edits[0].path in gate.why


def test_a_wrong_tensor_in_the_converted_copy_is_seen_in_its_own_dtype() -> None:
    given = small()
    plan = replan(given)
    converted = copy.deepcopy(given.model)
    conversions.apply_to_model(plan, converted)
    with torch.no_grad():
        next(converted.parameters()).mul_(1.001)  # written wrong after a right plan
    proof = prove(plan, given, converted, replan=replan)
    assert states(proof) == {"structure": True, "twin": True, "weights": True, "dtype": False, "reload": None}


def test_half_precision_is_judged_against_its_own_rounding() -> None:
    given = small()
    given.model.to(torch.bfloat16)
    gate = proved(given).gate("dtype")
    assert gate.passed is True
    assert gate.figures["dtype"] == "bfloat16"
    assert 1e-4 < gate.figures["original"] < 0.1
    assert gate.figures["argmax"] > 0.5


def test_a_copy_in_float64_is_compared_itself() -> None:
    given = small()
    given.model.double()
    plan = replan(given)
    converted = copy.deepcopy(given.model)
    conversions.apply_to_model(plan, converted)
    assert prove(plan, given, converted, replan=replan).gate("dtype").passed is True
    with torch.no_grad():
        next(converted.parameters()).mul_(1 + 1e-8)
    assert prove(plan, given, converted, replan=replan).gate("dtype").passed is False


def test_weights_that_do_not_fit_are_said_not_to_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "free_memory", lambda: 1000)
    proof = proved(small())
    assert proof.gate("weights").passed is None
    assert "more than half of what is free" in proof.gate("weights").why
    assert proof.passed  # by the twin


def test_a_conversion_that_claims_no_equality_has_its_gap_measured() -> None:
    given = small()
    right = replan(given)
    swaps = tuple(e for e in right.edits if isinstance(e, SwapNorm))
    plan = dataclasses.replace(right, recipes=(), edits=swaps, exact=False)
    proof = proved(given, plan)
    assert set(states(proof).values()) == {None}
    assert proof.gate("twin").figures["gap"] > 1e-2
    assert proof.gate("weights").figures["gap"] > 1e-3
    assert not proof.passed
    assert "gaps are measured" in proof.to_text()


def test_convert_raises_with_the_gate_and_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    given = small()
    right = replan(given)
    wrong = dataclasses.replace(right, recipes=right.recipes[1:])
    monkeypatch.setattr(conversions.get("rms-norm"), "plan", lambda facts: wrong)
    with pytest.raises(ConversionRefused, match=r"the proof failed at twin: .* is apart by"):
        conversions.convert("rms-norm", given)


def test_both_models_are_left_exactly_as_they_were() -> None:
    given = load("hf:gpt2")
    given.model.train()
    given.model.get_submodule("h.0").eval()
    calls: list[int] = []
    given.model.get_submodule("wte").register_forward_hook(lambda *_: calls.append(1))
    plan = replan(given)
    converted = copy.deepcopy(given.model)
    conversions.apply_to_model(plan, converted)
    models = given.model, converted
    before = [(tensor_state(m), [x.training for x in m.modules()], _hooks(m)) for m in models]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    prove(plan, given, converted, replan=replan)
    assert [(tensor_state(m), [x.training for x in m.modules()], _hooks(m)) for m in models] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.dtype is torch.float32 for m in models for p in m.parameters())


def _hooks(model: nn.Module) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


# -- reload ----------------------------------------------------------------------------------


def test_reload_is_bit_for_bit() -> None:
    given = small()
    converted = conversions.convert("rms-norm", given).model
    assert reload_gate(lambda: copy.deepcopy(converted), converted, given).passed is True

    def other() -> nn.Module:
        loaded = copy.deepcopy(converted)
        with torch.no_grad():
            next(loaded.parameters()).view(-1)[0].mul_(1 + 1e-6)
        return loaded

    gate = reload_gate(other, converted, given)
    assert gate.passed is False
    assert gate.figures["other tensors"] == 1


def test_reload_counts_missing_and_unexpected_keys() -> None:
    given = small()
    converted = conversions.convert("rms-norm", given).model

    def other() -> nn.Module:
        loaded = copy.deepcopy(converted)
        loaded.register_parameter("extra", nn.Parameter(torch.ones(1)))
        return loaded

    gate = reload_gate(other, converted, given)
    assert (gate.passed, gate.figures["unexpected"], gate.figures["missing"]) == (False, 1, 0)
    assert "extra" in gate.why
    broken = reload_gate(lambda: torch.load(io.BytesIO(b"")), converted, given)
    assert broken.passed is False
    assert "cannot be loaded" in broken.why


# -- the report ------------------------------------------------------------------------------


def test_a_proof_reads_in_every_form() -> None:
    proof = proved(small()).with_gate(Gate("reload", False, {"missing": 2, "unexpected": 0}, "missing: a|b"))
    assert not proof.passed
    assert json.loads(json.dumps(proof.to_json()))["gates"][1]["passed"] is True
    text = str(proof)
    assert "the function is NOT the same" in text
    assert "FAILED" in text
    assert "bound 1e-10" in text
    chinese = proof.to_text(lang="zh")
    assert "函数已改变" in chinese
    assert "未通过" in chinese
    markdown = proof.to_markdown()
    assert "| reload | FAILED | missing 2, unexpected 0 | missing: a\\|b |" in markdown
    assert "关卡" in proof.to_markdown("zh")
    assert "<td>twin</td><td>passed</td>" in proof._repr_html_()
