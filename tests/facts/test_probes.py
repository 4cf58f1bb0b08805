"""Probes find planted faults in small models, blame the norm, and acquit the same model without the fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.causality import Causality
from normwise.facts.decoding import Decoding
from normwise.facts.differences import Layout, changes, layouts, relative_change, still_layouts
from normwise.targets import Target

PROBES_AT_NORMAL_EFFORT = 6  # passes, counterfactuals apart


class Rms(nn.Module):
    """A root mean square over chosen axes, written by hand."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(self.axes, keepdim=True) + 1e-6)


class Transformer(nn.Module):
    """Two pre-norm attention blocks over tokens."""

    def __init__(self, *norms: nn.Module, causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norms = nn.Embedding(11, 8), nn.ModuleList(norms)
        self.mix, self.out = (
            nn.ModuleList(nn.Linear(8, 24) for _ in norms),
            nn.ModuleList(nn.Linear(8, 8) for _ in norms),
        )
        self.last, self.head, self.causal = nn.LayerNorm(8), nn.Linear(8, 11), causal

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, mix, out in zip(self.norms, self.mix, self.out, strict=True):
            q, k, v = mix(norm(x)).chunk(3, -1)
            x = x + out(functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal))
        return self.head(self.last(x))


class Convolutions(nn.Module):
    """A norm between two convolutions over time, in eval mode unless said otherwise."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Conv1d(3, 4, 3), norm, nn.Conv1d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.gelu(self.norm(self.first(x))))


def ids(rows: int = 3, steps: int = 7) -> Tensor:
    return (torch.arange(rows * steps).view(rows, steps) * 5 + 1) % 11


def facts(model: nn.Module, *args: Any, **more: Any) -> Facts:
    return Facts(Target(model=model.eval(), args=args, **more))


# -- layouts -----------------------------------------------------------------------------


def test_units_lie_merged_with_others_in_either_order() -> None:
    assert Layout(0, 3, 2).unit_of(6).tolist() == [0, 0, 0, 1, 1, 1]
    assert Layout(0, 1, 2).unit_of(6).tolist() == [0, 1, 0, 1, 0, 1]
    assert {(k.axis, k.inner) for k in layouts((6, 5, 2), 2)} == {(0, 1), (0, 3), (2, 1)}


def test_the_layout_of_a_value_shows_in_what_moved() -> None:
    x = torch.randn(6, 5)
    y = x.clone()
    y[3:] += 1
    protected = torch.tensor([True, False])
    assert [k for k, _ in still_layouts(x, y, 2, protected) or ()] == [Layout(0, 3, 2)]
    assert still_layouts(x, x.clone(), 2, protected) is None
    assert still_layouts(x, x + 1, 2, protected) == []


def test_values_that_are_not_finite_differ_only_from_others() -> None:
    x = torch.tensor([1.0, torch.inf, torch.nan, 2.0])
    assert changes(x, x).tolist() == [0, 0, 0, 0]
    assert changes(x, torch.tensor([1.0, 1.0, torch.nan, torch.nan])).tolist() == [0, torch.inf, 0, torch.inf]
    assert relative_change(x, torch.full((4,), torch.nan)) < torch.inf


# -- partners ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_over_the_batch_is_blamed_for_what_partners_move(dtype: torch.dtype) -> None:
    known = facts(Transformer(nn.LayerNorm(8), Rms(0)).to(dtype), ids())
    assert [s.row.path for s in known.partners.sites] == ["norms.1"]
    assert known.partners.change > 1e-3
    assert known.partners.change_held is not None
    assert known.partners.change_held() < 1e-5
    assert {p.dtype for p in known.target.model.parameters()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_each_sample_are_acquitted(dtype: torch.dtype) -> None:
    for norms in ((nn.LayerNorm(8), Rms(-1)), (Rms(-2, -1), nn.LayerNorm(8))):
        known = facts(Transformer(*norms).to(dtype), ids())
        assert known.partners.change < 1e-5
        assert known.partners.norms == ()


def test_a_single_sample_is_doubled_where_a_norm_spans_the_batch() -> None:
    assert facts(Transformer(Rms(0)), ids(1)).partners.sites
    alone = facts(Transformer(Rms(-1)), ids(1))
    assert alone.partners.samples == 1
    assert alone.forward_passes == 1


def test_inputs_by_name_with_a_mask_are_probed_as_well() -> None:
    class Named(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.inner = Transformer(norm)

        def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
            return {"logits": self.inner(tokens) * mask[..., None]}

    given = {"tokens": ids(), "mask": torch.ones(3, 7, dtype=torch.long)}
    bad, good = (Facts(Target(model=Named(n).eval(), kwargs=given)) for n in (Rms(0), Rms(-1)))
    assert [s.row.path for s in bad.partners.sites] == ["inner.norms.0"]
    assert good.partners.change < 1e-5


def test_other_ops_after_other_data_do_not_confuse_the_comparison() -> None:
    class Routed(nn.Module):
        """Adds an op wherever the mean of the batch is high: the sequence of ops depends on the data."""

        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.read, self.norm, self.head = nn.Linear(6, 8), norm, nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.read(x)
            if float(x[1:].mean()) > 0.2:
                y = torch.cat([y[:1], y[1:].tanh() * 2])
            return self.head(self.norm(y))

    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) - 0.5
    assert [s.row.path for s in facts(Routed(Rms(0)), x).partners.sites] == ["norm"]
    assert facts(Routed(Rms(-1)), x).partners.change < 1e-5


def test_an_instance_norm_on_a_merged_view_is_healthy_and_groups_across_samples_are_not() -> None:
    class Merged(nn.Module):
        def __init__(self, groups: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.read, self.groups = nn.Conv2d(3, 4, 3), groups

        def forward(self, x: Tensor) -> Tensor:
            y = self.read(x)
            return functional.group_norm(y.reshape(1, -1, *y.shape[2:]), self.groups).view(y.shape)

    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    assert facts(Merged(16), x).partners.change < 1e-5
    assert facts(Merged(2), x).partners.sites


class Windows(nn.Module):
    """Windows of each sample attend to a query made of the sample, in the order of samples or in another one."""

    def __init__(self, *, confused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.key, self.query, self.norm, self.confused = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), confused

    def forward(self, x: Tensor) -> Tensor:
        windows = self.norm(x).view(-1, 4, 8)  # [B * 3, 4, 8], sample by sample
        query = self.query(x.mean(1, keepdim=True)).expand(-1, 4, -1)
        query = query.repeat(3, 1, 1) if self.confused else query.repeat_interleave(3, 0)
        return functional.scaled_dot_product_attention(query, self.key(windows), windows).reshape(x.shape)


def test_rows_of_different_samples_paired_in_one_op_are_named() -> None:
    x = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(0))
    bad, good = (facts(Windows(confused=c), x).partners for c in (True, False))
    assert bad.mixer is not None
    assert bad.mixer.pairs
    assert bad.norms == ()
    assert good.change < 1e-5


def test_contrast_within_the_batch_is_named_and_pairs_nothing() -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.norm = nn.Linear(6, 8), nn.Linear(6, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.left(x)) @ self.norm(self.right(x)).T

    seen = facts(Contrast(), torch.randn(4, 6)).partners
    assert seen.mixer is not None
    assert not seen.mixer.pairs
    assert seen.norms == ()


class Faint(nn.Module):
    """A norm in a branch of thousandths on the stream of a token; attention, where it is asked for, is as faint."""

    def __init__(self, *axes: int, sees: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.write = nn.Embedding(11, 8), Rms(*axes), nn.Linear(8, 8)
        self.sees = sees

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.sees is not None:
            x = x + (1.0 if self.sees else 1e-3) * functional.scaled_dot_product_attention(x, x, x, is_causal=self.sees)
        return x + 1e-3 * self.write(self.norm(x))


def test_what_is_small_and_gone_with_the_norm_held_is_the_norms_doing() -> None:
    batch = facts(Faint(-3, -2, -1), ids(), padded_inputs=(ids(steps=9),)).partners
    assert batch.norms
    assert 1e-5 < batch.change < 1e-3
    time = facts(Faint(-2, -1, sees=True), ids()).causality
    assert time.leaks
    assert 1e-5 < time.change < 1e-3
    longer = functional.pad(ids(), (0, 2))
    (padding,) = facts(Faint(-2, -1), ids(), padded_inputs=(longer,)).padding.modes
    assert 1e-5 < padding.change < 1e-3


def test_what_is_small_and_stays_with_the_norm_held_is_not() -> None:
    weak = facts(Faint(-2, -1, sees=False), ids()).causality
    assert 1e-5 < weak.change < 1e-3
    assert not weak.leaks
    assert facts(Faint(-1), ids(), padded_inputs=(functional.pad(ids(), (0, 2)),)).padding.modes == ()


# -- causality ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_over_time_leaks_the_future_of_a_causal_model(dtype: torch.dtype) -> None:
    known = facts(Transformer(nn.LayerNorm(8), Rms(-2, -1)).to(dtype), ids())
    assert [s.row.path for s in known.causality.sites] == ["norms.1"]
    assert known.causality.leaks
    assert known.causality.held < 1e-5


def test_the_same_norm_in_every_layer_is_held_as_one_cause() -> None:
    known = facts(Transformer(Rms(-2, -1), Rms(-2, -1)), ids()).causality
    assert [s.row.path for s in known.sites] == ["norms.0", "norms.1"]
    assert known.leaks


def test_an_encoder_leaks_nothing_through_its_norm() -> None:
    assert not facts(Transformer(Rms(-2, -1), causal=False), ids()).causality.leaks


def test_what_mixes_no_steps_but_for_its_norm_is_not_called_causal_unless_it_claims_so() -> None:
    def pointwise() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(11, 8), Rms(-2, -1), nn.Linear(8, 3))

    assert not facts(pointwise(), ids()).causality.leaks
    assert facts(pointwise(), ids(), claims=("causal",)).causality.leaks


class EncoderDecoder(nn.Module):
    """One block each; the decoder is causal and attends to all of the encoder."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.source, self.target = nn.Embedding(11, 8), nn.Embedding(11, 8)
        self.encoder, self.decoder = encoder, decoder
        self.mix, self.own = nn.Linear(8, 24), nn.Linear(8, 24)
        self.ask, self.answer = nn.Linear(8, 8), nn.Linear(8, 16)
        self.last, self.head = nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        attention = functional.scaled_dot_product_attention
        x, y = self.source(source), self.target(target)
        x = x + attention(*self.mix(self.encoder(x)).chunk(3, -1))
        y = y + attention(*self.own(self.decoder(y)).chunk(3, -1), is_causal=True)
        return self.head(self.last(y + attention(self.ask(y), *self.answer(x).chunk(2, -1))))


