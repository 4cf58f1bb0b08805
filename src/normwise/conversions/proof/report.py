"""A proof as a table: for the terminal, in Markdown, and in HTML."""

from __future__ import annotations

import html as markup
from typing import TYPE_CHECKING, Any

from rich.text import Text

from normwise.conversions.proof.subject import Gate
from normwise.rendering import both, clean, in_language
from normwise.rendering.numbers import number
from normwise.rendering.tables import Column, by_terminal, draw, pairs, plain_ascii, table
from normwise.rendering.tables import text as safe

if TYPE_CHECKING:
    from normwise.conversions.proof import Proof

__all__ = ["cell", "html", "markdown", "text"]

_HEADINGS = (both("gate", "关卡"), both("verdict", "结论"), both("figures", "数值"), both("what it rests on", "依据"))
_VERDICTS = {
    True: (both("passed", "通过"), "bold green"),
    False: (both("FAILED", "未通过"), "bold red"),
    None: (both("not checked", "未检查"), "dim"),
}
_SUMMARIES = {
    True: (both("the function is the same", "函数不变"), "bold green"),
    False: (both("the function is NOT the same", "函数已改变"), "bold red"),
    None: (both("not proved", "未证明"), "bold yellow"),
}
_MEASURED = both("not exact: the gaps are measured", "不精确：已测量差距")
_WORDS = {
    "gap": "差距", "bound": "界", "original": "原模型", "converted": "转换后", "norms": "归一化",
    "argmax": "argmax 一致", "missing": "缺少", "unexpected": "多余", "other tensors": "不同的张量", "faults": "错误",
    "unseen": "未见",
}  # fmt: skip


def text(proof: Proof, *, lang: str, color: bool | None, width: int | None) -> str:
    """Return the table for the terminal, with the reasons below it."""
    width, color = by_terminal(width, color)
    headings = [in_language(heading, lang) for heading in _HEADINGS]
    verdicts = (_VERDICTS[gate.passed] for gate in proof.gates)
    columns = [
        Column(heading=headings[0], cells=tuple(Text(gate.name) for gate in proof.gates)),
        Column(heading=headings[1], cells=tuple(Text(in_language(word, lang), style) for word, style in verdicts)),
        Column(heading=headings[2], cells=tuple(safe(_figures(gate, lang)) for gate in proof.gates)),
    ]
    reasons = [(Text(gate.name, "dim"), safe(in_language(gate.why, lang))) for gate in proof.gates if gate.why]
    said, style = _summary(proof)
    title = Text.assemble(
        (f"normwise proof {proof.conversion} ", "bold"), safe(proof.target, "bold cyan"),
        ("  ", ""), (in_language(said, lang), style),
    )  # fmt: skip
    page = draw([title, Text(""), table(columns, width), Text(""), pairs(reasons)], width=width, color=color)
    return plain_ascii(page)


def markdown(proof: Proof, *, lang: str) -> str:
    """Return a Markdown table with a sentence above it."""
    said = in_language(_summary(proof)[0], lang)
    rows = [_HEADINGS, *(_row(gate) for gate in proof.gates)]
    cells = [[cell(in_language(said, lang)) for said in row] for row in rows]
    for gate, row in zip(proof.gates, cells[1:], strict=True):
        row.insert(2, cell(_figures(gate, lang)))
    lines = [cells[0], ["---"] * len(_HEADINGS), *cells[1:]]
    table_lines = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{proof.conversion}**, {cell(proof.target)}: {said}\n\n{table_lines}\n"


def html(proof: Proof) -> str:
    """Return the table for a notebook."""
    head = "".join(f"<th>{markup.escape(heading)}</th>" for heading in _HEADINGS)
    body = ""
    for gate in proof.gates:
        name, verdict, why = (markup.escape(cell) for cell in _row(gate))
        cells = (name, verdict, markup.escape(_figures(gate, "en")), why)
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    said = markup.escape(_summary(proof)[0])
    title = f"<b>{markup.escape(proof.conversion)}</b>, {markup.escape(proof.target)}: {said}"
    return f"<p>{title}</p><table><tr>{head}</tr>{body}</table>"


def _row(gate: Gate) -> tuple[str, str, str]:
    return gate.name, _VERDICTS[gate.passed][0], gate.why


def _summary(proof: Proof) -> tuple[str, str]:
    if not proof.exact:
        return _MEASURED, "bold yellow"
    return _SUMMARIES[False if proof.failed else True if proof.passed else None]


def _figures(gate: Gate, lang: str) -> str:
    """Return the numbers of a gate on one line; lists and tables stand in the JSON."""
    shown = {name: value for name, value in gate.figures.items() if isinstance(value, int | float)}
    named = ((_WORDS.get(name, name) if lang == "zh" else name, value) for name, value in shown.items())
    return ", ".join(f"{name} {_spelled(value)}" for name, value in named) or "-"


def _spelled(value: Any) -> str:
    return str(value) if isinstance(value, int) else number(value, 2)


def cell(text: object) -> str:
    """Return a text as it may stand in a cell of a Markdown table."""
    return clean(text).replace("|", "\\|").replace("<", "&lt;")
