"""The conformance suite: sees every known fault, passes what is right, and says what it measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from normwise import layers
from normwise.functional.batch import BATCH, batch_spec, instance_spec
from normwise.functional.group import group_spec
from normwise.layers import FAMILIES
from normwise.spec import Gate, NormSpec
from normwise.spec.definition import plain
from normwise.testing import CHECKS, Check, Conformance, conformance
from tests.testing.faulty_layers import FAULTS, RMS, right, rms

LAYER = layers.LayerNorm(1).spec


def failures(factory: Callable[..., Any], spec: NormSpec, **told: Any) -> dict[str, str]:
    """Return the failed checks with their evidence; none where all pass."""
    try:
        conformance(factory, spec, **told)
    except AssertionError as error:
        lines = str(error).splitlines()[1:]
        return dict(line.strip().split(": ", 1) for line in lines)  # type: ignore[misc]
    return {}


RIGHT: dict[str, tuple[Callable[..., Any], NormSpec, dict[str, Any]]] = {
    "LayerNorm": (layers.LayerNorm, LAYER, {}),
    "RMSNorm": (layers.RMSNorm, layers.RMSNorm(1).spec, {}),
    "GroupNorm": (lambda: layers.GroupNorm(4, 24), group_spec(4, 1e-5, 4), {}),
    "InstanceNorm2d": (lambda: layers.InstanceNorm2d(24, affine=True), instance_spec(1e-5, 4), {}),
    "BatchNorm2d": (lambda: layers.BatchNorm2d(24), batch_spec(BATCH, 4, 1), {}),
    "AddRMSNorm": (layers.AddRMSNorm, layers.AddRMSNorm(1).spec, {"residual": True}),
    "ScaleNorm": (layers.ScaleNorm, layers.ScaleNorm(1).spec, {}),
    "CenteredRMSNorm": (layers.CenteredRMSNorm, layers.CenteredRMSNorm(1).spec, {}),
    "ChannelLayerNorm": (layers.ChannelLayerNorm, replace(layers.ChannelLayerNorm(1).spec, axes=(-3,)), {}),
    **{
        name: (lambda size, name=name: layers.RMSNorm.like(name, size), FAMILIES[name], {})
        for name in ("llama", "gemma", "t5")
    },
    **{
        name: (lambda size, name=name: layers.LayerNorm.like(name, size), FAMILIES[name], {})
        for name in ("cohere", "deberta", "nemotron")
    },
}


@pytest.mark.parametrize(
    ("kernel", "factory", "spec", "told"),
    [
        *(pytest.param(nullcontext, *RIGHT[name], id=f"{name}-best") for name in RIGHT),
        # the families are the same two layers with other specs
        *(
            pytest.param(plain, *RIGHT[name], id=f"{name}-eager", marks=pytest.mark.slow if name in FAMILIES else ())
            for name in RIGHT
        ),
    ],
)
def test_our_layers_pass_every_check(
    kernel: Callable[[], AbstractContextManager[None]],
    factory: Callable[..., Any],
    spec: NormSpec,
    told: dict[str, Any],
) -> None:
    with kernel():
        assert failures(factory, spec, **told) == {}


@pytest.mark.parametrize(("factory", "spec", "told", "check"), FAULTS.values(), ids=FAULTS)
def test_sees_the_fault(factory: Callable[[int], nn.Module], spec: NormSpec, told: dict[str, bool], check: str) -> None:
    assert any(check in name for name in failures(factory, spec, **told))


OVERFLOW = {"large finite rows in float32", "large finite rows in bfloat16"}


def test_torch_layer_norm_fails_where_it_is_wrong_and_nowhere_else() -> None:
    found = failures(nn.LayerNorm, LAYER)
    # how many threads there are to disagree is the machine's affair
    threads = {name for name in found if name.startswith("gradients on one, two and four threads")}
    many = {f"gradients of gain and shift over 16,384 rows in {dtype}" for dtype in ("bfloat16", "float16")}
    assert set(found) - threads == OVERFLOW | many
    assert re.search(r"bias (256|512), right 16384", found["gradients of gain and shift over 16,384 rows in bfloat16"])


def test_torch_rms_norm_fails_where_squares_overflow_and_nowhere_else() -> None:
    assert set(failures(nn.RMSNorm, layers.RMSNorm(1).spec)) == OVERFLOW


def test_torch_batch_norm_fails_where_squares_overflow_and_nowhere_else() -> None:
    assert set(failures(lambda: nn.BatchNorm2d(24), batch_spec(BATCH, 4, 1))) == OVERFLOW


def test_a_plain_right_layer_fails_where_squares_overflow_and_nowhere_else() -> None:
    assert set(failures(rms(right), RMS)) == OVERFLOW


def test_lists_every_failure_with_its_figures_and_does_not_stop_at_the_first() -> None:
    found = failures(rms(lambda x, w: x), RMS)
    assert len(found) > 10
    assert all(re.search(r"measured .*, at most |Error", evidence) for evidence in found.values())


def test_an_error_in_a_check_is_a_failure_of_that_check() -> None:
    def no_empty_batch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not len(x):
            raise RuntimeError("nothing to do")
        return right(x, weight)

    assert failures(rms(no_empty_batch), RMS)["an empty batch"] == "RuntimeError: nothing to do"


def test_the_report_is_a_table_of_what_was_measured() -> None:
    report = conformance(layers.RMSNorm, layers.RMSNorm(1).spec)
    assert [check.name for check in report.checks] == list(CHECKS)
    lines = str(report).splitlines()
    assert lines[0] == "RMSNorm: 40 of 40 checks passed"
    assert re.fullmatch(r"ok +the definition in float32 +\S+ <= 13.6 +units in the last place", lines[2])
    assert re.fullmatch(r"- +padding +the layer takes no mask", next(line for line in lines if "padding" in line))


def test_a_failed_check_reads_as_one() -> None:
    check = Check(name="a", passed=False, measured=3.0, limit=1.0, note="units")
    assert re.fullmatch(r"FAILED +a +3 > limit 1 +units", str(check))
    assert Conformance(layer="L", checks=(check,)).failed == (check,)


def test_takes_any_callable_with_weight_and_bias() -> None:
    class Plain:
        def __init__(self) -> None:
            self.weight = torch.ones(48)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, (48,), self.weight, 1e-6)

    found = failures(Plain, RMS)
    assert set(found) == OVERFLOW


def test_leaves_threads_and_random_state_as_found() -> None:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    conformance(layers.RMSNorm, layers.RMSNorm(1).spec)
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_leaves_checks_out_by_name() -> None:
    report = conformance(nn.RMSNorm, layers.RMSNorm(1).spec, without=sorted(OVERFLOW))
    assert not OVERFLOW & {check.name for check in report.checks}
    with pytest.raises(ValueError, match="no check is called 'speed'; choose from: the definition in float64"):
        conformance(nn.RMSNorm, RMS, without=["speed"])


def test_refuses_specs_of_several_inputs() -> None:
    with pytest.raises(ValueError, match="checks norms of one input, given a spec with gate='after'"):
        conformance(nn.RMSNorm, replace(RMS, gate=Gate.AFTER))


@pytest.mark.slow
def test_compiles() -> None:
    report = conformance(layers.RMSNorm, layers.RMSNorm(1).spec, compile=True)
    assert report.checks[-1].name == "torch.compile"
