"""Data files of a lake table: written by subtasks, named by a commit of the table later.

A file that no commit names is invisible to the readers of such a table. So files are written where
they stay, and the checkpoint holds what a commit has to say of them. What makes the commit
idempotent is a number that the table itself keeps for each application: the sink's *version*. It
grows with the driver's generation and, within one run, with the number of the checkpoint. A commit
names every file of a checkpoint that is not committed yet, so all files up to the version in the
table are in it, and a later commit adds only those above.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Final, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from blake3 import blake3

from statebackend.continuous.files.folder_access import Place
from statebackend.continuous.sinks.committables import decode_committable
from statebackend.continuous.sinks.sink import (
    BatchCommitter,
    BatchSink,
    SinkContext,
    SinkWriter,
    generation_of,
)
from statebackend.errors import ConnectorError, OutputLostError, SettingError

__all__ = [
    "TARGET_BYTES",
    "LakeTable",
    "TableCommitter",
    "TableFile",
    "TableSink",
    "TableWriter",
    "application_of",
    "check_target",
    "check_there",
    "missing_in",
    "split_by",
]

FORMAT_VERSION: Final = 1
TARGET_BYTES: Final = 128 << 20
ROW_GROUP_BYTES: Final = 1 << 20  # batches are gathered up to it, in each open file
_BATCHES: Final = 1000  # so many are made one: each takes a kilobyte beside its rows
OPEN_FILES_MAX: Final = 100
ROUNDS: Final = 50
_CHECKPOINTS: Final = 1 << 32  # of one run
Split = Callable[[pa.RecordBatch], Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]]


class TableFile(msgspec.Struct, frozen=True, kw_only=True):
    """A data file that a checkpoint holds.

    Attributes:
        application: see `application_of`. version: see the module.
        path: below the folder of data files. partition: its values as texts, in the table's order,
            where the commit has to say them.
        stats: by column: (nulls, least, greatest); the last two None where they are not known.
    """

    v: int = FORMAT_VERSION
    application: str
    version: int
    path: str
    size_bytes: int
    rows: int
    made_ms: int
    partition: tuple[str | None, ...] = ()
    stats: dict[str, tuple[int, Any, Any]] = {}


def application_of(job: str, job_id: str, uid: str) -> str:
    """The name under which a table knows this sink: of the job's identity, not of its name alone.

    A job that is deleted and made anew under its name counts from the beginning again.
    """
    of = msgspec.json.encode([job, job_id, uid])
    return f"statebackend-{blake3(of).hexdigest()[:32]}"


def missing_in(table_version: int | None, files: Sequence[TableFile]) -> list[TableFile]:
    """Those that a table of this version does not have yet."""
    return [one for one in files if table_version is None or one.version > table_version]


def check_there(place: Place, files: Sequence[TableFile]) -> None:
    """Files that are about to be committed are as they were made.

    Raises:
        OutputLostError: one is not.
    """
    for one in files:
        if place.size(one.path) != one.size_bytes:
            raise _lost(place.shown(one.path))


def _lost(what: str) -> OutputLostError:
    """A data file that a checkpoint names is gone and was not committed."""
    return OutputLostError(
        f"{what} was prepared for a checkpoint, is not committed, and is not there as it was made.",
        todo="If the sink was given another table, give it another uid= as well, and start once "
        "with allow_dropped_state=True. If the file was vacuumed, or removed as an orphan, restore "
        "from an older checkpoint, and keep files for longer than the job may stand still.",
    )


def check_target(target_bytes: int) -> None:
    """Refuse what is no size of a file.

    Raises:
        SettingError: saying so.
    """
    if target_bytes < 1:
        raise SettingError(
            f"target_file_bytes={target_bytes} is no size.", todo="Give bytes above 0."
        )


class _OpenFile:
    """A Parquet file that is being written."""

    def __init__(
        self, place: Place, path: str, schema: pa.Schema, partition: tuple[Any, ...]
    ) -> None:
        self.path, self.partition, self.rows = path, partition, 0
        self.written_bytes = 0
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._place, self._footer = place, list[Any]()
        self._handle: IO[bytes] = place.create(path)
        with place.errors("writing", path):
            self._writer = pq.ParquetWriter(
                self._handle, schema, compression="zstd", metadata_collector=self._footer
            )

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows. Each write into the file makes a row group: so small batches wait."""
        self.rows += batch.num_rows
        self.written_bytes += batch.nbytes
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            with self._place.errors("writing", self.path):
                self._write_waiting()
        elif len(self._waiting) >= _BATCHES:
            self._waiting = pa.Table.from_batches(self._waiting).combine_chunks().to_batches()

    def _write_waiting(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting))
            self._waiting, self._waiting_bytes = [], 0

    def finish(self) -> tuple[int, dict[str, tuple[int, Any, Any]]]:
        """Its size and its statistics; afterwards it survives a crash of the machine."""
        with self._place.errors("writing", self.path):
            self._write_waiting()
            self._writer.close()
            size_bytes = self._handle.tell()
        self._place.close(self._handle, self.path)
        return size_bytes, _stats(self._footer[0])

    def abort(self) -> None:
        for let_go in (self._writer.close, self._handle.close):
            try:
                let_go()
            except Exception:
                continue


