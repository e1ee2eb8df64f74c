"""Which job a query is whose checkpoint location was copied, moved, deleted, or begun twice."""

from __future__ import annotations

import json
import shutil
import traceback
from typing import TYPE_CHECKING, Any

import pytest

from recovery.savepoints import begin_with_savepoint
from statebackend.errors import CheckpointLocationError
from statebackend.spark.start.query_identity import IDENTITY_FILE
from tests.spark.local.processors import LEDGER_OUTPUT, Ledger
from tests.spark.local.world import Sink, check_ledger_output, finish, setting

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from statebackend import StateBackend
    from tests.spark.local.world import World


def backend_of(world: World, uri: Path | None = None, **given: Any) -> StateBackend:
    """One whose queries' jobs follow from their locations."""
    return world.backend(job=None, uri=uri and uri.as_uri(), **given)


def counted(world: World, backend: StateBackend, spark: SparkSession | None = None) -> DataFrame:
    """A query's frame, read in a session."""
    stream = world.input.stream(spark or world.spark).groupBy("k")
    return backend.transform_with_state(stream, Ledger(), LEDGER_OUTPUT, "Append", "None")


def writer_at(world: World, backend: StateBackend, at: str) -> DataStreamWriter:
    made = backend.write_stream(counted(world, backend)).trigger(availableNow=True)
    return made.option("checkpointLocation", str(world.root / at))


def run(world: World, backend: StateBackend, at: str) -> None:
    """A query over all that there is; what it puts out is kept by its location."""
    finish(writer_at(world, backend, at).foreachBatch(sink_of(world, at)).start())


def sink_of(world: World, at: str) -> Sink:
    return Sink(world.root / f"out-{at}")


def identity(world: World, at: str) -> dict[str, str]:
    found: dict[str, str] = json.loads((world.root / at / IDENTITY_FILE).read_text())
    return found


def rewrite(world: World, at: str, text: dict[str, str]) -> None:
    """As a user edits the file; what Hadoop keeps beside it goes."""
    (world.root / at / IDENTITY_FILE).write_text(json.dumps(text))
    (world.root / at / f".{IDENTITY_FILE}.crc").unlink(missing_ok=True)


def copied(world: World, at: str, to: str) -> None:
    """The location and what its query has put out."""
    for name in (at, f"out-{at}"):
        shutil.copytree(world.root / name, world.root / name.replace(at, to))


def check(world: World, at: str) -> None:
    check_ledger_output(sink_of(world, at).batches(), world.input.ids())


# --- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["now", "by an earlier release"])
def test_a_copy_of_a_location_has_a_state_of_its_own(world: World, written: str) -> None:
    backend = backend_of(world)
    world.input.add_batches(2)
    run(world, backend, "first")
    if written == "by an earlier release":
        folder = world.root / "first" / "_statebackend"
        rewrite(world, "first", {**identity(world, "first"), "uri": folder.as_uri()})
    copied(world, "first", "second")
    for at in ("second", "first", "second"):
        world.input.add_batches(1)
        run(world, backend, at)
        check(world, at)
    run(world, backend, "first")
    check(world, "first")


def test_a_location_that_was_moved_has_its_state_with_it(world: World) -> None:
    backend = backend_of(world)
    world.input.add_batches(2)
    run(world, backend, "first")
    for name in ("first", "out-first"):
        (world.root / name).rename(world.root / name.replace("first", "second"))
    world.input.add_batches(1)
    run(world, backend, "second")
    check(world, "second")
    assert not (world.root / "first").exists()


def test_a_copy_does_not_take_over_the_job_in_a_shared_folder(world: World) -> None:
    backend = backend_of(world, world.store)
    world.input.add_batches(2)
    run(world, backend, "first")
    copied(world, "first", "second")
    world.input.add_batches(1)
    with pytest.raises(CheckpointLocationError, match=r"is a copy of .*/first, or .* moved here"):
        run(world, backend, "second")
    run(world, backend, "first")
    check(world, "first")


def test_a_location_that_was_moved_goes_on_once_its_file_says_so(world: World) -> None:
    backend = backend_of(world, world.store)
    world.input.add_batches(2)
    run(world, backend, "first")
    for name in ("first", "out-first"):
        (world.root / name).rename(world.root / name.replace("first", "second"))
    known = identity(world, "second")
    with pytest.raises(CheckpointLocationError) as refused:
        run(world, backend, "second")
    there = known["location"].replace("first", "second")
    assert f'write {there} as the "location"' in str(refused.value)
    rewrite(world, "second", {**known, "location": there})
    world.input.add_batches(1)
    run(world, backend, "second")
    check(world, "second")


def test_a_file_of_an_earlier_release_says_nothing_of_its_path(world: World) -> None:
    backend = backend_of(world, world.store)
    world.input.add_batches(2)
    run(world, backend, "first")
    known = identity(world, "first")
    del known["location"]
    rewrite(world, "first", known)
    world.input.add_batches(1)
    run(world, backend, "first")
    check(world, "first")


