"""How often, on how much and with what weight running statistics are updated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.checkup.rules.judging import findings, severities, why_not

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)) + 1


def net(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, **options), nn.ReLU(), nn.Linear(6, 2))


class Recomputed(nn.Module):
    """Its first part is recomputed in the backward pass."""

    def __init__(self, *, reentrant: bool, **options: Any) -> None:
        super().__init__()
        self.stem, self.body, self.reentrant = nn.Linear(4, 4), net(**options), reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.body, self.stem(x), use_reentrant=self.reentrant)


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


# -- recomputation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("momentum", [0.1, 0.5])
def test_statistics_updated_while_recomputing_are_repaired_by_the_momentum(reentrant: bool, momentum: float) -> None:
    model = Recomputed(reentrant=reentrant, momentum=momentum)
    (found,) = findings("BNS009", model, X, train_step=step)
    assert (str(found.severity), found.path, found.evidence["updates"]) == ("warning", "body.1", 2)
    assert found.counterfactual is not None
    assert found.counterfactual["before"] == pytest.approx(1 - momentum, rel=1e-3)
    assert found.counterfactual["after"] < 1e-5


def test_a_model_given_in_eval_mode_is_judged_as_it_trains() -> None:
    assert severities("BNS009", Recomputed(reentrant=False).eval(), X, train_step=step) == ["warning"]


def test_micro_batches_are_no_recomputation() -> None:
    def accumulate(model: nn.Module, x: torch.Tensor) -> None:
        for part in x.chunk(4):
            step(model, part)

    assert severities("BNS009", net(), X, train_step=accumulate) == []
    assert severities("BNS010", net(), X, train_step=accumulate) == ["info"]


def test_a_frozen_norm_in_a_recomputed_block_is_not_updated() -> None:
    model = Recomputed(reentrant=False)
    model.body[1].eval()
    assert severities("BNS009", model, X, train_step=step) == []


# -- several forwards -------------------------------------------------------------------------------


def test_a_step_that_fails_for_another_reason_is_not_checked() -> None:
    def wrong(model: nn.Module, x: torch.Tensor) -> None:
        hidden = model(x)
        (hidden * model(x)).sum().backward()
        raise RuntimeError("out of cheese")

    assert "out of cheese" in why_not("BNS010", net(), X, train_step=wrong)


def test_buffers_reset_between_two_forwards_of_a_model_in_eval_mode() -> None:
    def reset(model: nn.Sequential, x: torch.Tensor) -> None:
        first = model(x)
        model[1].get_buffer("running_mean").mul_(0.9)
        (first - model(x)).sum().backward()

    (found,) = findings("BNS010", net().eval(), X, train_step=reset)
    assert str(found.severity) == "error"
    assert "inplace" in found.evidence["raised"]


def test_an_inplace_write_that_has_nothing_to_do_with_norms_is_not_theirs() -> None:
    def broken(model: nn.Sequential, x: torch.Tensor) -> None:
        first = model(x)
        with torch.no_grad():
            model[3].get_parameter("weight").mul_(2)
        (first - model(x)).sum().backward()

    assert "train_step raised" in why_not("BNS010", net(), X, train_step=broken)


# -- sizes of batches -------------------------------------------------------------------------------


def loader(samples: int, batch: int, *shape: int, drop_last: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(samples, *shape)), batch_size=batch, drop_last=drop_last)


@pytest.mark.parametrize(("batch", "said"), [(4, ["warning"]), (16, ["info"]), (64, [])])
def test_small_batches_of_the_loader(batch: int, said: list[str]) -> None:
    assert severities("BNS006", net(), X, loader=loader(128, batch, 4)) == said


def test_space_counts_as_well() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert severities("BNS006", model, torch.randn(2, 3, 8, 8), loader=loader(64, 2, 3, 8, 8)) == []


class Standardized(nn.Module):
    """Returns its loss: how far its norm is from standardizing each image alone, or all of them together."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.first, self.norm, self.alone = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, momentum=None), alone

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.first(x)
        axes, center = ((2, 3), None) if self.alone else ((0, 2, 3), self.norm.running_mean)
        mean = y.mean(axes, keepdim=True) if center is None else center[:, None, None]
        return {"loss": (self.norm(y) - (y - mean) / y.std((2, 3), keepdim=True)).square().mean()}


def images(*, alone: bool) -> tuple[nn.Module, DataLoader[Any]]:
    torch.manual_seed(0)
    data = torch.randn(32, 3, 8, 8) + 2 * torch.randn(32, 3, 1, 1)
    model = Standardized(alone=alone)
    with torch.no_grad():
        for image in data:
            model(image[None])
    return model.eval(), DataLoader(TensorDataset(data), batch_size=1)


