"""Predictions of traced models: what predict() says where they are ours, beside measurements where they are not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import normwise as nw
from normwise import targets
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.models import Decoder, Encoder
from normwise.targets.guesses import sequence_first
from normwise.theory import Prediction, predict, predict_traced
from normwise.theory.traced import beside

WORDS, WIDTH, TIME, SEEDS = 96, 128, 32, (0, 1, 2)


def assert_same(one: Prediction, other: Prediction) -> None:
    assert one.assumptions == other.assumptions
    for field in (f for f in fields(Prediction) if f.name != "assumptions"):
        assert getattr(one, field.name) == pytest.approx(getattr(other, field.name), rel=1e-6), field.name


def ids(batch: int = 4, steps: int = 12) -> torch.Tensor:
    return torch.randint(WORDS, (batch, steps))


@pytest.mark.parametrize(
    "placement",
    [
        "pre",
        "post",
        "sandwich",
        "res-post",
        "parallel",
        "parallel-shared",
        "deep-norm",
        "layernorm-scaling",
        "residual-multiplier",
        "sub-ln",
        "normformer",
        "hybrid-norm",
        "keel",
        "mix-ln",
        "layerscale",
        "skip-init",
        "t-fixup",
    ],
)
def test_our_own_models_are_read_as_any(placement: str) -> None:
    torch.manual_seed(0)
    model, tokens = Decoder(WORDS, 32, 3, 4, placement=placement, mlp="relu"), ids()
    assert_same(predict_traced(model, tokens), predict(model.stack, model.embedding(tokens)))


@pytest.mark.parametrize(
    "options",
    [
        {"mlp": "swiglu", "num_kv_heads": 2},
        {"mlp": "geglu-tanh", "attention_scale": 0.1},
        {"qk_norm": "head"},
        {"qk_norm": "all-heads", "windows": (4, None)},
        {"softcap": 30.0},
        {"norm": "scale"},
        {"norm": "layer", "positions": "learned"},
        {"norm": "gemma", "embedding_norm": True, "embedding_scale": 3.0},
    ],
    ids=lambda options: ", ".join(options),
)
def test_options_of_our_own_models(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, tokens = Decoder(WORDS, 32, 2, 4, **options), ids()
    assert_same(predict_traced(model, tokens), predict(model.stack, model.embedding(tokens)))


def test_an_encoder_of_ours_and_factors_that_were_set() -> None:
    torch.manual_seed(0)
    model, tokens = Encoder(WORDS, 32, 2, 4), ids()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "before" in name or "after" in name:
                parameter.fill_(0.7 if name.endswith("weight") else 0.0)
    assert_same(predict_traced(model, tokens), predict(model.stack, model.embedding(tokens)))


# -- other people's models ---------------------------------------------------------------------


def gpt2(layers: int = 5, attention: str = "sdpa") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=WIDTH,
        n_layer=layers,
        n_head=4,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=344,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4
    )
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def torch_encoder(*, norm_first: bool, batch_first: bool = True) -> nn.Module:
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 4, 512, norm_first=norm_first, batch_first=batch_first) for _ in range(6)
    ]
    model = nn.TransformerEncoder(layers[0], len(layers), enable_nested_tensor=False)
    model.layers = nn.ModuleList(layers)  # nn.TransformerEncoder copies one layer, weights and all
    return model.eval()


class Fused(nn.Module):
    """A pre-norm model with a fused gate, a learned factor, and attention and activation written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = (nn.ModuleList(nn.Linear(WIDTH, n, bias=False) for _ in range(4)) for n in (384, WIDTH))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 512, bias=False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(256, WIDTH, bias=False) for _ in range(4))
        self.factor = nn.Parameter(torch.full((4, WIDTH), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for qkv, out, up, down, factor in zip(self.qkv, self.out, self.up, self.down, self.factor, strict=True):
            q, k, v = qkv(functional.rms_norm(x, (WIDTH,))).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-1, -2)) / 32**0.5
            weights = (scores + torch.full(scores.shape[-2:], -1e9).triu(1)).softmax(-1)
            x = x + factor * out((weights @ v).transpose(1, 2).flatten(-2))
            gate, h = up(functional.rms_norm(x, (WIDTH,))).chunk(2, -1)
            x = x + down(gate * torch.sigmoid(gate) * h)
        return x


