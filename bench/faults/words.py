"""The words of the page in two languages; its text is in page.md and page.zh-CN.md, with figures in braces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["CHINESE", "ENGLISH", "Words"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A language of the page."""

    index: int  # of texts that are given as (English, Chinese)
    suffix: str  # of the pages of this language
    rules: tuple[str, ...]
    faults: tuple[str, ...]
    misses: tuple[str, ...]
    false: tuple[str, ...]
    all: str
    nothing: str
    information: str

    @property
    def page(self) -> str:
        """The text; ``<<MARKS>>`` stand for tables."""
        return (Path(__file__).parent / f"page{self.suffix}.md").read_text(encoding="utf-8")


ENGLISH = Words(
    index=0,
    suffix="",
    rules=("rule", "alive", "equivalent", "found", "right module", "besides", "seconds", "detector", "anomaly mode"),
    faults=("fault", "what is broken", "expected", "alive", "equivalent", "found", "right module"),
    misses=("fault", "missed in", "why"),
    false=("fault", "architecture", "said besides"),
    all="all",
    nothing="Nothing.",
    information=" (info)",
)
CHINESE = Words(
    index=1,
    suffix=".zh-CN",
    rules=("规则", "有效", "等价", "找到", "模块正确", "多余", "秒", "溢出检测器", "异常模式"),
    faults=("故障", "破坏了什么", "预期规则", "有效", "等价", "找到", "模块正确"),
    misses=("故障", "漏报于", "原因"),
    false=("故障", "架构", "多余报告"),
    all="合计",
    nothing="没有。",
    information="（提示）",
)
