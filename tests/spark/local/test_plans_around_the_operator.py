"""What stands before and after an operator in the query's plan does not change what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

from statebackend.errors import UnsupportedQueryError
from tests.spark.local.processors import LEDGER_OUTPUT, Ledger
from tests.spark.local.world import (
    check_ledger_output,
    checkpoints,
    durable_state,
    finish,
    setting,
    sources,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

    from statebackend import StateBackend
    from tests.spark.local.world import World


def test_an_operator_may_stand_after_a_union(world: World) -> None:
    world.input.add_batches(3)
    df = world.input.stream(world.spark)
    backend = world.backend(parallelism=3)
    even = df.where("id % 2 = 0")
    odd = world.input.stream(world.spark).where("id % 2 = 1")
    world.run(backend, world.ledger(backend, even.union(odd)))
    world.check(backend)


@pytest.mark.parametrize(
    "after",
    [
        lambda frame: frame.coalesce(1),
        lambda frame: frame.repartition(3, "n"),
    ],
    ids=["coalesce", "repartition"],
)
def test_partitions_may_change_after_the_operator(
    world: World, after: Callable[[DataFrame], DataFrame]
) -> None:
    world.input.add_batches(2)
    backend = world.backend(parallelism=3)
    world.run(backend, after(world.ledger(backend)))
    world.check(backend)
    assert checkpoints(backend) == [("ledger", 0), ("ledger", 1)]


@pytest.mark.parametrize("partitions", [0, 1])
def test_an_operator_that_is_evaluated_twice_in_one_query_counts_once(
    world: World, partitions: int
) -> None:
    world.input.add_batches(3)
    backend = world.backend(parallelism=2)
    frame = world.ledger(backend)
    both = frame.withColumn("side", F.lit(0)).union(frame.withColumn("side", F.lit(1)))
    world.run(backend, both.coalesce(1) if partitions else both)
    batches = world.sink.batches()
    for side in (0, 1):
        rows = {n: [r for r in rows if r["side"] == side] for n, rows in batches.items()}
        check_ledger_output(rows, world.input.ids())
    state = durable_state(backend, "ledger")["acc"]
    assert state == {(k,): (len(v), sum(v)) for k, v in world.input.ids().items()}
    assert checkpoints(backend) == [("ledger", 0), ("ledger", 1), ("ledger", 2)]


def _compilations(world: World) -> int:
    jvm: Any = world.spark._jvm
    metrics = jvm.org.apache.spark.metrics.source.CodegenMetrics
    return int(metrics.METRIC_COMPILATION_TIME().getCount())


def test_later_batches_run_the_code_that_earlier_ones_compiled(world: World) -> None:
    batches = 8
    world.input.add_batches(3)
    backend = world.backend()
    world.run(backend, world.ledger(backend))
    before = _compilations(world)
    world.input.add_batches(batches)
    backend = world.backend()
    world.run(backend, world.ledger(backend))
    world.check(backend)
    # A restart may compile a little of its own; a plan that differs by batch would each time.
    assert _compilations(world) - before < batches


def _ids_of(rows: DataFrame) -> DataFrame:
    """A ledger's output as another ledger's input: one row per id, all under one key."""
    return rows.select(
        F.concat(F.lit("all-"), F.col("k") == "k1").alias("k"), F.explode("ids")
    ).select("k", F.col("col").alias("id"))


def _second_truth(world: World) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in world.input.rows:
        found.setdefault("all-" + str(row["k"] == "k1").lower(), []).append(row["id"])
    return found


def test_operators_may_follow_one_another(world: World) -> None:
    world.input.add_batches(2)
    truth = None
    for _ in range(2):
        backend = world.backend(parallelism=2)
        first = world.ledger(backend, uid="first")
        world.run(backend, world.ledger(backend, _ids_of(first), uid="second"))
        truth = _second_truth(world)
        world.check(backend, uid="second", keyed=truth)
        state = durable_state(backend, "first")["acc"]
        assert state == {(k,): (len(v), sum(v)) for k, v in world.input.ids().items()}
        world.input.add_batches(1)
    assert len(sources(backend)) == 4
    assert sorted(checkpoints(backend)) == [(u, n) for u in ("first", "second") for n in range(3)]


def test_operators_may_stand_side_by_side(world: World) -> None:
    world.input.add_batches(3)
    backend = world.backend(parallelism=2)
    df = world.input.stream(world.spark)
    left = world.ledger(backend, df, uid="left").withColumn("side", F.lit("left"))
    right = world.ledger(backend, df.withColumn("k", F.lit("x")), uid="right")
    world.run(backend, left.union(right.withColumn("side", F.lit("right"))))
    truths = {"left": world.input.ids(), "right": {"x": [r["id"] for r in world.input.rows]}}
    for side, truth in truths.items():
        rows = {
            n: [r for r in rows if r["side"] == side] for n, rows in world.sink.batches().items()
        }
        check_ledger_output(rows, truth)
        state = durable_state(backend, side)["acc"]
        assert state == {(k,): (len(v), sum(v)) for k, v in truth.items()}
    assert sorted(checkpoints(backend)) == [(u, n) for u in ("left", "right") for n in range(3)]


def _two(world: World, backend: StateBackend, second: str | None) -> DataFrame:
    """A ledger, and another one beside it; without it, what keeps Spark's number of sources."""
    df = world.input.stream(world.spark)
    if second is None:
        return world.ledger(backend, df.union(df.where("false"))).withColumn("side", F.lit("one"))
    one = world.ledger(backend, df).withColumn("side", F.lit("one"))
    return one.union(world.ledger(backend, df, uid=second).withColumn("side", F.lit(second)))


