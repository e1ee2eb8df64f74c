"""Delta and Iceberg tables: each checkpoint is one commit, nothing is there twice, nothing lost."""

from __future__ import annotations

import datetime
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as T

from statebackend.continuous.files.folder_access import Place
from statebackend.continuous.sinks.delta_sink import DeltaSink
from statebackend.continuous.sinks.iceberg_sink import IcebergSink
from statebackend.continuous.sinks.sink import SinkContext, run_name
from statebackend.errors import (
    ConnectorError,
    CorruptionError,
    OutputLostError,
    SchemaError,
    SettingError,
    UnsupportedTypeError,
)
from statebackend.schema.types import as_schema
from tests.continuous.sinks.lake_tables import LakeTable, Made, catalogs, deltalake

JOB, UID = "clicks", "out"
_writers = itertools.count()
ROWS = as_schema("day date, user string, n bigint, at timestamp")


def context(
    run: str = "r", generation: int = 1, subtask: int = 0, job_id: str = "j1"
) -> SinkContext:
    return SinkContext(JOB, UID, run_name(generation, run), subtask, 2, job_id)


def batch(*numbers: int) -> pa.RecordBatch:
    first = datetime.date(2026, 11, 1)
    days = [first + datetime.timedelta(days=n % 3) for n in numbers]
    at = [datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)] * len(numbers)
    columns = [
        pa.array(days, pa.date32()),
        pa.array([f"u{n}" if n % 5 else None for n in numbers], pa.string()),
        pa.array(numbers, pa.int64()),
        pa.array(at, pa.timestamp("us", "UTC")),
    ]
    return pa.record_batch(columns, names=ROWS.names)


