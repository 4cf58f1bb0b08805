"""``[tool.normwise]`` of a pyproject.toml: which rules run, what fails, and what is kept quiet, with a reason.

The command line, the fixture of pytest and ``assert_clean`` look for it from the current folder upwards; ``nw.check``
reads a file only where it is named. A file that cannot be followed to the letter is refused with its line: a rule that
is silently not run, or silently kept quiet, would look like a pass.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import translate
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from normwise.checkup import suppression
from normwise.checkup._toml import Lines, deepest_key
from normwise.checkup.finding import FAIL_ON, Finding
from normwise.checkup.suppression import Suppression
from normwise.errors import ConfigurationError

__all__ = ["Configuration", "PerModuleIgnore", "nearest", "read", "shown"]

FILE = "pyproject.toml"
# Larger than any configuration that people write, and what a parser in Python reads in half a second.
LARGEST, DEEPEST_KEY = 2**18, 100
_KEYS = ("select", "ignore", "fail-on", "baseline", "per-module-ignores")
_IGNORE_KEYS = ("modules", "rules", "reason")
_TYPES = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array", dict: "a table"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PerModuleIgnore:
    """Rules that are kept quiet at some modules.

    Args:
        modules: patterns of module paths: ``*`` is any text, dots too, ``?`` one character, ``[0-3]`` one of these.
            What lies inside a module that matches is covered as well.
        rules: codes, families or names.
        reason: why.
        where: FILE:LINE.
    """

    modules: tuple[str, ...]
    rules: tuple[str, ...]
    reason: str
    where: str = ""

    def suppressions(self) -> Iterator[Suppression]:
        """Yield one suppression for each pattern and each rule."""
        for pattern in self.modules:
            covers = _matching(pattern)
            for entry in self.rules:
                yield Suppression(
                    code=entry,
                    codes=suppression.codes(entry),
                    pattern=pattern,
                    by="configuration",
                    where=self.where,
                    reason=self.reason,
                    covers=covers,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What ``[tool.normwise]`` says; each field is empty where it says nothing.

    Args:
        select: codes, families or names of the rules to run; all where it is empty.
        ignore: those to leave out.
        fail_on: the lowest severity that fails: "error", "warning", "info" or "never".
        baseline: the file of findings that are known.
        per_module_ignores: what is kept quiet, where and why.
        file: where all this was read.
        where: FILE:LINE of the table in it.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str = "error"
    baseline: Path | None = None
    per_module_ignores: tuple[PerModuleIgnore, ...] = ()
    file: Path | None = None
    where: str | None = None

    def suppressions(self) -> list[Suppression]:
        """Return what is kept quiet at which modules."""
        return [each for ignored in self.per_module_ignores for each in ignored.suppressions()]


def nearest(folder: Path | None = None) -> Configuration:
    """Return the configuration of a folder: of the first pyproject.toml upwards that has one.

    The search ends at the root of a repository (a folder with ``.git``). Files that do not mention normwise are not
    parsed.

    Args:
        folder: where to begin; the current one by default.

    Raises:
        ConfigurationError: a file on the way cannot be read or followed.
    """
    start = Path.cwd() if folder is None else folder.absolute()
    for each in (start, *start.parents):
        path = each / FILE
        if os.path.isfile(path):  # False, too, where a folder may not be searched
            content = _bytes(path)
            table = _Table.of(path, content) if b"normwise" in content else None
            if table is not None:
                return table.configuration()
        if os.path.exists(each / ".git"):
            break
    return Configuration()


def read(path: str | os.PathLike[str]) -> Configuration:
    """Return the configuration of a TOML file.

    Raises:
        ConfigurationError: the file cannot be read, has no ``[tool.normwise]``, or cannot be followed.
    """
    path = Path(path)
    table = _Table.of(path, _bytes(path))
    if table is None:
        raise ConfigurationError(shown(path), "has no [tool.normwise] table: add one, or name another file")
    return table.configuration()


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        said = error.strerror or type(error).__name__
        raise ConfigurationError(shown(path), f"cannot be read ({said}): name a TOML file you may read") from None
    if len(content) > LARGEST:
        raise ConfigurationError(
            shown(path),
            f"is larger than {LARGEST // 1024} KiB: is it a configuration? Put [tool.normwise] in a file"
            " of its own and name it with --config",
        )
    return content


def shown(path: Path) -> str:
    """Return a path as it is shown: from the current folder on where it lies below, so that it is the same anywhere."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


