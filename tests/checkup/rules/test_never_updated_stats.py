from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import normwise as nw
from tests.checkup.rules.judging import findings

IMAGE = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def model(*, trained: bool = True, **options: bool) -> nn.Sequential:
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, **options))
    if trained:
        with torch.no_grad():
            for parameter in made[1].parameters():
                parameter += torch.tensor([0.1, -0.2, 0.3, 0.05])
    return made.eval()


def test_a_trained_norm_that_counted_no_batch_is_an_error() -> None:
    (found,) = findings("BNS003", model(), IMAGE)
    assert found.severity == "error"
    assert found.path == "1"


def test_a_fresh_model_is_silent() -> None:
    assert findings("BNS003", model(trained=False), IMAGE) == []


def test_a_gain_that_starts_random_or_at_zero_is_still_fresh() -> None:
    for start in (nn.init.zeros_, lambda w: nn.init.normal_(w, 1.0, 0.02)):
        fresh = model(trained=False)
        start(fresh[1].get_parameter("weight"))
        assert findings("BNS003", fresh, IMAGE) == []


def cnn(draw: Callable[[nn.Module], object]) -> nn.Sequential:
    made = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16))
    torch.manual_seed(0)
    for layer in made:
        if isinstance(layer, nn.BatchNorm2d):
            draw(layer)
    return made.eval()


def test_shifts_that_an_init_function_drew_do_not_make_a_model_trained() -> None:
    def both(norm: nn.Module) -> None:
        for parameter in norm.parameters():
            nn.init.normal_(parameter, 0.0, 0.02)

    for draw in (both, lambda norm: nn.init.normal_(norm.get_parameter("bias"), 0.0, 0.02)):
        assert findings("BNS003", cnn(draw), IMAGE) == []
    report = nw.check(cnn(both), IMAGE)
    assert report.findings[0].code == "PAR003"


def test_a_small_norm_whose_drawn_gains_happen_to_have_one_sign_is_as_fresh_as_the_others() -> None:
    def draw(norm: nn.Module) -> None:
        for parameter in norm.parameters():
            nn.init.normal_(parameter, 0.0, 0.02)

    made = cnn(draw)
    with torch.no_grad():
        made[4].get_parameter("weight").abs_()
    assert findings("BNS003", made, IMAGE) == []
    with torch.no_grad():
        made[4].get_parameter("weight").add_(1.0)  # as training leaves them
    (found,) = findings("BNS003", made, IMAGE)
    assert found.paths == ("4",)


def test_a_few_steps_on_matrices_that_still_look_drawn_are_training() -> None:
    model = cnn(lambda norm: None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):  # in eval mode: no statistics are counted
        optimizer.zero_grad()
        model(IMAGE).square().mean().backward()
        optimizer.step()
    assert [f.severity for f in findings("BNS003", model, IMAGE)] == ["error"]


def test_one_batch_in_train_mode_is_enough() -> None:
    updated = model()
    updated.train()(IMAGE)
    assert findings("BNS003", updated.eval(), IMAGE) == []


def test_statistics_that_were_set_without_counting_are_no_fault() -> None:
    loaded = model()
    loaded[1].get_buffer("running_mean").fill_(0.3)
    assert findings("BNS003", loaded, IMAGE) == []


def test_a_folded_norm_keeps_no_count_and_is_no_fault() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in (("weight", 1.3), ("bias", 0.2), ("running_mean", 0.0), ("running_var", 1.0)):
                self.register_buffer(name, torch.full((3,), value))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.get_buffer("weight") * (self.get_buffer("running_var") + 1e-5).rsqrt()
            return x * scale.view(1, -1, 1, 1) + self.get_buffer("bias").view(1, -1, 1, 1)

    assert findings("BNS003", Frozen(), IMAGE) == []


def test_norms_without_running_statistics_are_silent() -> None:
    assert findings("BNS003", model(track_running_stats=False), IMAGE) == []


def test_several_norms_are_one_finding_with_the_share() -> None:
    both = nn.Sequential(model(), nn.Conv2d(4, 3, 1), model(), model(trained=False, affine=True)[1]).eval()
    (found,) = findings("BNS003", both, IMAGE)
    assert found.paths == ("0.1", "2.1")
    assert (found.evidence["norms"], found.evidence["of"]) == (2, 3)
