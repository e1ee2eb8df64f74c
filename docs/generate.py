"""Writes the pages of this folder that are read off the code: `python docs/generate.py`.

Such a page is never edited by hand, but for drills.md, of which only two tables are made here.
tests/tidy/test_docs.py compares it with what is made here.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.core import TyperArgument
from typer.main import get_command

from recovery.drill.jobs.bundled_jobs import BUNDLED
from recovery.drill.catalogue import ALL
from statebackend import errors
from statebackend._setting import PREFIX
from statebackend.cli.job_commands import app
from statebackend.monitoring.metric_table import DURATION_BUCKETS_S, JOB_LABEL, METRICS
from statebackend.settings import SETTINGS

FOLDER = Path(__file__).parent

ERRORS_PAGE = """\
# Errors

Every error that the library raises on purpose is a `StateBackendError`. Its text begins with its
code. Then it says what happened, and what to do next. The error has these parts as attributes, too:
`code`, `what` and `todo`. The third column names the class that an error is derived from, so
`except` with that class catches the error as well.

[When something is wrong](../howto/repair.md#by-code) says what to do about the codes of running queries.

If a running streaming query fails, `awaitTermination()` raises Spark's `StreamingQueryException`, and not a class of this
table. Its text begins with the code, too. Its attribute `error` is the error of this table. Its attribute `whole` has
Spark's own text, with the stacks and the plan. A continuous job raises the error of this table itself.

{digits}

{table}
"""

SETTINGS_PAGE = """\
# Settings

You can give a setting in two ways:

1. As an argument of `install` or `StateBackend`: `uri`, `local_dir`, `parallelism`, `max_parallelism` and `commit` have
   arguments of their own. Give all others by name in `settings=`, as in `settings={{"tls": 1}}`.
2. As a key of the SparkSession, such as `spark.statebackend.tls`. An argument has the name of the first
   column, a key that of the second.

If you give both, the argument counts. If you give neither, the default counts.

Values may have Spark's forms: `true` for 1, `64m` for a number of bytes, `10 minutes` for a number of seconds.
A misspelt key is refused (`SB1001`).

A job needs none of these settings. Most jobs set `uri`, `local_dir` and `parallelism` only. The settings that are not on
this page are [for experts](expert-settings.md): leave them as they are until a measurement says otherwise.

The key `spark.statebackend.enabled` belongs to [`install`](../howto/drop-in.md#turn-it-off). With `false`,
`install` does nothing.

{tables}
"""

EXPERT_SETTINGS_PAGE = """\
# Settings for experts

These settings trade one cost for another: requests for bytes, memory for disk, the speed of a restart for the
speed of batches. The defaults come from measurements. Change one setting at a time, and look at
[the progress](progress.md) before and after. [Memory](../howto/memory.md#other-things-to-tune) says which setting
serves which aim. Give them like [the other settings](settings.md).

{tables}
"""

# The settings that a user may have to know; all others are for experts.
USER_SETTINGS = {
    "Where and how wide": ["uri", "local_dir", "parallelism", "max_parallelism"],
    "Commits and time": ["commit", "repeatable_sources", "heartbeat"],
    "Memory": ["input_budget_bytes", "overlay_budget_bytes", "block_cache_bytes"],
    "Network": ["tls", "driver_host", "driver_bind", "driver_port"],
    "Monitoring": ["metrics_host", "metrics_port", "otel", "ui_host", "ui_port", "ui_token"],
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


METRICS_PAGE = """\
# Metrics

The driver serves these metrics to Prometheus if `spark.statebackend.metrics.port` is set.
[Monitor a job](../howto/monitor.md) says how to turn them on, and what to do about each alert.

Every metric has the label `{job_label}`, which is the job's name. The label is not called `job`,
because Prometheus has a label of that name for what it scrapes. The column "labels" names the others.
No label grows with the parallelism: there is none for the subtask.

One port serves all jobs of a driver, and figures of the driver's own process (`process_...`). What
was counted of a job stays there after the end of its query, until the driver ends or the job is
started again. Counters begin at 0 with each start.

Histograms are in seconds, with the buckets {buckets}.

{table}
"""

METRIC_GROUPS = {
    "The job": "job_running",
    "Epochs": "epoch_duration_seconds",
    "State": "state_rows",
    "Restores and full copies": "restores_total",
    "The store": "store_requests_total",
    "Checkpoints of continuous jobs": "checkpoints_total",
}


OPTIONS_PAGE = """\
# All options

Every option of every command. [Command line](cli.md) says what the commands do, what they cost, and what they return.
`statebackend COMMAND --help` shows the same.

{parts}
"""


def options_page() -> str:
    """The page of the command line's options: a heading and a table for each command."""
    return OPTIONS_PAGE.format(parts="\n\n".join(_options_of(get_command(app), "statebackend")))


def _options_of(command: Any, name: str) -> Iterator[str]:
    """The tables of a command and of those below it."""
    if hasattr(command, "commands"):
        for child in sorted(command.commands):
            yield from _options_of(command.commands[child], f"{name} {child}")
        return
    rows = [f"## {name}", "", "| argument or option | default | meaning |", "| --- | --- | --- |"]
    for one in command.params:
        if isinstance(one, TyperArgument):
            term = one.metavar or one.name.upper()
        else:
            what = "" if one.is_flag else f" {one.metavar or one.name.rpartition('_')[2].upper()}"
            term = one.opts[0] + what
        default = f"`{one.default}`" if one.default else "required" if one.required else ""
        rows.append(f"| `{term}` | {default} | {_cell(one.help)} |")
    yield "\n".join(rows)


def metrics_page() -> str:
    """The page of all metrics: a heading and a table for each group."""
    titles = {first: title for title, first in METRIC_GROUPS.items()}
    rows: list[str] = []
    for name, metric in METRICS.items():
        if name in titles:
            rows += ["", f"## {titles[name]}", ""]
            rows += ["| name | type | labels | meaning |", "| --- | --- | --- | --- |"]
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.full_name}` | {metric.kind} | {labels} | {_cell(metric.help)} |")
    buckets = ", ".join(f"{bound:g}" for bound in DURATION_BUCKETS_S)
    table = "\n".join(rows).strip()
    return METRICS_PAGE.format(job_label=JOB_LABEL, buckets=buckets, table=table)


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
        "reference/cli-options.md": options_page(),
        "reference/errors.md": errors_page(),
        "reference/metrics.md": metrics_page(),
        "reference/settings.md": settings_page(SETTINGS_PAGE, USER_SETTINGS),
        "reference/expert-settings.md": settings_page(EXPERT_SETTINGS_PAGE, EXPERT_SETTINGS),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
