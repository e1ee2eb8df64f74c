"""The row operator: one call per key and epoch into a row processor.

It drives any processor with Spark's row methods; where the state comes from and where the rows go
is not its business.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.errors import ProcessorError, StateBackendError, ValueMismatchError
from statebackend.ops.grouping import Groups
from statebackend.ops.rowconv import RowWriter, columns_to_python, make_rows, row_type
from statebackend.ops.staging import StagedRows
from statebackend.state.cells import KeyCursor

__all__ = ["RowCalls", "RowOperator"]

# Keys whose point states are read with one multi-get.
_CHUNK_KEYS = 1024
_FIRST_CHUNK_KEYS = 128  # until it is known how large the state of a key is
_CHUNK_STATE_BYTES = 8 << 20
# Rows that are Python objects at one time, unless one key has more: those come by the slice.
_CHUNK_ROWS = 16_384
_CHUNK_BYTES = 8 << 20
_OWN_CODE = str(Path(__file__).parents[1])
_FRAMES_SHOWN = 4


class RowCalls(Protocol):
    """What the operator calls for a key: returns an iterable of output rows, or None."""

    def __call__(self, key: tuple[Any, ...], rows: Iterator[Any]) -> Iterable[Any] | None:
        """One key's rows in, its output rows out."""


class RowOperator:
    """Feeds grouped rows, key by key, to a processor and collects what it returns.

    Args:
        uid: the operator, for errors.
        cursor: told which key is current.
        input_schema: the columns a processor sees, in order.
        key_positions: where the key columns stand among them.
        output_schema: of the rows that the processor returns.
    """

    def __init__(
        self,
        *,
        uid: str,
        cursor: KeyCursor,
        input_schema: StructType,
        key_positions: tuple[int, ...],
        output_schema: StructType,
    ) -> None:
        self._uid = uid
        self._cursor = cursor
        self._input_schema = input_schema
        self._key_positions = key_positions
        self._row = row_type(input_schema.names)
        self._chunk_keys = min(_FIRST_CHUNK_KEYS, _CHUNK_KEYS)
        self._writer = RowWriter(output_schema, lambda: f"The processor of operator {uid!r}")

    def run(self, groups: Groups, call: RowCalls) -> Iterator[pa.RecordBatch]:
        """Call the processor once per key; yields full batches as they come, and the rest.

        May be called again with further groups.

        Raises:
            ProcessorError: the processor raised (its own traceback is the cause).
        """
        yield from self._run(groups, call)
        if self._writer.rows:
            yield self._writer.take()

    def run_parts(self, parts: Iterator[Groups], call: RowCalls) -> Iterator[pa.RecordBatch]:
        """As :meth:`run`, part after part; each is let go before the next one is made.

        Raises:
            ProcessorError: the processor raised (its own traceback is the cause).
        """
        while True:
            groups = next(parts, None)
            if groups is None:
                break
            yield from self._run(groups, call)
            del groups
        if self._writer.rows:
            yield self._writer.take()

    def _run(self, groups: Groups, call: RowCalls) -> Iterator[pa.RecordBatch]:
        max_rows = _CHUNK_ROWS
        if groups.rows.nbytes > _CHUNK_BYTES:
            max_rows = min(max_rows, _CHUNK_BYTES * groups.rows.num_rows // groups.rows.nbytes + 1)
        first, starts = 0, groups.starts
        while first < len(groups):
            full = int(np.searchsorted(starts, starts[first] + max_rows, side="right")) - 1
            last = min(first + self._chunk_keys, max(full, first + 1), len(groups))
            if starts[last] - starts[first] > max_rows:
                yield from self._one_key(groups, first, max_rows, call)
            else:
                yield from self._chunk(groups, first, last, call)
            key_bytes = self._cursor.loaded_bytes // (last - first) + 1
            fitting = max(1, _CHUNK_STATE_BYTES // key_bytes)
            self._chunk_keys = min(_CHUNK_KEYS, fitting, 4 * self._chunk_keys)
            first = last

    def _chunk(
        self, groups: Groups, first: int, last: int, call: RowCalls
    ) -> Iterator[pa.RecordBatch]:
        starts = groups.starts[first : last + 1].tolist()
        table = groups.rows.slice(starts[0], starts[-1] - starts[0])
        columns = columns_to_python(table, self._input_schema)
        rows = make_rows(columns, self._row)
        key_columns = [columns[position] for position in self._key_positions]
        cursor, writer = self._cursor, self._writer
        cursor.load(*groups.chunk(first, last))
        base = starts[0]
        key: tuple[Any, ...] = ()
        try:
            for index in range(last - first):
                offset = starts[index] - base
                key = tuple([column[offset] for column in key_columns])
                cursor.index = index
                # A list of this key's rows: an iterator that is kept, or not used up, must not
                # eat into the next key's.
                output = call(key, iter(rows[offset : starts[index + 1] - base]))
                if output is not None:
                    yield from writer.collect(output)
                cursor.index = -1
        except Exception as error:
            self._fail(key, error)
        finally:
            cursor.index = -1

    def _one_key(
        self, groups: Groups, index: int, max_rows: int, call: RowCalls
    ) -> Iterator[pa.RecordBatch]:
        """A key with too many rows for a chunk: they become Python objects as they are read."""
        start, end = groups.starts[index : index + 2].tolist()
        columns = columns_to_python(groups.rows.slice(start, 1), self._input_schema)
        key = tuple([columns[position][0] for position in self._key_positions])
        cursor = self._cursor
        cursor.load(*groups.chunk(index, index + 1))
        try:
            cursor.index = 0
            output = call(key, self._lazily(groups.rows, start, end, max_rows))
            if output is not None:
                for batch in self._writer.collect(output):
                    yield batch
                    cursor.relieve()
        except Exception as error:
            self._fail(key, error)
        finally:
            cursor.index = -1

    def _lazily(
        self, rows: pa.Table | StagedRows, start: int, end: int, step: int
    ) -> Iterator[Any]:
        for first in range(start, end, step):
            columns = columns_to_python(
                rows.slice(first, min(step, end - first)), self._input_schema
            )
            yield from make_rows(columns, self._row)
            del columns
            self._cursor.relieve()

    def _fail(self, key: tuple[Any, ...], error: Exception) -> NoReturn:
        if isinstance(error, ValueMismatchError):
            raise type(error)(f"{error.what[:-1]}{_where(error)}.", todo=error.todo) from error
        if isinstance(error, StateBackendError):
            raise error
        raise processor_failed(self._uid, key, error) from error


def processor_failed(uid: str, key: tuple[Any, ...], error: Exception) -> ProcessorError:
    """The typed error around whatever the user's code raised."""
    return ProcessorError(
        f"The processor of operator {uid!r} raised {type(error).__name__}: {error} "
        f"for key {key!r}{_where(error)}.",
        todo="Mend the processor; nothing of this epoch was kept, the query goes on from the last "
        "checkpoint.",
    )


def _where(error: Exception) -> str:
    """The user's lines, outermost first: of chained errors Spark shows the last one only."""
    frames = [
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OWN_CODE)
    ]
    if len(frames) > _FRAMES_SHOWN:
        frames = [frames[0], "...", *frames[1 - _FRAMES_SHOWN :]]
    return " at " + ", ".join(frames) if frames else ""


def call_once(uid: str, what: str, function: Callable[[], None]) -> None:
    """Run ``init`` or ``close`` of a processor, typing what it raises."""
    try:
        function()
    except StateBackendError:
        raise
    except Exception as error:
        raise ProcessorError(
            f"{what}() of operator {uid!r}'s processor raised {type(error).__name__}: {error}"
            f"{_where(error)}.",
            todo="Mend the processor.",
        ) from error
