"""What stands on a residual stream in models that are written otherwise than most."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import nn

import normwise as nw
from normwise import conversions
from normwise.conversions.proof.twin import norms_of, redraw
from normwise.errors import ConversionRefused
from normwise.targets import target
from tests.conversions import streams as s

EXACT = 1e-12


def judged(
    model: nn.Module, inputs: Any, *others: tuple[Any, ...], **options: Any
) -> tuple[conversions.Converted, float]:
    """Return the proved conversion of a redrawn model in float64, and how far it is from it on other inputs."""
    model = model.double().eval()
    redraw(model, norms_of(target(model, inputs)))
    made = nw.convert("rms-norm", model, inputs, **options)
    with torch.no_grad():
        found = [(model(*copy.deepcopy(given)), made.model(*given)) for given in others]
    return made, max(float((y - z).abs().max() / y.abs().max()) for y, z in found)


def norms(made: conversions.Converted) -> int:
    return sum("RMSNorm" in change.what for change in made.changes)


def subtractions(made: conversions.Converted) -> list[str]:
    return [change.path for change in made.changes if change.what == "mean subtracted"]


class Positions(s.Model):
    """Positions in a buffer, of which as many are taken as there are tokens."""

    def __init__(self, grows: bool) -> None:
        super().__init__(s.Block(), s.Block())
        self.grows = grows
        self.register_buffer("table", self.made(8))

    def made(self, length: int) -> torch.Tensor:
        return torch.sin(torch.arange(length)[:, None] * torch.arange(1, s.SIZE + 1) / 7) + 0.3

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.grows and ids.shape[1] > len(cast("torch.Tensor", self.table)):
            self.table = self.made(ids.shape[1]).to(self.tokens.weight)
        x = self.tokens(ids) + cast("torch.Tensor", self.table)[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


def test_positions_that_are_made_anew_for_a_longer_input_are_not_centred() -> None:
    made, error = judged(Positions(grows=True), s.ids(), (torch.randint(s.VOCABULARY, (2, 11)),))
    assert norms(made) == 3
    assert error < EXACT


class Bare(s.Model):
    """No positions: takes any length."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


class Aside(s.Model):
    """The embedding is also the head of another task, which the example does not use."""

    def __init__(self) -> None:
        super().__init__(s.Block(), s.Block())
        self.other = nn.Linear(s.SIZE, s.VOCABULARY, bias=False)
        self.other.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, other: bool = False) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return (self.other if other else self.head)(self.final(x))


def test_a_parameter_shared_with_a_module_that_did_not_run_stays() -> None:
    made, error = judged(Aside(), s.ids(), (s.ids(), True), (s.ids(), False))
    assert subtractions(made) == ["tokens"]
    assert error < EXACT


