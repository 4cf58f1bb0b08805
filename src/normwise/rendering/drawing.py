"""The picture of one residual sublayer: what stands before the branch, after it, and after the add.

The stream runs from left to right on top, the branch below it; N is a norm, F the sublayer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from markupsafe import Markup

from normwise.rendering.svg import color, element, label

__all__ = ["Block", "block"]

_STREAM, _FIRST_ROW, _ROW = 34, 84, 40  # y of the stream and the branches
_BOX, _STEP, _HIGH = 34, 52, 26  # width of a box, distance of neighbours, height
_MARGIN, _LEAD = 8, 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What is drawn: boxes of each branch in order, and the norms on the stream itself."""

    branches: tuple[tuple[str, ...], ...] = (("F",),)
    shared: bool = False  # the first box of the first branch feeds all branches
    after_add: bool = False
    starts_with_norm: bool = False
    final_norm: bool = False
    times: int = 1
    skip: str = ""  # the constant on the stream: "×2.5"
    branch: str = ""  # the constant on the branch
    words: str = field(default="", compare=False)  # read out in place of the picture


def block(shown: Block) -> Markup:
    """Draw one sublayer of a stack, and the norms at the ends of its stream."""
    pen = _Pen()
    pen.stream_text("x")
    if shown.starts_with_norm:
        pen.stream_box("N")
    pen.enter()
    tap = pen.x
    right = max(map(len, shown.branches)) * _STEP
    for row, names in enumerate(shown.branches):
        offset = 1 if shown.shared and row else 0
        pen.branch(tap, row, names, offset, right)
    pen.skip(tap, right, shown)
    if shown.after_add:
        pen.stream_box("N")
    pen.leave(shown.times, len(shown.branches))
    if shown.final_norm:
        pen.stream_box("N")
    return pen.finish(len(shown.branches), shown.words)


class _Pen:
    """Draws from left to right and remembers where it is."""

    def __init__(self) -> None:
        self.x = _MARGIN
        self.entered = 0
        self.lines: list[Markup] = []
        self.boxes: list[Markup] = []

    def stream_text(self, content: str) -> None:
        self.boxes.append(label(self.x, _STREAM + 4, content, name="ink", size=14))
        self.x += 14

    def stream_box(self, name: str) -> None:
        self._arrow(self.x, _STREAM, self.x + 18)
        self.boxes.append(_box(self.x + 20, _STREAM, name))
        self.x += 20 + _BOX

    def enter(self) -> None:
        self.entered = self.x + 12
        self._line(f"M{self.x},{_STREAM}h{_LEAD}")
        self.x += _LEAD

    def branch(self, tap: int, row: int, names: tuple[str, ...], offset: int, right: int) -> None:
        y = _FIRST_ROW + row * _ROW
        start = tap + 14 + offset * _STEP
        above = _STREAM if not offset else _FIRST_ROW
        fork = tap if not offset else start - 10
        self._line(f"M{fork},{above}V{y}H{start - 2}", arrow=(start - 2, y))
        for index, name in enumerate(names):
            left = start + index * _STEP
            self.boxes.append(_box(left, y, name))
            if index + 1 < len(names):
                self._arrow(left + _BOX, y, left + _STEP - 2)
        end = start + (len(names) - 1) * _STEP + _BOX
        self._line(f"M{end},{y}H{tap + 14 + right + 8}V{_STREAM + 11}")

    def skip(self, tap: int, right: int, shown: Block) -> None:
        add = tap + 14 + right + 8
        self._arrow(tap, _STREAM, add - 11)
        self.lines.append(element("circle", cx=tap, cy=_STREAM, r=3, style=color("ink")))
        self.boxes.append(element("circle", cx=add, cy=_STREAM, r=9, style=_outline("ink")))
        self.boxes.append(_stroke(f"M{add - 5},{_STREAM}h10m-5,-5v10"))
        if shown.skip:
            self.boxes.append(label((tap + add) / 2, _STREAM - 7, shown.skip, anchor="middle"))
        if shown.branch:
            self.boxes.append(label(add - 6, _FIRST_ROW - 16, shown.branch, anchor="end"))
        self._line(f"M{add - 4},{_STREAM + 16}l4,-5l4,5")
        self.x = add + 9

    def leave(self, times: int, rows: int) -> None:
        self.x += 12
        self._line(f"M{self.x - 12},{_STREAM}h12")
        bottom = _FIRST_ROW + (rows - 1) * _ROW + 22
        self.lines.insert(0, _frame(self.entered, 10, self.x - self.entered, bottom - 10))
        self.boxes.append(label(self.x - 2, bottom + 15, f"×{times}", anchor="end", size=13))

    def finish(self, rows: int, words: str) -> Markup:
        self._arrow(self.x, _STREAM, self.x + 24)
        height = _FIRST_ROW + (rows - 1) * _ROW + 42
        return element(
            "svg", element("title", words), *self.lines, *self.boxes, xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {self.x + 32} {height}", width=self.x + 32, height=height, role="img", font_family="inherit",
        )  # fmt: skip

    def _arrow(self, start: float, y: float, end: float) -> None:
        self._line(f"M{start:g},{y:g}H{end:g}", arrow=(end, y))

    def _line(self, path: str, arrow: tuple[float, float] | None = None) -> None:
        tip = f"M{arrow[0] - 5:g},{arrow[1] - 4:g}l5,4l-5,4" if arrow else ""
        self.lines.append(_stroke(path + tip))


def _stroke(path: str) -> Markup:
    return element("path", d=path, style=f"fill:none;stroke-width:1.5;{color('ink', 'stroke')}")


def _box(left: float, middle: float, name: str) -> Markup:
    hue = "series-0" if name.startswith("N") else "muted"
    style = _outline("muted") if hue == "muted" else color(hue)
    shape = element("rect", x=left, y=middle - _HIGH / 2, width=_BOX, height=_HIGH, rx=6, style=style)
    ink = "fill:var(--nw-paper,#fff)" if hue != "muted" else color("ink")
    words = element(
        "text",
        name,
        x=left + _BOX / 2,
        y=middle + 4.5,
        text_anchor="middle",
        font_size=13,
        font_weight="600",
        style=ink,
    )
    return element("g", shape, words)


def _frame(x: float, y: float, width: float, height: float) -> Markup:
    style = f"fill:none;stroke-dasharray:4 4;{color('muted', 'stroke')}"
    return element("rect", x=x, y=y, width=width, height=height, rx=10, style=style)


def _outline(name: str) -> str:
    return f"fill:var(--nw-paper,#fff);stroke-width:1.5;{color(name, 'stroke')}"
