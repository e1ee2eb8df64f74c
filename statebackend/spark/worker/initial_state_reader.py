"""Reads a subtask's part of the initial state: what the start wrote into the job's store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from recovery.restore.fetch import fetch_file
from snapshot.protocol.messages import SlicePart
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CorruptionError, HashMismatchError
from statebackend.key_hashing import key_groups as hash_key_groups
from statebackend.keygroups import subtask_of
from statebackend.operators.input.staging import InputStage
from statebackend.spark.worker.epoch_input import EpochInput

__all__ = ["read_initial"]


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
