"""The healthy models: architectures of transformers at tiny size, and models written here and in normwise.

Every one comes with inputs it runs on. Weights are random; what a rule needs trained weights for is made
"trained-like" by the settings (settings.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["ARCHITECTURES", "Plain", "build"]

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

# model type -> auto class of transformers ("" is the bare model), and what is made smaller than its default
HUB: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("CausalLM", {}),
    "qwen3": ("CausalLM", {}),
    "gemma2": ("CausalLM", {}),
    "gemma3_text": ("CausalLM", {}),
    "olmo2": ("CausalLM", {}),
    "granite": ("CausalLM", {}),
    "gpt2": ("CausalLM", {}),
    "opt": ("CausalLM", {}),
    "bloom": ("CausalLM", {}),
    "gpt_neox": ("CausalLM", {}),
    "phi": ("CausalLM", {}),
    "falcon": ("CausalLM", {}),
    "mamba": ("CausalLM", {}),
    "bert": ("MaskedLM", {}),
    "roberta": ("MaskedLM", {}),
    "albert": ("MaskedLM", {}),
    "electra": ("MaskedLM", {}),
    "distilbert": ("MaskedLM", {}),
    "modernbert": ("MaskedLM", {}),
    "deberta-v2": ("MaskedLM", {}),
    "t5": ("Seq2SeqLM", {}),
    "bart": ("Seq2SeqLM", {}),
    "whisper": ("SpeechSeq2Seq", {}),
    "wav2vec2": ("CTC", {}),
    "hubert": ("CTC", {}),
    "vit": ("ImageClassification", {}),
    "deit": ("", {}),
    "swin": ("ImageClassification", {"depths": [2, 2], "num_heads": [2, 4]}),
    "convnext": ("ImageClassification", {"depths": [2, 2], "hidden_sizes": [16, 32], "num_stages": 2}),
    "resnet": (
        "ImageClassification",
        {"depths": [2, 2], "hidden_sizes": [32, 64], "embedding_size": 16, "layer_type": "basic"},
    ),
    "mobilenet_v2": ("ImageClassification", {}),
    "clip": ("", {}),
}


def _of_transformers(model_type: str) -> Built:
    import transformers

    from normwise.targets.hf import build_config
    from normwise.targets.hf_build import build_model, quiet
    from normwise.targets.hf_inputs import find_inputs

    head, smaller = HUB[model_type]
    with quiet():
        config = build_config(model_type, widths=True)
        for name, value in smaller.items():
            setattr(config, name, value)
        model = getattr(transformers, f"AutoModelFor{head}").from_config(config) if head else build_model(config)
        return model.eval(), (), dict(find_inputs(model).kwargs)


def _ids(rows: int = 4, steps: int = 12) -> torch.Tensor:
    return torch.randint(1, 50, (rows, steps), generator=torch.Generator().manual_seed(1))


def _decoder(placement: str, **options: Any) -> Callable[[], Built]:
    def made() -> Built:
        from normwise.models import Decoder

        return Decoder(50, 32, 6, 4, placement=placement, **options).eval(), (_ids(),), {}

    return made


def _encoder(placement: str) -> Callable[[], Built]:
    def made() -> Built:
        from normwise.models import Encoder

        return Encoder(50, 32, 6, 4, placement=placement).eval(), (_ids(),), {}

    return made


class Plain(nn.Module):
    """torch's encoder between an embedding of its own and a head."""

    def __init__(self, *, norm_first: bool, depth: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.embed = nn.Linear(12, 32)
        norm = nn.LayerNorm(32) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, depth, norm=norm, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, 12] -> [B, 5]."""
        return self.head(self.encoder(self.embed(x)).mean(1))


def _deep() -> Built:
    from normwise.models import Encoder

    model = Encoder(50, 32, 14, 4, placement="post")
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.xavier_uniform_(parameter)
    return model.eval(), (_ids(),), {}


def _transformer() -> Built:
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1))
    return nn.Transformer(16, 2, 2, 2, 32, batch_first=True).eval(), (x, x + 1), {}


def _demo(name: str) -> Built:
    from normwise.models.demo import DEMOS

    made = DEMOS[name]()
    return made["model"].eval(), made["inputs"], {}


def _plain(*, norm_first: bool) -> Callable[[], Built]:
    x = torch.randn(16, 6, 12, generator=torch.Generator().manual_seed(1))
    return lambda: (Plain(norm_first=norm_first).eval(), (x,), {})


class Block(nn.Module):
    """Two convolutions with batch norms beside a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the branch and rectify."""
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class Convolutions(nn.Module):
    """A small residual network on images."""

    def __init__(self, channels: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] -> [B, 5]."""
        return self.head(self.blocks(torch.relu(self.norm(self.stem(images)))).mean((2, 3)))


class Grouped(nn.Module):
    """Convolutions with group norms."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 if i == 0 else channels, channels, 3, padding=1) for i in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for _ in range(3))
        self.head = nn.Linear(channels, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] -> [B, 5]."""
        x = images
        for conv, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


def _images() -> torch.Tensor:
    return torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def _perceptron() -> Built:
    layers = (nn.Linear(12, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU())
    more = (nn.Linear(24, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 5))
    x = torch.randn(32, 12, generator=torch.Generator().manual_seed(1))
    return nn.Sequential(*layers, *more).eval(), (x,), {}


HERE: dict[str, Callable[[], Built]] = {
    "decoder:pre": _decoder("pre"),
    "decoder:post": _decoder("post"),
    "decoder:deep-norm": _decoder("deep-norm", norm="layer"),
    "decoder:sandwich": _decoder("sandwich"),
    "decoder:res-post": _decoder("res-post"),
    "decoder:qk-norm": _decoder("pre", qk_norm="head"),
    "encoder:post": _encoder("post"),
    "encoder:deep-post": _deep,
    "torch:pre": _plain(norm_first=True),
    "torch:post": _plain(norm_first=False),
    "torch:transformer": _transformer,
    "demo:decoder": lambda: _demo("healthy-decoder"),
    "demo:resnet": lambda: _demo("healthy-resnet"),
    "conv:batch-norm": lambda: (Convolutions().eval(), (_images(),), {}),
    "conv:group-norm": lambda: (Grouped().eval(), (_images(),), {}),
    "mlp:batch-norm": _perceptron,
}
ARCHITECTURES = (*HERE, *HUB)


def build(name: str) -> Built:
    """Return a fresh healthy model, always with the same weights, and one call's inputs."""
    torch.manual_seed(0)
    return HERE[name]() if name in HERE else _of_transformers(name)
