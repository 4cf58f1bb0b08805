from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normwise.rendering import both
from normwise.rendering.axes import Axis, tick_labels
from normwise.rendering.plots import Chart, Line, plot
from normwise.rendering.strokes import strokes, text_width
from normwise.rendering.svg import SERIES_COLORS

NS = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text><script>x</script>\"' onload='x' \x1b\x00 <!-- ]]>"
LEFT, RIGHT = 64, 740
NUMBERS = st.floats() | st.sampled_from([0.0, -1.0, math.inf, -math.inf, math.nan, 5e-324, 1e308, -1e308, 1.0])
POINT = st.tuples(NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS)


def chart(*lines: Line, log_x: bool = False, log_y: bool = False, note: str = "") -> Chart:
    return Chart(title="t", x_label="rate", y_label="loss", lines=lines, log_x=log_x, log_y=log_y, note=note)


def line(*y: float | None, name: str = "a", x: tuple[float, ...] = (), **options: object) -> Line:
    return Line(name=name, x=x or tuple(range(1, len(y) + 1)), y=y, **options)  # pyright: ignore[reportArgumentType]


def drawn(one: Chart, lang: str = "en") -> ET.Element:
    return ET.fromstring(plot(one, lang=lang))


def points(picture: ET.Element, kind: str = "polyline") -> list[list[tuple[float, float]]]:
    found = [each.attrib["points"].split() for each in picture.iter(f"{NS}{kind}")]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in each)] for each in found]


def places(picture: ET.Element) -> dict[str, tuple[float, float]]:
    """The pixel of every marked point and cross by its tooltip."""
    found = {}
    for each in picture.iter(f"{NS}path"):
        if (title := each.findtext(f"{NS}title")) is not None:
            x, y = re.findall(r"-?[\d.]+", each.get("transform") or each.attrib["d"])[:2]
            shift = 0 if "transform" in each.attrib else 4
            found[title] = (float(x) + shift, float(y) + shift)
    return found


def frame(picture: ET.Element) -> tuple[float, float]:
    """The upper and the lower edge of the frame: it is 280 high and its axis is drawn dark."""
    dark = [each for each in picture.iter(f"{NS}line") if "--nw-muted" in each.attrib["style"]]
    bottom = float(dark[0].attrib["y1"])
    return bottom - 280, bottom


def texts(picture: ET.Element) -> list[str]:
    return [each.text or "" for each in picture.iter(f"{NS}text")]


@given(st.lists(st.lists(POINT, max_size=6), max_size=10), st.booleans(), st.booleans())
def test_whatever_is_given_stays_inside_the_frame(lines: list[list[tuple]], log_x: bool, log_y: bool) -> None:
    made = [
        Line(name=f"l{index}", like="l1", theory=index % 3 == 2, **dict(zip(
            ("x", "y", "low", "high"), map(tuple, zip(*rows, strict=True)) if rows else ((), (), (), ()), strict=True)))
        for index, rows in enumerate(lines)
    ]  # fmt: skip
    picture = drawn(chart(*made, log_x=log_x, log_y=log_y))
    coordinates = [v for each in picture.iter() for k, v in each.attrib.items() if k != "style"]
    assert not re.search(r"nan|inf", " ".join(coordinates), re.IGNORECASE)
    top, bottom = frame(picture)
    marks = [
        *places(picture).values(),
        *(p for kind in ("polyline", "polygon") for ps in points(picture, kind) for p in ps),
    ]
    assert all(LEFT <= x <= RIGHT and top - 0.1 <= y <= bottom + 0.1 for x, y in marks)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=8), st.booleans(), st.booleans())
def test_every_value_is_a_point_or_a_cross(pairs: list[tuple[float, float]], log_x: bool, log_y: bool) -> None:
    one = Line(name="a", x=tuple(x for x, _ in pairs), y=tuple(y for _, y in pairs))
    picture = drawn(chart(one, log_x=log_x, log_y=log_y))
    marks = [each for each in picture.iter(f"{NS}path") if each.find(f"{NS}title") is not None]
    assert len(marks) == len(pairs)


def test_a_logarithmic_axis_is_logarithmic_in_both_directions() -> None:
    (found,) = points(drawn(chart(line(1.0, 10.0, 100.0, x=(0.01, 0.1, 1.0)), log_x=True, log_y=True)))
    assert [x for x, _ in found] == pytest.approx([LEFT, (LEFT + RIGHT) / 2, RIGHT], abs=0.2)
    assert found[0][1] - found[1][1] == pytest.approx(found[1][1] - found[2][1], abs=0.2)
    assert found[0][1] > found[2][1]


