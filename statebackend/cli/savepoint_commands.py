"""`statebackend savepoint`: make, list, describe, delete, edit, export and import savepoints.

None of it starts Spark. What opens databases is imported where it is used: other verbs start at
once.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from recovery.inspect.verify import VerifyReport
from recovery.savepoints.create_savepoint import Making, create_savepoint
from recovery.savepoints.location_files import StoreLocation
from recovery.savepoints.savepoint import (
    Savepoint,
    below,
    default_folder,
    read_savepoint,
    savepoints_folder,
)
from recovery.savepoints.savepoint_folder import delete_savepoint
from recovery.savepoints.savepoint_list import SavepointInfo, list_savepoints
from recovery.savepoints.verify_savepoint import verify_savepoint
from snapshot.log.commit_log import CommitLog
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.store_probe import probe
from snapshot.storage.stores_by_uri import S3_SCHEMES
from statebackend import system
from statebackend.cli import job_tables
from statebackend.cli.console_output import (
    NoProgress,
    console,
    counted,
    guarded,
    say_json,
    table,
)
from statebackend.cli.job_folders import Place, is_on_s3, place_of
from statebackend.cli.progress_bars import progress_bar, progress_bars
from statebackend.errors import NotRestorableError, SettingError
from statebackend.texts import size, when

__all__ = ["app"]

FOUND = 1

app = typer.Typer(
    help="A job's whole state in a folder of its own: for clones, changed code, another place.",
    no_args_is_help=True,
)

Uri = Annotated[str, typer.Option("--uri", help="The folder of all jobs: the uri= of the query.")]
Where = Annotated[str, typer.Argument(metavar="SAVEPOINT", help="The savepoint's URI.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Endpoint = Annotated[
    str, typer.Option("--s3-endpoint", help="URL of an S3 server. [env: STATEBACKEND_S3_ENDPOINT]")
]
Region = Annotated[
    str, typer.Option("--s3-region", help="Region of the bucket. [env: STATEBACKEND_S3_REGION]")
]


To = Annotated[str, typer.Option("--to", help="An empty folder, a URI.")]
Scratch = Annotated[str | None, typer.Option("--scratch-dir", help="For local files meanwhile.")]
_STATE: Final = "UID:STATE"


@app.command("create")
@guarded
def create_one(
    uri: Uri,
    job: Annotated[
        str | None, typer.Option("--job", help="The job's name; may be left out if it is alone.")
    ] = None,
    checkpoint_location: Annotated[
        str,
        typer.Option(
            "--checkpoint-location",
            help="Of the query: a folder, or its URL. Left out for a continuous job.",
        ),
    ] = "",
    to: Annotated[
        str, typer.Option("--to", help="The savepoint's folder, empty; default: under URI.")
    ] = "",
    as_json: AsJson = False,
    no_progress: NoProgress = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Copy the newest epoch of a job. Its query may run: it goes on."""
    place = _place(uri, s3_endpoint, s3_region)
    job = place.stored(job)
    store = place.job(job)
    location: StoreLocation | None = None
    if checkpoint_location:
        where = checkpoint_location
        if ":" not in where.partition("/")[0]:
            where = os.path.abspath(where)
        location = StoreLocation(_at(where, s3_endpoint, s3_region))

    def open_target(savepoint_id: str) -> ObjectStore:
        target = _at(to or default_folder(uri, job, savepoint_id), s3_endpoint, s3_region)
        probe(target, new_id=system.new_id)
        return target

    with progress_bar(f"savepoint {job}", quiet=as_json or no_progress) as progress:
        made = create_savepoint(
            Making(
                store=store,
                job=job,
                location=location,
                manifests=lambda: CommitLog(
                    store, job=job, writer=system.process_name(), new_id=system.new_id
                ).manifests(),
                open_target=open_target,
                new_id=system.new_id,
                now_ms=system.wall_ms,
                writer=system.process_name(),
                progress=progress,
                uncommitted=location is None,  # only its driver knows
            )
        )
    if as_json:
        say_json(savepoint=made)
    else:
        _show(console(), made)


