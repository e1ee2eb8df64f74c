"""`statebackend import-spark`: brings a query's state from Spark's own operators."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from recovery.savepoints.savepoint import Savepoint
from snapshot.storage.stores_by_uri import S3_SCHEMES
from statebackend.cli.console_output import NoProgress, console, guarded, say_json, table
from statebackend.cli.job_folders import place_of
from statebackend.cli.progress_bars import progress_bar
from statebackend.errors import SettingError
from statebackend.keygroups import TABLES_MAX_PARALLELISM
from statebackend.texts import size, when

__all__ = ["bring_from_spark"]

FOUND: Final = 1


Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="The checkpoint location of the query.")
]
To = Annotated[str, typer.Option("--to", help="The savepoint's folder, empty; a URI.")]
Uids = Annotated[
    list[str] | None,
    typer.Option(
        "--uid",
        help="The operator's name here: the class of its processor, or its function. Of several "
        "operators: NUMBER=NAME, once for each.",
    ),
]
Timeouts = Annotated[
    list[str] | None,
    typer.Option(
        "--timeout",
        help="The timeoutConf of applyInPandasWithState, where it has one; as for --uid.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would come over, and write nothing.")
]
KeyGroups = Annotated[int, typer.Option("--max-parallelism", help="Key groups of the job.")]
Scratch = Annotated[str | None, typer.Option("--scratch-dir", help="For local files meanwhile.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Endpoint = Annotated[
    str, typer.Option("--s3-endpoint", help="URL of an S3 server. [env: STATEBACKEND_S3_ENDPOINT]")
]
Region = Annotated[
    str, typer.Option("--s3-region", help="Region of the bucket. [env: STATEBACKEND_S3_REGION]")
]


@guarded
def bring_from_spark(
    checkpoint: Checkpoint,
    to: To = "",
    uid: Uids = None,
    timeout: Timeouts = None,
    dry_run: DryRun = False,
    max_parallelism: KeyGroups = TABLES_MAX_PARALLELISM,
    scratch_dir: Scratch = None,
    as_json: AsJson = False,
    no_progress: NoProgress = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Write a savepoint of the state that Spark's own operators keep. Stop the query first."""
    if not to and not dry_run:
        raise SettingError("No place is given for the savepoint.", todo="Give --to or --dry-run.")
    if not uid and not dry_run:  # Spark takes a minute to start and to say the same
        raise SettingError(
            "No name is given for the query's operator.",
            todo="Give --uid: with install() it is the name of the processor's class, or of the "
            "function. --dry-run shows the operators.",
        )
    from pyspark.sql import SparkSession

    from statebackend.spark.from_spark.import_spark import import_spark

    named = SparkSession.builder.appName("statebackend import-spark")
    spark = named.config("spark.ui.showConsoleProgress", "false").getOrCreate()  # one bar is enough
    try:
        with progress_bar("import", "rows", quiet=as_json or no_progress) as progress:
            found = import_spark(
                spark,
                checkpoint,
                to,
                uid=_by_number("--uid", uid),
                timeout=_by_number("--timeout", timeout),
                dry_run=dry_run,
                max_parallelism=max_parallelism,
                options=place_of(_on_s3(to, checkpoint), s3_endpoint, s3_region).options,
                scratch_dir=scratch_dir,
                progress=progress,
            )
    finally:
        spark.stop()
    if as_json:
        say_json(**{name: getattr(found, name) for name in found.__struct_fields__})
    else:
        _show(found)
    if found.problems:
        raise typer.Exit(FOUND)


def _on_s3(to: str, checkpoint: str) -> str:
    """The one of the two that is on S3, if one is."""
    return next((uri for uri in (to, checkpoint) if uri.partition("://")[0] in S3_SCHEMES), to)


def _by_number(option: str, given: list[str] | None) -> str | dict[int, str] | None:
    """``NAME``, or ``NUMBER=NAME`` of several."""
    if not given:
        return None
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    found: dict[int, str] = {}
    for one in given:
        number, equals, name = one.partition("=")
        if not equals or not number.isdigit() or not name:
            raise SettingError(
                f"{option} is {one!r}.", todo=f"Give {option} NUMBER=NAME, once for each operator."
            )
        found[int(number)] = name
    return found


def _show(found: Any) -> None:
    out = console()
    out.print(f"query {found.query_id}, after batch {found.epoch}")
    if found.unfinished:
        out.print(f"batch {found.epoch + 1} was planned and not committed: it is run as planned")
    if found.watermark_ms:
        out.print(f"watermark {when(found.watermark_ms)}")
    shown = table("operator", "uid", "state", "kind", "rows#", "comes over")
    for one in found.operators:
        name = escape(f"{one.number} {one.name}")
        if one.problem:
            shown.add_row(name, escape(one.uid), "", "", "", escape(f"no: {one.problem}"))
            continue
        for state in one.states:
            kind = f"{state.kind}, TTL" if state.ttl else state.kind
            rows = "" if state.rows is None else str(state.rows)
            comes = escape(f"no: {state.problem}") if state.problem else "yes"
            shown.add_row(name, escape(one.uid), escape(state.name), kind, rows, comes)
        if not one.states:
            shown.add_row(name, escape(one.uid), "", "", "", "it has no state")
    out.print(shown)
    for one in found.operators:
        if one.timeout_needed:
            out.print(f"operator {one.number}: its keys have timeouts, so give their --timeout")
    saved: Savepoint | None = found.savepoint
    if saved is not None:
        out.print(f"savepoint {escape(saved.uri)}, {size(saved.size_bytes)}")