class Prefixed(s.Model):
    def forward(self, ids: torch.Tensor, prefix: torch.Tensor | None = None) -> torch.Tensor:
        assert prefix is not None
        x = torch.cat([prefix, self.tokens(ids)], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


def test_an_input_that_was_empty_is_part_of_the_stream() -> None:
    empty, full = (torch.randn(2, n, s.SIZE, dtype=torch.float64) + 1 for n in (0, 3))
    made, error = judged(Prefixed(s.Block(), s.Block()), (s.ids(), empty), (s.ids(), full))
    assert norms(made) == 3
    assert error < EXACT


class TokenScale(s.Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(s.SIZE, 1) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.mlp(self.norm(x))


def test_a_scale_for_each_token_is_no_scale_of_features_where_there_are_as_many() -> None:
    ids = torch.randint(s.VOCABULARY, (2, s.SIZE))
    made, error = judged(Bare(TokenScale(), TokenScale()), ids, (ids.flip(0),))
    assert not made.refused
    assert not subtractions(made)
    assert error < EXACT


class Short(nn.Module):
    """One scaled linear map reads the norm and writes the stream, without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(s.SIZE), nn.Linear(s.SIZE, s.SIZE, bias=False)
        self.scale = nn.Parameter(torch.full((s.SIZE,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.map(self.norm(x))


@pytest.mark.parametrize("options", [{"fold_bias": True}, {"weightless": True}], ids=str)
def test_the_new_bias_of_a_scaled_writer_is_scaled_and_centred(options: dict[str, Any]) -> None:
    made, error = judged(s.Model(Short(), Short()), s.ids(), (s.ids(),), **options)
    assert "blocks.0.map.bias" in made.plan.created
    assert error < EXACT


class Dated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.mlp = nn.LayerNorm(s.SIZE), nn.LayerNorm(s.SIZE), s.MLP()

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self.mlp(self.first(x) + self.second(x))


class Doubled(s.Model):
    """A module is given one tensor twice."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.sin(self.tokens(ids))
        for block in self.blocks:
            x = block(x, x)
        return self.head(self.final(x))


def test_a_mean_is_taken_wherever_a_module_is_given_the_stream() -> None:
    made, error = judged(Doubled(Dated(), Dated()), s.ids(), (s.ids(),))
    assert norms(made) == 5
    assert subtractions(made) == ["blocks.0"]
    assert error < EXACT


class Collects(nn.Module):
    """Puts a result into a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.LayerNorm(s.SIZE) for _ in range(3))

    def forward(self, x: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        found.append(self.one(x))
        return self.two(x).sin() + self.three(x).cos()


class Collected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(s.VOCABULARY, s.SIZE), Collects()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        x = self.body(torch.sin(self.tokens(ids)), found)
        return x * found[0]


def test_a_list_that_a_module_fills_stays_the_list_of_its_caller() -> None:
    made, error = judged(Collected(), s.ids(), (s.ids(),))
    assert norms(made) == 3
    assert subtractions(made) == ["body"]
    assert error < EXACT


@dataclass(frozen=True)
class State:
    x: torch.Tensor
    step: int = 0


class Stateful(s.Block):
    def forward(self, x: Any) -> Any:
        return State(super().forward(x.x), x.step + 1)


class Stated(s.Model):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        state = State(torch.sin(self.tokens(ids)))
        for block in self.blocks:
            state = block(state)
        return self.head(self.final(state.x))


def test_a_stream_inside_a_dataclass_is_reached() -> None:
    made, error = judged(Stated(Stateful(), Stateful()), s.ids(), (s.ids(),))
    assert norms(made) == 3
    assert subtractions(made) == ["blocks.0"]
    assert error < EXACT


class Remembers(s.Model):
    """Keeps its stream for the next call, which reads it raw."""

    def __init__(self, keep: str) -> None:
        super().__init__(s.Block(), s.Block())
        self.register_buffer("memory", torch.randn(s.SIZE))
        self.keep, self.reader = keep, nn.Linear(s.SIZE, s.VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        y = self.head(self.final(x)) + self.reader(self.memory)
        kept = x if self.keep == "stream" else y
        cast("torch.Tensor", self.memory).copy_(kept[0, 0, : s.SIZE])
        return y


def test_a_stream_that_a_buffer_keeps_is_read_by_the_next_call() -> None:
    with pytest.raises(ConversionRefused, match="written over a buffer or an input"):
        judged(Remembers("stream"), s.ids())


def test_a_model_that_keeps_something_else_is_converted_and_proved() -> None:
    made, error = judged(Remembers("logits"), s.ids(), (s.ids(),), (s.ids().flip(0),))
    assert norms(made) == 3
    assert made.proof.passed
    assert error < EXACT


class Noted(s.Model):
    def forward(self, ids: torch.Tensor, notes: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        assert notes is not None
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        notes["last"] = x
        return self.head(self.final(x))


def test_a_stream_that_is_put_into_a_dict_of_the_caller_is_an_output() -> None:
    with pytest.raises(ConversionRefused, match=r"inputs\[0\] is apart"):
        judged(Noted(s.Block(), s.Block()), (s.ids(), {}))


class Optional(nn.LayerNorm):
    def forward(self, input: torch.Tensor, factor: float | None = None) -> torch.Tensor:
        y = super().forward(input)
        return y if factor is None else y * factor


class Counting(nn.LayerNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("calls", torch.zeros(()))


@pytest.mark.parametrize(
    ("norm", "why"),
    [(Optional, "its forward takes input, factor"), (Counting, "its tensor 'calls'")],
    ids=["option", "buffer"],
)
def test_a_norm_that_holds_or_takes_more_stays(norm: type[nn.LayerNorm], why: str) -> None:
    model = s.Model(s.Block(), s.Block())
    model.final = norm(s.SIZE)
    made, error = judged(model, s.ids(), (s.ids(),))
    assert [(r.path, why in r.why) for r in made.refused] == [("final", True)]
    assert error < EXACT


def test_an_ellipsis_of_an_einsum_is_understood() -> None:
    class Heads(s.Block):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Parameter(torch.randn(3, 4, s.SIZE))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.norm(x).unflatten(-1, (3, 4))
            return x + torch.einsum("...hk,hkd->...d", heads, self.out)

    made, error = judged(s.Model(Heads(), Heads()), s.ids(), (s.ids(),))
    assert not made.refused
    assert not subtractions(made)
    assert error < EXACT


def test_views_of_large_inputs_carry_the_stream() -> None:
    class Flat(s.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.reshape(-1, s.SIZE)).view(x.shape)

    ids = torch.zeros(1, 2**22 // s.SIZE + 1, dtype=torch.long, device="meta")
    with torch.device("meta"):
        plan = conversions.plan("rms-norm", Bare(Flat(), Flat()).eval(), ids)
    assert not plan.refused


def test_an_output_of_channels_may_be_shifted_with_consent() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.map, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Linear(8, 3)
            self.one, self.two = nn.LayerNorm(8), nn.LayerNorm(8)

        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.stem(images)
            x = x + self.map(self.one(x.movedim(1, -1)).movedim(-1, 1))
            return self.head(self.two(x.movedim(1, -1)).mean((1, 2))), x

    made = nw.convert("rms-norm", Both().eval(), torch.randn(2, 3, 4, 4), consent="hidden-states")
    assert norms(made) == 2
    assert made.proof.passed


def test_consent_to_shifted_states_hides_no_mistake_in_an_output_of_one_number() -> None:
    model = s.Model(s.Block(), s.Block())
    model.head = nn.Linear(s.SIZE, 1)
    plan = conversions.plan("rms-norm", model.eval(), s.ids(), consent="hidden-states")
    wrong = dataclasses.replace(plan, recipes=plan.recipes[1:])
    converted = copy.deepcopy(model)
    conversions.apply_to_model(wrong, converted)
    proof = conversions.prove(wrong, target(model, s.ids()), converted, replan=lambda _: wrong)
    assert proof.gate("twin").passed is False


def test_a_scripted_module_is_left_alone() -> None:
    model = s.Model(s.Block(), s.Block())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on scripts
        model.blocks[0] = torch.jit.script(s.Block())
        made = nw.convert("rms-norm", model.eval(), s.ids())
    assert [refusal.path for refusal in made.refused] == ["blocks.0"]
    assert made.proof.gate("twin").passed


def test_a_model_that_cannot_be_copied_says_so() -> None:
    model = s.Model(s.Block(), s.Block())
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(cast("s.Block", model.blocks[0]).mlp.up)
    with pytest.raises(ConversionRefused, match=r"cannot be copied.*remove_weight_norm"):
        nw.convert("rms-norm", model.eval(), s.ids())


def test_a_model_of_integers_is_refused_in_words() -> None:
    class Best(s.Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids).argmax(-1)

    with pytest.raises(ConversionRefused, match="returns no floating-point tensor to compare"):
        nw.convert("rms-norm", Best(s.Block(), s.Block()).eval(), s.ids())


def test_a_stream_that_is_overwritten_in_part_is_named() -> None:
    class First(s.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x[:, 0] += self.mlp(self.norm(x))[:, 0]
            return x

    with pytest.raises(ConversionRefused, match="a part of its stream is overwritten in place, in blocks"):
        nw.convert("rms-norm", s.Model(First(), First()).eval(), s.ids())


def test_a_parameter_shared_with_an_idle_module_of_the_same_type_is_centred() -> None:
    class Copied(Bare):
        def __init__(self) -> None:
            super().__init__(s.Block(), s.Block())
            self.shared = nn.Embedding(s.VOCABULARY, s.SIZE)
            self.shared.weight = self.tokens.weight

    made, error = judged(Copied(), s.ids(), (s.ids(),))
    assert not made.refused
    assert not subtractions(made)
    assert error < EXACT