def fused() -> nn.Module:
    model = Fused()
    for name, parameter in model.named_parameters():
        if name != "factor":
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def tokens_of(model: nn.Module) -> Any:
    if isinstance(model, nn.TransformerEncoder):
        rows = torch.randn(8, TIME, WIDTH)
        return rows if sequence_first(model) is False else rows.transpose(0, 1)
    return torch.randn(8, TIME, WIDTH) if isinstance(model, Fused) else {"input_ids": ids(8, TIME)}


def post_torch() -> nn.Module:
    return torch_encoder(norm_first=False)


def pre_torch() -> nn.Module:
    return torch_encoder(norm_first=True, batch_first=False)


def eager_gpt2() -> nn.Module:
    return gpt2(3, "eager")


@pytest.mark.parametrize("make", [gpt2, eager_gpt2, llama, bert, post_torch, pre_torch, fused])
def test_foreign_models_at_initialisation(make: Callable[[], nn.Module]) -> None:
    runs = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = make()
        facts = Facts(targets.target(model, tokens_of(model)))
        runs.append(beside(facts, facts.profile))
    for rows in zip(*runs, strict=True):
        measured, told = (fmean(getattr(r, n) for r in rows) for n in ("residual_rms", "predicted_rms"))
        assert measured == pytest.approx(told, rel=0.08)
        measured, told = (fmean(getattr(r, n) for r in rows) for n in ("grad_rms", "predicted_grad"))
        assert measured == pytest.approx(told, rel=0.15)
        assert (rows[0].predicted_influence is None) == (rows[0].block_influence is None)
        if rows[0].predicted_influence is not None:
            measured, told = (fmean(getattr(r, n) for r in rows) for n in ("block_influence", "predicted_influence"))
            assert measured == pytest.approx(told, rel=0.25)


@pytest.mark.slow
def test_growth_of_a_fresh_gpt_2_of_12_blocks_from_its_own_embeddings() -> None:
    """Their second moment is 8e-4, so that the stream grows far more than 1 + l v says: SCIENCE, corrections."""
    measured, told = [], []
    for seed in SEEDS:
        torch.manual_seed(seed)
        facts = Facts(targets.target(gpt2(12), {"input_ids": ids(8, 64)}))
        rows, prediction = facts.profile, predict_traced(facts)
        assert prediction.q[0] == pytest.approx(8e-4, rel=0.1)
        assert rows[-1].residual_rms is not None
        measured.append(rows[-1].residual_rms / prediction.q[0] ** 0.5)
        told.append((prediction.q[-1] / prediction.q[0]) ** 0.5)
    assert fmean(measured) == pytest.approx(fmean(told), rel=0.08)
    assert fmean(told) > 1.5


# -- what cannot be read -----------------------------------------------------------------------


class Layers(nn.Module):
    """Pre-norm layers around one branch."""

    def __init__(self, branch: Callable[[], nn.Module], layers: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(16) for _ in range(layers))
        self.branches = nn.ModuleList(branch() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = x + branch(norm(x))
        return x


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Windowed(nn.Module):
    """Attention within halves of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x.unflatten(1, (2, 3)).flatten(0, 1)).unsqueeze(1).chunk(3, -1)
        h = functional.scaled_dot_product_attention(q, k, v).squeeze(1)
        return self.out(h.unflatten(0, (-1, 2)).flatten(1, 2))


class Biased(nn.Module):
    """Attention that prefers near keys, by a bias on its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        at = torch.arange(x.shape[1])
        near = -(at[:, None] - at).abs().to(x.dtype)
        return self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=near).squeeze(1))


def mlp(activation: nn.Module, *, shift: float = 0.0) -> nn.Module:
    up = nn.Linear(16, 32)
    nn.init.constant_(up.bias, shift)
    return nn.Sequential(up, activation, nn.Linear(32, 16))


