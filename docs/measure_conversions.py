"""Measure what exact conversions keep and what naive ones break: architectures, half precision, training.

``python docs/measure_conversions.py`` (minutes) writes the tables of ``docs/measured.md`` and of the two guides
``docs/layer-to-rms.md``. Data are the sources of the Python standard library, as bytes.
"""

from __future__ import annotations

import copy
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tables import write_table  # beside this file, which is run as a script
from torch import nn

from normwise import conversions
from normwise.conversions import Plan, apply_to_model
from normwise.conversions.proof import Proof
from normwise.models import Decoder
from normwise.rendering.numbers import number
from normwise.targets import Target, load

DOCS = Path(__file__).parent
PAGES = ("measured.md", "layer-to-rms.md", "layer-to-rms.zh-CN.md")
HEADERS = {
    "measured conversions": (
        "architecture, LayerNorms, converted, subtractions, largest error, swapped without centring",
        "架构, LayerNorm, 已转换, 显式减法, 最大误差, 不中心化直接替换",
    ),
    "measured precision": (
        "mean / std of the stream, bfloat16: LayerNorm, RMSNorm, float32: LayerNorm, RMSNorm",
        "流的均值 / 标准差, bfloat16：LayerNorm, RMSNorm, float32：LayerNorm, RMSNorm",
    ),
    "measured training": ("variant, at conversion, 1 step, 10, 40", "变体, 转换时, 1 步, 10, 40"),
}
FAMILIES = (
    "gpt2", "opt", "gpt_neox", "phi", "falcon", "cohere", "nemotron", "vit", "dinov2", "whisper", "bloom", "modernbert",
    "persimmon", "swin", "bert", "bart",
)  # fmt: skip


# -- architectures ---------------------------------------------------------------------------------


def architecture(family: str) -> list[str]:
    """Return the row of one architecture: its proof, and the same proof of a plan that forgets to centre."""
    target = load(f"hf:{family}")
    plan = conversions.plan("rms-norm", target)
    done = sum("->" in change.what for change in plan.changes)
    every = [edit for edit in plan.edits if edit.kind == "swap-norm"]
    cells = [f"`{family}`", str(done + len(plan.refused)), str(done), str(len(plan.changes) - done)]
    if not done:
        return [*cells, "-", "-"]
    naive = Plan(conversion="rms-norm", edits=tuple(every), changes=plan.changes)
    return [*cells, number(_gap(plan, target), 1), number(_gap(naive, target), 2)]


def _gap(plan: Plan, target: Target) -> float:
    converted = copy.deepcopy(target.model)
    apply_to_model(plan, converted)
    proof: Proof = conversions.prove(plan, target, converted, replan=lambda other: plan)
    return float(proof.gate("twin").figures["gap"])


# -- half precision -----------------------------------------------------------------------------------


def precision() -> Iterator[list[str]]:
    """Yield rows: the error of the logits against float64, before and after, by the mean of the stream."""
    ids = torch.randint(96, (4, 32), generator=torch.Generator().manual_seed(0))
    for offset in (0.0, 1.0, 4.0, 100.0):
        torch.manual_seed(0)
        model = Decoder(96, 128, 24, 4, norm="layer", bias=True, tied=False, init="fan-in").eval()
        with torch.no_grad():
            model.embedding.tokens.weight.normal_().add_(offset)
        converted = copy.deepcopy(model)
        apply_to_model(conversions.plan("rms-norm", model, ids), converted)
        truth = _logits(model, ids, torch.float64)
        errors = [
            float((_logits(m, ids, dtype).double() - truth).norm() / truth.norm())
            for dtype in (torch.bfloat16, torch.float32)
            for m in (model, converted)
        ]
        yield [number(_ratio(model, ids), 2), *(number(error, 2) for error in errors)]


def _logits(model: nn.Module, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        return copy.deepcopy(model).to(dtype)(ids)


def _ratio(model: Decoder, ids: torch.Tensor) -> float:
    """Return |mean| / standard deviation of the median token at the first norm."""
    with torch.inference_mode():
        x = model.embedding(ids)
    return float((x.mean(-1).abs() / x.std(-1)).median())


# -- training ------------------------------------------------------------------------------------------


def training() -> Iterator[list[str]]:
    """Yield rows: the loss on held-out text of one trained model, as it goes on after each kind of conversion."""
    text = _text()
    model, ids = _trained(text), text[None, :64]
    plan = conversions.plan("rms-norm", model, ids)
    shapes = {edit.path for edit in plan.edits if edit.kind == "swap-norm"}
    swaps = tuple(edit for edit in plan.edits if edit.kind == "swap-norm")
    variants: Mapping[str, Callable[[nn.Module], Any]] = {
        "LayerNorm": lambda m: None,
        "exact": lambda m: apply_to_model(plan, m),
        "gain and bias kept, not centred": lambda m: apply_to_model(
            Plan(conversion="rms-norm", edits=swaps, changes=plan.changes), m
        ),
        "bias dropped, not centred": lambda m: _without_bias(m, shapes, swaps),
    }
    for name, change in variants.items():
        each = copy.deepcopy(model)
        change(each)
        yield [name, *(number(loss, 5) for loss in _going_on(each, text))]


def _without_bias(model: nn.Module, paths: set[str], swaps: Any) -> None:
    apply_to_model(Plan(conversion="rms-norm", edits=swaps), model)
    for path in paths:
        nn.init.zeros_(model.get_submodule(path).get_parameter("bias"))
        model.get_submodule(path).get_parameter("bias").requires_grad_(False)


def _text() -> torch.Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def _batch(text: torch.Tensor, generator: torch.Generator, size: int = 16, time: int = 64) -> torch.Tensor:
    starts = torch.randint(len(text) - time - 1, (size,), generator=generator)
    return torch.stack([text[start : start + time + 1] for start in starts.tolist()])


def _loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits = model(rows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def _steps(model: nn.Module, text: torch.Tensor, seed: int, steps: int, rate: float) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        _loss(model, _batch(text, generator)).backward()
        optimizer.step()
        yield step


def _trained(text: torch.Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = Decoder(256, 128, 4, 4, norm="layer", bias=True, tied=False)
    for _ in _steps(model, text[: len(text) * 9 // 10], 0, 600, 1e-3):
        pass
    return model


def _going_on(model: nn.Module, text: torch.Tensor) -> Iterator[float]:
    split = len(text) * 9 // 10
    held = _batch(text[split:], torch.Generator().manual_seed(9), size=64)

    def judged() -> float:
        with torch.no_grad():
            return float(_loss(model, held))

    yield judged()
    for step in _steps(model, text[:split], 1, 40, 3e-4):
        if step in (1, 10, 40):
            yield judged()


def main() -> None:
    """Write the tables."""
    rows = {
        "measured conversions": [architecture(family) for family in FAMILIES],
        "measured precision": list(precision()),
        "measured training": list(training()),
    }
    for mark, (english, chinese) in HEADERS.items():
        for page in PAGES:
            write_table(DOCS / page, mark, chinese if "zh" in page else english, rows[mark])


if __name__ == "__main__":
    main()
