"""`statebackend state`: what states a job has, and what is in them; without Spark."""

from __future__ import annotations

import math
import sys
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
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from statebackend.cli.console_output import console, counted, guarded, say_json, table
from statebackend.cli.job_folders import place_of
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
Job = Annotated[str | None, typer.Option("--job", help="The job's name.")]
Operator = Annotated[str, typer.Option("--operator", help="The operator's uid.")]
State = Annotated[str, typer.Option("--state", help="The state's name.")]
Timers = Annotated[bool, typer.Option("--timers", help="The operator's timers instead of a state.")]
Epoch = Annotated[
    int | None, typer.Option("--epoch", help="One that the job retains; default: the newest.")
]
OfSavepoint = Annotated[bool, typer.Option("--savepoint", help="URI is a savepoint's.")]
Columns = Annotated[
    str, typer.Option("--columns", help="Only these, as in 'key.user,value.n'; default: all.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
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

    def given(self) -> dict[str, Any]:
        """As arguments of `read_state` and its like."""
        return {
            "uri": self.uri,
            "job": self.job,
            "epoch": self.epoch,
            "savepoint": self.uri if self.savepoint else None,
            "options": place_of(self.uri, self.s3_endpoint, self.s3_region).options,
        }

    def read(
        self, operator: str, state: str, *, timers: bool, columns: str, keys: Any = None
    ) -> pa.RecordBatchReader:
        """The rows of one state, or of the timers."""
        chosen = [name.strip() for name in columns.split(",")] if columns else None
        given = {**self.given(), "operator": operator, "columns": chosen, "keys": keys}
        if timers == bool(state):
            raise SettingError(
                "Both --state and --timers were given." if timers else "No state was named.",
                todo="Give --state NAME or --timers; `statebackend state list` shows the names.",
            )
        from statebackend.tables.read import read_state, read_timers  # imports PySpark

        return read_timers(**given) if timers else read_state(**given, state=state)


@app.command("list")
@guarded
def list_states(
    uri: Uri,
    job: Job = None,
    epoch: Epoch = None,
    savepoint: OfSavepoint = False,
    as_json: AsJson = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Operators and their states: kinds, schemas, times to live."""
    from statebackend.tables.read import states  # imports PySpark

    source = _Source(uri, job, epoch, savepoint, s3_endpoint, s3_region)
    rows = states(**source.given()).to_pylist()
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
    as_json: AsJson = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """The first rows of a state, by key group."""
    source = _Source(uri, job, epoch, savepoint, s3_endpoint, s3_region)
    reader = source.read(operator, state, timers=timers, columns=columns)
    _show(reader, limit, as_json=as_json)


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
    as_json: AsJson = False,
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """What a state has of some keys. Only the subtasks that they belong to are fetched."""
    source = _Source(uri, job, epoch, savepoint, s3_endpoint, s3_region)
    wanted = [_key(text) for text in keys]
    reader = source.read(operator, state, timers=False, columns=columns, keys=wanted)
    _show(reader, None, as_json=as_json)


@app.command("export")
@guarded
def export_rows(
    uri: Uri,
    operator: Operator,
    to: Annotated[Path, typer.Option("--to", help="A new file: .parquet, .csv, .jsonl or .arrow.")],
    job: Job = None,
    state: State = "",
    timers: Timers = False,
    epoch: Epoch = None,
    savepoint: OfSavepoint = False,
    columns: Columns = "",
    s3_endpoint: Endpoint = "",
    s3_region: Region = "",
) -> None:
    """Write a state, or the timers, into a file."""
    if to.suffix not in _FORMATS:
        raise SettingError(
            f"No format is known by the name {to.name!r}.",
            todo=f"Give a file that ends in {', '.join(_FORMATS)}.",
        )
    if to.exists():
        raise SettingError(f"The file {to} is there already.", todo="Give another name.")
    source = _Source(uri, job, epoch, savepoint, s3_endpoint, s3_region)
    reader = source.read(operator, state, timers=timers, columns=columns)
    draft = to.with_name(f".{to.name}.part")
    try:
        with _counting(f"{operator}.{state or 'timers'}") as tell:
            rows = _write(reader, draft, to.suffix, tell)
        draft.rename(to)
    finally:
        draft.unlink(missing_ok=True)
    print(f"{counted(rows, 'row')} in {to}")


def _key(text: str) -> Any:
    """What was typed for a key: JSON, or else the text itself."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return tuple(found) if isinstance(found, list) else found


def _show(reader: pa.RecordBatchReader, limit: int | None, *, as_json: bool) -> None:
    rows = list(islice(_rows(reader), limit))
    if as_json:
        say_json(rows=rows)
        return
    made = table(*reader.schema.names)
    for row in rows:
        made.add_row(*(escape(_text(value)) for value in row.values()))
    out: Console = console()
    out.print(made)
    out.print(counted(len(rows), "row"))


def _rows(reader: pa.RecordBatchReader) -> Iterator[dict[str, Any]]:
    for batch in reader:
        yield from batch.to_pylist()


def _text(value: Any) -> str:
    if isinstance(value, dict):  # a struct
        return ", ".join(f"{name}={_text(one)}" for name, one in value.items())
    return str(value)


@contextmanager
def _counting(title: str) -> Iterator[Callable[[int], None]]:
    """Rows so far, on standard error if somebody looks at it."""
    bar = Progress(
        TextColumn("{task.description}"),
        TextColumn("{task.completed:,} rows"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(title, total=None)
        yield lambda rows: bar.advance(task, rows)


def _write(
    reader: pa.RecordBatchReader, path: Path, suffix: str, tell: Callable[[int], None]
) -> int:
    rows = 0
    with _writer(path, suffix, reader.schema) as write:
        for batch in reader:
            write(batch)
            rows += batch.num_rows
            tell(batch.num_rows)
    return rows


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