def test_an_operator_that_is_added_later_begins_with_the_next_batch(world: World) -> None:
    world.input.add_batches(2)
    backend = world.backend()
    world.run(backend, _two(world, backend, None))
    before = len(world.input.rows)
    world.input.add_batches(2)
    backend = world.backend()
    world.run(backend, _two(world, backend, "two"))
    state = durable_state(backend, "ledger")["acc"]
    assert state == {(k,): (len(v), sum(v)) for k, v in world.input.ids().items()}
    late: dict[str, list[int]] = {}
    for row in world.input.rows[before:]:
        late.setdefault(row["k"], []).append(row["id"])
    state = durable_state(backend, "two")["acc"]
    assert state == {(k,): (len(v), sum(v)) for k, v in late.items()}


def test_an_operator_that_the_query_does_not_use_is_none_of_its_job(world: World) -> None:
    world.input.add_batches(2)
    backend = world.backend()
    frame = world.ledger(backend)
    world.ledger(backend, uid="unused")
    world.run(backend, frame)
    world.check(backend)
    assert backend.lineages().keys() == {"ledger"}


def test_frames_of_two_backends_do_not_make_one_query(world: World) -> None:
    world.input.add_batches(1)
    one, two = world.backend(), world.backend(job="two")
    with pytest.raises(UnsupportedQueryError, match="operators of several backends"):
        world.start(one, world.ledger(one).union(world.ledger(two)))
    assert world.committed() == []
    assert checkpoints(two) == []


def test_two_queries_of_one_driver_run_two_jobs(make_world: Callable[..., World]) -> None:
    worlds = [make_world("one"), make_world("two")]
    worlds[1].store = worlds[0].store  # two jobs below one uri, and in one local directory
    worlds[1].local = worlds[0].local
    started = []
    for number, world in enumerate(worlds):
        world.input.add_batches(2 + number)
        backend = world.backend(job=f"job {number}/ä", parallelism=2)
        started.append((world, backend, world.start(backend, world.ledger(backend))))
    for world, backend, query in started:
        finish(query)
        world.check(backend)
    assert {b.lineages()["ledger"].job_id for _, b, _ in started} != {None}
    ids = [b.lineages()["ledger"].job_id for _, b, _ in started]
    assert ids[0] != ids[1]


