"""``backend.aggregate`` says what Spark's own streaming aggregation says, batch by batch."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

from statebackend.errors import SchemaError, SettingError
from statebackend.operators.aggregate.windows import session, sliding, tumbling
from statebackend.spark.frames.aggregate_arguments import window_of
from tests.spark.local.world import BOUND_S, Rows, Sink, finish

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

    from tests.spark.local.world import World

SCHEMA = "k string, n int, x double, d decimal(10,2), at timestamp"
BATCHES = 4
TOTALS = {
    "rows": "count",
    "n_rows": ("count", "n"),
    "n_sum": ("sum", "n"),
    "x_sum": ("sum", "x"),
    "d_sum": ("sum", "d"),
    "low": ("min", "x"),
    "high": ("max", "at"),
    "mean": ("mean", "n"),
    "spread": ("variance", "x"),
}


@pytest.fixture
def timed(make_world: Callable[..., World]) -> World:
    """Four batches of a minute each; some rows come two minutes late, and some have nulls."""
    world = make_world(schema=SCHEMA)
    draw = random.Random(5)
    for batch in range(BATCHES):
        world.input.add([_row(draw, batch) for _ in range(150)])
    return world


def _row(draw: random.Random, batch: int) -> dict[str, Any]:
    second = 60 * batch + draw.randrange(60) - (120 if draw.random() < 0.05 else 0)
    minute, second = divmod(600 + second, 60)
    return {
        "k": f"k{draw.randrange(12)}",
        "n": None if draw.random() < 0.2 else draw.randrange(-5, 100),
        "x": draw.choice([None, 0.25, -7.5, draw.random()]),
        "d": draw.choice([None, "1.25", "-3.50"]),
        "at": f"2026-03-01T00:{minute:02d}:{second:02d}Z",
    }


def spark_says(world: World, frame: DataFrame, mode: str, name: str) -> dict[int, Rows]:
    """What Spark's own operator gives, by batch."""
    sink = Sink(world.root / f"spark-{name}")
    writer = frame.writeStream.outputMode(mode).option(
        "checkpointLocation", str(world.root / f"spark-cp-{name}")
    )
    finish(writer.foreachBatch(_texts(sink)).trigger(availableNow=True).start())
    return sink.batches()


def _texts(sink: Sink) -> Any:
    def keep(frame: DataFrame, batch: int) -> None:
        sink.folder.joinpath(str(batch)).write_text(
            json.dumps(
                [
                    {name: _shown(value) for name, value in row.asDict().items()}
                    for row in frame.collect()
                ]
            )
        )

    return keep


def _shown(value: Any) -> Any:
    return round(value, 9) if isinstance(value, float) else None if value is None else str(value)


def ordered(rows: Rows) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def test_totals_are_those_of_group_by(timed: World) -> None:
    stream = timed.input.stream(timed.spark)
    made = stream.groupBy("k").agg(
        F.count("*").alias("rows"),
        F.count("n").alias("n_rows"),
        F.sum("n").alias("n_sum"),
        F.sum("x").alias("x_sum"),
        F.sum("d").alias("d_sum"),
        F.min("x").alias("low"),
        F.max("at").alias("high"),
        F.mean("n").alias("mean"),
        F.variance("x").alias("spread"),
    )
    wanted = spark_says(timed, made, "update", "totals")

    backend = timed.backend()
    frame = backend.aggregate(
        timed.input.stream(timed.spark), keys="k", aggregations=TOTALS, uid="totals"
    )
    assert frame.schema == made.schema or frame.schema.names == made.schema.names
    timed.run(backend, frame, _texts(timed.sink))
    found = timed.sink.batches()
    assert sorted(found) == sorted(wanted) == list(range(BATCHES))
    for batch in wanted:
        assert ordered(found[batch]) == ordered(wanted[batch]), batch


