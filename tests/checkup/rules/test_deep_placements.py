"""Post-norm depth, DeepNorm's constants, scales on the wrong side, norms of norms, profiles."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normwise as nw
from normwise.checkup import Finding
from normwise.checkup.rules import (
    deep_post_norm_no_warmup,
    gradient_imbalance,
    norm_input_collapse,
    residual_profile,
    spike_attribution,
)
from tests.checkup.rules.judging import findings, severities, why_not

H = 16
X = torch.randn(2, 5, H, generator=torch.Generator().manual_seed(0))


# -- deep post-norm --------------------------------------------------------------------------------


def encoder(*, depth: int = 12, pre: bool = False, std: float | None = None) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(H, 2, 2 * H, dropout=0.0, batch_first=True, norm_first=pre)
    norm = nn.LayerNorm(H) if pre else None
    blocks = nn.TransformerEncoder(layer, depth, norm=norm, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(16, H), blocks, nn.Linear(H, 16))
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=std) if std else nn.init.xavier_uniform_(p)
    return model


IDS = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(0))


def warm(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> list[str]:
    return severities("PLC005", model, IDS, optimizer=optimizer, scheduler=scheduler)


def adam(model: nn.Module, rate: float = 3e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)


def test_a_deep_post_norm_stack_at_a_constant_rate_is_a_warning_that_names_what_it_measured() -> None:
    model = encoder()
    (found,) = findings("PLC005", model, IDS, optimizer=adam(model))
    assert found.severity == "warning"
    assert found.evidence["value"] > deep_post_norm_no_warmup.FALL
    assert found.evidence["token_cosine_at_the_end"] > 0.9
    assert 0 < found.evidence["query_gradient_smallest_over_largest"] < 0.2
    assert found.counterfactual is not None
    assert found.counterfactual["after"] < 0.5 < found.counterfactual["before"]


@pytest.mark.parametrize(
    "model",
    [encoder(pre=True), encoder(depth=6), encoder(std=0.02)],
    ids=["pre-norm", "6 blocks", "small weights"],
)
def test_depth_alone_is_no_fault(model: nn.Module) -> None:
    assert warm(model, adam(model)) == []


def test_a_warm_up_a_small_rate_or_an_optimizer_that_does_not_adapt_is_silent() -> None:
    model = encoder()
    optimizer = adam(model)
    assert warm(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, 100)) == []
    assert warm(model, adam(model, 1e-4)) == []
    assert warm(model, torch.optim.SGD(model.parameters(), 0.1)) == []
    assert warm(model, torch.optim.RAdam(model.parameters(), 3e-3)) == []


def test_a_schedule_that_only_falls_is_no_warm_up_and_is_not_stepped() -> None:
    model = encoder()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    assert warm(model, optimizer, scheduler) == ["warning"]
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 3e-3)


def test_a_stack_that_was_trained_needs_no_warm_up() -> None:
    model = encoder()
    optimizer = adam(model)
    model(IDS).square().mean().backward()
    optimizer.step()
    assert warm(model, optimizer) == []


def test_without_an_optimizer_it_is_not_checked() -> None:
    assert "optimizer=" in why_not("PLC005", encoder(), IDS)


def test_a_schedule_that_cannot_be_simulated_is_no_evidence() -> None:
    class Broken:
        def step(self) -> None:
            raise RuntimeError("no")

    model = encoder()
    assert "simulated" in why_not("PLC005", model, IDS, optimizer=adam(model), scheduler=Broken())


# -- DeepNorm --------------------------------------------------------------------------------------


class Deep(nn.Module):
    """A DeepNorm block; ``wrong`` puts alpha on the branch."""

    def __init__(self, alpha: float, gain: float, *, wrong: bool = False, norm: bool = True) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(H, 4 * H), nn.ReLU(), nn.Linear(4 * H, H))
        self.norm, self.alpha, self.wrong, self.normed = nn.LayerNorm(H), alpha, wrong, norm
        for layer in (self.mlp[0], self.mlp[2]):
            nn.init.xavier_normal_(layer.weight, gain=gain)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.alpha * self.mlp(x) if self.wrong else self.alpha * x + self.mlp(x)
        return self.norm(y) if self.normed else y


def deep(alpha: float, gain: float, blocks: int = 8, **how: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Deep(alpha, gain, **how) for _ in range(blocks)))


ALPHA, BETA = 16**0.25, 64**-0.25  # of 8 blocks


def test_deepnorm_done_right_is_silent() -> None:
    assert nw.check(deep(ALPHA, BETA), X, select="PLC").findings == ()


@pytest.mark.parametrize("gain", [1.0, 1 / BETA], ids=["plain Xavier", "the inverse gain"])
def test_alpha_without_the_gain_is_half_of_deepnorm(gain: float) -> None:
    (found,) = findings("PLC006", deep(ALPHA, gain), X)
    assert found.severity == "warning"
    assert found.evidence["value"] == pytest.approx(gain, rel=0.1)
    assert found.counterfactual is not None
    assert found.counterfactual["after"] > found.counterfactual["before"]


def test_the_gain_without_alpha_is_the_other_half() -> None:
    assert severities("PLC006", deep(1.0, BETA), X) == ["warning"]


def test_smaller_weights_than_the_gain_are_no_fault() -> None:
    assert findings("PLC006", deep(ALPHA, 0.5 * BETA), X) == []


def test_an_alpha_of_another_depth_is_worth_knowing() -> None:
    (found,) = findings("PLC006", deep(64**0.25, BETA), X)
    assert (found.severity, found.evidence["blocks_of_alpha"]) == ("info", 32)


@pytest.mark.parametrize("norm", [True, False], ids=["norm runs", "norm never runs"])
def test_alpha_on_the_branch_is_on_the_wrong_side(norm: bool) -> None:
    assert severities("PLC011", deep(ALPHA, 1.0, wrong=True, norm=norm), X) == ["warning"]


def test_alpha_on_the_skip_without_a_norm_grows() -> None:
    (found,) = findings("PLC011", deep(ALPHA, BETA, norm=False), X)
    assert found.evidence["value"] > 100


@pytest.mark.parametrize("scale", [0.22, 0.5, 1.0], ids=["Granite", "half", "none"])
def test_scales_below_one_on_the_branch_are_healthy(scale: float) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(H), nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            return x + scale * self.mlp(self.norm(x))

    model = nn.Sequential(*(Block() for _ in range(8)), nn.LayerNorm(H))
    assert findings("PLC011", model, X, config={"residual_multiplier": scale}) == []


def test_a_residual_multiplier_on_the_skip_is_on_the_wrong_side() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(H), nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            return 0.22 * x + self.mlp(self.norm(x))

    model = nn.Sequential(*(Block() for _ in range(8)), nn.LayerNorm(H))
    config = {"residual_multiplier": 0.22}
    # what the input leaves is forgotten: the stream holds little more than the last branches
    assert findings("PLC011", model, 100 * X, config=config)[0].severity == "warning"


# -- norms of norms, profiles ----------------------------------------------------------------------


def double(model: nn.Module, *inputs: Tensor) -> list[Finding]:
    return findings("PLC004", model.eval(), *inputs)


def test_the_ends_of_torchs_transformer_are_norms_of_norms_and_only_worth_knowing() -> None:
    model = nn.Transformer(H, 2, 2, 2, 32, dropout=0.0, batch_first=True)
    found = double(model, X, X)
    assert {f.path for f in found} == {"encoder.norm", "decoder.norm"}
    assert {str(f.severity) for f in found} == {"info"}


def test_one_pattern_in_all_blocks_is_one_finding() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.mlp = nn.RMSNorm(H), nn.RMSNorm(H), nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            q, k = (nn.functional.normalize(n(self.mlp(x)), dim=-1) for n in (self.q, self.k))
            return x + self.mlp(q * k)

    (found,) = double(nn.Sequential(*(Block() for _ in range(4))), X)
    assert {"0", "0.q", "0.k", "3.k"} <= set(found.paths)
    assert "as in 7 more" in found.message


def test_a_sandwich_and_an_embedding_norm_that_the_stream_carries_on_are_none() -> None:
    class Sandwich(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.mlp, self.after = nn.LayerNorm(H), nn.Linear(H, H), nn.LayerNorm(H)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.after(self.mlp(self.before(x)))

    assert double(nn.Sequential(nn.LayerNorm(H), Sandwich(), Sandwich(), nn.LayerNorm(H)), X) == []


def test_norms_over_other_axes_are_no_repetition() -> None:
    assert double(nn.Sequential(nn.BatchNorm1d(5), nn.LayerNorm(H)), X) == []


def test_collapse_needs_tokens_that_differed() -> None:
    target = norm_input_collapse.bad()
    same = torch.ones(2, 5, 8)
    assert severities("DYN002", target.model, *target.args) == ["info"]
    assert findings("DYN002", target.model, same) == []


def test_one_massive_channel_is_no_collapse() -> None:
    target = norm_input_collapse.good()
    massive = target.args[0] + torch.tensor([0.0] * 7 + [3e3])
    model = nn.Sequential(*(_Plain() for _ in range(6)), nn.Linear(8, 8))
    assert findings("DYN002", model, massive) == []


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def test_a_batch_of_another_scale_is_named() -> None:
    target = spike_attribution.bad()
    (found,) = findings("DYN003", target.model, *target.args, loader=target.loader)
    assert (found.path, found.evidence["batch"]) == ("1", 2)


def test_batches_of_another_size_are_compared_and_those_without_a_finite_number_are_not() -> None:
    target = spike_attribution.bad()
    (x,) = target.args
    more = [(x.repeat(3, 1),), (100 * x.repeat(2, 1),)]
    (found,) = findings("DYN003", target.model, x, loader=more)
    assert (found.path, found.evidence["batch"]) == ("1", 2)
    assert "finite" in why_not("DYN003", target.model, x, loader=[(x,), (x * torch.inf,)])


def test_without_a_loader_or_a_training_step_dynamics_say_what_they_need() -> None:
    model = deep(ALPHA, BETA)
    assert "loader=" in why_not("DYN003", model, X)
    assert "train_step=" in why_not("DYN001", model, X)


def test_a_training_step_that_raises_is_no_evidence() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        raise RuntimeError("out of data")

    assert "out of data" in why_not("DYN001", deep(ALPHA, BETA), X, train_step=step)


def test_watching_a_step_leaves_no_hooks_and_no_gradients() -> None:
    model = deep(ALPHA, BETA)

    def step(model: nn.Module, x: Tensor) -> None:
        model(x).square().sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert findings("DYN001", model, X, train_step=step) == []
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())


def test_an_imbalance_says_how_alike_the_tokens_end() -> None:
    target = gradient_imbalance.bad()
    (found,) = findings("DYN001", target.model, *target.args, train_step=target.train_step)
    rows = nw.check(target.model, target.args).profile
    assert found.evidence["token_cosine_at_the_end"] == pytest.approx(rows[-1].token_cosine)
    assert found.evidence["placement"] == "pre"


def test_a_jump_says_the_gain_of_the_branch_that_made_it() -> None:
    target = residual_profile.bad()
    (found,) = findings("PLC007", target.model, *target.args)
    assert found.evidence["branch_gain"] == pytest.approx(found.evidence["branch_rms"] ** 2)
