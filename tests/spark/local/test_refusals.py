"""A wrong use is refused where it is made, with its own error, and changes nothing."""

from __future__ import annotations

import contextlib
import shutil
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F
from pyspark.sql.types import NullType, Row, StringType, StructField, StructType

from statebackend import StateBackend
from statebackend.errors import (
    CheckpointLocationError,
    CorruptionError,
    DuplicateUidError,
    JobRunningError,
    MaxParallelismChangedError,
    MissingUidError,
    ProcessorError,
    RewindError,
    SchemaError,
    SettingError,
    SparkConnectError,
    StateMismatchError,
    StoreUnreachableError,
    UnsupportedQueryError,
    UnsupportedTypeError,
)
from statebackend.spark.start import launch
from tests.spark.local.processors import (
    LEDGER_OUTPUT,
    Ledger,
    Misfit,
    Noisy,
    Rules,
    Stateless,
    StuckLedger,
)
from tests.spark.local.world import (
    World,
    checkpoints,
    durable_state,
    failure,
    finish,
    until,
    user_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def old(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A job with one epoch, which no test here may change."""
    world = World(spark, tmp_path_factory.mktemp("old") / "world")
    world.input.add_batches(1)
    backend = world.run_ledger(max_parallelism=64)
    before = checkpoints(backend)
    yield world
    assert checkpoints(backend) == before
    assert world.committed() == [0]
    world.input.add_batches(1)
    world.check(world.run_ledger(max_parallelism=64))
    for made in world.backends:
        made.close()


def _frame(backend: StateBackend, df: DataFrame, processor: Any = None, **given: Any) -> DataFrame:
    given = {"keys": "k", "output_schema": LEDGER_OUTPUT, "uid": "ledger", **given}
    return backend.transform_with_state(df, processor=processor or Ledger(), **given)


@pytest.fixture
def df(old: World) -> DataFrame:
    return old.input.stream(old.spark)


# --- how a query is started ----------------------------------------------------------------------


def test_a_start_by_hand_is_refused_by_spark(old: World) -> None:
    backend = old.backend()
    with pytest.raises(AnalysisException, match=r"(?i)outer"):
        old.writer(old.ledger(backend)).start()


def test_a_start_by_hand_past_sparks_check_is_refused_by_the_tasks(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend()
    frame = world.ledger(backend)
    check = "spark.sql.streaming.unsupportedOperationCheck"
    world.spark.conf.set(check, "false")
    try:
        text = failure(world.writer(frame).start())
    finally:
        world.spark.conf.set(check, "true")
    assert "SB5002" in text
    assert "backend.start(writer)" in text


def test_the_start_leaves_sparks_check_and_the_thread_as_they_were(world: World) -> None:
    from statebackend.spark.worker.batch_context import ENDPOINT_PROPERTY

    world.input.add_batches(1)
    world.run_ledger()
    assert world.spark.conf.get("spark.sql.streaming.unsupportedOperationCheck") == "true"
    assert world.spark.sparkContext.getLocalProperty(ENDPOINT_PROPERTY) is None


def test_a_table_may_be_the_sink(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend()
    frame = world.ledger(backend)
    table = f"ledger_{world.root.parent.name}".replace("-", "_").lower()[:60]

    def writer() -> Any:
        options = {"checkpointLocation": str(world.location)}
        return frame.writeStream.options(**options).trigger(availableNow=True)

    with backend.starting():
        query = writer().toTable(table)
    finish(query)
    world.input.add_batches(1)
    with backend.starting():
        query = writer().toTable(table)
    finish(query)
    rows = world.spark.table(table).collect()
    world.spark.sql(f"drop table {table}")
    for batch in (0, 1):
        world.sink.write([r for r in rows if (max(r.ids) > 20) == bool(batch)], batch)
    world.check(backend)


def test_a_start_without_new_data_inside_a_block_is_fine(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend()
    frame = world.ledger(backend)
    world.run(backend, frame)
    with backend.starting():
        # With nothing to do such a query may have ended before the block has.
        finish(world.writer(frame).start())
    world.input.add_batches(1)
    world.run(backend, frame)
    world.check(backend)


def test_a_block_that_is_told_the_location_goes_back_by_a_batch_too(world: World) -> None:
    world.input.add_batches(2)
    backend = world.backend()
    frame = world.ledger(backend)
    world.run(backend, frame, lambda f, batch: None if batch else world.sink(f, batch))
    assert backend.lineages()["ledger"].last_epoch == 0
    world.input.add_batches(1)
    with pytest.raises(RewindError, match="Batch 1 of"), backend.starting():
        world.writer(frame).start()
    with backend.starting(checkpoint_location=str(world.location)):
        query = world.writer(frame).start()
    finish(query)
    world.check(backend)


def test_a_start_without_new_data_is_no_failure(old: World) -> None:
    backend = old.backend()
    frame = old.ledger(backend)
    with backend.starting():
        finish(old.writer(frame).start())
    assert backend.failure is None


def test_two_starts_in_one_block_are_refused(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend()
    frame = world.ledger(backend)
    with pytest.raises(UnsupportedQueryError, match="2 queries were started"), backend.starting():
        queries = [
            world.writer(frame, checkpointLocation=str(world.root / name)).start() for name in "ab"
        ]
    for query in queries:
        assert "SB1013" in failure(query)
    assert checkpoints(backend) == []


def test_a_backend_without_operators_is_refused(old: World) -> None:
    with pytest.raises(SettingError, match="no operator yet"), old.backend().starting():
        pass


def test_asynchronous_progress_tracking_is_refused(old: World, df: DataFrame) -> None:
    backend = old.backend()
    writer = old.writer(_frame(backend, df)).option("asyncProgressTrackingEnabled", "true")
    with pytest.raises(UnsupportedQueryError, match="Asynchronous progress tracking"):
        backend.start(writer)


@contextlib.contextmanager
def _running(world: World) -> Iterator[tuple[StateBackend, DataFrame]]:
    """A query that is in the midst of a batch inside the block, and ends well after it."""
    gate, begun = world.root / "gate", world.root / "begun"
    gate.touch()
    # One subtask: the other slot is for whoever else wants to start.
    backend = world.backend(parallelism=1)
    frame = world.ledger(backend, processor=StuckLedger(str(gate), str(begun)))
    query = world.start(backend, frame, backend.checked(world.sink))
    try:
        until(begun.exists, "a key's call has begun")
        yield backend, frame
    finally:
        gate.unlink()
    finish(query)


def test_a_job_that_is_running_is_not_started_again(world: World) -> None:
    world.input.add_batches(1)
    with _running(world):
        second = world.backend(parallelism=1)
        with pytest.raises(JobRunningError, match="is being run by query"):
            world.start(second, world.ledger(second))
    world.check(second)


def test_a_refused_second_start_leaves_the_running_query_alone(world: World) -> None:
    world.input.add_batches(2)
    with _running(world) as (backend, frame):
        with pytest.raises(JobRunningError):
            world.start(backend, frame)
        assert backend.epoch == 0, "what the backend tells is still about the running query"
    world.check(backend)


def test_a_job_is_known_by_its_place_however_that_is_written(world: World) -> None:
    world.input.add_batches(1)
    with _running(world):
        second = world.backend(uri=f"{world.store}/", parallelism=1)
        with pytest.raises(JobRunningError):
            world.start(second, world.ledger(second))


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
            match=r"state of Spark's own operator \(transformWithState.*initial_state=",
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
    with pytest.raises(SchemaError, match="input is a GroupedData"):
        backend.aggregate(df.groupBy("k"), keys="k", aggregations={"n": "count"}, uid="a")  # type: ignore[arg-type]
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


# --- schemas, keys and values --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"output_schema": "n bigint oops int"}, SchemaError, "the output of operator 'ledger'"),
        ({"output_schema": 7}, SchemaError, "is a int"),
        ({"processor": Stateless(s="n bigiant")}, SchemaError, "state 's' of operator 'ledger'"),
        ({"keys": "nobody"}, SchemaError, "0 columns named 'nobody'"),
        ({"keys": []}, SchemaError, "The keys are"),
        ({"keys": ["k", "k"]}, SchemaError, "name a column twice"),
        ({"keys": ["k", 3]}, SchemaError, "The keys are"),
        ({"uid": ""}, SettingError, "the uid ''"),
        ({"processor": Stateless(s="v interval year")}, UnsupportedTypeError, "interval year"),
    ],
)
def test_what_cannot_be_is_refused_at_the_call(
    old: World, df: DataFrame, given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        _frame(old.backend(), df, **given)


@pytest.mark.parametrize("ddl", ["k map<string, int>, id bigint", "k variant, id bigint"])
def test_a_key_of_an_unsupported_type_is_refused_at_the_call(old: World, ddl: str) -> None:
    df = old.spark.readStream.schema(ddl).json(str(old.input.folder))
    with pytest.raises(UnsupportedTypeError, match="'k'"):
        _frame(old.backend(), df)


@pytest.mark.parametrize("ddl", ["k string, id bigint, v variant"])
def test_a_column_that_arrow_cannot_carry_is_refused_with_its_name(old: World, ddl: str) -> None:
    df = old.spark.readStream.schema(ddl).json(str(old.input.folder))
    try:
        _frame(old.backend(), df)
    except UnsupportedTypeError as error:
        assert "'v'" in str(error)  # noqa: PT017  (either is fine, an untyped error is not)


def test_an_output_type_that_arrow_cannot_carry_is_refused_with_a_typed_error(
    old: World, df: DataFrame
) -> None:
    output = StructType([StructField("k", StringType()), StructField("nothing", NullType())])
    try:
        _frame(old.backend(), df, output_schema=output)
    except SchemaError as error:
        assert "nothing" in str(error)  # noqa: PT017


def test_a_static_frame_is_refused_where_rows_of_two_kinds_or_aggregates_are_asked_for(
    old: World, df: DataFrame
) -> None:
    static = old.spark.createDataFrame([("a", 1)], "k string, id bigint")
    backend: Any = old.backend()
    same = {"keys": "k", "processor": Rules(), "output_schema": "k string", "uid": "u"}
    for call in (
        lambda: backend.connect(df, static, **same),
        lambda: backend.connect(static, df, **same),
        lambda: backend.connect_broadcast(static, df, **same),
        lambda: backend.aggregate(static, keys="k", aggregations={"n": "count"}, uid="u"),
    ):
        with pytest.raises(SchemaError, match="not a streaming frame"):
            call()


def test_a_processor_that_cannot_be_pickled_is_refused_at_the_call(
    old: World, df: DataFrame
) -> None:
    processor = Ledger()
    processor.lock = threading.Lock()
    with pytest.raises(ProcessorError, match=r"cannot be shipped .*lock") as caught:
        _frame(old.backend(), df, processor)
    assert "in init(), not in __init__()" in str(caught.value)


def test_a_null_key_says_how_to_filter_it_out(world: World) -> None:
    world.input.add_keys("a", None, "b", None)
    backend = world.backend(parallelism=1)
    text = world.fail(backend, world.ledger(backend))
    assert "SB1004" in text
    assert "2 rows have a null key (column 'k')" in text
    assert 'df.where(col("k").isNotNull())' in text
    assert checkpoints(backend) == []


def test_a_value_that_does_not_fit_its_schema_is_named_with_the_users_line(world: World) -> None:
    world.input.add_keys("a")
    backend = world.backend(parallelism=1)
    text = world.fail(backend, world.ledger(backend, processor=Misfit()))
    assert "SB1005" in text
    assert "Field 'n' is bigint and cannot hold a value of type str" in text
    assert user_line("the user's misfit") in text


# --- in the processor ----------------------------------------------------------------------------
# What is said of each mistake: tests/api/mistakes. Here: that Spark passes it on, with the
# user's line, and that the batch leaves no trace.


class _Late(Ledger):
    def close(self) -> None:
        self.state.get()  # a look at no key


class _Timeless(Ledger):
    def init(self, handle: Any) -> None:
        super().init(handle)
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        yield from super().handleInputRows(key, rows, timerValues)
        self.handle.registerTimer(5)  # in no time mode


class _Scalars(Ledger):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        list(super().handleInputRows(key, rows, timerValues))
        return len(key)


class _Misspelt(Ledger):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        list(super().handleInputRows(key, rows, timerValues))
        yield Row(k=key[0], totel=1)  # a misspelt field


class _MisspeltFrames(Ledger):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        import pandas as pd

        yield pd.DataFrame({"k": [key[0]], "totel": [1]})  # a misspelt column


class _Hasty(Ledger):
    def init(self, handle: Any) -> None:
        super().init(handle)
        handle.registerTimer(5)  # before there is a key


def _line(mark: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, start=1) if line.endswith(f"# {mark}")]
    return f"{__file__}:{number} in "


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (_Late, ["SB1015", "State 'acc' was used outside", _line("a look at no key") + "close"]),
        (_Timeless, ["SB1013", "time_mode=", _line("in no time mode") + "handleInputRows"]),
        (_Scalars, ["SB1014", "returned what is no iterable of rows ('int'"]),
    ],
)
def test_a_mistake_in_a_processor_is_told_with_its_line_and_leaves_no_trace(
    world: World, processor: type[Ledger], said: list[str]
) -> None:
    world.input.add_batches(1)
    world.run_ledger()
    world.input.add_batches(1)
    backend = world.backend()
    text = world.fail(backend, world.ledger(backend, processor=processor()))
    for one in said:
        assert one in text
    world.check(world.run_ledger())


@pytest.mark.parametrize(
    ("flavour", "processor", "mark"),
    [
        ("rows", _Misspelt, "a misspelt field"),
        ("pandas", _MisspeltFrames, "a misspelt column"),
    ],
)
def test_an_output_field_that_the_schema_does_not_have_is_told_with_its_line_and_key(
    world: World, flavour: str, processor: type[Ledger], mark: str
) -> None:
    world.input.add_keys("only")
    backend = world.backend(parallelism=1)
    frame = _frame(
        backend,
        world.input.stream(world.spark),
        processor(),
        output_schema="k string, total bigint",
        flavour=flavour,
    )
    text = world.fail(backend, frame)
    assert "SB1005" in text
    assert "'totel'" in text
    assert "struct<k:string,total:bigint>" in text
    assert f"for key ('only',) at {_line(mark)}handleInputRows" in text
    assert flavour == "pandas" or "did you mean 'total'?" in text
    assert checkpoints(backend) == []


def test_a_timer_in_init_is_refused_at_the_call_with_its_line(old: World, df: DataFrame) -> None:
    for given in ({}, {"time_mode": "processing"}):
        with pytest.raises(UnsupportedQueryError) as caught:
            _frame(old.backend(), df, _Hasty(), **given)
        assert _line("before there is a key") + "init" in str(caught.value)


# --- places --------------------------------------------------------------------------------------


def test_an_unset_local_dir_is_worth_a_warning(world: World) -> None:
    with pytest.warns(UserWarning, match=r"local_dir is not set.*survives restarts") as caught:
        world.backend(local_dir=None)
    assert caught[0].filename == __file__.replace("test_refusals", "world")


def test_a_set_local_dir_is_worth_none(world: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world.backend()


def test_a_local_dir_that_cannot_be_used_is_named(world: World) -> None:
    (world.root / "file").write_text("in the way")
    world.input.add_batches(1)
    backend = world.backend(local_dir=str(world.root / "file" / "below"))
    text = world.fail(backend, world.ledger(backend))
    assert "SB6001" in text
    assert str(world.root / "file" / "below") in text
    backend = world.run_ledger()
    world.check(backend)


def test_a_store_that_cannot_be_written_is_refused_at_the_call(world: World) -> None:
    (world.root / "file").write_text("in the way")
    backend = world.backend(uri=(world.root / "file" / "below").as_uri())
    with pytest.raises(StoreUnreachableError, match="A part of the path is a file"):
        world.ledger(backend)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"uri": ""}, "No uri was given"),
        ({"uri": "relative/path"}, "relative path"),
        ({"uri": "gopher://host/x"}, "'gopher'"),
        ({"commit": "never"}, "spark.statebackend.commit"),
        ({"parallelism": "many"}, "spark.statebackend.parallelism"),
        ({"settings": {"paralelism": 3}}, "no setting 'paralelism'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_at_once(
    old: World, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingError, match=said):
        old.backend(**given)


@pytest.mark.parametrize("job", ["..", "."])
def test_a_jobs_name_stays_below_its_uri(old: World, job: str) -> None:
    try:
        backend = old.backend(job=job)
    except SettingError:
        return
    assert backend._job.store_uri.rstrip("/") != f"{old.store.as_uri()}/{job}"


def test_a_spark_connect_session_is_refused(tmp_path: Any) -> None:
    stub = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})
    with pytest.raises(SparkConnectError, match="classic"):
        StateBackend(stub(), uri=tmp_path.as_uri(), local_dir=str(tmp_path))


# --- damage --------------------------------------------------------------------------------------


def test_a_cut_record_is_named_and_nothing_is_lost_once_it_is_back(world: World) -> None:
    world.input.add_batches(2)
    backend = world.backend()
    frame = world.ledger(backend)
    world.run(backend, frame)
    newest = world.objects("log")[-1]
    whole = newest.read_bytes()
    newest.write_bytes(whole[: len(whole) // 2])
    world.input.add_batches(1)
    with pytest.raises(CorruptionError, match=newest.name):
        world.start(backend, frame)
    with pytest.raises(CorruptionError, match=newest.name):
        world.ledger(world.backend())
    newest.write_bytes(whole)
    world.run(backend, frame)
    world.check(backend)


def _restart_after(world: World, damage: Callable[[], None]) -> StateBackend:
    world.input.add_batches(2)
    world.run_ledger(settings={"open_stores": 0})  # an open store reads from its caches
    damage()
    world.input.add_batches(1)
    backend = world.backend()
    world.run(backend, world.ledger(backend))
    world.check(backend)
    return backend


def test_a_damaged_local_store_is_made_up_for_by_the_durable_copy(world: World) -> None:
    def flip() -> None:
        files = sorted(world.local.glob("*/ledger/0-*/*/db/*.sst"))
        assert files
        for path in files:
            data = bytearray(path.read_bytes())
            for at in range(0, len(data) - 64, 7):
                data[at] ^= 0x55
            path.write_bytes(data)

    backend = _restart_after(world, flip)
    reports = {r.subtask: r for r in backend.restores()}
    assert reports[0].source == "durable"
    assert "damaged" in reports[0].reason
    assert reports[1].source == "local"


def test_a_local_copy_of_another_job_is_made_up_for_by_the_durable_copy(
    make_world: Callable[..., World],
) -> None:
    world, other = make_world("one"), make_world("two")
    other.input.add_batches(2, keys=3)
    other.run_ledger()

    def swap() -> None:
        (mine,) = world.local.glob("[!.]*")
        (theirs,) = other.local.glob("[!.]*")
        shutil.rmtree(mine)
        shutil.copytree(theirs, mine)

    backend = _restart_after(world, swap)
    assert {r.source for r in backend.restores()} == {"durable"}
    assert all("belongs to another job" in r.reason for r in backend.restores())


def test_timers_with_available_now_are_refused_where_spark_asks_a_source_only_at_the_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PySpark 4.1 does: what the query's own data makes due would not fire."""
    really = launch.check_trigger
    monkeypatch.setattr(
        launch, "check_trigger", lambda trigger: really(trigger, asked_at_the_end=False)
    )
    world.input.add_batches(1)
    backend = world.backend()
    frame = _frame(backend, world.input.stream(world.spark), time_mode="processing")
    with pytest.raises(UnsupportedQueryError, match=r"SB1013.*availableNow"):
        backend.start(world.writer(frame))
    assert not checkpoints(backend)
    monkeypatch.undo()
    again = world.backend()
    world.run(again, _frame(again, world.input.stream(world.spark), time_mode="processing"))
    world.check(again)
