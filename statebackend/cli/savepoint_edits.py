"""`statebackend savepoint edit | export | import`: savepoints anew, and as Parquet files.

What opens databases is imported where it is used: other verbs start at once.
"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from recovery.savepoints.savepoint import Savepoint
from snapshot.storage.store_options import StoreOptions
from statebackend.cli.console_output import NoProgress, console, guarded, say_json
from statebackend.cli.job_folders import is_on_s3, place_of
from statebackend.cli.progress_bars import progress_bar, progress_bars
from statebackend.errors import SettingError
from statebackend.texts import size

__all__ = ["add_to"]

To = Annotated[str, typer.Option("--to", help="An empty folder, a URI.")]
Scratch = Annotated[str | None, typer.Option("--scratch-dir", help="For local files meanwhile.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Endpoint = Annotated[
    str, typer.Option("--s3-endpoint", help="URL of an S3 server. [env: STATEBACKEND_S3_ENDPOINT]")
]
Region = Annotated[
    str, typer.Option("--s3-region", help="Region of the bucket. [env: STATEBACKEND_S3_REGION]")
]
_STATE: Final = "UID:STATE"


def add_to(app: typer.Typer) -> None:
    """Add these verbs to `statebackend savepoint`."""
    app.command("edit")(edit)
    app.command("export")(export)
    app.command("import")(bring_in)


@guarded
def edit(
    savepoints: Annotated[
        list[str], typer.Argument(metavar="SAVEPOINT...", help="One, or several to merge.")
    ],
    to: To,
    rename_operator: Annotated[
        list[str] | None, typer.Option("--rename-operator", metavar="OLD=NEW")
    ] = None,
    drop_operator: Annotated[
        list[str] | None, typer.Option("--drop-operator", metavar="UID")
    ] = None,
    rename_state: Annotated[
        list[str] | None, typer.Option("--rename-state", metavar=f"{_STATE}=NEW")
    ] = None,
    drop_state: Annotated[list[str] | None, typer.Option("--drop-state", metavar=_STATE)] = None,
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
