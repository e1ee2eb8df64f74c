"""Timers, watermarks, late rows and TTL are those of Spark's own engine."""

from __future__ import annotations

import datetime
import sys
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tests.spark.local.conformance import Both, Case
from tests.spark.local.conforming_time import Clock, Delayed, Timers, TimersInFrames
from tests.spark.local.world import Input, failure, setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from tests.spark.local.world import Rows, World

register_pickle_by_value(sys.modules[__name__])  # workers need not find this module

EVENTS = "k string, id bigint, at timestamp, ops string"
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture
def both(world: World) -> Both:
    return Both(world)


def event(key: str, number: int, at_ms: float | None, ops: str = "") -> dict[str, Any]:
    """A row with an event time in milliseconds, which may have a fraction."""
    at = None if at_ms is None else _EPOCH + datetime.timedelta(milliseconds=at_ms)
    return {"k": key, "id": number, "at": at and at.isoformat(), "ops": ops}


TIMED: list[Rows] = [
    # Nothing was seen: the watermark is 0, and timers up to it are due at once.
    [
        event("a", 1, 500, "+1000 +1500 +1500 +2000 +2500 +3000 +3001 +9000 +8000 -8000 -7"),
        event("b", 2, 600, "+0 -5 +-5 +1000"),
        event("n", 3, None),
    ],
    # 600: timers of the past are taken, and fire in this batch.
    [event("c", 4, 3000, "+100 +599 +600 +601")],
    # 3000; rows are late up to 600.
    [event("d", 5, 3500), event("a", 6, 600), event("a", 7, 601), event("c", 8, 599)],
    # 3500; rows are late up to 3000, to the microsecond. A key all of whose rows are late is not
    # called.
    [
        event("e", 9, 3000),
        event("e", 10, 3000.001),
        event("late", 11, 2999.999),
        event("n", 12, None),
        event("e", 13, 10_000),
    ],
    # 10000: what is left fires.
    [event("z", 14, 10_001, "+10000 +10001")],
]


def test_event_time_is_as_in_spark(both: Both) -> None:
    both.run(Case(EVENTS, Timers(), mode="event", delay="0 seconds"), TIMED)
    both.agree_but_for_empty_batches()
    assert both.dropped_by_spark == 4
    assert sum(epoch.late_rows for epoch in both.backend.progress().epochs) == 4


def test_a_timers_key_looks_as_in_spark(both: Both) -> None:
    key = {
        "t": "2026-01-01T23:00:00.123456Z",
        "n": "2026-07-01T00:00:00",
        "s": {"x": 1, "t": "2026-01-01T23:00:00Z"},
        "c": 1.5,
        "b": "eA==",
        "o": -0.5,
    }
    types = "t timestamp, n timestamp_ntz, s struct<x: int, t: timestamp>, c decimal(5, 2)"
    schema = f"{EVENTS}, {types}, b binary, o double"
    case = Case(schema, Timers(), keys=("k", *key), mode="event", delay="0 seconds")
    with setting(both.spark, "spark.sql.session.timeZone", "Asia/Tokyo"):
        both.run(case, [[event("full", 1, 500, "+0") | key, event("empty", 2, 500, "+0")]])
    both.agree_but_for_empty_batches()


def test_two_operators_in_a_row_share_a_watermark_as_in_spark(both: Both) -> None:
    case = Case(EVENTS, Timers(), mode="event", delay="0 seconds", before=Delayed())
    batches: list[Rows] = [
        [event("a", 1, 1000, "+1999 +2000 +2001 +3500"), event("a", 2, 1500), event("b", 3, 1)],
        [event("b", 4, 3000, "+4000"), event("c", 5, 2000)],
        # The first operator gives a's rows out when the watermark has passed them.
        [event("c", 6, 999), event("c", 7, 4100)],
    ]
    both.run(case, batches)
    both.agree_but_for_empty_batches()


