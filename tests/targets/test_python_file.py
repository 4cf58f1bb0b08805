"""A user's file: every form of answer is taken, and loading leaves no trace in the interpreter."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch

from normwise.targets import InputsFrom, Target, Weights, load

FOLDER = Path(__file__).parents[1] / "data" / "targets"
ANSWERS = FOLDER / "answers.py"


def answer(name: str) -> Target:
    return load(f"{ANSWERS}:{name}")


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("model_and_tuple", [(2, 5), (2, 5)]),
        ("model_and_dict", [(2, 5)]),
        ("model_and_tensor", [(2, 5)]),
        ("args_and_kwargs", [(2, 5), (2, 5)]),
        ("whole_target", [(2, 5)]),
        ("decayed", [(1, 8)]),
    ],
)
def test_takes_every_form_of_answer(name: str, shapes: list[tuple[int, ...]]) -> None:
    target = answer(name)
    assert [tuple(value.shape) for value in (*target.args, *target.kwargs.values())] == shapes
    assert (target.inputs_from, target.weights) == (InputsFrom.GIVEN, Weights.GIVEN)
    assert target.run().shape == (*shapes[0], 4)


def test_a_model_alone_gets_inferred_inputs() -> None:
    target = answer("model")
    assert target.inputs_from is InputsFrom.INFERRED
    assert target.run().shape == (2, 12, 4)


def test_a_name_that_holds_a_model_serves_as_it_is() -> None:
    assert isinstance(answer("READY").model, torch.nn.Sequential)


def test_all_evidence_of_a_dict_arrives() -> None:
    decayed, reloaded, trained = answer("decayed"), answer("reloaded"), answer("trained")
    assert decayed.optimizer is not None
    assert decayed.optimizer.param_groups[0]["params"][0] is next(decayed.model.parameters())
    assert (decayed.claims, decayed.config) == (("causal",), {"norm_eps": 1e-5})
    assert reloaded.checkpoint is not None
    assert "ln.weight" in reloaded.checkpoint
    assert reloaded.load_info.missing_keys == ["norm.weight", "norm.bias"]
    assert [len(batch[0]) for batch in trained.loader or ()] == [8, 1]
    assert trained.lengths == [1] * 8
    for name in ("padded_inputs", "train_step", "eval_fn", "online", "reference"):
        assert getattr(trained, name) is not None, name


def test_words_of_a_dict_become_the_values_they_name() -> None:
    target = answer("pretrained")
    assert target.weights is Weights.REAL
    assert target.notes[0] == "trained on nothing"


def test_a_model_in_the_dtype_it_names_is_not_copied() -> None:
    target = answer("half")
    assert target.dtype is torch.float16
    assert target.notes == ()


def test_the_target_is_called_as_it_was_asked_for_unless_it_brings_a_name() -> None:
    assert answer("model").name == f"{ANSWERS}:model"
    assert answer("whole_target").name == "mine"


def test_an_unseeded_builder_makes_the_same_model_each_time_and_leaves_the_random_state() -> None:
    before = torch.get_rng_state()
    one, two = answer("model").model.state_dict(), answer("model").model.state_dict()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert torch.equal(torch.get_rng_state(), before)


def test_loading_leaves_path_modules_and_bytecode_alone() -> None:
    path, bytecode = list(sys.path), sys.dont_write_bytecode
    answer("model")
    assert (sys.path, sys.dont_write_bytecode) == (path, bytecode)
    assert not {"answers", "sibling_of_answers"} & sys.modules.keys()
    assert not (FOLDER / "__pycache__").exists()


def test_a_sibling_of_the_same_name_in_another_folder_is_not_mistaken(tmp_path: Path) -> None:
    answer("model")
    (tmp_path / "sibling_of_answers.py").write_text("from torch import nn\ndef make_norm(h): return nn.RMSNorm(h)\n")
    (tmp_path / "answers.py").write_text(ANSWERS.read_text())
    assert "RMSNorm" in repr(load(f"{tmp_path / 'answers.py'}:model").model)
    assert "LayerNorm" in repr(answer("model").model)


def test_the_source_of_the_users_classes_can_be_found() -> None:
    assert Path(inspect.getfile(type(answer("model").model))) == ANSWERS


def test_two_loads_of_one_file_do_not_share_a_module() -> None:
    assert type(answer("model").model) is not type(answer("model").model)
