"""What is printed and written of a benchmark: tables, JSON, a picture."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from normwise import benchmarks
from normwise.benchmarks import CLONE, FORWARD, OURS, Machine, Method, Result, Row

NS = "{http://www.w3.org/2000/svg}"
MACHINE = Machine(
    cpu="A CPU <x>",
    cpus=2,
    isa="AVX2",
    instructions="avx2",
    device="cpu",
    load=0.5,
    system="Linux x86_64",
    python="3.11.7",
    torch="2.13.0",
    normwise="0.1.0",
)
HOSTILE = "</text><script>x</script>\x1b[31m"


def row(rival: str, ms: float | None, shape: tuple[int, ...] = (4, 8), layer: str = "RMSNorm", **more: object) -> Row:
    usual = {
        "dtype": "float32", "threads": 1, "what": FORWARD, "ms": ms, "low": ms and ms * 0.9, "high": ms and ms * 1.1,
        "copies": ms and ms / 0.5, "relative": ms, "gb_per_s": 12.3, "rounds": 3, "calls": 5,
    }  # fmt: skip
    return Row(layer=layer, shape=shape, rival=rival, **{**usual, **more})  # pyright: ignore[reportArgumentType]


ROWS = (
    row(CLONE, 0.5),
    row(OURS, 1.0, what="forward+backward", saved=1.002),
    row("torch.nn", 1234.5),
    row("torch.compile", None, why=f"RuntimeError: no g++ {HOSTILE}"),
)


def result(*rows: Row, name: str = "norms") -> Result:
    kernels = {"cpu": None, "triton": "no CUDA device", "eager": None}
    return Result(benchmark=name, machine=MACHINE, kernels=kernels, method=Method(), rows=rows or ROWS)


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ET.fromstring(svg).iter(f"{NS}text")]


# -- text -------------------------------------------------------------------------------------


def test_the_tables_say_where_how_and_what() -> None:
    page = benchmarks.render(result(), "text")
    head = " ".join(page.split())
    assert "A CPU <x>, 2 CPUs, AVX2 (kernel: avx2), load 0.5; Linux x86_64, Python 3.11.7, torch 2.13.0, norm" in head
    assert "kernels: cpu runs here; triton does not: no CUDA device" in page
    assert "7 rounds" in page
    assert "RMSNorm [4, 8] float32 (1 thread)" in page
    lines = {tuple(line.split()[:2]): line.split() for line in page.splitlines()}
    assert lines["forward", "torch.nn"] == ["forward", "torch.nn", "1234", "1111", "-", "1358", "12.3", "2469", "1234"]
    assert lines["forward+backward", OURS][-1] == "1"  # 1.002 to three digits
    assert lines["torch.compile", "RuntimeError:"][2:4] == ["no", "g++"]
    assert "\x1b" not in page


def test_columns_that_say_nothing_are_left_out() -> None:
    step = row(OURS, 900.0, what="training step", copies=None, gb_per_s=None, peak_bytes=3 * 10**8)
    page = benchmarks.render(result(step, name="llama"), "text")
    header = next(line.split() for line in page.splitlines() if "quartiles" in line and "what" in line)
    assert header == ["what", "by", "ms", "quartiles", "x", "ours", "peak"]
    assert "300 MB" in page


def test_the_tables_are_chinese_where_asked() -> None:
    page = benchmarks.render(result(), "text", lang="zh")
    assert "内核：此处运行 cpu；triton 不运行：no CUDA device" in page
    assert "毫秒" in page
    assert "RMSNorm [4, 8] float32 (1 线程)" in page


def test_numbers_of_threads_and_layouts_have_tables_of_their_own() -> None:
    page = benchmarks.render(result(row(OURS, 1.0), row(OURS, 1.0, threads=2, layout="channels_last")), "text")
    assert "RMSNorm [4, 8] float32 channels_last (2 threads)" in page
    assert "RMSNorm [4, 8] float32 (1 thread)" in page


# -- JSON ------------------------------------------------------------------------------------


def test_json_has_every_row_with_its_conditions() -> None:
    told = json.loads(benchmarks.render(result(), "json"))
    assert (told["schema"], told["benchmark"], told["finished"]) == (1, "norms", True)
    assert told["machine"] == dataclasses.asdict(MACHINE)
    assert told["kernels"] == {"cpu": None, "triton": "no CUDA device", "eager": None}
    assert told["method"] == {"rounds": 7, "fill": 0.03, "least": 3}
    assert [set(each) for each in told["rows"]] == [{field.name for field in dataclasses.fields(Row)}] * len(ROWS)
    assert told["rows"][1]["saved"] == 1.002
    assert told["rows"][3]["ms"] is None


@pytest.mark.parametrize("name", benchmarks.formats())
def test_what_a_rival_said_is_no_command_to_a_ci_runner(name: str) -> None:
    hostile = "::error::x\n::error::y ##[error]z \x1b[31m\x9b2J\u202e"
    page = benchmarks.render(result(row(OURS, 1.0), row(hostile, 2.0), row("torch.compile", None, why=hostile)), name)
    assert re.findall(r"^\s*::\w|##\w*\[|[\x1b\x9b\u202e]", page, flags=re.MULTILINE) == []


# -- SVG -------------------------------------------------------------------------------------


def test_the_picture_is_well_formed_names_everyone_and_runs_nothing() -> None:
    hostile = row(HOSTILE, 2.0)
    svg = benchmarks.render(result(*ROWS, hostile), "svg")
    root = ET.fromstring(svg)
    assert {"torch.nn", OURS, "2469", "RMSNorm [4, 8] float32 (1 thread)"} <= set(texts(svg))
    assert CLONE not in texts(svg)
    assert list(root.iter(f"{NS}script")) == []
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert root.findtext(f"{NS}title", "").endswith("times x.clone() of the input (dotted line: 1)")


def test_the_picture_is_made_for_light_and_dark() -> None:
    svg = benchmarks.render(result(), "svg")
    style = ET.fromstring(svg).find(f".//{NS}style")
    assert style is not None
    assert style.text is not None
    light, dark = style.text.split("@media (prefers-color-scheme:dark)")
    names = {part.split(":")[0].lstrip("{") for part in light.removeprefix("svg").rstrip("}").split(";")}
    assert names == {part.split(":")[0].removeprefix("{svg{") for part in dark.rstrip("}").split(";")}
    used = {each.split(",")[0] for each in svg.split("var(")[1:]}
    assert used <= names


def test_bars_are_as_long_as_their_figures_and_inside_the_picture() -> None:
    svg = benchmarks.render(result(row(OURS, 1.0), row("torch.nn", 4.0), row("torch.compile", 2.0)), "svg")
    root = ET.fromstring(svg)
    bars = [float(each.attrib["width"]) for each in root.iter(f"{NS}rect") if each.find(f"{NS}title") is not None]
    assert bars[1] == pytest.approx(4 * bars[0], abs=0.2)
    assert bars[2] == pytest.approx(2 * bars[0], abs=0.2)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for each in root.iter(f"{NS}text"):
        assert 0 <= float(each.attrib["x"]) < width
        assert 0 <= float(each.attrib["y"]) < height


def test_of_each_layer_the_largest_shape_is_drawn() -> None:
    rows = [row(OURS, 1.0, shape=shape) for shape in ((4, 8), (16, 8), (8, 8))] + [row(OURS, 1.0, layer="LayerNorm")]
    told = texts(benchmarks.render(result(*rows), "svg"))
    assert [each for each in told if "Norm [" in each] == [
        "RMSNorm [16, 8] float32 (1 thread)",
        "LayerNorm [4, 8] float32 (1 thread)",
    ]


def test_a_picture_without_multiples_shows_milliseconds() -> None:
    svg = benchmarks.render(result(row(OURS, 900.0, copies=None), name="llama"), "svg")
    assert "900" in texts(svg)
    assert list(ET.fromstring(svg).iter(f"{NS}line")) == []


def test_a_picture_of_nothing_that_ran_is_still_one() -> None:
    assert ET.fromstring(benchmarks.render(result(ROWS[3]), "svg")).tag == f"{NS}svg"


# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "start"), [(".json", "{"), (".svg", "<svg"), (".txt", "RMSNorm and")])
def test_the_suffix_decides_what_is_written(suffix: str, start: str, tmp_path: Path) -> None:
    path = tmp_path / f"figures{suffix}"
    benchmarks.save(result(), path)
    assert path.read_text("utf-8").startswith(start)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="no format is called 'pdf': choose from text, json, svg"):
        benchmarks.render(result(), "pdf")
