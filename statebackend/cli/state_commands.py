"""`statebackend state`: what states a job has, and what is in them; without Spark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from statebackend.cli.console_output import (
    NoProgress,
    console,
    counted,
    guarded,
    say_json,
    table,
)
from statebackend.cli.job_folders import place_of
from statebackend.cli.progress_bars import Bars, progress_bar, progress_bars
from statebackend.errors import SettingError
from statebackend.texts import size

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["app"]

_FORMATS: Final = (".parquet", ".csv", ".jsonl", ".arrow")

app = typer.Typer(
    help="What states a job has, and what is in them. Beside a running job, or of a savepoint.",
    no_args_is_help=True,
)

Uri = Annotated[str, typer.Argument(help="The folder of all jobs, or a savepoint's.")]
Job = Annotated[
    str | None, typer.Option("--job", help="The job's name; may be left out if it is alone.")
]
Operator = Annotated[str, typer.Option("--operator", help="The operator's uid.")]
State = Annotated[str, typer.Option("--state", help="The state's name.")]
Timers = Annotated[bool, typer.Option("--timers", help="The operator's timers instead of a state.")]
Epoch = Annotated[
    int | None, typer.Option("--epoch", help="An epoch that the job retains; default: the newest.")
]
OfSavepoint = Annotated[bool, typer.Option("--savepoint", help="URI is a savepoint's.")]
Columns = Annotated[
    str, typer.Option("--columns", help="Only these, as in 'key.user,value.n'; default: all.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
_INTO: Final = "A new file: .parquet, .csv, .jsonl or .arrow."
Into = Annotated[Path | None, typer.Option("--to", help=_INTO)]
Scratch = Annotated[
    str | None, typer.Option("--scratch-dir", help="Folder for fetched state; default: Python's.")
]
Endpoint = Annotated[
    str, typer.Option("--s3-endpoint", help="URL of an S3 server. [env: STATEBACKEND_S3_ENDPOINT]")
]
Region = Annotated[
    str, typer.Option("--s3-region", help="Region of the bucket. [env: STATEBACKEND_S3_REGION]")
]


@dataclass(frozen=True)
class _Source:
    """Where to read, as it was typed."""

    uri: str
    job: str | None
    epoch: int | None
    savepoint: bool
    s3_endpoint: str
    s3_region: str
    scratch_dir: str | None = None

    def given(self) -> dict[str, Any]:
        """As arguments of `read_state` and its like."""
        place = place_of(self.uri, self.s3_endpoint, self.s3_region)
        return {
            "uri": self.uri,
            "job": None if self.savepoint else place.one(self.job),
            "epoch": self.epoch,
            "savepoint": self.uri if self.savepoint else None,
            "options": place.options,
        }

    def read(
        self,
        bars: Bars,
        operator: str,
        state: str,
        *,
        timers: bool,
        columns: str,
        keys: Any = None,
    ) -> pa.RecordBatchReader:
        """The rows of one state, or of the timers."""
        chosen = [name.strip() for name in columns.split(",")] if columns else None
        given = {**self.given(), "operator": operator, "columns": chosen, "keys": keys}
        given |= {"scratch_dir": self.scratch_dir, "progress": bars.add("fetch", "subtasks")}
        if timers == bool(state):
            raise SettingError(
                "Both --state and --timers were given." if timers else "No state was named.",
                todo="Give --state NAME or --timers; `statebackend state list` shows the names.",
            )
        from statebackend.tables.read_state import read_state, read_timers  # imports PySpark

        return read_timers(**given) if timers else read_state(**given, state=state)


@app.command("list")
@guarded
def list_states(
    uri: Uri,
    job: Job = None,
    epoch: Epoch = None,
    savepoint: OfSavepoint = False,
    to: Into = None,
    as_json: AsJson = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Operators and their states: kinds, schemas, times to live."""
    _check_into(to)
    from statebackend.tables.read_state import states  # imports PySpark

    source = _Source(uri, job, epoch, savepoint, s3_endpoint, s3_region)
    found = states(**source.given())
    if to is not None:
        with progress_bars(quiet=True) as bars:
            written = _into(to, found.to_reader(), "states", bars)
        print(written)
        return
    rows = found.to_pylist()
    if as_json:
        say_json(uri=uri, states=rows)
        return
    made = table("operator", "state", "kind", "key", "map key", "value", "ttl", "subtasks#")
    for row in rows:
        ttl = "" if row["ttl_ms"] is None else f"{row['ttl_ms']} ms"
        told = (row["key_schema"], row["map_key_schema"], row["value_schema"])
        made.add_row(
            *(escape(row[name]) for name in ("operator", "state", "kind")),
            *(escape(text or "") for text in told),
            ttl,
            str(row["parallelism"]),
        )
    out = console()
    out.print(made)
    sizes = {row["operator"]: row["operator_bytes"] for row in rows}
    for operator, size_bytes in sizes.items():
        out.print(f"{escape(operator)}: {size(size_bytes)} after epoch {rows[0]['epoch']}")


