"""A study that nobody runs, with a claim for every outcome, and what it would have found."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

from normwise.rendering import both
from normwise.rendering.plots import Chart, Line
from normwise.studies import Claim, Evidence, Judgement, Outcome, Row, Rows, Table
from normwise.studies._evidence import Unrun

RATES = (1e-4, 1e-3, 1e-2)
DIGEST = "ab12" * 16


def _judge(outcome: Outcome, en: str, zh: str) -> Any:
    return lambda rows: Judgement(outcome, both(f"{en} {rows.where(rate=1e-3).mean('loss'):.3f}", f"{zh} 0"))


def _missing(rows: Rows) -> Judgement:
    return Judgement(Outcome.CONFIRMED, f"{rows.where(rate=7.0).mean('loss')}")


def _table(rows: Rows) -> Table:
    made = tuple(
        (kind, rate, rows.where(kind=kind, rate=rate).mean("loss")) for kind in ("pre", "post") for rate in RATES
    )
    return Table(
        title=both("Loss by rate", "各学习率的损失"),
        columns=(both("placement", "放置方式"), both("rate", "学习率"), both("loss, nats", "损失，nat")),
        rows=made,
        note=both("12 blocks | <b>", "12 个块 | <b>"),
    )


def _chart(rows: Rows) -> Chart:
    def line(kind: str, name: str) -> Line:
        found = [rows.where(kind=kind, rate=rate) for rate in RATES]
        low, high = zip(*(each.spread("loss") for each in found), strict=True)
        return Line(name=name, x=RATES, y=tuple(each.mean("loss") for each in found), low=low, high=high)

    return Chart(
        title=both("Loss against rate", "损失随学习率的变化"),
        x_label=both("rate", "学习率"),
        y_label=both("loss", "损失"),
        lines=(
            line("pre", both("pre, measured", "Pre，测量")),
            Line(name=both("told", "理论值"), x=RATES, y=(1.0, 1.5, 2.0), theory=True, like="pre, measured"),
            line("post", "post"),
        ),
        log_x=True,
        note=both("100 steps of Adam", "Adam 100 步"),
    )


def _unmade(rows: Rows) -> Table:
    rows.where(rate=7.0)
    raise AssertionError("its trials are missing")


def study() -> ModuleType:
    """Return its module."""
    part = ModuleType("normwise.studies.made_up")
    part.__doc__ = "Losses that were made up\n\n## Claim\nThat `a < b`.\n\n## Cost\nNone.\n"
    values: dict[str, Any] = {
        "ZH": "编造的损失\n\n## 主张\n`a < b`。\n\n## 开销\n无。\n",
        "VERSION": 3,
        "DATA": ("standard-library",),
        "SEEDS": 2,
        "CLAIMS": (
            Claim(both("Pre is fine.", "Pre 没问题。"), "Who, 2020", _judge(Outcome.CONFIRMED, "yes:", "是：")),
            Claim(both("Post is fine.", "Post 没问题。"), "Who, 2021", _judge(Outcome.REFUTED, "no:", "否：")),
            Claim(both("Both <i>are</i>.", "两者<i>都</i>是。"), "Who, 2022", _judge(Outcome.DEPENDS, "at:", "在：")),
            Claim(both("None is.", "都不是。"), "Who, 2023", _missing),
        ),
        "FIGURES": (_table, _chart, _unmade),
    }
    for name, value in values.items():
        setattr(part, name, value)
    return part


def _row(kind: str, rate: float, seed: int) -> Row:
    loss = math.inf if kind == "post" and rate == 1e-2 else 1.0 + 100 * rate + 0.25 * seed
    return Row(
        params={"kind": kind, "rate": rate, "seed": seed, "tags": ["a", "b"]},
        metrics={"loss": loss, "steps": 100, "curve": [loss, math.nan, -math.inf], "rate": 0.5 * rate},
        seconds=2.0,
        cpu_seconds=30.0,
        peak_bytes=123456789,
        conditions={
            "torch": "2.13.0" if seed else "2.14.1",
            "threads": 1,
            "processor": "Z80 <fast>",
            "printed": "noise",
        },
    )


def evidence(**changes: Any) -> Evidence:
    """Return what it would have found."""
    rows = Rows(_row(kind, rate, seed) for seed in (0, 1) for kind in ("pre", "post") for rate in RATES)
    unrun = (
        Unrun(params={"kind": "pre", "rate": 5.0, "seed": 0, "tags": []}, attempts=2, error="time limit of 3 s <kill>"),
        Unrun(params={"kind": "pre", "rate": 5.0, "seed": 1, "tags": []}),
    )
    given: dict[str, Any] = {
        "study": "made-up",
        "part": study(),
        "rows": rows,
        "unrun": unrun,
        "seeds": 2,
        "ledger": Path("normwise-studies/made-up.sqlite"),
        "data": {"standard-library": DIGEST},
    }
    return Evidence(**{**given, **changes})
