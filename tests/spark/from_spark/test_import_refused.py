"""Checkpoint locations that do not come over: refused by name, and nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import statebackend
from statebackend.errors import (
    CheckpointLocationError,
    JobRunningError,
    NotRestorableError,
    NullKeyError,
    SettingError,
    StateBackendError,
    UnsupportedFormatError,
    UnsupportedQueryError,
)
from statebackend.spark.from_spark.reached_location import ReachedLocation
from statebackend.spark.from_spark.spark_checkpoint import open_checkpoint
from tests.spark.from_spark import program

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

# Half a minute and more: a query runs with Spark's own state first, which takes seconds a batch.
pytestmark = pytest.mark.timeout(900)


Kinds = type[StateBackendError] | tuple[type[StateBackendError], ...]


def refused(spark: SparkSession, location: Path, kind: Kinds, match: str, **given: Any) -> None:
    to = location.parent / "savepoint"
    with pytest.raises(kind, match=match):
        statebackend.import_spark(spark, str(location), to.as_uri(), **{"uid": "tally", **given})
    assert not [path for path in to.rglob("*") if path.is_file()]


def without_state(location: Path) -> None:
    for path in (location / "state").glob("0/[0-9]*/*.delta"):
        path.unlink()


def is_ours(location: Path) -> None:
    (location / "statebackend.json").write_text(json.dumps({"uri": "file:///x", "job": "a"}))


def replaced(name: str, text: str) -> Callable[[Path], None]:
    def change(location: Path) -> None:
        (location / name.rpartition("/")[0] / f".{name.rpartition('/')[2]}.crc").unlink(
            missing_ok=True
        )
        (location / name).write_text(text)

    return change


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        (replaced("offsets/0", "v3\n{}\n-"), UnsupportedFormatError, "'v3'"),
        (replaced("commits/0", 'v1\n{"nextBatch'), NotRestorableError, "commits/0.*end"),
        (replaced("commits/0", "v9\n{}"), UnsupportedFormatError, "'v9'"),
        (replaced("offsets/0", ""), UnsupportedFormatError, "offsets/0"),
        (lambda at: (at / "offsets/0").unlink(), NotRestorableError, "no offsets/0"),
        (lambda at: shutil.rmtree(at / "commits"), NotRestorableError, "committed no batch"),
        (lambda at: shutil.rmtree(at / "state"), UnsupportedQueryError, "no state"),
        (lambda at: (at / "metadata").unlink(), CheckpointLocationError, "not the checkpoint"),
        (without_state, NotRestorableError, "does not read 'state' of operator 0"),
        (is_ours, CheckpointLocationError, "kept here"),
    ],
)
def test_what_is_no_whole_location_of_sparks_is_refused(
    spark: SparkSession,
    whole: Path,
    tmp_path: Path,
    change: Callable[[Path], None],
    kind: type[StateBackendError],
    match: str,
) -> None:
    location = tmp_path / "location"
    shutil.copytree(whole, location)
    change(location)
    refused(spark, location, kind, match)


@pytest.mark.parametrize(
    ("name", "kind", "match"),
    [
        ("metadata", CheckpointLocationError, "cannot be read"),
        ("offsets/1", UnsupportedFormatError, "offsets/1"),
        ("offsets/0", UnsupportedFormatError, "offsets/0"),  # Spark asks for it, too
        ("commits/1", UnsupportedFormatError, "commits/1"),
        ("state/0/_metadata/v2/0", NotRestorableError, "does not read what its operators are"),
        ("state/0/_stateSchema/default/[!.]*", NotRestorableError, "does not read the state of op"),
        ("state/0/[01]/*.zip", NotRestorableError, "does not read"),
        ("state/0/[01]/SSTs/*.sst", NotRestorableError, "does not read"),
    ],
)
def test_what_is_encrypted_or_damaged_is_refused(
    spark: SparkSession,
    of_processor: Path,
    tmp_path: Path,
    name: str,
    kind: type[StateBackendError],
    match: str,
) -> None:
    location = tmp_path / "location"
    shutil.copytree(of_processor, location)
    point_to(location)
    found = list(location.glob(name))
    assert found
    for path in found:
        path.write_bytes(bytes(byte ^ 0x95 for byte in path.read_bytes()))
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    refused(spark, location, kind, match, uid="Session")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("metadata/v2/0", lambda text: text.replace("v2", "v9", 1)),
        ("stateSchema/default/[!.]*", lambda text: text.replace("v3", "v9", 1)),
        ("metadata/v2/0", lambda text: text.replace('"ListState', '"QueueState')),
        ("metadata/v2/0", lambda text: text.replace("EventTime", "NoSuchTime")),
    ],
)
def test_what_a_newer_spark_wrote_is_refused(
    spark: SparkSession,
    of_processor: Path,
    tmp_path: Path,
    name: str,
    change: Callable[[str], str],
) -> None:
    location = tmp_path / "location"
    shutil.copytree(of_processor, location)
    point_to(location)
    (path,) = location.glob(f"state/0/_{name}")
    written = path.read_bytes()
    path.write_bytes(change(written.decode("latin-1")).encode("latin-1"))
    assert path.read_bytes() != written
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    kinds = (NotRestorableError, UnsupportedQueryError, UnsupportedFormatError)
    refused(spark, location, kinds, "does not read|not known", uid="Session")


def point_to(location: Path) -> None:
    """Have a copy name its own files; Spark has written the paths of the first."""
    path = location / "state/0/_metadata/v2/0"
    version, text = path.read_text().split("\n")
    said = json.loads(text)
    (schema,) = location.glob("state/0/_stateSchema/default/[0-9]*")
    said["stateStoreInfo"][0]["stateSchemaFilePaths"] = [schema.as_uri()]
    path.write_text(f"{version}\n{json.dumps(said)}")
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)


def test_an_operator_that_keeps_no_state_is_refused(
    spark: SparkSession, of_processor: Path, tmp_path: Path
) -> None:
    location = tmp_path / "location"
    shutil.copytree(of_processor, location)
    path = location / "state/0/_metadata/v2/0"
    version, text = path.read_text().split("\n")
    said = json.loads(text)
    properties = {**json.loads(said["operatorPropertiesJson"]), "stateVariables": []}
    said["operatorPropertiesJson"] = json.dumps(properties)
    path.write_text(f"{version}\n{json.dumps(said)}")
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    refused(spark, location, UnsupportedQueryError, "keeps no state", uid="Session")
    told = statebackend.import_spark(spark, str(location), "", dry_run=True)
    assert [one.problem for one in told.operators] != [""]


def test_a_null_key_is_named_by_a_dry_run_and_refused(
    spark: SparkSession, with_null_keys: Path, tmp_path: Path
) -> None:
    told = statebackend.import_spark(spark, str(with_null_keys), "", dry_run=True)
    (operator,) = told.operators
    assert operator.timeout_needed, "and asks for no timeout before it looks"
    assert {state.name: state.rows for state in operator.states} == {"state": 3, "timers": 3}
    assert all("1 row(s) the key (k) is null" in one for one in told.problems)
    assert len(told.problems) == 2
    location = tmp_path / "location"
    shutil.copytree(with_null_keys, location)
    refused(spark, location, SettingError, "has timeouts")
    timeout = "ProcessingTimeTimeout"
    refused(spark, location, NullKeyError, "null in every key column|null", timeout=timeout)


def test_a_query_of_another_session_is_seen(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.newSession().readStream.format("rate").load()
    location = tmp_path / "location"
    query = rows.writeStream.format("noop").option("checkpointLocation", str(location)).start()
    try:
        refused(spark, location, JobRunningError, "a query of this driver uses it")
    finally:
        query.stop()


def test_what_the_caller_must_say_is_asked_for(spark: SparkSession, whole: Path) -> None:
    refused(spark, whole, SettingError, "No uid", uid=None)
    refused(spark, whole, SettingError, "are not there", uid={3: "tally"})
    refused(spark, whole, SettingError, "no timeouts", timeout="EventTimeTimeout")


def test_another_operator_is_refused_by_its_name(spark: SparkSession, tmp_path: Path) -> None:
    program.write_input(tmp_path / "in", files=1)
    rows = spark.readStream.schema("k string").json(str(tmp_path / "in")).dropDuplicates(["k"])
    location = tmp_path / "location"
    writer = rows.writeStream.foreachBatch(lambda frame, batch: frame.collect() and None)
    writer = writer.option("checkpointLocation", str(location)).trigger(availableNow=True)
    writer.start().awaitTermination()
    refused(spark, location, UnsupportedQueryError, r"operator 0 \(dedupe\)")
    told = statebackend.import_spark(spark, str(location), "", dry_run=True)
    assert [one.name for one in told.operators] == ["dedupe"]
    assert told.problems
    assert told.savepoint is None


def test_a_dry_run_counts_and_writes_nothing(spark: SparkSession, whole: Path) -> None:
    told = statebackend.import_spark(spark, str(whole), "", dry_run=True)
    assert (told.epoch, told.unfinished, told.problems) == (0, False, [])
    rows = [(state.name, state.rows) for one in told.operators for state in one.states]
    assert ("state", 3) in rows


def test_a_location_in_use_is_refused(
    spark: SparkSession, tmp_path: Path, program_by_value: None
) -> None:
    program.write_input(tmp_path / "in", files=1)
    query = program.start(
        spark, "plain", tmp_path, lambda frame, batch: frame.collect() and None, stops=False
    )
    try:
        query.processAllAvailable()
        location = tmp_path / "spark" / "plain"
        refused(spark, location, JobRunningError, "a query of this driver uses it")
    finally:
        query.stop()
    found = open_checkpoint(spark, ReachedLocation(str(location), str(location)))
    found.check_unchanged()
    plan = (location / "offsets" / "0").read_text()
    (location / "offsets" / "1").write_text(plan)  # by a driver elsewhere
    with pytest.raises(JobRunningError, match="batch 1 was planned"):
        found.check_unchanged()