@app.command("show")
@guarded
def show_rows(
    uri: Uri,
    operator: Operator,
    job: Job = None,
    state: State = "",
    timers: Timers = False,
    epoch: Epoch = None,
    savepoint: OfSavepoint = False,
    columns: Columns = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="So many rows.")] = 20,
    to: Into = None,
    scratch_dir: Scratch = None,
    as_json: AsJson = False,
    no_progress: NoProgress = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """The first rows of a state, by key group."""
    _check_into(to)
    source = _Source(uri, job, epoch, savepoint, s3_endpoint, s3_region, scratch_dir)
    with progress_bars(quiet=as_json or no_progress) as bars:
        reader = source.read(bars, operator, state, timers=timers, columns=columns)
        found = _taken(reader, limit, to, bars)
    _show(found, reader.schema.names, as_json=as_json)


@app.command("get")
@guarded
def get_rows(
    uri: Uri,
    keys: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY...", help="As JSON: ann, '\"7\"', 7; of several columns '[\"ann\", 7]'."
        ),
    ],
    operator: Operator,
    job: Job = None,
    state: State = "",
    epoch: Epoch = None,
    savepoint: OfSavepoint = False,
    columns: Columns = "",
    to: Into = None,
    scratch_dir: Scratch = None,
    as_json: AsJson = False,
    no_progress: NoProgress = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """What a state has of some keys. Only the subtasks that they belong to are fetched."""
    _check_into(to)
    source = _Source(uri, job, epoch, savepoint, s3_endpoint, s3_region, scratch_dir)
    wanted = [_key(text) for text in keys]
    with progress_bars(quiet=as_json or no_progress) as bars:
        reader = source.read(bars, operator, state, timers=False, columns=columns, keys=wanted)
        found = _taken(reader, None, to, bars)
    if not found and not as_json:
        which = "this key" if len(keys) == 1 else "any of these keys"
        print(f"State {state!r} of operator {operator!r} has nothing for {which}.")
        return
    _show(found, reader.schema.names, as_json=as_json)


