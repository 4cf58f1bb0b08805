"""Whatever is thrown into the middle of a check, at whatever call, everything stays as it was found.

`make zoo` does the same to the architectures of transformers.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import normwise as nw
from normwise.graph.capture import tensors_in
from normwise.targets import Target, Weights

from .corpus_blocks import BLOCKS
from .states import assert_same, state

# one of each kind: post-norm, nesting, writes to the stream, caches, running statistics, torch's own layers
NAMES = (
    "pre_in_place_on_the_stream", "pre_cached", "pre_checkpointed", "post_batch_norm", "reversible",
    "torch_encoder_post", "convnext",
)  # fmt: skip
# placements and modes of the same kinds
MORE = ("pre_dropout", "pre_mixture_of_experts", "sandwich", "torch_transformer_pre", "resnet_v1_train")
ERRORS = [RuntimeError("injected"), KeyboardInterrupt()]
PLACES = 1  # calls at which each error is thrown, drawn anew for each architecture


def with_evidence(target: Target) -> Target:
    """Give all the evidence of a careful user; the optimizer and its schedule have taken a step."""
    model = target.model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4) if trained else None
    first = next(iter(tensors_in((target.args, dict(target.kwargs)))), None)
    return replace(
        target,
        weights=Weights.GIVEN,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=50) if optimizer else None,
        checkpoint={name: tensor.clone() for name, tensor in model.state_dict().items()},
        reference=copy.deepcopy(model),
        online=copy.deepcopy(model),
        config=getattr(model, "config", {"layer_norm_eps": 1e-5}),
        train_step=step(optimizer),
        eval_fn=evaluate,
        loader=[target.args, target.args] if target.args and not target.kwargs and first is not None else None,
        inputs_other_rank=target.args or dict(target.kwargs),
    )


def step(optimizer: torch.optim.Optimizer | None) -> Callable[..., None]:
    def train(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        model.train()
        made = [t for t in tensors_in(model(*args, **kwargs)) if t.requires_grad and t.is_floating_point()]
        if made and optimizer is not None:
            torch.stack([t.float().square().mean() for t in made]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def evaluate(model: nn.Module, batches: Any) -> None:
    model.eval()
    with torch.no_grad():
        for batch in batches:
            model(batch)


@contextmanager
def thrown(error: BaseException | None, at: int = 0) -> Iterator[list[int]]:
    """Raise at one call of any module; yields a list whose only item counts the calls."""
    calls = [0]

    def called(*_: Any) -> None:
        calls[0] += 1
        if error is not None and calls[0] == at:
            raise error

    handle = register_module_forward_hook(called)
    try:
        yield calls
    finally:
        handle.remove()


def everything(target: Target) -> tuple[Any, ...]:
    """Return the states of all models of a target, and copies of what its optimizer holds."""
    models = [m for m in (target.model, target.reference, target.online) if m is not None]
    held = [] if target.optimizer is None else [copy.deepcopy(target.optimizer.state_dict())]
    given = [t.clone() for t in tensors_in((target.args, dict(target.kwargs)))]
    schedule = None if target.scheduler is None else dict(target.scheduler.state_dict())
    return [state(m) for m in models], repr((held, schedule)), given


def same(before: tuple[Any, ...], target: Target) -> None:
    after = everything(target)
    for old, new in zip(before[0], after[0], strict=True):
        assert_same(old, new)
    assert before[1] == after[1]
    assert all(torch.equal(a, b) for a, b in zip(before[2], after[2], strict=True))


def left_alone(target: Target, places: int) -> None:
    """Check, then interrupt as many checks for each kind of error, and compare after each."""
    before = everything(target)
    with thrown(None) as calls:
        nw.check(target)
    same(before, target)
    draw = random.Random(zlib.crc32(target.name.encode()))
    for error in ERRORS:
        for _ in range(places):
            at = draw.randint(1, max(1, calls[0]))
            try:
                with thrown(error, at):
                    nw.check(target)
            except (Exception, KeyboardInterrupt) as stop:
                assert "injected" in str(stop) or isinstance(stop, KeyboardInterrupt)  # noqa: PT017
            same(before, target)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_an_interrupted_check_leaves_no_trace(name: str) -> None:
    case = next(case for case in BLOCKS if case.name == name)
    torch.manual_seed(0)
    model = case.build()
    inputs: tuple[Tensor, ...] = tuple(case.inputs())
    left_alone(with_evidence(Target(model=model, args=inputs, name=case.name)), PLACES)
