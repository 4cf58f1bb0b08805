"""A page a conversion in two languages, and their index, from the docstrings."""

from __future__ import annotations

from normwise import conversions
from normwise._parts import page, page_title

__all__ = ["conversion_pages"]

_INDEX = {
    "en": (
        ".md",
        "Conversions",
        "Each is made on a copy, with a proof that the function is the same, or a refusal with the reasons:\n"
        "`nw.convert(name, model, inputs)`, `normwise convert name TARGET -o OUT`. When LayerNorm can be RMSNorm:\n"
        "[the guide](../layer-to-rms.md). Written from the docstrings by `docs/generate.py`.",
        "| name | what it does |",
    ),
    "zh": (
        ".zh-CN.md",
        "转换",
        "每个转换都在副本上进行，附有函数不变的证明，或者带理由的拒绝：`nw.convert(name, model, inputs)`，\n"
        "`normwise convert name TARGET -o OUT`。LayerNorm 何时可以换成 RMSNorm：[指南](../layer-to-rms.zh-CN.md)。\n"
        "由 `docs/generate.py` 从文档字符串写出。",
        "| 名称 | 做什么 |",
    ),
}


def conversion_pages(lang: str) -> dict[str, str]:
    """Return the page of every conversion by the name of its file, and the index as README, in one language."""
    suffix, title, intro, header = _INDEX[lang]
    parts = {name: conversions.get(name) for name in conversions.names()}
    pages = {f"{name}{suffix}": f"{_twins(name)}\n\n# {name}\n\n{page(part, lang)}\n" for name, part in parts.items()}
    rows = "\n".join(f"| [{name}]({name}{suffix}) | {page_title(part, lang)} |" for name, part in parts.items())
    index = f"{_twins('README')}\n\n# {title}\n\n{intro}\n\n{header}\n|---|---|\n{rows}\n"
    return {f"README{suffix}": index, **pages}


def _twins(stem: str) -> str:
    return f"[English]({stem}.md) | [简体中文]({stem}.zh-CN.md)"
