"""Adaptive execution neither moves rows nor changes the join, as far as it can be turned up."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from statebackend.spark.frames.physical_plan import misplanned
from tests.spark.local.test_physical_plans import KINDS, check_plan, counts, explained, timed
from tests.spark.local.world import setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

    from tests.spark.local.world import World

__all__ = ["timed"]  # the fixture

# What adaptive execution does, as much of it as can be had.
ADAPTIVE = {
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes": "1g",
    "spark.sql.adaptive.autoBroadcastJoinThreshold": "1g",
    "spark.sql.adaptive.coalescePartitions.enabled": "true",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.sql.adaptive.forceApply": "true",
    "spark.sql.adaptive.forceOptimizeSkewedJoin": "true",
    "spark.sql.adaptive.localShuffleReader.enabled": "true",
    "spark.sql.adaptive.maxShuffledHashJoinLocalMapThreshold": "1g",
    "spark.sql.adaptive.nonEmptyPartitionRatioForBroadcastJoin": "1",
    "spark.sql.adaptive.skewJoin.enabled": "true",
    "spark.sql.adaptive.skewJoin.skewedPartitionFactor": "0.0",
    "spark.sql.adaptive.skewJoin.skewedPartitionThresholdInBytes": "1",
    "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning": "true",
}


@contextlib.contextmanager
def settings(spark: Any, wanted: dict[str, str]) -> Iterator[None]:
    """Settings of a session, for a while."""
    with contextlib.ExitStack() as stack:
        for name, value in wanted.items():
            stack.enter_context(setting(spark, name, value))
        yield


def test_every_kind_of_operator_keeps_its_partitions_with_adaptive_execution_on(
    timed: World,
) -> None:
    for parallelism in (1, 3):
        backend = timed.backend(parallelism=parallelism)
        with settings(timed.spark, ADAPTIVE):
            for name, make in KINDS.items():
                streams = [timed.input.stream(timed.spark) for _ in range(2)]
                lines = explained(make(backend, *streams))
                check_plan(lines, parallelism, 2 if "two" in name else 1)
                assert misplanned("\n".join(lines), parallelism) is None


def _skewed(world: World) -> dict[str, int]:
    """Batches most of whose rows are of one subtask; how many rows each key has in the last."""
    for _ in range(3):
        rows = [{"k": "k0" if i % 10 else f"k{i // 10}", "id": i} for i in range(200)]
        world.input.add(rows)
    return {k: sum(1 for row in rows if row["k"] == k) for k in {row["k"] for row in rows}}


@pytest.mark.parametrize("adaptive", [ADAPTIVE, {"spark.sql.adaptive.enabled": "false"}])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_query_runs_without_adaptive_execution_whatever_the_session_has(
    timed: World, parallelism: int, adaptive: dict[str, str]
) -> None:
    wanted = _skewed(timed)
    backend = timed.backend(parallelism=parallelism)
    with settings(timed.spark, adaptive):
        stream = timed.input.stream(timed.spark)
        query = timed.run(backend, KINDS["transform_with_state"](backend, stream, stream))
        plan = str(query._jsq.explainInternal(False))
        assert (
            timed.spark.conf.get("spark.sql.adaptive.enabled")
            == adaptive["spark.sql.adaptive.enabled"]
        )
    check_plan(plan.splitlines(), parallelism, 1)
    assert "AdaptiveSparkPlan" not in plan
    assert counts(timed) == {k: 3 * n for k, n in wanted.items()}


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_function_may_turn_adaptive_execution_on_for_its_own_frame(
    timed: World, parallelism: int
) -> None:
    wanted = _skewed(timed)
    seen: list[str] = []

    def adaptive(frame: DataFrame, batch: int) -> None:
        with settings(frame.sparkSession, ADAPTIVE):
            grouped = frame.groupBy("k").sum("n")
            assert {k: n // (batch + 1) for k, n in grouped.collect()} == wanted
            jdf: Any = frame.where("n > 0")._jdf
            seen.append(str(jdf.queryExecution().executedPlan().toString()))
            timed.sink(frame.where("n > 0"), batch)

    backend = timed.backend(parallelism=parallelism)
    stream = timed.input.stream(timed.spark)
    timed.run(backend, KINDS["transform_with_state"](backend, stream, stream), adaptive)
    assert len(seen) == 3
    assert all("AdaptiveSparkPlan" in plan for plan in seen)
    assert counts(timed) == {k: 3 * n for k, n in wanted.items()}
    assert backend.lineages()["tws None rows"].last_epoch == 2
