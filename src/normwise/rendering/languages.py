"""Sentences in two languages: each is said once, where it arises, and shown in the one that was asked for."""

from __future__ import annotations

from typing import Self

__all__ = ["Text", "both", "in_language"]


class Text(str):
    """An English sentence that carries its Chinese one; to whoever does not ask it is plain English."""

    zh: str

    def __new__(cls, en: str, zh: str = "") -> Self:
        """Keep both; without a Chinese one the English stands for it."""
        text = super().__new__(cls, en)
        text.zh = zh or en
        return text

    def __reduce__(self) -> tuple[type[Text], tuple[str, str]]:
        return type(self), (str(self), self.zh)


def both(en: str, zh: str) -> Text:
    """Return a sentence in English and Chinese.

    Examples:
        >>> said = both("2 gains decayed", "2 个增益被衰减")
        >>> said, in_language(said, "zh")
        ('2 gains decayed', '2 个增益被衰减')
    """
    return Text(en, zh)


def in_language(text: str, lang: str) -> str:
    """Return a sentence in a language ("en" or "zh"); one without a translation stays as it is."""
    return text.zh if lang == "zh" and isinstance(text, Text) else str(text)
