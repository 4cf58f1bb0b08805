"""Makes text that a model controls safe to show: module names, class names, messages of exceptions.

A name can hold anything Python strings can: escape sequences that recolour a terminal, characters
that reverse the reading direction, invisible ones that make two names look alike. ``clean`` turns
each into something visible and leaves everything else, in any script, as it was. A name can also be 10 MB
long: of what nobody would read to its end the middle is left out.
"""

from __future__ import annotations

import re
import unicodedata

__all__ = ["LONGEST", "clean", "obeyed_by_none", "respelled", "shorten", "visible"]

LONGEST = 4096  # characters of one text that are shown: two pages; names that people give have less than 200

# Zero-width without being format characters (Cf): joiners, fillers, variation selectors.
_INVISIBLE = frozenset([0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180C, 0x180D, 0x180F, 0x3164, 0xFFA0]).union(
    range(0xFE00, 0xFE10), range(0xE0100, 0xE01F0)
)
# controls, format characters (bidi, zero-width), surrogates, line and paragraph separators
_HIDDEN = frozenset(["Cc", "Cf", "Cs", "Zl", "Zp"])
_PICTURES = 0x2400  # "SYMBOL FOR NULL": the picture of a C0 control is this plus its code
_DELETE, _SYMBOL_FOR_DELETE = 0x7F, "\u2421"
# What the runner of a CI service takes for a command when a program prints it: GitHub "::error::" at the start of a
# line and "##[error]" anywhere in it, Azure "##vso[...]", TeamCity "##teamcity[...]".
_COMMAND = re.compile(r"^(\s*)::(?=\w)|##(?=\w*\[)", re.MULTILINE)


def clean(text: object) -> str:
    """Return a text on one line, of at most ``LONGEST`` characters, in which every hidden one has become visible.

    C0 controls become their control pictures, everything else that cannot be seen becomes
    its escape; of a longer text the middle is cut out. Cleaning twice changes nothing.

    Args:
        text: what a model, a file or an exception said; anything but a string is converted.

    Examples:
        >>> clean("red \\x1b[31m")
        'red ␛[31m'
        >>> clean("a\\u202eb")
        'a\\\\u202eb'
        >>> len(clean("x" * 10_000_000))
        4096
    """
    text = str(text)
    if len(text) > 2 * LONGEST:  # no character gets shorter: what is kept comes from the ends
        return shorten(visible(text[:LONGEST]) + visible(text[-LONGEST:]), LONGEST)
    return shorten(visible(text), LONGEST)


def visible(text: str) -> str:
    """Return a text of our own making, of any length, with its hidden characters made visible as by ``clean``.

    Examples:
        >>> visible("M0 0\\nL1 1")
        'M0 0␊L1 1'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def obeyed_by_none(line: str) -> str:
    """Return a line of plain text so that no CI runner takes it for a command; its width stays.

    Examples:
        >>> obeyed_by_none("  ::error::x"), obeyed_by_none("at::native ##[group]")
        ('  ∷ error::x', 'at::native ♯#[group]')
    """
    return _COMMAND.sub(lambda found: "♯#" if found[1] is None else f"{found[1]}∷ ", line)


def respelled(page: str, reference: str) -> str:
    """Return a page of JSON, HTML or XML so that no CI runner that it is printed to finds a command in it.

    Args:
        page: its readers get the same text.
        reference: how its syntax writes the number of a character, as a format.

    Examples:
        >>> respelled("<b>##[group]</b>", "&#{};")
        '<b>#&#35;[group]</b>'
    """

    def write(found: re.Match[str]) -> str:
        if found[1] is None:
            return "#" + reference.format(ord("#"))
        return f"{found[1]}{reference.format(ord(':'))}:"

    return _COMMAND.sub(write, page)


def shorten(text: str, limit: int) -> str:
    """Cut the middle out of a text longer than ``limit`` characters.

    Examples:
        >>> shorten("model.encoder.layers", 11)
        'model…ayers'
    """
    if len(text) <= limit:
        return text
    head = (limit - 1) // 2
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def _visible(character: str) -> str:
    code = ord(character)
    if code < ord(" "):
        return chr(_PICTURES + code)
    if code == _DELETE:
        return _SYMBOL_FOR_DELETE
    if unicodedata.category(character) in _HIDDEN or code in _INVISIBLE:
        return character.encode("ascii", "backslashreplace").decode("ascii")
    return character
