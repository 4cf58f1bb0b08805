"""The command line: parse, call one function, print, exit.

Exit codes: 0 done, or nothing found at or above ``--fail-on``; 1 findings, or a conversion refused; 2 could not run.
Whatever needs torch is imported inside the commands, so that ``normwise --help`` is quick.
"""

from __future__ import annotations

from normwise.cli._commands import commands as commands
from normwise.cli._main import main as main

__all__ = ["commands", "main"]
