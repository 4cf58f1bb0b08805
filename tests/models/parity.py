"""transformers' models and ours with the same weights: how their names and layouts map to each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from normwise.models import Decoder, Encoder

WORDS, WIDTH, HEADS, KV_HEADS, INNER, DEPTH = 61, 32, 4, 2, 48, 3


def randomised(model: nn.Module) -> nn.Module:
    """Return the model in float64 with every parameter random, gains and shifts too."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.05))
    return model.double().eval()


class Wide(TorchFunctionMode):
    """Keeps float64 where transformers' norms and softmax go through float32, which would hide all but 7 digits.

    Rotary angles stay float32, in theirs as in ours.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Leave out the cast."""
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in args[1:]):
                return args[0]
            if func is nn.functional.softmax:
                kwargs.pop("dtype", None)
        return func(*args, **kwargs)


def put(ours: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    """Load weights that must be all of ours."""
    ours.load_state_dict(weights, strict=True)
    return ours.double().eval()


def rename(theirs: dict[str, torch.Tensor], names: dict[str, str], layers: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return our state dict: single names, and names of layers, ``{}`` their number; linear maps as they are."""
    found = {ours: theirs[name] for ours, name in names.items()}
    for index in range(DEPTH):
        for ours, name in layers.items():
            found[f"stack.layers.{index}.{ours}"] = theirs[name.format(index)]
    return found


OUTER = {  # names of the rotary decoders outside their layers
    "embedding.tokens.weight": "model.embed_tokens.weight",
    "stack.final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def _rotary_names(norms: dict[str, str]) -> dict[str, str]:
    attention = {f"attention.sublayer.{n}.weight": f"model.layers.{{}}.self_attn.{n}_proj.weight" for n in "qkv"}
    attention["attention.sublayer.out.weight"] = "model.layers.{}.self_attn.o_proj.weight"
    mlp = {f"mlp.sublayer.{n}.weight": f"model.layers.{{}}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    return {**attention, **mlp, **{ours: f"model.layers.{{}}.{name}.weight" for ours, name in norms.items()}}


def llama() -> tuple[nn.Module, nn.Module]:
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = randomised(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS,
                hidden_size=WIDTH,
                num_hidden_layers=DEPTH,
                num_attention_heads=HEADS,
                num_key_value_heads=KV_HEADS,
                intermediate_size=INNER,
                max_position_embeddings=64,
                tie_word_embeddings=False,
            )
        )
    )
    ours = Decoder(
        WORDS,
        WIDTH,
        DEPTH,
        HEADS,
        norm="llama",
        eps=1e-6,
        mlp="swiglu",
        mlp_size=INNER,
        num_kv_heads=KV_HEADS,
        tied=False,
    )
    norms = {"attention.before.weight": "input_layernorm", "mlp.before.weight": "post_attention_layernorm"}
    return theirs, put(ours, rename(theirs.state_dict(), OUTER, _rotary_names(norms)))


def gemma_2() -> tuple[nn.Module, nn.Module]:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=16,
        intermediate_size=INNER,
        query_pre_attn_scalar=24,
        sliding_window=4,
        max_position_embeddings=64,
    )
    config._attn_implementation = "eager"
    theirs = randomised(Gemma2ForCausalLM(config))
    ours = Decoder(
        WORDS,
        WIDTH,
        DEPTH,
        HEADS,
        placement="sandwich",
        norm="gemma",
        eps=1e-6,
        mlp="geglu-tanh",
        mlp_size=INNER,
        num_kv_heads=KV_HEADS,
        head_dim=16,
        embedding_scale=float(torch.tensor(WIDTH**0.5)),  # a float32 buffer in theirs
        windows=(4, None),
        softcap=50.0,
        attention_scale=24**-0.5,
        head_softcap=30.0,
    )
    norms = {
        "attention.before.weight": "input_layernorm",
        "attention.after_branch.weight": "post_attention_layernorm",
        "mlp.before.weight": "pre_feedforward_layernorm",
        "mlp.after_branch.weight": "post_feedforward_layernorm",
    }
    return theirs, put(ours, rename(theirs.state_dict(), OUTER, _rotary_names(norms)))


def olmo_2() -> tuple[nn.Module, nn.Module]:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    theirs = randomised(
        Olmo2ForCausalLM(
            Olmo2Config(
                vocab_size=WORDS,
                hidden_size=WIDTH,
                num_hidden_layers=DEPTH,
                num_attention_heads=HEADS,
                num_key_value_heads=KV_HEADS,
                intermediate_size=INNER,
                max_position_embeddings=64,
                pad_token_id=None,
            )
        )
    )
    ours = Decoder(
        WORDS,
        WIDTH,
        DEPTH,
        HEADS,
        placement="res-post",
        norm="olmo2",
        eps=1e-5,
        mlp="swiglu",
        mlp_size=INNER,
        num_kv_heads=KV_HEADS,
        qk_norm="all-heads",
        tied=False,
    )
    norms = {
        "attention.after_branch.weight": "post_attention_layernorm",
        "mlp.after_branch.weight": "post_feedforward_layernorm",
        "attention.sublayer.qk_norm.q_norm.weight": "self_attn.q_norm",
        "attention.sublayer.qk_norm.k_norm.weight": "self_attn.k_norm",
    }
    return theirs, put(ours, rename(theirs.state_dict(), OUTER, _rotary_names(norms)))


def gpt_2() -> tuple[nn.Module, nn.Module]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS, n_positions=64)
    theirs = randomised(GPT2LMHeadModel(config))
    ours = Decoder(
        WORDS, WIDTH, DEPTH, HEADS, norm="layer", mlp="gelu-tanh", positions="learned", context=64, bias=True
    )
    given = dict(theirs.state_dict())
    for index in range(DEPTH):  # one matrix for q, k and v, stored the other way round, as all of them are
        place = f"transformer.h.{index}"
        for kind in ("weight", "bias"):
            parts = given[f"{place}.attn.c_attn.{kind}"].split(WIDTH, -1)
            for name, part in zip("qkv", parts, strict=True):
                given[f"{place}.{name}.{kind}"] = part.T if kind == "weight" else part
        for theirs_name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            given[f"{place}.{theirs_name}.weight"] = given[f"{place}.{theirs_name}.weight"].T
    names = {
        "embedding.tokens.weight": "transformer.wte.weight",
        "embedding.positions.weight": "transformer.wpe.weight",
        "head.weight": "lm_head.weight",
        "stack.final_norm.weight": "transformer.ln_f.weight",
        "stack.final_norm.bias": "transformer.ln_f.bias",
    }
    parts = {
        "attention.before": "ln_1",
        "mlp.before": "ln_2",
        **{f"attention.sublayer.{name}": name for name in "qkv"},
        "attention.sublayer.out": "attn.c_proj",
        "mlp.sublayer.up": "mlp.c_fc",
        "mlp.sublayer.down": "mlp.c_proj",
    }
    layers = {f"{a}.{kind}": f"transformer.h.{{}}.{b}.{kind}" for a, b in parts.items() for kind in ("weight", "bias")}
    return theirs, put(ours, rename(given, names, layers))


def bert() -> tuple[nn.Module, nn.Module]:
    from transformers import BertConfig, BertModel

    theirs = randomised(
        BertModel(
            BertConfig(
                vocab_size=WORDS,
                hidden_size=WIDTH,
                num_hidden_layers=DEPTH,
                num_attention_heads=HEADS,
                intermediate_size=INNER,
                max_position_embeddings=64,
            ),
            add_pooling_layer=False,
        )
    )
    ours = Encoder(WORDS, WIDTH, DEPTH, HEADS, eps=1e-12, mlp_size=INNER, context=64, types=2)
    names = {
        "embedding.tokens.weight": "embeddings.word_embeddings.weight",
        "embedding.positions.weight": "embeddings.position_embeddings.weight",
        "embedding.types.weight": "embeddings.token_type_embeddings.weight",
        "embedding.norm.weight": "embeddings.LayerNorm.weight",
        "embedding.norm.bias": "embeddings.LayerNorm.bias",
    }
    parts = {
        "attention.sublayer.q": "attention.self.query",
        "attention.sublayer.k": "attention.self.key",
        "attention.sublayer.v": "attention.self.value",
        "attention.sublayer.out": "attention.output.dense",
        "attention.after_add": "attention.output.LayerNorm",
        "mlp.sublayer.up": "intermediate.dense",
        "mlp.sublayer.down": "output.dense",
        "mlp.after_add": "output.LayerNorm",
    }
    layers = {f"{a}.{kind}": f"encoder.layer.{{}}.{b}.{kind}" for a, b in parts.items() for kind in ("weight", "bias")}
    return theirs, put(ours, rename(theirs.state_dict(), names, layers))


PAIRS: dict[str, Any] = {
    "gpt-2": gpt_2,
    "llama": llama,
    "gemma-2": gemma_2,
    "olmo-2": olmo_2,
    "bert": bert,
}
