"""Every node case of ONNX's backend test suite for a normalization operator, through our functions.

The cases come with inputs and expected outputs computed in numpy by the authors of the operators. A case whose
node is a function exists a second and third time with the body expanded; those run with the attributes of the
node they expand.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.case.node as onnx_nodes
import pytest
import torch
from onnx.backend.test.case.test_case import TestCase as OnnxCase

from normwise import NormSpec, kernels
from normwise import functional as F
from normwise.functional.hidden import LAYER, trailing
from normwise.spec import Scope, Statistic, Weight

# Operator -> cases with the operator as one node, and the same with its body expanded.
CASES = {
    "BatchNormalization": (4, 0),
    "GroupNormalization": (2, 2),
    "InstanceNormalization": (2, 0),
    "LayerNormalization": (19, 38),
    "LpNormalization": (6, 0),
    "MeanVarianceNormalization": (1, 2),
    "RMSNormalization": (19, 19),
}
MODULES = [name for _, name, _ in pkgutil.iter_modules(onnx_nodes.__path__) if "norm" in name]

Attributes = dict[str, Any]
Tensors = list[torch.Tensor]


def batch_normalization(given: Attributes, tensors: Tensors) -> Tensors:
    x, weight, bias, mean, var = tensors
    eps = given.get("epsilon", 1e-5)
    if not given.get("training_mode", 0):
        return [F.batch_norm(x, mean, var, weight, bias, eps=eps)]
    # ONNX keeps the biased variance of a batch running, torch and we the unbiased one; its momentum weighs the old.
    keep, n = given.get("momentum", 0.9), x.numel() / x.shape[1]
    now_mean, now_var = torch.zeros_like(mean), torch.zeros_like(var)
    y = F.batch_norm(x, now_mean, now_var, weight, bias, training=True, momentum=1.0, eps=eps)
    now_var = now_var * (n - 1) / n
    return [y, keep * mean + (1 - keep) * now_mean, keep * var + (1 - keep) * now_var]


def group_normalization(given: Attributes, tensors: Tensors) -> Tensors:
    x, weight, bias = tensors
    return [F.group_norm(x, given["num_groups"], weight, bias, given.get("epsilon", 1e-5))]


def instance_normalization(given: Attributes, tensors: Tensors) -> Tensors:
    x, weight, bias = tensors
    return [F.instance_norm(x, weight=weight, bias=bias, eps=given.get("epsilon", 1e-5))]


def normalized_shape(given: Attributes, x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shape[given.get("axis", -1) % x.ndim :])


def layer_normalization(given: Attributes, tensors: Tensors) -> Tensors:
    assert given.get("stash_type", 1) == 1, "statistics in float32, as we take them"
    x, weight, bias = tensors
    shape, eps = normalized_shape(given, x), given.get("epsilon", 1e-5)
    found = kernels.moments(NormSpec(axes=trailing(shape), center=LAYER.center, statistic=LAYER.statistic), x)
    assert found.mean is not None
    return [F.layer_norm(x, shape, weight, bias, eps), found.mean, (found.statistic + eps).rsqrt()]


def rms_normalization(given: Attributes, tensors: Tensors) -> Tensors:
    assert given.get("stash_type", 1) == 1, "statistics in float32, as we take them"
    x, weight = tensors
    return [F.rms_norm(x, normalized_shape(given, x), weight, given.get("epsilon", 1e-5))]


def lp_normalization(given: Attributes, tensors: Tensors) -> Tensors:
    return [F.lp_norm(tensors[0], given.get("p", 2), given.get("axis", -1), eps=0.0)]


def mean_variance_normalization(given: Attributes, tensors: Tensors) -> Tensors:
    axes = given.get("axes", [0, 2, 3])
    spec = NormSpec(
        scope=Scope.BATCH,
        axes=tuple(axis - tensors[0].ndim for axis in axes),
        center=True,
        statistic=Statistic.VARIANCE,
        eps=1e-9,
        eps_inside=False,
        weight=Weight.NONE,
    )
    return [F.norm(spec, tensors[0])]


OURS: dict[str, Callable[[Attributes, Tensors], Tensors]] = {
    "BatchNormalization": batch_normalization,
    "GroupNormalization": group_normalization,
    "InstanceNormalization": instance_normalization,
    "LayerNormalization": layer_normalization,
    "LpNormalization": lp_normalization,
    "MeanVarianceNormalization": mean_variance_normalization,
    "RMSNormalization": rms_normalization,
}


def load_cases(load: Callable[[], object]) -> dict[str, OnnxCase]:
    with warnings.catch_warnings():
        # The generators divide by zero on purpose and convert out of range, in numpy.
        warnings.simplefilter("ignore", RuntimeWarning)
        load()
    return {case.name: case for case in onnx_nodes._NodeTestCases}


@pytest.fixture(scope="module")
def cases() -> dict[str, OnnxCase]:
    """Return the cases of the modules that define normalization operators; all modules would take 5 seconds."""
    return load_cases(lambda: [importlib.import_module(f"{onnx_nodes.__name__}.{name}") for name in MODULES])


def whole(name: str) -> str:
    return name.split("_expanded")[0]


def node_of(case: OnnxCase) -> onnx.NodeProto:
    assert case.model is not None
    (node,) = case.model.graph.node
    return node


def cases_of(cases: dict[str, OnnxCase], operator: str) -> dict[str, OnnxCase]:
    """Return the cases of an operator by name, with one node or expanded."""
    return {
        name: case
        for name, case in cases.items()
        if len(cases[whole(name)].model.graph.node) == 1  # pyright: ignore[reportOptionalMemberAccess]
        and node_of(cases[whole(name)]).op_type == operator
    }


def attributes(node: onnx.NodeProto) -> Attributes:
    return {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}


def differences(case: OnnxCase, node: onnx.NodeProto) -> list[str]:
    """Run one case and return what is beyond ONNX's tolerance."""
    assert case.data_sets is not None
    found = []
    for given, wanted in case.data_sets:
        got = OURS[node.op_type](attributes(node), [torch.from_numpy(np.array(each)) for each in given])
        assert len(got) >= len(wanted), case.name
        for ours, theirs in zip(got, wanted, strict=False):
            fits = ours.shape == theirs.shape and ours.numpy().dtype == theirs.dtype
            if not fits or not np.allclose(ours.numpy(), theirs, case.rtol, case.atol):
                found.append(f"{case.name}: {ours} for {theirs}")
    return found


