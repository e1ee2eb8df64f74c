"""A processor under test: on the real store, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self

from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row, StructType

from statebackend.api.calls import Sides, has_initial, record_keyed_states
from statebackend.api.harness import Harness, TesterUseError
from statebackend.api.processors import CoProcessor, KeyedProcessor
from statebackend.api.testkeys import KeySpace
from statebackend.api.testout import OutputCheck
from statebackend.errors import SettingError, UnsupportedQueryError, UsageError
from statebackend.ops.declared import EpochTimes, parse_schema
from statebackend.ops.tws import record_states

__all__ = ["ProcessorTester"]

_MODES: Final = {
    "none": "none",
    "processingtime": "processing",
    "processing": "processing",
    "eventtime": "event",
    "event": "event",
}
_OUTPUT_MODES: Final = ("append", "update", "complete")
_VALUES: Final = ("value", "reducing", "aggregating")


class ProcessorTester:
    """Tests a processor's logic: the verbs of pyspark's ``TwsTester``, and more.

    The processor runs in the code that runs it in a query, over RocksDB in a temporary directory,
    with no SparkSession and no JVM. It may be a ``StatefulProcessor`` (rows or pandas), a
    ``KeyedProcessor`` or a ``CoProcessor``. Beyond ``TwsTester`` there are time to live,
    :meth:`restart`, :meth:`rescale`, :meth:`testSides` and :meth:`peekTimers`. Use it in a
    ``with`` statement, or call :meth:`close`; otherwise the directory goes with the object.

    Each call of :meth:`test` is a micro-batch of its own, with the data of one key: ``init``, the
    rows, the timers that are due by then, ``close``. The same processor object is used until
    :meth:`restart`. In a query each batch has a new one.

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
    * What is wrong with a call of the tester itself is one of our errors (and an AssertionError
      where it was one).

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

    Raises:
        UsageError: arguments that do not belong together, and the processor's declarations.
        ProcessorError: the processor cannot be pickled.
    """

    def __init__(
        self,
        processor: StatefulProcessor | KeyedProcessor | CoProcessor,
        initialStateRow: Sequence[tuple[Any, Row]] | None = None,
        initialStatePandas: Sequence[tuple[Any, Any]] | None = None,
        timeMode: str = "None",
        outputMode: str = "Append",
        eventTimeExtractor: Callable[[Any], int] | None = None,
        *,
        keySchema: StructType | str | None = None,
        outputSchema: StructType | str | None = None,
        maxParallelism: int = 128,
    ) -> None:
        self._mode = _MODES.get(str(timeMode).lower(), "")
        if not self._mode or str(outputMode).lower() not in _OUTPUT_MODES:
            raise SettingError(
                f"timeMode={timeMode!r}, outputMode={outputMode!r} are no modes of Spark's.",
                todo="Give timeMode None, ProcessingTime or EventTime.",
            )
        if self._mode == "event" and eventTimeExtractor is None:
            raise SettingError(
                "eventTimeExtractor is missing in event time.",
                todo="Give a function from a row to its event time in milliseconds.",
            )
        self._event_time = eventTimeExtractor
        self._flavour = _flavour(processor)
        self._pandas = initialStatePandas is not None
        self._now_ms = self._watermark_ms = 0
        schema = None if outputSchema is None else parse_schema(outputSchema, "the output")
        self._check = OutputCheck(schema, rows_only=self._flavour != "rows")
        initial = _initial(processor, initialStateRow, initialStatePandas)
        self._harness = Harness(
            processor,
            flavour=self._flavour,
            time_mode=self._mode,
            record=record_states if self._flavour == "rows" else record_keyed_states,
            keys=KeySpace(keySchema, maxParallelism),
            check=lambda output: self._check(output, pandas=self._pandas),
        )
        try:
            self._harness.run(self._times(), initial=initial, everywhere=True)
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
        self._harness.close()

    @property
    def processor(self) -> Any:
        """The processor object in use; of the first subtask if there are several."""
        return self._harness.processors[0]

    # --- input

    def test(self, key: Any, input: Iterable[Row]) -> list[Any]:
        """Feed rows of one key; late ones are dropped first.

        Returns:
            all that the processor gave.

        Raises:
            Exception: what the processor raised.
            StateBackendError: a mistake that it made.
        """
        if self._flavour == "sides":
            raise UsageError(
                "A CoProcessor has two inputs.", todo="Call testSides(key, left=..., right=...)."
            )
        self._pandas = False
        rows = list(input)
        kept = self._in_time(rows)
        items = [(key, iter(kept))] if kept or not rows else []
        return self._harness.run(self._times(), items)

    def testInPandas(self, key: Any, input: Any) -> Any:
        """As :meth:`test`, from DataFrame to DataFrame, for pandas processors."""
        if self._flavour != "rows":
            raise UsageError(
                f"A {type(self.processor).__bases__[0].__name__} takes rows, not DataFrames.",
                todo="Call test(key, rows).",
            )
        self._pandas = True
        kept = input
        if self._event_time is not None and self._mode == "event":
            late, when = self._watermark_ms, self._event_time
            in_time = [when(row) > late for _, row in input.iterrows()]
            kept = input[in_time].reset_index(drop=True)
        items = [(key, iter([kept]))] if len(kept) or not len(input) else []
        return self._returned(self._harness.run(self._times(), items))

    def testSides(
        self, key: Any, *, left: Iterable[Row] = (), right: Iterable[Row] = ()
    ) -> list[Any]:
        """As :meth:`test`, for a :class:`CoProcessor`."""
        if self._flavour != "sides":
            raise UsageError("The processor has one input.", todo="Call test(key, rows).")
        sides = Sides(self._in_time(left), self._in_time(right))
        return self._harness.run(self._times(), [(key, sides)] if any(sides) else [])

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
            what the timers gave: rows, or a DataFrame after DataFrames came in.

        Raises:
            UnsupportedQueryError: Spark has no processing time in this mode.
            UsageError: time does not go back, or stand still.
        """
        if self._mode != "processing" and self._flavour == "rows":
            raise UnsupportedQueryError(
                "setProcessingTime was called in another time mode.",
                todo="Give timeMode='ProcessingTime'.",
            )
        _check_forward("Processing time", self._now_ms, currentTimeMs)
        self._now_ms = currentTimeMs
        return self._returned(self._harness.run(self._times(), everywhere=True))

    def setWatermark(self, currentWatermarkMs: int) -> Any:
        """Move the watermark on, and run a batch without data: due timers fire.

        Returns, raises: as :meth:`setProcessingTime`, for event time.
        """
        if self._mode != "event":
            raise UnsupportedQueryError(
                "setWatermark was called in another time mode.", todo="Give timeMode='EventTime'."
            )
        _check_forward("Watermark", self._watermark_ms, currentWatermarkMs)
        late_ms, self._watermark_ms = self._watermark_ms, currentWatermarkMs
        return self._returned(self._harness.run(self._times(late_ms), everywhere=True))

    def _times(self, late_ms: int | None = None) -> EpochTimes:
        return EpochTimes(
            processing_time_ms=self._now_ms,
            watermark_ms=self._watermark_ms,
            late_watermark_ms=self._watermark_ms if late_ms is None else late_ms,
        )

    def _returned(self, output: list[Any]) -> Any:
        if not self._pandas:
            return output
        import pandas as pd

        return pd.concat(output, ignore_index=True) if output else pd.DataFrame()

    # --- failures and other sizes

    def restart(self) -> None:
        """As after a failure: nothing survives but state (with timers), and the times set here."""
        self._harness.restart()

    def rescale(self, parallelism: int) -> None:
        """Restart with other subtasks, over which keys, state and timers are spread.

        Raises:
            ParallelismError: no such parallelism, or above ``maxParallelism``.
        """
        self._harness.rescale(parallelism)

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
        return self._harness.timers(key)

    def _cell(self, name: str, kinds: Sequence[str], key: Any, *, write: bool = False) -> Any:
        return self._harness.cell(name, kinds, key, self._times(), write=write)


