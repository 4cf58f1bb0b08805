"""The demo models do what their file says: each planted fault is there, and the sound ones have none."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from normwise.targets import InputsFrom, Target, load

NAMES = ("faulty-decoder", "faulty-tagger", "healthy-decoder", "healthy-resnet")


def part(target: Target, path: str) -> nn.Module:
    return target.model.get_submodule(path)


@pytest.fixture(scope="module")
def decoder() -> Target:
    return load("demo:faulty-decoder")


@pytest.fixture(scope="module")
def tagger() -> Target:
    return load("demo:faulty-tagger")


@pytest.mark.parametrize("name", NAMES)
def test_runs_in_eval_mode_with_its_own_inputs_and_optimizer(name: str) -> None:
    target = load(f"demo:{name}")
    assert (target.name, target.inputs_from, target.model.training) == (f"demo:{name}", InputsFrom.GIVEN, False)
    assert target.optimizer is not None
    held = {id(p) for group in target.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in target.model.parameters()}
    with torch.inference_mode():
        assert bool(target.run().isfinite().all()) == (name != "faulty-tagger")


def test_no_target_is_the_faulty_decoder() -> None:
    assert load("").name == "demo:faulty-decoder"


def test_underscores_are_accepted() -> None:
    assert load("demo:healthy_resnet").name == "demo:healthy-resnet"


def test_is_the_same_each_time_and_leaves_the_random_state() -> None:
    before = torch.get_rng_state()
    one, two = (load("demo:healthy-resnet").model.state_dict() for _ in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert torch.equal(torch.get_rng_state(), before)


def test_targets_load_their_models_only_when_asked() -> None:
    code = "import sys, normwise.targets; assert not any(name.startswith('normwise.models') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("name", "lost"), [("faulty-decoder", True), ("healthy-decoder", False)])
def test_one_element_of_256_makes_a_row_zero_only_in_half_precision(name: str, lost: bool) -> None:
    norm = part(load(f"demo:{name}"), "blocks.0.norm1")
    x = torch.ones(96, dtype=torch.float16)
    x[5] = 256.0
    assert bool(norm(x).eq(0).all()) == lost


def test_a_zero_row_is_nan_because_eps_is_lost(decoder: Target) -> None:
    assert part(decoder, "blocks.0.norm1")(torch.zeros(96, dtype=torch.float16)).isnan().all()


def test_a_constant_row_has_no_finite_gradient_at_the_embedding_norm(decoder: Target) -> None:
    norm = part(decoder, "embedding_norm").float()
    x = torch.ones(1, 96, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    norm.half()
    assert y.isfinite().all()
    assert x.grad is not None
    assert not x.grad.isfinite().all()


def test_the_value_of_the_byte_is_normed_away(decoder: Target) -> None:
    norm = part(decoder, "value_norm")
    assert norm(torch.rand(3, 4, 1).half()).abs().max() < 1e-4  # float16 leaves rounding noise


def test_the_head_reads_an_unnormed_stream_and_only_one_block_is_wired_otherwise(decoder: Target) -> None:
    seen: dict[str, torch.Tensor] = {}

    def keep_input(path: str) -> RemovableHandle:
        def keep(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen[path] = args[0]

        return part(decoder, path).register_forward_pre_hook(keep)

    def keep_stream(module: nn.Module, args: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        seen["stream"] = y

    paths = ("head", *(f"blocks.{i}.attention" for i in range(8)), *(f"blocks.{i}" for i in range(8)))
    hooks = [*map(keep_input, paths), part(decoder, "blocks.7").register_forward_hook(keep_stream)]
    with torch.inference_mode():
        decoder.run()
    for hook in hooks:
        hook.remove()
    assert torch.equal(seen["head"], seen["stream"])
    unnormed = [i for i in range(8) if torch.equal(seen[f"blocks.{i}.attention"], seen[f"blocks.{i}"])]
    assert unnormed == [3]


def test_the_optimizer_decays_the_gains_of_the_faulty_decoder_only(decoder: Target) -> None:
    assert decayed_vectors(decoder) > 0
    for name in ("healthy-decoder", "healthy-resnet", "faulty-tagger"):
        assert decayed_vectors(load(f"demo:{name}")) == 0


def decayed_vectors(target: Target) -> int:
    assert target.optimizer is not None
    groups = [group for group in target.optimizer.param_groups if group["weight_decay"]]
    return sum(p.ndim < 2 for group in groups for p in group["params"])


def test_the_taggers_first_norm_takes_time_for_channels(tagger: Target) -> None:
    time = tagger.args[0].shape[1]
    assert part(tagger, "norm").get_buffer("running_mean").shape == (time,)
    assert part(tagger, "tokens").get_parameter("weight").shape[1] != time


def test_the_tagger_is_nan_in_eval_mode_and_finite_in_train_mode(tagger: Target) -> None:
    assert int((part(tagger, "convolution_norm").get_buffer("running_var") < 0).sum()) == 1
    with torch.inference_mode():
        assert tagger.run().isnan().any()
        assert load("demo:faulty-tagger").model.train()(*tagger.args).isfinite().all()


def test_the_resnets_running_statistics_are_those_of_its_data() -> None:
    target = load("demo:healthy-resnet")
    norms = [module for module in target.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 9
    for norm in norms:
        assert norm.running_var is not None
        assert norm.running_var.min() > 0
        assert norm.num_batches_tracked == 32
        assert norm.momentum == 0.1
    images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        y = part(target, "stem_norm")(part(target, "stem")(images))
    torch.testing.assert_close(y.var((0, 2, 3)), torch.ones(24), rtol=0.1, atol=0.1)
