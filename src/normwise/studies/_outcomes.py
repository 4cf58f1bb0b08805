"""What follows from the settings in which a claim holds and those in which it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from normwise.errors import NotKnown
from normwise.rendering import Text, both
from normwise.rendering.languages import in_language
from normwise.studies._seeds import span
from normwise.studies._study import Judgement, Outcome

__all__ = ["Found", "Settings", "joined", "not_shown", "outcome"]

_NAMED = 3  # settings that a sentence names; the others are in a table


def outcome(holds: Iterable[bool]) -> Outcome:
    """Return "confirmed" where a claim holds in all settings, "refuted" where in none, else "depends on".

    Raises:
        NotKnown: there is no setting.
    """
    found = set(holds)
    if not found:
        raise NotKnown(both("no trial of any setting has been run", "没有运行过任何设置的试验"))
    return Outcome.DEPENDS if len(found) == 2 else Outcome.CONFIRMED if True in found else Outcome.REFUTED


def not_shown(says: Text, *, seeds: int) -> Judgement:
    """Judge that a difference is not known to be one: of a single seed, or no larger than between seeds."""
    why = both("one seed", "只有一个种子") if seeds == 1 else both("seeds differ as much", "种子之间的差别同样大")
    return Judgement(Outcome.OPEN, both(f"not shown, {why}: {says}", f"未能说明，{why.zh}：{says.zh}"))


def joined(said: Iterable[str], separators: tuple[str, str] = ("; ", "；")) -> Text:
    """Join parts of a sentence in both languages."""
    parts = list(said)
    return both(separators[0].join(parts), separators[1].join(in_language(each, "zh") for each in parts))


@dataclass(frozen=True, slots=True)
class Found:
    """Settings of one kind: those in which a claim holds, or the others."""

    settings: list[tuple[str, dict[str, float]]]

    def __len__(self) -> int:
        return len(self.settings)

    @property
    def names(self) -> Text:
        """Return the first names, and how many there are besides."""
        names = list(dict.fromkeys(name for name, _ in self.settings))
        said, more = joined(names[:_NAMED], (", ", "，")), len(names) - _NAMED
        return both(f"{said} and {more} more", f"{said.zh}等 {len(names)} 种") if more > 0 else said

    def span(self, figure: str, form: str = "") -> str:
        """Spell from where to where a figure goes."""
        return span([figures[figure] for _, figures in self.settings], form)


class Settings:
    """Where a claim holds and where it does not, with the figures of each setting.

    Examples:
        >>> settings = Settings()
        >>> settings.add(True, "attention", factor=0.71)
        >>> settings.add(False, "ReLU", factor=1.0)
        >>> settings.add(False, "GELU", factor=1.02)
        >>> settings.outcome.value
        'depends on'
        >>> settings.told(lambda some: both(f"with {some.names}", ""), lambda some: both(some.span("factor"), ""))
        'with attention; 1 … 1.02'
    """

    def __init__(self) -> None:
        self._held, self._failed = Found([]), Found([])

    def add(self, holds: bool, name: str, **figures: float) -> None:
        """Add a setting."""
        (self._held if holds else self._failed).settings.append((name, figures))

    @property
    def outcome(self) -> Outcome:
        """Return what follows.

        Raises:
            NotKnown: there is no setting.
        """
        return outcome([True] * len(self._held) + [False] * len(self._failed))

    def told(self, held: Callable[[Found], Text], failed: Callable[[Found], Text]) -> Text:
        """Say where it holds and where it does not, of each if there is any."""
        return joined(say(some) for say, some in ((held, self._held), (failed, self._failed)) if some)
