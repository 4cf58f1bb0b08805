"""What the sweep over architectures asks of a check: silence, no harm, no rule that breaks, and what it costs.

Every model is healthy: random weights, one forward that works, evidence that is in order. It is checked as the
command line loads it, as a user's own object, with every piece of evidence a careful user could give, and with an
exception or Ctrl-C thrown into the middle of a run.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import random
import time
import zlib
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

__all__ = ["check_all"]


def check_all(target: Any) -> dict[str, Any]:
    """Return the findings above info by kind of check, rules that broke, passes, seconds, and what was left changed."""
    from normwise.targets import Weights

    given = dataclasses.replace(target, weights=Weights.GIVEN)
    record: dict[str, Any] = {"loud": [], "broken_rules": [], "changed": [], "passes": 0}
    calls = 0
    for name, each in (("as loaded", target), ("as given", given), ("with evidence", with_evidence(given))):
        before, started = state(each), time.perf_counter()
        counter = _Stopper(None)
        with counter:
            report = _check(each)
        calls = max(calls, counter.calls)
        record[f"{name} seconds"] = round(time.perf_counter() - started, 2)
        record["passes"] = max(record["passes"], report.cost.forward_passes + report.cost.backward_passes)
        record["loud"] += [f"{name}: {f.code} {f.severity} {f.path}: {f.message}" for f in _loud(report)]
        record["broken_rules"] += [f"{name}: {n.code} {n.why}" for n in report.not_checked if "please report" in n.why]
        if state(each) != before or report.unchanged is False:
            record["changed"].append(name)
    for error in (RuntimeError("injected"), KeyboardInterrupt()):
        each, kind = with_evidence(given), type(error).__name__
        before = state(each)
        stop = _Stopper(error, at=1 + zlib.crc32(f"{target.name}{kind}".encode()) % max(calls, 1))
        try:
            with stop:
                _check(each)
        except (Exception, KeyboardInterrupt):
            pass
        if state(each) != before:
            record["changed"].append(f"after {kind} at call {stop.calls}")
    return record


def _check(target: Any) -> Any:
    from normwise.checkup import check

    return check(target)


def _loud(report: Any) -> list[Any]:
    return [f for f in report.findings if str(f.severity) != "info"]


def with_evidence(target: Any) -> Any:
    """Return the target with all the evidence of a careful user: every piece of it is in order."""
    model = target.model
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-4)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=100)
    return dataclasses.replace(
        target,
        optimizer=optimizer,
        scheduler=warmup,
        checkpoint={name: tensor.clone() for name, tensor in model.state_dict().items()},
        reference=copy.deepcopy(model),
        config=getattr(model, "config", None),
        train_step=_train_step,
        eval_fn=_evaluate,
    )


def _train_step(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    from normwise.graph.capture import tensors_in

    model.train()
    made = [t for t in tensors_in(model(*args, **kwargs)) if t.requires_grad and t.is_floating_point()]
    if made:
        torch.stack([t.float().square().mean() for t in made]).sum().backward()


def _evaluate(model: nn.Module, batches: Any) -> None:
    model.eval()
    with torch.no_grad():
        for batch in batches:
            model(batch)


class _Stopper:
    """Counts the calls of modules, and raises at one of them."""

    def __init__(self, error: BaseException | None, at: int = 0) -> None:
        self.error, self.at, self.calls = error, at, 0

    def __enter__(self) -> None:
        self.handle = register_module_forward_hook(self._called)

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _called(self, *_: object) -> None:
        self.calls += 1
        if self.error is not None and self.calls == self.at:
            raise self.error


def state(target: Any) -> str:
    """Return a hash of all that a check might leave changed."""
    model, optimizer = target.model, target.optimizer
    seen = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        seen.update(f"{name}{id(tensor)}{tensor.requires_grad}{tensor.grad is None}".encode())
        seen.update(content)
    for path, module in model.named_modules():
        hooks = [len(getattr(module, n)) for n in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
        seen.update(f"{path}{module.training}{hooks}{sorted(vars(module))}".encode())
    if optimizer is not None:
        seen.update(repr([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]).encode())
        seen.update(f"{len(optimizer.state)}".encode())
    seen.update(repr((torch.get_rng_state().tolist(), random.getstate(), torch.is_grad_enabled())).encode())
    seen.update(f"{torch.get_default_dtype()}{torch.backends.mha.get_fastpath_enabled()}".encode())
    return seen.hexdigest()
