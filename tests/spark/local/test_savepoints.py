"""Savepoints of running and stopped queries, and queries that begin with one."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from recovery.inspect.verify import verify
from recovery.savepoints.savepoint import read_savepoint
from snapshot.storage.stores_by_uri import open_store
from statebackend import Savepoint
from statebackend.cli.job_folders import place_of
from statebackend.errors import (
    CheckpointLocationError,
    MissingUidError,
    NotRestorableError,
    SettingError,
    UnsupportedQueryError,
)
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from tests.spark.local.conforming_time import Timers
from tests.spark.local.world import (
    World,
    check_ledger_output,
    durable_state,
    finish,
    job_store,
    setting,
    sources,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from statebackend import StateBackend


def always(world: World, backend: StateBackend) -> StreamingQuery:
    """A query that goes on until it is stopped."""
    frame = world.ledger(backend)
    writer = world.writer(frame).trigger(processingTime="0 seconds")
    return backend.start(writer)


def check_clone(clone: World, backend: StateBackend, original: World, savepoint: Savepoint) -> None:
    """What the original put out up to the savepoint, and the clone after it, is all there is."""
    backend.wait_durable()
    before = {n: rows for n, rows in original.sink.batches().items() if n <= savepoint.epoch}
    after = clone.sink.batches()
    assert min(after) == savepoint.epoch + 1
    check_ledger_output(before | after, original.input.ids())
    wanted = {(key,): (len(ids), sum(ids)) for key, ids in original.input.ids().items()}
    assert durable_state(backend, "ledger")["acc"] == wanted
    report = verify(job_store(backend), backend.job)
    assert report.ok, report.findings


def cloned(clone: World, original: World, savepoint: Any, **given: Any) -> StateBackend:
    """A new query on the original's input, run to its end."""
    backend = clone.backend(job="clone", savepoint=savepoint, **given)
    frame = clone.ledger(backend, original.input.stream(clone.spark))
    clone.run(backend, frame)
    return backend