class DelayedFrames(Delayed):
    """The same for frames."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        whole = [row for frame in rows for row in frame.itertuples()]
        return super().handleInputRows(key, iter(whole), timerValues)

    def handleExpiredTimer(self, *args: Any, **given: Any) -> Iterator[Any]:
        import pandas as pd

        for row in super().handleExpiredTimer(*args, **given):
            yield pd.DataFrame([row.asDict()])


def by_two_seconds(df: DataFrame) -> DataFrame:
    counts = df.groupBy("k", F.window("at", "2 seconds")).agg(F.count("id"), F.sum("id"))
    return counts.withColumn("window", F.col("window.end").cast("string"))


# Half a minute: eight batches with windows behind, on Spark's own operator and on this one.
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    ("flavour", "processor"), [("rows", Delayed()), ("pandas", DelayedFrames())]
)
def test_sparks_windows_behind_an_operator_are_as_behind_sparks_own(
    both: Both, flavour: str, processor: Any, marked: bool
) -> None:
    case = Case(
        EVENTS,
        processor,
        output=EVENTS,
        flavour=flavour,
        mode="event",
        delay="1 second",
        marked=marked,
        behind=by_two_seconds,
    )
    batches: list[Rows] = [
        [event(k, 10 * n + i, 800 * n + 300 * i) for i, k in enumerate("aab")] for n in range(6)
    ]
    both.run(case, batches)
    both.run(case, [[event("a", 100, 9000), event("c", 101, 20)], [event("b", 102, 15_000)]])
    both.agree_but_for_empty_batches()
    assert sum(len(rows) for rows in both.ours.filled()) > 6


class GivenOut(StatefulProcessor):
    """Gives a row out with the event time that it names, in milliseconds."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.ops:
                moment = datetime.datetime.fromtimestamp(int(row.ops) / 1000, datetime.UTC)
                yield Row(k=key[0], id=row.id, at=moment, ops="")

    def close(self) -> None:
        pass


# In the third batch the watermark is 6000, and rows are late up to 3000.
@pytest.mark.parametrize(("at_ms", "taken"), [(5999, True), (3001, True), (3000, False)])
def test_output_is_too_old_to_go_on_where_it_is_in_spark(
    both: Both, at_ms: int, taken: bool
) -> None:
    case = Case(
        EVENTS, GivenOut(), output=EVENTS, mode="event", delay="0 seconds", behind=by_two_seconds
    )
    batches = [[event("a", 1, 3000)], [event("a", 2, 6000)], [event("a", 3, 9000, str(at_ms))]]
    if taken:
        both.run(case, batches)
        both.agree_but_for_empty_batches()
        return
    both.input = Input(both.world.root / "both", EVENTS)
    for rows in batches:
        both.input.add(rows)
    assert "EMITTING_ROWS_OLDER_THAN_WATERMARK" in failure(both._start_spark(case))
    assert "SB1021" in failure(both._start_ours(case))


def timers_of(spark: SparkSession) -> Any:
    rows = [("a", -1), ("a", 700), ("q", 800), ("q", 0)]
    return spark.createDataFrame(rows, "k string, at_ms bigint").groupBy("k")


def test_a_delayed_watermark_and_timers_survive_a_restart(both: Both) -> None:
    case = Case(
        EVENTS,
        TimersInFrames(),
        flavour="pandas",
        mode="event",
        delay="2 seconds",
        marked=True,
        initial=timers_of,
    )
    both.run(case, [[event("a", 1, 1999, "+1")], [event("b", 2, 5000, "+3000 +3001")]])
    # The watermark is 3000, and the batch without data at the end has used it.
    both.run(case, [[event("b", 3, 3000), event("a", 4, 3000.5)], [event("b", 5, 5001.9)]])
    both.agree_but_for_empty_batches()


# Some 20 s: with processing time Spark's own operator runs an empty batch with each trigger.
@pytest.mark.promise
def test_processing_time_timers_and_ttl_are_as_in_spark(both: Both) -> None:
    schema = "k string, id bigint"
    batches: list[Rows] = [
        [{"k": "a", "id": 1}, {"k": "b", "id": 1}],
        [{"k": "a", "id": 2}, {"k": "b", "id": 4}],
        [{"k": "a", "id": 3}, {"k": "c", "id": 5}],
    ]
    rows_out = 6 + 3 * 4
    both.run(Case(schema, Clock(), mode="processing", rows_out=rows_out), batches)
    both.agree_but_for_empty_batches()
