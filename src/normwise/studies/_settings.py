"""Claims that hold in some settings and not in others: which ones, in both languages, and what follows."""

from __future__ import annotations

from normwise.errors import NotKnown
from normwise.rendering import Text, both
from normwise.rendering.languages import in_language
from normwise.studies._study import Outcome

__all__ = ["Settings"]


class Settings:
    """Where a claim holds and where it does not, each said with its figures.

    Examples:
        >>> settings = Settings()
        >>> settings.add(True, "0.71 with attention")
        >>> settings.add(False, "1.00 without")
        >>> settings.outcome.value, settings.held, settings.failed
        ('depends on', '0.71 with attention', '1.00 without')
    """

    def __init__(self) -> None:
        self._held, self._failed = list[str](), list[str]()

    def add(self, holds: bool, said: str) -> None:
        """Add a setting."""
        (self._held if holds else self._failed).append(said)

    @property
    def outcome(self) -> Outcome:
        """Return "confirmed" where all hold, "refuted" where none does, else "depends on".

        Raises:
            NotKnown: there is no setting.
        """
        if not self._held + self._failed:
            raise NotKnown("no trial of any setting has been run")
        if not self._failed:
            return Outcome.CONFIRMED
        return Outcome.DEPENDS if self._held else Outcome.REFUTED

    @property
    def held(self) -> Text:
        """Return the settings in which it holds."""
        return _joined(self._held)

    @property
    def failed(self) -> Text:
        """Return the others."""
        return _joined(self._failed)


def _joined(said: list[str]) -> Text:
    return both("; ".join(said) or "none", "；".join(in_language(each, "zh") for each in said) or "无")
