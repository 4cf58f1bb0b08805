"""The norm conventions of model families, by name.

An eps here is the default of the family's own class, or of its config where the class has none; a checkpoint's
config overrides it. Families that share a convention share a line.
"""

from __future__ import annotations

from dataclasses import replace

from normwise.spec.description import PROMOTED, Cast, Form, Gate, NormSpec, Statistic, Weight

__all__ = ["FAMILIES", "family_name"]

_LLAMA = NormSpec(eps=1e-6, cast=Cast.BEFORE_WEIGHT, out_dtype=PROMOTED)  # weight * xhat.to(dtype)
_OLMO2 = NormSpec(eps=1e-6, cast=Cast.AFTER_WEIGHT)  # (weight * xhat).to(dtype)
_GEMMA = replace(_OLMO2, weight_offset=1.0)  # ((1 + weight.float()) * xhat).to(dtype)
_T5 = NormSpec(eps=1e-6, cast=Cast.TO_WEIGHT, out_dtype=PROMOTED)
_WEIGHTLESS = replace(_OLMO2, weight=Weight.NONE)
_NATIVE = NormSpec(eps=1e-5, stats_dtype=None, out_dtype=PROMOTED)  # everything in the dtype of the input
_SPREAD = replace(_NATIVE, statistic=Statistic.VARIANCE, biased=False)  # not centred, yet divided by the deviation

_LAYER = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True, form=Form.TORCH)
_PLAIN_LAYER = replace(_LAYER, bias=False)
_LAYER_THEN_AFFINE = replace(_LAYER, cast=Cast.BEFORE_WEIGHT, out_dtype=PROMOTED)
_HAND_LAYER = replace(_LAYER_THEN_AFFINE, form=Form.DIVISION)
_ANNOTATED = replace(  # weight * c / (std + eps) + bias, as Python reads it
    replace(_NATIVE, center=True, statistic=Statistic.VARIANCE, bias=True),
    eps=1e-6,
    eps_inside=False,
    biased=False,
    form=Form.LEFT_TO_RIGHT,
)
_LAYER_1P = replace(_LAYER, weight_offset=1.0, offset_in_weight_dtype=True)

_GATE_FIRST = replace(_LLAMA, gate=Gate.BEFORE)  # N(x * silu(z)); the number of groups is in the config
_GATE_LAST = replace(_LLAMA, gate=Gate.AFTER, out_dtype=None)  # (weight * xhat.to(dtype) * silu(z.float())).to(dtype)
_GATE_LAST_WIDE = replace(_OLMO2, gate=Gate.AFTER)  # (weight.float() * xhat * silu(z.float())).to(dtype)

