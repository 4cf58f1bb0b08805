"""What is known about the results: misses with their reasons, and findings on healthy models that are right."""

from __future__ import annotations

__all__ = ["MISSES", "SURPRISES", "SURPRISES_OF_BFLOAT16"]

# fault -> why it is missed where it is, in English and Chinese
_SMALL = (
    "behind a post-norm every row has the same statistics: other rows move the outputs by less than 0.001, where the "
    "page of the rule says nothing (AXS002 names the norm that spans time)",
    "后置归一化之后每一行的统计量相同：其他行使输出移动不到 0.001，规则页面规定此时不作判断"
    "（AXS002 会指出跨时间的归一化）",
)
MISSES: dict[str, tuple[str, str]] = {
    "statistics-over-the-batch": _SMALL,
    "future-in-statistics": _SMALL,
    "padding-in-statistics": _SMALL,
    "unbiased-variance": (
        "a post-norm behind it takes the factor out again: the outputs differ from the reference's by less than 0.001",
        "其后的后置归一化又消去了这一因子：输出与参考模型相差不到 0.001",
    ),
    "idle-blocks": (
        "after so short a training the weights still look drawn, and the rule does not judge such",
        "训练太短，权重看上去仍是随机抽取的，规则不作判断",
    ),
}

# (architecture, code) of docs/true-surprises.md
SURPRISES = {("mobilenet_v2", "BNS015")}
# there too: true of any model that is trained wholly in bfloat16
SURPRISES_OF_BFLOAT16 = {"NUM013"}
