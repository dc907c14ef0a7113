"""The command line: plans, and epochs that are streamed by processes of this machine and compared with them.

It knows what users know, and the tallies of :mod:`checks <annbatch_distributed.checks>`. typer and rich, the extra
``cli``, are imported when a command is run.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_NAME = "annbatch-distributed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code; whatever is wrong is one line on stderr.

    Parameters
    ----------
    arguments
        What follows the name of the program; None takes what this process was started with.

    Returns
    -------
    0 if all is right; 1 if a check has found a difference or could not be brought to its end; 2 if an argument, or what
    it names, is wrong; 128 and the number of the signal that ended it.
    """
    try:
        from annbatch_distributed.cli.commands import app
    except ModuleNotFoundError as error:
        if error.name not in {"rich", "typer"}:
            raise
        return _said(f"{error.name} is not installed. The command line needs annbatch-distributed[cli]", 2)

    import typer

    from annbatch_distributed.cli.cells import InputError
    from annbatch_distributed.cli.job import RankError

    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name=_NAME, standalone_mode=False)
    except InputError as error:
        return _said(error, 2)
    except RankError as error:
        return _said(error, 1)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # what typer says of arguments, the class of which is elsewhere in some of its versions
        if not hasattr(error, "format_message"):
            raise
        return _said(f"{error.format_message().rstrip('.')}. See --help.", 2)
    return int(code or 0)


def _said(problem: object, code: int) -> int:
    print(f"{_NAME}: {' '.join(str(problem).split())}", file=sys.stderr)  # noqa: T201 it talks to a terminal
    return code
