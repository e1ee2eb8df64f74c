"""A query that begins with the savepoint of an import: what is taken over, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from recovery.savepoints.savepoint import SPARK_FOLDER
from snapshot.formats.record import Manifest
from statebackend.errors import CheckpointLocationError, CorruptionError, StateMismatchError
from statebackend.operators.declared_states import parse_schema
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.operator_specs import Operator
from statebackend.schema.keys.key_schemas import check_operator_key
from statebackend.spark.frames.heartbeat import SOURCE_NAME
from statebackend.spark.frames.repeatable_sources import Source
from statebackend.spark.start.query_from_savepoint import NewQuery, begin_with
from statebackend.tables.saved_query import SavedQuery
from statebackend.tables.savepoint_of_rows import OperatorState, write_saved_query
from tests.recovery.test_savepoint_later import Files

PLAN = 'v1\n{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}\n{"logOffset":%d}'
HEARTBEAT_FIRST = [Source(SOURCE_NAME, "", "", 0), Source("text", "", "", 1)]


class Brought:
    """The savepoint of an import after batch 0, and a new job that begins with it."""

    def __init__(self, root: Path, *, planned: bool = False) -> None:
        files = {
            "offsets/0": PLAN % 0,
            "commits/0": 'v1\n{"nextBatchWatermarkMs":0}',
            "sources/0/0": "v1\nfile",
        }
        if planned:
            files["offsets/1"] = PLAN % 1
        stood = SavedQuery(
            next_watermark_ms=0, files={name: text.encode() for name, text in files.items()}
        )
        self.uri, self.folder = (root / "savepoint").as_uri(), root / "savepoint"
        rows = pa.table({"key": [{"User": "a"}], "value": [{"n": 1}]})
        operators = {"op": OperatorState("User string", {"n": rows})}
        write_saved_query(self.uri, operators, stood)
        self.job, self.location = Job((root / "state").as_uri(), "job"), Files()
        self.known: dict[str, Manifest] = {}

    def begin(self, key: str = "User string", **query: Any) -> None:
        schema = parse_schema(key, "key")
        operator = Operator("op", 1, 128, schema, {})

        def check(manifests: list[Manifest]) -> None:
            self.known = {one.operator: one for one in manifests}
            check_operator_key("op", self.known["op"].schemas[""], schema.json())

        new = NewQuery(**{"operators": {"op": operator}, "sources": HEARTBEAT_FIRST, **query})
        begin_with(self.uri, self.job, self.location, check, new)  # type: ignore[arg-type]


def test_the_log_of_a_source_moves_behind_the_heartbeat(tmp_path: Path) -> None:
    brought = Brought(tmp_path)
    brought.begin()
    assert brought.location.data["sources/1/0"] == b"v1\nfile"
    assert brought.location.data["offsets/0"].endswith(b'\n-\n{"logOffset":0}')


def test_a_log_that_moves_is_checked(tmp_path: Path) -> None:
    brought = Brought(tmp_path)
    (brought.folder / SPARK_FOLDER / "sources/0/0").write_bytes(b"v1\nelse")
    with pytest.raises(CorruptionError, match="sources/0/0"):
        brought.begin()
    assert "metadata" not in brought.location.data


@pytest.mark.parametrize("key", ["user string", "`a.user` string"])
def test_a_key_may_have_another_name(tmp_path: Path, key: str) -> None:
    """Of Spark's operators it has the name of the call: of groupBy("User") over a column user."""
    brought = Brought(tmp_path)
    brought.begin(key)
    (record,) = (one for one in brought.job.manifests() if one.operator == "op")
    assert json.loads(record.schemas[""])["fields"][0]["name"] == parse_schema(key, "key")[0].name


@pytest.mark.parametrize("key", ["user bigint", "user string, more string"])
def test_a_key_of_another_type_is_refused(tmp_path: Path, key: str) -> None:
    brought = Brought(tmp_path)
    with pytest.raises(StateMismatchError, match="Keys cannot change"):
        brought.begin(key)
    assert not brought.job.manifests()
    assert not brought.location.data


@pytest.mark.parametrize(
    "sink", ["delta", "org.apache.spark.sql.delta.sources.DeltaDataSource", "iceberg"]
)
def test_a_sink_that_would_not_know_a_batch_again_is_refused(tmp_path: Path, sink: str) -> None:
    brought = Brought(tmp_path, planned=True)
    with pytest.raises(CheckpointLocationError, match=r"planned batch 1 .*written twice"):
        brought.begin(sink_format=sink)
    assert not brought.job.manifests()
    assert not brought.location.data
    brought.begin(sink_format="kafka")


def test_a_sink_that_has_no_batch_to_write_again_is_taken(tmp_path: Path) -> None:
    brought = Brought(tmp_path)
    brought.begin(sink_format="delta")
    assert brought.job.manifests()
