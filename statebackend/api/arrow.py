"""The vectorised processor: whole batches in, whole columns of state out.

The order of calls in each epoch: ``open``, ``on_initial`` (first epoch, if there is an initial
state), ``process`` once per batch, ``on_timers`` once per batch of due timers, ``close``. An
executor makes the object anew from its pickled form for each epoch: what is not in state is lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.api.context import NoTimers, Schema, check_mode
from statebackend.api.state_protocols import OperatorRows
from statebackend.errors import UsageError
from statebackend.operators.declared_states import Times
from statebackend.operators.vector.column_states import (
    ArrowListState,
    ArrowMapState,
    ArrowValueState,
)
from statebackend.operators.vector.column_timers import ArrowTimers
from statebackend.operators.vector.key_vector import Keys
from statebackend.operators.vector.per_batch_loop import Output
from statebackend.state.ttl_cells import TTL
from statebackend.state.unbound import OfOneEpoch

__all__ = ["ArrowContext", "ArrowProcessor", "Keys", "StateMaker"]


class StateMaker(Protocol):
    """Where a context gets its states from: the recorder on the driver, the store in a worker."""

    def __call__(
        self, kind: str, name: str, schema: Schema, key_schema: Schema | None, ttl: TTL | None
    ) -> Any:
        """A state that ``open`` asked for."""


class ArrowContext(OfOneEpoch):
    """What an `ArrowProcessor` is given: states, timers, the times of the batch, and its keys.

    Attributes:
        timers: ``register(keys, at_ms)``, ``delete(keys, at_ms)`` and ``list(keys)``.
        epoch: the number of the batch; in a continuous job of the checkpoint that comes next.
        processing_time_ms: the batch's, the same in all subtasks and whenever it is repeated.
        watermark_ms: as in Spark, -1 without event time and 0 before any was seen.
        job_watermark_ms: the same, whatever the operator's time mode is.
        late_watermark_ms: what rows were late by in this epoch: the watermark before it.
        late_rows: to be added to, by a processor that leaves late rows out itself; shown in
            ``backend.progress()``.
    """

    called = "the context"

    def __init__(
        self, uid: str, make: StateMaker, times: Times, time_mode: str, timers: Any = None
    ) -> None:
        self._uid, self._make, self._time_mode = uid, make, time_mode
        self._keys: Keys | None = None
        self.timers: ArrowTimers = timers or cast(ArrowTimers, NoTimers(uid))
        self._move(times)
        self.late_rows = 0

    def _move(self, times: Times) -> None:
        timed = self._time_mode == "event"
        self.job_watermark_ms = times.watermark_ms
        self.epoch = times.epoch
        self.processing_time_ms = times.processing_time_ms
        self.watermark_ms = times.watermark_ms if timed else -1
        self.late_watermark_ms = times.late_watermark_ms if timed else -1

    @property
    def keys(self) -> Keys:
        """The distinct keys of the batch: their columns, and which rows each has.

        Raises:
            UsageError: no batch is being processed.
        """
        if self._keys is None:
            raise UsageError(
                f"ctx.keys of operator {self._uid!r} was used outside process() and on_initial().",
                todo="on_timers() is given its keys; open() and close() have none.",
            )
        return self._keys

    def value_state(self, name: str, schema: Schema, *, ttl: TTL | None = None) -> ArrowValueState:
        """A state with one row per key.

        Args:
            name: of the state, unique in the operator; it names the state in checkpoints.
            schema: of the row: a StructType or a DDL string.
            ttl: how long a row lives, in processing time, whatever the time mode.

        Raises:
            UsageError: called outside ``open``.
            StateMismatchError: the name is taken.
            SchemaError, UnsupportedTypeError: the schema does not parse or cannot be stored.
        """
        return cast(ArrowValueState, self._make("value", name, schema, None, ttl))

    def list_state(self, name: str, schema: Schema, *, ttl: TTL | None = None) -> ArrowListState:
        """A state with a list of rows per key. Each row has its own time to live.

        Arguments and errors: as `value_state`.
        """
        return cast(ArrowListState, self._make("list", name, schema, None, ttl))

    def map_state(
        self, name: str, key_schema: Schema, value_schema: Schema, *, ttl: TTL | None = None
    ) -> ArrowMapState:
        """A state with a map per key. Each entry has its own time to live.

        Arguments and errors: as `value_state`; ``key_schema`` is that of the map's keys.
        """
        return cast(ArrowMapState, self._make("map", name, value_schema, key_schema, ttl))

    def operator_list(self, name: str, schema: Schema, *, mode: str = "split") -> OperatorRows:
        """A list of rows (tuples) of the subtask that belong to no key.

        As `ProcessorContext.operator_list`.
        """
        check_mode(name, mode)
        return cast(OperatorRows, self._make(mode, name, schema, None, None))


class _BatchProcessor:
    """What need not be defined."""

    def open(self, ctx: ArrowContext) -> None:
        """Ask ``ctx`` for states and keep them as attributes; open what cannot be pickled.

        Called in every epoch, and on the driver (on a copy) to learn which states there are:
        declare the same states wherever it runs.
        """

    def on_timers(self, keys: Keys, at_ms: NDArray[np.int64], ctx: ArrowContext) -> Output:
        """Handle timers that are due. They are gone after the call. Gives output as ``process``.

        Args:
            keys: of each timer, in the order of their times; a key comes as often as it has one.
            at_ms: their times.
        """
        raise UsageError(
            f"{type(self).__name__} registered a timer, but has no on_timers().",
            todo="Define on_timers(self, keys, at_ms, ctx).",
        )

    def on_initial(self, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        """Take in rows of the initial state; gives no output. As ``process`` otherwise."""
        raise UsageError(
            f"There is an initial state, but {type(self).__name__} has no on_initial().",
            todo="Define on_initial(self, batch, ctx), or leave initial_state out.",
        )

    def close(self) -> None:
        """Let go of what `open` opened; after the epoch's last call, if none failed."""


class ArrowProcessor(_BatchProcessor, ABC):
    """A processor of whole record batches; no Python object is made for a row.

    Example::

        class Totals(ArrowProcessor):
            def open(self, ctx):
                self.total = ctx.value_state("total", "amount double")

            def process(self, batch, ctx):
                old = self.total.get(ctx.keys).column("amount").fill_null(0.0)
                added = np.add.reduceat(batch.column("amount").to_numpy(), ctx.keys.starts[:-1])
                total = pc.add(old, pa.array(added))
                self.total.put(ctx.keys, [total])
                keys = ctx.keys.columns
                return pa.RecordBatch.from_arrays([*keys.columns, total], ["user", "total"])
    """

    @abstractmethod
    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> Output:
        """Handle all rows of one or more keys in this batch; called only if there are any.

        Args:
            batch: the input's columns. Rows are sorted by key (in the order in which keys are
                stored); the rows of one key are together, in the order of their arrival.
            ctx: the keys, times and timers.

        Returns:
            record batches of the output schema, or dicts from field name to column, in any iterable
            (or from ``yield``); one alone; or None. Columns of a record batch go by their names, or
            by position if none of the names is a field's.
        """
