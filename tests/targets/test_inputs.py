"""The input ladder: shapes are read, inputs inferred by running a copy, and both can be varied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from normwise.errors import TargetError
from normwise.targets import InputsFrom, Target, load
from normwise.targets.inputs import from_shape, infer, vary, with_batch, with_time

PLAIN = nn.Linear(4, 4)


class Tokens(nn.Module):
    """Its head is defined first and its position table is smaller than its vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.positions, self.tokens = nn.Linear(8, 5), nn.Embedding(16, 8), nn.Embedding(50, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        assert mask.dtype is torch.bool
        assert lengths.tolist() == [ids.shape[1]] * ids.shape[0]
        return self.head(self.tokens(ids) + self.positions.weight[: ids.shape[1]]) * mask[..., None]


class HandWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * x / x.pow(2).mean(-1, keepdim=True).sqrt()


class TakesNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self) -> torch.Tensor:
        return self.linear(torch.ones(2, 3))


class TakesADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.linear(batch["x"])


def shapes(target: Target | None) -> list[tuple[int, ...]]:
    assert target is not None
    return [tuple(value.shape) for value in (*target.args, *target.kwargs.values())]


def with_inputs(*args: Any, model: nn.Module = PLAIN, **kwargs: Any) -> Target:
    return Target(model=model, args=args, kwargs=kwargs)


@pytest.mark.parametrize(
    ("spec", "positional", "named"),
    [
        ("2x3x64x64", [((2, 3, 64, 64), torch.float32)], {}),
        ("2x12:long", [((2, 12), torch.long)], {}),
        ("7", [((7,), torch.float32)], {}),
        ("2x12x64:bfloat16", [((2, 12, 64), torch.bfloat16)], {}),
        ("2x3; 2x4:int,5x1:bool", [((2, 3), torch.float32), ((2, 4), torch.int), ((5, 1), torch.bool)], {}),
        ("ids=2x12:long,mask=2x12:bool", [], {"ids": ((2, 12), torch.long), "mask": ((2, 12), torch.bool)}),
        ("2x12:long,mask=2x12", [((2, 12), torch.long)], {"mask": ((2, 12), torch.float32)}),
    ],
)
def test_reads_shapes(spec: str, positional: list[Any], named: dict[str, Any]) -> None:
    args, kwargs = from_shape(spec, PLAIN)
    assert [(tuple(value.shape), value.dtype) for value in args] == positional
    assert {name: (tuple(value.shape), value.dtype) for name, value in kwargs.items()} == named


def test_values_fit_the_model_and_are_the_same_every_time() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4)).double()
    before = torch.get_rng_state()
    (ids, x, mask), _ = from_shape("4x50:long;2x3;2x3:bool", model)
    again, _ = from_shape("4x50:long;2x3;2x3:bool", model)
    assert set(ids.unique().tolist()) == {0, 1, 2}
    assert x.dtype is torch.float64
    assert x.std() > 0.1
    assert mask.all()
    assert all(map(torch.equal, (ids, x, mask), again))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", r"'' is no shape; write 2x3x64x64"),
        ("2x", r"'2x' is no shape"),
        ("2*3", r"'2\*3' is no shape"),
        ("2x3,,4", r"'' is no shape"),
        ("-2x3", r"'-2x3' is no shape"),
        ("2x0", r"'2x0' has a size of 0"),
        ("2x3:float17", r"'float17' is no torch dtype; .* masks bool"),
        ("2x3:nn", r"'nn' is no torch dtype"),
        ("a=2,a=3", r"'a' is given twice"),
        ("a=2,3", r"'3' comes after a named input; put it before"),
    ],
)
def test_says_what_is_wrong_with_a_shape(spec: str, message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        load(PLAIN, inputs=spec)
    assert str(caught.value).startswith(f"--inputs {spec}: ")


def test_a_shape_wins_over_inputs_that_were_given() -> None:
    target = load(with_inputs(torch.zeros(1, 4)), inputs="3x4")
    assert (shapes(target), target.inputs_from) == ([(3, 4)], InputsFrom.FROM_SHAPE)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Linear(4, 8), [(2, 12, 4)]),
        (nn.Linear(12, 8), [(2, 13, 12)]),  # 12 steps would not be told from 12 features
        (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), [(2, 4)]),
        (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), [(2, 12)]),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 30 * 30, 2)), [(2, 3, 32, 32)]),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 62 * 62, 2)), [(2, 3, 64, 64)]),
        (nn.Sequential(nn.Conv1d(1, 4, 400, stride=100), nn.Conv1d(4, 4, 3)), [(2, 1, 4000)]),
        (nn.Conv3d(2, 3, 3), [(2, 2, 8, 8, 8)]),
        (nn.LSTM(5, 6), [(12, 2, 5)]),
        (nn.GRU(5, 6, batch_first=True), [(2, 12, 5)]),
        (nn.GRUCell(3, 4), [(2, 3)]),
        (nn.MultiheadAttention(8, 2), [(12, 2, 8)] * 3),
        (nn.TransformerEncoderLayer(8, 2, 16), [(12, 2, 8)]),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), [(2, 12, 8)]),
        (Tokens(), [(2, 12), (2, 12), (2,)]),
        (nn.LayerNorm([3, 4]), [(2, 12, 3, 4)]),
        (nn.GroupNorm(2, 4), [(2, 4)]),
        (nn.BatchNorm2d(3), [(2, 3, 32, 32)]),
        (HandWritten(), [(2, 12, 7)]),
        (nn.DataParallel(nn.Linear(4, 8)), [(2, 12, 4)]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "x".join(map(str, value)),
)
def test_infers_inputs_that_run(model: nn.Module, expected: list[tuple[int, ...]]) -> None:
    target = load(model)
    assert (shapes(target), target.inputs_from) == (expected, InputsFrom.INFERRED)
    assert "inputs inferred from the modules of the model" in target.notes[0]
    with torch.no_grad():
        target.run()