def evaluated(model: nn.Module, batches: Any) -> float:
    with torch.no_grad():
        return sum(float(model(b)["loss"]) for b in batches)


def test_single_images_whose_loss_needs_their_own_statistics_are_a_warning() -> None:
    model, data = images(alone=True)
    (found,) = findings("BNS006", model, torch.randn(1, 3, 8, 8), loader=data, eval_fn=evaluated)
    assert (str(found.severity), found.path) == ("warning", "norm")
    assert found.counterfactual is not None
    assert found.counterfactual["before"] > 2 * found.counterfactual["after"]
    # a score that rises with the statistics of evaluation is no loss that falls with those of training
    assert severities("BNS006", images(alone=False)[0], data.dataset[0][0][None], loader=data, eval_fn=evaluated) == []


def test_single_images_without_a_loss_are_worth_knowing_where_the_model_trains() -> None:
    image, data = torch.randn(1, 3, 8, 8), loader(32, 1, 3, 8, 8)
    assert severities("BNS006", nn.Sequential(nn.BatchNorm2d(3)).eval(), image, loader=data) == []
    assert severities("BNS006", nn.Sequential(nn.BatchNorm2d(3)), image, loader=data) == ["info"]


def test_an_example_is_no_batch_of_training() -> None:
    assert "loader" in why_not("BNS006", net(), X[:4])
    assert severities("BNS006", net(), X[:4], train_step=step) == ["info"]


def test_a_norm_that_stays_in_eval_mode_has_no_batch() -> None:
    model = net()
    model[1].eval()
    for code in ("BNS006", "BNS016"):
        assert severities(code, model, X, loader=loader(65, 4, 4)) == []


@pytest.mark.parametrize(("samples", "drop_last", "said"), [(65, False, ["warning"]), (65, True, []), (64, False, [])])
def test_a_last_batch_of_one(samples: int, drop_last: bool, said: list[str]) -> None:
    data = loader(samples, 32, 4, drop_last=drop_last)
    assert severities("BNS016", net(), X, loader=data) == said


def test_one_image_is_many_values() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert severities("BNS016", model, torch.randn(8, 3, 8, 8), loader=loader(65, 32, 3, 8, 8)) == []


def test_a_loader_for_evaluation_may_end_as_it_likes() -> None:
    assert severities("BNS016", net().eval(), X, loader=loader(65, 32, 4)) == ["info"]


def test_a_loader_that_raises_is_not_checked() -> None:
    class Broken:
        def __iter__(self) -> Any:
            raise OSError("no such disk")

    for code in ("BNS006", "BNS016"):
        assert "no such disk" in why_not(code, net(), X, loader=Broken())


class Storing(nn.Module):
    """A batch norm by hand, with the unbiased variance of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(6))
        self.register_buffer("running_var", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.get_buffer("running_mean").lerp_(x.mean(0), 0.1)
                self.get_buffer("running_var").lerp_(x.square().sum(0) / (len(x) - 1), 0.1)
            return (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
        return (x - self.get_buffer("running_mean")) / (self.get_buffer("running_var") + 1e-5).sqrt()


def test_a_norm_that_stores_what_one_value_gives_is_caught_too() -> None:
    model = nn.Sequential(nn.Linear(4, 6), Storing())
    (found,) = findings("BNS016", model.train(), X, loader=loader(65, 32, 4))
    assert "not finite" in found.evidence["outcome"]


# -- momentum ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("momentum", "said"), [(0.99, ["warning"]), (0.9, ["warning"]), (1.0, ["info"]), (0.1, []), (None, [])]
)
def test_momentum_of_the_other_convention(momentum: float | None, said: list[str]) -> None:
    assert severities("BNS015", net(momentum=momentum), X) == said


def test_momentum_does_nothing_in_eval_mode() -> None:
    assert severities("BNS015", net(momentum=0.99).eval(), X) == ["info"]


class ByHand(Storing):
    """The newest batch weighs 0.9, whatever the attribute is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.get_buffer("running_mean").mul_(0.1).add_(0.9 * x.mean(0))
        return x - x.mean(0) if self.training else x - self.get_buffer("running_mean")


def test_momentum_is_measured_where_it_is_not_torchs() -> None:
    (found,) = findings("BNS015", nn.Sequential(nn.Linear(4, 6), ByHand()).train(), X)
    assert found.evidence["value"] == pytest.approx(0.9, abs=1e-4)