@pytest.mark.parametrize("operator", CASES)
def test_every_case_of_the_operator_agrees(cases: dict[str, OnnxCase], operator: str) -> None:
    mine = cases_of(cases, operator)
    assert [each for name, case in mine.items() for each in differences(case, node_of(cases[whole(name)]))] == []


def test_no_case_is_left_out(cases: dict[str, OnnxCase]) -> None:
    counted = {}
    for operator in CASES:
        mine = cases_of(cases, operator)
        expanded = sum("_expanded" in name for name in mine)
        counted[operator] = (len(mine) - expanded, expanded)
    assert counted == CASES
    assert sum(map(sum, CASES.values())) == 114


@pytest.mark.parametrize("operator", CASES)
def test_a_wrong_result_is_seen(cases: dict[str, OnnxCase], operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = OURS[operator]
    monkeypatch.setitem(OURS, operator, lambda *given: [each * 1.002 + 1e-6 for each in ours(*given)])
    mine = cases_of(cases, operator)
    assert all(differences(case, node_of(cases[whole(name)])) for name, case in mine.items())


@pytest.mark.slow
def test_no_other_module_of_onnx_has_cases_of_these_operators(cases: dict[str, OnnxCase]) -> None:
    mine = {name for operator in CASES for name in cases_of(cases, operator)}
    everything = load_cases(onnx_nodes.collect_testcases)
    assert len(everything) > 1800
    nodes = [(name, node) for name, case in everything.items() if case.model for node in case.model.graph.node]
    used = Counter(node.op_type for name, node in nodes if name not in mine and node.op_type in CASES)
    assert used == Counter()
    assert not {name for name in everything if whole(name) in mine} - mine


def test_epsilon_0_keeps_a_zero_vector_zero_as_onnx_defines() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert torch.equal(F.lp_norm(x, 2, eps=0.0), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    assert math.isclose(F.lp_norm(x, 1, eps=0.0)[0, 0].item(), 3 / 7, rel_tol=1e-6)
