"""Lake tables on a real S3 server, by Arrow's and delta-rs' own clients."""

from __future__ import annotations

import datetime
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from recovery.drill.proxy.fault_plan import Fault, Rule, Script
from recovery.drill.proxy.s3_requests import Verb
from statebackend.continuous.files.folder_access import Place
from statebackend.continuous.sinks.delta_sink import DeltaSink
from statebackend.continuous.sinks.file_sink import FileSink
from statebackend.continuous.sinks.iceberg_sink import IcebergSink
from statebackend.continuous.sinks.sink import SinkContext, run_name
from statebackend.schema.types import as_schema
from tests.continuous.sinks.lake_tables import catalogs, deltalake

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.s3 import S3

pytestmark = pytest.mark.full  # starts a server
ROWS = as_schema("day date, n bigint")


@pytest.fixture
def s3(ministack: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    monkeypatch.setenv("AWS_ENDPOINT_URL", ministack.plain_url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return ministack


def batch(*numbers: int) -> pa.RecordBatch:
    first = datetime.date(2026, 11, 1)
    days = pa.array([first + datetime.timedelta(days=n % 3) for n in numbers], pa.date32())
    return pa.record_batch({"day": days, "n": pa.array(numbers, pa.int64())})


def prepared(sink: Any, run: str, checkpoint: int, *numbers: int) -> list[bytes]:
    writer = sink.open(SinkContext("job", "out", run_name(1, run), 0, 1, "j1"))
    writer.write(batch(*numbers))
    return list(writer.prepare(checkpoint))


def delta(s3: S3, url: str, endpoint: str) -> DeltaSink:
    options = {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    sink = DeltaSink(url, partition_by=["day"], storage_options=lambda: options)
    sink.check(ROWS)
    return sink


def is_log(key: str) -> bool:
    return "_delta_log" in key


def numbers(url: str) -> list[int]:
    return sorted(deltalake.DeltaTable(url).to_pyarrow_table()["n"].to_pylist())


def test_a_commit_that_is_held_on_its_way_lands_after_the_other_and_changes_nothing(s3: S3) -> None:
    url = s3.fresh_uri()
    sink = delta(s3, url, s3.plain_url)
    sink.committer("job", "out").commit(prepared(sink, "a", 1, 1, 2))
    found = prepared(sink, "b", 2, 3, 4)
    with s3.faulty(tls=False) as proxy:
        slow = delta(s3, url, proxy.url).committer("job", "out")
        proxy.plan = Script(
            Rule(
                fault=Fault.hold(),
                key=lambda key: "_delta_log" in key,
                nth={1},
                verbs={Verb.PUT_IF},
            )
        )
        failed: list[BaseException] = []

        def commit() -> None:
            try:
                slow.commit(found)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=commit)
        thread.start()
        assert proxy.wait_held(timeout_s=20)  # the log's next entry, based on the version before
        sink.committer("job", "out").commit(found)
        proxy.release()
        thread.join(30)
    assert not failed
    assert numbers(url) == [1, 2, 3, 4]
    sink.committer("job", "out").commit(found)
    assert numbers(url) == [1, 2, 3, 4]


def test_an_iceberg_table_and_files_lie_there_too(s3: S3, tmp_path: Path) -> None:
    url = s3.fresh_uri()
    properties = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/c.db",
        "warehouse": url,
        "s3.endpoint": s3.plain_url,
        "s3.region": "us-east-1",
    }
    sink = IcebergSink("shop.t", partition_by=["day"], catalog_properties=lambda: properties)
    sink.check(ROWS)
    found = prepared(sink, "a", 1, *range(9))
    for _ in range(2):
        with closing(sink.committer("job", "out")) as committer:
            committer.commit(found)
    with catalogs.load_catalog("default", **properties) as catalog:
        rows = catalog.load_table("shop.t").scan().to_arrow()
    assert sorted(rows["n"].to_pylist()) == list(range(9))

    files = FileSink(f"{url}/files")
    found = prepared(files, "a", 1, 1, 2)
    for _ in range(2):
        files.committer("job", "out").commit(found)
    assert [name.rpartition(".")[2] for name, _ in Place(f"{url}/files").files()] == ["parquet"]
