"""Admin's profile against a walk by hand."""

from __future__ import annotations

import pytest
import torch

import normwise as nw
from normwise.blocks import Layer
from normwise.models import Decoder, EncoderDecoder, profile_admin

IDS = torch.arange(64).reshape(4, 16) % 48


def made(placement: str = "admin", **options: float) -> Decoder:
    torch.manual_seed(0)
    return Decoder(48, 32, 6, 4, context=16, placement=placement, **options)  # type: ignore[arg-type]


def variance(x: torch.Tensor) -> float:
    return float((x - x.mean()).double().square().mean())


def omegas(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for name, p in model.named_parameters() if name.endswith("skip_gain")]


def test_omega_is_the_root_of_all_variances_before() -> None:
    model = made()
    profile_admin(model, IDS)
    x, square = model.embedding(IDS), 1.0
    with torch.no_grad():
        for layer in model.stack.layers:
            assert isinstance(layer, Layer)
            for _, residual in layer.residuals():
                assert residual.skip_gain is not None
                assert residual.after_add is not None
                assert torch.allclose(residual.skip_gain, torch.full((32,), square**0.5))
                branch = residual.sublayer(x)
                square = square * variance(x) + variance(branch)
                x = residual.after_add(residual.skip_gain * x + branch)
    assert square > 2  # twelve branches


def test_a_profile_is_the_same_again_and_leaves_the_rest_alone() -> None:
    model = made(dropout=0.5).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not name.endswith("skip_gain")}
    profile_admin(model, IDS)
    first = omegas(model)
    profile_admin(model, IDS)
    assert all(torch.equal(one, other) for one, other in zip(first, omegas(model), strict=True))
    assert model.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_both_stacks_of_a_pair_are_profiled_and_the_check_still_knows_them() -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(48, 32, 3, 3, 4, context=16, placement="admin")
    profile_admin(model, IDS, IDS)
    found = omegas(model)
    assert len(found) == 3 * 2 + 3 * 3
    assert sum(bool((each == 1).all()) for each in found) == 2  # the first of each stack
    report = nw.check(model, (IDS, IDS), effort="read")
    assert [stack.name for stack in report.placement.stacks] == ["admin", "admin"]


def test_a_model_of_another_placement_is_refused() -> None:
    with pytest.raises(ValueError, match="no stack of placement 'admin'; build it with placement='admin'"):
        profile_admin(made("post"), IDS)
