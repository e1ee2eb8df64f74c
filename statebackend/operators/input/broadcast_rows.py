"""The rows of an epoch that go to every subtask: put aside, and given back in one order.

They carry a number that was given before they were multiplied. Every subtask sorts by it, whichever
way the rows came to it. Over the budget they are sorted in runs on local disk, which are merged as
they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.types import StructType

from statebackend.operators.input.staging import ROW_BYTES
from statebackend.operators.rows.row_conversion import columns_to_python, make_rows, row_type
from statebackend.state.blocks import BlockFile, SpillFolder

__all__ = ["BroadcastRows"]

_PIECE_ROWS: Final = 16_384  # that are Python objects at one time
_BLOCK_BYTES: Final = 1 << 20


class BroadcastRows:
    """One subtask's copy of an epoch's rules.

    Args:
        schema: of the rows; one more column follows, their numbers (bigint, no two of them equal).
        budget_bytes: how much to keep in memory. None: everything.
        folder: names a folder of our own; made when it is needed, removed by :meth:`close`.
    """

    def __init__(
        self,
        schema: pa.Schema,
        *,
        budget_bytes: int | None = None,
        folder: Callable[[], Path] | None = None,
    ) -> None:
        self._schema = schema.append(pa.field("n", pa.int64()))
        self._budget_bytes = budget_bytes
        self._folder = SpillFolder(folder, "rules")
        self._batches: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._runs: list[BlockFile] = []
        self.rows = 0
        self.staged_bytes = 0  # on disk, as they lie there

    @property
    def width(self) -> int:
        """Columns of what is taken in."""
        return len(self._schema)

    def add(self, batch: pa.RecordBatch) -> None:
        """Take in rows and, as the last column, their numbers.

        Raises:
            LocalDirError: the disk is full or failed.
        """
        batch = pa.RecordBatch.from_arrays(batch.columns, schema=self._schema)
        self._batches.append(batch)
        self.rows += batch.num_rows
        if self._budget_bytes is None:
            return
        self._held_bytes += batch.get_total_buffer_size() + batch.num_rows * ROW_BYTES
        if self._held_bytes > self._budget_bytes:
            self._spill()

    def shown(self, schema: StructType, timezone: str) -> Iterator[Any]:
        """Every row, once, in the order of the numbers, as a processor is given it.

        Raises:
            LocalDirError: the disk is full or failed.
        """
        row = row_type(schema.names)
        for piece in self.pieces():
            table = pa.Table.from_batches([piece]).select(range(len(schema.fields)))
            yield from make_rows(columns_to_python(table, schema, timezone=timezone), row)

    def pieces(self) -> Iterator[pa.RecordBatch]:
        """The rows with their numbers, in pieces; may be called once. Raises as :meth:`shown`."""
        last = self._sorted()
        self._batches = []
        if not self._runs:
            yield from _cut(last)
            return
        runs = [_Run.of(file) for file in self._runs]
        if last.num_rows:
            runs.append(_Run(iter(_cut(last))))
        yield from _merged(runs)

    def close(self) -> None:
        """Forget the rows and remove the folder; may be called twice."""
        self._batches, self._runs = [], []
        self._folder.remove()

    def _sorted(self) -> pa.RecordBatch:
        """What is in memory, in order."""
        table = pa.Table.from_batches(self._batches, schema=self._schema).combine_chunks()
        batches = table.to_batches()
        if not batches:
            return pa.RecordBatch.from_pylist([], schema=self._schema)
        numbers = _numbers(batches[0])
        if np.all(numbers[1:] > numbers[:-1]):
            return batches[0]
        return batches[0].take(pa.array(np.argsort(numbers, kind="stable")))

    def _spill(self) -> None:
        ordered, self._batches, self._held_bytes = self._sorted(), [], 0
        file = self._folder.new_file(self._schema)
        for piece in _cut(ordered):
            file.append(piece)
        self.staged_bytes += file.size_bytes
        self._runs.append(file)


def _numbers(batch: pa.RecordBatch) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = batch.column(batch.num_columns - 1).to_numpy()
    return numbers


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The same rows in pieces of about a bounded size."""
    pieces = max(1, -(-batch.nbytes // _BLOCK_BYTES))
    rows = min(_PIECE_ROWS, -(-batch.num_rows // pieces))
    for start in range(0, batch.num_rows, max(1, rows)):
        yield batch.slice(start, rows)


@dataclass
class _Run:
    """Sorted rows, of which one piece is in memory."""

    rest: Iterator[pa.RecordBatch]
    piece: pa.RecordBatch | None = None

    @classmethod
    def of(cls, file: BlockFile) -> _Run:
        """A run on disk."""
        return cls(file.read(index) for index in range(len(file)))

    def load(self) -> bool:
        """Have rows at hand; False: there are none left."""
        while self.piece is None or not self.piece.num_rows:
            self.piece = next(self.rest, None)
            if self.piece is None:
                return False
        return True

    @property
    def last(self) -> int:
        """The number of the last row at hand."""
        assert self.piece is not None
        return int(_numbers(self.piece)[-1])

    def take(self, limit: int) -> pa.RecordBatch:
        """The rows at hand whose numbers are at most ``limit``."""
        assert self.piece is not None
        end = int(np.searchsorted(_numbers(self.piece), limit, side="right"))
        taken, self.piece = self.piece.slice(0, end), self.piece.slice(end)
        return taken


def _merged(runs: list[_Run]) -> Iterator[pa.RecordBatch]:
    """The rows of all runs in order; a piece of each is in memory."""
    while runs := [run for run in runs if run.load()]:
        # Every row up to the smallest of the last ones at hand is at hand.
        limit = min(run.last for run in runs)
        taken = [one for run in runs if (one := run.take(limit)).num_rows]
        whole = pa.concat_batches(taken)
        order = pa.array(np.argsort(_numbers(whole), kind="stable"))
        yield from _cut(whole.take(order))