@pytest.mark.parametrize("lengths", [(7, 7), (9, 6)])
def test_the_decoder_alone_must_not_see_later_steps(lengths: tuple[int, int]) -> None:
    def probed(encoder: nn.Module, decoder: nn.Module) -> Causality:
        return facts(EncoderDecoder(encoder, decoder), ids(3, lengths[0]), ids(3, lengths[1]).flip(1)).causality

    for encoder in (Rms(-1), Rms(-2, -1)):
        leaking = probed(encoder, Rms(-2, -1))
        assert [s.row.path for s in leaking.sites] == ["decoder"]
        assert leaking.leaks
        assert leaking.steps == lengths[1]
        assert not probed(encoder, Rms(-1)).leaks


def test_steps_that_cannot_be_exchanged_are_not_called_causal() -> None:
    with pytest.raises(NotKnown, match="no other values"):
        _ = facts(Transformer(Rms(-2, -1), Rms(-2, -1)), torch.ones(3, 7, dtype=torch.long)).causality


def test_norms_of_one_step_need_no_run() -> None:
    known = facts(Transformer(nn.LayerNorm(8), Rms(-1)), ids())
    assert not known.causality.leaks
    assert known.forward_passes == 1


# -- padding -----------------------------------------------------------------------------


def speech(steps: int = 12) -> Tensor:
    return torch.randn(2, 3, steps, generator=torch.Generator().manual_seed(0))


