"""``like`` is offered where it works: by the layers that take any convention of their kind."""

from __future__ import annotations

from typing import Any

import pytest

from normwise import layers
from normwise.layers import FAMILIES
from normwise.spec import Gate, NormSpec

OFFERING = [each for name in layers.__all__ if hasattr(each := getattr(layers, name), "like")]


def test_is_offered_by_the_layers_that_take_any_convention_of_their_kind() -> None:
    names = {layer.__name__ for layer in OFFERING}
    assert names == {"AddLayerNorm", "AddRMSNorm", "GatedRMSNorm", "LayerNorm", "RMSNorm"}


@pytest.mark.parametrize("layer", OFFERING, ids=lambda layer: layer.__name__)
def test_builds_every_family_of_its_kind(layer: Any) -> None:
    def kind(spec: NormSpec) -> tuple[str, bool]:
        return spec.kind, spec.gate is not Gate.NONE

    same = {name: spec for name, spec in FAMILIES.items() if kind(spec) == kind(layer.usual)}
    assert same
    assert {name: layer.like(name, 8).spec for name in same} == same
