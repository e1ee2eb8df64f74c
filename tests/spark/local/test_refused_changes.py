"""What belongs together in a job, and cannot be changed when it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

from statebackend import StateBackend
from statebackend.errors import (
    CheckpointLocationError,
    DuplicateUidError,
    MaxParallelismChangedError,
    MissingUidError,
    ProcessorError,
    SchemaError,
    SettingError,
    StateMismatchError,
    UnsupportedQueryError,
)
from tests.spark.local.processors import LEDGER_OUTPUT, Ledger, Noisy, Stateless
from tests.spark.local.world import World, checkpoints, durable_state, finish

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
from tests.spark.local.refused import *  # noqa: F403
from tests.spark.local.refused import _frame

# --- what belongs together -----------------------------------------------------------------------


def test_a_uid_is_given_once_in_a_query(world: World) -> None:
    world.input.add_batches(1)
    backend, df = world.backend(), world.input.stream(world.spark)
    with pytest.raises(DuplicateUidError, match="'ledger'"):
        world.start(backend, _frame(backend, df).union(_frame(backend, df)))
    world.run(backend, _frame(backend, df))
    world.check(backend)


def test_what_is_no_writer_of_a_frame_of_the_backend_is_refused(old: World, df: DataFrame) -> None:
    backend, other = old.backend(), old.backend(job="other")
    with pytest.raises(SettingError, match=r"start\(\) was given a DataFrame"):
        backend.start(_frame(backend, df))  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="no operator of this backend"):
        backend.start(old.writer(df))
    with pytest.raises(UnsupportedQueryError, match="operators of several backends"):
        backend.start(old.writer(_frame(backend, df).union(_frame(other, df))))
    with pytest.raises(SettingError, match=r"given a GroupedData"):
        backend.write_stream(df.groupBy("k"))  # type: ignore[arg-type]


def _two_sources(world: World) -> DataFrame:
    """The input, for a query that had two operators on it: Spark counts its sources."""
    df = world.input.stream(world.spark)
    return df.union(df.where("false"))


def test_a_missing_uid_is_refused_unless_its_state_may_go(world: World) -> None:
    def kept_only(frame: DataFrame, batch: int) -> None:
        world.sink.write([row for row in frame.collect() if not row.k.startswith("old")], batch)

    world.input.add_batches(1)
    backend = world.backend()
    df = world.input.stream(world.spark)
    old = world.ledger(backend, df, uid="old").withColumn("k", F.lit("old"))
    world.run(backend, world.ledger(backend, df).union(old), kept_only)
    world.input.add_batches(1)
    backend = world.backend()
    with pytest.raises(MissingUidError, match="'old'"):
        world.run(backend, world.ledger(backend, _two_sources(world)))
    for _ in range(2):
        backend = world.backend(allow_dropped_state=True)
        world.run(backend, world.ledger(backend, _two_sources(world)))
        world.check(backend)
        world.input.add_batches(1)


def test_an_operator_that_was_renamed_is_told_how_to_keep_its_state(old: World) -> None:
    backend = old.backend()
    rename = r"it has 'renamed', .*uid='ledger'.*rename_operators=\{'ledger': 'renamed'\}"
    with pytest.raises(MissingUidError, match=rename):
        old.start(backend, old.ledger(backend, uid="renamed"))


def test_a_state_that_was_dropped_once_need_not_be_dropped_again(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend()
    df = world.input.stream(world.spark)
    both = world.ledger(backend, df).union(world.ledger(backend, df, uid="old"))
    world.run(backend, both, lambda frame, _: frame.collect())
    for given in ({"allow_dropped_state": True}, {}):
        world.input.add_batches(1)
        backend = world.backend(**given)
        world.run(backend, world.ledger(backend, _two_sources(world)))


@pytest.mark.parametrize(
    "processor",
    [
        Stateless(acc="n bigint, total string"),
        Stateless(acc="a bigint, b bigint"),
        Stateless(other="n bigint, total bigint"),
    ],
    ids=["another type", "no field left", "another name"],
)
def test_a_changed_state_is_refused(old: World, df: DataFrame, processor: Any) -> None:
    backend = old.backend()
    with pytest.raises(StateMismatchError, match=r"[Ss]tate 'acc'"):
        old.start(backend, _frame(backend, df, processor))


def test_a_changed_key_is_refused(old: World, df: DataFrame) -> None:
    backend = old.backend()
    frame = _frame(backend, df.withColumn("k", F.col("id")))
    with pytest.raises(StateMismatchError, match="The key of operator"):
        old.start(backend, frame)


def test_a_state_may_be_added(world: World) -> None:
    world.input.add_batches(1)
    world.run_ledger()
    world.input.add_batches(1)
    backend = world.backend()
    world.run(backend, world.ledger(backend, processor=Noisy()))
    world.check(backend)
    assert durable_state(backend, "ledger")["noise"]


def test_a_key_that_has_become_non_nullable_is_the_same_key(world: World) -> None:
    world.input.add_batches(1)
    world.run_ledger()
    world.input.add_batches(1)
    backend = world.backend()
    df = world.input.stream(world.spark).withColumn("k", F.coalesce("k", F.lit("")))
    world.run(backend, world.ledger(backend, df))
    world.check(backend)


def test_max_parallelism_is_fixed(old: World, df: DataFrame) -> None:
    with pytest.raises(MaxParallelismChangedError, match="64, but 128 was asked for"):
        _frame(old.backend(max_parallelism=128), df)


def test_a_new_checkpoint_location_on_an_old_job_is_refused(old: World) -> None:
    backend = old.backend()
    with pytest.raises(CheckpointLocationError, match="is new"):
        old.start(backend, old.ledger(backend), checkpointLocation=str(old.root / "other"))
    assert not (old.root / "other").exists()


def test_an_old_checkpoint_location_with_a_new_job_is_refused(old: World) -> None:
    backend = old.backend(job="another")
    with pytest.raises(CheckpointLocationError, match="has no state at all"):
        old.start(backend, old.ledger(backend))


def test_the_location_of_sparks_own_operator_is_named_with_the_way_over(world: World) -> None:
    world.input.add_batches(1)
    provider = "spark.sql.streaming.stateStore.providerClass"
    rocks = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    world.spark.conf.set(provider, rocks)
    try:
        own = world.input.stream(world.spark).groupBy("k")
        frame = own.transformWithState(Ledger(), LEDGER_OUTPUT, "Append", "None")
        finish(world.writer(frame).start())
    finally:
        world.spark.conf.unset(provider)
    for given in ({}, {"job": None}):
        backend = world.backend(**given)
        with pytest.raises(
            CheckpointLocationError,
            match=r"state of Spark's own operator \(transformWithState.*statebackend import-spark",
        ):
            world.start(backend, world.ledger(backend))
    assert checkpoints(world.backend()) == []


def test_a_location_without_its_file_system_is_one_sentence(old: World) -> None:
    backend = old.backend(job=None)
    for place, how in (("s3a://b/c", "hadoop-aws"), ("wasps://b/c", "class path")):
        with pytest.raises(CheckpointLocationError, match=f"no file system for .*{how}") as raised:
            old.start(backend, old.ledger(backend), checkpointLocation=place)
        assert raised.value.__suppress_context__, "the JVM's text has nothing more to say"


def test_arguments_of_a_wrong_kind_are_said(old: World, df: DataFrame) -> None:
    backend = old.backend()
    with pytest.raises(SettingError, match="spark= is a str"):
        StateBackend("local[2]")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="withColumn"):
        _frame(backend, df, keys=F.col("k"))
    with pytest.raises(SchemaError, match="Keys are given twice"):
        backend.aggregate(df.groupBy("k"), keys="k", aggregations={"n": "count"}, uid="a")
    for wrong in (Ledger, lambda key: key):
        with pytest.raises(ProcessorError, match=r"Give an object of"):
            _frame(backend, df, wrong)


def test_a_start_without_a_location_on_an_old_job_is_refused(old: World) -> None:
    backend = old.backend()
    writer = old.ledger(backend).writeStream.foreachBatch(old.sink).trigger(availableNow=True)
    with pytest.raises(CheckpointLocationError, match="belongs to query"):
        backend.start(writer)


def test_the_checkpoint_location_of_another_query_is_refused(old: World, world: World) -> None:
    world.input.add_batches(1)
    world.run_ledger()
    backend = old.backend()
    with pytest.raises(CheckpointLocationError, match="is of query"):
        old.start(backend, old.ledger(backend), checkpointLocation=str(world.location))
    with pytest.raises(CheckpointLocationError, match="is of query"), backend.starting():
        world.writer(old.ledger(old.backend())).start()


def test_the_default_checkpoint_location_and_the_name_of_the_query_do(world: World) -> None:
    key = "spark.sql.streaming.checkpointLocation"
    world.location = world.root / "all" / "named"
    world.spark.conf.set(key, str(world.root / "all"))
    try:
        for _ in range(2):
            world.input.add_batches(1)
            backend = world.backend()
            writer = world.ledger(backend).writeStream.queryName("named")
            writer = writer.foreachBatch(world.sink).trigger(availableNow=True)
            finish(backend.start(writer))
    finally:
        world.spark.conf.unset(key)
    world.check(backend)
