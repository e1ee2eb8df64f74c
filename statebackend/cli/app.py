"""The verbs. Each reads, answers on standard output, and says on standard error how far it is."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import msgspec
import typer

from recovery.inspect import describe, summarise
from recovery.verify import verify
from snapshot.cleaning import ALL_PREFIXES, clean, outside_view
from snapshot.log import CommitLog
from statebackend import system
from statebackend.cli import show
from statebackend.cli.doctor import examine
from statebackend.cli.jobs import place_of
from statebackend.cli.output import console, guarded, reading, say_json

__all__ = ["app"]

FOUND: Final = 1
MIN_AGE_S: Final = 900

app = typer.Typer(
    help="Look at the durable state of streaming jobs, check it, and clean it up.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

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
    """Look at the durable state of streaming jobs, check it, and clean it up."""


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
        show.jobs(console(), uri, jobs)


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
    found = [describe(store, name) for name, store in place.jobs(job)]
    if as_json:
        say_json(uri=uri, jobs=found)
    else:
        for one in found:
            show.description(console(), one)


@app.command("verify")
@guarded
def verify_jobs(
    uri: Uri,
    job: Job = None,
    as_json: AsJson = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Read and check every byte that a job keeps. Exit status 1 if something is wrong."""
    place = place_of(uri, s3_endpoint, s3_region)
    reports = []
    for name, store in place.jobs(job):
        with reading(f"verify {name}") as progress:
            reports.append(verify(store, name, progress=progress))
    ok = all(report.ok for report in reports)
    if as_json:
        say_json(uri=uri, ok=ok, jobs=reports)
    else:
        for report in reports:
            show.verification(console(), report)
    if not ok:
        raise typer.Exit(FOUND)


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
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Say what nobody needs any more and, with --yes, delete it. Safe beside a running job."""
    place = place_of(uri, s3_endpoint, s3_region)
    reports: list[dict[str, Any]] = []
    for name, store in place.jobs(job):
        log = CommitLog(store, job=name, writer=system.process_name(), new_id=system.new_id)
        report = clean(
            store,
            lambda store=store, log=log: outside_view(store, log),  # type: ignore[misc]
            min_age_ms=1000 * min_age_s,
            dry_run=not yes,
            prefixes=ALL_PREFIXES,
        )
        if not as_json:
            show.cleaning(console(), name, report)
        shape = msgspec.to_builtins(report, str_keys=True)
        del shape["kinds"]
        reports.append({"job": name, "uri": store.uri, **shape})
    if as_json:
        say_json(uri=uri, dry_run=not yes, jobs=reports)


@app.command("doctor")
@guarded
def doctor(
    uri: Annotated[str, typer.Option("--uri", help="Also try the store at this uri=.")] = "",
    local_dir: Annotated[
        str, typer.Option("--local-dir", help="The local_dir= of the query.")
    ] = "",
    as_json: AsJson = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Whether this host can run jobs: packages, Java, disk, store. Exit status 1 if it cannot."""
    place = place_of(uri, s3_endpoint, s3_region) if uri else None
    checks = examine(place, local_dir)
    ok = all(check.status != "fail" for check in checks)
    if as_json:
        say_json(ok=ok, checks=checks)
    else:
        show.checks(console(), checks)
    if not ok:
        raise typer.Exit(FOUND)
