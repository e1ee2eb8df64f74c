"""Initial state: a static frame, written once into the job's store before the query starts.

A stream cannot be joined with a static frame by key and keep its identity and barrier, and the
frame might give other rows when a batch is repeated. So it is evaluated once, split by subtask as
the stream is, and kept as one object per subtask; the operator's first epoch reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from blake3 import blake3
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from recovery.fetch import fetch_file
from recovery.workspace import Workspace
from snapshot.messages import SlicePart
from snapshot.names import data_name
from snapshot.storage.base import ObjectStore
from snapshot.storage.open import open_store
from snapshot.storage.options import StoreOptions
from statebackend import system
from statebackend.errors import CorruptionError, HashMismatchError
from statebackend.hashing import key_groups as hash_key_groups
from statebackend.keygroups import subtask_of
from statebackend.ops.rowconv import arrow_schema
from statebackend.ops.staging import InputStage
from statebackend.ops.told import code_first
from statebackend.schema.ddl import quoted
from statebackend.spark.initialframe import InitialState
from statebackend.spark.intake import EpochInput
from statebackend.spark.keyhash import key_group_expression

__all__ = ["read_initial", "write_initial"]

_SUBTASK: Final = "__statebackend_subtask"
_WRITTEN: Final = StructType(
    [
        StructField("subtask", IntegerType()),
        StructField("name", StringType()),
        StructField("digest", StringType()),
        StructField("size_bytes", LongType()),
        StructField("rows", LongType()),
    ]
)


@dataclass(frozen=True)
class _Writer:
    """Writes the rows of a partition, an object per subtask. Runs in executors."""

    uri: str
    options: StoreOptions
    local_dir: str
    schema: StructType
    generation: int
    epoch: int

    @code_first
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        store = open_store(self.uri, new_id=system.new_id, options=self.options)
        work = Workspace.of_process(system.expanded(self.local_dir), system.new_id)
        schema = arrow_schema(self.schema)
        files: dict[int, tuple[Path, pa.NativeFile, Any, list[int]]] = {}
        width = len(schema)
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        for batch in batches:
            subtasks = batch.column(width)
            rows = pa.RecordBatch.from_arrays(batch.columns[:width], schema=schema)
            for subtask in subtasks.unique().to_pylist():
                if subtask not in files:
                    path = work.path()
                    sink = pa.OSFile(str(path), "wb")
                    writer = pa.ipc.new_stream(sink, schema, options=options)
                    files[subtask] = (path, sink, writer, [0])
                mine = rows.filter(pa.compute.equal(subtasks, subtask))
                files[subtask][2].write_batch(mine)
                files[subtask][3][0] += mine.num_rows
        out = []
        for subtask, (path, sink, writer, count) in sorted(files.items()):
            writer.close()
            sink.close()
            name = data_name(self.generation, self.epoch, system.new_id())
            hasher = blake3()
            hasher.update_mmap(path)
            store.put_file(name, path)
            size_bytes = path.stat().st_size
            path.unlink()
            out.append((subtask, name, hasher.hexdigest(), size_bytes, count[0]))
        columns = list(zip(*out, strict=True)) if out else [()] * len(_WRITTEN.fields)
        arrays = [
            pa.array(list(values), type=field.type)
            for values, field in zip(columns, arrow_schema(_WRITTEN), strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(_WRITTEN))


def write_initial(
    state: InitialState,
    *,
    uri: str,
    options: StoreOptions,
    local_dir: str,
    parallelism: int,
    max_parallelism: int,
    generation: int,
    epoch: int,
) -> dict[int, SlicePart]:
    """Write the frame into the store; the object of each subtask that has rows."""
    frame, count = state.frame, len(state.frame.columns)
    places = [f"c{i}" for i in range(count)]
    columns = [F.col(quoted(n)).alias(p) for n, p in zip(frame.columns, places, strict=True)]
    keys = [F.col(quoted(frame.columns[i])) for i in state.key_positions]
    group = key_group_expression(keys, max_parallelism)
    subtask = F.floor(group * F.lit(parallelism) / F.lit(max_parallelism)).cast("int")
    routed = frame.select(*columns, subtask.alias(_SUBTASK)).repartition(parallelism, _SUBTASK)
    writer = _Writer(uri, options, local_dir, frame.schema, generation, epoch)
    written = routed.mapInArrow(writer, _WRITTEN).collect()
    return {
        row.subtask: SlicePart(
            digest=row.digest, size_bytes=row.size_bytes, rows=row.rows, name=row.name
        )
        for row in written
    }


def read_initial(
    store: ObjectStore,
    parts: list[SlicePart],
    stage: InputStage,
    *,
    subtask: int,
    schema: pa.Schema,
    key_positions: tuple[int, ...],
    parallelism: int,
    max_parallelism: int,
    new_path: Callable[[], Path],
) -> EpochInput:
    """A subtask's initial state, staged as its input is.

    Raises:
        CorruptionError: an object is damaged.
        HashMismatchError: Spark and Python disagree on a key's place.
        LocalDirError: the disk is full or failed.
    """
    for part in parts:
        path = new_path()
        try:
            fetch_file(store, part.name, path, size_bytes=part.size_bytes, digest=part.digest)
            for batch in _batches(path, part, schema):
                groups = hash_key_groups([batch.column(i) for i in key_positions], max_parallelism)
                if (subtask_of(groups, parallelism, max_parallelism) != subtask).any():
                    raise HashMismatchError(
                        "Spark's plan and Python put keys of the initial state into different key "
                        "groups.",
                        todo="Use a supported release of Spark; nothing of this attempt was kept.",
                    )
                stage.add(batch, groups)
        finally:
            path.unlink(missing_ok=True)
    return EpochInput(subtask, -1, stage, key_positions)


def _batches(path: Path, part: SlicePart, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
            if reader.schema != schema:
                raise ValueError(f"it has the schema {reader.schema}")
            yield from reader
    except (pa.ArrowException, ValueError, OSError) as error:
        raise CorruptionError(
            f"The initial state in {part.name!r} cannot be read ({error}).",
            todo="Start the query again: the initial state is written anew.",
        ) from error
