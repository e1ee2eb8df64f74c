"""Commands about jobs: each answers on standard output, and shows progress on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import typer

from recovery.inspect.describe import describe
from recovery.inspect.history import CheckpointFigures, History
from recovery.inspect.history_reader import HistoryReader
from recovery.inspect.job_list import refuse_savepoint, summarise
from recovery.inspect.verify import VerifyReport, verify
from snapshot.log.commit_log import CommitLog
from snapshot.retention.garbage_collection import ALL_PREFIXES, clean, outside_view
from snapshot.retention.history_keeping import KnownHistory
from snapshot.storage.object_store import ObjectStore
from statebackend import system
from statebackend.cli import drill_commands, history_tables, job_tables, metrics_commands
from statebackend.cli import savepoint_commands as savepoint
from statebackend.cli import state_commands as state
from statebackend.cli.console_output import FAILED, NoProgress, console, guarded, say_json
from statebackend.cli.doctor import examine, examine_spark
from statebackend.cli.import_spark_command import bring_from_spark
from statebackend.cli.job_folders import Place, place_of
from statebackend.cli.page_command import serve_page
from statebackend.cli.progress_bars import progress_bar
from statebackend.errors import NotRestorableError, StateBackendError

__all__ = ["app"]

FOUND: Final = 1
MIN_AGE_S: Final = 900

app = typer.Typer(
    help="Look at the durable state of streaming jobs, check it, clean it up; savepoints, drills.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(drill_commands.app, name="drill")
app.add_typer(savepoint.app, name="savepoint")
app.add_typer(state.app, name="state")
app.add_typer(metrics_commands.app, name="metrics")
app.command("import-spark")(bring_from_spark)
app.command("ui")(serve_page)

Uri = Annotated[str, typer.Argument(help="The folder of all jobs: the uri= of the query.")]
Job = Annotated[str | None, typer.Option("--job", help="One job's name; all jobs if left out.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Endpoint = Annotated[
    str, typer.Option("--s3-endpoint", help="URL of an S3 server. [env: STATEBACKEND_S3_ENDPOINT]")
]
Region = Annotated[
    str, typer.Option("--s3-region", help="Region of the bucket. [env: STATEBACKEND_S3_REGION]")
]


def _say_version(wanted: bool) -> None:
    if wanted:
        # From inside the face is not imported from; it is loaded all the same.
        print(f"statebackend {sys.modules['statebackend'].__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Look at the durable state of streaming jobs, check it, clean it up; savepoints, drills."""


@app.command("list")
@guarded
def list_jobs(
    uri: Uri, as_json: AsJson = False, s3_endpoint: Endpoint = "", s3_region: Region = ""
) -> None:
    """The jobs under a URI: newest epoch, size, who wrote last."""
    place = place_of(uri, s3_endpoint, s3_region)
    listed = place.listed().items()
    jobs = [summarise(place.job(name), name, inside) for name, inside in listed]
    if as_json:
        say_json(uri=uri, jobs=jobs)
    else:
        job_tables.jobs(console(), uri, jobs)