def test_what_an_axis_cannot_hold_is_crossed_at_the_nearest_edge_and_explained() -> None:
    picture = drawn(chart(line(1.0, math.nan, 3.0, math.inf, 5.0, 0.0, -1.0), log_y=True))
    top, bottom = frame(picture)
    found = places(picture)
    assert {found[f"a · {tip}"][1] for tip in ("2: NaN", "4: inf")} == {top}
    assert found["a · 6: 0"][1] == found["a · 7: -1"][1] == bottom
    assert any("×" in each for each in texts(picture))
    assert not any("×" in each for each in texts(drawn(chart(line(1.0, None, 3.0), log_y=True))))


def test_a_position_without_a_place_is_crossed_at_the_side() -> None:
    found = places(drawn(chart(line(1.0, 2.0, 3.0, x=(0.0, 1.0, 10.0)), log_x=True)))
    assert found["a · 0: 1"][0] == LEFT


def test_an_absent_value_interrupts_the_line_without_a_mark() -> None:
    picture = drawn(chart(line(1.0, 2.0, None, 3.0, 4.0)))
    assert [len(each) for each in points(picture)] == [2, 2]
    assert len(places(picture)) == 4


def test_crosses_of_several_lines_at_one_place_do_not_cover_each_other() -> None:
    lines = [line(1.0, math.nan, name=f"l{index}") for index in range(8)]
    found = [at for tip, at in places(drawn(chart(*lines))).items() if "NaN" in tip]
    assert len(found) == 8
    assert all(math.dist(a, b) >= 8 for a, b in combinations(found, 2))


def test_a_band_spans_the_runs_and_a_lone_one_is_a_stroke() -> None:
    one = line(2.0, 3.0, None, 4.0, low=(1.0, 2.0, None, 3.0), high=(3.0, 4.0, None, 5.0))
    picture = drawn(chart(one))
    (band,) = points(picture, "polygon")
    top, bottom = frame(picture)
    assert [x for x, _ in band] == [band[0][0], band[1][0], band[1][0], band[0][0]]
    assert band[0][1] == bottom
    strokes_ = [each.attrib for each in picture.iter(f"{NS}line") if "opacity:.45" in each.attrib["style"]]
    assert [float(each["y2"]) for each in strokes_] == [top]
    assert {"a · 1: 2 (1 … 3)", "a · 4: 4 (3 … 5)"} <= set(places(picture))


def test_a_band_that_diverged_goes_to_the_edge() -> None:
    picture = drawn(chart(line(2.0, 3.0, 4.0, low=(1.0, 1.0, 2.0), high=(3.0, math.inf, math.nan))))
    (band,) = points(picture, "polygon")
    assert min(y for _, y in band) == frame(picture)[0]
    assert len(band) == 4


def test_theory_is_dashed_without_dots_in_the_colour_of_its_measurement() -> None:
    picture = drawn(
        chart(line(1.0, 2.0, name="t", theory=True, like="m"), line(2.0, 3.0, name="n"), line(1.0, 3.0, name="m"))
    )
    theory, _, measured = picture.iter(f"{NS}polyline")
    assert theory.get("stroke-dasharray")
    assert measured.get("stroke-dasharray") is None
    assert theory.attrib["style"] == measured.attrib["style"]
    assert {tip[0] for tip in places(picture)} == {"n", "m"}


def test_a_lone_point_of_theory_is_seen() -> None:
    assert len(places(drawn(chart(line(1.0, theory=True))))) == 1


def test_eight_lines_are_told_apart_by_colour_and_without_it() -> None:
    eight = strokes([(str(index), "", False) for index in range(8)])
    assert len({each.ink for each in eight}) == 8
    assert len({str(each.marker(0, 0)).split("transform")[0] for each in eight}) == 8
    assert len({(each.hue, each.dashes) for each in strokes([(str(index), "", False) for index in range(16)])}) == 16
    assert len({each.dashes for each in strokes([("a", "", False), *(("t", "a", True),) * 3])}) == 4


def test_lines_that_are_like_each_other_in_a_ring_still_have_colours() -> None:
    found = strokes([("a", "b", True), ("b", "a", True), ("c", "gone", False), ("d", "d", False)])
    assert [each.hue for each in found] == [2, 2, 0, 1]
    assert found[0].dashes != found[1].dashes


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("color", SERIES_COLORS)
def test_a_line_stands_out_from_white_as_graphics_must(color: str) -> None:
    assert 1.05 / (luminance(color) + 0.05) >= 3  # WCAG 2.1, 1.4.11


def test_many_points_carry_few_markers_and_all_the_line() -> None:
    picture = drawn(chart(line(*(float(i) for i in range(1000)))))
    assert len(points(picture)[0]) == 1000
    assert 10 <= len(places(picture)) <= 13


