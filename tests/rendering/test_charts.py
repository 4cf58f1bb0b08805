from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normwise.rendering.charts import Cell, Panel, Pin, Series, bars, depth_chart
from normwise.rendering.drawing import Block, block
from normwise.rendering.svg import element

NS = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text><script>x</script>\"' onload='x' \x1b\x00 <!-- ]]>"
VALUES = st.lists(st.none() | st.floats(), max_size=30)


def panel(*series: Series, log: bool = True) -> Panel:
    return Panel(name="p", series=series, log=log)


def chart(*values: float | None, log: bool = True) -> ET.Element:
    one = panel(Series(name="residual", values=values), log=log)
    return ET.fromstring(depth_chart([one], title="t", x_label="depth"))


def texts(picture: ET.Element) -> list[str]:
    return [each.text or "" for each in picture.iter(f"{NS}text")]


def points(picture: ET.Element) -> list[list[tuple[float, float]]]:
    lines = [line.attrib["points"].split() for line in picture.iter(f"{NS}polyline")]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in lines]


def test_a_line_falls_on_screen_where_its_values_rise_and_is_straight_on_a_log_axis() -> None:
    (line,) = points(chart(1.0, 10.0, 100.0))
    (_, first), (_, second), (_, third) = line
    assert first > second > third
    assert first - second == pytest.approx(second - third, abs=0.2)


def test_a_linear_axis_is_linear() -> None:
    (line,) = points(chart(0.0, 50.0, 100.0, log=False))
    assert line[0][1] - line[1][1] == pytest.approx(line[1][1] - line[2][1], abs=0.2)


def test_a_value_without_a_place_on_the_axis_interrupts_the_line_and_is_crossed() -> None:
    picture = chart(1.0, 2.0, math.nan, 3.0, 4.0, 0.0, 5.0)
    assert [len(line) for line in points(picture)] == [2, 2, 1]
    crosses = [path for path in picture.iter(f"{NS}path") if path.find(f"{NS}title") is not None]
    assert [cross.findtext(f"{NS}title") for cross in crosses] == ["residual 2: NaN", "residual 5: 0"]


def test_an_absent_value_interrupts_the_line_without_a_cross() -> None:
    picture = chart(1.0, None, 3.0)
    assert [len(line) for line in points(picture)] == [1, 1]
    assert list(picture.iter(f"{NS}path")) == []


@given(VALUES, st.booleans())
def test_any_values_make_a_well_formed_picture_without_wild_coordinates(values: list[float | None], log: bool) -> None:
    picture = chart(*values, log=log)
    for line in points(picture):
        assert all(0 <= x <= 860 and 0 <= y <= 260 for x, y in line)


def test_names_at_the_ends_of_lines_do_not_cover_each_other() -> None:
    series = [Series(name=name, values=(1.0, 2.0)) for name in ("a", "b", "c")]
    picture = ET.fromstring(depth_chart([panel(*series)], title="t", x_label="x"))
    heights = sorted(float(each.attrib["y"]) for each in picture.iter(f"{NS}text") if each.text in ("a", "b", "c"))
    assert min(b - a for a, b in pairwise(heights)) >= 14


def test_pins_side_by_side_do_not_cover_each_other() -> None:
    for steps in ((1, 2, 3), (56, 57, 58), range(0, 59, 6)):
        pins = [Pin(at=at, text=f"NUM0{at:02}") for at in steps]
        line = Series(name="r", values=tuple(range(1, 60)))
        made = depth_chart([panel(line)], title="t", x_label="x", pins=pins)
        boxes = [each.attrib for each in ET.fromstring(made).iter(f"{NS}rect")]
        edges = [(float(box["x"]), float(box["x"]) + float(box["width"])) for box in boxes]
        assert len(edges) == len(pins)
        assert all(right <= left for (_, right), (left, _) in pairwise(edges))
        assert min(edges)[0] >= 0
        assert max(edges)[1] <= 860


