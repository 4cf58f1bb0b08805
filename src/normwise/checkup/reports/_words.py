"""The words around a report's data in two languages. Data (paths, messages, codes) stay as they are."""

from __future__ import annotations

from dataclasses import dataclass

from normwise.checkup.reports._evidence import EVIDENCE_ZH
from normwise.rendering import in_language

__all__ = ["LANGUAGES", "ZH", "Words", "words"]

LANGUAGES = ("en", "zh")

# English phrase -> Chinese. Counted nouns have {n} in the Chinese, and an English plural in _PLURALS if irregular.
ZH = {
    "error": "{n} 个错误",
    "warning": "{n} 个警告",
    "info": "{n} 条提示",
    "passed": "{n} 条通过",
    "not checked": "{n} 条未检查",
    "suppressed": "{n} 条已抑制",
    "norm": "{n} 个归一化层",
    "stack": "{n} 条残差流",
    "block": "{n} 个块",
    "sublayer": "{n} 个子层",
    "row": "{n} 行",
    "forward pass": "{n} 次前向",
    "backward pass": "{n} 次反向",
    "of them for a repair": "其中 {n} 次为修复验证",
    "rule": "{n} 条规则",
    "effort": "力度",
    "floor": "下限",
    "no findings": "没有发现问题",
    "model unchanged": "模型未被改动",
    "MODEL CHANGED": "模型被改动了",
    "peak memory": "内存峰值",
    "inputs": "输入",
    "given": "由用户给出",
    "made from the given shape": "按给定形状生成",
    "inferred from the model": "由模型推断",
    "none, the model was not run": "无，模型没有运行",
    "none, a checkpoint does not run": "无，检查点不能运行",
    "weights": "权重",
    "yours": "用户的",
    "real": "真实",
    "random (structure counts, magnitudes do not)": "随机（只看结构，不看数值）",
    "none (structure only)": "无（只看结构）",
    "Placement": "归一化的位置",
    "final norm": "末端归一化",
    "ends with its own norm": "以块自身的归一化结束",
    "starts with a norm": "始于归一化",
    "embedding norm": "嵌入归一化",
    "QK norm": "QK 归一化",
    "inner norm": "子层内归一化",
    "yes": "是",
    "no": "否",
    "pre-norm": "前置归一化",
    "post-norm": "后置归一化",
    "sandwich norm": "三明治归一化",
    "res-post-norm": "分支后归一化",
    "parallel branches, a norm each": "并行分支，各有归一化",
    "parallel branches, one shared norm": "并行分支，共用归一化",
    "no norm around the adds": "相加处没有归一化",
    "mixed": "混合",
    "another form": "其他形式",
    "where the norms sit is not in a checkpoint": "检查点不含归一化所处的位置",
    "no residual stream was found": "没有发现残差流",
    "Norms": "归一化层",
    "No normalization found": "没有发现归一化层",
    "Norms not known": "归一化层未知",
    "the model ran, and nothing in it normalizes activations": "模型已运行，其中没有任何对激活的归一化",
    "the model was not run": "模型没有运行",
    "no keys of the checkpoint look like those of a norm": "检查点的键中没有像归一化的",
    "but the dataflow was lost in places, see below": "但数据流有中断，见下",
    "path": "路径",
    "kind": "类型",
    "axes": "轴",
    "eps": "ε",
    "stats": "统计精度",
    "gain": "增益",
    "place": "位置",
    "calls": "次数",
    "evidence": "依据",
    "class": "类",
    "source": "源码",
    "verified by replay": "回放验证",
    "read off the graph": "由图读出",
    "probed from outside": "由外部探测",
    "read off the keys": "由键读出",
    "not understood": "未能识别",
    "Listed apart": "单独列出",
    "normalizes, but no activations of a stream": "有归一化，但不作用于残差流的激活",
    "norms that these inputs do not reach": "这些输入没有触及的归一化层",
    "the map may be incomplete from here on": "由此往后的一览表可能不完整",
    "Never executed": "从未执行",
    "Dataflow lost": "数据流中断",
    "Profile by depth": "随深度的变化",
    "root mean square, first to last sublayer, log scale": "均方根，自首至末子层，对数刻度",
    "residual stream, RMS": "残差流，均方根",
    "branch / stream": "分支 / 残差流",
    "gradient, RMS": "梯度，均方根",
    "median token": "中位词元",
    "branch gain v": "分支增益 v",
    "block influence, 1 - cos": "块影响 1 - cos",
    "gradient of the query weights, RMS": "查询权重的梯度，均方根",
    "influence": "块影响",
    "predicted from theory at initialisation": "理论在初始化时的预测",
    "share of eps under the root": "ε 在根号下的占比",
    "each with its own scale; a cross marks NaN, infinity or zero": "各有刻度；叉号表示 NaN、无穷或零",
    "residual": "残差流",
    "branch": "分支",
    "gradient": "梯度",
    "predicted": "预测",
    "Findings": "发现的问题",
    "basis": "根据",
    "proof": "证明",
    "measured": "实测",
    "pattern": "结构",
    "fix": "修复",
    "why": "说明",
    "with": "若",
    "effect": "效果",
    "before": "改前",
    "after": "改后",
    "reproduce": "重现",
    "page": "说明页",
    "what they look for": "它们检查什么",
    "Numbers that the rules judge by": "规则所用的数值界限",
    "places": "处",
    "more": "另有 {n} 项",
    "Passed": "通过",
    "Not checked": "未检查",
    "Suppressed": "已抑制",
    "found, and kept quiet on request": "已发现，按要求不计入",
    "Unused suppressions": "未用到的抑制",
    "unused suppression": "未用到的抑制",
    "they met no finding: take them away": "没有遇到任何发现：请删除",
    "configuration": "配置文件",
    "nw.ignore": "代码 nw.ignore",
    "baseline": "基线",
    "reason": "理由",
    "said by": "出处",
    "where": "何处",
    "what": "问题",
    "level": "级别",
    "rules": "规则",
    "no rules were run: this is a map": "没有运行规则：这里只有一览表",
    "no rule could be judged": "没有一条规则可以判定",
    "Environment": "环境",
    "cost": "开销",
    "versions": "版本",
    "model": "模型",
    "note": "注",
    "Report": "报告",
    "input's": "同输入",
    "left out, the terminal is narrow": "终端较窄，略去",
    "N is a norm, F a sublayer, A attention, M the MLP": "N 为归一化，F 为子层，A 为注意力，M 为 MLP",
    "in the JSON report": "见 JSON 报告",
}

