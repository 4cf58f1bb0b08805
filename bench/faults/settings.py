"""What a careful user gives to the check besides the model: all of it in order, until a fault is put into it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from bench.faults.architectures import build
from bench.faults.case import Case, Unfit
from normwise.facts.records import Placement
from normwise.graph.capture import tensors_in

__all__ = ["SETTINGS", "evaluate", "healthy", "loss_of", "optimizer_of", "train_step"]

RATE = 1e-3
DEEP = 24  # sublayers, as in PLC005
SAMPLES = 8  # of a batch from which statistics are taken, as BNS rules ask
STEPS = 25  # of the training that makes weights look trained


def healthy(architecture: str, setting: str, dtype: torch.dtype) -> Case:
    """Return a healthy case.

    Raises:
        Unfit: the setting is none for this architecture.
    """
    import normwise as nw

    model, args, kwargs = build(architecture)
    if setting not in ("plain", "fresh"):
        model.load_state_dict(_trained(architecture))
    report = nw.map(model, args or kwargs)
    case = Case(architecture, model, args, kwargs, report.norms, report.placement, dtype=dtype)
    if dtype != torch.float32:
        case.model.to(dtype)
        for module in case.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.float()  # as mixed precision keeps them
        case.args = tuple(_cast(value, dtype) for value in args)
        case.kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
    SETTINGS[setting](case)
    return case


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@lru_cache(maxsize=16)
def _trained(architecture: str) -> dict[str, torch.Tensor]:
    """Return the weights of a model that was trained for a moment; running statistics are those of the data."""
    import normwise as nw

    model, args, kwargs = build(architecture)
    case = Case(architecture, model, args, kwargs, nw.map(model, args or kwargs).norms, Placement())
    _spread(case)
    _train(case)
    _calibrate(case)
    return {name: tensor.clone() for name, tensor in case.model.state_dict().items()}


def _train(case: Case) -> None:
    """Fit random targets for a few steps: matrices no longer look drawn."""
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=3e-3, weight_decay=0.0)
    target: torch.Tensor | None = None
    for _ in range(STEPS):
        output = next(t for t in tensors_in(case.call()) if t.is_floating_point() and t.requires_grad)
        if target is None:
            target = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
        optimizer.zero_grad()
        (output.float() - target).square().mean().backward()
        optimizer.step()
    case.model.zero_grad()


def _spread(case: Case) -> None:
    """Move gains and shifts of norms from their initial values."""
    generator = torch.Generator().manual_seed(2)
    parameters = dict(case.model.named_parameters())
    moved = {path for s in case.norms for path in (s.weight_path, s.bias_path) if path in parameters}
    with torch.no_grad():
        for path in sorted(moved):
            parameter = parameters[path]
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def _calibrate(case: Case) -> None:
    """Take running statistics from the data."""
    kept = [m for m in case.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not kept:
        return
    momenta = [m.momentum for m in kept]
    for norm in kept:
        norm.reset_running_stats()
        norm.momentum = 0.5
        norm.train()
    generator = torch.Generator().manual_seed(5)

    def near(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value + 0.1 * torch.randn(value.shape, generator=generator) if floating else value

    with torch.no_grad():
        for _ in range(40):
            case.model(*map(near, case.args), **{name: near(value) for name, value in case.kwargs.items()})
    for norm, momentum in zip(kept, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def loss_of(output: Any) -> torch.Tensor:
    """Return the mean square of the floating outputs that have a gradient."""
    made = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    return torch.stack([t.float().square().mean() for t in made]).sum()


def train_step(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Run one forward and backward."""
    loss_of(model(*args, **kwargs)).backward()


class evaluate:
    """Evaluate batches in eval mode."""

    def __call__(self, model: nn.Module, batches: Any) -> torch.Tensor:
        """Return the mean square of the outputs."""
        was = model.training
        model.eval()
        with torch.no_grad():
            made = [next(iter(tensors_in(model(batch)))).float().square().mean() for batch in batches]
        model.train(was)
        return torch.stack(made).mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=RATE)


def _plain(case: Case) -> None:
    """Model and inputs."""


def _loaded(case: Case) -> None:
    """Trained weights in eval mode, with the checkpoint they came from and the configuration."""
    case.evidence["checkpoint"] = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    config = getattr(case.model, "config", None)
    if config is not None:
        case.evidence["config"] = config