@app.command("list")
@guarded
def list_all(
    uri: Annotated[str, typer.Option("--uri", help="The uri= of the query.")] = "",
    job: Annotated[str | None, typer.Option("--job", help="Of one job; all if left out.")] = None,
    within: Annotated[
        str, typer.Option("--in", help="Look below this folder, instead of below URI.")
    ] = "",
    as_json: AsJson = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """The savepoints of the jobs under a URI, or below a folder; unfinished ones too."""
    if bool(uri) == bool(within):
        raise typer.BadParameter("give one of --uri and --in")
    folder = within or savepoints_folder(uri)
    place = _place(folder, s3_endpoint, s3_region)
    found = list_savepoints(
        place.open(), lambda name: place.open(below(folder, name) if name else ""), job=job
    )
    if as_json:
        say_json(uri=folder, savepoints=found)
    else:
        _list(console(), folder, found)


@app.command("describe")
@guarded
def describe_one(
    savepoint: Where,
    check: Annotated[
        bool, typer.Option("--verify", help="Read and check every byte; status 1 if damaged.")
    ] = False,
    as_json: AsJson = False,
    no_progress: NoProgress = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """What a savepoint holds: epoch, operators, files of the checkpoint location."""
    store = _at(savepoint, s3_endpoint, s3_region)
    found = read_savepoint(store)
    report: VerifyReport | None = None
    if check:
        with progress_bar(f"verify {found.id}", quiet=as_json or no_progress) as progress:
            report = verify_savepoint(store, progress=progress)
    if as_json:
        more: dict[str, Any] = {} if report is None else {"ok": report.ok, "report": report}
        say_json(savepoint=found, **more)
    else:
        _show(console(), found)
        if report is not None:
            job_tables.verification(console(), report)
    if report is not None and not report.ok:
        raise typer.Exit(FOUND)


@app.command("delete")
@guarded
def delete_one(
    savepoint: Where,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it nothing is.")] = False,
    as_json: AsJson = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Remove a savepoint, or what is left of one that was never finished."""
    store = _at(savepoint, s3_endpoint, s3_region)

    def store_below(name: str) -> ObjectStore:
        return _at(below(savepoint, name), s3_endpoint, s3_region) if name else store

    # Of others further down, as where a folder of savepoints is given, none is meant.
    found = next((o for o in list_savepoints(store, store_below) if o.uri == store.uri), None)
    if found is None:
        raise NotRestorableError(
            f"There is no savepoint in {store.uri}, so nothing is deleted.",
            todo="Check the URI; `statebackend savepoint list` shows what there is.",
        )
    left = delete_savepoint(store) if yes else []
    if as_json:
        say_json(savepoint=found, deleted=yes, left=left)
        return
    out = console()
    if found is not None:
        verb = "deleted" if yes else "would delete"
        out.print(
            f"{verb} {escape(found.uri)}: {counted(found.objects, 'object')}, "
            f"{size(found.size_bytes)}"
        )
    if not yes:
        out.print("nothing was deleted: say --yes to delete")
    if left:
        out.print(f"left alone, as not of the savepoint: {escape(', '.join(left[:10]))}")


@app.command("edit")
@guarded
def edit(
    savepoints: Annotated[
        list[str], typer.Argument(metavar="SAVEPOINT...", help="One, or several to merge.")
    ],
    to: To,
    rename_operator: Annotated[
        list[str] | None,
        typer.Option(
            "--rename-operator", metavar="OLD=NEW", help="Rename an operator; repeatable."
        ),
    ] = None,
    drop_operator: Annotated[
        list[str] | None,
        typer.Option("--drop-operator", metavar="UID", help="Leave an operator out; repeatable."),
    ] = None,
    rename_state: Annotated[
        list[str] | None,
        typer.Option("--rename-state", metavar=f"{_STATE}=NEW", help="Rename a state; repeatable."),
    ] = None,
    drop_state: Annotated[
        list[str] | None,
        typer.Option("--drop-state", metavar=_STATE, help="Leave a state out; repeatable."),
    ] = None,
    max_parallelism: Annotated[
        int | None, typer.Option("--max-parallelism", help="Key groups. Default: as it is.")
    ] = None,
    sources: Annotated[
        str | None,
        typer.Option("--sources", help="A checkpoint location or savepoint with the offsets."),
    ] = None,
    scratch_dir: Scratch = None,
    as_json: AsJson = False,
    no_progress: NoProgress = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Write a savepoint anew with other names, without some states, or several in one."""
    from statebackend.tables.edit_savepoint import edit_savepoint

    with progress_bar("edit", "subtasks", quiet=as_json or no_progress) as progress:
        made = edit_savepoint(
            savepoints,
            to,
            rename_operators=dict(_pair(text, "=", "OLD=NEW") for text in rename_operator or ()),
            drop_operators=drop_operator or (),
            rename_states=dict(_renamed(text) for text in rename_state or ()),
            drop_states=[_pair(text, ":", _STATE) for text in drop_state or ()],
            max_parallelism=max_parallelism,
            sources=sources,
            options=_options(s3_endpoint, s3_region, to, *savepoints, sources or ""),
            scratch_dir=scratch_dir,
            progress=progress,
        )
    _say(made, as_json)


@app.command("export")
@guarded
def export(
    savepoint: Annotated[str, typer.Argument(metavar="SAVEPOINT", help="The savepoint's URI.")],
    to: To,
    scratch_dir: Scratch = None,
    as_json: AsJson = False,
    no_progress: NoProgress = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Write a savepoint as Parquet files with a manifest in JSON, which any tool reads."""
    from statebackend.tables.portable.portable_export import export_savepoint

    options = _options(s3_endpoint, s3_region, to, savepoint)
    with progress_bars(quiet=as_json or no_progress) as bars:
        rows = export_savepoint(
            savepoint,
            to,
            options=options,
            scratch_dir=scratch_dir,
            progress=bars.add("export", "subtasks"),
            rows_progress=bars.add("written", "rows"),
        )
    if as_json:
        say_json(to=to, rows=rows)
    else:
        console().print(f"{rows:,} rows in {to}", markup=False, highlight=False)


@app.command("import")
@guarded
def bring_in(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="What `export` has written.")],
    to: To,
    scratch_dir: Scratch = None,
    as_json: AsJson = False,
    no_progress: NoProgress = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Write a savepoint from the files that `export` has written, or another tool in their form."""
    from statebackend.tables.portable.portable_import import import_savepoint

    options = _options(s3_endpoint, s3_region, to, folder)
    with progress_bar("import", quiet=as_json or no_progress) as progress:
        made = import_savepoint(
            folder, to, options=options, scratch_dir=scratch_dir, progress=progress
        )
    _say(made, as_json)


def _place(uri: str, endpoint: str, region: str) -> Place:
    """A place; flags for S3 are for those of the places that are on S3."""
    on_s3 = uri.partition(":")[0] in S3_SCHEMES
    return place_of(uri, endpoint if on_s3 else "", region if on_s3 else "")


def _at(uri: str, endpoint: str, region: str) -> ObjectStore:
    return _place(uri, endpoint, region).open()


def _show(out: Console, one: Savepoint) -> None:
    out.print(f"[bold]{escape(one.id)}[/]  {escape(one.uri)}")
    of = [f"job {escape(one.job)} in {escape(one.job_uri)}"] if one.job_uri else []
    if one.continuous:
        of.append("a continuous job")
    elif one.query_id:
        of.append(f"query {escape(one.query_id)} at {escape(one.location)}")
    out.print(f"  {', '.join(of) or 'of tables, or other savepoints'}")
    if one.uncommitted:
        out.print("  output of this epoch that is not committed is committed by that job alone")
    out.print(f"  after epoch {one.epoch}, made {when(one.created_ms)}, {size(one.size_bytes)}")
    made = table("operator", "parallelism#", "of at most#", "first epoch#", "size#")
    for operator in one.operators:
        made.add_row(
            escape(operator.uid),
            str(operator.parallelism),
            str(operator.max_parallelism),
            str(operator.first_epoch),
            size(operator.size_bytes),
        )
    out.print(made)


def _list(out: Console, folder: str, found: list[SavepointInfo]) -> None:
    if not found:
        out.print(f"There is no savepoint in {escape(folder)}.")
        return
    made = table("job", "savepoint", "epoch#", "made", "objects#", "size#", "uri")
    for one in found:
        made.add_row(
            escape(one.job),
            escape(one.id),
            str(one.epoch) if one.complete and one.epoch is not None else "not finished",
            when(one.created_ms),
            str(one.objects),
            size(one.size_bytes),
            escape(one.uri),
        )
    out.print(made)
    for one in found:
        if one.problem:
            out.print(f"[red]{escape(one.id)}[/]: {escape(one.problem)}")


def _options(endpoint: str, region: str, *uris: str) -> StoreOptions:
    """How S3 is reached, if one of these lies there: the others' stores do not look at it."""
    places = (place_of(uri, endpoint, region) for uri in sorted(uris, key=is_on_s3, reverse=True))
    return next(places).options


def _say(made: Savepoint, as_json: bool) -> None:
    if as_json:
        say_json(savepoint=made)
        return
    operators = ", ".join(one.uid for one in made.operators)
    line = f"{made.uri}: operators {operators}, after epoch {made.epoch}, {size(made.size_bytes)}"
    console().print(line, markup=False, highlight=False)


def _pair(text: str, between: str, form: str) -> tuple[str, str]:
    first, found, second = text.partition(between)
    if not (first and found and second):
        raise SettingError(f"{text!r} is not of the form {form}.", todo="Write it so.")
    return first, second


def _renamed(text: str) -> tuple[tuple[str, str], str]:
    old, new = _pair(text, "=", f"{_STATE}=NEW")
    return _pair(old, ":", f"{_STATE}=NEW"), new
