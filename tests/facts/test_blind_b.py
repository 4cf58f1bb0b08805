"""More architectures that no other test names: block-end norms, side inputs, conv stems, long skips, bare attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import normwise as nw
from normwise.checkup.report import Report

HIDDEN, DEPTH = 24, 3


def map_of(model: nn.Module, *inputs: Tensor) -> Report:
    return nw.map(model.eval(), inputs)


def features() -> Tensor:
    return torch.randn(2, 7, HIDDEN)


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16)


def norm() -> nn.LayerNorm:
    return nn.LayerNorm(HIDDEN)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))


def conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs))


class ClosedBlock(nn.Module):
    """Conformer: pre-norm sublayers, and one norm that closes the block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([norm() for _ in range(4)])
        self.mlps = nn.ModuleList([mlp() for _ in range(4)])
        self.closing = norm()

    def forward(self, x: Tensor) -> Tensor:
        for own, branch in zip(self.norms, self.mlps, strict=True):
            x = x + 0.5 * branch(own(x))
        return self.closing(x)


class Conformer(nn.Module):
    def __init__(self, *, final: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList([ClosedBlock() for _ in range(DEPTH)])
        self.final = norm() if final else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.final(x)


class SideInput(nn.Module):
    """Zamba: what a shared sublayer says is added for the next sublayer's norm only, not to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shared = nn.Linear(HIDDEN, HIDDEN), mlp()
        self.mlps = nn.ModuleList([mlp() for _ in range(DEPTH)])
        self.norms = nn.ModuleList([norm() for _ in range(DEPTH + 1)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for own, branch in zip(self.norms, self.mlps, strict=False):
            x = x + branch(own(x + self.shared(x)))
        return self.norms[-1](x)


class ConvBlock(nn.Module):
    """A projected or plain block of a RegNet, or of a pre-activation ResNet."""

    def __init__(self, inputs: int, *, before: bool) -> None:
        super().__init__()
        self.before = nn.BatchNorm2d(inputs) if before else nn.Identity()
        self.one, self.two = conv(inputs, HIDDEN), conv(HIDDEN, HIDDEN)
        self.last = nn.Conv2d(HIDDEN, HIDDEN, 1) if before else nn.Identity()
        self.shortcut = nn.Conv2d(inputs, HIDDEN, 1) if inputs != HIDDEN else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x).relu() if not isinstance(self.before, nn.Identity) else x
        skip = x if self.shortcut is None else self.shortcut(y)
        y = skip + self.last(self.two(self.one(y).relu()).relu() if self._pre() else self.two(self.one(y).relu()))
        return y if self._pre() else y.relu()

    def _pre(self) -> bool:
        return not isinstance(self.before, nn.Identity)


class ConvNet(nn.Module):
    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.stem = conv(3, 8) if not before else nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList([ConvBlock(8 if i == 0 else HIDDEN, before=before) for i in range(DEPTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x.relu() if isinstance(self.stem, nn.Sequential) else x
        for block in self.blocks:
            x = block(x)
        return x


class StemThenBlocks(nn.Module):
    """A stream of plain blocks behind a convolution, a norm and, or not, an activation function."""

    def __init__(self, *, activated: bool) -> None:
        super().__init__()
        self.stem, self.activated = conv(3, HIDDEN), activated
        self.blocks = nn.ModuleList(
            [nn.Sequential(conv(HIDDEN, HIDDEN), nn.ReLU(), conv(HIDDEN, HIDDEN)) for _ in range(DEPTH)]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x.relu() if self.activated else x
        for block in self.blocks:
            x = x + block(x)
        return x


class LongSkips(nn.Module):
    """Swin2SR: stages of blocks, a linear map and a skip around each; one norm behind all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(HIDDEN, HIDDEN)
        self.mlps = nn.ModuleList([mlp() for _ in range(2 * DEPTH)])
        self.norms = nn.ModuleList([norm() for _ in range(2 * DEPTH)])
        self.maps = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(2)])
        self.final, self.head = norm(), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in range(2):
            y = x
            for i in range(stage * DEPTH, (stage + 1) * DEPTH):
                y = y + self.norms[i](self.mlps[i](y))
            x = x + self.maps[stage](y)
        return self.head(self.final(x))


