"""The two doors, ``load`` and ``target``; the family of kinds; casting; wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from normwise import targets
from normwise.targets import EVIDENCE, KINDS, InputsFrom, Target, load, target, unwrap

TEXTS = (
    "", "demo:faulty-decoder", "model.py:build", "folder/model.py:build", "model.py", "package.module:build",
    "module:build", "hf:bert", "hf:./folder", "pkg:rxnmapper",
)  # fmt: skip


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))


@pytest.mark.parametrize("text", TEXTS)
def test_no_two_kinds_claim_one_text(text: str) -> None:
    claiming = [name for name, kind in KINDS.items() if kind.claims(text)]
    assert len(claiming) <= 1
    assert claiming or text.startswith(("hf:", "pkg:"))


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_claims_its_own_example_alone(name: str) -> None:
    example = getattr(KINDS[name], "EXAMPLE", None)
    if example is not None:
        assert [other for other, kind in KINDS.items() if kind.claims(example)] == [name]


def test_all_is_sorted_and_there() -> None:
    assert targets.__all__ == sorted(targets.__all__, key=lambda name: (name.islower(), not name.isupper(), name))
    assert all(hasattr(targets, name) for name in targets.__all__)


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        (torch.ones(2, 4), 1, 0),
        ((torch.ones(2, 4),), 1, 0),
        ([torch.ones(2, 4)], 1, 0),
        ({"input": torch.ones(2, 4)}, 0, 1),
    ],
)
def test_inputs_are_a_tensor_a_tuple_or_a_dict(model: nn.Module, inputs: Any, args: int, kwargs: int) -> None:
    found = target(model, inputs)
    assert (len(found.args), len(found.kwargs), found.inputs_from) == (args, kwargs, InputsFrom.GIVEN)
    assert found.run().shape == (2, 6)
    assert found.model is model


def test_inputs_may_be_a_shape(model: nn.Module) -> None:
    assert target(model, "5x4").inputs_from is InputsFrom.FROM_SHAPE


def test_inputs_and_evidence_go_on_top_of_any_target(model: nn.Module) -> None:
    given = Target(model=model, args=(torch.ones(2, 4),), name="mine", claims=("causal",))
    found = target(given, torch.ones(3, 4), config={"a": 1})
    assert (found.name, found.claims, found.config) == ("mine", ("causal",), {"a": 1})
    assert found.args[0].shape == (3, 4)
    assert target("demo:healthy-resnet", torch.ones(1, 3, 32, 32), claims="online").claims == ("online",)


def test_every_kind_of_evidence_of_the_contract_is_taken() -> None:
    contract = (
        "padded_inputs lengths optimizer scheduler checkpoint reference config train_step eval_fn loader load_info "
        "online dtype claims inputs_other_rank"
    )
    assert set(contract.split()) <= set(EVIDENCE)
    assert not {"model", "args", "kwargs"} & set(EVIDENCE)


@pytest.mark.parametrize("dtype", [torch.float16, "bfloat16", "torch.float64"])
def test_a_copy_is_cast_and_the_users_object_is_not(model: nn.Module, dtype: Any) -> None:
    x, ids = torch.ones(2, 4), torch.ones(2, 4, dtype=torch.long)
    found = target(model, (x, {"ids": ids}), dtype=dtype)
    wanted = found.dtype
    assert isinstance(wanted, torch.dtype)
    assert {p.dtype for p in found.model.parameters()} == {wanted}
    assert found.model[1].num_batches_tracked.dtype is torch.long  # pyright: ignore
    assert (found.args[0].dtype, found.args[1]["ids"].dtype) == (wanted, torch.long)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert x.dtype is torch.float32
    assert found.notes == (f"a copy was cast to {str(wanted).removeprefix('torch.')}",)
    assert load(model, dtype=dtype).dtype is wanted


def test_the_optimizer_follows_the_copy(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.3)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    found = target(model, torch.ones(2, 4), optimizer=optimizer, dtype="float64")
    assert found.optimizer is not None
    assert found.optimizer is not optimizer
    held = found.optimizer.param_groups[0]["params"]
    assert list(map(id, held)) == list(map(id, found.model.parameters()))
    assert set(map(id, found.optimizer.state)) == set(map(id, held))
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())


def test_a_model_already_in_place_is_not_copied(model: nn.Module) -> None:
    assert load(model, dtype="float32", device="cpu").model is model


def test_a_device_is_reached_with_a_copy(model: nn.Module) -> None:
    found = load(model, inputs="2x4", device="meta")
    assert {p.device.type for p in (*found.model.parameters(), *found.args)} == {"meta"}
    assert next(model.parameters()).device.type == "cpu"


class Wrapper(nn.Module):
    """Changes what is computed, so it is part of the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.module(x)


def test_wrappers_that_change_nothing_are_taken_off_and_the_path_is_kept(model: nn.Module) -> None:
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    for wrapped, prefix in [
        (model, ""),
        (compiled, "_orig_mod."),
        (nn.DataParallel(model), "module."),
        (nn.DataParallel(compiled), "module._orig_mod."),
    ]:
        assert unwrap(wrapped) == (model, prefix)
        assert f"{prefix}1" in dict(wrapped.named_modules())


def test_a_wrapper_of_the_users_own_stays(model: nn.Module) -> None:
    wrapper = Wrapper(model)
    assert unwrap(wrapper) == (wrapper, "")


def test_distributed_wrappers_are_taken_off(model: nn.Module, tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert unwrap(nn.parallel.DistributedDataParallel(model)) == (model, "module.")
    finally:
        torch.distributed.destroy_process_group()
