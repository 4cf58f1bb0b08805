"""LayerNorm against RMSNorm: the swap by hand, the race, and judges on made-up rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normwise.errors import NotKnown
from normwise.layers import LayerNorm, RMSNorm
from normwise.models import Decoder
from normwise.rendering.plots import Chart
from normwise.studies import Outcome, Row, Rows, Table, layer_vs_rms
from normwise.studies._norm_swap import naive, recentred, with_norms


def quality(layer=2.5, rms=2.5, seeds=3):
    """Return made-up trainings, 0.02 apart over seeds."""
    made = []
    for seed in range(seeds):
        for norm, loss in (("layer", layer), ("rms", rms)):
            loss += 0.01 * seed
            metrics = {"validation": loss, "losses": [3.0, loss], "steps": [20, 40]}
            metrics |= {"validation_exact": loss, "validation_naive": loss + 0.1}
            made.append(Row(params={"part": "quality", "norm": norm, "seed": seed}, metrics=metrics))
    return Rows(made)


def speed(torch_saves=-0.5, we_save=0.1):
    """Return made-up races of two sizes."""
    made = []
    for seed in range(2):
        for depth, width in ((12, 64), (4, 256)):
            metrics = {"norms": 2 * depth + 1}
            for race in ("forward", "both", "step"):
                metrics |= {
                    f"time_{race}_{kind}": 1e-3 for kind in ("torch_layer", "torch_rms", "ours_layer", "ours_rms")
                }
                metrics |= {f"time_saved_{race}_torch": torch_saves, f"time_saved_{race}_ours": we_save + 0.01 * seed}
            params = {"part": "speed", "layers": depth, "features": width, "seed": seed}
            made.append(Row(params=params, metrics=metrics))
    return Rows(made)


def errors(pre=1e-15, single=1e-6, post=0.1):
    """Return made-up conversions."""
    made = []
    for placement, error in (("pre", pre), ("post", post)):
        metrics = {"exact_double": error, "exact_single": max(error, single), "exact_fresh": 1e-15, "naive": 0.9}
        made.append(Row(params={"part": "exact", "placement": placement, "seed": 0}, metrics=metrics))
    return Rows(made)


def judged(index: int, rows: Rows) -> Outcome:
    return layer_vs_rms.CLAIMS[index].judge(rows).outcome


def test_quality_is_worse_only_where_the_ranges_are_apart():
    assert judged(0, quality()) is Outcome.CONFIRMED
    assert judged(0, quality(rms=2.51)) is Outcome.CONFIRMED
    assert judged(0, quality(rms=2.6)) is Outcome.REFUTED
    assert judged(0, quality(seeds=1)) is Outcome.OPEN


def test_a_step_is_7_per_cent_faster_or_not_or_for_some():
    assert judged(1, speed(0.2, 0.1)) is Outcome.CONFIRMED
    assert judged(1, speed(-0.1, 0.02)) is Outcome.REFUTED
    assert judged(1, speed(-0.1, 0.1)) is Outcome.DEPENDS


def test_a_norm_is_faster_or_not_or_for_some():
    assert judged(2, speed(0.2, 0.1)) is Outcome.CONFIRMED
    assert judged(2, speed(-0.2, -0.1)) is Outcome.REFUTED
    assert judged(2, speed()) is Outcome.DEPENDS


def test_never_exact_is_refuted_by_an_error_of_rounding_in_both_formats():
    assert judged(3, errors()) is Outcome.REFUTED
    assert judged(3, errors(pre=1e-9)) is Outcome.CONFIRMED
    assert judged(3, errors(single=1e-3)) is Outcome.CONFIRMED
    trained = Rows([*errors(), *quality()])
    assert "2.6100 by the naive swap" in layer_vs_rms.CLAIMS[3].judge(trained).says


@pytest.mark.parametrize("claim", layer_vs_rms.CLAIMS)
def test_says_what_is_missing(claim):
    with pytest.raises(NotKnown):
        claim.judge(Rows([]))


def test_figures_show_every_kind_and_both_curves():
    rows = Rows([*quality(), *speed(), *errors()])
    speeds, wrong, losses = (figure(rows) for figure in layer_vs_rms.FIGURES)
    assert isinstance(speeds, Table)
    assert isinstance(wrong, Table)
    assert isinstance(losses, Chart)
    assert [row[-2] for row in speeds.rows] == [25.0] * 4 + [9.0] * 4  # norms * 1 ms of a step of 1 ms
    assert [row[-1] is None for row in speeds.rows] == [True, False] * 4
    assert [row[0] for row in wrong.rows] == ["pre", "post"]
    assert [line.x for line in losses.lines] == [(20.0, 40.0)] * 2


@pytest.fixture
def trained() -> Decoder:
    """Return a Pre-Norm model with a tied head and nothing at its start."""
    torch.manual_seed(0)
    model = Decoder(32, 16, 3, 2, norm="layer", positions="learned", context=8, bias=True, init="xavier", mlp="swiglu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double()


@torch.no_grad()
def test_recentring_is_exact_and_leaves_no_layer_norm_and_not_its_model(trained):
    ids = torch.randint(32, (2, 8))
    before = trained(ids)
    changed = recentred(trained)
    assert float((changed(ids) - before).abs().max()) < 1e-12
    assert torch.equal(trained(ids), before)
    assert not any(isinstance(module, LayerNorm) for module in changed.modules())
    gains = [module.weight for module in changed.modules() if isinstance(module, RMSNorm)]
    assert all(torch.equal(gain, torch.ones_like(gain)) for gain in gains if gain is not None)
    stream = changed.embedding(ids)
    assert float(stream.mean(-1).abs().max()) < 1e-15
    assert float((naive(trained)(ids) - before).abs().max()) > 0.1


@torch.no_grad()
@pytest.mark.parametrize("left", ["stack.layers.1.mlp.sublayer.down.bias", "embedding.positions.weight"])
def test_one_writer_that_keeps_its_mean_spoils_it(trained, left):
    ids = torch.randint(32, (2, 8))
    changed = recentred(trained)
    changed.get_parameter(left).copy_(trained.get_parameter(left))
    assert float((changed(ids) - trained(ids)).abs().max()) > 1e-3


def test_a_trial_of_each_placement():
    pre, post = (layer_vs_rms.measure({"part": "exact", "placement": name, "seed": 1}) for name in ("pre", "post"))
    assert pre["exact_double"] < 1e-12 < post["exact_double"]
    assert post["exact_fresh"] < 1e-12
    assert pre["naive"] > 1e-2
    assert post == layer_vs_rms.measure({"part": "exact", "placement": "post", "seed": 1})


def test_a_training_repeats_and_ends_as_it_was_after_the_exact_way():
    params = {"part": "quality", "norm": "layer", "seed": 0, "steps": 1, "layers": 1}
    found = layer_vs_rms.measure(params)
    assert found == layer_vs_rms.measure(params)
    assert found["validation_exact"] == pytest.approx(found["validation"], abs=1e-5)


def test_a_race_times_every_kind():
    found = layer_vs_rms.measure({"part": "speed", "layers": 1, "features": 8, "seed": 0, "rounds": 1})
    times = [value for name, value in found.items() if name.startswith("time_") and "saved" not in name]
    assert len(times) == 12
    assert all(0 < value < 10 for value in times)
    saved = 1 - found["time_both_ours_rms"] / found["time_both_ours_layer"]
    assert found["time_saved_both_ours"] == pytest.approx(saved)
    assert math.isfinite(found["time_saved_step_torch"])


def test_only_norms_are_replaced():
    model = with_norms(Decoder(16, 8, 2, 2, norm="layer", positions="none"), lambda _: nn.Identity())
    assert sum(isinstance(module, nn.Identity) for module in model.modules()) == 5
