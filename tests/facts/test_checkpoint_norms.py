"""Checkpoints by themselves: silence on sound ones of many families, and what is said of faulted ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import normwise as nw
from normwise.checkup import rules
from normwise.checkup.finding import Severity
from normwise.checkup.report import Report
from normwise.facts.records import Evidence
from normwise.spec import Kind
from normwise.targets.hf_build import build_model, quiet
from normwise.targets.hf_config import build_config

pytest.importorskip("transformers")

State = dict[str, Tensor]

FAMILIES = (
    "llama", "gemma", "gemma3_text", "gpt2", "bert", "t5", "qwen3", "qwen3_next", "olmo2", "mamba", "mamba2", "vit",
    "convnext", "resnet", "wav2vec2", "clip", "falcon", "cohere", "mpt", "deepseek_v3",
)  # fmt: skip


def trained(model: nn.Module) -> State:
    """Return the tensors of a model, its norms moved as training moves them."""
    chance = torch.Generator().manual_seed(0)
    moved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for path, module in model.named_modules():
        if "norm" not in type(module).__name__.lower():
            continue
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            drawn = torch.randn(tensor.shape, generator=chance)
            if name == "running_var":
                moved[f"{path}.{name}"] = tensor * (0.5 + drawn.abs())
            elif tensor.is_floating_point():
                moved[f"{path}.{name}"] = tensor + 0.1 * drawn
            else:
                moved[f"{path}.{name}"] = tensor + 5000
    return moved


def family(name: str) -> tuple[State, dict[str, Any]]:
    """Return the tensors and the configuration of a small model of transformers."""
    with quiet():
        torch.manual_seed(0)
        config = build_config(name)
        return trained(build_model(config)), json.loads(config.to_json_string(use_diff=False))


def check(folder: Path, state: State, config: dict[str, Any] | None) -> Report:
    """Save a checkpoint and examine it."""
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return nw.check(str(folder / "model.safetensors"))


def loud(report: Report) -> dict[str, Severity]:
    """Return the codes of warnings and errors."""
    return {f.code: f.severity for f in report.findings if f.severity is not Severity.INFO}


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_said_of_a_sound_checkpoint(tmp_path: Path, name: str) -> None:
    state, config = family(name)
    report = check(tmp_path, state, config)
    assert report.findings == ()
    assert report.norms
    bare = tmp_path / "bare"
    bare.mkdir()
    assert check(bare, state, None).findings == ()
    half = tmp_path / "half"
    half.mkdir()
    rounded = {n: t.bfloat16() if t.is_floating_point() else t for n, t in state.items()}
    assert loud(check(half, rounded, config)) == {}


def test_every_norm_of_a_family_is_found_with_its_convention(tmp_path: Path) -> None:
    state, config = family("gemma3_text")
    report = check(tmp_path, state, config)
    assert {n.path for n in report.norms} == {key.removesuffix(".weight") for key in state if "norm" in key}
    specs = [n.spec for n in report.norms]
    assert all(s is not None and (s.kind, s.weight_offset, s.eps) == (Kind.RMS, 1.0, 1e-6) for s in specs)
    assert {n.evidence for n in report.norms} == {Evidence.KEYS}
    assert {n.calls for n in report.norms} == {0}


def test_without_a_family_the_use_of_a_gain_is_not_known(tmp_path: Path) -> None:
    state, _ = family("gemma")
    report = check(tmp_path, state, None)
    assert {(n.spec, n.evidence) for n in report.norms} == {(None, Evidence.UNKNOWN)}
    why = {n.code: str(n.why) for n in report.not_checked}
    assert all("whether these norms add 1" in why[code] for code in ("PAR002", "PAR004", "PAR005", "PAR010"))


def test_no_rule_passes_what_it_did_not_examine(tmp_path: Path) -> None:
    state, config = family("llama")
    report = check(tmp_path, state, config)
    able = {rule.CODE for rule in rules.all_rules().values() if getattr(rule, "READS_CHECKPOINTS", False)}
    batch_norms, others = {"BNS003", "BNS011", "BNS012"}, {"CKP002", "NUM009"}
    assert able == batch_norms | others | {"PAR002", "PAR004", "PAR005", "PAR009", "PAR010"}
    assert set(report.passed) <= able - {"NUM009"}
    failed = [n for n in report.not_checked if "the rule failed" in str(n.why)]
    assert not failed


# -- faults ----------------------------------------------------------------------------------------


def _gains(state: State) -> list[str]:
    return [
        name
        for name, tensor in state.items()
        if "norm" in name.lower() and name.endswith("weight") and tensor.dim() == 1
    ]


def frozen(state: State) -> None:
    for name in _gains(state):
        state[name] = torch.ones_like(state[name])
    for name, tensor in state.items():
        state[name] = tensor.bfloat16()


def added(state: State) -> None:
    for name in _gains(state):
        state[name] += 1


def subtracted(state: State) -> None:
    for name in _gains(state):
        state[name] -= 1


def negative(state: State) -> None:
    name = next(n for n in state if n.endswith("running_var"))
    state[name][0] = -0.5


def infinite(state: State) -> None:
    name = next(n for n in state if n.endswith("running_mean"))
    state[name][1] = float("inf")


def uncounted(state: State) -> None:
    for name, tensor in state.items():
        if name.endswith(("num_batches_tracked", "running_mean")):
            tensor.zero_()
        elif name.endswith("running_var"):
            tensor.fill_(1)


def not_a_number(state: State) -> None:
    state[_gains(state)[0]][2] = float("nan")


def overflowed(state: State) -> None:
    name = next(n for n in state if n.endswith("LayerNorm.bias"))
    state[name][0] = float("inf")


def silent(state: State) -> None:
    for name in _gains(state):
        state[name].zero_()


def ones(state: State) -> None:
    for name in _gains(state):
        state[name].fill_(1)


def holes(state: State) -> None:
    state[_gains(state)[1]][:3] = 0


def half_buffers(state: State) -> None:
    for name, tensor in state.items():
        if "running" in name:
            state[name] = tensor.half()


def shifts(state: State) -> None:
    for name in _gains(state):
        state[name.replace("weight", "bias")] = torch.full_like(state[name], 0.1)


def no_shifts(state: State) -> None:
    for name in [n for n in state if "LayerNorm.bias" in n]:
        del state[name]


FAULTS: tuple[tuple[str, Callable[[State], None], str, Severity], ...] = (
    ("llama", frozen, "PAR009", Severity.INFO),
    ("gemma", added, "PAR002", Severity.WARNING),
    ("gemma", ones, "PAR010", Severity.WARNING),
    ("gemma3_text", added, "PAR002", Severity.WARNING),
    ("llama", subtracted, "PAR002", Severity.WARNING),
    ("bert", subtracted, "PAR002", Severity.WARNING),
    ("llama", silent, "PAR010", Severity.WARNING),
    ("llama", holes, "PAR005", Severity.WARNING),
    ("llama", not_a_number, "NUM009", Severity.ERROR),
    ("bert", overflowed, "NUM009", Severity.ERROR),
    ("resnet", negative, "BNS011", Severity.ERROR),
    ("resnet", infinite, "BNS011", Severity.ERROR),
    ("resnet", uncounted, "BNS003", Severity.ERROR),
    ("resnet", half_buffers, "BNS012", Severity.INFO),
    ("llama", shifts, "CKP002", Severity.ERROR),
    ("bert", no_shifts, "CKP002", Severity.WARNING),
)


@pytest.mark.parametrize(("name", "fault", "code", "severity"), FAULTS, ids=[f"{f[0]}-{f[1].__name__}" for f in FAULTS])
def test_a_fault_is_found(
    tmp_path: Path, name: str, fault: Callable[[State], None], code: str, severity: Severity
) -> None:
    state, config = family(name)
    fault(state)
    report = check(tmp_path, state, config)
    found = {f.code: f for f in report.findings}
    assert code in found
    assert found[code].severity is severity
    assert set(loud(report)) <= {code}
    assert set(found[code].paths) <= {n.path for n in report.norms}
    assert found[code].fix
    assert report.to_text(lang="zh")


def test_a_gain_far_above_its_siblings_is_a_remark(tmp_path: Path) -> None:
    gains = {f"layers.{i}.norm.weight": 1 + 0.05 * torch.randn(16) for i in range(8)}
    gains["layers.3.norm.weight"] *= 30
    found = check(tmp_path, gains, {"model_type": "llama"}).findings
    assert [(f.code, f.path or f.paths[0]) for f in found] == [("PAR004", "layers.3.norm")]


def test_names_of_other_frameworks_are_read(tmp_path: Path) -> None:
    state = {"block.LayerNorm.gamma": torch.rand(8) + 1, "block.LayerNorm.beta": torch.rand(8)}
    state |= {"blocks.0.gamma": torch.full((8,), 1e-6)}  # a layer scale
    state |= {"bn.gamma": torch.rand(4) + 1, "bn.beta": torch.rand(4), "bn.moving_mean": torch.rand(4)}
    state |= {"bn.moving_variance": torch.rand(4)}
    state |= {
        "qkv.layer_norm_weight": torch.rand(8) + 1,
        "qkv.layer_norm_bias": torch.rand(8),
        "qkv.weight": torch.rand(8, 8),
    }
    report = check(tmp_path, state, None)
    assert {n.path: n.spec and n.spec.kind for n in report.norms} == {
        "block.LayerNorm": Kind.LAYER,
        "bn": Kind.BATCH,
        "qkv.layer_norm": Kind.LAYER,
    }
    assert {n.weight_path for n in report.norms} == {"block.LayerNorm.gamma", "bn.gamma", "qkv.layer_norm_weight"}
