"""How answers leave: tables for people, one JSON document for programs, errors as a sentence."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, ParamSpec

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from statebackend.errors import StateBackendError

__all__ = [
    "FAILED",
    "console",
    "counted",
    "guarded",
    "reading",
    "say_json",
    "table",
    "when",
]

JSON_FORMAT: Final = 1
FAILED: Final = 2

Args = ParamSpec("Args")


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


@contextmanager
def reading(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in bytes, on standard error if somebody looks at it."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


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


def when(at_ms: int | None) -> str:
    """A time for people, in UTC; empty where it is not known."""
    if at_ms is None or at_ms < 0:
        return ""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
