"""Training loops as people write them are healthy: no rule reports more than info on any of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import normwise as nw
from normwise.checkup import Severity


def loud(report: nw.Report) -> list[tuple[str, str, str]]:
    assert report.unchanged is True
    return [(f.code, f.path, f.message) for f in report.findings if f.severity is not Severity.INFO]


def conv(channels: int = 3, out: int = 2) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, out),
    )


def mlp(out: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, out))


def images(n: int = 16) -> torch.Tensor:
    return torch.rand(n, 3, 8, 8)


def vectors(n: int = 16) -> torch.Tensor:
    return torch.randn(n, 6) * 2 + 1


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def trained(model: nn.Module, batch: Callable[[], torch.Tensor], steps: int = 60) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(steps):
        x = batch()
        loss = F.cross_entropy(model(x), (x.flatten(1).mean(1) > x.mean()).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def test_a_gan_with_two_passes_of_the_discriminator_and_one_of_the_generator() -> None:
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
    critic = mlp(1)
    for_g = torch.optim.Adam(generator.parameters(), 2e-4)
    for_d = torch.optim.Adam(critic.parameters(), 2e-4)

    def step(model: nn.Module, real: torch.Tensor) -> None:
        fake = generator(torch.randn(len(real), 4))
        for_d.zero_grad()
        (F.softplus(-model(real)).mean() + F.softplus(model(fake.detach())).mean()).backward()
        for_d.step()
        for_g.zero_grad()
        F.softplus(-model(fake)).mean().backward()
        for_g.step()

    before = copy.deepcopy(generator.state_dict())
    assert loud(nw.check(critic, vectors(), train_step=step, optimizer=for_d)) == []
    assert all(torch.equal(v, before[k]) for k, v in generator.state_dict().items())
    assert len(for_g.state) == 0


def test_a_gan_that_freezes_its_discriminator_while_the_generator_learns() -> None:
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g, self.d = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6)), mlp(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.d(self.g(x))

    def step(model: Gan, x: torch.Tensor) -> None:
        model.d.requires_grad_(False)
        model(x).mean().backward()
        model.d.requires_grad_(True)
        (model.d(x).mean() - model.d(model.g(x).detach()).mean()).backward()

    assert loud(nw.check(Gan(), vectors(), train_step=step)) == []


def test_a_variational_autoencoder() -> None:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(8), nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 6))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            mean, log_var = self.encoder(x).chunk(2, -1)
            z = mean + torch.randn_like(mean) * (log_var / 2).exp() if self.training else mean
            return self.decoder(z), mean, log_var

    def step(model: nn.Module, x: torch.Tensor) -> None:
        out, mean, log_var = model(x)
        (F.mse_loss(out, x) + (mean.square() + log_var.exp() - log_var).mean()).backward()

    assert loud(nw.check(Vae(), vectors(), train_step=step)) == []


def test_a_siamese_encoder_that_runs_twice() -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = conv(out=4)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return F.cosine_similarity(self.encoder(a), self.encoder(b))

    report = nw.check(Siamese(), (images(), images()), train_step=lambda m, a, b: m(a, b).mean().backward())
    assert loud(report) == []
    assert [f.evidence["updates"] for f in report.findings if f.code == "BNS010"] == [2]


def test_gradient_accumulation_with_a_scheduler_and_clipping() -> None:
    model = trained(conv(), images, 40)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def step(net: nn.Module, x: torch.Tensor) -> None:
        net.train()
        for part in x.chunk(4):
            (net(part).square().mean() / 4).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    report = nw.check(model, images(32), train_step=step, optimizer=optimizer, scheduler=schedule)
    assert loud(report) == []


def test_mixed_precision_with_a_gradient_scaler() -> None:
    model = conv()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")

    def step(net: nn.Module, x: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    before = scaler.state_dict()
    assert loud(nw.check(model, images(), train_step=step, optimizer=optimizer)) == []
    assert scaler.state_dict() == before
    assert len(optimizer.state) == 0


def test_an_ema_whose_statistics_are_estimated_again() -> None:
    model = trained(mlp(), vectors)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(20):
        trained(model, vectors, 1)
        averaged.update_parameters(model)
    update_bn([vectors(64) for _ in range(20)], averaged)
    assert loud(nw.check(averaged.eval(), vectors(256), online=model.eval())) == []


def test_an_ema_that_averages_its_buffers() -> None:
    model = trained(mlp(), vectors)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(20):
        trained(model, vectors, 1)
        averaged.update_parameters(model)
    assert loud(nw.check(averaged.eval(), vectors(256), online=model.eval())) == []


@pytest.mark.parametrize("frozen", ["all", "norms"])
def test_a_frozen_backbone_with_an_overridden_train(frozen: str) -> None:
    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = trained(conv(out=8), images, 40), nn.Linear(8, 2)
            if frozen == "all":
                self.backbone.requires_grad_(False)
            self.train()

        def train(self, mode: bool = True) -> Tuned:
            super().train(mode)
            for module in self.backbone.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.backbone(x))

    def step(model: nn.Module, x: torch.Tensor) -> None:
        model.train()
        model(x).square().mean().backward()

    def evaluate(model: nn.Module, batches: list[torch.Tensor]) -> float:
        model.eval()
        with torch.no_grad():
            total = sum(float(model(b).mean()) for b in batches)
        model.train()
        return total

    assert loud(nw.check(Tuned(), images(), train_step=step, eval_fn=evaluate)) == []


def test_a_momentum_encoder_keeps_its_statistics_live_on_purpose() -> None:
    class Byol(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.predictor = conv(out=8), nn.Linear(8, 8)
            self.target = copy.deepcopy(self.online).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                goal = self.target(x.flip(-1))
            return -F.cosine_similarity(self.predictor(self.online(x)), goal).mean()

    def step(model: Byol, x: torch.Tensor) -> None:
        model(x).backward()
        with torch.no_grad():
            for slow, fast in zip(model.target.parameters(), model.online.parameters(), strict=True):
                slow.lerp_(fast, 0.01)

    assert loud(nw.check(Byol(), images(), train_step=step)) == []


def test_synchronized_batch_norm_on_one_process() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(conv())
    assert loud(nw.check(model.eval(), images())) == []
    assert loud(nw.check(model.train(), images(), train_step=lambda m, x: m(x).mean().backward())) == []


def test_checkpointing_of_blocks_without_running_statistics() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block, self.head = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), mlp()
            self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(checkpoint(self.block, self.stem(x), use_reentrant=False))

    assert loud(nw.check(Net(), vectors(), train_step=lambda m, x: m(x).mean().backward())) == []


def test_an_evaluation_that_estimates_the_statistics_again_first() -> None:
    model = trained(mlp(), vectors)

    def evaluate(net: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
        update_bn(batches, net)
        net.eval()
        with torch.no_grad():
            return torch.cat([net(b) for b in batches])

    assert loud(nw.check(model, vectors(), eval_fn=evaluate)) == []


def test_an_evaluation_with_live_dropout_and_norms_in_eval_mode() -> None:
    model = nn.Sequential(trained(mlp(4), vectors), nn.Dropout(0.2), nn.Linear(4, 2))

    def evaluate(net: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
        net.eval()
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        with torch.no_grad():
            return torch.stack([net(batches[0]) for _ in range(4)]).mean(0)

    assert loud(nw.check(model, vectors(), eval_fn=evaluate)) == []


@pytest.mark.parametrize("mode", [True, False])
def test_a_trained_network_and_its_loader_even_sorted_by_class(mode: bool) -> None:
    model = trained(conv(), images, 80).train(mode)
    data = images(192)
    order = data.flatten(1).mean(1).argsort()
    loader = DataLoader(TensorDataset(data[order], torch.zeros(192)), batch_size=32)
    assert loud(nw.check(model, images(32), loader=loader, eval_fn=lambda m, b: [m.eval()(x) for x in b])) == []


def test_a_fresh_network_in_train_mode() -> None:
    assert loud(nw.check(conv(), images(2))) == []


def test_a_half_network_for_inference_and_a_half_network_with_float_norms_in_training() -> None:
    model = trained(conv(), images).bfloat16()
    assert loud(nw.check(model.eval(), images().bfloat16())) == []


def test_reinforcement_learning_with_a_target_network_and_one_sample_an_act() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))
    target = copy.deepcopy(model).requires_grad_(False)

    def step(net: nn.Module, x: torch.Tensor) -> None:
        with torch.no_grad():
            net(x[:1])
        (net(x) - target(x)).square().mean().backward()

    assert loud(nw.check(model, vectors(), train_step=step)) == []
