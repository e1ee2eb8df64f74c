"""A frame that is grouped by expressions has the keys and rows of Spark's own operators.

Spark's operators take columns and parts of them only, so they are given frames that have the
expressions as columns. They refuse the window of an event time, so theirs have no watermark.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import statebackend
from statebackend.errors import SchemaError
from tests.spark.local.conformance import PROVIDER, Collected
from tests.spark.local.processors import LEDGER_OUTPUT, Ledger
from tests.spark.local.world import Input, finish, setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, GroupedData

    from tests.spark.local.world import World

register_pickle_by_value(sys.modules[__name__])  # workers need not find this module

OUTPUT = "told string, columns string, n bigint"


def told(key: Any, frames: Any, n: int) -> pd.DataFrame:
    columns = repr(sorted(frames[0].columns))
    return pd.DataFrame({"told": [repr(tuple(key))], "columns": [columns], "n": [n]})


class ByRows(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        seen = [sorted(row.asDict()) for row in rows]
        n = (self.count.get() or (0,))[0] + len(seen)
        self.count.update((n,))
        yield Row(told=repr(tuple(key)), columns=repr(seen[0]), n=n)

    def close(self) -> None:
        pass


class ByFrames(ByRows):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        frames = list(rows)
        n = (self.count.get() or (0,))[0] + sum(map(len, frames))
        self.count.update((n,))
        yield told(key, frames, n)


def by_function(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
    frames = list(frames)
    n = (state.getOption or (0,))[0] + sum(map(len, frames))
    state.update((n,))
    yield told(key, frames, n)


def rows_of(grouped: GroupedData) -> DataFrame:
    return grouped.transformWithState(ByRows(), OUTPUT, "Append", "None")


def frames_of(grouped: GroupedData) -> DataFrame:
    return grouped.transformWithStateInPandas(ByFrames(), OUTPUT, "Append", "None")


def function_of(grouped: GroupedData) -> DataFrame:
    return grouped.applyInPandasWithState(by_function, OUTPUT, "n bigint", "Append", "NoTimeout")


def grouped(frame: DataFrame) -> GroupedData:
    """By a window, a part of a column, a column, and an expression."""
    return frame.groupBy(F.window("at", "10 seconds"), F.col("s.b"), "id", F.lower("k").alias("l"))


def as_columns(frame: DataFrame) -> GroupedData:
    """The same with the expressions in columns of their own."""
    window = F.window("at", "10 seconds")
    frame = frame.withColumns({"window": window, "b": F.col("s.b"), "l": F.lower("k")})
    return frame.groupBy("window", "b", "id", "l")


@pytest.mark.parametrize("operator", [rows_of, frames_of, function_of])
def test_keys_and_rows_are_those_of_sparks_own_operator(
    world: World, operator: Callable[[GroupedData], DataFrame]
) -> None:
    given = Input(world.root / "timed", "k string, id bigint, at timestamp, s struct<b: string>")
    for second, key in ((1, "A"), (11, "a"), (2, "b")):
        at = f"2024-01-01T00:00:{second:02d}Z"
        given.add([{"k": name, "id": 7, "at": at, "s": {"b": "x"}} for name in (key, "B", "a")])

    def run(name: str, grouping: Callable[[DataFrame], GroupedData]) -> list[Any]:
        found = Collected()
        frame = given.stream(world.spark)
        if name == "ours":
            frame = frame.withWatermark("at", "1 hour")
        writer = operator(grouping(frame)).writeStream.foreachBatch(found)
        writer = writer.option("checkpointLocation", str(world.root / name))
        finish(writer.trigger(availableNow=True).start())
        return found.filled()

    with (
        setting(world.spark, "spark.sql.streaming.stateStore.providerClass", PROVIDER),
        setting(world.spark, "spark.sql.shuffle.partitions", "2"),
    ):
        sparks = run("sparks", as_columns)
        with statebackend.install(world.spark, local_dir=str(world.local)):
            ours = run("ours", grouped)
    assert len(ours) == 3
    assert [[(key, n) for key, _, n in rows] for rows in ours] == [
        [(key, n) for key, _, n in rows] for rows in sparks
    ]
    assert {columns for rows in ours for _, columns, _ in rows} == {"['at', 'id', 'k', 's']"}


def test_the_explicit_api_takes_them_too_and_refuses_what_is_no_key(world: World) -> None:
    world.input.add_keys("a", "A", "b")
    backend = world.backend()
    frame = world.input.stream(world.spark)
    made = backend.transform_with_state(
        frame.groupBy(F.lower("k").alias("K")), Ledger(), LEDGER_OUTPUT, uid="ledger"
    )  # to Spark K is k, too
    world.run(backend, made)
    assert sorted(len(row["ids"]) for row in world.sink.rows()) == [1, 2]
    assert backend.lineages()["ledger"].last_epoch == 0
    timed = world.spark.readStream.format("rate").load().withWatermark("timestamp", "1 hour")
    windowed = timed.groupBy(F.window("timestamp", "1 minute"))
    backend.transform_with_state(windowed, ByRows(), OUTPUT, timeMode="EventTime", uid="windowed")
    (operator,) = [
        one.operator for one in backend._builder.newest() if one.operator.uid != "ledger"
    ]
    assert operator.time.event_position == 0, "the window is no event time"
    assert operator.time.delay_ms == 3_600_000
    for wrong in (frame.groupBy(), frame.rollup("k")):
        with pytest.raises(SchemaError):
            backend.transform_with_state(wrong, Ledger(), LEDGER_OUTPUT, uid="wrong")