def test_a_location_that_was_deleted_begins_anew(world: World) -> None:
    backend = backend_of(world, world.store)
    world.input.add_batches(2)
    run(world, backend, "first")
    before = backend.job
    for name in ("first", "out-first"):
        shutil.rmtree(world.root / name)
    for _ in range(2):
        world.input.add_batches(1)
        run(world, backend, "first")
        check(world, "first")
        assert backend.job.startswith(f"{before}-")
    assert len(list(world.store.iterdir())) == 2


# --- which location it is ------------------------------------------------------------------------


def test_the_default_folder_of_the_frames_own_session_counts(world: World) -> None:
    """Spark reads it there, and keeps the location; so must its state be kept."""
    other = world.spark.newSession()
    other.conf.set("spark.sql.streaming.checkpointLocation", str(world.root / "default"))
    backend = backend_of(world, world.store)
    for _ in range(2):
        world.input.add_batches(1)
        stream = backend.write_stream(counted(world, backend, other)).trigger(availableNow=True)
        named = stream.queryName("nightly").foreachBatch(sink_of(world, "nightly"))
        finish(named.start())
    assert backend.job == identity(world, "default/nightly")["job"]
    check(world, "nightly")


def test_a_query_without_a_name_under_the_default_folder_keeps_its_state(world: World) -> None:
    """Spark keeps such a location too, under a name that it draws."""
    backend = backend_of(world, world.store)
    world.input.add_batches(1)
    with setting(
        world.spark, "spark.sql.streaming.checkpointLocation", str(world.root / "default")
    ):
        stream = backend.write_stream(counted(world, backend)).trigger(availableNow=True)
        finish(stream.foreachBatch(sink_of(world, "drawn")).start())
    (place,) = (world.root / "default").iterdir()
    assert identity(world, f"default/{place.name}")["job"] == backend.job
    world.input.add_batches(1)
    stream = backend.write_stream(counted(world, backend)).trigger(availableNow=True)
    stream = stream.option("checkpointLocation", str(place))
    finish(stream.foreachBatch(sink_of(world, "drawn")).start())
    check(world, "drawn")


def test_a_query_at_another_location_than_was_checked_is_stopped(world: World) -> None:
    backend = world.backend()
    world.input.add_batches(1)
    frame, started = world.ledger(backend), []
    writer = world.writer(frame, checkpointLocation=str(world.root / "elsewhere"))

    def start_elsewhere() -> None:
        with backend.starting(checkpoint_location=str(world.location)):
            started.append(writer.trigger(processingTime="1 second").start())

    with pytest.raises(CheckpointLocationError, match=r"at .*/elsewhere, but .*/checkpoint was"):
        start_elsewhere()
    assert not started[0].isActive
    assert not (world.root / "elsewhere" / "commits" / "0").exists()


def test_a_beginning_with_a_savepoint_that_was_cut_is_found_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.input.add_batches(1)
    first = backend_of(world, world.store)
    run(world, first, "first")
    saved = first.savepoint()
    copy = begin_with_savepoint.copy_state
    cut = iter([RuntimeError("cut in the middle")])

    def copied(*args: Any, **more: Any) -> Any:
        for error in cut:
            raise error
        return copy(*args, **more)

    monkeypatch.setattr(begin_with_savepoint, "copy_state", copied)
    with pytest.raises(RuntimeError, match="cut in the middle"):
        run(world, backend_of(world, world.store, savepoint=saved.uri), "clone")
    job = identity(world, "clone")["job"]
    run(world, backend_of(world, world.store, savepoint=saved.uri), "clone")
    assert identity(world, "clone")["job"] == job
    assert {path.name for path in world.store.iterdir()} >= {job, identity(world, "first")["job"]}
    assert len([path for path in world.store.iterdir() if path.name.startswith("clone-")]) == 1


def test_a_query_without_a_name_keeps_its_state_under_the_default_folder(world: World) -> None:
    key, folder = "spark.sql.streaming.checkpointLocation", world.root / "default"
    world.input.add_batches(1)
    with setting(world.spark, key, str(folder)):
        backend = backend_of(world)
        writer = backend.write_stream(counted(world, backend)).trigger(availableNow=True)
        finish(writer.foreachBatch(sink_of(world, "default")).start())
    (at,) = [path for path in folder.iterdir() if (path / IDENTITY_FILE).exists()]
    world.input.add_batches(1)
    again = backend_of(world)
    name = str(at.relative_to(world.root))
    finish(writer_at(world, again, name).foreachBatch(sink_of(world, "default")).start())
    check_ledger_output(sink_of(world, "default").batches(), world.input.ids())


def test_a_location_that_cannot_be_written_is_refused_without_a_stack_of_the_jvm(
    world: World,
) -> None:
    world.input.add_batches(1)
    (world.root / "file").write_text("in the way")
    backend = backend_of(world, world.store)
    with pytest.raises(CheckpointLocationError, match="cannot be") as raised:
        writer_at(world, backend, "file/checkpoint").format("noop").start()
    text = "".join(traceback.format_exception(raised.value))
    assert "\tat " not in text, "the JVM's stack"
    assert "Py4JJavaError" not in text
