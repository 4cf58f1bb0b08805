"""Models of a size that nobody has: the check ends, in a time and memory that can be stated, or says one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hostile.warm import Answer, Warm


def _done(answer: Answer) -> dict[str, Any]:
    assert answer.status == 0
    print(f"{answer.seconds:.1f} s of the processor, {answer.megabytes:.0f} MB, {answer.value!s:.200}")
    return answer.value


@pytest.mark.parametrize(
    ("length", "seconds", "megabytes"),
    [(100_000, 20, 500), pytest.param(10_000_000, 90, 2500, marks=pytest.mark.slow)],
)
def test_a_long_name_makes_no_report_long(length: int, seconds: int, megabytes: int, warm: Warm) -> None:
    answer = warm.do("giants:long_name", length, limit=600)
    sizes = _done(answer)
    assert sizes.pop("json") > 3 * length  # for programs: the names as they are
    assert max(sizes.values()) < 500_000
    assert answer.seconds < seconds
    assert answer.megabytes < megabytes


@pytest.mark.parametrize(
    ("count", "seconds", "megabytes"),
    [(300, 20, 500), pytest.param(50_000, 400, 3000, marks=pytest.mark.slow)],
)
def test_many_modules_are_checked(count: int, seconds: int, megabytes: int, warm: Warm) -> None:
    answer = warm.do("giants:many_modules", count, limit=3000)
    assert _done(answer) == {"norms": 1, "unrun": count // 2 - 1}
    assert answer.seconds < seconds
    assert answer.megabytes < megabytes


@pytest.mark.parametrize(
    ("count", "seconds", "megabytes"),
    [(100, 20, 500), pytest.param(5_000, 240, 3000, marks=pytest.mark.slow)],
)
def test_a_long_residual_chain_is_checked(count: int, seconds: int, megabytes: int, warm: Warm) -> None:
    answer = warm.do("giants:chain", count, limit=1200)
    assert _done(answer) == {"norms": count}
    assert answer.seconds < seconds
    assert answer.megabytes < megabytes


@pytest.mark.parametrize("levels", [150, pytest.param(3_000, marks=pytest.mark.slow)])
def test_deep_nesting_is_checked_or_refused_in_one_line(levels: int, warm: Warm, tmp_path: Path) -> None:
    answer = warm.do("giants:nested", levels, str(tmp_path), limit=600)
    found = _done(answer)
    assert found["code"] in (0, 2), found["err"]
    assert "bug in normwise" not in found["err"]
    assert found["code"] == 0 or found["err"].count("normwise: ") == 1
    assert levels > 500 or found["code"] == 0
    assert answer.seconds < 60
    assert answer.megabytes < 1500


@pytest.mark.slow
def test_two_hundred_thousand_tensors_are_listed(warm: Warm, tmp_path: Path) -> None:
    answer = warm.do("giants:many_tensors", 200_000, str(tmp_path), limit=600)
    assert _done(answer)["code"] in (0, 1)
    assert answer.seconds < 30
    assert answer.megabytes < 1000