def padded(model: nn.Module, x: Tensor, longer: Any, **more: Any) -> Facts:
    return facts(model, x, padded_inputs=longer, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_in_the_statistics_of_eval_mode_is_found(dtype: torch.dtype) -> None:
    x = speech().to(dtype)
    known = padded(Convolutions(nn.GroupNorm(4, 4)).to(dtype), x, (functional.pad(x, (0, 20)),))
    (mode,) = known.padding.modes
    assert ([s.row.path for s in mode.sites], mode.training) == (["norm"], False)
    assert mode.change > 1e-2
    assert mode.change_held() < 1e-5
    assert known.padding.share == pytest.approx(20 / 32)


def test_a_batch_norm_counts_padding_in_training_alone() -> None:
    x = speech()
    (mode,) = padded(Convolutions(nn.BatchNorm1d(4)), x, (functional.pad(x, (0, 20)),)).padding.modes
    assert mode.training
    assert mode.change_held() < 1e-5


class Steps(nn.Module):
    """A norm over the channels of one step."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()


def test_a_norm_of_each_step_sees_no_padding_even_where_convolutions_do() -> None:
    x = speech()
    model = Convolutions(Steps())
    model.first.padding = (1,)  # the last step of the first convolution sees what stands behind
    assert padded(model, x, (functional.pad(x, (0, 20), value=3.0),)).padding.modes == ()


def test_further_rows_of_the_padded_batch_do_not_count() -> None:
    x = speech()
    longer = torch.cat([functional.pad(x, (0, 20)), torch.randn(3, 3, 32)])
    assert padded(Convolutions(Steps()), x, (longer,), lengths=(12, 12, 32, 32, 32)).padding.modes == ()
    assert padded(Convolutions(nn.InstanceNorm1d(4)), x, longer, lengths=torch.tensor([12] * 5)).padding.modes


@pytest.mark.parametrize(
    ("longer", "lengths", "said"),
    [
        (torch.randn(2, 3, 32), None, "not the samples"),
        (torch.randn(1, 3, 32), None, "not the samples"),
        (speech(), None, "not longer"),
        ((speech(), speech()), None, "not the samples"),
        (functional.pad(speech(), (0, 4)), "long", "lengths"),
        (functional.pad(speech(), (0, 4)), (12,), "lengths"),
    ],
)
def test_padded_inputs_of_another_kind_are_refused_with_a_reason(longer: Any, lengths: Any, said: str) -> None:
    known = padded(Convolutions(nn.GroupNorm(4, 4)), speech(), longer, lengths=lengths)
    with pytest.raises(NotKnown, match=said):
        known.padding  # noqa: B018


def test_without_padded_inputs_it_says_what_it_needs() -> None:
    with pytest.raises(NotKnown, match="padded_inputs"):
        facts(Convolutions(nn.GroupNorm(4, 4)), speech()).padding  # noqa: B018


# -- decoding ----------------------------------------------------------------------------


class Memory(nn.Module):
    """A decoder whose cache is a running sum; its norm may look at its neighbours, or forget them in decoding."""

    def __init__(self, axes: tuple[int, ...], decoding: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.norm, self.other = Rms(*axes), decoding

    def forward(self, ids: Tensor, cache: Tensor | None = None, *, use_cache: bool = False) -> Any:
        x = self.embed(ids).unflatten(-1, (2, 4))
        self.norm.axes, kept = self.other if ids.shape[1] == 1 else self.norm.axes, self.norm.axes
        x = self.norm(x).flatten(-2).cumsum(1)
        self.norm.axes = kept
        x = x if cache is None else x + cache
        return {"logits": self.head(x), "cache": x[:, -1:]} if use_cache else self.head(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_other_axes_in_decoding_is_found(dtype: torch.dtype) -> None:
    seen = facts(Memory((-1,), (-2, -1)).to(dtype), ids()).decoding
    assert [s.row.path for s in seen.sites] == ["norm"]
    assert seen.change_held is not None
    assert seen.change > 1e-3 > 1e-5 > seen.change_held()


def test_the_same_axes_in_both_ways_agree() -> None:
    seen = facts(Memory((-1,), (-1,)), ids()).decoding
    assert seen.change < 1e-5
    assert seen.sites == ()


class Translator(Memory):
    """The same behind an encoder that reads a sentence of its own, in one way at every step."""

    def forward(
        self, ids: Tensor, cache: Tensor | None = None, *, use_cache: bool = False, decoder_ids: Tensor | None = None
    ) -> Any:
        assert decoder_ids is not None
        bias, out = self.embed(ids).mean(1, keepdim=True), super().forward(decoder_ids, cache, use_cache=use_cache)
        if not use_cache:
            return out + self.head(bias)
        return {**out, "logits": out["logits"] + self.head(bias)}


@pytest.mark.parametrize("steps", [7, 5])
def test_a_decoder_behind_an_encoder_decodes_alone(steps: int) -> None:
    def decoded(other: tuple[int, ...]) -> Decoding:
        model = Translator((-1,), other).eval()
        return Facts(Target(model=model, args=(ids(3),), kwargs={"decoder_ids": ids(3, steps).flip(1)})).decoding

    assert [s.row.path for s in decoded((-2, -1)).sites] == ["norm"]
    well = decoded((-1,))
    assert (well.step, well.sites) == (steps - 1, ())
    assert well.change < 1e-5


class Offset(Memory):
    """Sums on a large constant, which the cache adds up in another order: a layer norm takes it out again."""

    def __init__(self) -> None:
        super().__init__((-1,), (-1,))
        self.last = nn.LayerNorm(8)

    def forward(self, ids: Tensor, cache: Tensor | None = None, *, use_cache: bool = False) -> Any:
        x = self.embed(ids).cumsum(1) + (3e5 if cache is None else cache)
        return {"logits": self.head(self.last(x)), "cache": x[:, -1:]} if use_cache else self.head(self.last(x))


def test_rounding_of_what_a_layer_norm_takes_out_is_no_other_formula() -> None:
    seen = facts(Offset(), ids()).decoding
    assert seen.change > 1e-3
    assert seen.sites == ()


def test_a_model_without_a_cache_is_not_decoded() -> None:
    with pytest.raises(NotKnown, match="cache"):
        facts(Transformer(nn.LayerNorm(8)), ids()).decoding  # noqa: B018


# -- all of them -------------------------------------------------------------------------


def test_the_probes_share_few_passes_and_leave_the_model_as_it_was() -> None:
    model = Memory((-3, -2, -1), (-2, -1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    known = facts(model, ids())
    for probe in (lambda: known.partners, lambda: known.causality, lambda: known.decoding):
        probe()
    assert known.forward_passes - known.repair_passes <= PROBES_AT_NORMAL_EFFORT
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    assert not model._forward_hooks
