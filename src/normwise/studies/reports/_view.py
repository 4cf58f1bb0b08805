"""What all formats say of a study: its headline, what it cost, the conditions of its figures, what has no result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from normwise._parts import page_title
from normwise.rendering import both, in_language
from normwise.rendering.numbers import number
from normwise.rendering.plots import Chart
from normwise.studies._study import Outcome, Table

if TYPE_CHECKING:
    from normwise.studies._evidence import Evidence

__all__ = [
    "OUTCOMES",
    "TONES",
    "about",
    "axes",
    "cell",
    "command",
    "conditions",
    "cost",
    "counts",
    "numeric",
    "said",
    "short_conditions",
    "spelled",
    "title",
    "unrun",
]

OUTCOMES = {
    Outcome.CONFIRMED: both("confirmed", "证实"),
    Outcome.REFUTED: both("refuted", "推翻"),
    Outcome.DEPENDS: both("depends on", "视条件而定"),
    Outcome.OPEN: both("not concluded", "未下结论"),
}
TONES = {Outcome.CONFIRMED: "good", Outcome.REFUTED: "error", Outcome.DEPENDS: "warning", Outcome.OPEN: "plain"}

_CONDITIONS = {
    "normwise": "normwise",
    "torch": "torch",
    "python": "Python",
    "threads": both("threads", "线程数"),
    "system": both("system", "系统"),
    "processor": both("processor", "处理器"),
}
_IN_SHORT = ("torch", "threads", "processor")  # what a figure is captioned with, beside seeds and data
_NOT_SHOWN = frozenset({"printed"})  # what a failed trial printed is with its error
_SHORT_HASH = 12  # characters
_DIGITS = 4
_MINUTE = 60.0


def said(en: str, zh: str, lang: str) -> str:
    """Return a sentence in a language."""
    return zh if lang == "zh" else en


def title(evidence: Evidence, lang: str) -> str:
    """Return the first line of the study's page."""
    return page_title(evidence.part, lang)


def counts(evidence: Evidence, lang: str) -> list[tuple[int, str, str]]:
    """Return how many claims came out how: number, word, tone."""
    found = Counter(verdict.outcome for verdict in evidence.verdicts)
    return [(found[each], in_language(OUTCOMES[each], lang), TONES[each]) for each in Outcome if found[each]]


def about(evidence: Evidence, lang: str) -> str:
    """Return which set was run, with how many seeds, and how much of it."""
    done, total = len(evidence.rows), len(evidence.rows) + len(evidence.unrun)
    kind = said("quick set", "快速集", lang) if evidence.quick else said("full set", "完整集", lang)
    of = f"{done}" if done == total else said(f"{done} of {total}", f"{total} 个中的 {done}", lang)
    seeds = said(f"{evidence.seeds} seed{'s' * (evidence.seeds != 1)}", f"{evidence.seeds} 个种子", lang)
    trials = said(f"{of} trial{'s' * (total != 1)}", f"{of} 个试验", lang)
    return " · ".join((kind, seeds, trials, cost(evidence.cpu_seconds, lang)))


def cost(seconds: float, lang: str) -> str:
    """Spell processor time."""
    if seconds < _MINUTE:
        return said(f"{number(seconds)} CPU-seconds", f"{number(seconds)} CPU 秒", lang)
    return said(f"{number(seconds / _MINUTE)} CPU-minutes", f"{number(seconds / _MINUTE)} CPU 分钟", lang)


def command(evidence: Evidence) -> str:
    """Return the command that measures it again."""
    usual = 1 if evidence.quick else evidence.part.SEEDS
    seeds = f" --seeds {evidence.seeds}" if evidence.seeds != usual else ""
    return f"normwise study {evidence.study}{' --quick' * evidence.quick}{seeds}"


def conditions(evidence: Evidence, lang: str) -> list[tuple[str, str]]:
    """Return name and value of everything the figures depend on; what differed between trials has all its values."""
    rows = [(in_language(_CONDITIONS.get(name, name), lang), value) for name, value in _found(evidence).items()]
    read = said("data: ", "数据：", lang)
    data = [(f"{read}{name}", f"SHA-256 {digest}") for name, digest in evidence.data.items()]
    ledger = [(said("ledger", "账本", lang), str(evidence.ledger))] if evidence.ledger is not None else []
    return [
        (said("study", "研究", lang), f"{evidence.study}, {said('version', '版本', lang)} {evidence.part.VERSION}"),
        (said("seeds", "种子", lang), ", ".join(map(str, sorted(evidence.rows.distinct("seed")))) or "-"),
        *rows,
        *data,
        (said("again", "重现", lang), command(evidence)),
        *ledger,
    ]


def short_conditions(evidence: Evidence, lang: str) -> str:
    """Return the conditions in one line, for the caption of a figure."""
    seeds = len(evidence.rows.distinct("seed"))
    found = _found(evidence)
    words = {"torch": "torch {}", "threads": said("{} thread", "{} 线程", lang), "processor": "{}"}
    named = [words[name].format(found[name]) for name in _IN_SHORT if found.get(name)]
    data = [f"{name} {digest[:_SHORT_HASH]}" for name, digest in evidence.data.items()]
    counted = said(f"{seeds} seed{'s' * (seeds != 1)}", f"{seeds} 个种子", lang)
    return " · ".join([counted, *named, *data])


def _found(evidence: Evidence) -> dict[str, str]:
    values: dict[str, dict[str, None]] = {}
    for row in evidence.rows:
        for name, value in row.conditions.items():
            if name not in _NOT_SHOWN and value not in (None, ""):
                values.setdefault(name, {})[str(value)] = None
    return {name: "; ".join(each) for name, each in values.items()}


def unrun(evidence: Evidence, lang: str) -> list[tuple[str, str]]:
    """Return the parameters of every trial without a result, and why it has none."""
    not_started = said("not run yet", "尚未运行", lang)

    def why(error: str, attempts: int) -> str:
        tried = said(f"tried {attempts}×", f"尝试 {attempts} 次", lang)
        return f"{error} ({tried})" if error else not_started

    return [(spelled(each.params), why(each.error, each.attempts)) for each in evidence.unrun]


def spelled(params: Mapping[str, Any]) -> str:
    """Write the parameters of a trial in one line."""
    return ", ".join(f"{name} {value}" for name, value in params.items())


def cell(value: str | float | None, lang: str) -> str:
    """Write a cell of a table: whole numbers exactly, others with four digits."""
    if isinstance(value, str):
        return in_language(value, lang)
    if isinstance(value, bool):
        return said("yes" if value else "no", "是" if value else "否", lang)
    return str(value) if isinstance(value, int) else number(value, _DIGITS)


def numeric(table: Table) -> list[bool]:
    """Return which columns are numbers, which are set to the right; the first one names its row."""
    texts = [any(isinstance(row[index], (str, bool)) for row in table.rows) for index in range(len(table.columns))]
    return [bool(index) and not text for index, text in enumerate(texts)]


def axes(chart: Chart, lang: str) -> str:
    """Return what a chart's axes are, in one line."""
    scale = said(", log", "，对数", lang)
    across, up = (
        f"{in_language(name, lang)}{scale * log}"
        for name, log in ((chart.x_label, chart.log_x), (chart.y_label, chart.log_y))
    )
    return said(f"{up} by {across}", f"{up}，按{across}", lang)