@pytest.mark.parametrize(
    ("branch", "why"),
    [
        (Conv, "convolution|conv1d"),
        (Windowed, "parts of the sequence"),
        (Biased, "bias of their own"),
        (lambda: mlp(nn.Softplus()), "activation function"),
        (lambda: mlp(nn.ReLU(), shift=1.0), "shift of a matrix"),
        (lambda: nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 16)), "another form"),
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.GRU(16, 16, batch_first=True), First()), "knows nothing"),
    ],
)
def test_unknown_stays_unknown(branch: Callable[[], nn.Module], why: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(NotKnown, match=why):
        predict_traced(Layers(branch), torch.randn(2, 6, 16))


class First(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0]


def test_equal_weights_are_no_independent_draws() -> None:
    """Torch's encoder copies one layer: its branches add up, and the stream grows faster than any draw lets it."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
    with pytest.raises(NotKnown, match="same weights"):
        predict_traced(model, torch.randn(2, 6, 16))


def test_no_stream_and_no_such_stack() -> None:
    with pytest.raises(NotKnown, match="no residual stream"):
        predict_traced(nn.Linear(4, 4), torch.randn(2, 3, 4))
    with pytest.raises(NotKnown, match="no residual stream"):
        predict_traced(Layers(lambda: mlp(nn.ReLU())), torch.randn(2, 6, 16), stack=1)


# -- in a check --------------------------------------------------------------------------------


def test_a_check_puts_theory_beside_measurement_only_at_initialisation() -> None:
    torch.manual_seed(0)
    model, tokens = Decoder(WORDS, 64, 3, 4), ids()
    rows = nw.check(model, tokens).profile
    assert all(row.predicted_rms is not None and row.predicted_grad is not None for row in rows)
    assert [row.predicted_influence is None for row in rows] == [True, False] * 3
    assert rows[-1].predicted_grad == rows[-1].grad_rms
    with torch.no_grad():
        for parameter in model.parameters():  # what training does: channels differ
            parameter.mul_(torch.linspace(0.2, 3.0, parameter.shape[-1]))
    trained = nw.check(model, tokens)
    assert all(row.predicted_rms is None for row in trained.profile)
    assert not any("theory" in note for note in trained.notes)


def test_a_check_says_why_there_is_no_theory() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 64, batch_first=True), 3)
    report = nw.check(model, torch.randn(2, 6, 64))
    assert report.profile
    assert all(row.predicted_rms is None for row in report.profile)
    assert [note for note in report.notes if "theory" in note] == ["theory not drawn: sublayers hold the same weights"]


def test_no_failure_of_the_theory_ends_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise IndexError("out of range")

    monkeypatch.setattr(sys.modules["normwise.checkup.check"], "beside", broken)
    report = nw.check(Decoder(WORDS, 32, 2, 4), ids())
    assert report.profile
    assert "theory not drawn: IndexError: out of range" in report.notes


def test_predictions_do_not_depend_on_inference_mode() -> None:
    torch.manual_seed(0)
    model, tokens = Decoder(WORDS, 32, 2, 4), ids(2, 20)
    with torch.inference_mode():
        inside = predict_traced(model, tokens)
    assert_same(inside, predict_traced(model, tokens))


def test_what_a_check_reads_of_the_theory_loads_no_blocks_of_ours() -> None:
    code = "import sys, normwise.theory.traced; print([n for n in sys.modules if n.startswith('normwise.blocks')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


class SideBySide(nn.Module):
    """One branch, then two that are added together: these read what the first one left."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False))
            for _ in range(3)
        )
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.weight, std=width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.branches
        x = x + first(x)
        return x + others[0](x) + others[1](x)


def test_branches_side_by_side_read_what_stands_before_their_add() -> None:
    measured, expected = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        rows = nw.check(nn.Sequential(*(SideBySide(256) for _ in range(2))), torch.randn(4, 8, 256)).profile
        measured.append([row.residual_rms for row in rows])
        told = predict_traced(nn.Sequential(*(SideBySide(256) for _ in range(2))), torch.randn(4, 8, 256))
        expected.append(told.added)
    # v = q / 2 a branch: the second moment grows by 3/2, then by 2
    wanted = torch.tensor([1.5, 3.0, 4.5, 9.0]).sqrt()
    adds = torch.tensor(measured).mean(0)
    assert torch.allclose(adds, wanted, rtol=0.1), adds
    last_of_each_add = torch.tensor(expected).mean(0)[[0, 2, 3, 5]].sqrt()
    assert torch.allclose(last_of_each_add.float(), wanted, rtol=0.1), last_of_each_add
