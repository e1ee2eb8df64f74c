"""Spark's own calls, with state kept here: after `install`, and by ``write_stream``."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException

import statebackend
from statebackend import StateBackend
from statebackend.drop_in import installed as installed_in
from statebackend.errors import (
    DuplicateUidError,
    MaxParallelismChangedError,
    SchemaError,
    SettingError,
    StateBackendError,
)
from statebackend.settings import ENABLED
from statebackend.spark.start.query_identity import IDENTITY_FILE
from tests.spark.local.processors import LEDGER_OUTPUT, Ledger
from tests.spark.local.world import check_ledger_output, finish, setting, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from tests.spark.local.world import World


class Tally(Ledger):
    """Another class of the same: another uid."""


@pytest.fixture
def installed(world: World) -> Iterator[StateBackend]:
    with statebackend.install(
        world.spark, uri=world.store.as_uri(), local_dir=str(world.local), parallelism=2
    ) as backend:
        yield backend


def sparks_own(world: World, processor: Any = None) -> DataFrame:
    """What a user's program says who has never heard of this package."""
    grouped = world.input.stream(world.spark).groupBy("k")
    return grouped.transformWithState(processor or Ledger(), LEDGER_OUTPUT, "Append", "None")


def writer(world: World, frame: DataFrame, at: str = "checkpoint") -> DataStreamWriter:
    made = frame.writeStream.outputMode("append").trigger(availableNow=True)
    return made.option("checkpointLocation", str(world.root / at))


def identity(world: World, at: str = "checkpoint") -> dict[str, str]:
    found: dict[str, str] = json.loads((world.root / at / IDENTITY_FILE).read_text())
    return found


def test_the_name_that_an_operator_got_is_said_when_its_state_begins(
    world: World, installed: StateBackend, caplog: pytest.LogCaptureFixture
) -> None:
    said = "the uid of an operator is 'Ledger', the name of its class"
    for begins in (True, False):
        caplog.clear()
        world.input.add_batches(1)
        with caplog.at_level(logging.INFO, "statebackend.spark"):
            finish(writer(world, sparks_own(world)).foreachBatch(world.sink).start())
        assert caplog.text.count(said) == int(begins)
    caplog.clear()
    with caplog.at_level(logging.INFO, "statebackend.spark"):
        rows = world.input.stream(world.spark).groupBy("k")
        frame = installed.transform_with_state(rows, Ledger(), LEDGER_OUTPUT, uid="mine")
        finish(writer(world, frame, "other").foreachBatch(lambda batch, _: batch.collect()).start())
    assert "the uid of an operator" not in caplog.text, "it was given"


@pytest.mark.promise
def test_sparks_own_calls_keep_their_state_here_over_restarts(
    world: World, installed: StateBackend
) -> None:
    for name in ("clicks", "renamed"):
        world.input.add_batches(2)
        query = writer(world, sparks_own(world)).queryName(name).foreachBatch(world.sink).start()
        finish(query)
        check_ledger_output(world.sink.batches(), world.input.ids())
    job = identity(world)["job"]
    assert job.startswith("clicks-"), "the location says which job it is, not the query's name"
    assert [path.name for path in world.store.iterdir()] == [job]
    assert installed.job == job
    assert installed.lineages()["Ledger"].last_epoch == world.committed()[-1]


def test_a_table_and_files_are_written_as_spark_writes_them(
    world: World, installed: StateBackend
) -> None:
    world.input.add_batches(2)
    finish(writer(world, sparks_own(world)).toTable("ledger_table", format="parquet"))
    out = str(world.root / "files")
    finish(writer(world, sparks_own(world), "second").start(out, "parquet", queryName="files"))
    rows = world.spark.read.parquet(out)
    try:
        assert rows.count() == world.spark.table("ledger_table").count() > 0
    finally:
        world.spark.sql("DROP TABLE ledger_table")
    assert identity(world)["job"] != identity(world, "second")["job"]


def test_two_queries_of_one_frame_are_two_jobs(world: World, installed: StateBackend) -> None:
    world.input.add_batches(1)
    frame = sparks_own(world)
    for at in ("one", "two"):
        finish(writer(world, frame, at).format("noop").start())
    jobs = {identity(world, at)["job"] for at in ("one", "two")}
    assert {path.name for path in world.store.iterdir()} == jobs
    assert len(jobs) == 2


def test_operators_of_a_query_have_uids_of_their_own(world: World, installed: StateBackend) -> None:
    world.input.add_batches(1)
    twice = sparks_own(world).union(sparks_own(world))
    with pytest.raises(DuplicateUidError, match="'Ledger'"):
        writer(world, twice).format("noop").start()
    both = sparks_own(world).union(sparks_own(world, Tally()))
    finish(writer(world, both).format("noop").start())
    assert set(installed.lineages()) == {"Ledger", "Tally"}


def test_a_state_without_a_uri_lies_in_the_checkpoint_location(world: World) -> None:
    world.input.add_batches(1)
    with statebackend.install(world.spark, local_dir=str(world.local), parallelism=2):
        finish(writer(world, sparks_own(world)).foreachBatch(world.sink).start())
    folder = world.location / "_statebackend"
    assert identity(world)["uri"] == "", "it goes where the location goes"
    assert [path.name for path in folder.iterdir()] == [identity(world)["job"]]
    world.input.add_batches(1)
    # Another uri is for queries that begin: this one goes on where it is.
    again = {"uri": world.store.as_uri(), "local_dir": str(world.local)}
    with statebackend.install(world.spark, parallelism=2, **again):  # type: ignore[arg-type]
        finish(writer(world, sparks_own(world)).foreachBatch(world.sink).start())
    check_ledger_output(world.sink.batches(), world.input.ids())
    assert not world.store.exists() or not list(world.store.iterdir())


