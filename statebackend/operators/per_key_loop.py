"""The loop that every keyed operator runs: one call per key, chunk by chunk.

What the user's code is given (rows, frames) and what becomes of its output is a reader's and a
writer's business; where the state comes from is the cursor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import pyarrow as pa

from statebackend.errors import StateBackendError, UsageError
from statebackend.operators.errors.user_errors import failure
from statebackend.operators.input.group_by_key import Groups
from statebackend.state.cells import KeyCursor
from statebackend.state.timers import DueTimers

__all__ = ["InputReader", "KeyCall", "KeyOperator", "OutputWriter", "TimerCall"]

# Keys whose point states are read with one multi-get.
_CHUNK_KEYS = 1024
_FIRST_CHUNK_KEYS = 128  # until it is known how large the state of a key is
_CHUNK_STATE_BYTES = 8 << 20
# Rows that are Python objects at one time, unless one key has more: those come by the slice.
_CHUNK_ROWS = 16_384
_CHUNK_BYTES = 8 << 20

Key = tuple[Any, ...]
KeyCall = Callable[[Key, Iterator[Any]], Iterable[Any] | None]
"""One key's input, as the reader makes it, to its output (any iterable, or None)."""
TimerCall = Callable[[Key, int], Iterable[Any] | None]
"""One key's timer (milliseconds) to its output."""


class FiringTimers(Protocol):
    """What is asked of the timers while they fire; of the cursor's current key."""

    def is_current_set(self, at_ms: int) -> bool:
        """Whether the processor has not deleted one that is due."""

    def fired(self, at_ms: int) -> None:
        """Its call is over."""


class InputReader(Protocol):
    """Makes what user code is given from columns."""

    def chunk(
        self, table: pa.Table, starts: Sequence[int]
    ) -> tuple[list[Key], list[Iterator[Any]]]:
        """Keys and inputs of ``len(starts) - 1`` keys; the i-th has rows starts[i]:starts[i+1]."""

    def key(self, table: pa.Table) -> Key:
        """The key of the first row."""

    def piece(self, table: pa.Table) -> Iterable[Any]:
        """A part of the input of one key."""


class OutputWriter(Protocol):
    """Collects what user code returns."""

    @property
    def pending(self) -> int:
        """How much is collected and not taken."""

    def collect(self, output: Iterable[Any]) -> Iterator[pa.RecordBatch]:
        """Use up ``output``; gives a record batch whenever there is a full one."""

    def take(self) -> pa.RecordBatch:
        """What is pending, as one record batch."""


Put = Callable[[Iterable[Any]], Iterator[pa.RecordBatch] | None]
"""As ``OutputWriter.collect``; None where no batch is full. A writer may have it as ``put``."""


