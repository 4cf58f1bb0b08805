from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.checkup.rules.judging import findings, severities, why_not

T, H = 9, 6
IDS = torch.arange(2 * T).view(2, T) % 11
FEATURES = torch.randn(2, T, H, generator=torch.Generator().manual_seed(0))


class Transposed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


def tokens(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(11, H), *modules).eval()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(T), nn.GroupNorm(3, T)], ids=["batch", "group"])
def test_channels_that_are_positions_of_tokens_are_an_error(norm: nn.Module) -> None:
    (found,) = findings("AXS006", tokens(norm, nn.Linear(H, 2)), IDS)
    assert found.severity == "error"
    assert found.evidence["axes"] == ["batch", "time", "hidden"]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(H), nn.GroupNorm(3, H)], ids=["batch", "group"])
def test_channels_that_are_features_pass(norm: nn.Module) -> None:
    assert findings("AXS006", tokens(Transposed(norm), nn.Linear(H, 2)), IDS) == []


def test_a_convolution_on_channels_first_passes() -> None:
    inner = nn.Sequential(nn.Conv1d(H, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Conv1d(8, H, 1))
    assert findings("AXS006", tokens(Transposed(inner)), IDS) == []


def test_norms_of_flat_rows_pass() -> None:
    assert findings("AXS006", nn.Sequential(nn.Linear(H, 4), nn.BatchNorm1d(4)).eval(), torch.ones(3, H)) == []


def test_images_pass() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    assert findings("AXS006", model, torch.ones(2, 3, 8, 8)) == []


def test_floating_features_behind_a_linear_map_are_a_warning() -> None:
    model = nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(T), nn.Linear(H, 2)).eval()
    assert severities("AXS006", model, FEATURES) == ["warning"]


def test_channels_first_data_is_never_taken_for_time() -> None:
    channels_first = torch.randn(2, H, T)
    norm_first = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(H), nn.Conv1d(H, 4, 3)).eval()
    assert "cannot be told" in why_not("AXS006", norm_first, channels_first)
    over_time = nn.Sequential(nn.Linear(T, T), nn.BatchNorm1d(H), nn.Conv1d(H, 4, 1)).eval()
    assert "cannot be told" in why_not("AXS006", over_time, channels_first)


def test_models_without_batch_or_group_norms_are_not_run_again() -> None:
    import normwise as nw

    report = nw.check(tokens(nn.LayerNorm(H)), (IDS,), select=["AXS006"], effort="read")
    assert report.passed == ("AXS006",)
    assert report.cost.forward_passes == 1


def test_norms_behind_the_first_that_stops_the_run_are_found_by_their_shape() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)
            self.one, self.two, self.head = nn.BatchNorm1d(9), nn.BatchNorm1d(9), nn.Linear(6, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.two(self.mix(self.one(self.embed(ids)))))

    (found,) = findings("AXS006", Several(), torch.randint(11, (2, 9)))
    assert found.paths == ("one", "two")
