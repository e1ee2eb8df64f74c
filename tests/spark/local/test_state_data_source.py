"""`spark.read.format("statebackend")`: the state of a job as a DataFrame."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F

import statebackend
from statebackend import StateBackend
from statebackend.errors import NotRestorableError
from statebackend.spark.state_data_source import StateTableSource
from tests.spark.local.world import World, setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def done(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A job with three epochs, at parallelism 2."""
    world = World(spark, tmp_path_factory.mktemp("read") / "world")
    world.input.add_batches(3)
    world.run_ledger()
    yield world  # its backend has the source registered when it is read
    for made in world.backends:
        made.close()


def read(world: World, **options: Any) -> DataFrame:
    given = {"job": "default", **options}
    return world.spark.read.format("statebackend").options(**given).load(world.store.as_uri())


def ledger(world: World, **options: Any) -> DataFrame:
    return read(world, operator="ledger", stateVarName="acc", **options)


def totals(frame: DataFrame) -> dict[str, tuple[int, int]]:
    return {row.key.k: (row.value.n, row.value.total) for row in frame.collect()}


def truth(world: World) -> dict[str, tuple[int, int]]:
    return {key: (len(ids), sum(ids)) for key, ids in world.input.ids().items()}


def test_a_program_with_a_backend_reads_the_format_without_a_call(done: World) -> None:
    session = done.spark.newSession()
    StateBackend(session, uri=done.store.as_uri(), local_dir=str(done.local))
    given = {"job": "default", "operator": "ledger", "state": "acc"}
    frame = session.read.options(**given).load(done.store.as_uri(), format="statebackend")
    assert totals(frame) == truth(done)
    both = session.read.format("statebackend").options(**given, stateVarName="acc")
    with pytest.raises(AnalysisException, match="are one"):
        both.load(done.store.as_uri())


def test_a_state_is_a_frame_with_a_partition_for_each_subtask(done: World) -> None:
    frame = ledger(done)
    assert frame.schema.simpleString() == (
        "struct<key_group:int,key:struct<k:string>,value:struct<n:bigint,total:bigint>>"
    )
    assert totals(frame) == truth(done)
    assert frame.rdd.getNumPartitions() == 2


def test_keys_key_groups_and_columns_are_options(done: World) -> None:
    some = {key: truth(done)[key] for key in ("k1", "k4")}
    assert totals(ledger(done, keys=json.dumps(["k1", "k4", "nobody"]))) == some
    rows = ledger(done, columns="key.k,value.n").collect()
    assert {row["key.k"]: row["value.n"] for row in rows} == {
        k: n for k, (n, _) in truth(done).items()
    }
    groups = {row.key_group for row in ledger(done).collect()}
    one = min(groups)
    assert {row.key_group for row in ledger(done, keyGroups=str(one)).collect()} == {one}
    assert {row.key_group for row in ledger(done, keyGroups=f"0-{one}").collect()} == {one}


def test_filters_are_used_to_fetch_less(done: World) -> None:
    with setting(done.spark, PUSHDOWN, "true"):
        one = ledger(done).where(F.col("key.k") == "k4")
        assert totals(one) == {"k4": truth(done)["k4"]}
        assert one.rdd.getNumPartitions() == 1
        two = ledger(done).where(F.col("key.k").isin("k1", "k4") & (F.col("value.n") > 0))
        assert totals(two) == {key: truth(done)[key] for key in ("k1", "k4")}
        group = ledger(done).where(F.col("key.k") == "k4").collect()[0].key_group
        by_group = ledger(done).where(F.col("key_group") == group)
        assert "k4" in totals(by_group)
        assert by_group.rdd.getNumPartitions() == 1
        with_null = ledger(done).where("key.k in ('k4', null)")
        assert totals(with_null) == {"k4": truth(done)["k4"]}
        none = ledger(done).where(F.col("key.k") == "nobody")
        assert totals(none) == {}


def test_an_epoch_and_a_savepoint_are_read(done: World) -> None:
    last = done.committed()[-1]
    assert totals(ledger(done, batchId=last)) == truth(done)
    made = done.backends[0].savepoint()
    frame = (
        done.spark.read.format("statebackend")
        .options(savepoint=made.uri, operator="ledger", stateVarName="acc")
        .load()
    )
    assert totals(frame) == truth(done)


def test_without_an_operator_there_is_a_row_for_each_state(done: World) -> None:
    rows = read(done).collect()
    assert [(row.operator, row.state, row.kind) for row in rows] == [("ledger", "acc", "value")]
    assert rows[0].value_schema == "n bigint, total bigint"


def test_the_epochs_that_may_be_read_are_a_frame(done: World) -> None:
    rows = read(done, metadata="epochs").where("readable").collect()
    assert {row.operator for row in rows} == {"ledger"}
    assert [row.epoch for row in rows][-1] == 2


def test_an_epoch_that_was_cleaned_or_evaluated_again_meanwhile_is_said(done: World) -> None:
    options = {"path": done.store.as_uri(), "job": "default"}
    given = {**options, "operator": "ledger", "stateVarName": "acc"}
    reader = StateTableSource(given).reader(ledger(done).schema)
    part = reader.partitions()[0]
    with pytest.raises(NotRestorableError, match="was evaluated again"):
        next(iter(reader.read(replace(part, chain="0" * 64))))
    with pytest.raises(NotRestorableError, match="retainEpochs"):
        next(iter(reader.read(replace(part, epoch=part.epoch + 50))))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"operator": "ledger", "stateVarName": "nothing"}, "no state 'nothing'"),
        ({"operator": "other", "stateVarName": "acc"}, "no operator 'other'"),
        ({"operator": "ledger"}, "no state is"),
        ({"opperator": "ledger"}, "no option 'opperator'"),
        ({"operator": "ledger", "stateVarName": "acc", "keys": "k1"}, "The option keys is 'k1'"),
        ({"operator": "ledger", "stateVarName": "acc", "batchId": "99"}, "SB7001"),
        ({"operator": "ledger", "stateVarName": "acc", "keyGroups": "9-3"}, "comes before"),
        ({"job": "nobody", "operator": "ledger", "stateVarName": "acc"}, "There is no job"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_sentence(
    done: World, options: dict[str, str], said: str
) -> None:
    with pytest.raises(Exception, match=said):
        read(done, **options).collect()


def test_it_is_known_to_a_session_without_a_backend(done: World) -> None:
    other = done.spark.newSession()
    statebackend.register(other)
    statebackend.register(other)
    given = {"job": "default", "operator": "ledger", "stateVarName": "acc"}
    frame = other.read.format("statebackend").options(**given).load(done.store.as_uri())
    assert totals(frame) == truth(done)


def test_a_session_without_a_backend_of_its_own_reads_as_well(done: World) -> None:
    other = done.spark.newSession()
    options = {"job": "default", "operator": "ledger", "stateVarName": "acc"}
    frame = other.read.load(done.store.as_uri(), "statebackend", **options)
    assert totals(frame) == totals(ledger(done))


def test_sql_reads_state_once_the_source_is_registered(done: World) -> None:
    statebackend.register(done.spark)  # again, without a warning of Spark's
    done.spark.sql(
        "create temporary view acc using statebackend options "
        f"(path '{done.store.as_uri()}', job 'default', operator 'ledger', stateVarName 'acc')"
    )
    assert done.spark.sql("select count(*) from acc").first()[0] == len(truth(done))
