"""Taking in one epoch's input: rows, identity and the barrier.

The frame ends with columns of ours (see :mod:`statebackend.spark.plan`): key group, subtask and
stamp. A row of the anchor that no row of the stream matched has a null key group; the barrier is
the one whose subtask is negative (its bitwise complement), and Spark emits it last, only when the
stream side ended well. An input that ends without it was cut off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.errors import BarrierMissingError, ForeignRowError, HashMismatchError
from statebackend.hashing import key_groups as hash_key_groups
from statebackend.keygroups import subtask_of

__all__ = ["CONTROL_COLUMNS", "EpochInput", "read_epoch"]

CONTROL_COLUMNS = ("__statebackend_key_group", "__statebackend_subtask", "__statebackend_stamp")
_CHECKED_ROWS = 32


@dataclass(frozen=True)
class EpochInput:
    """All rows of one subtask in one epoch. ``key_groups``: uint16, one per row."""

    subtask: int
    stamp_ms: int
    rows: pa.Table
    key_groups: NDArray[np.uint16]


def read_epoch(
    batches: Iterable[pa.RecordBatch],
    *,
    uid: str,
    schema: pa.Schema,
    key_positions: tuple[int, ...],
    parallelism: int,
    max_parallelism: int,
) -> EpochInput:
    """Read to the end of the input.

    Args:
        schema: of the data columns, which come first.

    Raises:
        BarrierMissingError: the upstream failed, was killed, or the query is being stopped.
        ForeignRowError: a row belongs to another subtask.
        HashMismatchError: Spark and Python disagree on a key's group.
    """
    reader = _Reader(schema, parallelism, max_parallelism)
    for batch in batches:
        reader.take(batch)
    if not reader.barriers:
        raise BarrierMissingError(
            f"The input of operator {uid!r} ended without its barrier: the stages before it "
            f"failed or were killed, or the query is being stopped.",
            todo="Look for the first error in the query; nothing of this attempt was kept.",
        )
    present = reader.barriers | reader.subtasks
    if len(present) != 1:
        raise ForeignRowError(
            f"A task of operator {uid!r} was given rows or barriers of several subtasks "
            f"({sorted(present)[:8]}).",
            todo="Report this with the query's plan (df.explain()): a plan rewrite moved rows.",
        )
    result = reader.result()
    _check_hash(result, uid, key_positions, max_parallelism)
    return result


class _Reader:
    """Collects an epoch's batches, and what identifies them."""

    def __init__(self, schema: pa.Schema, parallelism: int, max_parallelism: int) -> None:
        self._schema = schema
        self._parallelism, self._max_parallelism = parallelism, max_parallelism
        self._batches: list[pa.RecordBatch] = []
        self._key_groups: list[NDArray[np.uint16]] = []
        self._stamp_ms = -1
        self.barriers: set[int] = set()
        self.subtasks: set[int] = set()

    def take(self, batch: pa.RecordBatch) -> None:
        """Take in one batch: data columns, then the control columns."""
        width = len(self._schema)
        key_group, subtask, stamp = batch.columns[width : width + 3]
        if key_group.null_count:
            self._take_anchor_rows(key_group, subtask, stamp)
            batch = batch.filter(key_group.is_valid())
            key_group, subtask = batch.columns[width : width + 2]
        if batch.num_rows == 0:
            return
        groups = key_group.to_numpy()
        owners = subtask_of(groups, self._parallelism, self._max_parallelism)
        self.subtasks.update(np.unique(subtask.to_numpy()).tolist())
        self.subtasks.update(np.unique(owners).tolist())
        self._key_groups.append(groups.astype(np.uint16))
        self._batches.append(pa.RecordBatch.from_arrays(batch.columns[:width], schema=self._schema))

    def _take_anchor_rows(self, key_group: pa.Array, subtask: pa.Array, stamp: pa.Array) -> None:
        for i in np.flatnonzero(np.asarray(key_group.is_null())).tolist():
            marker = subtask[i].as_py()
            if marker >= 0:
                self.subtasks.add(marker)
                continue
            self.barriers.add(~marker)
            self._stamp_ms = stamp[i].cast(pa.int64()).as_py() // 1000

    def result(self) -> EpochInput:
        """Everything taken in, of one subtask."""
        empty = np.empty(0, dtype=np.uint16)
        return EpochInput(
            subtask=min(self.barriers),
            stamp_ms=self._stamp_ms,
            rows=pa.Table.from_batches(self._batches, schema=self._schema),
            key_groups=np.concatenate(self._key_groups) if self._key_groups else empty,
        )


def _check_hash(
    taken: EpochInput, uid: str, key_positions: tuple[int, ...], max_parallelism: int
) -> None:
    # A sample: the hash is part of the format, and a Spark release that changed it must not pass.
    head = taken.rows.slice(0, _CHECKED_ROWS)
    if head.num_rows == 0:
        return
    columns = [head.column(i).combine_chunks() for i in key_positions]
    if not np.array_equal(
        hash_key_groups(columns, max_parallelism), taken.key_groups[: head.num_rows]
    ):
        raise HashMismatchError(
            f"Spark's plan and Python put keys of operator {uid!r} into different key groups.",
            todo="Use a supported release of Spark; nothing of this attempt was kept.",
        )