class KeyOperator:
    """Feeds keys to a processor and collects what it returns.

    Args:
        uid: the operator, for errors.
        cursor: told which key is current.
        reader, writer: of the flavour.

    Attributes:
        timers_fired: calls for timers so far.
    """

    def __init__(
        self, *, uid: str, cursor: KeyCursor, reader: InputReader, writer: OutputWriter
    ) -> None:
        self._uid = uid
        self._cursor = cursor
        self._reader, self._writer = reader, writer
        self._put: Put = getattr(writer, "put", writer.collect)
        self._chunk_keys = min(_FIRST_CHUNK_KEYS, _CHUNK_KEYS)
        self.timers_fired = 0

    def run(self, groups: Groups, call: KeyCall) -> Iterator[pa.RecordBatch]:
        """Call the processor once per key; yields full batches as they come, and the rest.

        May be called again with further groups.

        Raises:
            ProcessorError: the processor raised (its own traceback is the cause).
        """
        yield from self._run(groups, call)
        yield from self.flush()

    def run_parts(self, parts: Iterator[Groups], call: KeyCall) -> Iterator[pa.RecordBatch]:
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
        yield from self.flush()

    def flush(self) -> Iterator[pa.RecordBatch]:
        """What is collected and not given yet."""
        if self._writer.pending:
            yield self._writer.take()

    def run_timers(
        self,
        due: Iterable[DueTimers],
        decode_keys: Callable[[list[bytes]], Sequence[Key]],
        call: TimerCall,
        timers: FiringTimers,
    ) -> Iterator[pa.RecordBatch]:
        """Call the processor once per timer, in the order of ``due``.

        As in Spark a timer is deleted after its call, when the output was taken.

        Args:
            decode_keys: from encoded keys to those that the processor is given.

        Raises:
            ProcessorError: the processor raised.
        """
        for some in due:
            start = 0
            while start < len(some):
                end = start + self._chunk_keys
                chunk = DueTimers(
                    some.at_ms[start:end], some.groups[start:end], some.keys[start:end]
                )
                yield from self._fire(chunk, decode_keys, call, timers)
                start = end
        yield from self.flush()

    def _fire(
        self,
        chunk: DueTimers,
        decode_keys: Callable[[list[bytes]], Sequence[Key]],
        call: TimerCall,
        timers: FiringTimers,
    ) -> Iterator[pa.RecordBatch]:
        groups, encoded, places = chunk.by_key()
        cursor, put = self._cursor, self._put
        cursor.load(groups, encoded)
        self._adapt(len(encoded))
        keys = decode_keys(encoded)
        is_set, fired = timers.is_current_set, timers.fired
        key: Key = ()
        try:
            for index, at_ms in zip(places, chunk.at_ms, strict=True):
                cursor.index = index
                if not is_set(at_ms):
                    continue
                key = keys[index]
                output = call(key, at_ms)
                self.timers_fired += 1
                if output is not None:
                    rest = put(output)
                    if rest is not None:
                        yield from rest
                fired(at_ms)
        except Exception as error:
            self._fail(key, error)
        finally:
            cursor.index = -1

    def _run(self, groups: Groups, call: KeyCall) -> Iterator[pa.RecordBatch]:
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
            self._adapt(last - first)
            first = last

    def _adapt(self, keys: int) -> None:
        """Choose the size of the next chunk by the state that this one had."""
        fitting = max(1, _CHUNK_STATE_BYTES // (self._cursor.loaded_bytes // keys + 1))
        self._chunk_keys = min(_CHUNK_KEYS, fitting, 4 * self._chunk_keys)

    def _chunk(
        self, groups: Groups, first: int, last: int, call: KeyCall
    ) -> Iterator[pa.RecordBatch]:
        starts = groups.starts[first : last + 1]
        table = groups.rows.slice(int(starts[0]), int(starts[-1] - starts[0]))
        keys, inputs = self._reader.chunk(table, (starts - starts[0]).tolist())
        cursor, put = self._cursor, self._put
        cursor.load_full(groups.full.slice(first, last - first))
        key: Key = ()
        try:
            for index, key in enumerate(keys):
                cursor.index = index
                output = call(key, inputs[index])
                if output is not None:
                    rest = put(output)
                    if rest is not None:
                        yield from rest
        except Exception as error:
            self._fail(key, error)
        finally:
            cursor.index = -1

    def _one_key(
        self, groups: Groups, index: int, max_rows: int, call: KeyCall
    ) -> Iterator[pa.RecordBatch]:
        """A key with too many rows for a chunk: they become Python objects as they are read."""
        start, end = groups.starts[index : index + 2].tolist()
        key = self._reader.key(groups.rows.slice(start, 1))
        cursor = self._cursor
        cursor.load_full(groups.full.slice(index, 1))
        try:
            cursor.index = 0
            output = call(key, self._lazily(groups, start, end, max_rows))
            if output is not None:
                for batch in self._writer.collect(output):
                    yield batch
                    cursor.relieve()
        except Exception as error:
            self._fail(key, error)
        finally:
            cursor.index = -1

    def _lazily(self, groups: Groups, start: int, end: int, step: int) -> Iterator[Any]:
        for first in range(start, end, step):
            table = groups.rows.slice(first, min(step, end - first))
            yield from self._reader.piece(table if groups.keep is None else groups.keep(table))
            del table
            self._cursor.relieve()

    def _fail(self, key: Key, error: Exception) -> NoReturn:
        if isinstance(error, StateBackendError) and not isinstance(error, UsageError):
            raise error
        raise failure(self._uid, key, error, type(self._writer).__module__) from error
