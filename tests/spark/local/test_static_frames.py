"""A static frame goes through a processor once, over empty state, as in Spark's own engine."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PythonException
from pyspark.sql import functions as F

from statebackend.errors import SchemaError, UnsupportedQueryError
from tests.spark.local.batched_processors import (
    Batched,
    BatchedInColumns,
    BatchedInFrames,
    BatchedOfOurs,
)
from tests.spark.local.conformance import PROVIDER
from tests.spark.local.world import setting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from statebackend import StateBackend
    from tests.spark.local.world import World

OUT = "k string, what string, n bigint"
MODES = {"none": "None", "processing": "ProcessingTime", "event": "EventTime"}
Told = list[tuple[Any, ...]]


def frame_of(world: World, rows: int = 40) -> DataFrame:
    """Rows of seven keys, one of them null, and of two columns."""
    made = [
        (None if i % 7 == 6 else f"k{i % 7}", i % 2, i, datetime.datetime(2026, 1, 1, 0, 0, i))
        for i in range(rows)
    ]
    return world.spark.createDataFrame(made, "k string, side int, id bigint, at timestamp")


def start_of(world: World) -> Any:
    """An initial state, with a key that no row has."""
    rows = [("k1", 0, 100), ("k1", 0, 200), ("k3", 1, 300), ("other", 1, 400)]
    return world.spark.createDataFrame(rows, "k string, side int, start bigint").groupBy(
        "k", "side"
    )


def sparks(
    world: World, frame: DataFrame, processor: Any, mode: str, initial: Any, flavour: str
) -> Told:
    grouped = frame.groupBy("k", "side")
    transform = grouped.transformWithState
    if flavour == "pandas":
        transform = grouped.transformWithStateInPandas
    with setting(world.spark, "spark.sql.streaming.stateStore.providerClass", PROVIDER):
        result = transform(processor, OUT, "append", MODES[mode], initial)
        return sorted(map(tuple, result.collect()), key=repr)


def ours(
    backend: StateBackend, frame: DataFrame, processor: Any, mode: str, initial: Any, flavour: str
) -> Told:
    result = backend.transform_with_state(
        frame,
        keys=["k", "side"],
        processor=processor,
        output_schema=OUT,
        uid="once",
        time_mode=mode,
        initial_state=initial,
        flavour=flavour,
    )
    assert not result.isStreaming
    return sorted(map(tuple, result.collect()), key=repr)


@pytest.mark.parametrize("flavour", ["rows", "pandas"])
@pytest.mark.parametrize("mode", ["none", "processing", "event"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_static_frame_gives_what_it_gives_in_spark(
    world: World, flavour: str, mode: str, begun: bool
) -> None:
    frame = frame_of(world)
    if mode == "event":
        frame = frame.withWatermark("at", "0 seconds")
    processor = (BatchedInFrames if flavour == "pandas" else Batched)(mode)
    initial = start_of(world) if begun else None
    wanted = sparks(world, frame, processor, mode, initial, flavour)
    assert {what.split()[0] for _, what, _ in wanted} >= {"rows"}
    assert (mode == "none") == (not [what for _, what, _ in wanted if what.startswith("timer")])
    assert ours(world.backend(), frame, processor, mode, initial, flavour) == wanted
    assert not world.store.exists(), "a static frame is in no job"


def test_it_runs_once_for_each_evaluation_over_empty_state(world: World) -> None:
    backend = world.backend(parallelism=None)
    frame = frame_of(world, 47).where("k is not null")
    result = backend.transform_with_state(
        frame, keys="k", processor=Batched("none"), output_schema=OUT, uid="once"
    )
    first = sorted(map(tuple, result.collect()), key=repr)
    assert first == sorted(map(tuple, result.collect()), key=repr)
    assert sum(n for _, _, n in first) == 41
    assert result.groupBy().sum("n").collect()[0][0] == 41
    again = backend.transform_with_state(
        result, keys="k", processor=Batched("none"), output_schema=OUT, uid="once more"
    )
    assert {n for _, _, n in again.collect()} == {1}
    nothing = backend.transform_with_state(
        frame.where("false"), keys="k", processor=Batched("none"), output_schema=OUT, uid="nothing"
    )
    assert nothing.collect() == []


def test_a_watermark_that_is_asked_for_makes_nothing_late(world: World) -> None:
    """As where ``withWatermark`` was called on the frame: there is none outside a stream."""
    frame = frame_of(world).where("k is not null")
    given = {"keys": "k", "processor": Batched("event"), "output_schema": OUT, "uid": "once"}
    found = world.backend().transform_with_state(
        frame, time_mode="event", event_time="at", watermark_delay="1 second", **given
    )
    rows = [row for row in found.collect() if row.what.startswith("rows")]
    assert sum(row.n for row in rows) == 35
    assert all(row.what.endswith(" -1") for row in rows)


def test_more_than_memory_is_to_hold_goes_to_disk(world: World) -> None:
    backend = world.backend(
        settings={"input_budget_bytes": 1 << 20, "overlay_budget_bytes": 1 << 20}
    )
    frame = world.spark.range(60_000).select(
        F.concat(F.lit("a long key indeed, of which there are many "), F.col("id") % 20_000).alias(
            "k"
        ),
        F.lit(0).alias("side"),
        "id",
    )
    found = ours(backend, frame, Batched("none"), "none", None, "rows")
    assert len(found) == 20_000
    assert {n for _, _, n in found} == {3}
    assert not list(world.local.rglob("*.arrow")), "nothing is left behind"


def test_processors_of_our_own_run_over_static_frames(world: World) -> None:
    backend = world.backend()
    frame = frame_of(world)
    wanted = {(row.k, row["count"]) for row in frame.groupBy("k").count().collect()}
    wanted = {(k, n) for k, n in wanted if k is not None}
    frame = frame.where("k is not null")
    rows = backend.process(
        frame, keys="k", processor=BatchedOfOurs(), output_schema=OUT, uid="rows"
    )
    assert {(k, n) for k, _, n in rows.collect()} == wanted
    columns = backend.transform_arrow(
        frame,
        keys="k",
        processor=BatchedInColumns(),
        output_schema="k string, n bigint",
        uid="columns",
    )
    assert {tuple(row) for row in columns.collect()} == wanted


def test_mistakes_are_said_where_the_frame_is_made(world: World) -> None:
    backend, frame = world.backend(), frame_of(world)
    with pytest.raises(UnsupportedQueryError, match="timers"):
        ours(backend, frame, Batched("event", early=True), "none", None, "rows")
    with pytest.raises(SchemaError, match="not a streaming frame"):
        backend.aggregate(frame, keys="k", aggregations={"n": "count"}, uid="n")
    with pytest.raises(PythonException, match="SB1004") as caught:
        backend.transform_with_state(
            frame, keys="k", processor=Batched("none"), output_schema=OUT, uid="null"
        ).collect()
    text = str(caught.value)
    assert "staticframes.py" not in text[: text.index("SB1004")], "the sentence comes first"
