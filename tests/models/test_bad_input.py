"""Bad input to the models: an error that says what was asked for, what was given, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from normwise.models import Decoder, Encoder, EncoderDecoder

IDS = torch.zeros(2, 3, dtype=torch.long)


def decoder(**options: Any) -> Decoder:
    return Decoder(**{"vocab_size": 11, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "context": 6, **options})


def encoder(**options: Any) -> Encoder:
    return Encoder(**{"vocab_size": 11, "hidden_size": 8, "num_layers": 2, "num_heads": 2, **options})


def pair(**options: Any) -> EncoderDecoder:
    return EncoderDecoder(
        **{
            "vocab_size": 11,
            "hidden_size": 8,
            "num_encoder_layers": 2,
            "num_decoder_layers": 3,
            "num_heads": 2,
            **options,
        }
    )


BUILT: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], tuple[str, ...]]] = [
    # names, near ones first
    (decoder, {"placement": "pree"}, ValueError, ("'pree'", "did you mean pre?")),
    (decoder, {"placement": "sandwic"}, ValueError, ("'sandwic'", "did you mean sandwich")),
    (decoder, {"placement": "xyz"}, ValueError, ("'xyz'", "choose from: admin, b2t")),
    (encoder, {"placement": None}, ValueError, ("None", "choose from: admin, b2t")),
    (decoder, {"norm": "rmss"}, ValueError, ("norm='rmss'", "did you mean rms?")),
    (decoder, {"norm": "lama"}, ValueError, ("norm='lama'", "did you mean llama")),
    (decoder, {"norm": "xyz"}, ValueError, ("norm='xyz'", "choose from: rms, layer, scale", "layers.FAMILIES")),
    (decoder, {"norm": 3}, TypeError, ("norm", "NormSpec", "given 3")),
    (pair, {"norm": None}, TypeError, ("norm", "NormSpec", "given None")),
    (decoder, {"mlp": "swiglue"}, ValueError, ("mlp='swiglue'", "did you mean swiglu")),
    (decoder, {"mlp": None}, ValueError, ("mlp=None", "choose from: gelu", "swiglu")),
    (decoder, {"init": "gtp-2"}, ValueError, ("init='gtp-2'", "did you mean gpt-2?")),
    (pair, {"init": 3}, ValueError, ("init=3", "choose from: fan-in", "xavier")),
    (decoder, {"positions": "rotery"}, ValueError, ("positions='rotery'", "did you mean rotary?")),
    (decoder, {"positions": "alibi"}, ValueError, ("positions='alibi'", "choose from: rotary, learned, none")),
    (decoder, {"qk_norm": "heads"}, ValueError, ("qk_norm='heads'", "did you mean head or all-heads?")),
    # sizes
    (decoder, {"num_layers": 0}, ValueError, ("decoder", "layers, 1 or more", "given 0")),
    (decoder, {"num_layers": 2.0}, ValueError, ("decoder", "layers, 1 or more", "given 2.0")),
    (encoder, {"num_layers": -1}, ValueError, ("encoder", "layers, 1 or more", "given -1")),
    (pair, {"num_encoder_layers": 0}, ValueError, ("encoder", "layers, 1 or more", "given 0")),
    (pair, {"num_decoder_layers": 0}, ValueError, ("decoder", "layers, 1 or more", "given 0")),
    *((decoder, {name: 0}, ValueError, (name, "1 or more", "given 0")) for name in ("vocab_size", "context")),
    *((decoder, {name: -4}, ValueError, (name, "1 or more", "given -4")) for name in ("hidden_size", "num_heads")),
    *(
        (decoder, {name: value}, ValueError, (name, "1 or more, or None", f"given {value}"))
        for name in ("num_kv_heads", "head_dim", "mlp_size")
        for value in (0, -4, 2.0, True)
    ),
    (encoder, {"types": -1}, ValueError, ("types", "0 for none", "given -1")),
    (decoder, {"num_heads": 3}, ValueError, ("3 heads", "hidden_size=8", "pass head_dim")),
    (pair, {"num_heads": 5}, ValueError, ("5 heads", "hidden_size=8", "pass head_dim")),
    (decoder, {"num_kv_heads": 4}, ValueError, ("num_kv_heads=4", "num_heads=2")),
    (decoder, {"head_dim": 3}, ValueError, ("rotary", "head_dim=3", "even")),
    (decoder, {"windows": (4, 0)}, ValueError, ("window", "1 key or more", "(4, 0)")),
    (decoder, {"softcap": 0.0}, ValueError, ("softcap", "above 0", "given 0.0")),
    (decoder, {"head_softcap": -1.0}, ValueError, ("head_softcap", "above 0", "given -1.0")),
    (decoder, {"dropout": 1.5}, ValueError, ("dropout", "between 0 and 1", "1.5")),
    (decoder, {"eps": -1.0}, ValueError, ("eps=-1.0", "0 or more")),
]


@pytest.mark.parametrize(
    ("make", "options", "error", "words"), BUILT, ids=lambda case: getattr(case, "__name__", str(case)[:40])
)
def test_what_cannot_be_built_is_refused(
    make: Callable[..., Any], options: dict[str, Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as raised:
        make(**options)
    assert [word for word in words if word not in str(raised.value)] == [], raised.value


def overfull() -> None:
    model = decoder()
    cache = model.new_cache(4)
    model(IDS, cache=cache)
    model(IDS, cache=cache)


def masked_with_a_cache() -> None:
    model = decoder()
    cache = model.new_cache()
    model(IDS, cache=cache)
    model(IDS, cache=cache, mask=torch.ones(2, 3, dtype=torch.bool))  # 6 tokens have been seen


CALLED: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "a cache longer than the context": (lambda: decoder().new_cache(7), ValueError, ("7", "context of 6", "fewer")),
    "a cache for nothing": (lambda: decoder().new_cache(0), ValueError, ("1 or more", "context=0")),
    "half a position": (lambda: decoder().new_cache(2.5), ValueError, ("whole number", "context=2.5")),  # type: ignore[arg-type]
    "a cache that is full": (overfull, ValueError, ("holds 4 positions", "has 3", "3 more", "start a new one")),
    "more positions than learned": (
        lambda: decoder(positions="learned")(torch.zeros(1, 7, dtype=torch.long)),
        ValueError,
        ("7 positions", "context of 6", "longer context"),
    ),
    "a token too high": (lambda: decoder()(IDS + 11), ValueError, ("tokens are 0 to 10", "given 11 to 11")),
    "a token below 0": (lambda: encoder()(IDS - 1), ValueError, ("tokens are 0 to 10", "given -1 to -1")),
    "ids of floats": (lambda: decoder()(IDS.float()), TypeError, ("int64", "given torch.float32")),
    "ids that are text": (lambda: decoder()("hello"), TypeError, ("int64", "given str", "tokenizer")),  # type: ignore[arg-type]
    "no target": (lambda: pair()(IDS, None), TypeError, ("int64", "given NoneType")),  # type: ignore[arg-type]
    "one sequence alone": (lambda: decoder()(IDS[0]), ValueError, ("[B, T]", "given [3]", "ids[None]")),
    "a type that is not there": (lambda: encoder(types=2)(IDS, types=IDS + 2), ValueError, ("0 to 1", "given 2 to 2")),
    "types of a model without": (lambda: encoder()(IDS, types=IDS), ValueError, ("types", "none", "types=")),
    "a mask of numbers": (
        lambda: encoder()(IDS, mask=torch.ones(2, 3)),
        TypeError,
        ("mask is bool", "given torch.float32", "mask.bool()"),
    ),
    "a mask of another length": (
        lambda: encoder()(IDS, mask=torch.ones(2, 4, dtype=torch.bool)),
        ValueError,
        ("mask", "[2, 3]", "given [2, 4]"),
    ),
    "a mask that leaves out what is cached": (masked_with_a_cache, ValueError, ("mask", "[2, 6]", "given [2, 3]")),
    "a source's mask for the target": (
        lambda: pair()(IDS, IDS[:, :2], target_mask=torch.ones(2, 3, dtype=torch.bool)),
        ValueError,
        ("mask", "[2, 2]", "given [2, 3]"),
    ),
    "a decoder that reads nothing": (
        lambda: (model := pair()).decoder(model.embedding(IDS)),
        ValueError,
        ("reads a memory [B, S, H]", "pass memory="),
    ),
    "a memory that nobody reads": (
        lambda: (model := decoder()).stack(x := model.embedding(IDS), attention={"memory": x}),
        ValueError,
        ("reads none", "given a memory"),
    ),
}


@pytest.mark.parametrize("case", CALLED)
def test_what_cannot_be_computed_is_refused(case: str) -> None:
    call, error, words = CALLED[case]
    with pytest.raises(error) as raised:
        call()
    assert [word for word in words if word not in str(raised.value)] == [], raised.value


def test_a_refused_cache_is_left_as_it_was() -> None:
    model = decoder()
    cache = model.new_cache(4)
    model(IDS, cache=cache)
    with pytest.raises(ValueError, match=re.escape("start a new one")):
        model(IDS, cache=cache)
    assert cache.length == 3
    assert model(IDS[:, :1], cache=cache).shape == (2, 1, 11)
