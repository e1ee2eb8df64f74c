"""The row operator: one call per key and epoch into a row processor.

It drives any processor with Spark's row methods; where the state comes from and where the rows go
is not its business.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.errors import ProcessorError, StateBackendError, ValueMismatchError
from statebackend.ops.grouping import Groups
from statebackend.ops.rowconv import RowWriter, columns_to_python, make_rows, row_type
from statebackend.state.cells import KeyCursor

__all__ = ["RowCalls", "RowOperator"]

# Keys whose point states are read with one multi-get.
_CHUNK_KEYS = 1024
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
        self._writer = RowWriter(output_schema, lambda: f"The processor of operator {uid!r}")

    def run(self, groups: Groups, call: RowCalls) -> Iterator[pa.RecordBatch]:
        """Call the processor once per key; yields full batches as they come.

        Raises:
            ProcessorError: the processor raised (its own traceback is the cause).
        """
        for first in range(0, len(groups), _CHUNK_KEYS):
            last = min(first + _CHUNK_KEYS, len(groups))
            yield from self._chunk(groups, first, last, call)
        if self._writer.rows:
            yield self._writer.take()

    def _chunk(
        self, groups: Groups, first: int, last: int, call: RowCalls
    ) -> Iterator[pa.RecordBatch]:
        starts = groups.starts[first : last + 1].tolist()
        table = groups.rows.slice(starts[0], starts[-1] - starts[0])
        columns = columns_to_python(table, self._input_schema)
        rows = make_rows(columns, self._row)
        key_columns = [columns[position] for position in self._key_positions]
        cursor, writer = self._cursor, self._writer
        cursor.load(groups.key_groups[first:last], groups.keys[first:last])
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
        except ValueMismatchError as error:
            raise type(error)(f"{error.what[:-1]}{_where(error)}.", todo=error.todo) from error
        except StateBackendError:
            raise
        except Exception as error:
            raise processor_failed(self._uid, key, error) from error
        finally:
            cursor.index = -1


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
