from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.checkup.rules.judging import findings, severities, why_not

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """x + f(x) with a norm that may be left out, and what only some inputs reach."""

    def __init__(self, *, used: bool, cross: bool = False) -> None:
        super().__init__()
        self.f, self.norm, self.used = nn.Linear(8, 8), nn.LayerNorm(8), used
        if cross:
            self.cross_norm, self.cross = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.norm(x) if self.used else x)


class Whole(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(blocks), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_blocks_that_leave_out_their_norm_are_a_warning() -> None:
    (found,) = findings("PAR006", Whole(*[Block(used=False) for _ in range(3)]), X)
    assert found.severity == "warning"
    assert found.paths == ("blocks.0.norm", "blocks.1.norm", "blocks.2.norm")


def test_one_idle_norm_among_others_is_worth_knowing() -> None:
    assert severities("PAR006", Whole(Block(used=False), Block(used=True)), X) == ["info"]


def test_the_one_block_between_others_that_leaves_its_norm_out_is_a_warning() -> None:
    def without(index: int, count: int) -> list[str]:
        return severities("PAR006", Whole(*[Block(used=i != index) for i in range(count)]), X)

    assert without(2, 6) == ["warning"]
    assert without(0, 6) == without(5, 6) == without(1, 4) == ["info"]  # an end, and too few


class Chosen(nn.Module):
    """Norms of which one is called: alone, as PEFT keeps the original of what it trains, or beside other arithmetic."""

    def __init__(self, *, other: bool) -> None:
        super().__init__()
        self.original, self.copies = nn.LayerNorm(8), nn.ModuleDict({"default": nn.LayerNorm(8)})
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return self.copies["default"](2 * x) if self.other else self.copies["default"](x)


def test_a_norm_in_whose_place_another_runs_is_not_left_out() -> None:
    def made(*, other: bool) -> nn.Module:
        blocks = [Block(used=True) for _ in range(3)]
        for block in blocks:
            setattr(block, "norm", Chosen(other=other))  # noqa: B010 - it was a LayerNorm
        return Whole(*blocks)

    assert findings("PAR006", made(other=False), X) == []
    assert severities("PAR006", made(other=True), X) == ["warning"]


def test_a_norm_built_in_forward_has_no_gain_to_train() -> None:
    class Anew(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.LayerNorm(8)(x)

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ones", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.layer_norm(x, (8,), self.get_buffer("ones"))

    (found,) = findings("PAR006", nn.Sequential(nn.Linear(8, 8), Anew()), X)
    assert (found.severity, found.basis, found.path) == ("info", "proof", "1")
    for sound in (Held(), nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False)):
        assert findings("PAR006", nn.Sequential(nn.Linear(8, 8), sound), X) == []


def test_the_only_norm_of_a_model_is_not_idle_by_design() -> None:
    assert severities("PAR006", nn.Sequential(Block(used=False)), X) == ["warning"]


def test_parts_that_the_input_does_not_reach_are_sound() -> None:
    assert findings("PAR006", Whole(*[Block(used=True, cross=True) for _ in range(3)]), X) == []
    tower = Whole(Block(used=True))
    tower.tower = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    assert findings("PAR006", tower, X) == []


class ForTraining(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.f(x)) if self.training else self.f(x)


def test_norms_that_only_training_runs_are_sound() -> None:
    assert findings("PAR006", Whole(ForTraining(used=True), ForTraining(used=True)).eval(), X) == []


class RefusesTraining(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ValueError("needs targets")
        return self.f(x)


def test_a_model_that_does_not_train_on_these_inputs_is_not_judged() -> None:
    assert "needs targets" in why_not("PAR006", Whole(RefusesTraining(used=False)), X)


class Functional(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.f(nn.functional.layer_norm(x, (8,), self.norm.weight, self.norm.bias))


def test_a_norm_whose_parameters_are_used_without_its_module_is_sound() -> None:
    assert findings("PAR006", Whole(Functional(used=True), Functional(used=True)), X) == []