def test_another_number_of_key_groups_is_refused_where_the_job_is_found_at_the_start(
    world: World,
) -> None:
    given: dict[str, Any] = {"uri": world.store.as_uri(), "local_dir": str(world.local)}
    for groups in (0, 64, 0):
        world.input.add_batches(1)
        asked = {"max_parallelism": groups} if groups else {}
        with statebackend.install(world.spark, parallelism=2, **asked, **given):
            made = writer(world, sparks_own(world)).foreachBatch(world.sink)
            if not groups:
                finish(made.start())
                continue
            with pytest.raises(MaxParallelismChangedError, match="1024, but 64 was asked for"):
                made.start()
    check_ledger_output(world.sink.batches(), world.input.ids())


def test_a_query_without_a_location_is_a_job_that_goes_with_it(
    world: World, installed: StateBackend
) -> None:
    world.input.add_batches(1)
    query = (
        sparks_own(world)
        .writeStream.format("memory")
        .queryName("passing")
        .trigger(availableNow=True)
        .start()
    )
    finish(query)
    assert world.spark.table("passing").count() > 0
    assert installed.job.startswith("temporary-")
    folder = world.store / installed.job
    until(lambda: not [p for p in folder.rglob("*") if p.is_file()], "the job is removed")


def test_the_end_of_an_inner_block_leaves_the_outer_one(world: World) -> None:
    given = {"local_dir": str(world.local)}
    with statebackend.install(world.spark, **given) as outer:
        with statebackend.install(world.spark, **given) as inner:
            assert installed_in(world.spark) is inner
        assert installed_in(world.spark) is outer
    assert installed_in(world.spark) is None


@pytest.mark.promise
def test_other_queries_and_other_sessions_are_left_alone(
    world: World, installed: StateBackend
) -> None:
    world.input.add_batches(1)
    plain = world.input.stream(world.spark)
    finish(writer(world, plain).foreachBatch(world.sink).start())
    assert len(world.sink.rows()) == len(world.input.rows)
    other = world.spark.newSession()
    frame = world.input.stream(other).groupBy("k")
    made = frame.transformWithState(Ledger(), LEDGER_OUTPUT, "Append", "None")
    assert "statebackend:" not in made._jdf.queryExecution().analyzed().toString()
    assert not world.store.exists()


def test_it_is_turned_off_by_a_setting_and_by_uninstall(world: World) -> None:
    def plan() -> str:
        return str(sparks_own(world)._jdf.queryExecution().analyzed().toString())

    with (
        setting(world.spark, ENABLED, "false"),
        statebackend.install(world.spark, local_dir=str(world.local)),
    ):
        assert "statebackend:" not in plan()
    statebackend.install(world.spark, local_dir=str(world.local))
    assert "statebackend:Ledger" in plan()
    statebackend.uninstall(world.spark)
    assert "statebackend:" not in plan()


def test_a_misspelt_value_of_the_setting_is_refused(world: World) -> None:
    with (
        setting(world.spark, ENABLED, "flase"),
        pytest.raises(SettingError, match="enabled is 'flase'"),
    ):
        statebackend.install(world.spark)
    assert installed_in(world.spark) is None


@pytest.mark.parametrize("uri", ["relative/path", "gs://bucket/state"])
def test_what_is_wrong_with_the_uri_is_said_of_the_uri_as_it_was_given(
    world: World, uri: str
) -> None:
    with pytest.raises(StateBackendError, match=f"The store '{uri}' ") as raised:
        statebackend.install(world.spark, uri=uri)
    assert raised.value.__suppress_context__, "fsspec's own errors are long"


def test_a_query_without_install_says_what_to_write(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend()
    with pytest.raises(AnalysisException, match="start_it_with_backend_write_stream"):
        writer(world, world.ledger(backend)).format("noop").start()


# --- the explicit way ----------------------------------------------------------------------------


@pytest.mark.parametrize("commit", ["sync", "async"])
def test_write_stream_is_sparks_writer_with_the_state_started(world: World, commit: str) -> None:
    for _ in range(2):
        world.input.add_batches(2)
        backend = world.backend(commit=commit)
        frame = backend.transform_with_state(
            world.input.stream(world.spark).groupBy("k"),
            Ledger(),
            LEDGER_OUTPUT,
            "Append",
            "None",
            uid="ledger",
        )
        stream = backend.write_stream(frame).outputMode("append").trigger(availableNow=True)
        stream = stream.option("checkpointLocation", str(world.location))
        finish(stream.foreachBatch(world.sink).start())
        world.check(backend)


def test_without_a_job_its_name_is_known_once_a_query_has_started(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend(job=None)
    with pytest.raises(SettingError, match="no query has been started"):
        assert backend.job
    world.run(backend, world.ledger(backend))
    assert backend.job == identity(world)["job"]
    assert backend.job.startswith("checkpoint-")


def test_an_argument_with_two_names_is_given_once(world: World) -> None:
    backend, stream = world.backend(), world.input.stream(world.spark)
    given: dict[str, Any] = {"keys": "k", "output_schema": LEDGER_OUTPUT}
    with pytest.raises(SettingError, match="statefulProcessor= and processor= are one"):
        backend.transform_with_state(stream, Ledger(), processor=Ledger(), **given)
    with pytest.raises(SettingError, match="statefulProcessor= was not given"):
        backend.transform_with_state(stream, **given)
    with pytest.raises(SchemaError, match="The frame has no keys"):
        backend.transform_with_state(stream, Ledger(), LEDGER_OUTPUT)
    with pytest.raises(SettingError, match="'complete'"):
        backend.transform_with_state(stream, Ledger(), outputMode="complete", **given)
