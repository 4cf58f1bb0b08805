"""Trials run the user's code, see what it does, and leave nothing of it behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.targets import target


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def facts(model: nn.Module, **evidence: Any) -> Facts:
    return Facts(target(model, torch.randn(8, 4), **evidence))


def bits(*things: Any) -> list[torch.Tensor]:
    """Every tensor of modules and optimizers, copied."""
    found: list[torch.Tensor] = []
    for thing in things:
        if isinstance(thing, nn.Module):
            found += [t.detach().clone() for t in (*thing.parameters(), *thing.buffers())]
            found += [p.grad.clone() for p in thing.parameters() if p.grad is not None]
        elif isinstance(thing, torch.optim.Optimizer):
            found += [v.clone() for s in thing.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def nothing() -> None:
    """End as it should."""


def interrupt() -> None:
    raise KeyboardInterrupt


def leave() -> None:
    raise SystemExit(3)


def fail() -> None:
    raise ValueError("as planned")


@pytest.mark.parametrize("end", [nothing, interrupt, leave, fail])
def test_a_training_step_leaves_no_trace_however_it_ends(end: Callable[[], None]) -> None:
    model, other = net(), net()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    others = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    seen: list[float] = []
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    other(torch.randn(8, 4)).sum().backward()

    def step(m: nn.Module, x: torch.Tensor) -> None:
        m.eval()
        m.register_buffer("extra", torch.ones(1))
        loss = (m.train()(x) - other.eval()(x)).square().mean() + other.train()(x).mean()
        loss.backward()
        optimizer.step()
        others.step()
        schedule.step()
        seen.append(loss.item())
        x.zero_()
        with torch.no_grad():
            next(m.parameters()).data = torch.zeros(6, 4)
        torch.manual_seed(1)
        end()

    before = bits(model, other, optimizer, others)
    rates, state, random = optimizer.param_groups[0]["lr"], schedule.state_dict(), torch.get_rng_state()
    known = facts(model, train_step=step, optimizer=optimizer)
    inputs = known.target.args[0].clone()
    random = torch.get_rng_state()
    if end is interrupt:
        with pytest.raises(KeyboardInterrupt):
            _ = known.training_step
    else:
        trial = known.training_step
        assert (trial.forwards, trial.backwards, trial.steps) == (1, 1, 2)
        assert (trial.raised is None) == (end is nothing)
    assert same(bits(model, other, optimizer, others), before)
    assert not hasattr(model, "extra")
    assert optimizer.param_groups[0]["lr"] == rates
    assert schedule.state_dict() == state
    assert seen == []
    assert other.training
    assert model.training
    assert len(others.state) == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(known.target.args[0], inputs)


def test_another_optimizer_and_model_that_no_name_leads_to_are_put_back_too() -> None:
    model = net()
    hidden = [net()]
    optimizers = {"of": torch.optim.Adam(hidden[0].parameters(), 0.1)}

    class Held:
        def __call__(self, m: nn.Module, x: torch.Tensor) -> None:
            (m(x) + hidden[0](x)).sum().backward()
            optimizers["of"].step()

    before = bits(hidden[0])
    assert facts(model, train_step=Held()).training_step.steps == 1
    assert same(bits(hidden[0]), before)
    assert len(optimizers["of"].state) == 0


def test_recomputation_is_told_from_a_second_forward() -> None:
    model = net()

    def step(m: nn.Sequential, x: torch.Tensor) -> None:
        hidden = checkpoint(m[:2], m[0](x) @ m[0].get_parameter("weight"), use_reentrant=False)
        assert isinstance(hidden, torch.Tensor)
        hidden.sum().backward()

    calls = facts(model, train_step=step).training_step.of("1")
    assert [(c.recomputed, c.updated) for c in calls] == [(False, True), (True, True)]


def test_buffers_that_something_else_writes_between_two_calls_are_noticed() -> None:
    model = net()

    def step(m: nn.Sequential, x: torch.Tensor) -> None:
        m(x)
        m[1].get_buffer("running_mean").copy_(torch.zeros(6))
        m(x)

    assert [c.rewritten for c in facts(model, train_step=step).training_step.of("1")] == [False, True]


def test_an_evaluation_gets_the_first_batches_of_the_loader() -> None:
    loader = DataLoader(TensorDataset(torch.randn(21, 4), torch.zeros(21)), batch_size=8)
    sizes = []

    def evaluate(model: nn.Module, batches: list[torch.Tensor]) -> list[int]:
        sizes.append(len(batches))
        return [len(model.eval()(b)) for b in batches]

    known = facts(net(), eval_fn=evaluate, loader=loader)
    assert known.evaluation.output == [8, 8]
    assert known.forward_passes == 2
    assert not any(e.training or e.updated for e in known.evaluation.norms)


def test_what_the_code_prints_stays_out_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    _ = facts(net(), eval_fn=lambda model, batches: print("accuracy")).evaluation
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("items", "drop", "last"), [(33, False, 1), (33, True, 16), (32, False, 16), (5, False, 5)])
def test_the_last_batch_of_a_data_loader_follows_from_its_lengths(items: int, drop: bool, last: int) -> None:
    loader = DataLoader(TensorDataset(torch.randn(items, 4)), batch_size=16, drop_last=drop, shuffle=True)
    state = torch.get_rng_state()
    assert facts(net(), loader=loader).batches.last == last
    del state


def test_the_last_batch_of_a_list_is_read() -> None:
    batches = [torch.zeros(4, 4)] * 100 + [torch.zeros(1, 4)]
    read = facts(net(), loader=batches).batches
    assert (read.usual, read.last) == (4, 1)


def test_an_endless_loader_is_not_read_to_its_end() -> None:
    class Endless:
        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                yield torch.zeros(4, 4)

    assert facts(net(), loader=Endless()).batches.last is None


def test_batches_that_are_dicts_have_sizes_but_no_arguments() -> None:
    read = facts(net(), loader=[{"x": torch.zeros(4, 4)}, {"x": torch.zeros(1, 4)}]).batches
    assert (read.usual, read.last) == (4, 1)
    with pytest.raises(NotKnown, match="neither tuples"):
        _ = read.arguments


def test_a_mixed_batch_comes_from_all_over_a_sorted_data_set() -> None:
    data = torch.arange(640.0).reshape(-1, 1)
    for loader in (DataLoader(TensorDataset(data), batch_size=8), [(part,) for part in data.split(8)]):
        mixed = facts(net(), loader=loader).batches.mixed
        assert mixed is not None
        assert (len(mixed[0]), float(mixed[0].max()) > 500) == (64, True)
    ragged = [(torch.zeros(2, n),) for n in (3, 5)]
    assert facts(net(), loader=ragged).batches.mixed is None


def raising() -> Iterator[torch.Tensor]:
    yield torch.zeros(4, 4)
    raise OSError("no such disk")


class Raising:
    """A loader that fails in the middle."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return raising()


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (raising(), "only once"),
        (Raising(), "no such disk"),
        ([], "empty"),
        ([3, 4], "no tensors"),
        (7, "cannot be iterated"),
        (None, "needs the data"),
    ],
)
def test_a_loader_that_is_of_no_use_is_not_known(loader: Any, why: str) -> None:
    with pytest.raises(NotKnown, match=why):
        _ = facts(net(), loader=loader).batches


def test_a_model_in_eval_mode_trains_in_train_mode() -> None:
    known = facts(net().eval(), train_step=lambda m, x: m(x).sum().backward())
    assert [e.updated for e in known.training_step.norms] == [False]
    assert [e.updated for e in known.trials.live_step.norms] == [True]
    assert not known.target.model.training


def test_the_guard_holds_for_a_copy_that_is_no_part_of_the_model() -> None:
    model = net()
    online = copy.deepcopy(model)
    known = facts(model, online=online)
    before = bits(online)
    trial = known.trials.forward(model=online, prepare=lambda m: m.train())
    assert trial.of("1")[0].updated
    assert same(bits(online), before)
