"""Write the real reports into the guide on finding a cause.

``python docs/make_reports.py`` runs each ``<!-- report: COMMAND | SECTION, ... -->`` of ``docs/find-the-cause*.md`` and
puts those sections of the report into the block below it. The tests compare them with the real ones, numbers loosely:
they differ a little from machine to machine.
"""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

from normwise.checkup.reports._words import words
from normwise.cli import main as normwise

DOCS = Path(__file__).parent
GUIDES = {"find-the-cause.md": "en", "find-the-cause.zh-CN.md": "zh"}
WIDTH = 100  # columns
BLOCK = re.compile(r"(<!-- report: (.+?) \| (.+?) -->\n)```text\n(.*?)```\n", re.DOTALL)


def report(command: str, lang: str) -> str:
    """Return what a command prints, run in the root of the repository."""
    page = io.StringIO()
    os.environ["COLUMNS"] = str(WIDTH)
    with chdir(DOCS.parent), redirect_stdout(page), redirect_stderr(io.StringIO()):
        normwise([*shlex.split(command)[1:], "--fail-on", "never", "--lang", lang])
    return page.getvalue()


def sections(page: str, wanted: str, lang: str) -> str:
    """Return some sections of a report by their English headings; findings end where the verdicts begin."""
    say = words(lang)
    after = {"Findings": ("Passed", "Not checked")}
    kept = []
    for heading in wanted.split(", "):
        start = re.search(rf"^{re.escape(say(heading))}(  .*)?$", page, flags=re.MULTILINE)
        if start is None:
            raise ValueError(f"the report has no section {heading!r}")
        rest = page[start.start() :]
        ends = [rf"^{say(end)}\b" for end in after.get(heading, ())] or [r"^$"]
        found = [match.start() for end in ends if (match := re.search(end, rest, flags=re.MULTILINE))]
        kept.append(rest[: min(found, default=len(rest))].rstrip())
    return "\n\n".join(kept) + "\n"


def blocks(name: str) -> Iterator[tuple[str, str, str]]:
    """Return the blocks of a guide: the command, the sections, and what is shown."""
    for _, command, wanted, shown in BLOCK.findall((DOCS / name).read_text("utf-8")):
        yield command, wanted, shown


def main() -> None:
    """Write the blocks of both guides."""
    for name, lang in GUIDES.items():
        path = DOCS / name

        def fresh(match: re.Match[str], lang: str = lang) -> str:
            return f"{match[1]}```text\n{sections(report(match[2], lang), match[3], lang)}```\n"

        path.write_text(BLOCK.sub(fresh, path.read_text("utf-8")), "utf-8")
        print(f"wrote {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