class BareAttention(nn.Module):
    """YOSO: normalized queries and keys, the scores are a function of their angle, no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList([nn.Linear(HIDDEN, 3 * HIDDEN) for _ in range(DEPTH)])
        self.norms = nn.ModuleList([norm() for _ in range(DEPTH)])

    def forward(self, x: Tensor) -> Tensor:
        for project, own in zip(self.qkv, self.norms, strict=True):
            q, k, v = project(own(x)).chunk(3, dim=-1)
            q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
            scores = 1 - torch.acos(q @ k.transpose(1, 2) * 0.99) / torch.pi
            x = x + scores**9 @ v
        return x


class Resampler(nn.Module):
    """Perceiver: features that attend to inputs of another width, with a norm on both."""

    def __init__(self, *, latent: bool) -> None:
        super().__init__()
        self.stem, self.inputs = nn.Linear(HIDDEN, HIDDEN), nn.Linear(6, 16)
        self.norms = nn.ModuleList([norm() for _ in range(DEPTH)])
        self.memory_norms = nn.ModuleList([nn.LayerNorm(16) for _ in range(DEPTH)])
        self.q = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(DEPTH)])
        self.kv = nn.ModuleList([nn.Linear(16, 2 * HIDDEN) for _ in range(DEPTH)])
        self.down = nn.ModuleList([nn.Linear(HIDDEN, 16) for _ in range(DEPTH)]) if latent else None

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x, memory = self.stem(x), self.inputs(memory)
        for i in range(DEPTH):
            y = self.norms[i](x)
            source = memory if self.down is None else self.down[i](y)
            k, v = self.kv[i](self.memory_norms[i](source)).chunk(2, dim=-1)
            x = x + nn.functional.scaled_dot_product_attention(self.q[i](y), k, v)
        return x


def test_the_norm_that_closes_each_block_is_no_final_norm() -> None:
    for final in (False, True):
        report = map_of(Conformer(final=final), features())
        (stack,) = report.placement.stacks
        assert stack.final_norm is final
        assert stack.mixture == (("pre", 3 * DEPTH), ("other", DEPTH))


def test_a_norm_before_a_sublayer_may_read_the_stream_and_something_beside_it() -> None:
    report = map_of(SideInput(), features())
    (stack,) = report.placement.stacks
    assert (stack.kind, stack.sublayers, report.placement.inner_norm) == ("pre", DEPTH, False)


def test_the_stem_of_a_convolutional_net_is_no_pre_activation_of_its_first_block() -> None:
    for before, kind in ((False, "res_post"), (True, "pre")):
        (stack,) = map_of(ConvNet(before=before), images()).placement.stacks
        assert (stack.kind, stack.mixture) == (kind, ((kind, DEPTH),))
        assert not stack.starts_with_norm


def test_a_stream_behind_an_activation_function_does_not_start_with_a_norm() -> None:
    for activated in (True, False):
        (stack,) = map_of(StemThenBlocks(activated=activated), images()).placement.stacks
        assert (stack.kind, stack.starts_with_norm) == ("res_post", not activated)


def test_a_norm_behind_all_long_skips_is_the_final_norm_of_the_last_stage() -> None:
    stacks = map_of(LongSkips(), features()).placement.stacks
    assert [(s.kind, s.final_norm) for s in stacks] == [("res_post", False), ("res_post", True)]


def test_queries_and_keys_are_known_without_a_softmax() -> None:
    report = map_of(BareAttention(), features())
    assert report.placement.qk_norm
    assert {n.placement.value for n in report.norms} == {"pre", "qk"}


def test_a_norm_on_what_is_attended_to_is_no_inner_norm_and_one_on_a_latent_is() -> None:
    for latent in (False, True):
        report = map_of(Resampler(latent=latent), features(), torch.randn(2, 5, 6))
        (stack,) = report.placement.stacks
        assert (stack.kind, stack.sublayers, report.placement.inner_norm) == ("pre", DEPTH, latent)
