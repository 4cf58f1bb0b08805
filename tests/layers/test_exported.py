"""Every layer compiled, exported and run elsewhere: the same numbers, one graph for all batch sizes."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

from tests.layers.layer_cases import CASES, Case, cubes, outputs, randomized

# One of each kind of code: torch's kernel, statistics in the open, running ones, a mask; all others under -m slow.
QUICK = ("AddRMSNorm", "BatchNorm1d lengths", "GroupNorm", "LayerNorm")
BATCHES = (3, 4, 5, 7)


def of_all(names: Any = CASES) -> Any:
    """Parametrise over cases, and both modes where they differ; all but the quick ones are slow."""
    made = [(name, mode) for name in names for mode in (("train", "eval") if CASES[name].two_modes else ("train",))]
    return pytest.mark.parametrize(
        ("name", "mode"),
        [pytest.param(*each, marks=() if each[0] in QUICK else pytest.mark.slow) for each in made],
        ids=[f"{name}-{mode}" for name, mode in made],
    )


def pair(name: str, mode: str) -> tuple[Case, nn.Module, nn.Module]:
    """Return a case, its module in float32, and a copy to compare with: a batch norm changes."""
    module = randomized(CASES[name].make(torch.float32)).train(mode == "train")
    return CASES[name], module, copy.deepcopy(module)


def arguments(case: Case, batch: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    return tuple(each.float() for each in case.inputs(batch)), case.operands(batch)


def dynamic_batch(module: nn.Module, case: Case) -> dict[str, dict[int, Any]]:
    names = list(inspect.signature(module.forward).parameters)[: len(case.inputs(1))]
    return {name: {0: Dim("batch")} for name in (*names, *case.operands(1))}


# -- torch.compile ----------------------------------------------------------------------------


@of_all()
def test_compiles_whole_and_once_for_all_batch_sizes(name: str, mode: str) -> None:
    case, module, eager = pair(name, mode)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=graphs, fullgraph=True)
    for batch in BATCHES:
        inputs, operands = arguments(case, batch)
        inputs = tuple(each.requires_grad_() for each in inputs)
        found, expected = outputs(compiled(*inputs, **operands)), outputs(eager(*inputs, **operands))
        gradients = [torch.autograd.grad(cubes(each), inputs) for each in (found, expected)]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    for kept, right in zip(module.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(kept, right, rtol=1e-6, atol=1e-6)
    assert graphs.frame_count <= 2  # the first size, and all others


@of_all()
def test_compiles_once_where_the_batch_is_marked_dynamic(name: str, mode: str) -> None:
    case, module, eager = pair(name, mode)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(module, backend=graphs, fullgraph=True)
    for batch in BATCHES:
        inputs, operands = arguments(case, batch)
        for each in (*inputs, *operands.values()):
            torch._dynamo.mark_dynamic(each, 0)
        torch.testing.assert_close(compiled(*inputs, **operands), eager(*inputs, **operands), rtol=1e-6, atol=1e-6)
    assert graphs.frame_count == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm llama", "BatchNorm2d mask", "GatedRMSNorm"])
def test_inductor_computes_the_same(name: str) -> None:
    case, module, eager = pair(name, "train")
    torch._dynamo.reset()
    inputs, operands = arguments(case, 3)
    inputs = tuple(each.requires_grad_() for each in inputs)
    found, expected = (
        outputs(torch.compile(module, fullgraph=True)(*inputs, **operands)),
        outputs(eager(*inputs, **operands)),
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(cubes(each), inputs) for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


# -- torch.export and ONNX --------------------------------------------------------------------


@of_all()
def test_exports_with_a_dynamic_batch(name: str, mode: str) -> None:
    case, module, eager = pair(name, mode)
    inputs, operands = arguments(case, 3)
    program = torch.export.export(module, inputs, operands, dynamic_shapes=dynamic_batch(module, case), strict=False)
    exported = program.module()
    for batch in (2, 5):
        inputs, operands = arguments(case, batch)
        torch.testing.assert_close(exported(*inputs, **operands), eager(*inputs, **operands), rtol=1e-6, atol=1e-6)
    for name, kept in exported.state_dict().items():
        torch.testing.assert_close(kept, eager.state_dict()[name], rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning", "ignore:# The axis name:UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_onnxruntime_computes_the_same(name: str) -> None:
    case, module, eager = pair(name, "eval")
    inputs, operands = arguments(case, 3)
    program = torch.onnx.export(
        module, inputs, kwargs=operands, dynamo=True, dynamic_shapes=dynamic_batch(module, case), verbose=False
    )
    assert program is not None
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch in (2, 5):
        inputs, operands = arguments(case, batch)
        fed = dict(zip([each.name for each in session.get_inputs()], (*inputs, *operands.values()), strict=True))
        found = session.run(None, {name: each.numpy() for name, each in fed.items()})
        for y, right in zip(found, outputs(eager(*inputs, **operands)), strict=True):
            torch.testing.assert_close(torch.from_numpy(y), right, rtol=1e-5, atol=1e-6)
