"""Wrapped, sharded, quantised and meta models are mapped like the model inside; paths stay the user's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import normwise as nw

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
NORMS = ["1.norm", "2.norm", "3"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Block(), Block(), nn.LayerNorm(16))


class Int8Linear(nn.Module):
    """Weights as int8 buffers and a scale a row, as quantisation libraries keep them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = self.get_buffer("weight"), self.get_buffer("scale")
        return nn.functional.linear(x, weight.to(x.dtype) * scale, self.bias)


class Adapter(nn.Module):
    """A low-rank adapter around a layer, with the names and the structure that PEFT gives it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Wrapped(nn.Module):
    """Passes on, as the classes of PEFT around a model do."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, model)

    def forward(self, *args: Any) -> Any:
        return self.get_submodule(self.name)(*args)


def adapted() -> nn.Module:
    model = plain()
    for block in (model[1], model[2]):
        block.linear = Adapter(block.linear)  # type: ignore[assignment]
    return Wrapped(Wrapped(model, "model"), "base_model")


def quantised() -> nn.Module:
    model = plain()
    for block in (model[1], model[2]):
        block.linear = Int8Linear(block.linear)  # type: ignore[assignment, arg-type]
    return model


def dynamically_quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear}, dtype=torch.qint8)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return plain()


def sharded() -> nn.Module:
    model, mesh = plain(), init_device_mesh("cpu", (1,))
    for part in (model[1], model[2], model):
        fully_shard(part, mesh=mesh)
    return model


def compiled_in_place() -> nn.Module:
    model = plain()
    model.compile(backend="eager")
    return model


WRAPPED: dict[str, tuple[Callable[[], Any], str]] = {
    "torch.compile": (lambda: torch.compile(plain(), backend="eager"), "_orig_mod."),
    "Module.compile": (compiled_in_place, ""),
    "DataParallel": (lambda: nn.DataParallel(plain()), "module."),
    "adapters": (adapted, "base_model.model."),
    "int8 buffers": (quantised, ""),
    "dynamic quantisation": (dynamically_quantised, ""),
    "meta": (on_meta, ""),
}
DISTRIBUTED: dict[str, tuple[Callable[[], Any], str]] = {
    "DDP": (lambda: nn.parallel.DistributedDataParallel(plain()), "module."),
    "compiled DDP": (
        lambda: torch.compile(nn.parallel.DistributedDataParallel(plain()), backend="eager"),
        "_orig_mod.module.",
    ),
    "FSDP": (lambda: FullyShardedDataParallel(plain(), device_id=torch.device("cpu")), "_fsdp_wrapped_module."),
    "fully_shard": (sharded, ""),
}


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def judge(build: Callable[[], Any], prefix: str) -> nw.Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = nw.check(build(), X)
    assert [site.path for site in report.norms] == [f"{prefix}{path}" for path in NORMS]
    assert [str(site.placement) for site in report.norms] == ["pre", "pre", "final"]
    assert [str(stack.kind) for stack in report.placement.stacks] == ["pre"]
    return report


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_model_is_mapped(name: str) -> None:
    report = judge(*WRAPPED[name])
    if name != "dynamic quantisation":  # its scales are those of the whole batch: samples do reach each other
        assert not [finding for finding in report.findings if finding.severity != "info"]


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_a_distributed_model_is_mapped(name: str, one_rank: None) -> None:
    judge(*DISTRIBUTED[name])


def test_a_meta_model_is_not_judged_by_its_numbers() -> None:
    report = judge(on_meta, "")
    assert len(report.not_checked) > 20


def test_a_sharded_model_still_trains_after_the_check(one_rank: None) -> None:
    model = sharded()
    nw.check(model, X)
    model(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
