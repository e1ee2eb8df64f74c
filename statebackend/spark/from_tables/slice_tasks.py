"""What Spark's tasks do for a savepoint: make entries of rows, and slices of sorted entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StructField,
    StructType,
)

from recovery.local.workspace import Workspace
from snapshot.formats.record import SliceEntry
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import open_store
from statebackend.keygroups import subtask_of
from statebackend.operators.errors.task_errors import code_first
from statebackend.state.blocks import binary_array
from statebackend.state.time_ranges import BIAS
from statebackend.state.timers import BY_TIME
from statebackend.system import SYSTEM, expanded
from statebackend.tables.given_rows import Entry, GivenState, timer_entries
from statebackend.tables.savepoint_of_rows import ListHeadOf, entry_columns
from statebackend.tables.savepoint_writer import SliceMaker, encode_once

__all__ = ["ENTRIES", "WRITTEN", "EntryTask", "SliceTask", "WrittenSlice"]

ENTRIES: Final = StructType(
    [
        StructField("subtask", IntegerType(), nullable=False),
        StructField("entry", BinaryType(), nullable=False),
        StructField("stored", BinaryType(), nullable=False),
        StructField("number", LongType(), nullable=False),
    ]
)
"""Entries, by the subtask that holds them and the number of the row that they were made of."""
WRITTEN: Final = StructType([StructField("slice", BinaryType(), nullable=False)])
"""A `WrittenSlice`, as JSON."""

_ENTRIES: Final = pa.schema(
    [
        pa.field("subtask", pa.int32(), nullable=False),
        pa.field("entry", pa.binary(), nullable=False),
        pa.field("stored", pa.binary(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
    ]
)
_WRITTEN: Final = pa.schema([pa.field("slice", pa.binary(), nullable=False)])
_TIME: Final = slice(4, 12)  # in a timer's entry by time


class WrittenSlice(msgspec.Struct, frozen=True):
    """What a task has written of a subtask, and when the first of its timers is due."""

    entry: SliceEntry
    next_timer_ms: int | None


@dataclass(frozen=True)
class EntryTask:
    """Makes entries of rows, whose last column is their number in the frame.

    Attributes:
        state: what they are rows of; None: timers.
        of: parallelism and max_parallelism.
    """

    key: StructType
    state: GivenState | None
    of: tuple[int, int]

    @code_first
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """In a task: a partition."""
        for batch in batches:
            if batch.num_rows:
                names = batch.schema.names[:-1]
                yield self.entries(batch.select(names), batch.column(len(names))[0].as_py())

    def entries(self, rows: pa.RecordBatch, first: int) -> pa.RecordBatch:
        """The entries of a batch.

        Args:
            first: the number of its first row; those of the others follow.

        Raises:
            ValueMismatchError, NullKeyError: a row that does not fit.
        """
        most = self.of[1]
        if self.state is None:
            made = list(timer_entries(rows, self.key, most))
        else:
            made = list(self.state.entries(rows, most, first))
        groups = np.frombuffer(b"".join([key[:2] for key, _ in made]), np.dtype(">u2"))
        numbers = first + np.arange(len(made), dtype=np.int64) * rows.num_rows // len(made)
        columns = [
            pa.array(subtask_of(groups, *self.of)),
            binary_array([key for key, _ in made]),
            binary_array([value for _, value in made]),
            pa.array(numbers),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=_ENTRIES)


@dataclass(frozen=True)
class SliceTask:
    """Writes slices of entries that come in the order of their keys and numbers.

    Attributes:
        uri, options: of the savepoint's folder.
        scratch_dir: takes a subtask's entries meanwhile.
        of: parallelism and max_parallelism.
        lists: see `list_heads`.
    """

    uri: str
    options: StoreOptions | None
    scratch_dir: str
    maker: SliceMaker
    uid: str
    of: tuple[int, int]
    lists: Mapping[bytes, ListHeadOf]

    @code_first
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """In a task: all entries of some subtasks, mostly of one."""
        store = open_store(self.uri, new_id=SYSTEM.new_id, options=self.options)
        work = Workspace.of_process(expanded(self.scratch_dir), SYSTEM.new_id)
        for subtask, entries in groupby(_last_of_each(batches), self._subtask):
            due = _FirstTimer()
            encoded = encode_once(entry_columns(due.watched(entries), self.lists), work)
            entry = self.maker.write(store, encoded, self.uid, subtask, self.of, SYSTEM.new_id)
            self.maker.withdraw_if_deleted(store, entry)
            written = msgspec.json.encode(WrittenSlice(entry, due.at_ms))
            yield pa.RecordBatch.from_arrays([pa.array([written], pa.binary())], schema=_WRITTEN)

    def _subtask(self, entry: Entry) -> int:
        return subtask_of(int.from_bytes(entry[0][:2], "big"), *self.of)


def _last_of_each(batches: Iterator[pa.RecordBatch]) -> Iterator[Entry]:
    """Of entries with one key the last."""
    held: Entry | None = None
    for batch in batches:
        keys, values = (batch.column(name).to_pylist() for name in ("entry", "stored"))
        for entry in zip(keys, values, strict=True):
            if held is not None and held[0] != entry[0]:
                yield held
            held = entry
    if held is not None:
        yield held


class _FirstTimer:
    """Sees when the first timer is due. ``at_ms``: None: there was none."""

    def __init__(self) -> None:
        self.at_ms: int | None = None

    def watched(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        """The same entries."""
        for entry in entries:
            key = entry[0]
            if key[2:4] == BY_TIME:
                at_ms = int.from_bytes(key[_TIME], "big") - BIAS
                self.at_ms = at_ms if self.at_ms is None else min(self.at_ms, at_ms)
            yield entry
