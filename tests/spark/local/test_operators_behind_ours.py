"""Operators behind ours, of our own or Spark's, and event time that goes on behind them."""

from __future__ import annotations

import datetime
import sys
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupStateTimeout

from statebackend import KeyedProcessor, tumbling
from statebackend.errors import SchemaError, SettingError, UnsupportedQueryError
from tests.spark.local.world import setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

    from statebackend import ProcessorContext, StateBackend
    from tests.spark.local.world import World
from tests.spark.local.windows import *  # noqa: F403
from tests.spark.local.windows import (
    BASE_S,
    COUNTS,
    SCHEMA,
    WINDOW_S,
    Files,
    Passing,
    Sorted,
    Windows,
    _end,
    _files,
    _fill,
    _given,
    _on_time,
    _passing,
    _watermarks,
    _windows,
)

register_pickle_by_value(sys.modules[__name__])  # workers need not find this module


# --- Spark's own operators after ours -----------------------------------------------------------


def test_reducing_and_aggregating_state_count_each_row_once_over_restarts(world: World) -> None:
    files = _files(4)
    for part in (files[:2], files[2:]):
        _fill(world.input, part)
        backend = world.backend()
        world.run(backend, _passing(world, backend).drop("at"))
    ids: dict[str, list[int]] = defaultdict(list)
    for row in world.sink.rows():
        own = ids[row["k"]]
        own.append(row["id"])
        assert row["largest"] == max(own)
        assert row["mean"] == sum(own) / len(own)
    truth: dict[str, list[int]] = defaultdict(list)
    for rows in files:
        for k, number, _ in rows:
            truth[k].append(number)
    assert {k: sorted(own) for k, own in ids.items()} == {
        k: sorted(own) for k, own in truth.items()
    }


@pytest.mark.parametrize("partitions", ["2", "5"])
def test_sparks_windows_may_stand_after_ours(world: World, partitions: str) -> None:
    files = _files(5)
    _fill(world.input, files)
    with setting(world.spark, "spark.sql.shuffle.partitions", partitions):
        backend = world.backend()
        marked = _passing(world, backend).withWatermark("at", "3 seconds")
        counts = marked.groupBy("k", F.window("at", f"{WINDOW_S} seconds")).count()
        until_s = F.unix_timestamp(F.col("window.end")).alias("until_s")
        world.run(backend, counts.select("k", until_s, F.col("count").alias("n")))
    marks = _watermarks([(files, 3)])
    assert _given(world) == _windows(files, marks, by_sparks_rule=True)
    assert _windows(files, marks) != _windows(files, marks, by_sparks_rule=True)


def test_ours_with_timers_and_sparks_windows_behind_it_lose_no_row(world: World) -> None:
    files = _files(5)
    _fill(world.input, files)
    backend = world.backend()
    held = backend.process(
        world.input.stream(world.spark),
        keys="k",
        processor=Sorted(),
        output_schema=SCHEMA,
        uid="sorted",
        time_mode="event",
        event_time="at",
        watermark_delay="3 seconds",
    )
    marked = held.withWatermark("at", "0 seconds")
    counts = marked.groupBy("k", F.window("at", f"{WINDOW_S} seconds")).count()
    until_s = F.unix_timestamp(F.col("window.end")).alias("until_s")
    world.run(backend, counts.select("k", until_s, F.col("count").alias("n")))
    marks = _watermarks([(files, 3)])
    # Spark's watermark is the last event time that ours let go: at most our own watermark.
    kept = [row[2] for rows in _on_time(files, marks) for row in rows if row[2] <= marks[-1]]
    wanted = Counter(w for w in _windows(files, marks) if w[1] - BASE_S <= max(kept))
    assert _given(world) == wanted
    assert wanted


# --- event time that goes on behind an operator ---------------------------------------------------


class Closing(Windows):
    """The same, and each window's end is its event time."""

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Iterator[Any]:
        for k, until_s, n in super().on_timer(key, at_ms, ctx):
            yield Row(k=k, n=n, at=datetime.datetime.fromtimestamp(until_s, datetime.UTC))