@pytest.fixture(params=["delta", "iceberg"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LakeTable]:
    with closing(LakeTable(request.param, tmp_path)) as kind:
        yield kind


def prepared(sink: Made, of: SinkContext, checkpoint: int, *numbers: int) -> list[bytes]:
    """Of a writer of its own: as if each were of another run of the same driver."""
    of = replace(of, run=f"{of.run}-{next(_writers)}")
    writer = pickle.loads(pickle.dumps(sink)).open(of)
    writer.write(batch(*numbers))
    return list(writer.prepare(checkpoint))


@pytest.mark.parametrize("partition_by", [[], ["day"], ["user", "day"]])
def test_rows_are_there_after_the_commit_and_not_before(
    kind: LakeTable, partition_by: list[str]
) -> None:
    sink = kind.sink(ROWS, partition_by=partition_by)
    committer = kind.committer(sink)
    found = prepared(sink, context(), 1, *range(20))
    assert kind.read().num_rows == 0
    committer.commit(found)
    want = pa.Table.from_batches([batch(*range(20))])
    assert kind.read().select(want.column_names).sort_by("n").to_pylist() == want.to_pylist()


def test_a_checkpoint_is_one_commit_however_often_it_is_committed(kind: LakeTable) -> None:
    sink = kind.sink(ROWS)
    committer = kind.committer(sink)
    before = kind.commits()
    found = prepared(sink, context(subtask=0), 1, 1, 2) + prepared(sink, context(subtask=1), 1, 3)
    committer.commit(found)
    committer.commit(found)
    kind.committer(kind.sink(ROWS)).commit(found)  # a driver that comes back
    assert kind.numbers() == [1, 2, 3]
    assert kind.commits() == before + 1
    if kind.kind == "iceberg":  # how this sink commits is no property of the table
        with kind.opened() as table:
            assert not [name for name in table.properties if name.startswith("commit.")]


def test_what_an_aborted_checkpoint_prepared_comes_with_the_next(kind: LakeTable) -> None:
    sink = kind.sink(ROWS)
    committer = kind.committer(sink)
    first, second = prepared(sink, context(), 1, 1), prepared(sink, context(), 2, 2)
    committer.commit(first + second)
    committer.commit(first)  # it completes late
    committer.commit([*second, *prepared(sink, context(), 3, 3)])
    assert kind.numbers() == [1, 2, 3]


def test_a_later_run_goes_on_and_its_numbers_may_begin_again(kind: LakeTable) -> None:
    sink = kind.sink(ROWS)
    committer = kind.committer(sink)
    old = prepared(sink, context(generation=1), 7, 1)
    committer.commit(old)
    committer.commit(old)
    committer.commit(prepared(sink, context(generation=2), 1, 2))
    committer.commit(old)  # of the driver before, which thaws
    assert kind.numbers() == [1, 2]


def test_a_job_that_is_made_anew_under_its_name_is_another(kind: LakeTable) -> None:
    sink = kind.sink(ROWS)
    committer = kind.committer(sink)
    committer.commit(prepared(sink, context(generation=9), 7, 1))
    committer.commit(prepared(sink, context(generation=1, job_id="j2"), 1, 2))
    assert kind.numbers() == [1, 2]


class _Held(Place):
    """Says that a file is there only once it may; by then a commit has read its snapshot."""

    def __init__(self, place: Place, reached: threading.Event, go: threading.Event) -> None:
        super().__init__(place.url)
        self._reached, self._go = reached, go

    def size(self, name: str) -> int | None:
        self._reached.set()
        assert self._go.wait(20)
        return super().size(name)


def test_a_slow_first_commit_that_lands_after_the_look_up_changes_nothing(kind: LakeTable) -> None:
    sink = kind.sink(ROWS)
    found = prepared(sink, context(), 1, 1, 2)
    slow: Any = kind.committer(sink)
    reached, go = threading.Event(), threading.Event()
    slow._place = _Held(slow._place, reached, go)
    failed: list[BaseException] = []
    thread = threading.Thread(target=_noted(lambda: slow.commit(found), failed))
    thread.start()
    assert reached.wait(20)  # it has seen that the table does not have the files
    kind.committer(kind.sink(ROWS)).commit(found)
    go.set()
    thread.join(20)
    assert not failed
    assert kind.numbers() == [1, 2]


def test_commits_of_others_come_between_and_nothing_is_lost(kind: LakeTable) -> None:
    sink = kind.sink(ROWS)
    contexts = [SinkContext(JOB, f"out{k}", run_name(1, "r"), 0, 1, "j1") for k in range(3)]
    failed: list[BaseException] = []

    def run(of: SinkContext) -> None:
        committer = kind.committer(kind.sink(ROWS), of.uid)
        for checkpoint in range(1, 6):
            found = prepared(sink, of, checkpoint, 10 * checkpoint + int(of.uid[-1]))
            committer.commit(found)
            committer.commit(found)

    threads = [threading.Thread(target=_noted(lambda of=of: run(of), failed)) for of in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert kind.numbers() == sorted(10 * c + k for c in range(1, 6) for k in range(3))


def _noted(work: Callable[[], None], failed: list[BaseException]) -> Callable[[], None]:
    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    return run


def test_a_file_that_is_gone_before_its_commit_is_said(kind: LakeTable) -> None:
    sink = kind.sink(ROWS)
    committer = kind.committer(sink)
    found = prepared(sink, context(), 1, 1)
    done = prepared(sink, context(), 2, 2)
    committer.commit(found)
    for path in kind.folder.rglob("part-*.parquet"):
        path.unlink()
    committer.commit(found)  # it is in the table: what became of it since is the table's
    with pytest.raises(OutputLostError, match="vacuumed"):
        committer.commit(done)


def test_what_will_never_be_committed_is_removed_and_what_is_in_the_table_stays(
    kind: LakeTable,
) -> None:
    sink = kind.sink(ROWS)
    committer = kind.committer(sink)
    kept, gone = prepared(sink, context(), 1, 1), prepared(sink, context(), 2, 2)
    committer.commit(kept)
    committer.discard([*kept, *gone])
    assert kind.numbers() == [1]
    assert len(list(kind.folder.rglob("part-*.parquet"))) == 1
    writer = sink.open(context("closed"))
    writer.write(batch(5))
    writer.close()
    writer.close()
    assert len(list(kind.folder.rglob("part-*.parquet"))) == 1


def test_files_are_of_their_target_size_or_end_with_the_checkpoint(kind: LakeTable) -> None:
    sink = kind.sink(ROWS, target_file_bytes=1000)
    writer = sink.open(context())
    for n in range(0, 100, 10):
        writer.write(batch(*range(n, n + 10)))
    found = writer.prepare(1)
    assert 2 <= len(found) <= 10
    kind.committer(sink).commit(found)
    assert kind.numbers() == list(range(100))
    assert writer.prepare(2) == []


def test_small_batches_are_no_row_groups_of_their_own(kind: LakeTable) -> None:
    sink = kind.sink(ROWS, partition_by=["user"])
    writer = sink.open(context())
    for _ in range(50):
        writer.write(batch(1, 2))
    kind.committer(sink).commit(writer.prepare(1))
    files = list(kind.folder.rglob("part-*.parquet"))
    assert [pq.ParquetFile(one).num_row_groups for one in files] == [1, 1]
    assert kind.numbers() == [1] * 50 + [2] * 50


def test_a_table_that_lacks_a_column_is_refused_or_gets_it(kind: LakeTable) -> None:
    sink = kind.sink(ROWS)
    kind.committer(sink).commit(prepared(sink, context(), 1, 1))
    wider = T.StructType([*ROWS.fields, T.StructField("more", T.DoubleType())])
    with pytest.raises(SchemaError, match="more"):
        kind.committer(kind.sink(wider))
    sink = kind.sink(wider, add_columns=True)
    committer = kind.committer(sink)
    writer = sink.open(context(generation=2))
    rows = batch(2)
    writer.write(rows.append_column("more", pa.array([0.5])))
    committer.commit(writer.prepare(1))
    assert sorted((r["n"], r["more"]) for r in kind.read().to_pylist()) == [(1, None), (2, 0.5)]
    other = T.StructType([T.StructField("n", T.StringType())])
    with pytest.raises(SchemaError, match="string"):
        kind.committer(kind.sink(other))


def test_what_cannot_be_a_sink_is_refused_where_it_is_named(
    kind: LakeTable, tmp_path: Path
) -> None:
    with pytest.raises(SchemaError, match="nothing"):
        kind.sink(ROWS, partition_by=["nothing"])
    with pytest.raises(SettingError, match="no size"):
        kind.sink(ROWS, target_file_bytes=0)
    with pytest.raises(SettingError, match="namespace"):
        IcebergSink("counts")
    with pytest.raises(SettingError, match="once each"):
        DeltaSink(tmp_path, partition_by="day")
    with pytest.raises(UnsupportedTypeError, match="timestamp"):
        DeltaSink(tmp_path, partition_by=["at"]).check(ROWS)
    sink = kind.sink(ROWS)
    with pytest.raises(CorruptionError):
        kind.committer(sink).commit([b"\x93"])


def test_what_the_driver_knows_of_the_store_is_not_shipped(kind: LakeTable, tmp_path: Path) -> None:
    secret = "a secret of the store"
    sinks = [
        DeltaSink(tmp_path / "t", storage_options=lambda: {"AWS_SECRET_ACCESS_KEY": secret}),
        IcebergSink("a.b", catalog_properties=lambda: {"s3.secret-access-key": secret}),
    ]
    for sink in sinks:
        assert secret.encode() not in pickle.dumps(sink)


def test_a_delta_table_with_a_feature_that_is_not_fulfilled_is_refused(tmp_path: Path) -> None:
    table = deltalake.DeltaTable.create(tmp_path / "t", deltalake.Schema.from_arrow(batch().schema))
    table.alter.add_constraint({"positive": "n > 0"})
    sink = DeltaSink(tmp_path / "t")
    sink.check(ROWS)
    with pytest.raises(SchemaError, match="positive"):
        sink.committer(JOB, UID)


def test_a_delta_table_that_gives_out_numbers_is_refused(tmp_path: Path) -> None:
    number = {"delta.identity.start": 1, "delta.identity.step": 1}
    schema = deltalake.Schema(
        [deltalake.Field("n", "long"), deltalake.Field("id", "long", metadata=number)]
    )
    deltalake.DeltaTable.create(tmp_path / "t", schema)
    sink = DeltaSink(tmp_path / "t")
    sink.check(as_schema("n bigint"))
    with pytest.raises(SchemaError, match="id"):
        sink.committer(JOB, UID)


def test_an_iceberg_table_is_made_with_its_partitions_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.table import update

    kind = LakeTable("iceberg", tmp_path)

    def cut(*_: Any) -> Any:
        raise OSError("the driver is gone")

    with monkeypatch.context() as patched:
        patched.setattr(update.spec.UpdateSpec, "add_identity", cut)
        with pytest.raises(ConnectorError, match="gone"):
            kind.sink(ROWS, partition_by=["day"])
    kind.sink(ROWS, partition_by=["day"])
    with kind.opened() as table:
        assert [field.name for field in table.spec().fields] == ["day"]


def test_two_starts_that_add_columns_at_once_end_with_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = LakeTable("iceberg", tmp_path)
    kind.sink(ROWS)

    def before(opened: Any) -> Any:  # what the first one sees, before the second one's commit
        loaded = opened._catalog.load_table("shop.t")
        with kind.opened() as table, table.update_schema() as change:
            change.union_by_name(pa.schema([pa.field("theirs", pa.int64())]))
        return loaded

    wider = T.StructType([*ROWS.fields, T.StructField("ours", T.DoubleType())])
    monkeypatch.setattr("statebackend.continuous.sinks.iceberg_sink._Table.load", before)
    with pytest.raises(ConnectorError, match=r"Adding columns to the table shop\.t"):
        kind.sink(wider, add_columns=True)


def test_an_iceberg_table_has_partitions_of_its_own(tmp_path: Path) -> None:
    from pyiceberg.transforms import BucketTransform, DayTransform

    kind = LakeTable("iceberg", tmp_path)
    kind.sink(ROWS)
    with kind.opened() as table, table.update_spec() as update:
        update.add_field("at", DayTransform())
        update.add_identity("day")
    sink = kind.sink(ROWS)
    kind.committer(sink).commit(prepared(sink, context(), 1, *range(9)))
    kind.close()
    assert kind.numbers() == list(range(9))
    with kind.opened() as table, table.update_spec() as update:
        update.add_field("user", BucketTransform(4))
    with pytest.raises(SchemaError, match="bucket"):
        kind.sink(ROWS)


def test_a_sink_that_is_done_has_no_connection_to_the_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = LakeTable("iceberg", tmp_path)
    opened: list[Any] = []
    load = catalogs.load_catalog

    def noted(*args: Any, **given: Any) -> Any:
        opened.append(load(*args, **given))
        return opened[-1]

    monkeypatch.setattr(catalogs, "load_catalog", noted)
    sink = kind.sink(ROWS)
    with pytest.raises(SchemaError):
        kind.sink(as_schema("n string"))
    kind.committer(sink).commit(prepared(sink, context(), 1, 1))
    kind.close()
    assert [catalog.engine.pool.checkedin() for catalog in opened] == [0, 0, 0]
