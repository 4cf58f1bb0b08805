"""FILE.onnx: what is not supported is named; what is broken or hostile ends in an error of normwise."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import normwise as nw
from normwise import targets
from normwise.errors import NormwiseError, TargetError
from normwise.targets.target import Weights
from tests.targets.onnx_graphs import EMBEDDED, GAIN, INTO, NORMS, STORED, graph, norm_node, written

REFUSED: dict[str, tuple[Any, str]] = {
    "an unknown operator": (lambda: graph([helper.make_node("Mystery", ["x"], ["y"])], (2, 8)),
                            r"not supported: node 0 \(Mystery\), operator set 23"),
    "an operator of another domain": (
        lambda: graph([helper.make_node("Add", ["x", "x"], ["y"], domain="my.own")], (2, 8)), "of the domain my.own"),
    "an operator without its inputs": (lambda: graph([helper.make_node("Add", [], ["y"])], (2, 8)),
                                       r"node 0 \(Add\)"),
    "a loop": (lambda: graph([helper.make_node(
        "If", ["x"], ["y"], then_branch=graph([], (1,)).graph, else_branch=graph([], (1,)).graph)], (2, 8)), r"\(If\)"),
    "a later operator set": (lambda: graph([helper.make_node("Relu", ["x"], ["y"])], (2, 8), opset=99),
                             "operator set 99; export with opset_version=26"),
    "a value that nothing makes": (lambda: graph([helper.make_node("Add", ["x", "z"], ["y"])], (2, 8)),
                                   "reads 'z', which nothing before it makes"),
    "a value made twice": (lambda: graph([helper.make_node("Relu", ["x"], ["y"])] * 2, (2, 8)), "is there already"),
    "a bomb": (lambda: graph([helper.make_node("ConstantOfShape", ["s"], ["y"])], (2, 8),
                             {"s": np.array([2**20, 2**20])}), "elements"),
    "a product that is a bomb": (lambda: graph(
        [helper.make_node("Transpose", ["x"], ["t"]), helper.make_node("Mul", ["x", "t"], ["y"])], (2**20, 1)),
        r"node 1 \(Mul\) would make 1,099,511,627,776 elements"),
    "an input that is a bomb": (lambda: graph([helper.make_node("Relu", ["x"], ["y"])], (2**20, 2**20)), "elements"),
    "statistics of training": (lambda: graph(
        [helper.make_node("BatchNormalization", ["x", "w", "b", "mean", "var"], ["y"], training_mode=1)], (2, 8),
        {key: STORED[key] for key in ("w", "b", "mean", "var")}), "training_mode=1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named(name: str, tmp_path: Path) -> None:
    build, words = REFUSED[name]
    with pytest.raises(TargetError, match=words):
        targets.load(written(build(), tmp_path))


@pytest.mark.parametrize("data", [b"", b"\x00" * 50, b"PK\x03\x04", b"<html>", bytes(range(256)) * 4])
def test_what_is_no_onnx_model_is_said(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(data)
    with pytest.raises(TargetError, match="this is no ONNX model"):
        targets.load(str(tmp_path / "model.onnx"))


def test_a_missing_file_and_a_missing_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="there is no such file"):
        targets.load(str(tmp_path / "none.onnx"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r"pip install 'normwise\[onnx\]'"):
        targets.load(str(tmp_path / "none.onnx"))


def outside(location: str) -> onnx.ModelProto:
    model = graph(norm_node("LayerNormalization", ["w", "b"]), (2, 5, 8), {"w": GAIN, "b": GAIN, **INTO})
    for stored in model.graph.initializer:
        if stored.name == "w":
            stored.ClearField("raw_data")
            stored.data_location = TensorProto.EXTERNAL
            stored.external_data.add(key="location", value=location)
            stored.external_data.add(key="offset", value="4")
    return model


def test_weights_beside_the_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "w.data").write_bytes(b"skip" + GAIN.tobytes())
    target = targets.load(written(outside("w.data"), tmp_path))
    assert torch.equal(target.model.get_parameter("w").detach(), torch.from_numpy(GAIN))
    assert target.weights is Weights.REAL


def test_weights_that_are_not_there_are_drawn_and_that_is_said(tmp_path: Path) -> None:
    target = targets.load(written(outside("w.data"), tmp_path))
    assert target.weights is Weights.RANDOM
    assert any("random ones were drawn" in note for note in target.notes)


@pytest.mark.parametrize("location", ["../w.data", "/etc/passwd", "a/../../w.data", "link", ""])
def test_nothing_outside_the_folder_is_read(location: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "w.data").write_bytes(b"skip" + GAIN.tobytes())
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "w.data")
    with pytest.raises(TargetError, match="outside the folder"):
        targets.load(written(outside(location), tmp_path / "folder"))


def test_hostile_names_become_paths_that_torch_takes(tmp_path: Path) -> None:
    names = ("forward", "training.x", "a..b", "\x1b[31m.red", "__class__.w", "x" * 5000 + ".w", ".")
    nodes = [*EMBEDDED]
    for index, name in enumerate(names):
        nodes.append(
            helper.make_node("Add", ["h" if not index else f"h{index}", name], [f"h{index + 1}"], name=f"/{name}/a")
        )
    nodes.append(helper.make_node("LayerNormalization", [f"h{len(names)}", "w", "b"], ["y"]))
    path = written(graph(nodes, (2, 5, 8), {**dict.fromkeys(names, GAIN), "w": GAIN, "b": GAIN, **INTO}), tmp_path)
    target = targets.load(path)
    assert all("\x1b" not in name and len(name) < 300 for name, _ in target.model.named_modules())
    assert len(nw.map(target).norms) == 1


def mutated(data: bytes, chance: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(found))
        kind = chance.randrange(4)
        if kind == 0:
            found[at] = chance.randrange(256)
        elif kind == 1:
            del found[at : at + chance.randint(1, 30)]
        elif kind == 2:
            found[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 8)))
        else:
            found[at : at + 4] = found[(to := chance.randrange(len(found))) : to + 4]
        if not found:
            return b""
    return bytes(found)


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_mutations_raise_what_they_should_or_nothing(count: int, tmp_path: Path) -> None:
    chance = random.Random(0)
    seeds = [graph(nodes, shape, {k: np.asarray(STORED[k]) for node in nodes for k in node.input if k in STORED})
             for nodes, shape, *_ in NORMS.values()]  # fmt: skip
    data = [seed.SerializeToString() for seed in seeds]
    refused = 0
    for index in range(count):
        path = tmp_path / "m.onnx"
        path.write_bytes(mutated(data[index % len(data)], chance))
        try:
            targets.load(str(path))
        except NormwiseError:
            refused += 1
    assert refused > count / 4
