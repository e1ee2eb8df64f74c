"""How answers leave: tables for people, one JSON document for programs, errors as a sentence."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any, Final, ParamSpec

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from statebackend.errors import StateBackendError

__all__ = [
    "FAILED",
    "NoProgress",
    "console",
    "counted",
    "guarded",
    "say_json",
    "table",
]

JSON_FORMAT: Final = 1
FAILED: Final = 2

Args = ParamSpec("Args")
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No bars on the terminal.")]


def console() -> Console:
    """Standard output, as it is now. Wide where nobody looks: nothing may be cut off in a pipe."""
    return Console(width=None if sys.stdout.isatty() else 240, soft_wrap=True, highlight=False)


def say_json(**fields: Any) -> None:
    """One JSON document on standard output."""
    document = msgspec.to_builtins({"format": JSON_FORMAT, **fields}, str_keys=True)
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def guarded(verb: Callable[Args, None]) -> Callable[Args, None]:
    """A verb whose typed errors are told in a sentence and end it with status 2."""

    @functools.wraps(verb)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> None:
        try:
            verb(*args, **kwargs)
        except StateBackendError as error:
            if kwargs.get("as_json"):
                say_json(error={"code": error.code, "what": error.what, "todo": error.todo})
            print(str(error), file=sys.stderr)
            raise typer.Exit(FAILED) from error

    return run


def table(*columns: str, title: str = "") -> Table:
    """A table; columns whose name ends in '#' are numbers."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        number = column.endswith("#")
        made.add_column(
            column.removesuffix("#"), justify="right" if number else "left", overflow="fold"
        )
    return made


def counted(number: int, noun: str) -> str:
    """1 claim, 2 claims."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
