from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normwise.rendering.collapse import collapse, collapse_paths, ranges


def labels(paths: list[str]) -> list[str]:
    return [group.label for group in collapse_paths(paths)]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([f"layers.{i}.input_layernorm" for i in range(28)], ["layers.{0-27}.input_layernorm"]),
        ([f"layers.{i}.n" for i in range(28) if i != 4], ["layers.{0-3,5-27}.n"]),
        ([f"layers.{i}.n" for i in range(0, 12, 2)], ["layers.{0,2,…,10}.n"]),
        (["0", "1", "2"], ["{0-2}"]),
        (["h.0.norm1", "h.0.norm2", "h.1.norm1", "h.1.norm2"], ["h.{0,1}.norm1", "h.{0,1}.norm2"]),
        (["layer1.0.bn", "layer1.1.bn", "layer2.0.bn", "layer2.1.bn"], ["layer{1,2}.{0,1}.bn"]),
        (["a.0.n#1", "a.1.n#1", "a.0.n#2"], ["a.{0,1}.n#1", "a.0.n#2"]),
        (["l.7.n"], ["l.7.n"]),
        (["l.07.n", "l.08.n"], ["l.07.n", "l.08.n"]),
        (["层.0.归一", "层.1.归一"], ["层.{0,1}.归一"]),
        ([""], [""]),
        ([], []),
    ],
)
def test_repeated_blocks_become_one_label(paths: list[str], expected: list[str]) -> None:
    assert labels(paths) == expected


def test_stages_of_unequal_depth_merge_only_where_the_grid_is_full() -> None:
    depths = {0: 2, 1: 2, 2: 6, 3: 2}
    paths = [f"s.{stage}.b.{block}.n" for stage, depth in depths.items() for block in range(depth)]
    assert labels(paths) == ["s.{0,1,3}.b.{0,1}.n", "s.2.b.{0-5}.n"]


def test_what_differs_in_its_key_stays_apart() -> None:
    items = [("l.0.n", 1e-6), ("l.1.n", 1e-5), ("l.2.n", 1e-6)]
    groups = collapse(items, path=lambda item: item[0], key=lambda item: item[1])
    assert [(group.label, group.members) for group in groups] == [
        ("l.{0,2}.n", (items[0], items[2])),
        ("l.1.n", (items[1],)),
    ]


@given(st.lists(st.builds("s.{}.b{}.{}.n".format, *[st.integers(0, 3)] * 3), unique=True))
def test_a_label_stands_for_exactly_its_members(paths: list[str]) -> None:
    groups = collapse_paths(paths)
    assert sorted(path for group in groups for path in group.members) == sorted(paths)
    for group in groups:
        assert sorted(spelled_out(group.label)) == sorted(group.members)


@given(st.lists(st.integers(0, 60)))
def test_ranges_name_every_number_once(numbers: list[int]) -> None:
    assert spelled_numbers(ranges(numbers)) == sorted(set(numbers))


def spelled_out(label: str) -> list[str]:
    pieces = re.split(r"\{([^}]*)\}", label)
    choices = [[piece] if index % 2 == 0 else spelled_numbers(piece) for index, piece in enumerate(pieces)]
    return ["".join(map(str, choice)) for choice in product(*choices)]


def spelled_numbers(text: str) -> list[int]:
    if "…" in text:
        first, second, _, last = text.split(",")
        return list(range(int(first), int(last) + 1, int(second) - int(first)))
    parts = [part.split("-") for part in text.split(",") if part]
    return [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]
