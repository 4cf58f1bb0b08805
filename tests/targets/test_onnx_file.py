"""FILE.onnx is run operator by operator in torch: the same numbers as ONNX Runtime, and a map like any other."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
import onnx.backend.test.case.node as onnx_cases
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

import normwise as nw
from normwise import targets
from normwise.errors import TargetError
from normwise.targets.onnx_graph import read_program
from normwise.targets.target import InputsFrom, Weights
from tests.targets.onnx_graphs import NORMS, STORED, graph, written


class RMS(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size: int, norm: Any, post: bool) -> None:
        super().__init__()
        self.attention, self.post = Attention(size), post
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
        self.norm1, self.norm2 = norm(size), norm(size)

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, norm: Any, *, post: bool = False, size: int = 32) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, size), nn.Linear(size, 50)
        self.layers = nn.ModuleList([Block(size, norm, post) for _ in range(3)])
        self.norm = norm(size)
        self.post = post

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.post:
            x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x if self.post else self.norm(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), *[Residual() for _ in range(3)])


IDS = torch.arange(24).reshape(2, 12)
# the model, its input, the stack of the map, and its norms: (kind, eps, place, how many)
MODELS: dict[str, tuple[Any, Tensor, str, set[tuple[str, float, str, int]]]] = {
    "llama": (lambda: Transformer(RMS), IDS, "pre", {("rms", 1e-6, "pre", 6), ("rms", 1e-6, "final", 1)}),
    "gpt": (lambda: Transformer(nn.LayerNorm), IDS, "pre", {("layer", 1e-5, "pre", 6), ("layer", 1e-5, "final", 1)}),
    "bert": (
        lambda: Transformer(lambda size: nn.LayerNorm(size, 1e-12), post=True), IDS, "post",
        {("layer", 1e-12, "post", 6), ("layer", 1e-12, "embedding", 1)},
    ),
    "resnet": (
        cnn, torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0)), "res_post",
        {("batch", 1e-5, "inner", 3), ("batch", 1e-5, "branch", 3), ("batch", 1e-5, "stem", 1)},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "bert", "resnet", pytest.param("gpt", marks=pytest.mark.slow)])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, nn.Module]:
    build, example, _, _ = MODELS[request.param]
    torch.manual_seed(0)
    model = build().eval()
    path = tmp_path_factory.mktemp(request.param) / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # the exporter's own optimization folds every BatchNorm into its convolution: then there is none to find
        torch.onnx.export(model, (example,), path, dynamo=True, verbose=False, optimize=request.param != "resnet")
    return request.param, path, model


def runtime(path: Path, args: tuple[Tensor, ...]) -> Any:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {item.name: arg.numpy() for item, arg in zip(session.get_inputs(), args, strict=True)})


def test_an_exported_model_gives_the_numbers_of_onnx_runtime(exported: tuple[str, Path, nn.Module]) -> None:
    name, path, model = exported
    target = targets.load(str(path))
    assert (target.inputs_from, target.weights) == (InputsFrom.INFERRED, Weights.REAL)
    assert target.args[0].shape == MODELS[name][1].shape
    with torch.no_grad():
        ours = target.run()
        torch.testing.assert_close(ours, model(*target.args), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours.numpy(), runtime(path, target.args)[0], rtol=1e-4, atol=1e-5)


def test_its_map_is_that_of_the_model(exported: tuple[str, Path, nn.Module]) -> None:
    name, path, model = exported
    report = nw.map(str(path))
    _, example, stack, norms = MODELS[name]
    assert [str(item.kind) for item in report.placement.stacks] == [stack]
    counts: dict[tuple[str, float | None, str], int] = {}
    for site in report.norms:
        assert site.spec is not None
        assert site.evidence == "verified"
        key = (str(site.spec.kind), site.spec.eps, str(site.placement))
        counts[key] = counts.get(key, 0) + 1
    assert {(*key, count) for key, count in counts.items()} == norms
    direct = nw.map(model, example)
    assert {site.path for site in report.norms} == {site.path for site in direct.norms}


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_is_found_with_what_it_computes(name: str, tmp_path: Path) -> None:
    nodes, shape, kind, eps, weight, bias = NORMS[name]
    used = {item for node in nodes for item in node.input}
    stored = {key: np.asarray(value) for key, value in STORED.items() if key in used}
    path = written(graph(nodes, shape, stored), tmp_path)
    (site,) = nw.map(path).norms
    assert site.spec is not None
    assert site.evidence == "verified"
    assert (str(site.spec.kind), site.spec.bias) == (kind, bias)
    assert site.spec.eps == pytest.approx(eps)
    assert (site.spec.weight is not None and str(site.spec.weight) != "none") is weight
    target = targets.load(path)
    with torch.no_grad():
        ours = target.run()
    np.testing.assert_allclose(ours.numpy(), runtime(Path(path), target.args)[0], rtol=1e-4, atol=1e-5)


# Results that ONNX does not fix, or that torch cannot have.
FREE = ("empty_set", "castlike", "bf16")
AGREED = 117  # all of those that lie in onnx 1.23 as files
CASES = 900  # of the 1,800 of onnx 1.23 at least these run here and agree; the others use what is refused


def difference(path: Path, args: Any, wanted: Any) -> str | None:
    """Return how a case differs, "" where it is refused, None where it agrees."""
    try:
        program = read_program(path).program
        with torch.no_grad():
            found = program(*(torch.from_numpy(np.array(arg)) for arg in args))
    except TargetError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    for ours, theirs in zip(found if isinstance(found, tuple) else (found,), wanted, strict=False):
        if ours.numpy().dtype != theirs.dtype or not np.allclose(ours.numpy(), theirs, 1e-3, 1e-4, equal_nan=True):
            return f"{ours} is not {theirs}"[:300]
    return None


def stored(folder: Path, name: str) -> list[np.ndarray]:
    found = []
    for index in range(len(list(folder.glob(f"{name}_*.pb")))):
        tensor = TensorProto()
        tensor.ParseFromString((folder / f"{name}_{index}.pb").read_bytes())
        found.append(numpy_helper.to_array(tensor))
    return found


@pytest.mark.slow
def test_the_cases_of_onnx_agree_or_are_refused(tmp_path: Path) -> None:
    agreed, different = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = onnx_cases.collect_testcases(None)
    for case in cases:
        if case.model is None or any(word in case.name for word in FREE):
            continue
        (tmp_path / "case.onnx").write_bytes(case.model.SerializeToString())
        args, wanted = (case.data_sets or [([], [])])[0]
        outcome = difference(tmp_path / "case.onnx", args, wanted)
        agreed += outcome is None
        different += [f"{case.name}: {outcome}"] if outcome else []
    assert not different
    assert agreed >= CASES


STORED_CASES = sorted((Path(onnx.backend.test.__file__).parent / "data").glob("pytorch-*/*/model.onnx"))


def test_the_cases_that_onnx_stores_agree_or_are_refused() -> None:
    agreed, different = 0, []
    for path in STORED_CASES:
        args, wanted = (stored(path.parent / "test_data_set_0", name) for name in ("input", "output"))
        outcome = difference(path, args, wanted)
        agreed += outcome is None
        different += [f"{path.parent.name}: {outcome}"] if outcome else []
    assert not different
    assert agreed == AGREED
