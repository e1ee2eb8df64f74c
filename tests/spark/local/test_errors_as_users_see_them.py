"""What a user reads where a query failed, and what Spark reads of it."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

import statebackend
from statebackend.spark.query_failures import QueryFailedError
from tests.spark.local.processors import (
    LEDGER_OUTPUT,
    OneStuckLedger,
    ParsingLedger,
    StuckLedger,
)
from tests.spark.local.world import until, user_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.spark.local.world import World

MISTAKE = "[SB1014] The processor of operator 'ledger' raised JSONDecodeError"


@pytest.mark.promise
def test_a_failed_query_is_told_in_one_sentence_with_sparks_text_behind_it(world: World) -> None:
    world.input.add_keys("a")
    backend = world.backend()
    frame = world.ledger(backend, processor=ParsingLedger())
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(world.location))
    query = backend.start(writer.trigger(availableNow=True))
    error = failed(query)
    text = str(error)
    assert text.startswith(MISTAKE)
    assert text.endswith(
        ". Mend the processor; nothing of this epoch was kept, the query goes on "
        "from the last checkpoint."
    )
    assert user_line("the user's call").removesuffix(" in handleInputRows") in text
    assert len(text.splitlines()) == 1
    assert str(query.exception()) == text
    assert traceback.format_exception(error)[-1].count("SB1014") == 1
    assert error.error.code == "SB1014"
    assert error.getCondition() == "STREAM_FAILED"
    assert error.whole.index(MISTAKE) < 300
    assert "caused by" not in error.whole, "the sentence has it all"
    assert "=== Streaming Query ===" in error.whole
    frames = traceback.extract_tb(error.__traceback__)
    assert [frame.name for frame in frames] == ["failed", "told"], "one line of ours"


def test_the_error_is_told_once_the_other_tasks_have_ended(world: World) -> None:
    """Spark logs a stack of each, which would stand behind it."""
    world.input.add_batches(1)
    backend = world.backend()
    frame = world.ledger(backend, processor=OneStuckLedger(str(world.root / "begun")))
    query = world.start(backend, frame)
    assert str(failed(query)).startswith(MISTAKE)
    executors = world.spark.sparkContext.statusTracker().getExecutorInfos()
    assert sum(one.numRunningTasks for one in executors) == 0


def test_in_foreach_batch_it_is_the_same_and_with_install_too(world: World) -> None:
    world.input.add_keys("a")
    with statebackend.install(world.spark, local_dir=str(world.local)):
        keyed = world.input.stream(world.spark).groupBy("k")
        frame = keyed.transformWithState(ParsingLedger(), LEDGER_OUTPUT, "Append", "None")
        world.spark.streams.resetTerminated()  # it knows of those that other tests ran
        query = world.writer(frame).start()
        with pytest.raises(QueryFailedError) as awaited:
            world.spark.streams.awaitAnyTermination()
        world.spark.streams.resetTerminated()
    error = failed(query)
    assert str(error).startswith("[SB1014] The processor of operator 'ParsingLedger' raised")
    assert str(awaited.value) == str(error)
    before = error.whole[: error.whole.index("[SB1014]")]
    assert "statebackend/spark/worker/task.py" not in before
    assert "json/decoder.py" in error.whole[len(before) :], "where it was found"


def test_a_query_of_starting_is_told_shortly_too_and_other_queries_are_sparks(world: World) -> None:
    world.input.add_keys("a")
    backend = world.backend()
    writer = world.ledger(backend, processor=ParsingLedger()).writeStream.format("noop")
    writer = writer.option("checkpointLocation", str(world.location))
    with backend.starting(checkpoint_location=str(world.location)):
        query = writer.start()
    assert str(failed(query)).startswith(MISTAKE)
    other = world.spark.readStream.format("rate").load().writeStream.format("noop").start()
    other.stop()
    assert type(other) is StreamingQuery


def test_a_failure_that_is_none_of_ours_is_sparks(world: World) -> None:
    world.input.add_keys("a")
    backend = world.backend()

    def fails(frame: DataFrame, batch: int) -> None:
        raise ValueError("the user's own")

    error = failed(world.start(backend, world.ledger(backend), fails))
    assert not isinstance(error, QueryFailedError)
    assert "the user's own" in str(error)


def failed(query: StreamingQuery) -> Any:
    with pytest.raises(StreamingQueryException) as raised:
        query.awaitTermination(120)
    return raised.value


def test_a_query_that_is_stopped_within_a_checked_function_is_known_to_be_stopped(
    world: World,
) -> None:
    """Spark's own look at a long text of Java's would end the stream's thread."""
    gate, begun = world.root / "gate", world.root / "begun"
    world.input.add_batches(1)
    backend = world.backend(settings={"lease_timeout_s": 1.0})
    frame = world.ledger(backend, processor=StuckLedger(str(gate), str(begun)))
    checked = backend.checked(lambda frame, batch: frame.collect())
    handed: list[str] = []

    def watched(frame: DataFrame, batch: int) -> None:
        try:
            checked(frame, batch)
        except BaseException:
            handed.append(traceback.format_exc())
            raise

    gate.touch()
    query = world.start(backend, frame, watched)
    until(begun.exists, "a key's call has begun")
    query.stop()
    gate.unlink()
    assert query.exception() is None
    (text,) = handed
    assert "in <lambda>" in text, "the user's line"
    assert is_interruption(world.spark, text)


def is_interruption(spark: SparkSession, text: str) -> Any:
    """Spark's own answer, which it gives in the stream's thread."""
    jvm: Any = spark._jvm
    streaming = jvm.org.apache.spark.sql.execution.streaming
    for package in (streaming.runtime, streaming):  # as releases have it
        companion = getattr(package, "StreamExecution$")
        if hasattr(companion, "MODULE$"):
            one = getattr(companion, "MODULE$")
            return one.isInterruptionException(jvm.py4j.Py4JException(text), spark._jsc.sc())
    raise AssertionError("Spark has no StreamExecution")
