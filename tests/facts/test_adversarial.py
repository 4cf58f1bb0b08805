"""What models do besides computing: keep counters and caches, differentiate, train themselves, loop for long."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import normwise as nw
from normwise.errors import TraceError
from normwise.facts.replay import Replayer
from normwise.graph import trace
from normwise.targets import target


class Block(nn.Module):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Holding(nn.Module):
    """Keeps one mutable thing and changes it in place with every call."""

    def __init__(self, held: Any, change: Any) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.held, self.change = [held], change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.held[0])
        return self.blocks(x)


HELD = {
    "nested_dict": ({"a": {"n": 0}}, lambda h: h["a"].update(n=h["a"]["n"] + 1)),
    "nested_list": ([[1]], lambda h: h[0].append(2)),
    "ordered_dict": (OrderedDict(a=1), lambda h: h.update(b=2)),
    "default_dict": (defaultdict(list), lambda h: h["a"].append(1)),
    "counter": (Counter(), lambda h: h.update("a")),
    "deque": (deque([1], maxlen=2), lambda h: h.append(2)),
    "tensor": (torch.zeros(3), lambda h: h.add_(1)),
    "array": (np.zeros(3), lambda h: h.__iadd__(1)),
    "generator": (np.random.default_rng(0), lambda h: h.random()),
    "object": (SimpleNamespace(n=0), lambda h: setattr(h, "n", h.n + 1)),
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_module_holds_is_as_it_was(name: str) -> None:
    held, change = HELD[name]
    before = _told(held)
    nw.check(Holding(held, change).eval(), torch.randn(2, 5, 16))
    assert _told(held) == before


def _told(held: Any) -> str:
    return repr(held.bit_generator.state if isinstance(held, np.random.Generator) else held)


class Momentum(nn.Module):
    """BYOL, MoCo: a slow copy that every call moves through ``.data``, in place or by a new tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.online, self.slow = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        for fast, slow in zip(self.online.parameters(), self.slow.parameters(), strict=True):
            if self.how == "replaced":
                slow.data = slow.data * 0.9 + fast.data * 0.1
            else:
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return self.online(x) - self.slow(x).detach()


@pytest.mark.parametrize("how", ["in_place", "replaced"])
def test_parameters_that_a_forward_overwrites_are_bit_identical_afterwards(how: str) -> None:
    model = Momentum(how).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    report = nw.check(model, torch.randn(2, 5, 16))
    assert report.unchanged is True
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


class Differentiating(nn.Module):
    """An energy and its force; the mode of gradients is the model's own, the caller's, or it refuses inference mode."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.energy = how, nn.Sequential(nn.Linear(3, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "refuses":
            assert not torch.is_inference_mode_enabled(), "call this outside inference mode"
            return self.energy(x)
        with torch.set_grad_enabled(True if self.how == "own" else torch.is_grad_enabled()):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x)[0]


@pytest.mark.parametrize("how", ["own", "caller", "refuses"])
def test_forwards_that_need_gradients_are_mapped(how: str) -> None:
    report = nw.check(Differentiating(how).eval(), torch.randn(5, 3))
    assert [(n.path, str(n.spec.kind)) for n in report.norms if n.spec] == [("energy.1", "layer")]


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(128, 16), nn.Sequential(Block(), Block())

    def forward(self, texts: list[str]) -> Tensor:
        return self.blocks(self.embedding(torch.tensor([[ord(c) for c in text] for text in texts])))


def test_inputs_without_tensors_are_data_too() -> None:
    assert [str(s.kind) for s in nw.map(Texts().eval(), (["abc", "def"],)).placement.stacks] == ["pre"]


class LearnedEps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), nn.Parameter(torch.tensor(1e-3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps.abs())


def test_a_learned_eps_is_an_eps() -> None:
    report = nw.map(nn.Sequential(nn.Linear(16, 16), LearnedEps()).eval(), torch.randn(4, 16))
    (spec,) = (n.spec for n in report.norms)
    assert spec is not None
    assert str(spec.kind) == "rms"
    assert spec.eps == pytest.approx(1e-3)


class Scaled(nn.Module):
    """A root mean square norm whose output is multiplied by a constant: queries, DiffTransformer's heads."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.linear, self.weight, self.constant = nn.Linear(16, 16), nn.Parameter(torch.ones(16)), constant

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) * self.constant


