"""Runs one processor in Spark's own engine and in ours, over the same files, batch by batch."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.cloudpickle import register_pickle_by_value

from tests.spark.local import conforming, conforming_time
from tests.spark.local.conforming import TOLD
from tests.spark.local.world import Input, finish, setting, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from tests.spark.local.world import Rows, World

for module in (conforming, conforming_time):  # their processors need not be found by workers
    register_pickle_by_value(module)

PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_MODES = {"none": "None", "processing": "ProcessingTime", "event": "EventTime"}
Batches = dict[int, list[tuple[Any, ...]]]


@dataclass
class Case:
    """A processor, its input, and how the operator is asked for.

    ``delay``: of the watermark on column ``at``. ``marked``: ours is told of it by Spark's own
    ``withWatermark`` on the frame, too, and not by arguments. ``before``: a processor in front,
    whose output has the schema of the input. ``behind``: Spark's own operators on the output, whose
    event time is ``at``. ``initial``: makes the grouped frame of the initial
    state. ``rows_out``: with processing time, how many rows of output to wait for, since Spark's
    engine never finds an end there.
    """

    schema: str
    processor: Any
    keys: tuple[str, ...] = ("k",)
    output: str = TOLD
    flavour: str = "rows"
    mode: str = "none"
    delay: str | None = None
    marked: bool = False
    before: Any = None
    initial: Callable[[SparkSession], Any] | None = None
    rows_out: int = 0
    behind: Callable[[DataFrame], DataFrame] | None = None


class Collected:
    """A foreachBatch function that keeps the rows of each batch, in one order."""

    def __init__(self) -> None:
        self.batches: Batches = {}
        self._lock = threading.Lock()

    def __call__(self, frame: DataFrame, batch: int) -> None:
        rows = sorted((tuple(row) for row in frame.collect()), key=repr)
        with self._lock:
            self.batches[batch] = rows

    def total(self) -> int:
        with self._lock:
            return sum(map(len, self.batches.values()))

    def filled(self) -> list[list[tuple[Any, ...]]]:
        """The batches that gave rows, in order: engines may differ in their empty batches."""
        return [rows for _, rows in sorted(self.batches.items()) if rows]


class Both:
    """The same input for both engines; each has its own places, and may be started again."""

    def __init__(self, world: World) -> None:
        self.world, self.spark = world, world.spark
        self.sparks, self.ours = Collected(), Collected()
        self.input: Input | None = None
        self.backend: Any = None
        self.dropped_by_spark = 0

    def run(self, case: Case, batches: list[Rows]) -> None:
        """More batches, through both, with a new start."""
        if self.input is None:
            self.input = Input(self.world.root / "both", case.schema)
        for rows in batches:
            self.input.add(rows)
        # Side by side: Spark's engine leaves the machine idle half of the time.
        sparks, ours = self._start_spark(case), self._start_ours(case)
        self._end(case, sparks, self.sparks)
        self._end(case, ours, self.ours)

    def _start_spark(self, case: Case) -> StreamingQuery:
        assert self.input is not None
        frame = self.input.stream(self.spark)
        if case.delay is not None:
            frame = frame.withWatermark("at", case.delay)
        if case.before is not None:
            frame = frame.groupBy(*case.keys).transformWithState(
                case.before, case.schema, "append", _MODES[case.mode], None, "at"
            )
        grouped = frame.groupBy(*case.keys)
        transform = (
            grouped.transformWithStateInPandas
            if case.flavour == "pandas"
            else grouped.transformWithState
        )
        initial = None if case.initial is None else case.initial(self.spark)
        onward = "" if case.behind is None else "at"
        mode = _MODES[case.mode]
        result = transform(case.processor, case.output, "append", mode, initial, onward)
        if case.behind is not None:
            result = case.behind(result)
        location = self.world.root / "spark-checkpoint"
        with (
            setting(self.spark, "spark.sql.streaming.stateStore.providerClass", PROVIDER),
            setting(self.spark, "spark.sql.shuffle.partitions", "2"),
        ):
            return self._writer(result, self.sparks, location, case).start()

    def _start_ours(self, case: Case) -> StreamingQuery:
        assert self.input is not None
        self.backend = self.world.backend()
        timed: dict[str, Any] = {} if case.mode == "none" else {"time_mode": case.mode}
        frame = self.input.stream(self.spark)
        if case.marked:
            frame = frame.withWatermark("at", str(case.delay))
        elif case.delay is not None:
            timed |= {"event_time": "at", "watermark_delay": case.delay}
        if case.before is not None:
            frame = self.backend.transform_with_state(
                frame,
                keys=list(case.keys),
                processor=case.before,
                output_schema=case.schema,
                uid="before",
                eventTimeColumnName="at",
                **timed,
            )
            # By what the operator in front passes on.
            timed = {"time_mode": case.mode}
        if case.initial is not None:
            timed["initial_state"] = case.initial(self.spark)
        if case.behind is not None:
            timed["eventTimeColumnName"] = "at"
        if case.flavour != "rows":
            timed["flavour"] = case.flavour
        result = self.backend.transform_with_state(
            frame,
            keys=list(case.keys),
            processor=case.processor,
            output_schema=case.output,
            uid="both",
            **timed,
        )
        if case.behind is not None:
            result = case.behind(result)
        writer = self._writer(result, self.ours, self.world.location, case)
        return self.backend.start(writer)  # type: ignore[no-any-return]

    def _writer(self, frame: DataFrame, sink: Collected, location: Path, case: Case) -> Any:
        writer = frame.writeStream.outputMode("append").foreachBatch(sink)
        writer = writer.option("checkpointLocation", str(location))
        return writer if case.mode == "processing" else writer.trigger(availableNow=True)

    def _end(self, case: Case, query: StreamingQuery, sink: Collected) -> None:
        if case.mode != "processing":
            finish(query)
        else:
            until(lambda: sink.total() >= case.rows_out or not query.isActive, "the rows come out")
            query.stop()
        if query.exception() is not None:
            raise query.exception()
        if sink is self.sparks:
            operators = [o for p in query.recentProgress for o in p.stateOperators]
            self.dropped_by_spark += sum(o.numRowsDroppedByWatermark for o in operators)

    # --- the comparison ----------------------------------------------------------------------

    def agree(self) -> None:
        """Every batch gave the same rows."""
        self._compare(self.sparks.batches, self.ours.batches)

    def agree_but_for_empty_batches(self) -> None:
        """Every batch that gave rows gave the same ones, in the same order of batches."""
        self._compare(dict(enumerate(self.sparks.filled())), dict(enumerate(self.ours.filled())))

    def _compare(self, sparks: Batches, ours: Batches) -> None:
        assert any(sparks.values()), "Spark's engine gave nothing to compare"
        told = list(differences(sparks, ours))
        assert not told, "\n".join(["Spark's engine (-) and ours (+) differ:", *told])


def differences(sparks: Batches, ours: Batches) -> Iterator[str]:
    """One line per row that only one of them gave."""
    for batch in sorted(set(sparks) | set(ours)):
        theirs, own = sparks.get(batch, []), ours.get(batch, [])
        yield from (f"batch {batch} - {row}" for row in theirs if row not in own)
        yield from (f"batch {batch} + {row}" for row in own if row not in theirs)
        if len(theirs) != len(own):
            yield f"batch {batch}: {len(theirs)} rows and {len(own)}"
