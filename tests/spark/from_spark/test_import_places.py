"""An import from where Spark does not reach, and a key that is named by the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import statebackend
from snapshot.storage.stores_by_uri import open_store
from statebackend.errors import CheckpointLocationError, JobRunningError
from statebackend.spark.from_spark.reached_location import reached
from statebackend.system import SYSTEM
from tests.spark.from_spark import program
from tests.spark.from_spark.conftest import named_by_the_call

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.support.s3 import S3

# Half a minute and more: a query runs with Spark's own state first, which takes seconds a batch.
pytestmark = pytest.mark.timeout(900)


def test_a_location_on_s3_that_spark_does_not_reach_is_copied(
    spark: SparkSession, of_processor: Path, moto: S3, tmp_path: Path
) -> None:
    """And goes on: the key has the name that Spark took from the call."""
    uri = moto.fresh_uri()
    store = open_store(uri, new_id=SYSTEM.new_id, options=moto.options())
    for path in of_processor.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            store.put(str(path.relative_to(of_processor)), [path.read_bytes()])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    to = (tmp_path / "savepoint").as_uri()
    found = statebackend.import_spark(
        spark, uri, to, uid="Session", options=moto.options(), scratch_dir=str(scratch)
    )
    assert found.checkpoint == uri
    assert found.savepoint is not None
    assert found.savepoint.location == uri
    assert {state.name: state.rows for state in found.operators[0].states}["n"] == 3
    assert not list(scratch.iterdir()), "the copy is removed"
    inputs = tmp_path / "in"
    program.write_input(inputs, files=2)
    (inputs / "000.json").unlink()  # what Spark has read, by another path
    rows = spark.readStream.schema("k string, id bigint, ts timestamp").json(str(inputs))
    frame = rows.withWatermark("ts", "2 seconds")
    columns = "k STRING, what STRING, n BIGINT, text STRING"
    spark.sql(f"CREATE TABLE brought ({columns}) USING parquet LOCATION '{tmp_path}/table'")
    places = {"uri": (tmp_path / "state").as_uri(), "local_dir": str(tmp_path / "local")}
    with statebackend.install(spark, **places, savepoint=to):
        writer = named_by_the_call(frame).writeStream.trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / "ours")).toTable("brought")
        query.awaitTermination()
    log = {path.name for path in (tmp_path / "table/_spark_metadata").glob("[0-9]*")}
    assert log >= {str(batch) for batch in range(found.epoch + 2)}, "of the table's folder"
    counted = {row.k: row.n for row in spark.table("brought").where("what = 'rows'").collect()}
    spark.sql("DROP TABLE brought")
    assert counted == {"k0": 8, "k1": 6, "k2": 6}


def test_a_location_that_changes_while_it_is_copied_is_in_use(
    spark: SparkSession, whole: Path, moto: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = moto.fresh_uri()
    store = open_store(uri, new_id=SYSTEM.new_id, options=moto.options())
    for path in whole.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            store.put(str(path.relative_to(whole)), [path.read_bytes()])
    with reached(spark, uri, moto.options(), None) as place:
        place.check()
        store.put("offsets/1", [(whole / "offsets/0").read_bytes()])
        with pytest.raises(JobRunningError, match="planned or committed there meanwhile"):
            place.check()


def test_a_place_that_is_not_reached_is_named(spark: SparkSession) -> None:
    for path in ("gs://bucket/x", "hdfs://host.invalid:1/x"):
        with pytest.raises(CheckpointLocationError, match="no file system"):
            statebackend.import_spark(spark, path, "", dry_run=True)
