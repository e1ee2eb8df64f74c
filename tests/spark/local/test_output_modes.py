"""The output mode of a function with state, against the query's: refused where Spark refuses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F

from statebackend.errors import UnsupportedQueryError
from statebackend.spark.start.output_checks import check_output

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.spark.local.world import World

OUTPUT = "k string, n bigint, at timestamp"


def counted(key: Any, frames: Any, state: Any) -> Any:
    yield from ()


def behind(frame: DataFrame) -> DataFrame:
    return frame.groupBy("k").agg(F.sum("n"))


def before(frame: DataFrame) -> DataFrame:
    return frame.groupBy("k", "at").agg(F.sum("n").alias("n"))


def unchanged(frame: DataFrame) -> DataFrame:
    return frame


def sparks_verdict(spark: SparkSession, frame: DataFrame, mode: str) -> bool:
    """Whether Spark would start a query; its own check, without a start."""
    jvm: Any = spark._jvm
    plan = frame._jdf.queryExecution().analyzed()
    made = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, mode.capitalize())()
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    try:
        checker.checkForStreaming(plan, made)
    except AnalysisException:
        return False
    return True


@pytest.mark.parametrize("asked", ["append", "update"])
def test_the_output_modes_that_spark_refuses_are_refused_in_one_sentence(
    world: World, asked: str
) -> None:
    backend = world.backend()
    stream = world.spark.readStream.format("rate").load().withWatermark("timestamp", "1 hour")
    stream = stream.select(
        F.lit("a").alias("k"), F.col("value").alias("n"), F.col("timestamp").alias("at")
    )
    verdicts: dict[bool, int] = {True: 0, False: 0}
    for first, last in (
        (unchanged, unchanged),
        (unchanged, behind),
        (before, unchanged),
    ):
        args = counted, OUTPUT, "n bigint", asked, "NoTimeout"
        theirs = last(first(stream).groupBy("k").applyInPandasWithState(*args))
        ours = last(backend.apply_in_pandas_with_state(first(stream).groupBy("k"), *args))
        operators = [one.operator for one in backend._builder.newest()]
        for mode in ("append", "update", "complete"):
            if mode == "append" and last is behind:
                continue  # an aggregation without a watermark of its own, which Spark refuses
            wanted = sparks_verdict(world.spark, theirs, mode)
            plan = ours._jdf.queryExecution().analyzed()
            if wanted:
                check_output(plan, mode, operators)
            else:
                with pytest.raises(UnsupportedQueryError) as raised:
                    check_output(plan, mode, operators)
                assert str(raised.value).count(". ") == 1, "what, and what to do"
            verdicts[wanted] += 1
    assert all(verdicts.values())


def test_such_a_query_is_refused_at_its_start(world: World) -> None:
    world.input.add_keys("a")
    backend = world.backend()
    frame = backend.apply_in_pandas_with_state(
        world.input.stream(world.spark).groupBy("k"),
        counted, "k string", "n bigint", "update", "NoTimeout",
    )  # fmt: skip
    with pytest.raises(UnsupportedQueryError, match="in update mode, and the query's output mode"):
        backend.start(world.writer(frame))
    writer = world.writer(frame)
    with (
        pytest.raises(UnsupportedQueryError, match="in update mode"),
        backend.starting(checkpoint_location=str(world.location)),
    ):
        query = writer.start()
    assert not query.isActive
    assert not world.spark.streams.active
