"""A page a study in two languages with its charts, and their index: docstrings, and the stored full runs.

A run is stored by ``normwise study NAME -o docs/studies/data/NAME.jsonl``; the pages are the same for the same rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from normwise import studies
from normwise._parts import page, page_title
from normwise.rendering import in_language
from normwise.rendering.plots import Chart, plot
from normwise.rendering.svg import standalone
from normwise.studies import Evidence, Verdict
from normwise.studies._trials import asked, seconds
from normwise.studies.reports import _view, markdown

__all__ = ["study_pages", "study_table"]

DATA = Path(__file__).parent / "studies" / "data"

_SUFFIXES = {"en": "", "zh": ".zh-CN"}
_INDEX = {
    "en": (
        "Studies",
        "What people say of normalization, measured on small trainings, with the theory beside it and a verdict:\n"
        "`normwise study NAME`, `nw.study(name)`. Written by `docs/generate.py` from the docstrings and from the runs\n"
        "that are stored in `docs/studies/data/`.",
        "| study | claim | verdict | run and cost |",
    ),
    "zh": (
        "研究",
        "人们关于归一化的说法，用小规模训练测量，旁边是理论，并给出结论：`normwise study NAME`，`nw.study(name)`。\n"
        "由 `docs/generate.py` 从文档字符串和 `docs/studies/data/` 中保存的运行写出。",
        "| 研究 | 主张 | 结论 | 运行与开销 |",
    ),
}
_TABLE = {"en": "| study | what it asks | verdicts |", "zh": "| 研究 | 问题 | 结论 |"}
_MISSING = {"en": "No full run is stored yet.", "zh": "尚未保存完整的运行。"}
_NO_VERDICT = {"en": "not run", "zh": "未运行"}
_FOUND = {"en": "[What was found](#what-was-found)", "zh": "[结果](#结果)"}


def study_pages(lang: str) -> dict[str, str]:
    """Return the pages of all studies, their charts and the index by the names of their files, in one language."""
    stored = {name: _stored(name) for name in studies.names()}
    files = {f"README{_SUFFIXES[lang]}.md": _index(stored, lang)}
    for name, evidence in stored.items():
        files[f"{name}{_SUFFIXES[lang]}.md"] = _page(name, evidence, lang)
        charts = [each for each in evidence.figures if isinstance(each, Chart)] if evidence else []
        for number, chart in enumerate(charts, 1):
            files[_file(name, number, lang)] = standalone(plot(chart, lang=lang))
    return files


def study_table(lang: str) -> str:
    """Return a row a study for the README: what it asks, and how often its claims were confirmed or not."""
    return "\n".join([_TABLE[lang], "|---|---|---|", *(_summary(name, lang) for name in studies.names())])


def _summary(name: str, lang: str) -> str:
    title = markdown.cell(page_title(studies.get(name), lang))
    verdicts = evidence.verdicts if (evidence := _stored(name)) else ()
    counts = Counter(_view.OUTCOMES[each.outcome] for each in verdicts)
    form = _view.said("{} {}", "{} 项{}", lang)
    words = [form.format(count, in_language(word, lang)) for word, count in sorted(counts.items())]
    found = _view.said(", ", "，", lang).join(words)
    return f"| [{name}](docs/studies/{name}{_SUFFIXES[lang]}.md) | {title} | {found or _NO_VERDICT[lang]} |"


def _stored(name: str) -> Evidence | None:
    path = DATA / f"{name}.jsonl"
    return replace(studies.show(path), ledger=None) if path.exists() else None


def _file(name: str, number: int, lang: str) -> str:
    return f"{name}-{number}{_SUFFIXES[lang]}.svg"


def _page(name: str, evidence: Evidence | None, lang: str) -> str:
    title, _, body = page(studies.get(name), lang).partition("\n")
    found = _results(name, evidence, lang) if evidence else f"{_MISSING[lang]}\n"
    lead = f"`normwise study {name}`" + (f" · {_FOUND[lang]}" if evidence else "")
    return f"{_twins(name)}\n\n# {title}\n\n{lead}\n\n{body.strip()}\n\n{found}"


def _results(name: str, evidence: Evidence, lang: str) -> str:
    def picture(number: int, chart: Chart) -> str:
        return f"![{markdown.line(in_language(chart.title, lang))}]({_file(name, number, lang)})"

    return markdown.results(evidence, lang, picture=picture)


def _index(stored: dict[str, Evidence | None], lang: str) -> str:
    title, intro, header = _INDEX[lang]
    rows = [row for name, evidence in stored.items() for row in _rows(name, evidence, lang)]
    return "\n".join([_twins("README"), "", f"# {title}", "", intro, "", header, "|---|---|---|---|", *rows, ""])


def _rows(name: str, evidence: Evidence | None, lang: str) -> list[str]:
    """Return a row a claim; the study and its cost stand in the first."""
    part = studies.get(name)
    study = f"[{name}]({name}{_SUFFIXES[lang]}.md): {markdown.cell(page_title(part, lang))}"
    cost = _view.about(evidence, lang) if evidence else _estimate(name, lang)
    verdicts = [_word(each, lang) for each in evidence.verdicts] if evidence else [_NO_VERDICT[lang]] * len(part.CLAIMS)
    claims = [markdown.cell(in_language(claim.text, lang)) for claim in part.CLAIMS]
    firsts = [(study, cost), *[("", "")] * (len(claims) - 1)]
    found = zip(firsts, claims, verdicts, strict=True)
    return [f"| {first} | {claim} | {word} | {last} |" for (first, last), claim, word in found]


def _word(verdict: Verdict, lang: str) -> str:
    return f"**{in_language(_view.OUTCOMES[verdict.outcome], lang)}**"


def _estimate(name: str, lang: str) -> str:
    part = studies.get(name)
    trials = asked(name, part, quick=False)
    cost = _view.cost(sum(seconds(part, each.params) for each in trials), lang)
    return _view.said(f"full set: {len(trials)} trials, about {cost}", f"完整集：{len(trials)} 个试验，约 {cost}", lang)


def _twins(stem: str) -> str:
    return f"[English]({stem}.md) | [简体中文]({stem}.zh-CN.md)"
