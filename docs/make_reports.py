"""Write the real reports into the guide on finding a cause.

``python docs/make_reports.py`` runs each ``<!-- report: normwise check TARGET | SECTION, ... -->`` of
``docs/find-the-cause*.md`` and puts those sections of the report into the block below it. The tests compare them with
the real ones, numbers loosely: they differ a little from machine to machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path

import torch

import normwise as nw
from normwise.checkup import reports
from normwise.checkup.report import Report
from normwise.checkup.reports._words import words

DOCS = Path(__file__).parent
GUIDES = {"find-the-cause.md": "en", "find-the-cause.zh-CN.md": "zh"}
WIDTH = 100  # columns
BLOCK = re.compile(r"(<!-- report: normwise check (\S+) \| (.+?) -->\n)```text\n(.*?)```\n", re.DOTALL)
VERDICTS = ("Passed", "Not checked")  # what follows the findings


@cache
def checked(target: str) -> Report:
    """Return the report on a target, found from the root of the repository; sums depend on the number of threads."""
    torch.set_num_threads(1)
    with chdir(DOCS.parent):
        return nw.check(target)


def sections(target: str, wanted: str, lang: str) -> str:
    """Return some sections of the report on a target, in a language, by their English headings."""
    page = reports.render(checked(target), "text", lang=lang, width=WIDTH, color=False)
    return "\n\n".join(_section(page, heading, lang) for heading in wanted.split(", ")) + "\n"


def _section(page: str, heading: str, lang: str) -> str:
    say = words(lang)
    start = re.search(rf"^{re.escape(say(heading))}(  .*)?$", page, flags=re.MULTILINE)
    if start is None:
        raise ValueError(f"the report has no section {heading!r}")
    ends = "|".join(rf"^{say(each)}\b" for each in VERDICTS) if heading == "Findings" else r"^$"
    return re.split(ends, page[start.start() :], maxsplit=1, flags=re.MULTILINE)[0].rstrip()


def blocks(name: str) -> Iterator[tuple[str, str, str]]:
    """Return the blocks of a guide: the target, the sections, and what is shown."""
    for _, target, wanted, shown in BLOCK.findall((DOCS / name).read_text("utf-8")):
        yield target, wanted, shown


def filled(name: str) -> str:
    """Return a guide with its blocks made anew."""

    def fresh(match: re.Match[str]) -> str:
        return f"{match[1]}```text\n{sections(match[2], match[3], GUIDES[name])}```\n"

    return BLOCK.sub(fresh, (DOCS / name).read_text("utf-8"))


def main() -> None:
    """Write the blocks of both guides."""
    for name in GUIDES:
        (DOCS / name).write_text(filled(name), "utf-8")
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