@pytest.mark.parametrize("constant", [0.2, 0.25])  # 0.25 is 16 ** -0.5, which makes rows of length one
def test_a_constant_behind_an_rms_norm_leaves_it_one(constant: float) -> None:
    (norm,) = nw.map(Scaled(constant).eval(), torch.randn(4, 16)).norms
    assert norm.spec is not None
    assert (str(norm.spec.kind), norm.spec.factor, norm.spec.eps) == ("rms", constant, 1e-6)


class Projected(nn.Module):
    """A generator's block: upsampling on both ways; what a class or a time step says is added, or gain and shift."""

    def __init__(self, how: str, inside: int, out: int) -> None:
        super().__init__()
        self.how, self.told = how, nn.Linear(4, 2 * out)
        self.norm1, self.norm2 = nn.BatchNorm2d(inside), nn.BatchNorm2d(out, affine=False)
        self.conv1, self.conv2 = nn.Conv2d(inside, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(inside, out, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        gain, shift = self.told(condition)[..., None, None].chunk(2, 1)
        h = self.conv1(functional.interpolate(torch.relu(self.norm1(x)), scale_factor=2))
        h = self.norm2(h + shift) if self.how == "added" else self.norm2(h) * (1 + gain) + shift
        return self.conv2(torch.relu(h)) + self.shortcut(functional.interpolate(x, scale_factor=2))


class Generator(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.blocks = nn.ModuleList([Projected(how, 4, 6), Projected(how, 6, 6), Projected(how, 6, 4)])

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, condition)
        return x


@pytest.mark.parametrize("how", ["added", "modulated"])
def test_a_projection_on_every_skip_makes_a_stream(how: str) -> None:
    report = nw.map(Generator(how).eval(), (torch.randn(2, 3, 4, 4), torch.randn(2, 4)))
    assert [(str(s.kind), s.sublayers) for s in report.placement.stacks] == [("pre", 3)]
    assert [str(n.placement) for n in report.norms] == ["pre", "inner"] * 3


class Adjacent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return x + self.linear(torch.sparse.mm(adjacency, self.norm(x)))


class Own(Tensor):
    """A user's subclass: every result is another tensor object than the one its op made."""


class Subclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(8), Block(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x.as_subclass(Own)).as_subclass(Tensor)


def test_tensor_subclasses_carry_the_stream() -> None:
    report = nw.map(Subclassed().eval(), torch.randn(2, 5, 8))
    assert report.breaks == ()
    assert [(str(s.kind), s.sublayers) for s in report.placement.stacks] == [("pre", 2)]


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.norm(torch.nested.nested_tensor([a, b], layout=torch.jagged)).to_padded_tensor(0.0)


def _exported() -> nn.Module:
    program = torch.export.export(nn.Sequential(Block(8), Block(8)), (torch.randn(3, 8),))
    return nn.Sequential(program.module(), Block(8))


def _inferring() -> nn.Module:
    with torch.inference_mode():
        return nn.Sequential(Block(8), nn.BatchNorm1d(8).eval())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (Adjacent, lambda: (torch.randn(6, 8), torch.eye(6).to_sparse())),
        (Ragged, lambda: (torch.randn(3, 8), torch.randn(5, 8))),
        (_exported, lambda: (torch.randn(3, 8),)),
        (_inferring, lambda: (torch.randn(3, 8),)),
        (lambda: Block(8), lambda: (torch.randn(0, 5, 8),)),
    ],
    ids=["sparse", "nested", "exported", "inference_parameters", "empty_batch"],
)
def test_unusual_tensors_and_modules_are_examined(build: Any, inputs: Any) -> None:
    report = nw.check(build(), inputs())
    assert report.norms
    assert all(n.spec is not None for n in report.norms)


