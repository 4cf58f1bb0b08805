"""SyncBatchNorm on real processes (gloo, a file as store) is BatchNorm of the joined batch on one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normwise import layers
from normwise.layers.statistics import update_statistics
from tests import ranks
from tests.layers import sync_worker
from tests.layers.sync_scenarios import CHANNELS, SCENARIOS, SPLITS, SPLITS_OF_THREE, Result, Scenario, fill, train

LIMIT = 60.0  # seconds that all processes of one group may take
EXACT = 1e-12  # relative to the largest element, in float64

Results = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return what each rank of a group of so many got; every group runs once."""

    @cache
    def get(world: int) -> Callable[[], list[dict[str, Any]]]:
        try:
            done = ranks.run(sync_worker.__name__, world, tmp_path_factory.mktemp(f"ranks-of-{world}"), limit=LIMIT)
        except AssertionError as error:  # said once and for all, not run for every test
            failure = error
            return lambda: pytest.fail(f"the processes failed: {failure}")
        return lambda: done

    return lambda world: get(world)()


# -- one process ------------------------------------------------------------------------------------------


def torch_norm(scenario: Scenario) -> nn.Module:
    known = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return known[len(scenario.inner)](CHANNELS, dtype=torch.float64, **scenario.options)


def own_norm(scenario: Scenario) -> nn.Module:
    return layers.BatchNorm(CHANNELS, dtype=torch.float64, **scenario.options)


def joined(parts: list[Result]) -> Result:
    """Return one process's result from those of all: samples are joined, shares of parameter gradients added."""
    whole: Result = {}
    for name, first in parts[0].items():
        values = [part[name] for part in parts]
        if name[-1].isdigit():
            whole[name] = torch.cat(values)
        elif name.endswith(" gradient"):
            whole[name] = torch.stack(values).sum(0)
        else:
            assert all(torch.equal(first, value) for value in values), f"ranks differ in {name}"
            whole[name] = first
    return whole


def errors(got: Result, wanted: Result) -> dict[str, float]:
    """Return the largest difference of each value relative to the largest element."""
    assert got.keys() == wanted.keys()
    found = {}
    for name, value in got.items():
        assert value.shape == wanted[name].shape
        assert torch.isfinite(value).all()
        if value.numel():
            reference = wanted[name].double()
            found[name] = float((value.double() - reference).abs().max() / reference.abs().max().clamp_min(1e-300))
    return found


def groups_of(scenario: Scenario) -> list[tuple[int, ...]]:
    return sorted({scenario.members(rank) for rank in range(scenario.world)})


def check(
    results: Results, name: str, norm: Callable[[Scenario], nn.Module] = torch_norm, limit: float = EXACT
) -> dict[str, float]:
    scenario = SCENARIOS[name]
    found: dict[str, float] = {}
    for members in groups_of(scenario):
        parts = [results(scenario.world)[rank][name] for rank in members]
        found = errors(joined(parts), train(scenario, norm(scenario), members))
        assert max(found.values()) <= limit, found
    return found


def names_of(*paddings: str) -> list[str]:
    return [f"{split} {padding}" for split in (*SPLITS, *SPLITS_OF_THREE) for padding in paddings]


@pytest.mark.parametrize("name", names_of("whole"))
def test_is_batch_norm_of_the_joined_batch(results: Results, name: str) -> None:
    found = check(results, name)
    assert {"output 0", "input gradient 0", "weight gradient", "bias gradient", "running_var"} < found.keys()


@pytest.mark.parametrize("name", names_of("mask", "lengths"))
def test_is_masked_batch_norm_of_the_joined_batch(results: Results, name: str) -> None:
    check(results, name, own_norm)


@pytest.mark.parametrize("name", names_of("mask", "lengths"))
def test_is_batch_norm_of_the_tokens_that_are_real(results: Results, name: str) -> None:
    scenario = SCENARIOS[name]
    everybody = tuple(range(scenario.world))
    got = joined([results(scenario.world)[rank][name] for rank in everybody])
    ((x, upstream, real),) = scenario.steps(everybody)
    assert real is not None
    keep = real[:, 0]
    tokens, wanted = x.movedim(1, -1)[keep].requires_grad_(), nn.BatchNorm1d(CHANNELS, dtype=torch.float64)
    fill(wanted)
    y = wanted(tokens)
    (y * upstream.movedim(1, -1)[keep]).sum().backward()
    assert wanted.weight.grad is not None
    pairs = {
        "output 0": y,
        "input gradient 0": tokens.grad,
        "weight gradient": wanted.weight.grad,
        "bias gradient": wanted.bias.grad,
        "running_mean": wanted.running_mean,
        "running_var": wanted.running_var,
    }
    for key, value in pairs.items():
        found = got[key].movedim(1, -1) if key[-1] == "0" else got[key]
        torch.testing.assert_close(found[keep] if key[-1] == "0" else found, value, rtol=EXACT, atol=EXACT)
        assert key[-1] != "0" or torch.count_nonzero(found[~keep]) == 0