@app.command("run", context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
@guarded
def run_program(
    context: typer.Context,
    program: Annotated[
        Path, typer.Argument(help="A PySpark program.", exists=True, dir_okay=False)
    ],
    uri: Annotated[
        str | None, typer.Option("--uri", help="The folder of all jobs. [spark.statebackend.uri]")
    ] = None,
    local_dir: Annotated[
        str | None, typer.Option("--local-dir", help="For local copies. [.localDir]")
    ] = None,
    parallelism: Annotated[
        int | None, typer.Option("--parallelism", help="Subtasks per operator. [.parallelism]")
    ] = None,
    savepoint: Annotated[
        str | None, typer.Option("--savepoint", help="A savepoint that its query begins with.")
    ] = None,
) -> None:
    """Run a program that may not be touched: its sessions have `statebackend.install` called."""
    from statebackend.cli.run_app import run_app  # imports PySpark

    given = {"uri": uri, "local_dir": local_dir, "parallelism": parallelism}
    run_app(program, context.args, savepoint=savepoint, **given)


Answer = TypeVar("Answer")


def _each(
    place: Place, job: str | None, answer: Callable[[str, ObjectStore], Answer]
) -> tuple[list[Answer], list[dict[str, str]]]:
    """The answers for all jobs, and the errors of those that have none.

    One job that cannot be read does not keep the others from being answered for; the one job that
    was asked for by name does.
    """
    answers: list[Answer] = []
    errors: list[dict[str, str]] = []
    for name, store in place.jobs(job):
        try:
            answers.append(answer(name, store))
        except StateBackendError as error:
            if job is not None:
                raise
            print(f"{name}: {error}", file=sys.stderr)
            told = {"code": error.code, "what": error.what, "todo": error.todo}
            errors.append({"job": name, **told})
    return answers, errors


def _end(errors: Sequence[object], *, found: bool = False) -> None:
    if errors or found:
        raise typer.Exit(FAILED if errors else FOUND)


@app.command("describe")
@guarded
def describe_jobs(
    uri: Uri,
    job: Job = None,
    as_json: AsJson = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Operators, states, epochs, bases, claims and bytes of a job."""
    place = place_of(uri, s3_endpoint, s3_region)
    answers, errors = _each(place, job, lambda name, store: describe(store, name))
    if as_json:
        say_json(uri=uri, jobs=answers, errors=errors)
    else:
        for one in answers:
            job_tables.description(console(), one)
    _end(errors)


@app.command("history")
@guarded
def show_history(
    uri: Uri,
    job: Job = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="So many epochs.")] = 20,
    before: Annotated[
        int | None, typer.Option("--before", help="Those before this epoch; else the newest.")
    ] = None,
    epoch: Annotated[
        int | None, typer.Option("--epoch", help="One epoch, by operator and subtask.")
    ] = None,
    as_json: AsJson = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """What a job's checkpoints were like, the newest first; also of a job that does not run."""

    def read(name: str, store: ObjectStore) -> History | CheckpointFigures:
        reader = HistoryReader(store, name)
        if epoch is None:
            return reader.read(limit=limit, before_epoch=before)
        one = reader.checkpoint(epoch)
        if one is None:
            raise NotRestorableError(
                f"Nothing is known of epoch {epoch} of job {name!r}.",
                todo="Leave --epoch out to see which epochs there are.",
            )
        return one

    place = place_of(uri, s3_endpoint, s3_region)
    answers, errors = _each(place, job, read)
    if as_json:
        say_json(uri=uri, jobs=answers, errors=errors)
    else:
        for one in answers:
            if isinstance(one, History):
                history_tables.history(console(), one)
            else:
                history_tables.checkpoint(console(), one)
    _end(errors)


@app.command("verify")
@guarded
def verify_jobs(
    uri: Uri,
    job: Job = None,
    as_json: AsJson = False,
    no_progress: NoProgress = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Read and check every byte that a job needs. Exit status 1 if something is wrong."""

    def check(name: str, store: ObjectStore) -> VerifyReport:
        with progress_bar(f"verify {name}", quiet=as_json or no_progress) as progress:
            return verify(store, name, progress=progress)

    place = place_of(uri, s3_endpoint, s3_region)
    answers, errors = _each(place, job, check)
    ok = not errors and all(report.ok for report in answers)
    if as_json:
        say_json(uri=uri, ok=ok, jobs=answers, errors=errors)
    else:
        for report in answers:
            job_tables.verification(console(), report)
    _end(errors, found=not ok)


@app.command("gc")
@guarded
def collect_garbage(
    uri: Uri,
    job: Job = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it nothing is.")] = False,
    min_age_s: Annotated[
        int, typer.Option("--min-age-s", min=0, help="Younger objects stay, in seconds.")
    ] = MIN_AGE_S,
    as_json: AsJson = False,
    no_progress: NoProgress = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Say what nobody needs any more and, with --yes, delete it. Safe beside a running job."""

    def collect(name: str, store: ObjectStore) -> dict[str, Any]:
        refuse_savepoint(store)  # it owns its bytes
        log = CommitLog(store, job=name, writer=system.process_name(), new_id=system.new_id)
        with progress_bar(f"gc {name}", "objects", quiet=as_json or no_progress) as progress:
            report = clean(
                store,
                lambda: outside_view(store, log),
                min_age_ms=1000 * min_age_s,
                dry_run=not yes,
                prefixes=ALL_PREFIXES,
                history=KnownHistory(outside=True),
                progress=progress,
            )
        if not as_json:
            job_tables.cleaning(console(), name, report)
        shape = msgspec.to_builtins(report, str_keys=True)
        del shape["kinds"], shape["history"]
        return {"job": name, "uri": store.uri, **shape}

    answers, errors = _each(place_of(uri, s3_endpoint, s3_region), job, collect)
    if as_json:
        say_json(uri=uri, dry_run=not yes, jobs=answers, errors=errors)
    _end(errors)


@app.command("doctor")
@guarded
def doctor(
    uri: Annotated[str, typer.Option("--uri", help="Also try the store at this uri=.")] = "",
    local_dir: Annotated[
        str, typer.Option("--local-dir", help="The local_dir= of the query.")
    ] = "",
    spark: Annotated[
        bool, typer.Option("--spark", help="Start Spark, and try what is needed of its inside.")
    ] = False,
    as_json: AsJson = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Whether this host can run jobs: packages, Java, disk, store. Exit status 1 if it cannot."""
    place = place_of(uri, s3_endpoint, s3_region) if uri else None
    checks = [*examine(place, local_dir), *(examine_spark() if spark else ())]
    ok = all(check.status != "fail" for check in checks)
    if as_json:
        say_json(ok=ok, checks=checks)
    else:
        job_tables.checks(console(), checks)
    if not ok:
        raise typer.Exit(FOUND)
