"""Every mistake of ``mutations`` is caught by the proof, on real architectures and on models made for the edges."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from normwise import conversions
from normwise.conversions import Plan, Proof
from normwise.conversions.proof.structure_gate import structure
from normwise.conversions.proof.subject import Subject
from normwise.conversions.proof.twin import norms_of, redraw
from normwise.conversions.proof.twin_gate import twin
from normwise.facts.facts import Facts
from normwise.targets import Target, load, target
from tests.conversions.mutations import mutants


class ConvNet(nn.Module):
    """Batch norms behind a plain, a depthwise and a grouped transposed convolution and behind a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8, affine=False), nn.ReLU(),
            nn.ConvTranspose2d(8, 12, 2, groups=2), nn.BatchNorm2d(12, eps=1e-3), nn.ReLU6(),
            nn.Conv2d(12, 12, 1), nn.BatchNorm2d(12), nn.ReLU6(),
        )  # fmt: skip
        self.head, self.norm = nn.Linear(12, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.head(self.body(x).mean((2, 3))))


def convnet() -> Target:
    torch.manual_seed(0)
    return redrawn(target(ConvNet().eval(), torch.randn(2, 3, 7, 7)))


def language_model() -> Target:
    """A GPT-2 whose head is tied to its embedding."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=32, n_embd=24, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    return target(model, {"input_ids": torch.randint(0, 97, (2, 9)), "use_cache": False})


def hf(name: str) -> Callable[[], Target]:
    return lambda: load(f"hf:{name}")


def redrawn(made: Target) -> Target:
    """Return the target with gains, biases and means of their own: fresh ones leave nothing to fold."""
    redraw(made.model, norms_of(made))
    return made


CASES: dict[str, tuple[str, Callable[[], Target], dict[str, Any]]] = {
    "rms-norm gpt2": ("rms-norm", hf("gpt2"), {}),
    "rms-norm opt": ("rms-norm", hf("opt"), {}),
    "rms-norm gpt_neox": ("rms-norm", hf("gpt_neox"), {}),
    "rms-norm vit": ("rms-norm", hf("vit"), {}),
    "rms-norm bloom": ("rms-norm", hf("bloom"), {}),
    "rms-norm whisper": ("rms-norm", hf("whisper"), {}),
    "rms-norm cohere": ("rms-norm", hf("cohere"), {}),
    "rms-norm tied": ("rms-norm", language_model, {}),
    "rms-norm untied": ("rms-norm", language_model, {"untie": True}),
    "rms-norm weightless": ("rms-norm", lambda: redrawn(load("hf:gpt2")), {"weightless": True}),
    "fold-affine gpt2": ("fold-affine", lambda: redrawn(load("hf:gpt2")), {}),
    "fold-affine llama": ("fold-affine", lambda: redrawn(load("hf:llama")), {}),
    "fold-affine gemma": ("fold-affine", lambda: redrawn(load("hf:gemma")), {}),
    "fold-batch-norm convnet": ("fold-batch-norm", convnet, {}),
    "unit-offset llama": ("unit-offset", hf("llama"), {}),
}

# label -> case: one of each kind of mistake, quick enough for every run
SAMPLE = {
    "a recipe dropped: wte.weight": "rms-norm gpt2",
    "a recipe dropped: h.2.mlp.c_proj.bias": "rms-norm gpt2",
    "the wrong dim: h.1.attn.c_proj.weight (centre)": "rms-norm gpt2",
    "eps changed: h.3.ln_2": "rms-norm gpt2",
    "eps outside the root: ln_f": "rms-norm gpt2",
    "an edit dropped: word_embeddings_layernorm": "rms-norm bloom",
    "the wrong axis: word_embeddings_layernorm": "rms-norm bloom",
    "an edit dropped: lm_head": "rms-norm untied",
    "a tie forgotten: transformer.wte": "rms-norm tied",
    "a recipe dropped: body.6.bias": "fold-batch-norm convnet",
    "eps of a step changed: body.6.weight (scale_by_norms)": "fold-batch-norm convnet",
    "the offset ignored: layers.0.self_attn.q_proj.weight (scale)": "fold-affine gemma",
    "a step taken twice: layers.1.mlp.gate_proj.weight (scale)": "fold-affine gemma",
}


class Trial:
    """One conversion whose plan is varied; the target is traced once."""

    def __init__(self, case: str) -> None:
        self.conversion, make, self.options = CASES[case]
        self.target = make()
        self.facts = Facts(self.target, effort="full")
        self.plan = self.replan(self.target)

    def replan(self, other: Target) -> Plan:
        return conversions.plan(self.conversion, other, **self.options)

    def converted(self, plan: Plan) -> nn.Module | None:
        """Return a copy that a plan converted; None where it cannot even be applied."""
        converted = copy.deepcopy(self.target.model)
        try:
            conversions.apply_to_model(plan, converted)
        except (RuntimeError, IndexError):
            return None
        return converted

    def prove(self, plan: Plan) -> Proof:
        converted = self.converted(plan)
        assert converted is not None
        return conversions.prove(plan, self.target, converted, replan=self.replan, facts=self.facts)

    def caught(self, plan: Plan) -> bool:
        """Whether the gates that see fresh weights through reject a plan; the cheaper one is asked first."""
        converted = self.converted(plan)
        if converted is None:
            return True
        subject = Subject(plan=plan, target=self.target, converted=converted, replan=self.replan, facts=self.facts)
        return structure(subject).passed is False or twin(subject).passed is False


@pytest.fixture(scope="module")
def trial() -> Callable[[str], Trial]:
    made: dict[str, Trial] = {}
    return lambda case: made.setdefault(case, made.get(case) or Trial(case))


@pytest.mark.parametrize("label", SAMPLE)
def test_one_mistake_of_each_kind_is_caught(label: str, trial: Callable[[str], Trial]) -> None:
    tried = trial(SAMPLE[label])
    assert tried.caught(dict(mutants(tried.plan))[label])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_right_plans_pass_and_every_mistake_is_caught(case: str) -> None:
    tried = Trial(case)
    right = tried.prove(tried.plan)
    assert right.passed, right.to_text()
    assert right.gate("twin").figures["gap"] < 1e-12
    wrong = list(mutants(tried.plan))
    assert len(wrong) >= 9  # of all cases together more than 700
    missed = [label for label, plan in wrong if not tried.caught(plan)]
    assert missed == []


@pytest.mark.parametrize("label", ["a recipe dropped: h.0.attn.c_proj.bias", "a recipe dropped: h.0.mlp.c_proj.bias"])
def test_what_fresh_weights_hide_the_twin_sees(label: str, trial: Callable[[str], Trial]) -> None:
    tried = trial("rms-norm gpt2")
    proof = tried.prove(dict(mutants(tried.plan))[label])
    assert proof.gate("weights").passed is True  # a fresh bias is zero: nothing to centre
    assert proof.gate("structure").passed is True
    assert proof.gate("twin").passed is False
    assert proof.gate("twin").figures["gap"] > 1e-2


def test_the_twin_names_the_writer_that_was_forgotten(trial: Callable[[str], Trial]) -> None:
    tried = trial("rms-norm gpt2")
    proof = tried.prove(dict(mutants(tried.plan))["a recipe dropped: h.2.mlp.c_proj.bias"])
    assert proof.gate("twin").why.endswith("h.2.mlp.act still agrees, h.2.mlp.c_proj does not")
    assert proof.failed[0] is proof.gate("twin")