def test_of_a_running_query_and_two_clones_at_once(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.input.add_batches(4)
    backend = world.backend(settings={"clean_every_epochs": 1, "clean_min_age_s": 0.0})
    query = always(world, backend)
    until(lambda: len(world.committed()) >= 2, "two batches")
    savepoint = backend.savepoint()
    until(lambda: len(world.committed()) >= 4, "the other two")
    world.input.add_batches(2)
    until(lambda: len(world.committed()) >= 6, "the query goes on beside it")
    idle = backend.savepoint(str(world.root / "kept"))
    assert idle.epoch == 5, "of an idle query everything"
    query.stop()
    world.check(backend)
    assert [one.id for one in backend.savepoints()] == [savepoint.id]
    shutil.rmtree(world.store / "default")
    shutil.rmtree(world.location)

    clones = [make_world("one"), make_world("two")]
    world.input.add_batches(2)
    running = []
    for clone in clones:
        other = clone.backend(job="clone", savepoint=savepoint)
        frame = clone.ledger(other, world.input.stream(clone.spark))
        running.append((clone, other, clone.start(other, frame)))
    for clone, other, started in running:
        finish(started)
        check_clone(clone, other, world, savepoint)
    ids = {clone.location.joinpath("metadata").read_text() for clone in clones}
    assert len(ids) == 2

    # Started again with the same argument, it goes on where it was.
    clone = clones[0]
    world.input.add_batches(1)
    again = cloned(clone, world, savepoint.uri)
    check_clone(clone, again, world, savepoint)
    assert set(sources(again).values()) == {"local"}


@pytest.mark.promise
def test_of_a_stopped_query_with_changed_code(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.input.add_batches(3)
    backend = world.backend()
    with pytest.raises(SettingError, match="has not been started"):
        backend.savepoint()
    world.run(backend, world.ledger(backend))
    savepoint = backend.savepoint()
    assert savepoint.epoch == 2
    world.input.add_batches(1)

    clone = make_world("clone")
    other = clone.backend(job="clone", savepoint=savepoint)
    with pytest.raises(MissingUidError):
        clone.run(other, clone.ledger(other, world.input.stream(clone.spark), uid="another"))
    assert not (clone.store / "clone" / "log").exists(), "refused before anything was written"
    assert not clone.location.exists()

    dropping = clone.backend(job="clone", savepoint=savepoint, allow_dropped_state=True)
    clone.run(dropping, clone.ledger(dropping, world.input.stream(clone.spark), uid="another"))
    ids = [row["id"] for row in world.input.rows[-20:]]
    given = sorted(one for row in clone.sink.rows() for one in row["ids"])
    assert given == sorted(ids), "a new operator sees what comes after the savepoint"


def test_a_clone_at_another_parallelism_writes_files(make_world: Callable[..., World]) -> None:
    """Past the batch at which Spark's file sink puts its log together."""
    world = make_world()
    world.input.add_batches(4)
    backend = world.backend(max_parallelism=8)
    world.run(backend, world.ledger(backend))
    savepoint = backend.savepoint()
    world.input.add_batches(8)
    clone = make_world("clone")
    out = clone.root / "files"
    other = clone.backend(job="clone", savepoint=savepoint, parallelism=3)
    frame = clone.ledger(other, world.input.stream(clone.spark))
    writer = (
        frame.writeStream.format("json")
        .option("checkpointLocation", str(clone.location))
        .option("path", str(out))
        .trigger(availableNow=True)
    )
    finish(other.start(writer))
    assert clone.committed()[-1] == 11
    wanted = {(key,): (len(ids), sum(ids)) for key, ids in world.input.ids().items()}
    assert durable_state(other, "ledger")["acc"] == wanted
    rows = clone.spark.read.json(str(out)).collect()
    given = sorted(one for row in rows for one in row["ids"])
    assert given == sorted(row["id"] for row in world.input.rows[80:])
    log = {path.name for path in (out / "_spark_metadata").iterdir() if path.name[0] != "."}
    assert log == {*map(str, range(9)), "9.compact", "10", "11"}  # every tenth, as from the start


def test_a_clone_reads_on_where_a_sources_log_has_another_interval(
    make_world: Callable[..., World],
) -> None:
    """Of one compact file alone, Spark would take another interval and miss files of the log."""
    world = make_world()
    world.input.add_batches(11)
    with setting(world.spark, "spark.sql.streaming.fileSource.log.compactInterval", "4"):
        savepoint = world.run_ledger().savepoint()
    names = {path.name for path in (world.location / "sources" / "0").iterdir()}
    assert {"3.compact", "7.compact", "8", "9", "10"} <= names
    world.input.add_batches(3)
    clone = make_world("clone")
    with setting(clone.spark, "spark.sql.streaming.fileSource.log.compactInterval", "2"):
        backend = cloned(clone, world, savepoint)
    check_clone(clone, backend, world, savepoint)


@pytest.mark.parametrize("commit", ["sync", "async"])
def test_a_start_that_is_cut_goes_on(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    """At every file that is written to the new checkpoint location."""
    world = make_world()
    world.input.add_batches(3)
    savepoint = world.run_ledger().savepoint()
    world.input.add_batches(2)
    clone = make_world("clone")
    write = CheckpointLocation.write
    files = len(savepoint.spark)
    for cut in range(files):
        left = iter(range(cut))

        def cutting(self: Any, name: str, pieces: Any, left: Any = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            write(self, name, pieces)

        monkeypatch.setattr(CheckpointLocation, "write", cutting)
        with pytest.raises(KeyboardInterrupt):
            cloned(clone, world, savepoint, commit=commit)
    monkeypatch.setattr(CheckpointLocation, "write", write)
    plain = clone.backend(job="clone")
    with pytest.raises(CheckpointLocationError, match="belongs to query"):
        clone.run(plain, clone.ledger(plain, world.input.stream(clone.spark)))
    backend = cloned(clone, world, savepoint, commit=commit)
    check_clone(clone, backend, world, savepoint)


def test_what_is_refused(make_world: Callable[..., World], spark: SparkSession) -> None:
    world = make_world()
    world.input.add_batches(2)
    backend = world.run_ledger()
    savepoint = backend.savepoint()
    clone = make_world("clone")
    # A location that has batches of another query.
    clone.location = world.location
    with pytest.raises(CheckpointLocationError, match="cannot begin with the savepoint"):
        cloned(clone, world, savepoint)
    # A job that has a log.
    with pytest.raises(CheckpointLocationError, match="has a log already"):
        world.run_ledger(savepoint=savepoint)
    # No location at all.
    fresh = make_world("fresh")
    other = fresh.backend(job="clone", savepoint=savepoint)
    fresh.ledger(other, world.input.stream(spark))
    with pytest.raises(SettingError, match="checkpoint_location"), other.starting():
        raise AssertionError("not entered")
    # No savepoint.
    with pytest.raises(NotRestorableError, match="no savepoint"):
        cloned(fresh, world, (world.root / "nowhere").as_uri())
    # State of Spark's own.
    (world.location / "state" / "0").mkdir(parents=True)
    (world.location / "state" / "0" / "1.delta").write_text("x")
    with pytest.raises(UnsupportedQueryError, match="state"):
        backend.savepoint()


def test_after_the_first_batch_alone(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.input.add_batches(1)
    savepoint = world.run_ledger().savepoint()
    store = place_of(savepoint.uri, "", "").open()
    assert read_savepoint(store) == savepoint
    assert open_store(savepoint.uri, new_id=lambda: "x").uri == savepoint.uri
    world.input.add_batches(1)
    clone = make_world("clone")
    check_clone(clone, cloned(clone, world, savepoint), world, savepoint)


def test_timers_and_the_watermark_go_on(make_world: Callable[..., World]) -> None:
    """With the batches without data that fire them: the clone puts out what the original does."""
    schema = "k string, id bigint, at timestamp, ops string"
    world, clone = make_world(schema=schema), make_world("clone", schema=schema)

    def run(which: World, **given: Any) -> StateBackend:
        backend = which.backend(**given)
        frame = backend.transform_with_state(
            world.input.stream(which.spark),
            keys="k",
            processor=Timers(),
            output_schema="k string, seq bigint, what string",
            uid="timers",
            time_mode="event",
            event_time="at",
            watermark_delay="0 seconds",
        )
        which.run(backend, frame)
        return backend

    def event(key: str, number: int, at_s: int, ops: str = "") -> dict[str, Any]:
        return {"k": key, "id": number, "at": f"1970-01-01T00:00:{at_s:02d}Z", "ops": ops}

    world.input.add([event("a", 1, 1, "+500 +5000 +9000"), event("b", 2, 2, "+20000")])
    world.input.add([event("b", 3, 3)])
    savepoint = run(world).savepoint()
    assert savepoint.epoch == world.committed()[-1] >= 2, "the batches without data are among them"
    assert savepoint.watermark_ms == 3000
    world.input.add([event("c", 4, 6), event("late", 5, 1)])
    world.input.add([event("d", 6, 30)])
    run(world)
    run(clone, job="clone", savepoint=savepoint)
    after = {n: rows for n, rows in world.sink.batches().items() if n > savepoint.epoch}
    assert clone.sink.batches() == after
    told = " ".join(row["what"] for row in clone.sink.rows())
    assert all(f"timer {at}" in told for at in (5000, 9000, 20000))