@app.command("export")
@guarded
def export_rows(
    uri: Uri,
    operator: Operator,
    to: Annotated[Path, typer.Option("--to", help=_INTO)],
    job: Job = None,
    state: State = "",
    timers: Timers = False,
    epoch: Epoch = None,
    savepoint: OfSavepoint = False,
    columns: Columns = "",
    scratch_dir: Scratch = None,
    no_progress: NoProgress = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Write a state, or the timers, into a file."""
    _check_into(to)
    source = _Source(uri, job, epoch, savepoint, s3_endpoint, s3_region, scratch_dir)
    with progress_bars(quiet=no_progress) as bars:
        reader = source.read(bars, operator, state, timers=timers, columns=columns)
        written = _into(to, reader, f"{operator}.{state or 'timers'}", bars)
    print(written)


@app.command("erase")
@guarded
def erase(
    uri: Annotated[str, typer.Argument(help="The folder of all jobs.")],
    keys: Annotated[list[str], typer.Argument(help="Each as JSON: ann, 7, or '[\"ann\", 7]'.")],
    operator: Operator,
    job: Annotated[str, typer.Option("--job", help="The job's name.")],
    checkpoint_location: Annotated[
        str,
        typer.Option(
            "--checkpoint-location",
            help="Of the query: a folder, or its URL. Left out for a continuous job.",
        ),
    ] = "",
    savepoints: Annotated[
        bool, typer.Option("--rewrite-savepoints", help="In the job's savepoints too.")
    ] = False,
    scratch_dir: Annotated[
        str | None,
        typer.Option("--scratch-dir", help="For the state of the largest subtask, twice."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Erase. Without it nothing is.")] = False,
    as_json: AsJson = False,
    no_progress: NoProgress = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Erase keys of a job that has stopped; say what still holds them, and until when."""
    from statebackend.tables.erase_keys import erase_keys  # imports PySpark

    where = checkpoint_location
    if where and ":" not in where.partition("/")[0]:
        where = str(Path(where).absolute())
    with progress_bar("erase", "subtasks", quiet=as_json or no_progress) as progress:
        report = erase_keys(
            uri,
            job,
            operator,
            [_key(text) for text in keys],
            checkpoint_location=where or None,
            rewrite_savepoints=savepoints,
            dry_run=not yes,
            options=place_of(uri, s3_endpoint, s3_region).options,
            scratch_dir=scratch_dir,
            progress=progress,
        )
    if as_json:
        say_json(report=report)
        return
    made = table("state", "entries#")
    for name, entries in sorted(report.entries.items()):
        made.add_row(escape(name), str(entries))
    out = console()
    out.print(made)
    verb, entries = "erased" if yes else "would erase", sum(report.entries.values())
    out.print(f"{verb} from epoch {report.epoch}, counted in entries: {entries}")
    out.print("still holds them, or may:")
    for sentence in report.still:
        out.print(f"  {escape(sentence)}", soft_wrap=True)
    if not yes:
        out.print("nothing was erased: say --yes to erase")


def _key(text: str) -> Any:
    """What was typed for a key: JSON, or else the text itself."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return tuple(found) if isinstance(found, list) else found


def _taken(
    reader: pa.RecordBatchReader, limit: int | None, to: Path | None, bars: Bars
) -> list[dict[str, Any]] | str:
    """The rows to show; or a sentence, if they were written into a file."""
    if to is not None:
        return _into(to, reader, to.stem, bars, limit)
    return list(islice(_rows(reader), limit))


def _show(found: list[dict[str, Any]] | str, names: list[str], *, as_json: bool) -> None:
    if isinstance(found, str):
        print(found)
        return
    if as_json:
        say_json(rows=[_plain(row) for row in found])
        return
    made = table(*names)
    for row in found:
        made.add_row(*(escape(_text(value)) for value in row.values()))
    out: Console = console()
    out.print(made)
    out.print(counted(len(found), "row"))


def _rows(reader: pa.RecordBatchReader) -> Iterator[dict[str, Any]]:
    for batch in reader:
        yield from batch.to_pylist()


def _text(value: Any) -> str:
    if isinstance(value, dict):  # a struct
        return ", ".join(f"{name}={_text(one)}" for name, one in value.items())
    return str(value)


def _check_into(to: Path | None) -> None:
    """Refuse a file before anything is fetched.

    Raises:
        SettingError: it is there, or its format is not known.
    """
    if to is None:
        return
    if to.suffix not in _FORMATS:
        raise SettingError(
            f"No format is known by the name {to.name!r}.",
            todo=f"Give a file that ends in {', '.join(_FORMATS)}.",
        )
    if to.exists():
        raise SettingError(f"The file {to} is there already.", todo="Give another name.")


def _into(
    to: Path, reader: pa.RecordBatchReader, title: str, bars: Bars, limit: int | None = None
) -> str:
    """Write rows into a new file, which is there whole or not at all; a sentence on what is."""
    draft, rows, tell = to.with_name(f".{to.name}.part"), 0, bars.add(title, "rows")
    try:
        with _writer(draft, to.suffix, reader.schema) as write:
            for batch in reader:
                some = batch if limit is None else batch.slice(0, limit - rows)
                write(some)
                rows += some.num_rows
                tell(rows, 0)
                if rows == limit:
                    break
        draft.rename(to)
    finally:
        draft.unlink(missing_ok=True)
    return f"{counted(rows, 'row')} in {to}"


@contextmanager
def _writer(
    path: Path, suffix: str, schema: pa.Schema
) -> Iterator[Callable[[pa.RecordBatch], None]]:
    import pyarrow as pa

    if suffix == ".parquet":
        from pyarrow import parquet

        with parquet.ParquetWriter(path, schema) as file:
            yield file.write_batch
    elif suffix == ".arrow":
        with pa.ipc.new_file(str(path), schema) as file:
            yield file.write_batch
    elif suffix == ".csv":
        from pyarrow import csv

        _check_flat(schema)
        flat = pa.Table.from_batches([], schema).flatten().schema
        with csv.CSVWriter(path, flat) as file:
            yield lambda batch: file.write(pa.Table.from_batches([batch]).flatten())
    else:
        with path.open("wb") as file:

            def write(batch: pa.RecordBatch) -> None:
                rows = map(_plain, batch.to_pylist())
                file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)

            yield write


def _check_flat(schema: pa.Schema) -> None:
    """Refuse what has no place in a line of text.

    Raises:
        SettingError: naming the columns.
    """
    import pyarrow.types as pt

    deep = []
    for field in schema:
        inner = list(field.type) if pt.is_struct(field.type) else [field]
        deep += [
            field.name if one is field else f"{field.name}.{one.name}"
            for one in inner
            if pt.is_nested(one.type) or pt.is_binary(one.type)
        ]
    if deep:
        raise SettingError(
            f"A CSV file cannot hold {', '.join(deep)}: it has parts, or is no text.",
            todo="Give --to a name that ends in .parquet, .arrow or .jsonl, or leave it out with "
            "--columns.",
        )


def _plain(value: Any) -> Any:
    """A value as JSON can have it: what is no number is text, as Spark writes it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
