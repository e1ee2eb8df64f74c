"""The command line: what an operator types. But for drills it starts no Spark and claims no job.

`statebackend list | describe | verify | gc | doctor`; docs/reference/cli.md has the pages and the
shapes of `--json`. `statebackend drill list | run`: docs/quality/drills.md. It needs the extra
`cli`, drills the extra `drill`.
"""

from __future__ import annotations

import sys

from statebackend.texts import install_extra

__all__ = ["main"]

NEEDED = ("rich", "typer")


def main() -> None:
    """Run the command line, and exit: 0 all is well, 1 something was found, 2 it did not work."""
    try:
        from statebackend.cli.job_commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in NEEDED:
            raise
        print(
            f"The command line needs the package {error.name!r}, which is not installed. "
            f"{install_extra('cli')}",
            file=sys.stderr,
        )
        sys.exit(2)
    app(prog_name="statebackend")