# -- what went wrong in torch's history ---------------------------------------------------------------------


def test_running_variance_counts_elements_of_different_sizes(results: Results) -> None:  # pytorch #22192
    check(results, "running variance, different sizes")


def test_input_gradients_are_right_for_different_sizes(results: Results) -> None:  # pytorch #36382, #36688
    check(results, "input gradients, different sizes")


@pytest.mark.parametrize("name", ["empty on either side", "empty images"])
def test_ranks_without_samples_take_part(results: Results, name: str) -> None:  # pytorch #36530, #74944
    check(results, name)


def test_nothing_anywhere_leaves_running_statistics_alone(results: Results) -> None:
    for got in results(2):
        found = got["empty everywhere"]
        assert found["output 0"].shape == (0, CHANNELS, 5)
        assert found["running_mean"].tolist() == [0.0] * CHANNELS
        assert found["running_var"].tolist() == [1.0] * CHANNELS
        assert found["weight gradient"].tolist() == [0.0] * CHANNELS


@pytest.mark.parametrize("name", ["transposed memory", "channels_last memory"])
def test_memory_layout_does_not_matter(results: Results, name: str) -> None:  # pytorch #64039
    check(results, name)


def test_channels_may_be_the_last_axis(results: Results) -> None:
    check(results, "channels on the last axis", own_norm)


def test_volumes(results: Results) -> None:
    check(results, "volumes")


def test_weight_gradients_are_each_ranks_own_share(results: Results) -> None:  # pytorch #57796
    scenario = SCENARIOS["(5, 3) whole"]
    for rank, got in enumerate(results(2)):
        ((_, upstream, _),) = scenario.steps((rank,))
        share = got["(5, 3) whole"]
        torch.testing.assert_close(share["bias gradient"], upstream.sum((0, 2)))
        layer = torch_norm(scenario)
        fill(layer)
        weight, bias = (layer.get_parameter(each).detach()[:, None] for each in ("weight", "bias"))
        normalized = (share["output 0"] - bias) / weight
        torch.testing.assert_close(share["weight gradient"], (normalized * upstream).sum((0, 2)))


@pytest.mark.parametrize("name", ["each alone", "two of three", "first and last of three"])
def test_process_groups_keep_to_themselves(results: Results, name: str) -> None:
    check(results, name)


def test_statistics_are_recalibrated_over_uneven_batches_of_all_ranks(results: Results) -> None:  # fvcore #152
    # In one process the same three forward passes hold the batches of both ranks.
    pairs = zip(sync_worker.recalibration_batches(0), sync_worker.recalibration_batches(1), strict=True)
    model = sync_worker.ddp_model()
    update_statistics(model, [torch.cat(pair) for pair in pairs])
    wanted = dict(model.state_dict())
    for got in results(2):
        assert max(errors(got["recalibrated"], wanted).values()) <= EXACT


def test_norms_that_do_not_synchronize_are_recalibrated_over_a_process_group(results: Results) -> None:
    samples = torch.cat([*sync_worker.batches_alone(0), *sync_worker.batches_alone(1)])
    for got in results(2):
        found = got["recalibrated alone"]
        assert max(errors(found, {"running_mean": samples.mean(0), "running_var": samples.var(0)}).values()) <= EXACT


def test_without_affine(results: Results) -> None:
    found = check(results, "no affine")
    assert "weight gradient" not in found


def test_without_bias(results: Results) -> None:
    found = check(results, "no bias", own_norm)
    assert "bias gradient" not in found


def test_without_running_statistics(results: Results) -> None:
    found = check(results, "no running statistics")
    assert "running_mean" not in found


@pytest.mark.parametrize("name", ["momentum None", "momentum and eps"])
def test_momentum(results: Results, name: str) -> None:
    check(results, name)


def test_one_sample_on_each_process_is_enough(results: Results) -> None:
    # Two elements are always normalized to nearly -1 and 1: their gradient is what eps leaves of a difference.
    check(results, "single input", limit=1e-9)


def test_one_element_in_all_gives_the_bias_and_leaves_the_variance(results: Results) -> None:
    got, empty = (each["one element in all"] for each in results(2))
    layer = torch_norm(SCENARIOS["single input"])
    fill(layer)
    torch.testing.assert_close(got["output 0"], layer.get_parameter("bias")[None].detach())
    assert torch.equal(got["running_var"], torch.ones(CHANNELS).double())
    assert torch.equal(got["running_mean"], empty["running_mean"])
    assert torch.count_nonzero(got["input gradient 0"]) == 0


@pytest.mark.parametrize("name", ["another mask for every channel", "nothing real on rank 0"])
def test_counts_real_elements(results: Results, name: str) -> None:
    check(results, name, own_norm)


