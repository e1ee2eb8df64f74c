"""Queries of Spark's own tests and settings of its session: both engines do the same with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.types import LongType, StructField, StructType

from statebackend import ProcessorTester
from statebackend.errors import SchemaError
from tests.spark.local.batched_processors import Chunks, Lettered, NotNull, Soon, Withdrawing
from tests.spark.local.conformance import Both, Case
from tests.spark.local.conforming_time import Timers
from tests.spark.local.processors import Ledger
from tests.spark.local.test_conformance_of_time import EVENTS, event
from tests.spark.local.world import Input, durable_state, finish, setting

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.spark.local.world import World

WITHOUT_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"
BYTES, ROWS = (f"spark.sql.execution.arrow.max{what}PerBatch" for what in ("Bytes", "Records"))
ENCODING = "spark.sql.streaming.stateStore.encodingFormat"
CHUNKED = [
    [{"k": "a", "id": 123}, {"k": "a", "id": 46}, {"k": "b", "id": 146}, {"k": "b", "id": 346}],
    [{"k": "a", "id": 123}, {"k": "a", "id": 223}, {"k": "a", "id": 323}, {"k": "b", "id": 6}],
]


@pytest.fixture
def both(world: World) -> Both:
    return Both(world)


def test_a_query_runs_the_very_processor_of_a_test(world: World) -> None:
    processor = Ledger()
    with ProcessorTester(processor) as tester:
        (row,) = tester.test("k1", [{"id": 5}])  # type: ignore[list-item]
        assert row.total == 5
        world.input.add_batches(2)
        backend = world.backend()
        world.run(backend, world.ledger(backend, processor=processor))
        (row,) = tester.test("k1", [{"id": 6}])  # type: ignore[list-item]
        assert row.total == 11, "nor does the query take anything from the test"
    world.check(backend)


def test_a_state_asked_for_and_deleted_in_one_init_is_as_in_spark(both: Both) -> None:
    both.run(Case("k string, id bigint", Withdrawing(), output="k string, n bigint"), CHUNKED)
    both.run(Case("k string, id bigint", Withdrawing(), output="k string, n bigint"), CHUNKED[:1])
    both.agree()
    assert set(durable_state(both.backend, "both")) == {"n"}


def test_one_character_is_the_key_of_a_map_as_in_spark(both: Both) -> None:
    both.run(Case("k string, id bigint", Lettered(), output="k string, keys string"), CHUNKED)
    both.agree()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("key", "value", "counts"),
    [
        (BYTES, "2", {"a": [2, 3], "b": [2, 1]}),
        (BYTES, "100000", {"a": [1, 1], "b": [1, 1]}),
        (ROWS, "1", {"a": [2, 3], "b": [2, 1]}),
        (ROWS, "-1", {"a": [1, 1], "b": [1, 1]}),
    ],
)
def test_a_keys_rows_come_in_as_many_frames_as_in_spark(
    both: Both, key: str, value: str, counts: Any, begun: bool
) -> None:
    case = Case("k string, id bigint", Chunks(), flavour="pandas", output="k string, n bigint")
    if begun:
        case.initial = lambda spark: spark.createDataFrame(
            [("a", 789), ("z", 987)], "k string, start int"
        ).groupBy("k")
    with setting(both.spark, key, value):
        both.run(case, CHUNKED)
    both.agree()
    found = {k: [dict(rows).get(k) for rows in both.ours.filled()] for k in ("a", "b")}
    assert found == counts


def test_without_batches_without_data_timers_wait_for_data_as_in_spark(both: Both) -> None:
    case = Case(EVENTS, Timers(), mode="event", delay="0 seconds")
    with setting(both.spark, WITHOUT_DATA, "false"):
        both.run(case, [[event("a", 1, 1000, "+1500")], [event("b", 2, 2000)]])
        both.agree()
        assert len(both.ours.batches) == 2
        both.run(case, [[event("c", 3, 2500, "+2400")]])
        both.agree()
    assert [row for row in both.ours.batches[2] if "timer 1500" in row[2]]
    assert not [row for row in both.ours.batches[2] if "timer 2400" in row[2]]
    # The heartbeat stood in the plan all the time: it may go on where batches may.
    both.run(case, [[event("d", 4, 2600)]])
    both.agree_but_for_empty_batches()
    assert [row for rows in both.ours.batches.values() for row in rows if "timer 2400" in row[2]]


def test_without_batches_without_data_processing_time_waits_too(world: World) -> None:
    world.input.add_keys("a")
    with setting(world.spark, WITHOUT_DATA, "false"):
        for last in ("b", None):
            backend = world.backend()
            frame = backend.transform_with_state(
                world.input.stream(world.spark),
                keys="k",
                processor=Soon(),
                output_schema="k string, what string",
                uid="soon",
                time_mode="processing",
            )
            world.run(backend, frame)
            if last:
                assert [row["what"] for row in world.sink.rows()] == ["rows"]
                world.input.add_keys(last)
    (batch,) = [rows for number, rows in world.sink.batches().items() if number == 1]
    assert sorted((row["k"], row["what"]) for row in batch) == [("a", "timer"), ("b", "rows")]
    assert len(world.sink.batches()) == 2


FIELDS = [
    StructType([StructField("n", LongType(), False)]),
    "n bigint NOT NULL",
]
NESTED = StructType([StructField("n", StructType([StructField("m", LongType(), False)]))])


@pytest.mark.parametrize("schema", FIELDS)
def test_fields_that_are_not_null_are_refused_where_spark_refuses_them(
    make_world: Callable[..., World], schema: Any
) -> None:
    both = Both(make_world())
    case = Case("k string, id bigint", NotNull(schema), output="k string, n bigint")
    both.run(case, CHUNKED[:1])
    both.agree()
    both = Both(make_world("ours"))
    both.input = Input(both.world.root / "both", case.schema)
    both.input.add(CHUNKED[0])
    with setting(both.spark, ENCODING, "avro"):
        with pytest.raises(SchemaError, match=r"'n'.*NOT NULL.*SCHEMA_MUST_BE_NULLABLE"):
            both._start_ours(case)
        nested = Case("k string, id bigint", NotNull(NESTED), output="k string, n bigint")
        both._start_ours(nested).stop()
        again = Both(make_world("spark"))
        again.input = both.input
        with pytest.raises(StreamingQueryException, match="SCHEMA_MUST_BE_NULLABLE"):
            finish(again._start_spark(case))