_FIRST_CHINESE = "\u2e80"  # where the characters of East Asia begin
_SAME_IN_PLURAL = ("info", "passed", "not checked", "suppressed", "of them for a repair")
_PLURALS = {"forward pass": "forward passes", "backward pass": "backward passes"}


@dataclass(frozen=True, slots=True)
class Words:
    """Says a phrase in one language."""

    lang: str

    def __call__(self, phrase: str) -> str:
        """Say a phrase, given in English."""
        return ZH[phrase] if self.lang == "zh" else phrase

    def text(self, sentence: str) -> str:
        """Return a sentence that a rule or a fact said, in this language where it has it."""
        return in_language(sentence, self.lang)

    def name(self, key: str) -> str:
        """Say the name of a piece of evidence, in Chinese where it is a usual one."""
        usual = EVIDENCE_ZH.get(key) if self.lang == "zh" else None
        return usual or key.replace("_", " ")

    def count(self, n: int, noun: str) -> str:
        """Say how many there are of something."""
        if self.lang == "zh":
            return ZH[noun].format(n=n)
        plural = noun if noun in _SAME_IN_PLURAL else _PLURALS.get(noun, f"{noun}s")
        return f"{n} {noun if n == 1 else plural}"

    def more(self, n: int) -> str:
        """Say that so many are left out."""
        return ZH["more"].format(n=n) if self.lang == "zh" else f"+{n} more"

    def joined(self, word: str, rest: str) -> str:
        """Set a word before others: no space between Chinese ones."""
        return f"{word}{rest}" if self.lang == "zh" and rest[:1] >= _FIRST_CHINESE else f"{word} {rest}"

    def noun(self, noun: str) -> str:
        """Say a counted noun alone."""
        return ZH[noun].split(" ")[-1][1:] if self.lang == "zh" else noun  # without its measure word


def words(lang: str) -> Words:
    """Return the words of a language.

    Raises:
        ValueError: a language the reports do not have.
    """
    if lang not in LANGUAGES:
        raise ValueError(f"reports speak {', '.join(LANGUAGES)}, got {lang!r}")
    return Words(lang)
