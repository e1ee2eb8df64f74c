"""Taking in one epoch's input: rows, identity and the barrier.

The frame ends with columns of ours (see :mod:`statebackend.spark.frames.anchor`): key group,
subtask and stamp. A row of the anchor that no row of the stream matched has a null key group; the
barrier is the one whose subtask is negative (its bitwise complement), and Spark emits it last, only
when the stream side ended well. An input that ends without it was cut off.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.errors import BarrierMissingError, ForeignRowError, HashMismatchError
from statebackend.key_hashing import key_groups as hash_key_groups
from statebackend.keygroups import subtask_of
from statebackend.operators.input.broadcast_rows import BroadcastRows
from statebackend.operators.input.group_by_key import Groups, group_parts
from statebackend.operators.input.lateness import EventMaxima, LateRows
from statebackend.operators.input.packing import unpacked
from statebackend.operators.input.staging import InputStage, Part

__all__ = [
    "CONTROL_COLUMNS",
    "NONCE_BITS",
    "EpochInput",
    "InputShape",
    "peeked",
    "read_epoch",
]

CONTROL_COLUMNS = ("__statebackend_key_group", "__statebackend_subtask", "__statebackend_stamp")
NONCE_BITS = 21  # of a stamp; above them is a time in milliseconds
_CHECKED_ROWS = 32


class ColumnEncoder(Protocol):
    """A key codec (see ``statebackend.schema.keys.key_codec``)."""

    def encode_arrow(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Encoded keys of key columns."""


@dataclass(frozen=True)
class EpochInput:
    """All rows of one subtask in one epoch, staged in memory or (over a budget) on disk.

    ``stamp_ms`` and ``nonce`` are the batch's stamp. ``rules``: those that every subtask has.
    :meth:`groups` or :meth:`parts` is called once, then :meth:`close`, whatever happened.
    """

    subtask: int
    stamp_ms: int
    stage: InputStage
    key_positions: tuple[int, ...]
    max_event_ms: int | None = None
    second_event_ms: int | None = None
    rules: BroadcastRows | None = None
    nonce: int = 0

    @property
    def rows(self) -> pa.Table:
        """The rows that are in memory: all of them without a budget."""
        return self.stage.held().rows

    @property
    def key_groups(self) -> NDArray[np.uint16]:
        """The key groups of :attr:`rows`."""
        return self.stage.held().key_groups

    @property
    def staged_bytes(self) -> int:
        """What went to disk, as it lies there."""
        return self.stage.staged_bytes + (self.rules.staged_bytes if self.rules else 0)

    def parts(self) -> Iterator[Part]:
        """The rows in ascending, disjoint ranges of key groups; one part if all fits the budget.

        Raises:
            LocalDirError: the disk is full or failed.
        """
        return self.stage.parts()

    def groups(self, codec: ColumnEncoder, late: LateRows | None = None) -> Iterator[Groups]:
        """The rows of each part, sorted by key.

        Args:
            late: leaves out rows that are late.

        Raises:
            NullKeyError: a key is null.
            LocalDirError: the disk is full or failed.
        """
        return group_parts(self.parts(), codec.encode_arrow, self.key_positions, late)

    def close(self) -> None:
        """Forget the rows and remove what is on disk; may be called twice."""
        self.stage.close()
        if self.rules is not None:
            self.rules.close()


def peeked(
    batches: Iterator[pa.RecordBatch],
) -> tuple[int | None, Iterator[pa.RecordBatch]]:
    """Whose epoch the input is, by its first row, and the whole input; None: it has no row."""
    seen: list[pa.RecordBatch] = []
    for batch in batches:
        seen.append(batch)
        if batch.num_rows:
            marker = batch.column(batch.num_columns - len(CONTROL_COLUMNS) + 1)[0].as_py()
            subtask = marker if marker is None or marker >= 0 else ~marker
            return subtask, itertools.chain(seen, batches)
    return None, iter(seen)


@dataclass(frozen=True)
class InputShape:
    """What batches of an operator's input consist of, and whose they are.

    Attributes:
        schema: of the data columns, which come first.
        packed: one column of payloads comes instead (see
            :mod:`statebackend.operators.input.packing`).
    """

    uid: str
    schema: pa.Schema
    key_positions: tuple[int, ...]
    parallelism: int
    max_parallelism: int
    packed: bool = False


def read_epoch(
    batches: Iterable[pa.RecordBatch],
    shape: InputShape,
    *,
    stage: InputStage | None = None,
    events: EventMaxima | None = None,
    rules: BroadcastRows | None = None,
) -> EpochInput:
    """Read to the end of the input.

    Args:
        stage: takes the rows, and is closed if this raises; without one they stay in memory.
        events: where the event time is, whose maximum is wanted.
        rules: takes the rows that go to every subtask; closed as ``stage``. Their columns and their
            number come after those of the schema, and the number of any other row is null.

    Raises:
        BarrierMissingError: the upstream failed, was killed, or the query is being stopped.
        ForeignRowError: a row belongs to another subtask.
        HashMismatchError: Spark and Python disagree on a key's group.
        CorruptionError: a payload cannot be read.
        LocalDirError: the input is over the budget, and the disk is full or failed.
    """
    if stage is None:
        stage = InputStage(shape.schema, key_positions=shape.key_positions)
    try:
        reader = _Reader(shape, stage, events or EventMaxima(), rules)
        for batch in batches:
            reader.take(batch)
        return _checked(reader)
    except BaseException:
        stage.close()
        if rules is not None:
            rules.close()
        raise