def _referenced(case: Case) -> None:
    """Trained weights in eval mode, with a model known to be right."""
    case.evidence["reference"] = copy.deepcopy(case.model)


def _training(case: Case) -> None:
    """In the middle of training: train mode, an optimizer that has stepped, warm-up, a training step."""
    case.model.train()
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = optimizer_of(case.model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=100)
    case.evidence |= {"optimizer": optimizer, "scheduler": scheduler, "train_step": train_step}


class Stepping:
    """A training step that steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Run forward, backward and the optimizer."""
        self.optimizer.zero_grad()
        loss_of(model(*args, **kwargs)).backward()
        self.optimizer.step()


def _frozen(case: Case) -> None:
    """Training with batch norms that are kept in eval mode."""
    _training(case)
    for site in case.batch_norms():
        case.module(site.path).eval()


def _stepping(case: Case) -> None:
    """Training with a step of the optimizer, at a rate that bfloat16 can follow."""
    if any(str(s.kind) == "post" and s.sublayers >= DEEP for s in case.placement.stacks):
        raise Unfit("a deep post-norm stack wants the warm-up that this setting does without")
    _training(case)
    del case.evidence["scheduler"]
    for group in case.evidence["optimizer"].param_groups:
        group["lr"] = 2e-2  # five spacings of bfloat16 at 1
    case.evidence["train_step"] = Stepping(case.evidence["optimizer"])


def _batches(case: Case) -> None:
    """Trained weights, batches of the data and the function that evaluates them."""
    values = [*case.args, *(v for n, v in case.kwargs.items() if "mask" not in n)]
    if len(values) != 1:
        raise Unfit("batches are made for models of one input")
    data = values[0]
    if data.is_floating_point() and len(data) < SAMPLES:  # more of the same kind, near those there are
        more = data.repeat(SAMPLES // len(data), *[1] * (data.ndim - 1))
        data = more + 0.1 * torch.randn(more.shape, generator=torch.Generator().manual_seed(6))
    case.evidence["loader"] = [(data,), (data.flip(0),)]
    case.evidence["eval_fn"] = evaluate()


def _padded(case: Case) -> None:
    """The same samples with padding behind them, and their lengths."""
    name = case.tokens()[0]
    if len([v for v in (*case.args, *case.kwargs.values()) if isinstance(v, torch.Tensor)]) > 2 or name.isdigit():
        raise Unfit("padding is made for models of token ids and a mask")
    if "attention_mask" not in case.kwargs:
        raise Unfit("no attention mask among the inputs")
    ids = case.kwargs[name]
    padding = torch.full((len(ids), 4), int(getattr(case.model.config, "pad_token_id", 0) or 0))
    mask = case.kwargs["attention_mask"]
    longer = dict(case.kwargs)
    longer[name] = torch.cat([ids, padding], 1)
    longer["attention_mask"] = torch.cat([mask, torch.zeros_like(padding, dtype=mask.dtype)], 1)
    case.evidence |= {"padded_inputs": longer, "lengths": mask.sum(1)}


def _ranks(case: Case) -> None:
    """The state and the gradients of two processes that agree."""
    state = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    twin = copy.deepcopy(case.model)
    loss_of(case.call(twin)).backward()
    gradients = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    ranked = [{n: t.clone() for n, t in gradients.items()} for _ in range(2)]
    states = [{n: t.clone() for n, t in state.items()} for _ in range(2)]
    case.evidence["config"] = {"rank_states": states, "rank_gradients": ranked}


def _averaged(case: Case) -> None:
    """An averaged copy with statistics of its own, and the model that it was averaged from."""
    case.batch_norms()
    case.evidence["online"] = copy.deepcopy(case.model)
    with torch.no_grad():
        for site in case.batch_norms():
            case.model.get_parameter(str(site.weight_path)).mul_(1.01)


SETTINGS: dict[str, Callable[[Case], None]] = {
    "plain": _plain,
    "loaded": _loaded,
    "referenced": _referenced,
    "training": _training,
    "fresh": _training,
    "frozen": _frozen,
    "stepping": _stepping,
    "batches": _batches,
    "padded": _padded,
    "ranks": _ranks,
    "averaged": _averaged,
}


def target_of(case: Case) -> Any:
    """Return the case as the Target that the check takes."""
    from normwise import targets

    target = targets.target(case.model, case.inputs, **case.evidence)
    return dataclasses.replace(target, name=case.name)