def _flavour(processor: Any) -> str:
    if isinstance(processor, StatefulProcessor):
        return "rows"
    return "sides" if isinstance(processor, CoProcessor) else "keyed"


def _initial(
    processor: Any,
    rows: Sequence[tuple[Any, Row]] | None,
    frames: Sequence[tuple[Any, Any]] | None,
) -> list[tuple[Any, Any]]:
    if rows is not None and frames is not None:
        raise TesterUseError(
            "Cannot specify both Row and Pandas initial states.", todo="Give one of them."
        )
    keyed = isinstance(processor, KeyedProcessor | CoProcessor)
    if frames is not None and keyed:
        raise SettingError(
            "initialStatePandas was given for a processor of rows.", todo="Give initialStateRow."
        )
    if (rows or frames) and keyed and not has_initial(processor):
        raise UsageError(
            f"There is an initial state, but {type(processor).__name__} has no on_initial().",
            todo="Define on_initial(self, key, rows, ctx).",
        )
    by_key: dict[Any, list[Any]] = {}
    for key, what in [*(rows or ()), *(frames or ())]:
        by_key.setdefault(key, []).append(what)
    return [(key, iter(some)) for key, some in by_key.items()]


def _check_forward(what: str, now_ms: int, next_ms: int) -> None:
    if next_ms <= now_ms:
        raise SettingError(
            f"{what} must move forward: it is {now_ms} ms, and was set to {next_ms} ms.",
            todo="Give a later time.",
        )