def test_half_precision_models_get_half_precision_inputs() -> None:
    assert load(nn.Linear(4, 8).bfloat16()).args[0].dtype is torch.bfloat16


def test_a_model_without_arguments_is_run_without() -> None:
    target = load(TakesNothing())
    assert (target.args, target.inputs_from) == ((), InputsFrom.INFERRED)


@pytest.mark.parametrize(
    "model", [TakesADict(), nn.Identity(), nn.Module(), nn.ModuleList([PLAIN])], ids=["dict", "id", "bare", "list"]
)
def test_says_so_where_nothing_can_be_inferred(model: nn.Module) -> None:
    target = load(model)
    assert (target.args, target.inputs_from) == ((), InputsFrom.NONE)
    assert "give them, or a shape such as 2x3x64x64" in target.notes[-1]


def test_inferring_leaves_the_model_and_the_random_state_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout()).train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert infer(model) is not None
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (with_inputs(torch.zeros(2, 12, dtype=torch.long)), [(3, 7)]),
        (with_inputs(torch.zeros(3, 6, dtype=torch.long)), [(4, 9)]),
        (with_inputs(torch.zeros(2, 12, 4)), [(3, 7, 4)]),
        (with_inputs(torch.zeros(2, 3, 32, 32)), [(3, 3, 32, 32)]),
        (with_inputs(torch.zeros(2, 4)), [(3, 4)]),
        (with_inputs(ids=torch.zeros(2, 12, dtype=torch.long), mask=torch.ones(2, 12)), [(3, 7), (3, 7)]),
        (with_inputs(torch.zeros(2, 12, 4), torch.zeros(2, 9, 4)), [(3, 12, 4), (3, 9, 4)]),
        (with_inputs(torch.zeros(12, 2, 5), model=nn.LSTM(5, 6)), [(7, 3, 5)]),
        (with_inputs(torch.zeros(2, 3, 40), model=nn.Conv1d(3, 4, 3)), [(3, 3, 35)]),
        (
            with_inputs(torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 1, 12, 12)),
            [(3, 12), (3, 1, 12, 12)],
        ),
    ],
)
def test_varies_batch_and_time_where_they_can_be_told(target: Target, expected: list[tuple[int, ...]]) -> None:
    assert shapes(vary(target)) == expected


@pytest.mark.parametrize(
    "target",
    [with_inputs(), with_inputs(torch.zeros(2, 4), torch.zeros(3, 4)), with_inputs(torch.tensor(1.0))],
    ids=["none", "different batches", "scalar"],
)
def test_does_not_vary_what_it_cannot_tell(target: Target) -> None:
    assert vary(target) is None
    assert with_batch(target, 3) is None
    assert with_time(target, 3) is None


def test_repeats_values_and_lengthens_masks_with_true() -> None:
    ids, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[True, False, False]])
    longer = with_time(with_inputs(ids, mask=mask), 5)
    assert longer is not None
    assert longer[0][0].tolist() == [[1, 2, 3, 1, 2]]
    assert longer[1]["mask"].tolist() == [[True, False, False, True, True]]


def test_cuts_and_repeats_samples_and_leaves_the_given_tensors_alone() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    target = with_inputs([x, {"deep": x}], 5)
    wider, narrower = with_batch(target, 3), with_batch(target, 1)
    assert wider is not None
    assert narrower is not None
    assert wider[0][0][1]["deep"].tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert wider[0][1] == 5
    narrower[0][0][0].zero_()
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