@pytest.mark.parametrize("emit", ["updates", "closed"])
@pytest.mark.parametrize("kind", ["tumbling", "sliding", "session"])
def test_windows_are_those_of_spark(timed: World, kind: str, emit: str) -> None:
    if (kind, emit) == ("session", "updates"):
        pytest.skip("Spark refuses update mode for session windows")
    windows = {
        "tumbling": (tumbling("20 seconds"), F.window("at", "20 seconds")),
        "sliding": (
            sliding("30 seconds", "10 seconds"),
            F.window("at", "30 seconds", "10 seconds"),
        ),
        "session": (session("3 seconds"), F.session_window("at", "3 seconds")),
    }
    ours, theirs = windows[kind]
    made = (
        timed.input.stream(timed.spark)
        .withWatermark("at", "5 seconds")
        .groupBy("k", theirs.alias("w"))
        .agg(F.count("*").alias("rows"), F.sum("x").alias("x_sum"))
        .select(
            "k",
            F.col("w.start").alias("window_start"),
            F.col("w.end").alias("window_end"),
            "rows",
            "x_sum",
        )
    )
    wanted = spark_says(timed, made, "append" if emit == "closed" else "update", kind)

    backend, stream = timed.backend(), timed.input.stream(timed.spark)
    assert window_of(theirs, None) == (ours, "at")
    if emit == "closed":  # in Spark's words
        frame = backend.aggregate(
            stream.withWatermark("at", "5 seconds").groupBy("k"),
            rows="count",
            x_sum=("sum", "x"),
            window=theirs,
            outputMode="Append",
        )
    else:
        frame = backend.aggregate(
            stream,
            keys="k",
            aggregations={"rows": "count", "x_sum": ("sum", "x")},
            uid="windows",
            window=ours,
            event_time="at",
            watermark_delay="5 seconds",
        )
    assert frame.columns == made.columns
    timed.run(backend, frame, _texts(timed.sink))
    found = timed.sink.batches()
    for batch in range(max([*found, *wanted]) + 1):
        assert ordered(found.get(batch, [])) == ordered(wanted.get(batch, [])), batch
    assert sum(map(len, found.values())) > 20


def test_a_restart_in_the_middle_changes_nothing(timed: World) -> None:
    def run(batches: int) -> None:
        backend = timed.backend()
        frame = backend.aggregate(
            timed.input.stream(timed.spark),
            keys="k",
            aggregations={"rows": "count", "people": ("count_distinct", "n")},
            uid="totals",
        )
        query = backend.start(timed.writer(frame, _texts(timed.sink)))
        assert query.awaitTermination(BOUND_S)
        assert backend.epoch == batches - 1
        backend.close()

    run(BATCHES)
    timed.forget_local()
    draw = random.Random(6)
    timed.input.add([_row(draw, BATCHES) for _ in range(100)])
    run(BATCHES + 1)
    last: dict[str, Any] = {}
    for rows in timed.sink.batches().values():
        last |= {row["k"]: (row["rows"], row["people"]) for row in rows}
    truth: dict[str, list[Any]] = {}
    for row in timed.input.rows:
        truth.setdefault(row["k"], []).append(row["n"])
    assert last == {
        key: (str(len(values)), str(len({v for v in values if v is not None})))
        for key, values in truth.items()
    }


def test_what_is_wrong_with_an_aggregation_is_said_at_the_call(timed: World) -> None:
    backend, stream = timed.backend(), timed.input.stream(timed.spark)
    with pytest.raises(SchemaError, match="nothing_like_it"):
        backend.aggregate(stream, keys="k", aggregations={"s": ("sum", "nothing_like_it")}, uid="a")
    with pytest.raises((SchemaError, SettingError), match="median"):
        backend.aggregate(stream, keys="k", aggregations={"s": ("median", "x")}, uid="a")
    for wrong, given in (
        ("The window is Column<'lower", {"window": F.lower("k")}),
        (
            "of 'at', and event_time= is 'n'",
            {"window": F.window("at", "1 hour"), "event_time": "n"},
        ),
        ("emit= and outputMode= are one", {"emit": "updates", "outputMode": "update"}),
        ("mode of the aggregation is 'complete'", {"outputMode": "complete"}),
    ):
        with pytest.raises(SettingError, match=wrong):
            backend.aggregate(stream.groupBy("k"), n="count", **given)
    with pytest.raises(SettingError, match="event_time"):
        backend.aggregate(
            stream, keys="k", aggregations={"n": "count"}, uid="a", window=tumbling("1 minute")
        )
