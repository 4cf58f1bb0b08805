"""A plan as tables for the terminal: what will change, what stays and why."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from normwise.conversions._plan import NOTHING, Change, Plan, Refusal
from normwise.rendering import both, in_language
from normwise.rendering.collapse import collapse
from normwise.rendering.tables import by_terminal, draw, pairs, plain_ascii
from normwise.rendering.tables import text as safe

__all__ = ["text"]

_STAYS, _NOTES = both("left as it is", "保持不变"), both("notes", "说明")
_COUNT = both("{changed} changed, {left} left as they are", "改变 {changed} 项，保持 {left} 项")
_NEW = both("new tensors: {keys}", "新张量：{keys}")
_NOT_EXACT = both("not exact: the function changes", "不精确：函数会改变")


def text(plan: Plan, target: str, *, lang: str = "en", color: bool | None = None, width: int | None = None) -> str:
    """Return the tables; repeated blocks are one line."""
    width, color = by_terminal(width, color)
    count = in_language(_COUNT, lang).format(changed=len(plan.changes), left=len(plan.refused))
    title = Text.assemble((f"normwise {plan.conversion} ", "bold"), safe(target, "bold cyan"), f"  {count}")
    parts: list[RenderableType] = [title]
    if not plan.exact:
        parts.append(Text(f"  {in_language(_NOT_EXACT, lang)}", "bold yellow"))
    changes = collapse(plan.changes, path=lambda change: change.path, key=lambda change: (change.what, change.how))
    if changes:
        parts += [Text(""), pairs([(safe(group.label or "-"), _changed(group.members[0], lang)) for group in changes])]
    if not plan.changes and not plan.refused:
        parts += [Text(""), Text(f"  {in_language(NOTHING, lang)}")]
    refused = collapse(plan.refused, path=lambda refusal: refusal.path, key=_reason)
    parts += _listed(_STAYS, [(group.label, _told(group.members[0])) for group in refused], lang)
    keys = collapse(plan.created, path=str)
    notes = [*plan.notes, *([_NEW.format(keys=", ".join(group.label for group in keys))] if keys else [])]
    parts += _listed(_NOTES, [(in_language(note, lang), "") for note in notes], lang)
    return plain_ascii(draw(parts, width=width, color=color))


def _changed(change: Change, lang: str) -> Text:
    what, how = safe(in_language(change.what, lang)), safe(in_language(change.how, lang), "dim")
    return Text.assemble(what, "  ", how)


def _reason(refusal: Refusal) -> tuple[str | None, ...]:
    return refusal.why, refusal.op, refusal.source, refusal.unblock


def _told(refusal: Refusal) -> str:
    return str(refusal).removeprefix(f"{refusal.path or 'the model'}: ")


def _listed(heading: str, rows: Sequence[tuple[str, str]], lang: str) -> list[RenderableType]:
    if not rows:
        return []
    lines: list[RenderableType] = [Text(""), Text(f"  {in_language(heading, lang)}", "dim")]
    for label, content in rows:
        lines += [Padding(safe(part), (0, 0, 0, indent)) for part, indent in ((label, 4), (content, 6)) if part]
    return lines
