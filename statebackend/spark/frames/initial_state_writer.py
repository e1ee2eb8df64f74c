"""Initial state: a static frame, written once into the job's store before the query starts.

A stream cannot be joined with a static frame by key and keep its identity and barrier, and the
frame might give other rows when a batch is repeated. So it is evaluated once, split by subtask as
the stream is, and kept as one object per subtask; the operator's first epoch reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from blake3 import blake3
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from recovery.local.workspace import Workspace
from snapshot.formats.object_names import data_name
from snapshot.protocol.messages import SlicePart
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import open_store
from statebackend import system
from statebackend.operators.errors.task_errors import code_first
from statebackend.operators.rows.row_conversion import arrow_schema
from statebackend.runtime.driver.initial_state_frame import InitialState
from statebackend.schema.ddl import quoted
from statebackend.spark.frames.key_hash_expression import key_group_expression

__all__ = ["write_initial"]

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