class Rushing(Closing):
    """Gives its windows the time of their beginning, which the watermark has passed long ago."""

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Iterator[Any]:
        for row in super().on_timer(key, at_ms, ctx):
            yield (*row[:2], row.at - datetime.timedelta(seconds=3 * WINDOW_S))


MINUTE_S = 3 * WINDOW_S


class Summing(KeyedProcessor):
    """Sums of the counts by key and longer window, given out by the watermark."""

    def open(self, ctx: ProcessorContext) -> None:
        self.sums = ctx.map_state("sums", "until_s bigint", "n bigint")

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        for row in rows:
            until_s = _longer(int(row.at.timestamp()) - 1)
            (n,) = self.sums.get_value((until_s,)) or (0,)
            self.sums.update_value((until_s,), (n + row.n,))
            ctx.timers.register(until_s * 1000)

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Iterator[Any]:
        (n,) = self.sums.get_value((at_ms // 1000,))
        self.sums.remove_key((at_ms // 1000,))
        yield (*key, at_ms // 1000, n)


def _longer(second: int) -> int:
    return second // MINUTE_S * MINUTE_S + MINUTE_S


def _sums(files: Files, marks: list[int]) -> Counter[tuple[str, int, int]]:
    """(key, end of the longer window, rows) of those that the last watermark has closed."""
    late, n = [-BASE_S, *marks], Counter[tuple[str, int]]()
    for batch, rows in enumerate(files):
        for k, _, second in rows:
            if second > late[batch]:
                n[k, _longer(_end(second) - 1)] += 1
    return Counter({(k, BASE_S + end, c): 1 for (k, end), c in n.items() if end <= marks[-1]})


def _closing(world: World, backend: StateBackend, way: str, processor: Any = None) -> DataFrame:
    df = world.input.stream(world.spark)
    given: dict[str, Any] = {"event_time": "at", "watermark_delay": "3 seconds"}
    if way == "withWatermark":
        df, given = df.withWatermark("at", "3 seconds"), {}
    return backend.process(
        df,
        keys="k",
        processor=processor or Closing(),
        output_schema="k string, n bigint, at timestamp",
        uid="closing",
        time_mode="event",
        eventTimeColumnName="at",
        **given,
    )


@pytest.mark.parametrize("way", ["withWatermark", "arguments"])
@pytest.mark.parametrize("behind", ["ours", "Spark's"])
def test_event_time_goes_on_behind_an_operator_by_a_column_of_its_output(
    world: World, way: str, behind: str
) -> None:
    files = _files(14)
    for part in (files[:9], files[9:]):  # two starts
        _fill(world.input, part)
        backend = world.backend()
        closed = _closing(world, backend, way)
        if behind == "ours":
            summed = backend.process(
                closed,
                keys="k",
                processor=Summing(),
                output_schema=COUNTS,
                uid="summing",
                time_mode="event",
            )
        else:
            sums = closed.groupBy("k", F.window("at", f"{MINUTE_S} seconds", None, "1 second"))
            until_s = F.unix_timestamp(F.col("window.end")).alias("until_s")
            summed = sums.agg(F.sum("n").alias("n")).select("k", until_s - F.lit(1), "n")
            summed = summed.toDF("k", "until_s", "n")
        world.run(backend, summed)
    marks = _watermarks([(files[:9], 3)])
    files.insert(9, [])
    marks = [*marks, *_watermarks([(files, 3)])[10:]]
    wanted = _sums(files, marks)
    if behind != "ours":  # its windows end a second later
        wanted = Counter({w: n for w, n in wanted.items() if w[1] - BASE_S + 1 <= marks[-1]})
    assert _given(world) == wanted
    assert max(n for _, _, n in wanted) > 2
    assert len(wanted) > 8


def test_output_that_the_watermark_has_passed_is_refused_where_event_time_goes_on(
    world: World,
) -> None:
    _fill(world.input, _files(5))
    backend = world.backend()
    text = world.fail(backend, _closing(world, backend, "arguments", Rushing()))
    assert "SB1021" in text
    assert "operators behind it would drop the row" in text


def test_a_watermark_on_top_of_another_is_refused_with_the_way_out(world: World) -> None:
    backend = world.backend()
    marked = _closing(world, backend, "withWatermark").withWatermark("at", "0 seconds")
    counts = marked.groupBy("k", F.window("at", "10 seconds")).count()
    with pytest.raises(UnsupportedQueryError, match="eventTimeColumnName"):
        world.start(backend, counts)


def test_a_watermark_may_be_defined_again_where_spark_gives_none_on(world: World) -> None:
    def passes(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
        yield from frames

    files = _files(4)
    _fill(world.input, files)
    groups = world.input.stream(world.spark).withWatermark("at", "3 seconds").groupBy("k")
    schema, timeout = "k string, id bigint, at timestamp", GroupStateTimeout.EventTimeTimeout
    passed = groups.applyInPandasWithState(passes, schema, "n bigint", "append", timeout)
    backend = world.backend()
    out = backend.process(
        passed.withWatermark("at", "3 seconds"),
        keys="k",
        processor=Passing(),
        output_schema=f"{SCHEMA}, largest bigint, mean double",
        uid="passing",
    )
    world.run(backend, out.drop("at"))
    late = [-BASE_S, *_watermarks([(files, 3)])]  # Spark's operator drops these
    wanted = {i for n, rows in enumerate(files) for _, i, second in rows if second > late[n]}
    assert {row["id"] for row in world.sink.rows()} == wanted
    assert len(wanted) > 30


def test_behind_an_aggregation_the_watermark_is_defined_on_the_output_alone(world: World) -> None:
    files = _files(4, step_s=60)
    _fill(world.input, files)

    def hours(df: DataFrame, backend: StateBackend, **given: Any) -> DataFrame:
        sums = backend.aggregate(
            df,
            keys="k",
            aggregations={"n": "count"},
            window=tumbling("10 seconds"),
            emit="closed",
            uid="sums",
            **given,
        )
        marked = sums.withWatermark("window_end", "0 seconds")
        return (
            marked.groupBy(F.window("window_end", "1 minute"))
            .agg(F.sum("n").alias("n"))
            .select("n")
        )

    df, backend = world.input.stream(world.spark), world.backend()
    twice = hours(df.withWatermark("at", "3 seconds"), backend)
    with pytest.raises(UnsupportedQueryError, match="connect_broadcast\\(\\) keep it") as caught:
        world.start(backend, twice)
    assert "give them event_time= and watermark_delay= instead" in caught.value.todo
    backend = world.backend()
    world.run(backend, hours(df, backend, event_time="at", watermark_delay="3 seconds"))
    assert sum(row["n"] for row in world.sink.rows()) > 8


def test_event_time_that_cannot_go_on_is_refused_at_the_call(world: World) -> None:
    backend = world.backend()
    df = world.input.stream(world.spark)

    def frame(df: DataFrame, uid: str, **given: Any) -> DataFrame:
        return backend.process(
            df,
            keys="k",
            processor=Closing(),
            output_schema="k string, n bigint, at timestamp",
            uid=uid,
            **{"eventTimeColumnName": "at", "time_mode": "event", **given},
        )

    with pytest.raises(SettingError, match="no event time"):
        frame(df, "a")
    with pytest.raises(SettingError, match="time_mode='event'"):
        frame(df, "a", time_mode="processing")
    marked = df.withWatermark("at", "3 seconds")
    with pytest.raises(SchemaError, match="0 columns named 'moment'"):
        frame(marked, "a", eventTimeColumnName="moment")
    with pytest.raises(SchemaError, match="'n' is bigint"):
        frame(marked, "a", eventTimeColumnName="n")
    with pytest.raises(UnsupportedQueryError, match="last step before the operator"):
        frame(marked.where("id > 5"), "a")
    assert frame(frame(marked, "b"), "c").schema["at"].metadata["spark.watermarkDelayMs"] == 3000
