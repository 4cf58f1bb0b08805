"""The words of the printed tables, in two languages."""

from __future__ import annotations

from normwise.benchmarks._race import Method
from normwise.benchmarks._result import Result
from normwise.rendering.languages import Text, both

__all__ = ["HEADINGS", "LEGEND", "SCALE", "kernels_line", "machine_line", "method_line"]

HEADINGS: dict[str, Text] = {
    "what": both("what", "测量"),
    "rival": both("by", "实现"),
    "ms": both("ms", "毫秒"),
    "quartiles": both("quartiles", "四分位"),
    "gb_per_s": both("GB/s", "GB/s"),
    "copies": both("x copy", "复制的倍数"),
    "relative": both("x ours", "我们的倍数"),
    "saved": both("saved", "保存"),
    "peak_bytes": both("peak", "峰值"),
}
LEGEND = both(
    "ms: median of rounds; x copy: times x.clone() of the input in the same rounds; x ours: times our own; "
    "saved: bytes kept for backward, in sizes of the input",
    "毫秒：各轮的中位数；复制的倍数：与同轮 x.clone() 之比；我们的倍数：与我们的实现之比；"
    "保存：为反向保存的字节数，以输入大小为单位",
)
SCALE = both("times x.clone() of the input (dotted line: 1)", "x.clone() 的倍数（虚线为 1）")


def machine_line(result: Result) -> Text:
    """Say where it ran."""
    each = result.machine
    where = each.cpu if each.device == "cpu" else f"{each.device}, {each.cpu}"
    load = "" if each.load is None else f", load {each.load:g}"
    load_zh = "" if each.load is None else f"，负载 {each.load:g}"
    isa = f"{each.isa} (kernel: {each.instructions})" if each.instructions else each.isa
    isa_zh = f"{each.isa}（内核：{each.instructions}）" if each.instructions else each.isa
    rest = f"{each.system}, Python {each.python}, torch {each.torch}, normwise {each.normwise}"
    return both(
        f"{where}, {each.cpus} CPUs, {isa}{load}; {rest}",
        f"{where}，{each.cpus} 个 CPU，{isa_zh}{load_zh}；{rest}",
    )


def kernels_line(kernels: dict[str, str | None]) -> Text:
    """Say which kernel runs here, and why the others do not."""
    running = [name for name, why in kernels.items() if why is None]
    others = [(name, why) for name, why in kernels.items() if why is not None]
    said = f"kernels: {running[0]} runs here" + "".join(f"; {name} does not: {why}" for name, why in others)
    zh = f"内核：此处运行 {running[0]}" + "".join(f"；{name} 不运行：{why}" for name, why in others)
    return both(said, zh)


def method_line(method: Method) -> Text:
    """Say how often was measured."""
    return both(
        f"rivals take turns in {method.rounds} rounds; a measurement is {method.least} calls or more, "
        f"{1e3 * method.fill:g} ms or more",
        f"各实现轮流测量 {method.rounds} 轮；每次测量至少 {method.least} 次调用、至少 {1e3 * method.fill:g} 毫秒",
    )
