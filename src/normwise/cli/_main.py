"""The entry point: runs a command and turns what goes wrong into one message and an exit code."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Sequence

import click

from normwise.cli._commands import commands
from normwise.cli._output import COULD_NOT_RUN, cleaned, never_fail_to_encode

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what stands after ``normwise``; those of this process by default.

    Returns:
        The exit code: 0, 1 (findings) or 2 (could not run).
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    never_fail_to_encode()
    try:
        return commands.main(list(arguments), prog_name="normwise", standalone_mode=False) or 0
    except (Exception, KeyboardInterrupt, SystemExit) as failure:
        text = f"normwise: {_message(failure)}"
        if "--debug" in arguments:
            text = "".join(traceback.format_exception(failure)) + text
        click.echo("\n".join(map(cleaned, text.split("\n"))), err=True)
        return COULD_NOT_RUN
    finally:
        gc.unfreeze()


def _message(failure: BaseException) -> str:
    """Say in one sentence what went wrong and what to do."""
    from normwise.errors import NormwiseError

    match failure:
        case click.UsageError(ctx=ctx):
            return f"{failure.format_message()} (see `{ctx.command_path if ctx else 'normwise'} --help`)"
        case click.ClickException():
            return failure.format_message()
        case click.Abort(__cause__=EOFError() as cause):  # click takes it for an end of the terminal's input
            return f"something ended before it was read whole (EOFError: {cause}); run again with --debug to see what"
        case click.Abort() | KeyboardInterrupt():
            return "interrupted, nothing was concluded"
        case SystemExit(code=code):
            return f"the code of the target ended the program with exit status {code!r}: remove its call of exit()"
        case OSError(strerror=str(why), filename=str(path)):
            return f"{path}: {why}"
        case NormwiseError() | ValueError() | TypeError() | OSError() if str(failure):
            return str(failure)
    return f"this is a bug in normwise ({type(failure).__name__}: {failure}); run again with --debug and report it"