class TableWriter(SinkWriter):
    """Writes a subtask's rows into data files, each of one partition.

    Args:
        place: of data files. split: rows by partition; None: the table has none.
        names_partitions: whether the commit has to say a file's partition, which are texts then.
        target_bytes: a new file is begun at so many (as Arrow counts them, before compression).
        wall_ms: the time, for the table's own record of the file.
    """

    def __init__(
        self,
        place: Place,
        context: SinkContext,
        *,
        split: Split | None,
        names_partitions: bool,
        target_bytes: int,
        wall_ms: Callable[[], int],
    ) -> None:
        self._place, self._split, self._target_bytes = place, split, target_bytes
        self._names_partitions = names_partitions
        self._application = application_of(context.job, context.job_id, context.uid)
        self._generation = generation_of(context.run) or 0
        sink = self._application[-8:]
        self._stem = f"part-{sink}-{context.run}-{context.subtask:05d}"
        self._numbers = itertools.count()
        self._wall_ms = wall_ms
        self._open: dict[tuple[Any, ...], _OpenFile] = {}
        self._ready: list[TableFile] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows."""
        if not batch.num_rows:
            return
        for partition, rows in self._split(batch) if self._split else [((), batch)]:
            # Moved to the end: the first is the one that was written to longest ago.
            file = self._open.pop(partition, None) or self._begin(partition, rows.schema)
            self._open[partition] = file
            file.write(rows)
            if file.written_bytes >= self._target_bytes:
                self._finish(partition)

    def _begin(self, partition: tuple[Any, ...], schema: pa.Schema) -> _OpenFile:
        if len(self._open) >= OPEN_FILES_MAX:
            self._finish(next(iter(self._open)))
        path = f"{self._stem}-{next(self._numbers):06d}.zstd.parquet"
        return _OpenFile(self._place, path, schema, partition)

    def _finish(self, partition: tuple[Any, ...]) -> None:
        file = self._open[partition]
        size_bytes, stats = file.finish()
        del self._open[partition]
        self._ready.append(
            TableFile(
                application=self._application,
                version=0,
                path=file.path,
                size_bytes=size_bytes,
                rows=file.rows,
                made_ms=self._wall_ms(),
                partition=partition if self._names_partitions else (),
                stats=stats,
            )
        )

    def prepare(self, checkpoint: int) -> list[bytes]:
        """End all files; their committables."""
        for partition in list(self._open):
            self._finish(partition)
        ready, self._ready = self._ready, []
        version = self._generation * _CHECKPOINTS + checkpoint
        return [
            msgspec.msgpack.encode(msgspec.structs.replace(one, version=version)) for one in ready
        ]

    def abort(self) -> None:
        """Remove what was written since the last `prepare`."""
        names = [one.path for one in self._ready]
        for file in self._open.values():
            file.abort()
            names.append(file.path)
        self._open, self._ready = {}, []
        for name in names:
            try:
                self._place.remove(name)
            except Exception:  # it is invisible, and goes with the table's next vacuum
                continue


class LakeTable(Protocol):
    """A table as commits see it; every call reads its newest state."""

    name: str

    def version(self, application: str) -> int | None:
        """The newest that it has of an application."""

    def append(self, files: Sequence[TableFile], application: str, place: Place) -> bool:
        """Add the files that it does not have in one commit; False: look again.

        Raises:
            ConnectorError: it takes no commit. OutputLostError: see `check_there`.
        """

    def close(self) -> None:
        """Let go of connections; a later call connects again."""


class TableCommitter(BatchCommitter):
    """One commit for each checkpoint.

    Args:
        place: of data files.
    """

    def __init__(self, place: Place, table: LakeTable) -> None:
        self._place, self._table = place, table

    def last_batch(self, application: str) -> int:
        """As the table knows it: a batch's number is the version of its files."""
        known = self._table.version(application)
        return -1 if known is None else known

    def commit(self, committables: Sequence[bytes]) -> None:
        """Add what the table does not have.

        Raises:
            ConnectorError: it takes no commit, or others were quicker each time.
            OutputLostError: a file that it does not have is gone.
        """
        for application, files in _by_application(committables).items():
            tries = (self._table.append(files, application, self._place) for _ in range(ROUNDS))
            if not any(tries):
                raise ConnectorError(
                    f"The table {self._table.name} was changed by others {ROUNDS} times while a "
                    f"checkpoint was to be committed.",
                    todo="Look for a writer that commits without a pause, or give the job a "
                    "longer checkpoint interval.",
                )

    def commit_batch(self, application: str, batch_id: int, committables: Sequence[bytes]) -> None:
        """As `commit`: the files say of which batch they are."""
        self.commit(committables)

    def discard(self, committables: Sequence[bytes]) -> None:
        """Remove files that the table does not have."""
        for application, files in _by_application(committables).items():
            for one in missing_in(self._table.version(application), files):
                self._place.remove(one.path)

    def close(self) -> None:
        """Let go of the table's connections."""
        self._table.close()