def _checked(reader: _Reader) -> EpochInput:
    uid = reader.shape.uid
    if not reader.barriers:
        raise BarrierMissingError(
            f"The input of operator {uid!r} ended without its barrier: the stages before it "
            f"failed or were killed, or the query is being stopped.",
            todo="Look for the first error in the query; nothing of this attempt was kept. If "
            "there is none, report the batch's plan from Spark's UI: it is not the one that was "
            "checked.",
        )
    present = reader.barriers | reader.subtasks
    if len(present) != 1:
        raise ForeignRowError(
            f"A task of operator {uid!r} was given rows or barriers of several subtasks "
            f"({sorted(present)[:8]}).",
            todo="Report this with the query's plan (df.explain()): a plan rewrite moved rows.",
        )
    if not reader.hash_agrees:
        raise HashMismatchError(
            f"Spark's plan and Python put keys of operator {uid!r} into different key groups.",
            todo="Use a supported release of Spark; nothing of this attempt was kept.",
        )
    return EpochInput(
        min(reader.barriers),
        reader.stamp_ms,
        reader.stage,
        reader.shape.key_positions,
        reader.events.max_ms,
        reader.events.second_ms,
        reader.rules,
        reader.nonce,
    )


class _Reader:
    """Collects an epoch's batches, and what identifies them."""

    def __init__(
        self,
        shape: InputShape,
        stage: InputStage,
        events: EventMaxima,
        rules: BroadcastRows | None,
    ) -> None:
        self.shape, self._schema = shape, shape.schema
        self.stage, self.events, self.rules = stage, events, rules
        self._unchecked_rows = _CHECKED_ROWS
        self.stamp_ms, self.nonce = -1, 0
        self.hash_agrees = True
        self.barriers: set[int] = set()
        self.subtasks: set[int] = set()

    def take(self, batch: pa.RecordBatch) -> None:
        """Take in one batch: data columns (or payloads), then the control columns."""
        packed = self.shape.packed
        width = 1 if packed else len(self._schema)
        if self.rules is not None:
            width += self.rules.width
        pinned_bytes = None
        key_group, subtask, stamp = batch.columns[width : width + 3]
        if not key_group.null_count:
            # Buffers of one message are one allocation: the control columns stay with the others.
            pinned_bytes = batch.get_total_buffer_size()
        else:
            self._take_anchor_rows(key_group, subtask, stamp)
            batch = batch.filter(key_group.is_valid())
            key_group, subtask = batch.columns[width : width + 2]
        if batch.num_rows == 0:
            return
        self.subtasks.update(np.unique(subtask.to_numpy()).tolist())
        if packed:
            for rows, groups in unpacked(batch.column(0), self._schema):
                self._take_rows(rows, groups, None)
            return
        if self.rules is not None and batch.column(width - 1).null_count < batch.num_rows:
            batch, pinned_bytes = self._take_rules(batch, self.rules, width), None
            key_group = batch.column(width)
        columns = batch.columns[: len(self._schema)]
        rows = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._take_rows(rows, key_group.to_numpy(), pinned_bytes)

    def _take_rules(
        self, batch: pa.RecordBatch, rules: BroadcastRows, width: int
    ) -> pa.RecordBatch:
        """Take the rows that go to every subtask out of a batch: what is left."""
        is_rule = pc.is_valid(batch.column(width - 1))
        taken = batch.filter(is_rule)
        groups = taken.column(width).to_numpy()
        owners = subtask_of(groups, self.shape.parallelism, self.shape.max_parallelism)
        self.subtasks.update(np.unique(owners).tolist())
        columns = taken.columns[len(self._schema) : width]
        names = [str(i) for i in range(len(columns))]
        rules.add(pa.RecordBatch.from_arrays(columns, names))
        return batch.filter(pc.invert(is_rule))

    def _take_rows(
        self, rows: pa.RecordBatch, groups: NDArray[Any], pinned_bytes: int | None
    ) -> None:
        owners = subtask_of(groups, self.shape.parallelism, self.shape.max_parallelism)
        self.subtasks.update(np.unique(owners).tolist())
        narrow = groups.astype(np.uint16, copy=False)
        if self._unchecked_rows:
            self._check_hash(rows, narrow)
        self.events.take(rows)
        self.stage.add(rows, narrow, pinned_bytes)

    def _take_anchor_rows(self, key_group: pa.Array, subtask: pa.Array, stamp: pa.Array) -> None:
        for i in np.flatnonzero(np.asarray(key_group.is_null())).tolist():
            marker = subtask[i].as_py()
            if marker >= 0:
                self.subtasks.add(marker)
                continue
            self.barriers.add(~marker)
            self.stamp_ms, self.nonce = divmod(stamp[i].as_py(), 1 << NONCE_BITS)

    def _check_hash(self, rows: pa.RecordBatch, key_groups: NDArray[np.uint16]) -> None:
        # A sample: the hash is part of the format, and a Spark release that changed it must not
        # pass.
        head = rows.slice(0, self._unchecked_rows)
        self._unchecked_rows -= head.num_rows
        found = hash_key_groups(
            [head.column(i) for i in self.shape.key_positions], self.shape.max_parallelism
        )
        if not np.array_equal(found, key_groups[: head.num_rows]):
            self.hash_agrees = False