class Squash(nn.Module):
    """Bounded, but it grows with the input: a capsule's squash, and a direction softened by one (EGNN)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Tensor:
        u = self.linear(x)
        square = u.square().sum(-1, keepdim=True)
        if self.how == "capsule":
            return square / (1 + square) * u / (square + 1e-8).sqrt()
        return u / ((square + 1e-8).sqrt() + 1)


@pytest.mark.parametrize("how", ["capsule", "softened"])
def test_a_squash_is_no_norm(how: str) -> None:
    assert nw.map(Squash(how).eval(), torch.randn(4, 8)).norms == ()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_norms_inside_a_script_count_as_executed() -> None:
    report = nw.map(nn.Sequential(torch.jit.script(Block()), torch.jit.script(Block())).eval(), torch.randn(2, 5, 16))
    assert len(report.norms) == 2
    assert report.not_executed == ()


def test_a_lazy_model_is_refused_in_one_sentence() -> None:
    for verb in (nw.map, nw.check):
        with pytest.raises(TraceError, match="not initialized"):
            verb(nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4)), torch.randn(2, 3))


class Recurrence(nn.Module):
    """Every step reads the input, so that each add seems to reach back to the start."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for t in range(x.size(1)):
            state = torch.tanh(self.norm(self.linear(state) + x[:, t])) * 0.5 + state * 0.5
        return state


@pytest.mark.slow
def test_a_long_recurrence_costs_no_square_of_its_length() -> None:
    def seconds(steps: int) -> float:
        started = time.process_time()
        nw.map(Recurrence().eval(), torch.randn(1, steps, 8))
        return time.process_time() - started

    seconds(20)
    assert seconds(2000) < 12 * seconds(400) + 1.0  # 5 times the length; 20 to 25 times the time when quadratic


def test_a_meta_model_takes_meta_inputs() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(Block(), Block()), torch.randn(2, 5, 16)
    assert [str(s.kind) for s in nw.map(model, x).placement.stacks] == ["pre"]


class Writing(nn.Module):
    """Changes what it was given: adds to its input, takes a key out of a dict, appends to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(8), Block(8))

    def forward(self, x: Tensor, extra: dict[str, Any]) -> Tensor:
        x += 1
        extra["seen"].append(extra.pop("scale"))
        return self.blocks(x * extra["seen"][-1])


def test_inputs_that_a_forward_changes_are_as_they_were() -> None:
    x, seen = torch.zeros(2, 5, 8), []
    extra = {"scale": 2.0, "seen": seen}
    report = nw.check(Writing(), (x, extra))
    assert len(report.profile) == 2
    assert torch.equal(x, torch.zeros(2, 5, 8))
    assert (extra, seen) == ({"scale": 2.0, "seen": []}, [])


class Registering(nn.Module):
    """Registers a buffer that is not saved and a hook with keywords when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("mask", torch.ones(8), persistent=False)
        self.norm.register_forward_hook(lambda module, args, kwargs, output: None, with_kwargs=True)
        return self.norm(x) * self.mask


def test_what_a_forward_registers_is_forgotten() -> None:
    model = Registering()
    nw.check(model, torch.randn(2, 8))
    assert model._non_persistent_buffers_set == set()
    assert (dict(model._buffers), dict(model.norm._forward_hooks)) == ({}, {})
    assert dict(model.norm._forward_hooks_with_kwargs) == {}


