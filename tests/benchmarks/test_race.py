"""The method: who is measured when, how often, and what comes of it, on a clock that only the rivals move."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from normwise.benchmarks._race import Method, quartiles, race, repeated


class Clock:
    """Time that passes when a rival runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def rival(self, *seconds: float) -> Callable[[], Callable[[int], None]]:
        """Return a rival whose calls take so long, the next of these at each measurement, the last one for ever."""
        left = list(seconds)

        def prepare() -> Callable[[int], None]:
            return self._spend(left.pop(0) if len(left) > 1 else left[0])

        return prepare

    def _spend(self, seconds: float) -> Callable[[int], None]:
        def run(calls: int) -> None:
            self.now += calls * seconds

        return run


ONCE = Method(rounds=1, fill=0.0, least=1)


def test_every_round_measures_each_rival_once_and_starts_with_another() -> None:
    clock = Clock()
    done = race([clock.rival(0.1)] * 3, Method(rounds=4), clock=clock)
    assert [done.order[start : start + 3] for start in range(0, 12, 3)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]
    assert [len(each) for each in done.seconds] == [4, 4, 4]


def test_a_rival_that_fails_says_why_and_the_others_go_on() -> None:
    clock = Clock()

    def broken() -> Any:
        raise RuntimeError("\n  no compiler found\nset CXX")

    done = race([clock.rival(0.1), broken, clock.rival(0.2)], Method(rounds=2), clock=clock)
    assert done.why == [None, "RuntimeError: no compiler found", None]
    assert done.seconds[1] == []
    assert done.order == [0, 2, 2, 0]
    assert done.finished


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (ValueError(), "ValueError"),
        (ImportError("No module named 'quack'"), "ImportError: No module named 'quack'"),
        (RuntimeError("backend raised:\nno g++ found\nmore"), "RuntimeError: backend raised: no g++ found"),
    ],
)
def test_the_reason_is_the_line_that_says_something(failure: Exception, why: str) -> None:
    def broken() -> Any:
        raise failure

    assert race([broken], ONCE, clock=Clock()).why == [why]


def test_times_are_seconds_a_call() -> None:
    clock = Clock()
    done = race([clock.rival(0.5, 0.1, 0.2, 0.3)], Method(rounds=3), clock=clock)
    assert done.seconds == [[pytest.approx(0.1), pytest.approx(0.2), pytest.approx(0.3)]]


@pytest.mark.parametrize(("seconds", "calls"), [(1e-3, 30), (7e-3, 5), (0.2, 3), (0.5, 1), (0.0, 30_000_000)])
def test_a_measurement_fills_its_time_and_long_calls_stand_alone(seconds: float, calls: int) -> None:
    assert Method(fill=0.03, least=3).calls(seconds) == calls


@pytest.mark.parametrize(("seconds", "each_round"), [(1e-3, [1, 30]), (0.03, [3])])
def test_only_short_calls_are_warmed_up(seconds: float, each_round: list[int]) -> None:
    clock, made = Clock(), []

    def prepare() -> Callable[[int], None]:
        def run(calls: int) -> None:
            made.append(calls)
            clock.now += calls * seconds

        return run

    race([prepare], Method(rounds=2), clock=clock)
    assert made == [1, 1, *each_round, *each_round]


def test_an_interrupt_keeps_the_rounds_that_were_complete() -> None:
    clock, left = Clock(), [7]

    def stops() -> Callable[[int], None]:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return clock._spend(0.1)

    done = race([clock.rival(0.1), stops], Method(rounds=9), clock=clock)
    assert not done.finished
    assert [len(each) for each in done.seconds] == [5, 5]


def test_an_interrupt_before_the_first_round_keeps_nothing() -> None:
    def stops() -> Any:
        raise KeyboardInterrupt

    done = race([Clock().rival(0.1), stops], ONCE, clock=Clock())
    assert (done.finished, done.seconds) == (False, [[], []])


def test_the_garbage_collector_rests_while_a_rival_is_timed_and_is_left_as_it_was() -> None:
    seen: list[bool] = []
    assert gc.isenabled()
    race([lambda: lambda calls: seen.append(gc.isenabled())], ONCE, clock=Clock())
    assert seen[-1] is False
    assert gc.isenabled()


def test_progress_is_told_of_every_measurement() -> None:
    steps: list[None] = []
    race([Clock().rival(1.0)] * 2, Method(rounds=3), clock=Clock(), advance=lambda: steps.append(None))
    assert len(steps) == 2 * (3 + 1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0], (3.0, 3.0, 3.0)), ([1.0, 3.0], (1.5, 2.0, 2.5)), ([9.0, 1.0, 5.0, 2.0, 100.0], (2.0, 5.0, 9.0))],
)
def test_quartiles_lie_between_the_values_and_do_not_mind_one_wild_one(
    values: list[float], expected: tuple[float, ...]
) -> None:
    assert quartiles(values) == expected


def test_repeated_calls_so_often() -> None:
    made: list[None] = []
    repeated(lambda: made.append(None))(5)
    assert len(made) == 5
