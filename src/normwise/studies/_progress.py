"""What a run is going to cost, how far it is, and how long it will take from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from normwise.rendering import Text, both

__all__ = ["Progress", "cost"]


def cost(trials: int, seconds: float, workers: int, ledger: Path) -> Text:
    """Say what trials cost, before they start.

    Args:
        trials: how many.
        seconds: of CPU time, all together.
        workers: that share them.
        ledger: where their results go.
    """
    cpu, wall = _span(seconds), _span(seconds / min(workers, trials))
    return both(
        f"{_many(trials, 'trial')}, about {cpu} of CPU time: {wall} on {_many(workers, 'worker')}; ledger {ledger}",
        f"{trials} 个试验，CPU 时间约 {cpu.zh}：{workers} 个工作进程约需 {wall.zh}；账本 {ledger}",
    )


class Progress:
    """Tells how far the trials of a run are; their expected times weigh them.

    Args:
        costs: s of CPU time that each trial is expected to take, by key.
        workers: that share them.
        advance: called with a sentence, what is done and of how much.
    """

    def __init__(self, costs: dict[str, float], workers: int, advance: Callable[[str, int, int], Any]) -> None:
        self._left = dict(costs)
        self._trials, self._all = len(costs), sum(costs.values())
        self._workers = min(workers, self._trials)
        self._advance = advance
        self._started = monotonic()
        self._tell()

    def finish(self, key: str) -> None:
        """Count a trial as done, or given up."""
        del self._left[key]
        self._tell()

    def _tell(self) -> None:
        left = sum(self._left.values())
        done, trials = self._all - left, self._trials - len(self._left)
        # The pace so far, and what is expected as if one trial on each worker had gone so: the first ones say little.
        expected = self._all / self._trials
        elapsed = monotonic() - self._started
        pace = (elapsed + expected) / (done + expected * self._workers) if self._all else 0.0
        span = _span(left * pace)
        text = both(
            f"{trials} of {_many(self._trials, 'trial')}, about {span} left",
            f"{trials}/{self._trials} 个试验，约剩 {span.zh}",
        )
        self._advance(text, round(1000 * done), round(1000 * self._all))


def _span(seconds: float) -> Text:
    """Spell a time; the unit leaves two digits or three where it can.

    Examples:
        >>> _span(0.2), _span(80), _span(2640), _span(9000)
        ('1 second', '80 seconds', '44 minutes', '2.5 hours')
    """
    if seconds < 99.5:
        whole = max(1, round(seconds))
        return both(_many(whole, "second"), f"{whole} 秒")
    if seconds < 99.5 * 60:
        return both(f"{round(seconds / 60)} minutes", f"{round(seconds / 60)} 分钟")
    return both(f"{seconds / 3600:.1f} hours", f"{seconds / 3600:.1f} 小时")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
