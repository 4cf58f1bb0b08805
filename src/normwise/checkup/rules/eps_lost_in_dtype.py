"""An eps that vanishes in the dtype in which it is added.

## What it finds
A norm written by hand whose eps is added (or clamped to) in a dtype that rounds it away, so that a row of zeros comes
out as NaN or infinity. The norm is run by itself on a row of zeros, in the dtypes it really has. The number in a
configuration is no evidence: one in seven of the eps defaults in transformers is 1e-12 and sound, because it is added
in float32.

## Why it matters
The smallest positive float16 is 6e-8: an eps of 1e-12, or the default of `F.normalize`, is 0 there, and a row of zeros
becomes 0/0. Such rows are common: padding embeddings, dead channels, masked positions. One of them makes the loss NaN.

## How to fix it
Add eps in float32 (take the statistics there), or use an eps that the dtype holds: at least 1e-5 in float16.

## Sources
Questions 5, 41, 59 and 61. https://github.com/pytorch/pytorch/issues/41527 (NaN for constant rows with eps 1e-12 in
half precision); https://github.com/deepspeedai/DeepSpeed/issues/581 (the same in a fused kernel).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from normwise.checkup.finding import Basis, Finding, Severity
from normwise.checkup.wording import counted
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.rows import alike
from normwise.facts.sites import Site
from normwise.targets import Target

CODE = "NUM003"
SEVERITY = Severity.WARNING


def check(facts: Facts) -> Iterator[Finding]:
    """Report every norm with an eps that turns a row of zeros into NaN all the same."""
    guarded = [s for s in facts.sites if not s.row.native and s.calls[0].guarded_value >= 0 and _eps(s) > 0]
    lost: dict[tuple[str, float], list[Site]] = {}
    unknown: NotKnown | None = None
    for group in alike(guarded, facts.recording):
        call = group[0].calls[0]
        try:
            finite = facts.rows.constant(call, 0.0).forward_finite
        except NotKnown as why:
            unknown = why
            continue
        if not finite:
            lost.setdefault((facts.graph.values[call.guarded_value].dtype, _eps(group[0])), []).extend(group)
    for (dtype, eps), sites in lost.items():
        yield _finding(dtype, eps, tuple(s.row.path for s in sites))
    if unknown is not None and not lost:
        raise unknown


def _eps(site: Site) -> float:
    return (site.row.spec.eps or 0.0) if site.row.spec is not None else 0.0


def _finding(dtype: str, eps: float, paths: tuple[str, ...]) -> Finding:
    numbers: Any = torch.finfo(getattr(torch, dtype))
    rounded = torch.tensor(eps, dtype=torch.float64).to(getattr(torch, dtype)).item()
    return Finding(
        path=paths[0],
        paths=paths,
        severity=SEVERITY,
        basis=Basis.PROOF,
        message=f"{counted(len(paths), 'norm')}: eps {eps:.0e} is {rounded:g} in {dtype}, a row of zeros is not finite",
        evidence={
            "norms": len(paths),
            "eps": eps,
            "dtype": dtype,
            "eps_in_dtype": rounded,
            "smallest_positive": numbers.smallest_normal * numbers.eps,
            "zero_row": "not finite",
        },
        fix=f"Add eps in float32 (x.float() before the statistics), or use at least {_enough(dtype):.0e} in {dtype}.",
    )


def _enough(dtype: str) -> float:
    """Return an eps whose reciprocal root stays in range: 1e-5 in float16, 1e-6 where there is float32's range."""
    return 1e-5 if dtype == "float16" else 1e-6


class _Cosine(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.embed, self.head, self.eps = nn.Embedding(5, 8, padding_idx=0), nn.Linear(8, 3), eps

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(F.normalize(self.embed(ids), dim=-1, eps=self.eps))


def _target(eps: float) -> Target:
    return Target(model=_Cosine(eps).half().eval(), args=(torch.tensor([[1, 2, 0]]),))


def bad() -> Target:
    """Return a float16 model that normalizes padding with the default eps of ``F.normalize``."""
    return _target(1e-12)


def good() -> Target:
    """Return the same model with an eps that float16 holds."""
    return _target(1e-3)