class TableSink(BatchSink):
    """A sink whose committer is a `TableCommitter`."""

    def batch_committer(self, query_id: str, part: str) -> BatchCommitter:
        """The table itself knows the query."""
        found = self.committer("", f"foreachBatch {part}")
        assert isinstance(found, TableCommitter)
        return found


def _by_application(committables: Sequence[bytes]) -> dict[str, list[TableFile]]:
    """The files of committables. Those of a savepoint may be of another job's sink."""
    found: dict[str, list[TableFile]] = {}
    for data in committables:
        one = decode_committable(data, TableFile, FORMAT_VERSION)
        found.setdefault(one.application, []).append(one)
    return found


def split_by(keys: Callable[[pa.RecordBatch], Sequence[pa.Array]], drop: Sequence[str]) -> Split:
    """Rows by partition: of each distinct combination of ``keys``, without the columns ``drop``."""

    def split(batch: pa.RecordBatch) -> Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]:
        columns = [pc.dictionary_encode(key, null_encoding="encode") for key in keys(batch)]
        rows = batch.drop_columns(list(drop)) if drop else batch
        code = np.zeros(batch.num_rows, np.int64)
        for column in columns:
            code = code * len(column.dictionary) + column.indices.to_numpy(zero_copy_only=False)
        order = np.argsort(code, kind="stable")
        ends = np.append(np.flatnonzero(np.diff(code[order])) + 1, len(order))
        begin = 0
        for end in ends:
            values = tuple(column[int(order[begin])].as_py() for column in columns)
            yield values, rows.take(pa.array(order[begin:end]))
            begin = int(end)

    return split


def _stats(footer: Any) -> dict[str, tuple[int, Any, Any]]:
    """Of the top columns whose order every reader agrees about."""
    found: dict[str, tuple[int, Any, Any]] = {}
    for index in range(footer.num_columns):
        name = footer.schema.column(index).path
        if "." in name:
            continue
        parts = [footer.row_group(group).column(index) for group in range(footer.num_row_groups)]
        of = [part.statistics for part in parts]
        if any(one is None or not one.has_null_count for one in of):
            continue
        nulls = sum(one.null_count for one in of)
        some = [
            one for one, part in zip(of, parts, strict=True) if one.null_count < part.num_values
        ]
        if some and all(one.has_min_max and _plain(one.min) and _plain(one.max) for one in some):
            found[name] = nulls, min(one.min for one in some), max(one.max for one in some)
        else:
            found[name] = nulls, None, None
    return found


def _plain(value: Any) -> bool:
    """Whole numbers and short texts: their bounds are exact, and JSON has one form for them."""
    return type(value) is int or (type(value) is str and len(value) <= 32)