class InPlace(nn.Module):
    """Adds to its stream in place, or not."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.blocks, self.in_place = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), in_place
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        for block in self.blocks:
            branch = torch.tanh(block(x.clone()))
            if self.in_place:
                x += branch
            else:
                x = x + branch
        return self.norm(x)


def test_a_stream_written_in_place_has_the_gradients_of_one_that_is_not() -> None:
    plain, written = InPlace(in_place=False), InPlace(in_place=True)
    written.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 8)
    expected = [row.grad_rms for row in nw.check(plain, x).profile]
    assert len(set(expected)) == 3
    assert [row.grad_rms for row in nw.check(written, x).profile] == pytest.approx(expected)


def test_a_check_within_inference_mode_says_what_it_says_outside() -> None:
    model, x = nn.Sequential(Block(8), Block(8)), torch.randn(2, 5, 8)
    outside = nw.check(model, x)
    with torch.inference_mode():
        inside = nw.check(model, x.clone())
        assert torch.is_inference_mode_enabled()
    assert inside.profile == outside.profile
    assert all(row.grad_rms for row in inside.profile)
    assert (inside.findings, inside.not_checked) == (outside.findings, outside.not_checked)


class HandWritten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_a_default_device_changes_nothing() -> None:
    model, x = nn.Sequential(Block(8), HandWritten()), torch.randn(2, 5, 8)
    expected = nw.check(model, x)
    with torch.device("meta"):
        report = nw.check(model, x)
    assert (report.norms, report.profile) == (expected.norms, expected.profile)
    assert all(str(n.evidence) == "verified" for n in report.norms)


def test_a_replay_runs_on_the_device_of_its_data() -> None:
    recording = trace(target(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(2, 8)))
    replayer = Replayer(recording, nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    norm = recording.graph.ops[-1]
    data = torch.empty(2, 8, dtype=torch.float64, device="meta")  # stands for any device that the model is not on
    assert replayer(norm.outputs[0], {norm.inputs[0]: data}).device == data.device


def test_statistics_of_a_number_are_no_norm() -> None:
    class Scalar(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            mean = x.mean()
            return x, mean.norm(dim=0), torch.linalg.vector_norm(mean, dim=-1), mean.var(0, correction=0), mean.sum(0)

    report = nw.check(nn.Sequential(nn.LayerNorm(8), Scalar()), torch.randn(2, 8))
    assert [n.path for n in report.norms] == ["0"]


@torch.library.custom_op("normwise_tests::layer_norm", mutates_args=())
def foreign_layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, None, eps)


@torch.library.custom_op("normwise_tests::mul", mutates_args=())
def foreign_mul(x: Tensor) -> Tensor:
    return x * 2


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return foreign_mul(foreign_layer_norm(x, self.weight, 1e-5))


def test_a_foreign_op_with_the_name_of_one_of_torchs_is_judged_by_what_it_does() -> None:
    (site,) = nw.map(nn.Sequential(nn.Linear(8, 8), Foreign()), torch.randn(2, 5, 8)).norms
    assert (site.path, str(site.evidence)) == ("1", "probed")
    assert site.spec is not None
    assert str(site.spec.kind) == "layer"


class Picky(nn.Module):
    """Works outside torch and refuses large numbers by an error of its own."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 8:
            raise KeyError("too large")
        return torch.from_numpy(x.numpy() / np.sqrt((x.numpy() ** 2).mean(-1, keepdims=True)))


def test_a_module_that_refuses_the_probes_numbers_is_left_out() -> None:
    assert nw.map(nn.Sequential(nn.Linear(8, 8), Picky()), torch.randn(2, 5, 8)).norms == ()


class Moded(nn.Module):
    """A norm or a mere scale, by an attribute that its representation does not show."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.ones(8)), norm

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (8,), self.weight) if self.norm else x * self.weight


def test_idle_modules_of_one_class_are_told_apart() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.scale, self.rms = nn.Linear(8, 8), Moded(norm=False), Moded(norm=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    assert nw.map(Idle(), torch.randn(2, 8)).not_executed == ("rms",)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.eye(8).to_sparse(),
        lambda: torch.eye(8).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
    ],
    ids=["coo", "csr", "quantized", "conjugated"],
)
def test_a_buffer_of_any_layout_may_be_there(build: Any) -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    model.register_buffer("held", build())
    assert nw.check(model, torch.randn(2, 8)).unchanged


class Setting(nn.Module):
    """Sets flags of the process when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = True
        return self.norm(x)


def test_flags_that_a_forward_sets_are_as_they_were() -> None:
    def flags() -> tuple[Any, ...]:
        return (
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
        )

    before = flags()
    nw.check(Setting(), torch.randn(2, 8))
    assert flags() == before == ("highest", False, False, False)
