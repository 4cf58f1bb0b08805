"""One training step of a small Llama of transformers, as it is and with all its norms swapped for ours.

Eight layers of width 512 with random weights, 17 norms; forward, loss, backward and an AdamW step on 1,024 tokens.
Both models start with the same weights. Peak memory is what one step holds beyond weights and optimizer state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from normwise import layers
from normwise.benchmarks._check import Wrong, check_layer
from normwise.benchmarks._contest import Setting, settle, times_of_models
from normwise.benchmarks._options import Options
from normwise.benchmarks._race import Method, Prepare, race, repeated
from normwise.benchmarks._result import OURS, Row
from normwise.benchmarks._rivals import EAGER, TRANSFORMERS
from normwise.benchmarks._saved import peak_bytes
from normwise.errors import TargetError
from normwise.kernels import eager

__all__ = ["contests", "swap"]

ZH = """transformers 的小型 Llama 的一个训练步：原样，以及把全部归一化换成我们的。

八层、宽度 512、随机权重、17 个归一化；在 1024 个词元上做前向、损失、反向和一步 AdamW。两个模型的初始权重相同。
峰值内存是一步中除权重和优化器状态之外占用的内存。
"""
METHOD, QUICK = Method(least=1), Method(rounds=3, least=1)
SHAPE = "BATCHxTOKENS"
SHAPES = ((4, 256),)
QUICK_SHAPES = ((2, 128),)
DTYPES = QUICK_DTYPES = (torch.float32,)
STEP = "training step"
_SEED = 20261129
_SMALL_RATE = 1e-5  # of AdamW: the weights move, the loss stays finite however many steps are timed
_NORMS, _LOG2_WIDTH = 17, 9


def _units(dtype: torch.dtype) -> int:
    """Return how many units in the last place the losses may differ.

    A norm may be off by 8 + log2(width) units, as in ``normwise.testing``, and 17 of them add up. In half precision
    each norm may round to the neighbour.
    """
    return _NORMS if dtype in (torch.bfloat16, torch.float16) else _NORMS * (8 + _LOG2_WIDTH)


def contests(options: Options, threads: int) -> list[_Training]:
    """Return a contest for each dtype and batch.

    Raises:
        TargetError: transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise TargetError("this benchmark needs transformers: pip install 'normwise[hf]', or run another one")
    made = []
    for dtype in options.dtypes:
        for shape in options.shapes:
            setting = Setting(layer="Llama", shape=shape, dtype=dtype, threads=threads, device=options.device)
            made.append(_Training(setting, with_eager=options.eager))
    return made


def swap(model: nn.Module, make: Callable[[nn.Module], nn.Module]) -> int:
    """Put another norm in the place of every norm of a Llama, and return how many there were."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    found = [(name, each) for name, each in model.named_modules() if isinstance(each, LlamaRMSNorm)]
    for name, norm in found:
        home, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(home), attribute, make(norm))
    return len(found)


def _ours(norm: Any) -> nn.Module:
    made = layers.RMSNorm.like("llama", norm.weight.shape[0], eps=norm.variance_epsilon, dtype=norm.weight.dtype)
    made.weight = norm.weight
    return made


class _EagerNorm(nn.Module):
    """Our norm computed by the eager kernel."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.inner: Any = _ours(norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return eager.forward(self.inner.spec, x, self.inner.weight)


class _Training:
    """The training step of the same model with different norms."""

    def __init__(self, setting: Setting, *, with_eager: bool) -> None:
        self.setting = setting
        norms: dict[str, Callable[[Any], nn.Module] | None] = {OURS: _ours}
        if with_eager:
            norms[EAGER] = _EagerNorm
        self._norms = {**norms, TRANSFORMERS: None}

    def entries(self) -> int:
        """Return how many measurements a round has."""
        return len(self._norms)

    def check(self) -> None:
        """Hold our norm to the conformance suite, and the loss of the swapped model to that of the original.

        Raises:
            Wrong: they differ.
        """
        model, batch = self._model(), self._batch()
        width, dtype = model.config.hidden_size, self.setting.dtype
        ours = partial(layers.RMSNorm.like, "llama", width)
        check_layer(
            ours, ours().spec, (self.setting.shape[0] * self.setting.shape[1], width), dtype, device=self.setting.device
        )
        with torch.no_grad():
            expected = float(model(input_ids=batch, labels=batch).loss)
            swap(model, _ours)
            found = float(model(input_ids=batch, labels=batch).loss)
        off, limit = abs(found - expected) / abs(expected), _units(dtype) * torch.finfo(dtype).eps
        if not off <= limit:
            raise Wrong(
                f"nothing was timed, the results are wrong: the loss with our norms is {found:.8g}, with those of "
                f"transformers {expected:.8g}; they may differ by {limit:.1e} of it"
            )

    def run(self, method: Method, advance: Callable[[], Any] = lambda: None) -> tuple[list[Row], bool]:
        """Measure the steps in turns, then the memory of one step of each."""
        original, batch = self._model(), self._batch()
        steps: dict[str, _Step] = {}

        def prepare(name: str) -> Prepare:
            def make() -> Any:
                if name not in steps:
                    model, norm = copy.deepcopy(original), self._norms[name]
                    if norm is not None:
                        swap(model, norm)
                    steps[name] = _Step(model, batch)
                return repeated(steps[name])

            return make

        done = race(
            [prepare(name) for name in self._norms], method, settle=settle(self.setting.device), advance=advance
        )
        rows = times_of_models(self.setting, STEP, self._norms, done)
        if done.finished:
            rows = [replace(row, peak_bytes=steps[row.rival].peak()) if row.ms else row for row in rows]
        return rows, done.finished

    def _model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=8, use_cache=False,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model: Any = LlamaForCausalLM(config)
            return model.to(self.setting.device, self.setting.dtype).train()

    def _batch(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(2048, self.setting.shape, generator=generator).to(self.setting.device)


class _Step:
    """One training step, as often as it is called."""

    def __init__(self, model: Any, batch: torch.Tensor) -> None:
        self._model, self._batch = model, batch
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=_SMALL_RATE)

    def __call__(self) -> None:
        self._optimizer.zero_grad()
        self._model(input_ids=self._batch, labels=self._batch).loss.backward()
        self._optimizer.step()

    def peak(self) -> int:
        """Return the most bytes that a step holds beyond weights and optimizer state."""
        self._optimizer.zero_grad()
        return peak_bytes(self, self._batch.device)
