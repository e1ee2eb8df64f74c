"""Results do not hang on how the session is set."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F

from statebackend import KeyedProcessor
from statebackend.spark.frames.initial_state_writer import write_initial
from statebackend.spark.session_settings import warn_of_partial_retries
from statebackend.spark.start import launch
from statebackend.spark.start.checkpoint_location import FILE_MANAGER, CheckpointLocation
from tests.spark.local.processors import Typed
from tests.spark.local.world import checkpoints, durable_state, finish, setting, sources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa
    from pyspark.sql import DataFrame

    from tests.spark.local.world import World

CHECKPOINTING = "org.apache.spark.sql.execution.streaming.checkpointing"


def test_spark_starts_no_processes_for_its_logs_on_local_disks(
    world: World, tmp_path: Path
) -> None:
    location = CheckpointLocation(world.spark, str(tmp_path / "checkpoint"))
    found = location.file_manager(None)
    assert found == f"{CHECKPOINTING}.FileSystemBasedCheckpointFileManager"
    assert location.file_manager(f"file://{tmp_path}/out") == found
    assert location.file_manager("no-file-system://host/out") is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spark.sql.adaptive.enabled", "false"),
        ("spark.sql.execution.arrow.maxRecordsPerBatch", "3"),
        ("spark.sql.execution.arrow.useLargeVarTypes", "true"),
        ("spark.sql.ansi.enabled", "false"),
        (FILE_MANAGER, f"{CHECKPOINTING}.FileContextBasedCheckpointFileManager"),
    ],
)
def test_a_setting_changes_nothing(world: World, key: str, value: str) -> None:
    world.input.add_batches(2)
    with setting(world.spark, key, value):
        df = world.input.stream(world.spark)
        backend = world.backend()
        world.run(backend, world.ledger(backend, df.union(df.where("false"))))
    world.check(backend)
    assert checkpoints(backend) == [("ledger", 0), ("ledger", 1)]


CHECKSUM = "spark.sql.shuffle.orderIndependentChecksum"


@pytest.mark.parametrize("how", ["start", "starting"])
def test_a_query_retries_stages_whole_although_the_session_has_that_off(
    world: World, how: str
) -> None:
    world.input.add_batches(2)
    names = [f"{CHECKSUM}.enabled", f"{CHECKSUM}.enableFullRetryOnMismatch"]
    seen: list[str | None] = []
    with setting(world.spark, names[0], "false"), setting(world.spark, names[1], "false"):
        backend = world.backend()
        frame = world.ledger(backend)

        def see(batch: DataFrame, number: int) -> None:
            world.sink(batch, number)
            seen.extend(batch.sparkSession.conf.get(name) for name in names)

        if how == "start":
            query = world.start(backend, frame, see)
        else:
            with backend.starting():
                query = world.writer(frame, see).start()
        stream: Any = query._jsq.streamingQuery()
        conf = stream.sparkSessionForStream().conf()
        assert [conf.get(name) for name in names] == ["true", "true"]
        finish(query)
        assert [world.spark.conf.get(name) for name in names] == ["false", "false"]
    assert seen == ["true"] * 4
    world.check(backend)


def test_a_release_that_cannot_retry_stages_whole_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_partial_retries(world.spark)
    assert caplog.messages == [], "every supported release can"
    monkeypatch.setattr(type(world.spark.conf), "isModifiable", lambda conf, name: False)
    warn_of_partial_retries(world.spark)
    (message,) = caplog.messages
    assert f"{CHECKSUM}.enableFullRetryOnMismatch" in message


def test_an_initial_state_is_written_by_stages_that_are_retried_whole(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{CHECKSUM}.enabled", f"{CHECKSUM}.enableFullRetryOnMismatch"]
    seen: list[str | None] = []

    def see(state: Any, **given: Any) -> Any:
        seen.extend(world.spark.conf.get(name) for name in names)
        return write_initial(state, **given)

    monkeypatch.setattr(launch, "write_initial", see)
    world.input.add_batches(1)
    with setting(world.spark, names[0], "false"), setting(world.spark, names[1], "false"):
        backend = world.backend()
        frame = backend.process(
            world.input.stream(world.spark),
            keys="k",
            processor=Held(),
            output_schema="k string, id bigint",
            uid="held",
            initial_state=world.spark.createDataFrame([("k0", 7)], "k string, id bigint"),
        )
        world.run(backend, frame)
        assert [world.spark.conf.get(name) for name in names] == ["false", "false"]
    assert seen == ["true", "true"]


class Held(KeyedProcessor):
    """Keeps what the initial state has for a key."""

    def open(self, ctx: Any) -> None:
        self.id = ctx.value_state("id", "id bigint")

    def on_initial(self, key: Any, rows: Any, ctx: Any) -> None:
        self.id.update((next(rows).id,))

    def process(self, key: Any, rows: Any, ctx: Any) -> None:
        pass


BATCH_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches


def _kept(k: int) -> int:
    return k


def _with_own(df: DataFrame) -> DataFrame:
    own = F.udf(_kept, "int", useArrow=False)
    return df.select(own("k").alias("k"), "n")


def _plain(df: DataFrame) -> DataFrame:
    return df


@pytest.mark.parametrize(
    ("schema", "said", "before", "lifted"),
    [
        ("k int, n bigint", None, _plain, True),
        ("k int, n bigint", "100", _plain, False),
        ("k string, n bigint", None, _plain, False),
        ("k int, n bigint", None, lambda df: df.mapInArrow(_same, df.schema), False),
        (
            "k int, n bigint",
            None,
            _with_own,
            False,
        ),
    ],
    ids=["narrow", "said by the user", "texts", "a user's mapInArrow", "a user's function"],
)
def test_only_batches_of_narrow_rows_are_not_measured(
    make_world: Callable[..., World],
    schema: str,
    said: str | None,
    before: Callable[[DataFrame], DataFrame],
    lifted: bool,
) -> None:
    world = make_world(schema=schema)
    world.input.add([{"k": i % 7, "n": i} for i in range(50)])
    with setting(world.spark, BATCH_BYTES, said) if said else contextlib.nullcontext():
        backend = world.backend()
        df = before(world.input.stream(world.spark))
        frame = backend.aggregate(df, keys="k", aggregations={"n": ("sum", "n")}, uid="totals")
        writer = frame.writeStream.format("memory").queryName("narrow").outputMode("append")
        writer = writer.option("checkpointLocation", str(world.root / "checkpoint-narrow"))
        query = backend.start(writer.trigger(availableNow=True))
        query.awaitTermination()
        stream: Any = query._jsq.streamingQuery()
        found = stream.sparkSessionForStream().conf().get(BATCH_BYTES, "1")
        assert world.spark.conf.get(BATCH_BYTES, None) == said, "the session is as it was"
    assert (found == str((1 << 31) - 1)) is lifted
    total = world.spark.table("narrow").groupBy().sum("n").collect()[0][0]
    assert total == sum(range(50))


def test_batches_are_measured_for_a_foreach_batch_function(
    make_world: Callable[..., World],
) -> None:
    world = make_world(schema="k int, n bigint")
    world.input.add([{"k": i % 7, "n": i} for i in range(50)])
    seen: list[str | None] = []
    backend = world.backend()
    df = world.input.stream(world.spark)
    frame = backend.aggregate(df, keys="k", aggregations={"n": ("sum", "n")}, uid="totals")

    def see(batch: DataFrame, _: int) -> None:
        seen.append(batch.sparkSession.conf.get(BATCH_BYTES, None))
        batch.collect()

    world.run(backend, frame, see)
    assert seen == [None], "what it does with its rows is not known"


TYPES = (
    "k string, id bigint, flag boolean, small smallint, ratio double, price decimal(12,3), "
    "day date, at timestamp, plain timestamp_ntz, raw binary, tags array<string>, "
    "scores map<string,int>, inner struct<a:int,b:string>"
)
ROWS: list[dict[str, Any]] = [
    {
        "k": f"k{i % 2}",
        "id": i,
        "flag": i % 3 == 0,
        "small": -i,
        "ratio": i / 7,
        "price": f"{i}.125",
        "day": f"2026-03-0{1 + i}",
        "at": f"2026-07-0{1 + i}T23:30:00.123456Z",
        "plain": f"2026-07-0{1 + i}T23:30:00",
        "raw": "AAEC",
        "tags": ["x", None, "ä"][: i % 4],
        "scores": {"a": i},
        "inner": {"a": i, "b": None},
    }
    if i % 3
    else {"k": f"k{i % 2}", "id": i}
    for i in range(8)
]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_every_type_goes_through_state_unchanged_in_any_time_zone(
    make_world: Callable[..., World], zone: str
) -> None:
    with setting(make_world("none").spark, "spark.sql.session.timeZone", zone):
        world = make_world(schema=TYPES)
        for i in range(0, len(ROWS), 2):
            world.input.add(ROWS[i : i + 2])
        backend = world.backend(parallelism=1)
        frame = backend.transform_with_state(
            world.input.stream(world.spark, files=2),
            keys=["k", "at"],
            processor=Typed(TYPES),
            output_schema=TYPES,
            uid="typed",
        )
        plain = world.spark.read.schema(TYPES).json(str(world.input.folder))
        wanted = {(r["k"], r["at"]): tuple(r) for r in plain.orderBy("id").collect()}
        world.run(backend, frame, lambda f, _: [f.collect()])
        assert durable_state(backend, "typed")["last"] == wanted


def test_what_comes_out_of_state_is_what_spark_would_show(
    make_world: Callable[..., World],
) -> None:
    world = make_world(schema=TYPES)
    with setting(world.spark, "spark.sql.session.timeZone", "Asia/Tokyo"):
        world.input.add(ROWS)
        world.input.add(ROWS[::-1])
        backend = world.backend(parallelism=2)
        frame = backend.transform_with_state(
            world.input.stream(world.spark),
            keys="id",
            processor=Typed(TYPES),
            output_schema=TYPES,
            uid="typed",
        )
        found: list[Any] = []
        world.run(backend, frame, lambda f, _: found.extend(f.collect()))
        plain = world.spark.read.schema(TYPES).json(str(world.input.folder / "000.json"))
        assert sorted(found, key=lambda r: r.id) == plain.orderBy("id").collect()


def test_an_aggregation_that_spark_refuses_is_refused_in_its_first_batch(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend()
    frame = world.ledger(backend).groupBy("k").agg(F.sum("n"))
    text = world.fail(backend, frame)  # append mode, and no watermark
    assert "UNSUPPORTED_STREAMING_OPERATOR_WITHOUT_WATERMARK" in text
    assert world.committed() == []


@pytest.mark.xfail(
    strict=True,
    reason="Spark's operation check is off for the whole plan while backend.start() starts it: "
    "what else it would refuse (stacked aggregations in update mode, say) is let pass as well.",
)
def test_aggregations_that_spark_would_not_stack_are_refused_here_too(world: World) -> None:
    world.input.add_batches(2)
    backend = world.backend()
    counts = world.input.stream(world.spark).groupBy("k").count()
    frame = world.ledger(backend, counts.select("k", F.col("count").alias("id")))
    writer = world.writer(frame.groupBy("k").agg(F.sum("n"))).outputMode("update")
    with pytest.raises(AnalysisException):
        backend.start(writer).awaitTermination(60)


def test_a_frame_of_another_session_is_started_all_the_same(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend()
    df = world.input.stream(world.spark.newSession())
    world.run(backend, world.ledger(backend, df))
    world.check(backend)
    assert set(sources(backend).values()) == {"empty"}
