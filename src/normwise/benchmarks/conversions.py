"""A forward pass of whole models of transformers: as they are, with our layers in place, and converted.

A GPT-2 of 12 layers and width 768 (quick: 2 and 192), and a BERT of the same size, with random weights. In the GPT-2
every LayerNorm becomes an RMSNorm, exactly (``rms-norm``), with gain and bias kept or folded away; in the BERT, which
is Post-Norm, they stay and are ours (``swap-layers``). Each model is proved to be the same before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from normwise import conversions
from normwise.benchmarks._check import Wrong
from normwise.benchmarks._contest import FORWARD, Setting, settle, times_of_models
from normwise.benchmarks._options import Options
from normwise.benchmarks._race import Method, Prepare, race, repeated
from normwise.benchmarks._result import OURS, Row
from normwise.errors import TargetError
from normwise.targets import Target, target

__all__ = ["contests"]

ZH = """transformers 整个模型的一次前向：原样、换上我们的层、转换之后。

12 层、宽度 768（快速：2 层、192）的 GPT-2 和同样大小的 BERT，随机权重。GPT-2 里每个 LayerNorm 都精确地变成 RMSNorm
（``rms-norm``），增益与偏置保留或折叠掉；BERT 是 Post-Norm，归一化留着，换成我们的（``swap-layers``）。计时之前先
证明每个模型不变。
"""
METHOD, QUICK = Method(least=1), Method(rounds=3, least=1)
SHAPE = "BATCHxTOKENS"
SHAPES = ((1, 128), (8, 128), (1, 1))
QUICK_SHAPES = ((1, 16),)
DTYPES = QUICK_DTYPES = (torch.float32,)
AS_IT_IS = "transformers"
_SEED = 20261129
_WORDS = 2048
# by model: the conversions that are raced, ours first, with their options
_RACED: Mapping[str, Mapping[str, tuple[str, dict[str, Any]]]] = {
    "GPT-2": {
        OURS: ("rms-norm", {}),
        f"{OURS}, weightless": ("rms-norm", {"weightless": True}),
        f"{OURS}, swap-layers": ("swap-layers", {}),
    },
    "BERT": {OURS: ("swap-layers", {})},
}


def contests(options: Options, threads: int) -> list[_Forward]:
    """Return a contest for each model, dtype and batch.

    Raises:
        TargetError: transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise TargetError("this benchmark needs transformers: pip install 'normwise[hf]', or run another one")
    return [
        _Forward(
            Setting(layer=name, shape=shape, dtype=dtype, threads=threads, device=options.device), small=options.quick
        )
        for name in _RACED
        for dtype in options.dtypes
        for shape in options.shapes
    ]


class _Forward:
    """The forward pass of one model in several forms."""

    def __init__(self, setting: Setting, *, small: bool) -> None:
        self.setting, self._small = setting, small
        self._raced = _RACED[setting.layer]
        self._models: dict[str, nn.Module] = {}

    def entries(self) -> int:
        """Return how many measurements a round has."""
        return len(self._raced) + 1

    def check(self) -> None:
        """Convert the model, with the proof of each conversion.

        Raises:
            Wrong: a proof failed.
        """
        original = self._original()
        for name, (conversion, options) in self._raced.items():
            made = conversions.convert(conversion, original, **options)
            if not made.proof.passed:
                raise Wrong(f"nothing was timed, {conversion} is not the same function:\n{made.proof}")
            self._models[name] = made.model
        self._models[AS_IT_IS] = original.model

    def run(self, method: Method, advance: Callable[[], Any] = lambda: None) -> tuple[list[Row], bool]:
        """Measure the models in turns."""
        ids = self._ids()

        def prepare(name: str) -> Prepare:
            def call() -> None:
                with torch.inference_mode():
                    self._models[name](input_ids=ids)

            return lambda: repeated(call)

        names = [*self._raced, AS_IT_IS]
        done = race([prepare(name) for name in names], method, settle=settle(self.setting.device), advance=advance)
        return times_of_models(self.setting, FORWARD, names, done), done.finished

    def _original(self) -> Target:
        from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

        build = {"GPT-2": (GPT2Config, GPT2Model), "BERT": (BertConfig, BertModel)}
        config, cls = build[self.setting.layer]
        sizes = {"hidden_size": 192, "num_hidden_layers": 2} if self._small else {}
        ends = {"bos_token_id": None, "eos_token_id": None}  # GPT-2's are words that this vocabulary does not have
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model: Any = cls(config(vocab_size=_WORDS, use_cache=False, **ends, **sizes))
        model = model.to(self.setting.device, self.setting.dtype).eval()
        return target(model, {"input_ids": self._ids()[:1, :16]})

    def _ids(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(_WORDS, self.setting.shape, generator=generator).to(self.setting.device)
