"""Placements: constants as published, names and aliases, and errors that help."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from normwise import placements
from normwise.placements import get
from normwise.spec import Wiring


def test_there_are_many_with_pages_and_no_name_twice() -> None:
    names = placements.names()
    assert len(names) >= 20
    every = [alias for name in names for alias in (name, *get(name).aliases)]
    assert len(set(every)) == len(every)
    for name in names:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert get(name).name == name
        assert ":" in get(name).title or "," in get(name).title
        assert "References:" in get(name).page or name == "none"


@pytest.mark.parametrize(("depth", "alpha", "beta"), [(24, 2.632, 0.2686), (96, 3.722, 0.1900), (1, 2**0.25, 8**-0.25)])
def test_deep_norm_of_one_stack(depth: int, alpha: float, beta: float) -> None:
    placement = get("deep-norm")
    for side in ("encoder", "decoder"):
        assert placement.wire(0, depth, side=side).skip_scale == pytest.approx(alpha, abs=5e-4)
        gains = placement.gains(0, depth, side=side)
        assert {name: round(gain, 4) for name, gain in gains.items()} == dict.fromkeys(
            ("v", "out", "gate", "up", "down"), pytest.approx(beta, abs=5e-5)
        )


def test_deep_norm_of_a_pair_of_stacks() -> None:
    placement, encoder, decoder = get("deep-norm"), 18, 6
    inner = (encoder**4 * decoder) ** (1 / 16)
    told: dict[str, Any] = {"side": "encoder", "other_depth": decoder}
    assert placement.wire(3, encoder, **told).skip_scale == pytest.approx(0.81 * inner)
    assert placement.gains(3, encoder, **told)["v"] == pytest.approx(0.87 / inner)  # not 1.15, as some code has it
    told = {"side": "decoder", "other_depth": encoder}
    assert placement.wire(3, decoder, **told).skip_scale == pytest.approx((3 * decoder) ** 0.25)
    assert placement.gains(3, decoder, **told)["down"] == pytest.approx((12 * decoder) ** -0.25)


def test_t_fixup() -> None:
    encoder = get("t-fixup").gains(0, 6, side="encoder")
    assert encoder["out"] == encoder["up"] == encoder["down"] == pytest.approx(0.67 * 6**-0.25)
    assert encoder["v"] == pytest.approx(math.sqrt(2) * 0.67 * 6**-0.25)
    decoder = get("t-fixup").gains(0, 6, side="decoder", sublayer="cross")
    assert decoder["out"] == pytest.approx(54**-0.25)
    assert decoder["v"] == pytest.approx(math.sqrt(2) * 54**-0.25)
    assert "q" not in decoder
    assert get("t-fixup").embedding_gain(6) == pytest.approx(54**-0.25)


def test_ds_init_goes_with_the_root_of_the_layer_as_its_paper_says() -> None:
    for layer in (0, 3, 8):
        assert set(get("ds-init").gains(layer, 9).values()) == {(layer + 1) ** -0.5}


def test_sub_ln() -> None:
    assert get("sub-ln").gains(0, 12)["v"] == pytest.approx(math.sqrt(math.log(24)))
    encoder = get("sub-ln").gains(0, 12, side="encoder", other_depth=6)
    assert encoder["out"] == pytest.approx(math.sqrt(math.log(18) * math.log(24) / 3))
    decoder = get("sub-ln").gains(0, 6, side="decoder", other_depth=12)
    assert decoder["up"] == pytest.approx(math.sqrt(math.log(18)))
    assert get("sub-ln").gains(0, 6, side="decoder", other_depth=12, sublayer="cross") == {}
    assert not get("sub-ln").wire(0, 6, side="decoder", other_depth=12, sublayer="cross").inner


def test_admin_starts_at_one() -> None:
    gain = get("admin").wire(5, 12).skip_gain
    assert gain is not None
    assert (gain.initial, gain.vector) == (1.0, True)


def test_what_depends_on_the_layer() -> None:
    assert [get("layernorm-scaling").wire(i, 4).input_scale for i in range(4)] == [
        1.0,
        2**-0.5,
        pytest.approx(3**-0.5),
        0.5,
    ]
    assert [get("mix-ln").wire(i, 9).after_add for i in range(9)] == [True] * 3 + [False] * 6  # ceil(9 / 4)
    initial = [get("layerscale").wire(0, depth).branch_gain for depth in (18, 24, 36)]
    assert [gain.initial for gain in initial if gain] == [0.1, 1e-5, 1e-6]
    assert get("residual-multiplier").wire(0, 49).branch_scale == pytest.approx(0.2)


def test_who_needs_a_final_norm() -> None:
    without = {name for name in placements.names() if not get(name).needs_final_norm}
    assert without == {"admin", "b2t", "deep-norm", "ds-init", "keel", "none", "post", "rezero", "skip-init", "t-fixup"}


@pytest.mark.parametrize(
    ("given", "name"),
    [("peri-ln", "sandwich"), ("reordered", "res-post"), ("DEEP_NORM", "deep-norm"), ("resi-dual", "residual")],
)
def test_aliases(given: str, name: str) -> None:
    assert get(given).name == name


def test_a_wiring_says_nothing_unless_told() -> None:
    assert get("none").wire(0, 2) == Wiring()


wire: Any = get("pre").wire
get_any: Any = get


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get("deep-nrom"), "did you mean deep-norm"),
        (lambda: get("xyz"), "choose from: admin, b2t"),
        (lambda: get_any(3), "choose from"),
        (lambda: get("pre").wire(0, 0), "whole depth, 1 or more, given 0"),
        (lambda: get("pre").wire(2, 2), "layers 0 to 1 at depth 2, given layer 2"),
        (lambda: wire(0, 2.0), "whole depth, 1 or more, given 2.0"),
        (lambda: get("pre").wire(0, 2, side="left"), "side='encoder' or 'decoder', given 'left'"),
        (lambda: get("pre").wire(0, 2, sublayer="conv"), "sublayer='attention' or 'cross' or 'mlp', given 'conv'"),
    ],
)
def test_errors_say_what_to_do(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