_TABLE: tuple[tuple[str, NormSpec], ...] = (
    # RMSNorm, multiplied by its gain in the dtype of the input
    ("llama mistral mistral3 mixtral ministral pixtral", _LLAMA),
    ("qwen2 qwen2-moe qwen2-vl qwen3 qwen3-moe qwen3-vl deepseek-v2 deepseek-v3", _LLAMA),
    ("phi3 granite granitemoe glm glm4 glm4-moe ernie4-5 exaone4 smollm3 seed-oss hunyuan minimax", _LLAMA),
    ("mamba mamba2 bamba jamba zamba2 falcon-mamba falcon-h1 lfm2 kimi-linear longcat-flash", _LLAMA),
    ("apertus arcee aimv2 bitnet chameleon cpmant csm cwm dia mllama timesfm xlstm", _LLAMA),
    ("eurobert llama4 olmoe", replace(_LLAMA, eps=1e-5)),
    # RMSNorm, multiplied in float32
    ("olmo2 olmo3 flex-olmo gpt-oss deepseek-v4 afmoe helium nemotron-h moshi", _OLMO2),
    ("gemma3n gemma4 embedding-gemma2 diffusion-gemma", _OLMO2),
    ("gemma gemma2 gemma3 recurrent-gemma t5gemma vaultgemma qwen3-next qwen3-5 minimax-m3", _GEMMA),
    ("muse-spark", replace(_GEMMA, offset_in_weight_dtype=True)),
    ("muse-spark-input-scaled", replace(_GEMMA, offset_in_weight_dtype=True, weight_on_input=True)),
    # RMSNorm, multiplied in the dtype of the gain
    ("t5 mt5 umt5 longt5 switch udop pix2struct pop2piano idefics kosmos2-5", _T5),
    # RMSNorm without a gain
    ("hrm nanochat llama4-qk falcon-mamba-weightless esmfold2-rms", _WEIGHTLESS),
    ("deepseek-v4-unweighted glm5-unweighted", replace(_WEIGHTLESS, cast=Cast.RECIPROCAL)),
    ("dory-l2", replace(_WEIGHTLESS, statistic=Statistic.L2)),
    # RMSNorm in the dtype of the input
    ("imagegpt", replace(_NATIVE, form=Form.DIVISION)),
    ("gradium-timestep", replace(_NATIVE, form=Form.LEFT_TO_RIGHT)),
    ("pocket-tts", replace(_SPREAD, form=Form.FOLDED)),
    # LayerNorm of torch
    ("gpt2 gpt-neox gptj bart bloom clip falcon gpt-neo opt phi stablelm starcoder2 swin whisper", _LAYER),
    ("altclip biogpt blenderbot codegen gpt-bigcode led m2m-100 marian mbart mra nystromformer openai-gpt", _LAYER),
    ("pegasus perceiver plbart segformer speech-to-text trocr xglm hubert unispeech wav2vec2 wavlm", _LAYER),
    ("bert distilbert electra roberta squeezebert vit", replace(_LAYER, eps=1e-12)),
    ("albert big-bird camembert canine convbert ernie flaubert fnet longformer luke", replace(_LAYER, eps=1e-12)),
    ("lxmert markuplm mpnet rembert roformer tapas xlm xlm-roberta xlnet", replace(_LAYER, eps=1e-12)),
    ("beit blip deit dpt layoutlm vilt vit-mae yolos", replace(_LAYER, eps=1e-12)),
    ("convnext ctrl dinov2 dinov2-with-registers hiera pvt sam siglip siglip2 vit-msn", replace(_LAYER, eps=1e-6)),
    ("deberta-v2", replace(_LAYER, eps=1e-7)),
    ("dbrx modernbert modernbert-decoder mpt", _PLAIN_LAYER),
    ("nemotron videoprism", _LAYER_1P),
    ("chameleon-qk", _LAYER_THEN_AFFINE),
    ("moonshine-streaming", replace(_LAYER_1P, bias=False, cast=Cast.BEFORE_WEIGHT, out_dtype=PROMOTED)),
    ("esmfold2", replace(_LAYER, cast=Cast.AFTER_WEIGHT)),
    ("olmo", replace(_PLAIN_LAYER, weight=Weight.NONE, cast=Cast.AFTER_WEIGHT)),
    # LayerNorm by hand
    ("cohere cohere2", replace(_PLAIN_LAYER, form=Form.RECIPROCAL, cast=Cast.AFTER_WEIGHT)),
    ("deberta", replace(_HAND_LAYER, eps=1e-7)),
    ("vitdet", replace(_HAND_LAYER, eps=1e-6, stats_dtype=None)),
    ("pocket-tts-flow", replace(_LAYER_THEN_AFFINE, form=Form.WELFORD, stats_dtype=None)),
    ("xlstm-multihead", replace(_LAYER_THEN_AFFINE, bias=False, eps=1e-6, form=Form.WELFORD)),
    ("annotated-transformer", _ANNOTATED),
    # gated RMSNorm
    ("mamba2-gated bamba-gated zamba2-gated granite-hybrid-gated nemotron-h-gated", _GATE_FIRST),
    ("qwen3-next-gated qwen3-5-gated olmo-hybrid-gated", _GATE_LAST),
    ("lara-mini-gated falcon-h1-gated", _GATE_LAST_WIDE),
    ("kimi-linear-gated glm5-gated bailing-hybrid-gated", replace(_GATE_LAST_WIDE, gate_activation="sigmoid")),
    ("falcon-h1-gated-first", replace(_GATE_LAST_WIDE, gate=Gate.BEFORE)),
)

FAMILIES: dict[str, NormSpec] = {name: spec for names, spec in _TABLE for name in names.split()}


def family_name(family: str) -> str:
    """Return a family's name as ``FAMILIES`` spells it: "Qwen2_MoE" is "qwen2-moe"."""
    return family.lower().replace("_", "-").replace(".", "-")