def test_sparks_own_deduplication_may_stand_before_the_operator(world: World) -> None:
    for batch in range(3):
        first = 5 * batch
        world.input.add([{"k": f"k{i % 3}", "id": i} for i in range(max(0, first - 3), first + 5)])
    df = world.input.stream(world.spark).dropDuplicates(["k", "id"])
    backend = world.backend(parallelism=3)
    world.run(backend, world.ledger(backend, df))
    distinct = {k: sorted(set(ids)) for k, ids in world.input.ids().items()}
    world.check(backend, keyed=distinct)


def test_a_batch_without_data_that_spark_runs_by_itself_is_an_epoch(
    make_world: Callable[..., World],
) -> None:
    world = make_world(schema="k string, id bigint, at timestamp")
    for batch in range(3):
        rows = [
            {"k": f"k{i % 3}", "id": batch * 10 + i, "at": f"2026-01-01 0{batch}:00:00"}
            for i in range(6)
        ]
        world.input.add(rows)
    df = world.input.stream(world.spark).withWatermark("at", "1 minute")
    df = df.dropDuplicatesWithinWatermark(["k", "id"])
    backend = world.backend(parallelism=2)
    world.run(backend, world.ledger(backend, df))
    world.check(backend)
    assert backend.lineages()["ledger"].last_epoch > 2, "Spark ran a batch for the watermark"


def test_a_count_of_sparks_own_may_stand_before_the_operator(world: World) -> None:
    world.input.add_batches(3)
    counts = world.input.stream(world.spark).groupBy("k").count()
    backend = world.backend(parallelism=2)
    frame = backend.transform_with_state(
        counts.select("k", F.col("count").alias("id")),
        keys="k",
        processor=Ledger(),
        output_schema=LEDGER_OUTPUT,
        uid="ledger",
    )
    finish(backend.start(world.writer(frame).outputMode("update")))
    newest = {row["k"]: row["ids"] for row in world.sink.rows()}
    assert newest == {k: [len(ids)] for k, ids in world.input.ids().items()}
    last = {(row["k"],): (row["n"], row["total"]) for row in world.sink.rows()}
    assert durable_state(backend, "ledger")["acc"] == last


def test_a_limit_in_the_stream_is_refused_at_the_start(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend()
    with pytest.raises(UnsupportedQueryError, match=r"limit\(\) stands behind"):
        world.start(backend, world.ledger(backend).where("n > 0").limit(3))
    with pytest.raises(UnsupportedQueryError, match="limit"), backend.starting():
        world.writer(
            world.ledger(backend).limit(3), checkpointLocation=str(world.root / "c")
        ).start()
    assert not world.location.exists()
    world.run(backend, world.ledger(backend, world.input.stream(world.spark).offset(0)))
    world.check(backend)


def test_a_complete_output_is_refused_where_nothing_is_aggregated(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend()
    with pytest.raises(UnsupportedQueryError, match="output mode is complete"):
        backend.start(world.writer(world.ledger(backend)).outputMode("complete"))
    counted = world.ledger(backend).groupBy("k").count().orderBy("k").limit(100)
    finish(backend.start(world.writer(counted).outputMode("complete")))
    assert {row["k"] for row in world.sink.rows()} == set(world.input.ids())


# --- the anchor ----------------------------------------------------------------------------------


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("how", ["close", "clearCache"])
def test_a_query_goes_on_without_the_cached_anchor(
    world: World, how: str, parallelism: int
) -> None:
    def uncaching(frame: DataFrame, batch: int) -> None:
        world.sink(frame, batch)
        if how == "clearCache":
            world.spark.catalog.clearCache()
        else:
            backend.close()

    world.input.add_batches(3, keys=30, rows=40)
    with setting(world.spark, "spark.sql.shuffle.partitions", "7"):
        backend = world.backend(parallelism=parallelism)
        frame = backend.transform_with_state(
            world.input.stream(world.spark),
            keys="k",
            processor=Ledger(),
            output_schema=LEDGER_OUTPUT,
            uid="ledger",
            time_mode="processing",
        )
        world.run(backend, frame, uncaching)
    world.check(backend)
