"""Writes the pages of this folder that are read off the code: `python docs/generate.py`.

A page is never edited by hand; tests/tidy/test_docs.py compares it with what is made here.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

from statebackend import errors
from statebackend.settings import SETTINGS, settings_table

FOLDER = Path(__file__).parent

ERRORS_PAGE = """\
# Errors

Every error that the library raises on purpose is a `StateBackendError`. Its text begins with its
code, says what happened and to what, and ends with what to do next; both halves are attributes
(`what`, `todo`) beside `code`. Catching an error of the third column catches all that name
it there.

What fails inside a running query reaches the caller as Spark's `StreamingQueryException`, with the
code in its text.

{digits}

{table}
"""

SETTINGS_PAGE = """\
# Settings

An argument of `StateBackend` beats a key of the SparkSession, a key beats the default. `local_dir`,
`parallelism`, `max_parallelism` and `commit` are arguments of their own; every other one goes into
`settings=` by its name, as in `settings={{"lease_timeout_s": 5}}`.

{table}
"""


def error_classes() -> list[type[errors.StateBackendError]]:
    """Every error of the library, by code."""
    found = [
        kind
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.StateBackendError)
    ]
    return sorted(found, key=lambda kind: kind.code)


def errors_page() -> str:
    """The page of all errors: code, name, kind, meaning."""
    rows = ["| code | name | kind of | meaning |", "| --- | --- | --- | --- |"]
    for kind in error_classes():
        parent = kind.__bases__[0].__name__ if kind is not errors.StateBackendError else "Exception"
        meaning = _paragraph(kind.__doc__, 0)
        rows.append(f"| `{kind.code}` | `{kind.__name__}` | `{parent}` | {meaning} |")
    # The module's own words: what the first digit means.
    digits = textwrap.fill(_paragraph(errors.__doc__, 1), 100)
    return ERRORS_PAGE.format(digits=digits, table="\n".join(rows))


def _paragraph(docstring: str | None, number: int) -> str:
    return " ".join((docstring or "").split("\n\n")[number].split())


def settings_page() -> str:
    """The page of all settings."""
    names = ["name", "---", *(f"`{name}`" for name in SETTINGS)]
    rows = settings_table().splitlines()
    table = "\n".join(f"| {name} {row}" for name, row in zip(names, rows, strict=True))
    return SETTINGS_PAGE.format(table=table)


def pages() -> dict[str, str]:
    """Every generated page, by file name."""
    return {"errors.md": errors_page(), "settings.md": settings_page()}


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
