"""Writes the pages of this folder that are read off the code: `python docs/generate.py`.

Such a page is never edited by hand, but for drills.md, of which only two tables are made here.
tests/tidy/test_docs.py compares it with what is made here.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

from recovery.drill.jobs.bundled import BUNDLED
from recovery.drill.catalogue import ALL
from statebackend import errors
from statebackend._setting import PREFIX
from statebackend.settings import SETTINGS

FOLDER = Path(__file__).parent

ERRORS_PAGE = """\
# Errors

Every error that the library raises on purpose is a `StateBackendError`. Its text begins with its
code, says what happened and to what, and ends with what to do next; both halves are attributes
(`what`, `todo`) beside `code`. Catching an error of the third column catches all that name
it there.

What fails inside a running query reaches the caller as Spark's `StreamingQueryException`, with its
code and sentence before all details (in a `foreachBatch` function after the lines by which Spark
called that).

{digits}

{table}
"""

SETTINGS_PAGE = """\
# Settings

Give a setting in one of three ways. The first one that is given counts.

1. As an argument of `StateBackend`: `local_dir`, `parallelism`, `max_parallelism` and `commit` have
   arguments of their own. Give all others by name in `settings=`, as in `settings={{"tls": 1}}`.
2. As a key of the SparkSession, such as `spark.statebackend.tls`.
3. Else the default counts.

A job needs none of these settings. Most jobs set `local_dir` and `parallelism` only. What is not on this page
is for [experts](expert-settings.md): leave it as it is until a measurement says otherwise.

{tables}
"""

EXPERT_SETTINGS_PAGE = """\
# Settings for experts

These settings trade one cost for another: requests for bytes, memory for disk, the speed of a restart for the
speed of batches. The defaults were measured. Change one setting at a time, and look at
[the progress](progress.md) before and after. They are given like [the other settings](settings.md).

{tables}
"""

# The settings that a user may have to know; all others are for experts.
USER_SETTINGS = {
    "Where and how wide": ["uri", "local_dir", "parallelism", "max_parallelism"],
    "Commits and time": ["commit", "repeatable_sources", "heartbeat"],
    "Memory": ["input_budget_bytes", "overlay_budget_bytes", "block_cache_bytes"],
    "Network": ["tls", "driver_host", "driver_bind", "driver_port"],
    "Patience": ["attempt_timeout_s", "commit_timeout_s", "start_timeout_s"],
    "Executors that come and go": ["rebalance", "rebalance_settle_s"],
    "S3": [
        "s3_endpoint",
        "s3_region",
        "s3_sse",
        "s3_kms_key_id",
        "s3_role_arn",
        "s3_ca_bundle",
        "s3_deadline_s",
    ],
}
EXPERT_SETTINGS = {
    "Processors": ["constant_bytes", "quick_frames"],
    "Open stores": ["open_stores", "idle_close_s", "follow_stores_bytes", "lease_timeout_s"],
    "RocksDB": ["write_buffer_bytes"],
    "Records": ["record_limit_bytes", "inline_limit_bytes"],
    "Full copies of state": [
        "base_every_epochs",
        "base_apart_every_epochs",
        "base_apart_min_bytes",
        "base_apart_ratio",
        "base_whole_limit_bytes",
        "base_bytes_per_s",
        "base_lease_s",
    ],
    "Garbage collection": ["retain_epochs", "clean_every_epochs", "clean_min_age_s"],
}


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


def settings_page(text: str, groups: dict[str, list[str]]) -> str:
    """A page of settings: a heading and a table for each group."""
    tables = []
    for title, names in groups.items():
        rows = [f"## {title}", "", "| name | key | default | meaning |", "| --- | --- | --- | --- |"]
        for name in names:
            setting = SETTINGS[name]
            default = "(none)" if setting.default == "" else setting.default
            rows.append(f"| `{name}` | `{PREFIX}{setting.key}` | {default} | {setting.meaning} |")
        tables.append("\n".join(rows))
    return text.format(tables="\n\n".join(tables))


def drills_page() -> str:
    """The page of drills: written by hand, but for its tables of jobs and faults."""
    jobs = ["| job | what it does |", "| --- | --- |"]
    jobs += [f"| `{name}` | {_cell(job.summary)} |" for name, job in BUNDLED.items()]
    faults = ["| fault | what happens | what holds all the same | needs |"]
    faults.append("| --- | --- | --- | --- |")
    for name, fault in ALL.items():
        needs = ", ".join(sorted(fault.needs))
        faults.append(f"| `{name}` | {_cell(fault.summary)} | {_cell(fault.promise)} | {needs} |")
    text = (FOLDER / "quality" / "drills.md").read_text(encoding="utf-8")
    for part, rows in (("jobs", jobs), ("faults", faults)):
        begin, end = f"<!-- generated by docs/generate.py: {part} -->", "<!-- end -->"
        table = "\n".join((begin, *rows, end))
        text = re.sub(f"{begin}.*?{end}", lambda _, table=table: table, text, flags=re.DOTALL)
    return text


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def pages() -> dict[str, str]:
    """Every generated page, by its path in docs/."""
    return {
        "quality/drills.md": drills_page(),
        "reference/errors.md": errors_page(),
        "reference/settings.md": settings_page(SETTINGS_PAGE, USER_SETTINGS),
        "reference/expert-settings.md": settings_page(EXPERT_SETTINGS_PAGE, EXPERT_SETTINGS),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
