"""One self-contained page: the verdict of every claim, tables, charts with theory and spread, the study, conditions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from normwise.rendering import in_language
from normwise.rendering.cleaning import respelled
from normwise.rendering.pages import page_template
from normwise.rendering.plots import Chart, plot
from normwise.rendering.prose import prose
from normwise.studies._study import Table
from normwise.studies.reports import _view

if TYPE_CHECKING:
    from normwise.studies._evidence import Evidence

__all__ = ["render"]

SUFFIXES = (".html", ".htm")
BINARY = False


def render(evidence: Evidence, *, lang: str = "en") -> str:
    """Return what a study found as one HTML page.

    Args:
        evidence: what to show.
        lang: of the words, "en" or "zh".
    """
    made = page_template("normwise.studies.reports", "study.html.jinja").render(
        evidence=evidence,
        lang="zh-CN" if lang == "zh" else "en",
        say=partial(_view.said, lang=lang),
        title=_view.title(evidence, lang),
        about=_view.about(evidence, lang),
        counts=_view.counts(evidence, lang),
        verdicts=[
            {
                "tone": _view.TONES[each.outcome],
                "word": in_language(_view.OUTCOMES[each.outcome], lang),
                "claim": in_language(each.claim, lang),
                "says": in_language(each.says, lang),
                "source": in_language(each.source, lang),
            }
            for each in evidence.verdicts
        ],
        figures=[_figure(each, lang) for each in evidence.figures],
        short_conditions=_view.short_conditions(evidence, lang),
        unrun=_view.unrun(evidence, lang),
        page=prose(evidence.page(lang).partition("\n")[2]),
        conditions=_view.conditions(evidence, lang),
    )
    return respelled(made, "&#{};")


def _figure(figure: Table | Chart, lang: str) -> dict[str, Any]:
    words = {"title": in_language(figure.title, lang), "note": in_language(figure.note, lang)}
    if isinstance(figure, Chart):
        return {**words, "picture": plot(figure, lang=lang)}
    numbers = _view.numeric(figure)
    return {
        **words,
        "picture": None,
        "columns": [(n, in_language(each, lang)) for n, each in zip(numbers, figure.columns, strict=True)],
        "rows": [[(n, _view.cell(v, lang)) for n, v in zip(numbers, row, strict=True)] for row in figure.rows],
    }
