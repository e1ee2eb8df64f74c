"""`write_savepoint` by Spark's tasks: what one process would write, however tasks fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import statebackend
from recovery.savepoints.verify_savepoint import verify_savepoint
from snapshot.storage.stores_by_uri import open_store
from statebackend import TTL, OperatorState, system
from statebackend.errors import NullKeyError, SettingError
from statebackend.spark.from_tables.slices_on_spark import slices_on_spark
from statebackend.tables.stored_job import find_job
from tests.spark.local.world import durable_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from tests.spark.local.world import World

ROWS = 1_000
KEYS = 150
STATES = ("totals", "pages", "visits", "fading", "fading_pages", "fading_visits")


def frames(spark: SparkSession) -> dict[str, DataFrame]:
    """Rows of every kind of state, most keys several times, over several partitions."""
    rows = spark.range(0, ROWS, 1, 2).select(
        F.format_string("u%04d", F.col("id") * 7 % KEYS).alias("user"),
        F.when(F.col("id") % 50 != 3, F.col("id")).alias("n"),
    )
    map_key = F.struct((F.coalesce("n", F.lit(0)) % 3).cast("string").alias("page"))
    ends = (F.coalesce("n", F.lit(0)) * 10).alias("expires_at_ms")
    made = {
        "totals": rows,
        "pages": rows.select("user", map_key.alias("map_key"), "n"),
        "visits": rows.select("user", F.lit(0).alias("index"), "n"),
    }
    expiring = {"fading": "totals", "fading_pages": "pages", "fading_visits": "visits"}
    return made | {name: made[one].select("*", ends) for name, one in expiring.items()}


def operator(given: Callable[[Any], Any], spark: SparkSession, **more: Any) -> OperatorState:
    timers = spark.range(0, 90, 1, 1).select(
        F.format_string("u%04d", "id").alias("user"), (70 - F.col("id") * 3).alias("at_ms")
    )
    return OperatorState(
        "user string",
        {name: given(frame) for name, frame in frames(spark).items()},
        timers=given(timers),
        time_mode="event",
        ttl=dict.fromkeys(STATES[3:], TTL(60_000)),
        **more,
    )


def digests(uri: str) -> list[tuple[int, int, str]]:
    """Of every slice of a savepoint: what the bytes of its state are."""
    (manifest,) = [m for m in find_job("", None, savepoint=uri).manifests if m.slices]
    return [(one.subtask, one.rows, one.digest) for one in manifest.slices]


def whole(uri: str) -> bool:
    return verify_savepoint(open_store(uri, new_id=system.new_id)).ok


def collected(frame: DataFrame) -> pa.Table:
    return frame.toArrow()


def test_tasks_write_the_bytes_that_one_process_writes(spark: SparkSession, tmp_path: Path) -> None:
    lists = {"operator_lists": {"seen": pa.table({"at": [3, 4]})}}
    of = {"parallelism": 3, "max_parallelism": 64}
    made = {}
    for name, given, by_tasks in (("a", collected, None), ("b", lambda frame: frame, True)):
        uri = (tmp_path / name).as_uri()
        one = operator(given, spark, **lists)
        made[name] = statebackend.write_savepoint(uri, {"op": one}, on_spark=by_tasks, **of)
        assert whole(uri)
    a, b = ((tmp_path / name).as_uri() for name in "ab")
    assert digests(a) == digests(b)
    assert made["a"].objects == made["b"].objects
    assert made["a"].size_bytes == made["b"].size_bytes
    last = [find_job("", None, savepoint=uri).operator("op").last for uri in (a, b)]
    assert last[0].next_timer_ms == last[1].next_timer_ms == 70 - 89 * 3
    files = [{p.name for p in (tmp_path / name).rglob("*") if p.is_file()} for name in "ab"]
    assert len(files[0]) == len(files[1])


def test_a_row_that_does_not_fit_is_named_and_leaves_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = spark.range(3).select(
        F.when(F.col("id") != 1, "u").alias("user"), F.col("id").alias("n")
    )
    one = OperatorState("user string", {"s": rows})
    with pytest.raises(NullKeyError, match="null"):
        statebackend.write_savepoint(tmp_path.as_uri() + "/s", {"op": one}, on_spark=True)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_large_frames_alone_go_to_tasks(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = spark.range(10), spark.range(100_000_000)
    reader = pa.RecordBatchReader.from_batches(pa.schema([]), [])

    def chosen(*rows: Any, on_spark: bool | None = None, to: str = "s3://b/s") -> set[str]:
        operators = {str(n): OperatorState("id bigint", one) for n, one in enumerate(rows)}
        found = slices_on_spark(operators, on_spark, to, None, None)
        return set() if found is None else set(found.uids)

    both = {"a": small}, {"a": small, "b": large}
    assert chosen(*both) == {"1"}
    assert chosen(*both, on_spark=True) == {"0", "1"}
    assert chosen(*both, on_spark=False) == set()
    assert chosen({"a": large, "b": reader}) == set()
    assert chosen({"a": large}, to="memory://here") == set()
    for refused, to, said in (
        ({"a": large, "b": reader}, "s3://b/s", "a RecordBatchReader"),
        ({"a": large}, "memory://here", "in the memory"),
        ({"a": pa.table({"id": [1]})}, "s3://b/s", "no operator has a Spark frame"),
    ):
        with pytest.raises(SettingError, match=said):
            chosen(refused, on_spark=True, to=to)


def test_a_query_goes_on_from_what_tasks_have_written(world: World) -> None:
    spark, to = world.spark, (world.root / "made").as_uri()
    rows = spark.range(0, 7, 1, 2).select(
        F.format_string("k%d", "id").alias("k"), F.lit(10).alias("n"), F.lit(1000).alias("total")
    )
    one = OperatorState("k string", {"acc": rows}, schemas={"acc": "n bigint, total bigint"})
    made = statebackend.write_savepoint(to, {"ledger": one}, on_spark=True, max_parallelism=64)
    assert made.operators[0].parallelism == 4, "spark.sql.shuffle.partitions"
    world.input.add_batches(2)
    backend = world.run_ledger(savepoint=to)
    backend.wait_durable()
    truth = {k: (len(ids) + 10, sum(ids) + 1000) for k, ids in world.input.ids().items()}
    assert durable_state(backend, "ledger")["acc"] == {(k,): one for k, one in truth.items()}
