"""The loop of a vectorised operator: one call per batch of complete keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.errors import StateBackendError, UsageError, ValueMismatchError
from statebackend.operators.errors.user_errors import batch_failure
from statebackend.operators.input.group_by_key import Groups
from statebackend.operators.input.staging import StagedRows
from statebackend.operators.rows.row_conversion import arrow_schema
from statebackend.operators.vector.column_timers import ArrowTimers, Fired
from statebackend.operators.vector.given_columns import arrow_fields, columns_of, record
from statebackend.operators.vector.key_vector import GROUP_BYTES, Keys, strictly
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.keys.key_column_decoding import decode_key_columns
from statebackend.state.binary_columns import take
from statebackend.state.column_table import ColumnTable

__all__ = ["Output", "VectorOperator"]

# Keys of a batch: at first few, until it is known how large the state of a key is.
_KEYS_MAX: Final = 1 << 18
_FIRST_KEYS: Final = 1 << 10
_CHUNK_STATE_BYTES: Final = 64 << 20

Output: TypeAlias = Any
"""Record batches (or dicts of columns) in any iterable, one alone, or None."""
BatchCall = Callable[[pa.RecordBatch, Keys], Output]
TimerCall = Callable[[Keys, Any], Output]


class VectorOperator:
    """Feeds batches of whole keys to a processor and checks what it returns.

    Args:
        who: names the processor, for errors about its output.

    Attributes:
        timers_fired: so far.
    """

    def __init__(
        self,
        uid: str,
        columns: ColumnTable,
        key_codec: KeyCodec,
        output_schema: StructType,
        who: Callable[[], str],
    ) -> None:
        self._uid, self._columns, self._who = uid, columns, who
        self._key_codec = key_codec
        self._key_fields = arrow_fields(key_codec.schema)
        self._output_schema = output_schema
        self._output_fields = arrow_schema(output_schema)
        self._chunk_keys = _FIRST_KEYS
        self.timers_fired = 0

    def run_parts(
        self, parts: Iterator[Groups], positions: tuple[int, ...], call: BatchCall
    ) -> Iterator[pa.RecordBatch]:
        """All parts of the input, each let go before the next one is made.

        Args:
            positions: of the key columns.

        Raises:
            ProcessorError, ValueMismatchError: the processor raised, or gave what does not fit.
        """
        while True:
            groups = next(parts, None)
            if groups is None:
                return
            yield from self._run(groups, positions, call)
            del groups

    def _run(
        self, groups: Groups, positions: tuple[int, ...], call: BatchCall
    ) -> Iterator[pa.RecordBatch]:
        rows = _whole(groups)
        first = 0
        while first < len(groups):
            last = min(first + self._chunk_keys, len(groups))
            start, end = int(groups.starts[first]), int(groups.starts[last])
            batch = rows.slice(start, end - start)
            starts = groups.starts[first : last + 1] - start
            keys = Keys(
                groups.full.slice(first, last - first),
                _first_rows(batch, starts, positions),
                starts=starts,
                ascending=True,
            )
            before_bytes = self._columns.read_bytes
            yield from self._called(lambda b=batch, k=keys: call(b, k), len(keys))  # type: ignore[misc]
            self._columns.table.relieve()
            self._adapt(len(keys), self._columns.read_bytes - before_bytes)
            first = last

    def _adapt(self, keys: int, state_bytes: int) -> None:
        fitting = max(1, _CHUNK_STATE_BYTES // (state_bytes // keys + 1))
        self._chunk_keys = min(_KEYS_MAX, fitting, 4 * max(keys, self._chunk_keys))

    def run_timers(
        self, timers: ArrowTimers, key_groups: range, now_ms: int, call: TimerCall
    ) -> Iterator[pa.RecordBatch]:
        """Call the processor for the timers that are due; they are gone after the call.

        Raises:
            ProcessorError, ValueMismatchError: as :meth:`run_parts`.
        """
        for some in timers.due(key_groups, now_ms, lambda: self._chunk_keys):
            keys = self._owners(some)
            before_bytes = self._columns.read_bytes
            yield from self._called(lambda s=some, k=keys: call(k, s.at_ms), len(keys))  # type: ignore[misc]
            timers.fired(some)
            self.timers_fired += len(keys)
            self._columns.table.relieve()
            self._adapt(len(keys), self._columns.read_bytes - before_bytes)

    def _owners(self, some: Fired) -> Keys:
        owners, schema, fields = some.owners, self._key_codec.schema, self._key_fields

        def columns() -> pa.RecordBatch:
            return record(decode_key_columns(owners, schema, GROUP_BYTES), fields)

        return Keys(owners, columns, ascending=strictly(owners) is None)

    def _called(self, call: Callable[[], Output], count: int) -> Iterator[pa.RecordBatch]:
        try:
            output = call()
            if output is None:
                return
            if isinstance(output, pa.RecordBatch | pa.Table | Mapping):
                output = [output]
            elif not isinstance(output, Iterable):
                raise self._no_output(output)
            for batch in output:
                made = self._checked(batch)
                if made.num_rows:
                    yield made
        except Exception as error:
            if isinstance(error, StateBackendError) and not isinstance(error, UsageError):
                raise
            raise batch_failure(self._uid, count, error) from error

    def _no_output(self, given: object) -> ValueMismatchError:
        return ValueMismatchError(
            f"{self._who()} gave a {type(given).__name__}.",
            todo="Yield (or return) pyarrow.RecordBatch objects, or dicts from field to column.",
        )

    def _checked(self, batch: Any) -> pa.RecordBatch:
        """A batch of the output in the types that Spark was told of."""
        if not isinstance(batch, pa.RecordBatch | pa.Table | Mapping):
            raise self._no_output(batch)
        try:
            arrays = columns_of(batch, self._output_schema, None, "The output")
        except ValueMismatchError as error:
            raise ValueMismatchError(
                f"{self._who()} gave what does not fit: {error.what}", todo=error.todo
            ) from error
        fields = self._output_fields
        if not arrays:
            return pa.RecordBatch.from_arrays([], schema=fields)
        exact = [
            array if array.type == field.type else array.cast(field.type)
            for array, field in zip(arrays, fields, strict=True)
        ]
        return pa.RecordBatch.from_arrays(exact, schema=fields)


def _whole(groups: Groups) -> pa.RecordBatch:
    """The rows of a part as one record batch."""
    rows = groups.rows
    if isinstance(rows, StagedRows):
        table = rows.slice(0, rows.num_rows)
        rows = table if groups.keep is None else groups.keep(table)
        groups.starts[-1] = rows.num_rows
    arrays = [
        column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        for column in rows.columns
    ]
    if not arrays:
        return rows.to_batches()[0]
    return pa.RecordBatch.from_arrays(arrays, schema=rows.schema)


def _first_rows(
    batch: pa.RecordBatch, starts: Any, positions: tuple[int, ...]
) -> Callable[[], pa.RecordBatch]:
    def columns() -> pa.RecordBatch:
        arrays = [take(batch.column(place), starts[:-1]) for place in positions]
        names = [batch.schema.names[place] for place in positions]
        return pa.RecordBatch.from_arrays(arrays, names=names)

    return columns
