"""What a user reads where a query failed, and what Spark reads of it."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.local.processors import ParsingLedger, StuckLedger
from tests.spark.local.world import failure, until, user_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.spark.local.world import World

MISTAKE = "[SB1014] The processor of operator 'ledger' raised JSONDecodeError"


@pytest.mark.promise
def test_the_code_and_the_sentence_come_first_and_the_details_after(world: World) -> None:
    world.input.add_keys("a")
    backend = world.backend()
    frame = world.ledger(backend, processor=ParsingLedger())
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(world.location))
    text = failure(backend.start(writer.trigger(availableNow=True)))
    assert text.index(MISTAKE) < 300
    assert user_line("the user's call").removesuffix(" in handleInputRows") in text
    caused_by = text.index("caused by json.decoder.JSONDecodeError")
    assert text.index(MISTAKE) < caused_by < text.index("=== Streaming Query ===")


def test_in_foreach_batch_nothing_of_this_library_comes_before_it(world: World) -> None:
    world.input.add_keys("a")
    backend = world.backend()
    text = world.fail(backend, world.ledger(backend, processor=ParsingLedger()))
    before = text[: text.index(MISTAKE)]
    assert "statebackend/spark/worker/task.py" not in before
    assert "caused by json.decoder.JSONDecodeError" in text


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
