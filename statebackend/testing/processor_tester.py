"""A processor under test: on the real store, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row, StructType

from statebackend.api.arrow import ArrowProcessor
from statebackend.api.processors import BroadcastProcessor, CoProcessor, KeyedProcessor
from statebackend.errors import UsageError, ValueMismatchError
from statebackend.operators.declared_states import EpochTimes, parse_schema
from statebackend.operators.errors.spark_errors import WrongTimeModeError
from statebackend.operators.processor_calls import record_keyed_states
from statebackend.operators.stateful_processor_calls import record_states
from statebackend.operators.two_input_rows import Sides
from statebackend.state.operator_state import BROADCAST, LIST_MODES
from statebackend.testing.arguments import (
    check_forward,
    check_kind,
    flavour_of,
    initial_items,
    mode_of,
    refuse_flavour,
)
from statebackend.testing.tested_arrow_operator import ArrowOperatorUnderTest
from statebackend.testing.tested_keys import KeySpace
from statebackend.testing.tested_operator import OperatorUnderTest
from statebackend.testing.tested_output import OutputCheck
from statebackend.testing.tested_state_access import StateAccess

__all__ = ["ProcessorTester"]

Processor = StatefulProcessor | KeyedProcessor | CoProcessor | BroadcastProcessor | ArrowProcessor
_VALUES: Final = ("value", "reducing", "aggregating")


class ProcessorTester:
    """Tests a processor's logic: the verbs of pyspark's ``TwsTester``, and more.

    The processor runs in the code that runs it in a query, over RocksDB in a temporary directory,
    with no SparkSession and no JVM. It may be a ``StatefulProcessor`` (rows or pandas), a
    ``KeyedProcessor``, a ``CoProcessor``, a ``BroadcastProcessor`` or an ``ArrowProcessor`` (with
    `testBatch`, and both schemas given). Beyond ``TwsTester`` there are time to live,
    operator and broadcast state, `restart`, `rescale`, `testSides`,
    `testBroadcast`, `testBatch` and `peekTimers`. Use it in a ``with`` statement,
    or call `close`; otherwise the directory goes with the object.

    Each call of `test` is a micro-batch of its own, with the data of one key: ``init``, the
    rows, the timers that are due by then, ``close``. The same processor object is used until
    `restart`. In a query each batch has a new one. The object may go into a query afterwards:
    its states stay behind, and it is given others there.

    Where ``TwsTester`` does not do what a query does, this one does as a query:

    * A timer may be set for a time that has passed; it fires in the same batch, after the rows, and
      its output is in what ``test`` returns. One set while timers fire waits for the next batch.
    * Timers fire in the order of their times (within a subtask), not key by key.
    * If all rows are late the processor is not called. (If none are given at all, it is called with
      none, as ``TwsTester`` does; a query never does.)
    * A key is a value, or a tuple of the values of several columns: the processor sees
      ``(value,)``, or the tuple itself. All keys have one schema: ``keySchema``, or what the first
      key says (str is string, int bigint, float double, then boolean, date, datetime as
      timestamp, timedelta, Decimal as decimal(38,18), bytes). A null key is refused.
    * Timers are shown their key as a Row, timestamps in it in UTC.
    * State is encoded by its schema: a value that does not fit is refused, an empty list too, and
      what is read are new tuples.
    * If the processor raises, nothing of the batch counts. What it raised is raised here.
    * A state that ``deleteIfExists`` names in ``init`` is emptied in the first batch after a start.
    * A wrong call of the tester raises an error of ours that is also the one of pyspark's tester
      (such as PySparkValueError, with its error class).

    Rows reach the processor as they are given, without conversion to columns and back.

    Args:
        processor: what is tested; it must be picklable, as for Spark.
        initialStateRow: (key, Row) pairs for ``handleInitialState`` or ``on_initial``.
        initialStatePandas: (key, DataFrame) pairs, for a pandas processor.
        timeMode: None, ProcessingTime or EventTime, in any case.
        outputMode: Append, Update or Complete; changes nothing.
        eventTimeExtractor: from a row (of a DataFrame too) to its event time in milliseconds;
            needed in event time: rows at or before the watermark are dropped.
        keySchema: of the key, a StructType or DDL.
        outputSchema: a StructType or DDL. With it output is checked and converted as in a query;
            without it, it is returned as the processor gave it.
        maxParallelism: key groups.
        eventTime: of an ArrowProcessor, which takes no extractor: the name of a timestamp column.
        initialStateBatch: of an ArrowProcessor, rows for ``on_initial``.

    Raises:
        UsageError: arguments that do not belong together, and the processor's declarations.
        ProcessorError: the processor cannot be pickled.
    """

    def __init__(
        self,
        processor: Processor,
        initialStateRow: Sequence[tuple[Any, Row]] | None = None,
        initialStatePandas: Sequence[tuple[Any, Any]] | None = None,
        timeMode: str = "None",
        outputMode: str = "Append",
        eventTimeExtractor: Callable[[Any], int] | None = None,
        *,
        keySchema: StructType | str | None = None,
        outputSchema: StructType | str | None = None,
        maxParallelism: int = 128,
        eventTime: str | None = None,
        initialStateBatch: pa.RecordBatch | pa.Table | None = None,
    ) -> None:
        self._mode = mode_of(timeMode, outputMode)
        self._flavour = flavour_of(processor)
        rows_only = (eventTimeExtractor, initialStateRow, initialStatePandas)
        check_kind(self._flavour, self._mode, rows_only, (eventTime, initialStateBatch))
        self._event_time = eventTimeExtractor
        self._pandas = initialStatePandas is not None
        self._now_ms = self._watermark_ms = 0
        schema = None if outputSchema is None else parse_schema(outputSchema, "the output")
        self._check = OutputCheck(schema, rows_only=self._flavour != "rows")
        initial: Any = initial_items(processor, initialStateRow, initialStatePandas)
        self._operator: OperatorUnderTest
        if self._flavour == "arrow":
            self._operator = ArrowOperatorUnderTest(
                processor,
                time_mode=self._mode,
                key_schema=keySchema,
                output_schema=schema,
                event_time=eventTime,
                max_parallelism=maxParallelism,
            )
            initial = initialStateBatch
        else:
            self._operator = OperatorUnderTest(
                processor,
                flavour=self._flavour,
                time_mode=self._mode,
                record=record_states if self._flavour == "rows" else record_keyed_states,
                keys=KeySpace(keySchema, maxParallelism),
                check=lambda output: self._check(output, pandas=self._pandas),
            )
        self._states = StateAccess(self._operator)
        try:
            self._operator.run(self._times(), initial=initial, everywhere=True)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the store and remove its directory; may be called twice."""
        self._operator.close()

    @property
    def processor(self) -> Any:
        """The processor object in use; of the first subtask if there are several."""
        return self._operator.processors[0]

    # --- input

    def test(self, key: Any, input: Iterable[Row]) -> list[Any]:
        """Feed rows of one key; late ones are dropped first.

        Returns:
            all that the processor gave.

        Raises:
            Exception: what the processor raised.
            StateBackendError: a mistake that it made.
        """
        if self._flavour in ("sides", "arrow"):
            raise refuse_flavour(self.processor)
        self._pandas = False
        rows = list(input)
        kept = self._in_time(rows)
        items = [(key, iter(kept))] if kept or not rows else []
        return self._operator.run(self._times(), items)

    def testInPandas(self, key: Any, input: Any) -> Any:
        """As `test`, from DataFrame to DataFrame, for pandas processors."""
        if self._flavour != "rows":
            raise refuse_flavour(self.processor)
        self._pandas = True
        kept = input
        if self._event_time is not None and self._mode == "event":
            late, when = self._watermark_ms, self._event_time
            in_time = [when(row) > late for _, row in input.iterrows()]
            kept = input[in_time].reset_index(drop=True)
        items = [(key, iter([kept]))] if len(kept) or not len(input) else []
        return self._returned(self._operator.run(self._times(), items))

    def testSides(
        self, key: Any, *, left: Iterable[Row] = (), right: Iterable[Row] = ()
    ) -> list[Any]:
        """As `test`, for a `CoProcessor`."""
        if self._flavour != "sides":
            raise refuse_flavour(self.processor)
        sides = Sides(self._in_time(left), self._in_time(right))
        return self._operator.run(self._times(), [(key, sides)] if any(sides) else [])

    def testBroadcast(
        self, rules: Iterable[Row], *, key: Any = None, input: Iterable[Row] = ()
    ) -> list[Any]:
        """A micro-batch of a `BroadcastProcessor`: rows for every subtask, then one key's.

        Args:
            rules: for ``process_broadcast``, in this order. key, input: as for `test`.

        Raises:
            BroadcastDivergedError: the subtasks came to different broadcast states.
            others: as `test`.
        """
        if self._flavour != "broadcast":
            raise refuse_flavour(self.processor)
        kept = self._in_time(input)
        items = [(key, iter(kept))] if kept else []
        return self._operator.run(self._times(), items, everywhere=True, rules=list(rules))

    def testBatch(self, batch: pa.RecordBatch | pa.Table) -> pa.Table:
        """A micro-batch for an `ArrowProcessor`: rows of any keys, in any order.

        They are spread over the subtasks and grouped as in a query; late ones are dropped first.

        Args:
            batch: with the columns of ``keySchema``; the input schema is the batch's.

        Returns:
            all that the processor gave, in the output schema's types.

        Raises:
            Exception: what the processor raised.
            StateBackendError: a mistake that it made, or a batch without a key column.
        """
        if self._flavour != "arrow":
            raise refuse_flavour(self.processor)
        if not isinstance(batch, pa.RecordBatch | pa.Table):
            raise ValueMismatchError(
                f"testBatch() was given a {type(batch).__name__}.",
                todo="Give a pyarrow.RecordBatch or a pyarrow.Table.",
            )
        return self._returned(self._operator.run(self._times(), batch))

    def _in_time(self, rows: Iterable[Row]) -> list[Row]:
        late_ms, when = self._watermark_ms, self._event_time
        if when is None or self._mode != "event":
            return list(rows)
        return [row for row in rows if when(row) > late_ms]

    # --- time

    def setProcessingTime(self, currentTimeMs: int) -> Any:
        """Move the processing time on, and run a batch without data: due timers fire, TTLs pass.

        In every time mode for processors of our own, whose states may have a TTL in each.

        Returns:
            what the timers gave: rows, a DataFrame after DataFrames came in, or a Table.

        Raises:
            WrongTimeModeError: Spark has no processing time in this mode.
            NotForwardError: the time does not move forward.
        """
        if self._mode != "processing" and self._flavour == "rows":
            raise WrongTimeModeError(
                "setProcessingTime was called in another time mode.",
                todo="Give timeMode='ProcessingTime'.",
            )
        check_forward("Processing time", self._now_ms, currentTimeMs)
        self._now_ms = currentTimeMs
        return self._returned(self._operator.run(self._times(), everywhere=True))

    def setWatermark(self, currentWatermarkMs: int) -> Any:
        """Move the watermark on, and run a batch without data: due timers fire.

        Returns, raises: as `setProcessingTime`, for event time.
        """
        if self._mode != "event":
            raise WrongTimeModeError(
                "setWatermark was called in another time mode.", todo="Give timeMode='EventTime'."
            )
        check_forward("Watermark", self._watermark_ms, currentWatermarkMs)
        late_ms, self._watermark_ms = self._watermark_ms, currentWatermarkMs
        return self._returned(self._operator.run(self._times(late_ms), everywhere=True))

    def _times(self, late_ms: int | None = None) -> EpochTimes:
        return EpochTimes(
            processing_time_ms=self._now_ms,
            watermark_ms=self._watermark_ms,
            late_watermark_ms=self._watermark_ms if late_ms is None else late_ms,
        )

    def _returned(self, output: list[Any]) -> Any:
        if isinstance(self._operator, ArrowOperatorUnderTest):
            return self._operator.table(output)
        if not self._pandas:
            return output
        import pandas as pd

        return pd.concat(output, ignore_index=True) if output else pd.DataFrame()

    # --- failures and other sizes

    def restart(
        self,
        processor: Processor | None = None,
    ) -> None:
        """As after a failure: nothing survives but state (with timers), and the times set here.

        Args:
            processor: of the same kind, takes the place of the one before, as when a query is
                started anew with other code: its states go on from those of the one before.

        Raises:
            StateMismatchError: they cannot. The tester goes on with the processor that it has.
            UsageError: a processor of another kind.
        """
        if processor is not None and flavour_of(processor) != self._flavour:
            raise UsageError(
                f"A {type(processor).__bases__[0].__name__} cannot take the place of a "
                f"{type(self.processor).__bases__[0].__name__} here.",
                todo="Give a processor of the same base class.",
            )
        self._operator.restart(processor)

    def rescale(self, parallelism: int) -> None:
        """Restart with other subtasks, over which keys, state and timers are spread.

        Raises:
            ParallelismError: no such parallelism, or above ``maxParallelism``.
        """
        self._operator.rescale(parallelism)

    # --- state

    def updateValueState(self, stateName: str, key: Any, value: tuple[Any, ...]) -> None:
        """Set a value state (the row of a reducing state, the accumulator of an aggregating one).

        Raises:
            UsageError: there is no such state (an AssertionError too), or the value does not fit.
        """
        with self._cell(stateName, _VALUES, key, write=True) as cell:
            cell.update(value)

    def peekValueState(self, stateName: str, key: Any) -> tuple[Any, ...] | None:
        """What a value state holds for ``key``, or None; changes nothing.

        Of a reducing state the row, of an aggregating one the accumulator.
        """
        with self._cell(stateName, _VALUES, key) as cell:
            found: tuple[Any, ...] | None = cell.get()
            return found

    def updateListState(self, stateName: str, key: Any, value: list[tuple[Any, ...]]) -> None:
        """Set a list state; an empty list removes it."""
        with self._cell(stateName, ("list",), key, write=True) as cell:
            if value:
                cell.put(value)
            else:
                cell.clear()

    def peekListState(self, stateName: str, key: Any) -> list[tuple[Any, ...]]:
        """The rows of a list state for ``key``; changes nothing."""
        with self._cell(stateName, ("list",), key) as cell:
            return list(cell.get())

    def updateMapState(
        self, stateName: str, key: Any, value: dict[tuple[Any, ...], tuple[Any, ...]]
    ) -> None:
        """Set a map state: all of its entries."""
        with self._cell(stateName, ("map",), key, write=True) as cell:
            cell.clear()
            for map_key, row in value.items():
                cell.update_value(map_key, row)

    def peekMapState(self, stateName: str, key: Any) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """The entries of a map state for ``key``; changes nothing."""
        with self._cell(stateName, ("map",), key) as cell:
            return dict(cell.iterator())

    def deleteState(self, stateName: str, key: Any) -> None:
        """Remove what a state of any kind holds for ``key``."""
        with self._cell(stateName, (*_VALUES, "list", "map"), key, write=True) as cell:
            cell.clear()

    def peekTimers(self, key: Any) -> list[int]:
        """The times of the timers that ``key`` has, ascending."""
        return self._states.timers(key)

    def peekOperatorList(self, stateName: str, subtask: int = 0) -> list[tuple[Any, ...]]:
        """The rows of an operator list of one subtask; changes nothing."""
        return list(self._states.operator_state(stateName, subtask, LIST_MODES).get())

    def peekBroadcastState(
        self, stateName: str, subtask: int = 0
    ) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """The entries of a broadcast state; changes nothing."""
        return dict(self._states.operator_state(stateName, subtask, (BROADCAST,)).items())

    def _cell(self, name: str, kinds: Sequence[str], key: Any, *, write: bool = False) -> Any:
        return self._states.cell(name, kinds, key, self._times(), write=write)
