"""FILE.pt2 is read as data: the same numbers and the same map as the model, and no code of the file is run."""

from __future__ import annotations

import io
import json
import random
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export, save

import normwise as nw
from normwise import targets
from normwise.errors import NormwiseError, TargetError
from normwise.targets.target import InputsFrom, Weights


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, 1e-6)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Pre-norm with a shared block, a written-out RMSNorm, a tied head and sizes taken from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.gain = nn.Parameter(torch.rand(16) + 0.5)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        x = self.embedding(ids) * scale + torch.arange(ids.shape[1]).unsqueeze(-1) / ids.shape[1]
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain
        return self.head(x)


ARGS = (torch.arange(24).reshape(2, 12), torch.tensor(2.0))


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module", params=["of these sizes", "of any size"])
def program(request: pytest.FixtureRequest, model: Model) -> ExportedProgram:
    shapes = None if request.param == "of these sizes" else ({0: Dim("batch"), 1: Dim("time")}, None)
    return export(model, ARGS, dynamic_shapes=shapes)


@pytest.fixture
def path(program: ExportedProgram, tmp_path: Path) -> Path:
    save(program, tmp_path / "model.pt2")
    return tmp_path / "model.pt2"


def test_the_numbers_and_the_map_are_those_of_the_model(path: Path, model: Model) -> None:
    target = targets.load(str(path))
    assert (target.inputs_from, target.weights) == (InputsFrom.GIVEN, Weights.REAL)
    with torch.no_grad():
        assert torch.equal(target.run(), model(*ARGS))
    ours, theirs = nw.map(str(path)), nw.map(model, ARGS)
    assert [str(stack.kind) for stack in ours.placement.stacks] == ["pre"]
    keys = [
        {(site.path, str(site.spec), str(site.placement), site.calls) for site in report.norms}
        for report in (ours, theirs)
    ]
    assert keys[0] == keys[1]
    assert len(keys[0]) == 4


def test_ties_stay_ties_and_names_stay_names(path: Path, model: Model) -> None:
    found = targets.load(str(path)).model
    assert {name for name, _ in found.named_parameters()} == {name for name, _ in model.named_parameters()}
    assert found.get_parameter("head.weight") is found.get_parameter("embedding.weight")


def test_a_program_in_memory_is_a_target(program: ExportedProgram) -> None:
    report = nw.map(program)
    assert len(report.norms) == 4
    assert nw.check(program).norms
    assert targets.target(program).weights is Weights.GIVEN


def test_another_batch_runs_where_the_sizes_are_open(model: Model, tmp_path: Path) -> None:
    save(export(model, ARGS, dynamic_shapes=({0: Dim("batch"), 1: Dim("time")}, None)), tmp_path / "m.pt2")
    found = targets.load(str(tmp_path / "m.pt2")).model
    ids = torch.arange(15).reshape(3, 5)
    with torch.no_grad():
        torch.testing.assert_close(found(ids, ARGS[1]), model(ids, ARGS[1]))


def rewritten(path: Path, change: Any, *, compression: int = zipfile.ZIP_STORED) -> Path:
    made = path.with_name("changed.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w", compression) as new:
        for item in old.infolist():
            data = change(item.filename.partition("/")[2], old.read(item))
            if data is not None:
                new.writestr(item.filename, data)
    return made


def graph_changed(path: Path, change: Any) -> Path:
    def apply(name: str, data: bytes) -> bytes:
        if name != "models/model.json":
            return data
        found = json.loads(data)
        change(found["graph_module"]["graph"])
        return json.dumps(found).encode()

    return rewritten(path, apply)


class Canary:
    def __reduce__(self) -> Any:
        return Path("canary").write_text, ("dead",)


@pytest.mark.filterwarnings("ignore")
def test_no_pickle_of_the_file_is_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save(((Canary(),), {}), buffer)
    changed = rewritten(path, lambda name, data: buffer.getvalue() if name.startswith("data/sample_inputs") else data)
    target = targets.load(str(changed))
    assert not (tmp_path / "canary").exists()
    assert target.inputs_from is InputsFrom.INFERRED
    assert "sizes of the export" in target.notes[0]
    assert target.args[0].shape == (2, 12)


def test_text_of_the_file_is_not_evaluated(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "__import__('pathlib').Path('canary').write_text('dead')"

    def change(name: str, data: bytes) -> bytes:
        return data.replace(b"Symbol(", f"{code} or Symbol(".encode()) if name == "models/model.json" else data

    targets.load(str(rewritten(path, change)))
    assert not (tmp_path / "canary").exists()


def test_a_weight_that_is_a_pickle_is_refused(path: Path) -> None:
    def change(name: str, data: bytes) -> bytes:
        return data.replace(b'"use_pickle": false', b'"use_pickle": true', 1) if "weights_config" in name else data

    with pytest.raises(TargetError, match="stored as a pickle, which can run any code"):
        targets.load(str(rewritten(path, change)))


TARGETS = (
    "os.system", "torch.ops.aten.from_file.default", "torch.ops.aten.save.default", "torch.ops.my.op.default",
    "torch.hub.load", "builtins.eval", "torch.ops.aten.nothing.default", "operator.attrgetter",
)  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_only_operators_of_aten_are_run(path: Path, name: str) -> None:
    with pytest.raises(TargetError, match="not supported: node 0"):
        targets.load(str(graph_changed(path, lambda graph: graph["nodes"][0].update(target=name))))


def test_a_factory_that_is_a_bomb_is_refused(path: Path) -> None:
    def change(graph: dict[str, Any]) -> None:
        node = next(node for node in graph["nodes"] if node["target"].startswith("torch.ops.aten.arange"))
        end = next(item for item in node["inputs"] if item["name"] == "end")
        end["arg"] = {"as_int": 2**36}

    with pytest.raises(TargetError, match=r"would make 68,719,476,736 elements"):
        targets.load(str(graph_changed(path, change)))


def test_packed_members_are_refused(path: Path) -> None:
    with pytest.raises(TargetError, match="packed members"):
        targets.load(str(rewritten(path, lambda _, data: data, compression=zipfile.ZIP_DEFLATED)))


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 no", b"hello"])
def test_what_is_no_program_is_said(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.pt2").write_bytes(data)
    with pytest.raises(TargetError, match="no exported program"):
        targets.load(str(tmp_path / "m.pt2"))


@pytest.mark.parametrize("count", [150, pytest.param(20_000, marks=pytest.mark.slow)])
def test_mutations_raise_what_they_should_or_nothing(path: Path, count: int) -> None:
    chance, data, refused = random.Random(0), path.read_bytes(), 0
    texts = json.dumps(json.loads(zipfile.ZipFile(path).read("model/models/model.json")))
    for index in range(count):
        if index % 2:  # the graph itself: the sums of a zip file stop most changes of its bytes
            found = list(texts)
            for _ in range(chance.randint(1, 5)):
                found[chance.randrange(len(found))] = chr(chance.randrange(32, 127))
            text = "".join(found).encode()
            made = rewritten(path, lambda name, old, text=text: text if name == "models/model.json" else old)
        else:
            changed = bytearray(data)
            for _ in range(chance.randint(1, 5)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            made = path.with_name("changed.pt2")
            made.write_bytes(changed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                targets.load(str(made))
            except NormwiseError:
                refused += 1
    assert refused > count / 4
