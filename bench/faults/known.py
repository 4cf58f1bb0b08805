"""What is known about the results: misses with their reasons, and findings on healthy models that are right."""

from __future__ import annotations

__all__ = ["MISSES", "SURPRISES", "SURPRISES_OF_BFLOAT16"]

# fault -> why it is missed where it is, in English and Chinese
MISSES: dict[str, tuple[str, str]] = {
    "idle-blocks": (
        "after so short a training the weights still look drawn, and the rule does not judge such",
        "训练太短，权重看上去仍是随机抽取的，规则不作判断",
    ),
}

# (architecture, code) of docs/true-surprises.md
SURPRISES = {("mobilenet_v2", "BNS015")}
# there too: true of any model that is trained wholly in bfloat16
SURPRISES_OF_BFLOAT16 = {"NUM013"}