class _Table:
    """The table of one file, whose every complaint names the line."""

    def __init__(self, path: Path, text: str, table: dict[str, Any]) -> None:
        self.path, self.text, self.table = path, text, table

    @classmethod
    def of(cls, path: Path, content: bytes) -> _Table | None:
        """Return the table of a file, None where it has none."""
        document = _parsed(path, content)
        text = content.decode()
        table = document.get("tool")
        found = table.get("normwise") if isinstance(table, dict) else None
        if found is None:
            return None
        made = cls(path, text, found if isinstance(found, dict) else {})
        if not isinstance(found, dict):
            made.fail(f"tool.normwise must be a table, got {_kind(found)}: write [tool.normwise]")
        return made

    @cached_property
    def lines(self) -> Lines:
        return Lines(self.text)

    def where(self, *keys: str | int, value: object = None) -> str:
        return f"{shown(self.path)}:{self.lines.of('tool', 'normwise', *keys, value=value)}"

    def fail(self, reason: str, *keys: str | int, value: object = None) -> NoReturn:
        raise ConfigurationError(self.where(*keys, value=value), reason) from None

    def configuration(self) -> Configuration:
        self.known(self.table, _KEYS)
        baseline = self.string("baseline", at=()) if "baseline" in self.table else None
        return Configuration(
            select=self.rules("select", at=()),
            ignore=self.rules("ignore", at=()),
            fail_on=self.fail_on(),
            baseline=None if baseline is None else self.path.parent / baseline,
            per_module_ignores=tuple(self.per_module_ignores()),
            file=self.path,
            where=self.where(),
        )

    def known(self, table: dict[str, Any], keys: Collection[str], *at: str | int) -> None:
        for key in table:
            if key not in keys:
                near = get_close_matches(key.lower().replace("_", "-"), keys, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(keys)}"
                self.fail(f"there is no key {key!r} here: {hint}", *at, key)

    def inner(self, at: tuple[str | int, ...]) -> dict[str, Any]:
        table: Any = self.table
        for key in at:
            table = table[key]
        return table

    def string(self, key: str, *, at: tuple[str | int, ...]) -> str:
        value = self.inner(at)[key]
        if not isinstance(value, str):
            self.fail(f"{key} must be a string, got {_kind(value)}", *at, key)
        if not value.strip():
            self.fail(f"{key} is empty: write what it is", *at, key)
        return value.strip()

    def strings(self, key: str, *, at: tuple[str | int, ...]) -> tuple[str, ...]:
        value = self.inner(at).get(key, [])
        if not isinstance(value, list):
            self.fail(f'{key} must be an array of strings, such as ["PLC001"], got {_kind(value)}', *at, key)
        for each in value:
            if not isinstance(each, str):
                self.fail(f"{key} must hold strings only, got {_kind(each)}", *at, key)
            if not each.strip():
                self.fail(f"{key} holds an empty string", *at, key, value=each)
        return tuple(each.strip() for each in value)

    def rules(self, key: str, *, at: tuple[str | int, ...]) -> tuple[str, ...]:
        entries = self.strings(key, at=at)
        for entry in entries:
            try:
                suppression.codes(entry)
            except ValueError as error:
                self.fail(f"{key}: {error}", *at, key, value=entry)
        return entries

    def fail_on(self) -> str:
        if "fail-on" not in self.table:
            return FAIL_ON[0]
        value = self.string("fail-on", at=())
        if value not in FAIL_ON:
            self.fail(f"fail-on must be one of {', '.join(FAIL_ON)}, got {value!r}", "fail-on")
        return value

    def per_module_ignores(self) -> Iterator[PerModuleIgnore]:
        key = "per-module-ignores"
        tables = self.table.get(key, [])
        if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
            wanted = "write [[tool.normwise.per-module-ignores]], and below it modules, rules and reason"
            self.fail(f"{key} must be an array of tables, got {_kind(tables)}: {wanted}", key)
        for index, table in enumerate(tables):
            at = (key, index)
            self.known(table, _IGNORE_KEYS, *at)
            for needed, what in zip(_IGNORE_KEYS, _NEEDED, strict=True):
                if table.get(needed) in (None, [], ""):
                    self.fail(f"an entry of {key} needs {needed!r}: {what}", *at, needed)
            yield PerModuleIgnore(
                modules=self.strings("modules", at=at),
                rules=self.rules("rules", at=at),
                reason=self.string("reason", at=at),
                where=self.where(*at),
            )


_NEEDED = (
    'patterns of module paths, such as ["*.q_norm"]',
    'codes, families or names of rules, such as ["AXS004"]',
    "why what they find is right there, in your words",
)


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    file = shown(path)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"{file}:{line}", "is not UTF-8, as TOML must be: save it again as that") from None
    try:
        if deepest_key(text) > DEEPEST_KEY:
            raise ConfigurationError(file, f"has a key of more than {DEEPEST_KEY} parts: shorten it")
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        said = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(error))
        line = said[1] if said and said[1] else text.rstrip().count("\n") + 1
        what = str(error)[: said.start()] if said else str(error)
        raise ConfigurationError(f"{file}:{line}", f"is no valid TOML: {what}; correct this line") from None
    except RecursionError:
        raise ConfigurationError(file, "is nested too deeply to be read: flatten it") from None


def _kind(value: object) -> str:
    return _TYPES.get(type(value), f"a {type(value).__name__}")


def _matching(pattern: str) -> Callable[[Finding, str], bool]:
    """Return what tells whether a place is a module that matches a pattern, or lies inside one."""
    whole = re.compile(translate(pattern))

    def covers(finding: Finding, place: str) -> bool:
        ends = [match.start() for match in re.finditer(r"[.#]", place)]
        return any(whole.match(place[:end]) for end in (*ends, len(place)))

    return covers
