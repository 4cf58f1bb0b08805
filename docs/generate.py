"""Write the pages that come from the code: the command line's help and one page a rule.

``python docs/generate.py`` writes them, ``--check`` only says which are out of date (exit code 1).
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from normwise._parts import page_title
from normwise.checkup import rules
from normwise.cli import commands

DOCS = Path(__file__).parent


def cli_page() -> str:
    """Return the help of every command, as the terminal shows it at 100 columns."""
    sections = [("normwise", commands), *((f"normwise {name}", each) for name, each in commands.commands.items())]
    blocks = [f"## {name}\n\n```text\n{_help(name, command)}\n```\n" for name, command in sections]
    return "# The command line\n\n" + "\n".join(blocks)


def _help(name: str, command: click.Command) -> str:
    return command.get_help(click.Context(command, info_name=name, terminal_width=100, max_content_width=100))


def rule_pages() -> dict[str, str]:
    """Return the page of every rule by its code, and the index as README."""
    parts = sorted(rules.all_rules().items(), key=lambda item: item[1].CODE)
    pages = {
        part.CODE: f"# {part.CODE} {name} ({part.SEVERITY})\n\n{(part.__doc__ or '').strip()}\n" for name, part in parts
    }
    rows = [
        f"| [{part.CODE}]({part.CODE}.md) | {name} | {part.SEVERITY} | {page_title(part)} |" for name, part in parts
    ]
    table = "\n".join(["| code | name | severity | what it finds |", "|---|---|---|---|", *rows])
    return {"README": f"# Rules\n\n{table}\n", **pages}


def pages() -> dict[Path, str]:
    """Return every generated page by its path."""
    return {
        DOCS / "cli.md": cli_page(),
        **{DOCS / "rules" / f"{name}.md": text for name, text in rule_pages().items()},
    }


def main(check: bool) -> int:
    """Write the pages, or name those that differ."""
    wanted = pages()
    stray = set((DOCS / "rules").glob("*.md")) - set(wanted)
    stale = sorted(
        stray | {path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text}
    )
    if check:
        for path in stale:
            print(f"{path.relative_to(DOCS.parent)} is out of date: run `make docs`")
        return int(bool(stale))
    for path in stray:
        path.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    print(f"{len(wanted)} pages written, {len(stale)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