NAMES = st.text(st.characters(codec="utf-8"), max_size=60) | st.sampled_from(
    ["后置归一化，学习率 1e-3", "pre", "一" * 300, "w" * 300]
)


@given(st.lists(NAMES, max_size=9), st.booleans())
def test_entries_of_the_legend_do_not_cover_each_other_and_stay_in_the_picture(names: list[str], theory: bool) -> None:
    picture = drawn(chart(*(line(1.0, math.nan, name=name, theory=theory) for name in names)))
    top, _ = frame(picture)
    boxes = [
        (float(each.attrib["x"]), float(each.attrib["x"]) + text_width(each.text or "", 12), float(each.attrib["y"]))
        for each in picture.iter(f"{NS}text")
        if float(each.attrib["y"]) < top - 20 and each.text
    ]
    assert all(right <= RIGHT + 1 for _, right, _ in boxes)
    for (left, right, y), (left_2, right_2, y_2) in combinations(boxes, 2):
        assert abs(y - y_2) >= 12 or right <= left_2 or right_2 <= left


def test_hostile_names_are_text() -> None:
    one = line(1.0, math.nan, name=HOSTILE)
    picture = drawn(Chart(title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE, note=HOSTILE, lines=(one,)))
    known = ("svg", "title", "desc", "g", "line", "path", "text")
    assert {each.tag for each in picture.iter()} <= {f"{NS}{tag}" for tag in known}
    assert all("\x1b" not in (each.text or "") for each in picture.iter())
    assert not any(name.startswith("on") for each in picture.iter() for name in each.attrib)


def test_words_are_in_the_language_that_was_asked_for() -> None:
    one = Line(name=both("measured", "测量"), x=(1.0, 2.0), y=(1.0, 2.0), low=(1.0, 1.0), high=(2.0, 2.0))
    like = Line(name=both("predicted", "预测"), x=(1.0, 2.0), y=(1.0, math.nan), theory=True, like="measured")
    made = Chart(
        title=both("growth", "增长"),
        x_label=both("depth", "深度"),
        y_label=both("size", "大小"),
        lines=(one, like),
        note=both("three seeds", "三个种子"),
    )
    english, chinese = str(plot(made)), str(plot(made, lang="zh"))
    assert not re.search(r"[\u4e00-\u9fff]", english)
    words = set(re.findall(r"[a-z]{4,}", " ".join(t.text or "" for t in ET.fromstring(chinese).iter())))
    assert not words
    assert {"测量", "预测", "深度", "大小", "三个种子", "增长"} <= {t.text for t in ET.fromstring(chinese).iter()}


def test_few_positions_are_the_ticks_and_crowded_ones_are_not() -> None:
    few = drawn(chart(line(1.0, 2.0, 3.0, x=(3e-4, 1e-3, 4e-3)), log_x=True))
    assert {"0.0003", "0.001", "0.004"} <= set(texts(few))
    crowded = drawn(chart(line(1.0, 2.0, 3.0, x=(1.0, 1.001, 500.0))))
    assert "1.001" not in texts(crowded)


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=5), st.booleans())
def test_ticks_are_few_round_in_order_and_within_the_axis(values: list[float], log: bool) -> None:
    axis = Axis.around(values, log=log, start=0.0, end=100.0)
    ticks = axis.ticks(6, 3)
    assert 2 <= len(ticks) <= 7
    assert all(a < b for a, b in pairwise(ticks))
    assert all(-0.2 <= (axis.at(tick) or 0.0) <= 100.2 for tick in ticks)
    assert len(set(tick_labels(ticks))) == len(ticks)


@pytest.mark.parametrize(
    ("y", "low", "high"), [((1.0,), (), ()), ((1.0, 2.0), (1.0,), (1.0, 2.0)), ((1.0, 2.0), (1.0, 2.0), ())]
)
def test_a_line_whose_parts_do_not_fit_is_refused(y: tuple, low: tuple, high: tuple) -> None:
    with pytest.raises(ValueError, match="line 'a' has"):
        Line(name="a", x=(1.0, 2.0), y=y, low=low, high=high)


def test_a_tick_says_its_number_exactly_enough() -> None:
    assert tick_labels([1.0, 1.00025, 1.0005]) == ["1", "1.00025", "1.0005"]


def test_ticks_are_round() -> None:
    assert Axis(1.0, 1000.0, True, 0.0, 1.0).ticks(6, 3) == pytest.approx([1, 10, 100, 1000])
    assert Axis(2e-4, 3e-2, True, 0.0, 1.0).ticks(8, 3) == pytest.approx([3e-4, 1e-3, 3e-3, 1e-2, 3e-2])
    assert Axis(0.3, 10.0, False, 0.0, 1.0).ticks(6) == pytest.approx([2, 4, 6, 8, 10])
