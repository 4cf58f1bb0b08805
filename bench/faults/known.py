"""What is known about the results: misses with their reasons, and findings on healthy models that are right."""

from __future__ import annotations

__all__ = ["MISSES", "SURPRISES", "SURPRISES_OF_BFLOAT16"]

# fault -> why it is missed where it is, in English and Chinese: what was seen when the trials were run by hand
_KEEPS_SILENT = (
    "measured, the outputs differ from the reference's by 0.00002 to 0.001: not enough for CKP006 (and CKP002) to "
    "speak",
    "实测输出与参考模型相差 0.00002 到 0.001，不足以让 CKP006（与 CKP002）作出判断",
)
_INNER = (
    "ModernBERT's first block has no norm before its attention: with four blocks two are odd, and no majority is left",
    "ModernBERT 的第一块在注意力之前没有归一化：四块中有两块与众不同，不构成多数",
)
MISSES: dict[str, tuple[str, str]] = {
    "statistics-over-the-batch": (
        "measured, other samples move the outputs by 0.000008 to 0.0004, where the rule says nothing from 0.001 down; "
        "in CLIP it names the norm for information only: the logits of images and texts mix the samples anyway, so "
        "the repair moves nothing",
        "实测其他样本使输出移动 0.000008 到 0.0004，而规则在 0.001 以下不作判断；CLIP 中规则指出了该归一化但只作提示："
        "图文 logits 本来就混合样本，修复不产生变化",
    ),
    "future-in-statistics": (
        "decoders: measured, later steps move the outputs by 0.00006 and 0.0004, below 0.001 (AXS002 names the norm); "
        "Whisper: frames and tokens share no time axis, so nothing was exchanged, and the rule passed",
        "解码器：实测后面的步使输出移动 0.00006 和 0.0004，低于 0.001（AXS002 指出该归一化）；Whisper：帧与词元没有共"
        "同的时间轴，没有替换任何值，规则判为通过",
    ),
    "padding-in-statistics": (
        "measured, padding moves the outputs by 0.00007 to 0.0007, where the rule says nothing from 0.001 down "
        "(AXS002 names the norm)",
        "实测填充使输出移动 0.00007 到 0.0007，而规则在 0.001 以下不作判断（AXS002 指出该归一化）",
    ),
    "statistics-over-time": (
        "AXS003 names the norm as an error instead: CLIP's text tower is causal, which the injector takes for an "
        "encoder because the first output is no sequence",
        "AXS003 以错误指出了该归一化：CLIP 的文本塔是因果的，而第一个输出不是序列，注入器把它当作编码器",
    ),
    "statistics-over-time-alone": (
        "not checked: frames and tokens of Whisper share no time axis (the norm stands in its encoder, which may look "
        "ahead)",
        "未检查：Whisper 的帧与词元没有共同的时间轴（该归一化在编码器中，本来就可以看到后文）",
    ),
    "another-formula-when-decoding": (
        "not checked: frames and tokens of Whisper share no time axis (the norm stands in its encoder, which does not "
        "decode)",
        "未检查：Whisper 的帧与词元没有共同的时间轴（该归一化在编码器中，编码器不逐步解码）",
    ),
    "channel-is-time": (
        "not checked: in Whisper's encoder it cannot be told from runs whether axis 1 is channels or time",
        "未检查：在 Whisper 的编码器中无法从运行判断第 1 轴是通道还是时间",
    ),
    "statistics-of-other-data": (
        "not checked: the rule wants a batch of 8 samples, these inputs hold 2",
        "未检查：规则需要 8 个样本的批次，而这里的输入只有 2 个",
    ),
    "three-batches-counted": (
        "MobileNetV2 has a momentum of 0.997: after three batches 0.000003 % of the start is left",
        "MobileNetV2 的动量为 0.997：三个批次之后初始值只剩 0.000003%",
    ),
    "eps-dominates": (
        "the demo and T5: the stream is large there, eps 100 is 20 % and 55 % of statistic + eps, which is "
        "information below 90 %",
        "演示模型与 T5：那里残差流很大，eps 100 只占（统计量 + eps）的 20% 与 55%，低于 90% 只作提示",
    ),
    "promoted-stream": (
        "the norm is DistilBERT's last: the map behind it casts back, no stream is added to any more",
        "该归一化是 DistilBERT 的最后一个：其后的线性层转回原类型，之后不再有残差相加",
    ),
    "unbiased-variance": (
        "layer norms: AXS008 names the norm for information, as dividing by n moves its values by less than 1 % at "
        "this width; RMS norms (the demo, Llama, Qwen3, Gemma): n - 1 is read as the factor of an L2 norm, and AXS008 "
        "passes; the outputs differ from the reference's by 0.0001 to 0.001, too little for CKP006, or by 0.0011 and "
        "0.0014 (Qwen3, Gemma 2), where CKP006 found no value of the run that differs",
        "LayerNorm：AXS008 指出该归一化但只作提示，因为在此宽度下改为除以 n 使其数值变化不到 1%；RMSNorm（演示模型、"
        "Llama、Qwen3、Gemma）：n - 1 被读作 L2 归一化的因子，AXS008 通过；输出与参考模型相差 0.0001 到 0.001，对 "
        "CKP006 太小，或相差 0.0011 与 0.0014（Qwen3、Gemma 2），此时 CKP006 找不到不同的中间值",
    ),
    "kind-unlike-the-reference": _KEEPS_SILENT,
    "gain-unlike-the-reference": _KEEPS_SILENT,
    "kind-of-another-model": (
        "the configuration says neither kind: no known family, and no key of an RMSNorm; in ALBERT the shared norms, "
        "which the injector leaves alone, keep the kind besides",
        "配置未说明种类：不是已知系列，也没有 RMSNorm 的键；ALBERT 中注入器不改动的共享归一化还保留原来的种类",
    ),
    "eps-of-another-model": (
        "ALBERT's shared norms, which the injector leaves alone, keep the stated eps, and the rule asks whether any "
        "has it",
        "ALBERT 中注入器不改动的共享归一化仍为所述 eps，而规则只问是否有归一化符合",
    ),
    "offset-mistaken": (
        "Gemma 2 and 3: gains around 1 in a norm that adds 1 are named for information only, as nothing else bears "
        "witness (the checkpoint holds the same); ALBERT: only two of its four norms are changed, not the four fifths "
        "that the rule asks for",
        "Gemma 2 与 3：加 1 的归一化中增益在 1 附近，只作提示，因为没有别的证据（检查点中也是这些值）；ALBERT：四个归"
        "一化中只改了两个，不到规则要求的五分之四",
    ),
    "gains-in-no-group": (
        "T5 multiplies what its last norm returns by 1/8, so 21 of 22 gains count as 1, and the finding stays "
        "information",
        "T5 把最后一个归一化的输出乘以 1/8，因此 22 个增益中只有 21 个算作 1，结果只作提示",
    ),
    "final-norm-missing": (
        "another norm follows before the output: head.norm in ModernBERT, the L2 norm of the embeddings in CLIP",
        "输出之前还有别的归一化：ModernBERT 的 head.norm，CLIP 中嵌入的 L2 归一化",
    ),
    "block-without-norms": _INNER,
    "block-with-one-norm-more": _INNER,
    "skip-from-normed": (
        "GPT-NeoX adds attention and feed-forward at once: the moved norm also closes the block before, so two of "
        "four blocks are odd, and the add does not look like one without a norm",
        "GPT-NeoX 同时相加注意力与前馈：移动的归一化同时也结束前一块，四块中有两块与众不同，而这次相加看上去并不缺归一"
        "化",
    ),
    "loud-writer": (
        "the stream grows 2.2 times at once in ModernBERT, the rule reports from 8 times on",
        "ModernBERT 中残差流一次增长 2.2 倍，规则从 8 倍起报告",
    ),
    "idle-blocks": (
        "not checked: after so short a training most matrices still look drawn, and the rule does not judge such",
        "未检查：训练太短，多数矩阵看上去仍是随机抽取的，规则不作判断",
    ),
    "logits-saturated": (
        "one head of four has an entropy below 10 % (Gemma 2, CLIP), the rule asks for three quarters of the heads",
        "四个头中只有一个的熵低于 10%（Gemma 2、CLIP），规则要求四分之三",
    ),
    "qk-norm-without-scale": (
        "Gemma 3's own scale is a quarter of the usual one here: ten times that is 2.5, the rule reports from 6.6 on",
        "Gemma 3 此处自己的缩放是通常的四分之一：十倍后为 2.5，规则从 6.6 起报告",
    ),
    "placement-of-the-flag": (
        "not checked: needs a loss; nn.Transformer takes two inputs, so a pair of the loader is read as those, not as "
        "input and target",
        "未检查：需要损失；nn.Transformer 有两个输入，数据的一对被当作两个输入，而不是输入与目标",
    ),
}

# (architecture, code) of docs/true-surprises.md
SURPRISES = {("mobilenet_v2", "BNS015")}
# there too: true of any model that is trained wholly in bfloat16
SURPRISES_OF_BFLOAT16 = {"NUM013"}