def test_a_pin_its_block_and_its_value_stand_above_each_other() -> None:
    cells = [Cell(title=f"layers.{i}", pinned=i == 2) for i in range(5)]
    made = depth_chart(
        [panel(Series(name="r", values=(1.0, 2.0, 3.0, 4.0, 5.0)))], title="t", x_label="x", cells=cells,
        pins=[Pin(at=2, text="NUM001")],
    )  # fmt: skip
    picture = ET.fromstring(made)
    boxes = {each.findtext(f"{NS}title"): each.attrib for each in picture.iter(f"{NS}rect")}
    middle = float(boxes["layers.2"]["x"]) + float(boxes["layers.2"]["width"]) / 2
    assert middle == pytest.approx(points(picture)[0][2][0], abs=0.2)
    assert any(f"L{points(picture)[0][2][0]}" in path.attrib["d"] for path in picture.iter(f"{NS}path"))
    assert [title for title, box in boxes.items() if "--nw-alert" in box["style"] and title] == ["layers.2"]


def test_panels_stand_below_each_other_and_each_has_its_own_scale() -> None:
    panels = [panel(Series(name=name, values=(1.0, scale))) for name, scale in (("a", 10.0), ("b", 1e6))]
    first, second = points(ET.fromstring(depth_chart(panels, title="t", x_label="x")))
    assert max(y for _, y in first) < min(y for _, y in second)
    assert first[0][1] - first[1][1] == pytest.approx(second[0][1] - second[1][1], abs=0.2)


def test_bars_are_as_long_as_their_numbers_and_fill_the_row_where_those_are_not_finite() -> None:
    def widths(*values: float) -> list[float]:
        made = bars([(str(i), value) for i, value in enumerate(values)], title="t")
        return [float(each.attrib["width"]) for each in ET.fromstring(made).iter(f"{NS}rect")]

    before, after = widths(0.4, 0.1)
    assert before == pytest.approx(4 * after)
    assert widths(math.nan, 1.0) == widths(1.0, math.inf) == [before, before]
    assert 0 < widths(1.0, 0.0)[1] < 5
    assert {"0.4", "inf"} <= set(texts(ET.fromstring(bars([("a", 0.4), ("b", math.inf)], title="t"))))


def test_chinese_stays_chinese() -> None:
    lines = [Series(name=name, values=(1.0,)) for name in ("残差流", "分支")]
    made = depth_chart([Panel(name="均方根", series=tuple(lines))], title="随深度的变化", x_label="子层")
    assert {"残差流", "分支", "均方根", "子层"} <= set(texts(ET.fromstring(made)))


@pytest.mark.parametrize(
    "made",
    [
        depth_chart(
            [Panel(name=HOSTILE, series=(Series(name=HOSTILE, values=(1.0, math.nan)),) * 2)],
            title=HOSTILE,
            x_label=HOSTILE,
            cells=[Cell(title=HOSTILE, pinned=True)],
            pins=[Pin(at=0, text=HOSTILE)],
        ),
        bars([(HOSTILE, 1.0)], title=HOSTILE),
        block(Block(branches=((HOSTILE,),), skip=HOSTILE, branch=HOSTILE, words=HOSTILE)),
        element("text", HOSTILE, x=HOSTILE),
    ],
)
def test_text_of_a_model_never_becomes_an_element(made: str) -> None:
    assert "<script" not in made
    assert "\x1b" not in made
    known = {"svg", "g", "title", "text", "rect", "line", "path", "circle", "polyline"}
    tree = ET.fromstring(made)
    assert {each.tag.removeprefix(NS) for each in tree.iter()} <= known
    assert not any(name.startswith("on") for each in tree.iter() for name in each.attrib)


def test_a_strip_of_thousands_of_blocks_stays_small() -> None:
    cells = [Cell(title=f"layers.{i}", pinned=i == 4321) for i in range(5000)]
    made = depth_chart([], title="t", x_label="x", cells=cells)
    assert len(made) < 110_000
    assert made.count("--nw-alert") == 1


@pytest.mark.parametrize(
    ("shown", "norms"),
    [
        (Block(branches=(("N", "F"),), final_norm=True), 2),
        (Block(branches=(("F",),), after_add=True, starts_with_norm=True), 2),
        (Block(branches=(("N", "F", "N"),)), 2),
        (Block(branches=(("N", "A"), ("N", "M"))), 2),
        (Block(branches=(("N", "A"), ("M",)), shared=True), 1),
    ],
)
def test_a_drawing_shows_every_norm_and_how_often_it_repeats(shown: Block, norms: int) -> None:
    words = texts(ET.fromstring(block(shown)))
    assert words.count("N") == norms
    assert "×1" in words
