"""Faults in several places, or small beside a stream: what the benchmark of faults showed to be missed."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.checkup.rules.judging import findings, severities


class Rms(nn.Module):
    """An RMSNorm over axes, or, for a single step, of something else."""

    def __init__(self, *axes: int, single: float = 1.0) -> None:
        super().__init__()
        self.axes, self.single = axes, single

    def forward(self, x: Tensor) -> Tensor:
        scale = self.single if x.shape[1] == 1 else 1.0
        return x * torch.rsqrt(scale * x.square().mean(self.axes, keepdim=True) + 1e-6)


# -- an encoder and a decoder with sequences of their own lengths -----------------------------------


class Translator(nn.Module):
    """A decoder that reads the mean of an encoder's states."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.mix = nn.Embedding(20, 8), Rms(*axes), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        memory = self.mix(self.norm(self.embed(input_ids))).mean(1, keepdim=True)
        return self.head(self.embed(decoder_input_ids) + memory)


IDS = torch.arange(22).view(2, 11) % 20
OTHER_IDS = torch.arange(14).view(2, 7) % 20


def test_statistics_over_time_are_seen_where_encoder_and_decoder_have_other_lengths() -> None:
    assert severities("AXS002", Translator(1, 2).eval(), IDS, OTHER_IDS) == ["warning"]
    assert severities("AXS002", Translator(2).eval(), IDS, OTHER_IDS) == []


# -- token ids with padding behind them -------------------------------------------------------------


class Tagger(nn.Module):
    """A label for each token."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(20, 8), Rms(*axes), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))


def test_padding_behind_token_ids_whose_lengths_are_given_is_judged() -> None:
    padded = {"padded_inputs": (torch.nn.functional.pad(IDS, (0, 5)),), "lengths": [11, 11]}
    assert severities("AXS004", Tagger(1, 2).eval(), IDS, **padded) == ["error"]
    assert severities("AXS004", Tagger(2).eval(), IDS, **padded) == []


# -- several norms that decode otherwise ------------------------------------------------------------


class Memory(nn.Module):
    """Two running sums, each behind a norm; the cache holds both, or, for another fault, forgets them."""

    def __init__(self, *, single: float = 1.0, forgets: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.forgets = nn.Embedding(20, 8), forgets
        self.first, self.second = Rms(-1, single=single), Rms(-1, single=single)
        self.head = nn.Linear(8, 20)

    def forward(
        self, ids: Tensor, past_key_values: tuple[Tensor, Tensor] | None = None, *, use_cache: bool = False
    ) -> dict[str, object] | Tensor:
        nothing = torch.zeros(1), torch.zeros(1)
        kept = nothing if past_key_values is None or self.forgets else past_key_values
        x, sums = self.embed(ids), []
        for index, norm in enumerate((self.first, self.second)):
            x = norm(x).cumsum(1) + kept[index]
            sums.append(x[:, -1:])
        logits = self.head(x)
        return {"logits": logits, "past_key_values": tuple(sums)} if use_cache else logits


def test_norms_in_series_that_all_decode_otherwise_are_an_error_that_holding_them_repairs() -> None:
    (found,) = findings("AXS005", Memory(single=2.0).eval(), IDS)
    assert (str(found.severity), found.path) == ("error", "first")
    assert found.counterfactual is not None
    assert found.counterfactual["after"] < 1e-5 < found.counterfactual["before"]


def test_a_cache_that_forgets_is_not_blamed_on_norms() -> None:
    assert severities("AXS005", Memory(forgets=True).eval(), IDS) == []
    assert severities("AXS005", Memory().eval(), IDS) == []


# -- a norm unlike its reference, in a branch that is small beside the stream -----------------------


class Quiet(nn.Module):
    """A branch of hundredths on a stream of hundreds; the head reads the channels that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.branch, self.head = nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        stream = torch.cat([300 * x[..., :8], 0.01 * x[..., 8:]], -1)
        written = nn.functional.pad(0.01 * torch.tanh(self.branch(self.norm(stream))), (8, 0))
        return self.head(100 * (stream + written)[..., 8:])


def test_a_gain_unlike_the_references_is_named_though_the_stream_hides_it() -> None:
    reference = Quiet().eval()
    model = copy.deepcopy(reference)
    with torch.no_grad():
        model.norm.weight.mul_(1.3)
    (found,) = findings("CKP006", model, torch.randn(2, 5, 16), reference=reference)
    assert (str(found.severity), found.path) == ("error", "norm")
    assert "gain is 1.3, not 1" in found.message


def test_what_a_small_branch_leaves_of_a_difference_is_a_warning_and_rounding_is_none() -> None:
    reference, x = Quiet().eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        reference.branch.weight.mul_(1e-4)
    model = copy.deepcopy(reference)
    assert severities("CKP006", model, x, reference=reference) == []
    with torch.no_grad():
        model.norm.weight.mul_(1.3)
    (found,) = findings("CKP006", model, x, reference=reference)
    assert (str(found.severity), found.path) == ("warning", "norm")
    assert 1e-5 < found.evidence["value"] < 1e-3
    with torch.no_grad():
        model.norm.weight.div_(1.3)
        model.branch.weight.mul_(1.3)  # not a norm: as little is no difference
    assert severities("CKP006", model, x, reference=reference) == []


def test_a_matrix_unlike_the_references_is_not_blamed_on_a_norm() -> None:
    reference = Quiet().eval()
    model = copy.deepcopy(reference)
    with torch.no_grad():
        model.branch.weight.mul_(1.3)
    assert severities("CKP006", model, torch.randn(2, 5, 16), reference=reference) == ["info"]


# -- a frozen block that looks like its siblings ----------------------------------------------------


def test_the_first_of_equal_blocks_is_no_momentum_encoder() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(6, 2)).train()
    model[0].requires_grad_(False)
    (found,) = findings("BNS007", model, torch.randn(16, 6))
    assert (str(found.severity), found.path) == ("warning", "0")