@pytest.mark.parametrize("name", ["double backward", "double backward, empty", "double backward, three"])
def test_can_be_differentiated_twice(results: Results, name: str) -> None:
    check(results, name, limit=1e-11)  # of a loss with third powers


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision_takes_statistics_in_single(results: Results, name: str) -> None:
    scenario = SCENARIOS[name]
    steps = torch.finfo(scenario.dtype).eps
    whole = train_in_double(scenario)
    found = errors(joined([got[name] for got in results(2)]), whole)
    assert max(found[each] for each in ("running_mean", "running_var", "bias gradient")) < 2e-6
    assert found["weight gradient"] < 2e-6  # torch's sums in half precision err by 1e-3 and more
    assert max(found["output 0"], found["input gradient 0"]) <= steps / 2


def test_a_large_offset_costs_no_digits(results: Results) -> None:
    for name in ("offset", "offset, empty first"):
        found = errors(joined([got[name] for got in results(2)]), train_in_double(SCENARIOS[name]))
        # eval mode subtracts a running mean of 1e3 that float32 knows to 6e-5
        assert max(value for key, value in found.items() if key != "eval output") < 3e-6, found


def test_values_whose_squares_overflow_are_normalized(results: Results) -> None:
    got = [each["huge"] for each in results(2)]
    wanted = train_in_double(SCENARIOS["huge"])["output 0"]
    output = torch.cat([each["output 0"] for each in got])
    assert (output.double() - wanted).abs().max() < 1e-5
    assert all(torch.isfinite(each["input gradient 0"]).all() for each in got)


def train_in_double(scenario: Scenario) -> Result:
    """Train torch's layer in float64 on the values that narrower types hold."""
    double = replace(scenario, dtype=torch.float64, held=scenario.dtype)
    return train(double, torch_norm(double), tuple(range(scenario.world)))


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint, reentrant"])
def test_recomputation_takes_part_and_counts_once(results: Results, name: str) -> None:
    scenario = SCENARIOS[name]
    plain = train(Scenario(splits=scenario.splits), torch_norm(scenario), (0, 1))
    found = errors(joined([got[name] for got in results(2)]), plain)
    assert max(found.values()) <= EXACT


@pytest.mark.parametrize("world", [2, 3])
def test_training_under_ddp_is_training_in_one_process(results: Results, world: int) -> None:
    model = sync_worker.ddp_model()
    sync_worker.ddp_steps(model, lambda whole: whole)
    for got in results(world):
        assert max(errors(got["DDP"], dict(model.state_dict())).values()) <= EXACT


def test_one_collective_a_pass(results: Results) -> None:
    for got in results(2):
        assert got["collectives"] == {"forward": ["gather statistics"], "backward": ["sum gradients"]}


def test_ranks_may_differ_in_whether_inputs_require_gradients(results: Results) -> None:
    first, second = (got["first layer"] for got in results(2))
    assert first["other"].shape == (4, CHANNELS)
    # The batches are equal: so are the shares, 2 * sum(normalized ** 2), in which eps = 1e-5 takes a little.
    torch.testing.assert_close(first["weight gradient"], second["weight gradient"])
    assert first["weight gradient"].tolist() == pytest.approx([8.0] * CHANNELS, rel=1e-4)


@pytest.mark.slow
def test_compiles_without_breaks_or_a_graph_for_every_batch_size(tmp_path: Path) -> None:
    parts = ranks.run(sync_worker.__name__, 2, tmp_path, "compiled", limit=LIMIT)
    scenario = SCENARIOS["many sizes"]
    wanted = train(scenario, own_norm(scenario), (0, 1))
    assert max(errors(joined([part["result"] for part in parts]), wanted).values()) <= EXACT
    assert [part["graphs"] for part in parts] == [2, 2]  # the first size, and all others


def test_many_sizes(results: Results) -> None:
    check(results, "many sizes", own_norm)


# -- ranks that disagree ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what"), [("fewer forward passes", "gather statistics"), ("fewer backward passes", "sum gradients")]
)
def test_says_what_to_check_when_a_rank_calls_less_often(results: Results, name: str, what: str) -> None:
    waiting, silent = (got[name] for got in results(2))
    assert f"SyncBatchNorm could not {what} over its group of 2 ranks within timeout=2 s" in waiting["message"]
    assert "Every rank must call the layer, and backward through it, the same number of times" in waiting["message"]
    assert sync_worker.PATIENCE <= waiting["seconds"] < 5 * sync_worker.PATIENCE
    assert silent["message"] == ""


def test_the_comparison_would_see_a_mean_of_means(results: Results) -> None:
    """A guard on the tests above: statistics not weighted by counts are far beyond the limit."""
    scenario = SCENARIOS["(5, 3) whole"]
    means = [next(scenario.steps((rank,)))[0].mean((0, 2)) for rank in (0, 1)]
    got = results(2)[0]["(5, 3) whole"]["running_mean"]
    assert not math.isclose(float(torch.stack(means).mean(0)[0]) * 0.1, float(got[0]), rel_tol=1e-3)
