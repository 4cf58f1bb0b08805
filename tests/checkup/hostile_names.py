"""Twenty-five names that attack whoever shows them, a model whose modules are called so, and reports full of one."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

import normwise as nw
from normwise.checkup.finding import NotChecked, Suppressed, Unused
from normwise.checkup.report import Report
from normwise.facts.records import Break

__all__ = ["HARMLESS", "NAMES", "checked", "filled"]

HARMLESS = "plain_name"

# a name of a module may hold anything but a dot
NAMES = {
    "script": "<script>alert(1)</script>",
    "image": "<img src=x onerror=alert(1)>",
    "double quote": '" onmouseover="alert(1)" x="',
    "single quote": "' autofocus onfocus=alert(1) '",
    "references": "&lt;script&gt;&#60;b&#62;&amp;",
    "rich markup": "[red]x[/red][link=file:///etc/passwd]y[/link]:smile:",
    "clears the screen": "\x1b[2J\x1b[1;1H\x1b[31m",
    "sets the title": "\x1b]0;owned\x07\x1b]8;;x\x07",
    "C1 controls": "\x9b31m\x9d0;owned\x9c\x85\x90",
    "reading direction": "\u202egnp\u202c\u2066x\u2069\u200f",
    "zero width": "a\u200bb\u200dc\ufeffd\u2060e\U000e0041",
    "line ends": "a\r\nb\nc\u2028d\u2029e\x0b\x0c",
    "workflow command": "::error::owned\n::set-output name=x::y\n##[error]owned##vso[task]",
    "end of CDATA": "]]><failure/><![CDATA[",
    "end of a comment": "--><!-- x --!><?xml?>",
    "template": "{{7*7}}{% raw %}${7*7}#{7*7}<%= 7*7 %>",
    "cells of a table": "a|b\\|c | --- |",
    "code and emphasis": "`` ` ```x``` *b* __c__ ~~d~~ $e$ \\`",
    "links": "[a](https://x/y) ![b](https://x/y) <https://x/y> https://x/y a@b @team #12",
    "blocks": "# heading\n- item\n> quote\n1) item\n===\n```\n    code",
    "a table and a comment": "\n\n| a | b |\n|---|---|\n<!-- x -->",
    "formulas of a sheet": "=cmd|' /C calc'!A0",
    "percent": "%0A%0D%25%3A::error::x%00",
    "surrogates and NUL": "\ud800x\udfff\x00\x7f\ufffe\uffff",
    "very long": "x" * 10_000,
}  # fmt: skip
assert len(NAMES) == 25


class Block(nn.Module):
    """A pre-norm branch whose norm has the name, and an eps that drowns its variance."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.mix = name, nn.Linear(8, 8)
        self.add_module(name, nn.LayerNorm(8, eps=100.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self._modules[self.name](x))  # pyright: ignore[reportOptionalCall]


class Net(nn.Module):
    """Three blocks inside a module of the name, without a last norm; one norm is never reached."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.ModuleList(Block(name) for _ in range(3)))
        self.add_module(f"{name} unused", nn.LayerNorm(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self._modules[self.name]:  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
            x = block(x)
        return x


@cache
def checked(name: str) -> Report:
    """Return what ``nw.check`` says of a model whose modules are called so."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nw.check(Net(name).eval(), torch.randn(2, 5, 8))


@cache
def filled(name: str) -> Report:
    """Return that report with the name also in everything else that a model, a file or an exception can say."""
    report = checked(name)
    first = replace(
        report.findings[0], message=name, fix=name,
        evidence={"metric": name, "value": name, name: name, "list": [name]},
        counterfactual={"change": name, "metric": name, "before": name, "after": 1.0, name: name},
    )  # fmt: skip
    return replace(
        report, target=name, inputs="given", notes=(*report.notes, name), call=f"nw.check({name})",
        versions={**report.versions, name: name}, findings=(first, *report.findings[1:]),
        breaks=(Break(path=name, source=name, what=name),), listed_apart=report.norms[:1], not_executed=(name,),
        norms=tuple(replace(norm, class_name=name, note=name) for norm in report.norms),
        not_checked=(NotChecked(code="AXS001", name=name, why=name), *report.not_checked[1:]),
        suppressed=(Suppressed(finding=first, by="ignore", where=name, reason=name),),
        unused=(Unused(code="NUM001", pattern=name, by="configuration", where=name, reason=name),),
    )  # fmt: skip
