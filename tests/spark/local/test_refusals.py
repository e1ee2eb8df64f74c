"""A wrong start of a query is refused with its own error, and changes nothing."""

from __future__ import annotations

import contextlib
import shutil
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException

from statebackend import StateBackend
from statebackend.errors import (
    CorruptionError,
    JobRunningError,
    LocalDirError,
    RewindError,
    SettingError,
    SparkConnectError,
    StoreUnreachableError,
    UnsupportedQueryError,
)
from statebackend.spark.start import launch
from statebackend.system import user_folder_name
from tests.spark.local.processors import StuckLedger
from tests.spark.local.world import World, checkpoints, failure, finish, sources, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame
from tests.spark.local.refused import *  # noqa: F403
from tests.spark.local.refused import _frame

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


# --- places --------------------------------------------------------------------------------------


def test_without_a_local_dir_copies_lie_beside_spark_s_own_and_are_found_again(
    world: World,
) -> None:
    configured = world.spark.sparkContext.getConf().get("spark.local.dir") or ""
    for found in ("empty", "local"):
        world.input.add_batches(2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it lasts
            backend = world.backend(local_dir=None)
        world.run(backend, world.ledger(backend))
        world.check(backend)
        assert set(sources(backend).values()) == {found}
    assert Path(configured, user_folder_name(), backend._job.local_name).is_dir()


def test_a_local_dir_that_cannot_be_used_is_named(world: World) -> None:
    (world.root / "file").write_text("in the way")
    world.input.add_batches(1)
    backend = world.backend(local_dir=str(world.root / "file" / "below"))
    frame = world.ledger(backend)
    writer = world.writer(frame)
    for _ in range(2):
        with pytest.raises(LocalDirError, match=str(world.root / "file" / "below")) as raised:
            backend.start(writer)
        assert "recovery/local" not in "".join(traceback.format_exception(raised.value))
    with (
        pytest.raises(LocalDirError),
        backend.starting(checkpoint_location=str(world.location)),
    ):
        raise AssertionError("the block is not entered")
    backend = world.run_ledger()
    world.check(backend)


def test_a_store_that_cannot_be_written_is_refused_at_the_call(world: World) -> None:
    (world.root / "file").write_text("in the way")
    backend = world.backend(uri=(world.root / "file" / "below").as_uri())
    with pytest.raises(StoreUnreachableError, match="A part of the path is a file") as raised:
        world.ledger(backend)
    assert "snapshot/storage" not in "".join(traceback.format_exception(raised.value))


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
    platforms = type("TheirSession", (stub,), {"__module__": "platform.session"})
    for kind in (stub, platforms):
        with pytest.raises(SparkConnectError, match="classic"):
            StateBackend(kind(), uri=tmp_path.as_uri(), local_dir=str(tmp_path))


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
