"""Savepoints of continuous jobs: made beside the job or at its end, and begun with."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import recovery.savepoints.create_savepoint
from recovery.decide.restart_strategy import FixedDelay, NoRestart
from recovery.savepoints.savepoint import read_savepoint
from recovery.savepoints.savepoint_folder import delete_savepoint
from recovery.savepoints.verify_savepoint import verify_savepoint
from statebackend import system
from statebackend.cli.job_commands import app
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.continuous.sinks.file_sink import FileSink
from statebackend.errors import (
    CheckpointLocationError,
    MaxParallelismChangedError,
    MissingUidError,
    NotRestorableError,
    SettingError,
    StateBackendError,
    StateMismatchError,
    StoreUnreachableError,
)
from statebackend.runtime.driver.job_savepoints import listed
from tests.continuous.runtime.jobs import (
    OUTPUT,
    Counting,
    FailingOnce,
    HeldClock,
    Numbers,
    Scaled,
    Windows,
    check_counts,
    truth,
    windows_truth,
)
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from recovery.inspect.verify import VerifyReport
    from recovery.savepoints.savepoint import Savepoint
    from statebackend.continuous.driver.continuous_query import ContinuousQuery
    from tests.continuous.runtime.world import World

pytestmark = pytest.mark.full  # whole jobs and their clones

ROWS, PER_S = 4000, 1000
WINDOWS = "key BIGINT, start BIGINT, n BIGINT, total BIGINT"


def counting(
    world: World,
    rows: int | None = ROWS,
    processor: Any = None,
    per_s: float | None = PER_S,
    clock: HeldClock | None = None,
) -> CollectSink:
    """A job that counts: to its end after `go_on`, or at once without a limit to its speed."""
    sink = CollectSink()
    clock = clock or world.held(1.0)
    keyed = world.source(Numbers(rows, splits=4, rows_per_s=per_s, clock=clock)).key_by("key")
    keyed.process(processor or Counting(), uid="count", output_schema=OUTPUT).sink(sink)
    return sink


def some_epochs(query: ContinuousQuery, count: int = 1) -> None:
    soon(lambda: (query.epoch or 0) >= count)


def checked(world: World, savepoint: Savepoint) -> VerifyReport:
    report = verify_savepoint(world.flow.setup.job.open_at(savepoint.uri))
    assert report.ok, report.findings
    return report


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_job_stops_with_a_savepoint_and_another_goes_on_exactly(
    world: World, parallelism: int
) -> None:
    first = counting(world)
    query = world.start(2)
    some_epochs(query)
    made = query.stop_with_savepoint()
    assert not query.is_active
    assert query.exception() is None
    assert made.epoch == query.epoch
    assert made.continuous
    assert not made.uncommitted
    checked(world, made)
    world.renew(job="clone", savepoint=made.uri)
    second = counting(world, per_s=None)
    clone = world.start(parallelism)
    assert clone.await_termination(60.0)
    assert first.rows()
    check_counts(first.rows() + second.rows(), truth(ROWS))  # and no state of a key came twice


def test_a_job_goes_on_while_its_savepoint_is_made(world: World) -> None:
    first = counting(world)
    query = world.start(2)
    some_epochs(query)
    made = query.savepoint()
    checked(world, made)
    assert [one.id for one in listed(world.flow.setup.job)] == [made.id]
    world.go_on()
    assert query.await_termination(60.0)
    assert query.restarts == 0
    assert (query.epoch or 0) > made.epoch
    check_counts(first.rows(), truth(ROWS))
    world.renew(job="clone", savepoint=made)
    second = counting(world, per_s=None)
    assert world.start(1).await_termination(60.0)
    last = {row["key"]: (row["n"], row["total"]) for row in second.rows()}
    assert last == truth(ROWS)
    earlier = {(row["key"], row["n"]) for row in first.rows()}
    assert min(n for _, n in earlier) == 1
    assert all(row["n"] > 1 for row in second.rows())  # it did not begin anew


def test_files_that_a_stopped_job_had_not_committed_are_nobodys(
    world: World, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def build(per_s: float | None = None) -> None:
        numbers = Numbers(ROWS, splits=4, rows_per_s=per_s, clock=world.held(1.0))
        keyed = world.source(numbers).key_by("key")
        keyed.process(Counting(), uid="count", output_schema=OUTPUT).sink(FileSink(out))

    def rows() -> list[dict[str, Any]]:
        return [row for file in out.glob("*.parquet") for row in pq.read_table(file).to_pylist()]

    build(PER_S)
    query = world.start(2, checkpoint_interval_s=None)
    soon(lambda: any(out.rglob("*-*")))
    assert not rows()
    made = query.stop_with_savepoint()
    before = len(rows())
    assert before
    world.renew(job="clone", savepoint=made.uri)
    build()
    assert world.start(2).await_termination(60.0)
    check_counts(rows(), truth(ROWS))
    # The original goes on from there as well: its own output comes again, nothing else does.
    world.renew(savepoint=made.uri)
    build()
    query = world.start(3)
    assert query.await_termination(60.0)
    seen = [(row["key"], row["n"]) for row in rows()]
    assert len(set(seen)) < len(seen)


def test_a_job_goes_on_from_its_own_savepoint_unless_it_has_gone_on_already(world: World) -> None:
    rows = []
    sink = counting(world)
    query = world.start(2)
    some_epochs(query)
    made = query.stop_with_savepoint()
    rows += sink.rows()
    world.renew(savepoint=made.uri)
    sink = counting(world, per_s=None)
    query = world.start(2)
    assert query.await_termination(60.0)
    # What the savepoint's checkpoint had prepared is committed once more, here to another object.
    rows = list({(row["key"], row["n"]): row for row in rows + sink.rows()}.values())
    check_counts(rows, truth(ROWS))
    world.renew(savepoint=made.uri)
    counting(world)
    with pytest.raises(CheckpointLocationError, match="stands after"):
        world.start(2)


def test_a_clone_goes_on_with_savepoint_given_although_that_is_gone(world: World) -> None:
    counting(world)
    query = world.start(2)
    some_epochs(query)
    made = query.stop_with_savepoint()
    world.renew(job="clone", savepoint=made.uri)
    counting(world, None)
    clone = world.start(2)
    some_epochs(clone, made.epoch + 1)
    assert clone.stop()
    delete_savepoint(world.flow.setup.job.open_at(made.uri))
    world.renew(job="clone", savepoint=made.uri)
    sink = counting(world, per_s=None)
    assert world.start(1).await_termination(60.0)
    last = {row["key"]: (row["n"], row["total"]) for row in sink.rows()}
    assert last == truth(ROWS)


def test_what_a_clone_cannot_take_over_is_refused_before_anything_is_written(world: World) -> None:
    counting(world)
    query = world.start(2)
    some_epochs(query)
    made = query.stop_with_savepoint()

    def start(**settings: Any) -> Callable[[], object]:
        world.renew(job="clone", savepoint=made.uri, **settings)
        return lambda: world.start(2)

    build = start()
    keyed = world.source(Numbers(ROWS), name="another").key_by("key")
    keyed.process(Counting(), uid="count", output_schema=OUTPUT).sink(CollectSink())
    with pytest.raises(MissingUidError, match="'source'"):
        build()
    build = start(max_parallelism=64)
    counting(world)
    with pytest.raises(MaxParallelismChangedError, match="128"):
        build()
    build = start()
    counting(world, processor=Windows(100))
    with pytest.raises((StateMismatchError, MissingUidError)):
        build()
    assert not [info for info in world.flow.setup.job.store.list("") if "probe" not in info.name]
    build = start(allow_dropped_state=True)
    sink = CollectSink()
    keyed = world.source(Numbers(ROWS), name="another").key_by("key")
    keyed.process(Counting(), uid="count", output_schema=OUTPUT).sink(sink, uid="other sink")
    assert build().await_termination(60.0)  # type: ignore[attr-defined]
    last = {row["key"]: row["n"] for row in sink.rows()}
    assert all(last[key] > n for key, (n, _) in truth(ROWS).items())  # both, in one state


def test_event_time_timers_and_rules_go_along(world: World) -> None:
    found: list[tuple[Any, ...]] = []
    rules: list[dict[str, Any]] = []
    for parallelism in (2, 3):
        windows, scaled = CollectSink(), CollectSink()
        source = Numbers(
            3000,
            splits=4,
            rows_per_s=400 if parallelism == 2 else None,
            clock=world.held(2.5),
            event_time="at",
            watermark_delay="5 ms",
        )
        stream = world.source(source)
        stream.key_by("key").process(
            Windows(300), uid="windows", output_schema=WINDOWS, time_mode="event", event_time="at"
        ).sink(windows)
        few = world.source(Numbers(40, splits=1), name="rules")
        both = stream.key_by("key").connect_broadcast(few)
        both.process(Scaled(), uid="scaled", output_schema=f"{OUTPUT}, rules BIGINT").sink(scaled)
        query = world.start(parallelism)
        if parallelism == 2:
            soon(lambda windows=windows: len(windows.rows()) > 60)
            made = query.stop_with_savepoint()
            world.renew(job="clone", savepoint=made.uri)
        else:
            assert query.await_termination(60.0)
            rules = scaled.rows()
        found += [tuple(row.values()) for row in windows.rows()]
    assert len(found) == len(set(found))
    assert set(found) == windows_truth(3000, 300)
    assert len({row["rules"] for row in rules}) == 1  # read before, and not again


def test_what_is_copied_is_not_cleaned_meanwhile_nor_by_the_next_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.renew(clean_every_epochs=1, clean_min_age_s=0, base_every_epochs=2)
    inside, go_on = threading.Event(), threading.Event()
    copy_state = recovery.savepoints.create_savepoint.copy_state

    def slow(*args: Any, **named: Any) -> Any:
        inside.set()
        assert go_on.wait(60.0)
        return copy_state(*args, **named)

    monkeypatch.setattr(recovery.savepoints.create_savepoint, "copy_state", slow)
    marker = tmp_path / "failed"
    processor = FailingOnce(str(marker), 2000)
    sink = counting(world, 8000, processor, 1000, clock=world.held(5.0))
    query = world.start(2, checkpoint_interval_s=0.05, restart=FixedDelay(1, 0.0))
    some_epochs(query)
    made: list[Savepoint] = []
    taking = threading.Thread(target=lambda: made.append(query.savepoint()))
    taking.start()
    assert inside.wait(60.0)
    soon(lambda: query.restarts == 1)
    again = query.epoch
    soon(lambda: (query.epoch or 0) > (again or 0) + 5)
    go_on.set()
    taking.join(60.0)
    assert made
    assert made[0].epoch < (query.epoch or 0) - 5
    checked(world, made[0])
    taken = query._savings._taken
    assert taken is not None
    soon(lambda: taken.session.cleaner.reports)  # it is cleaned again
    world.go_on()
    assert query.await_termination(60.0)
    check_counts(sink.rows(), truth(8000))


def test_nothing_half_made_is_left_where_making_one_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = counting(world)
    query = world.start(2)
    some_epochs(query)

    copied: list[Any] = []

    def fails(*args: Any, **named: Any) -> Any:
        copied.append(copy_state(*args, **named))
        raise StoreUnreachableError("The store is down.")

    copy_state = recovery.savepoints.create_savepoint.copy_state
    with monkeypatch.context() as patch:
        patch.setattr(recovery.savepoints.create_savepoint, "copy_state", fails)
        with pytest.raises(StoreUnreachableError, match="down"):
            query.savepoint()
    assert copied
    assert listed(world.flow.setup.job) == []
    assert query.restarts == 0
    made = query.savepoint()
    assert [one.id for one in listed(world.flow.setup.job)] == [made.id]
    world.go_on()
    assert query.await_termination(60.0)
    check_counts(sink.rows(), truth(ROWS))


def test_where_the_copy_at_the_end_fails_it_is_made_of_the_job_that_has_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = counting(world)
    query = world.start(2)
    some_epochs(query)

    def fails(*args: Any, **named: Any) -> Any:
        raise StoreUnreachableError("The store is down.")

    with monkeypatch.context() as patch:
        patch.setattr(recovery.savepoints.create_savepoint, "copy_state", fails)
        with pytest.raises(StoreUnreachableError, match="down"):
            query.stop_with_savepoint()
    assert query.await_termination(30.0)
    made = query.savepoint()
    assert not made.uncommitted
    world.renew(job="clone", savepoint=made.uri)
    second = counting(world, per_s=None)
    assert world.start(2).await_termination(60.0)
    check_counts(first.rows() + second.rows(), truth(ROWS))


class Stuck(Counting):
    """Waits at its first row, once, until a file is gone."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def process(self, key: Any, rows: Any, ctx: Any) -> Any:
        import os

        while os.path.exists(self._marker):
            system.sleep_s(0.01)
        return super().process(key, rows, ctx)


def test_a_savepoint_whose_checkpoint_takes_too_long_is_given_up(
    world: World, tmp_path: Path
) -> None:
    marker = tmp_path / "stuck"
    marker.touch()
    sink = counting(world, processor=Stuck(marker), per_s=None)
    query = world.start(2)
    soon(lambda: query.is_running)
    with pytest.raises(StoreUnreachableError, match="waiting for the checkpoint"):
        query.savepoint(timeout_s=0.5)
    assert listed(world.flow.setup.job) == []
    marker.unlink()
    assert query.await_termination(60.0)
    check_counts(sink.rows(), truth(ROWS))


def test_a_failure_on_the_way_has_it_asked_for_again(world: World, tmp_path: Path) -> None:
    world.go_on()
    sink = counting(world, processor=FailingOnce(str(tmp_path / "failed"), 1500))
    query = world.start(2, checkpoint_interval_s=None, restart=FixedDelay(1, 1.0))
    soon(lambda: query.restarts == 1)
    made = query.savepoint()
    checked(world, made)
    assert query.await_termination(60.0)
    check_counts(sink.rows(), truth(ROWS))


def test_a_job_without_a_checkpoint_has_nothing_to_save(world: World) -> None:
    counting(world)
    query = world.start(2, checkpoint_interval_s=None)
    assert query.stop()
    with pytest.raises(NotRestorableError, match="no checkpoint"):
        query.savepoint()


def test_a_job_that_failed_before_its_first_checkpoint_says_why(
    world: World, tmp_path: Path
) -> None:
    counting(world, processor=FailingOnce(str(tmp_path / "failed"), 0))
    query = world.start(2, checkpoint_interval_s=None, restart=NoRestart())
    with pytest.raises(StateBackendError):
        query.await_termination(60.0)
    with pytest.raises(NotRestorableError, match="no checkpoint") as raised:
        query.stop_with_savepoint()
    assert "the row that fails" in str(raised.value.__cause__)


def cli(*args: str, status: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*args, "--json"])
    assert done.exit_code == status, done.output
    return dict(json.loads(done.stdout or "{}"))


def test_the_command_line_on_a_continuous_job(world: World, tmp_path: Path) -> None:
    first = counting(world)
    query = world.start(2)
    some_epochs(query, 2)
    assert query.stop()
    uri = f"file://{world.folder}/state"
    (one,) = cli("list", uri)["jobs"]
    assert one["epoch"] == query.epoch or one["epoch"] == (query.epoch or 0) + 1
    (described,) = cli("describe", uri)["jobs"]
    assert {o["uid"] for o in described["operators"]} == {"count", "sink-count", "source"}
    assert CliRunner().invoke(app, ["describe", uri]).exit_code == 0
    assert cli("verify", uri)["ok"]
    cli("gc", uri, "--yes", "--min-age-s", "0")
    assert cli("verify", uri)["ok"]
    create = ("savepoint", "create", "--uri", uri, "--job", "job")
    cli(*create, "--checkpoint-location", str(tmp_path / "none"), status=2)
    made = cli(*create)["savepoint"]
    assert made["continuous"]
    assert made["uncommitted"]
    assert (
        "continuous job" in CliRunner().invoke(app, ["savepoint", "describe", made["uri"]]).output
    )
    assert cli("savepoint", "describe", made["uri"], "--verify")["ok"]
    (found,) = cli("savepoint", "list", "--uri", uri)["savepoints"]
    assert found["complete"]
    world.renew(job="clone", savepoint=made["uri"])
    second = counting(world, per_s=None)
    assert world.start(3).await_termination(60.0)
    rows = first.rows() + second.rows()
    check_counts(rows, truth(ROWS))
    cli("gc", uri, "--yes", "--min-age-s", "0")
    assert cli("savepoint", "delete", made["uri"], "--yes")["deleted"]
    assert cli("savepoint", "list", "--uri", uri)["savepoints"] == []


def test_a_querys_job_needs_its_checkpoint_location(tmp_path: Path) -> None:
    from snapshot.storage.stores_by_uri import open_store
    from snapshot.storage.uris import job_folder
    from tests.cli.folder import JOB, Folder, new_id

    uri = (tmp_path / "state").as_uri()
    Folder(open_store(job_folder(uri, JOB), new_id=new_id)).epochs(2)
    done = CliRunner().invoke(app, ["savepoint", "create", "--uri", uri, "--job", JOB])
    assert done.exit_code == 2
    assert "--checkpoint-location" in done.output
    with pytest.raises(SettingError):
        recovery.savepoints.create_savepoint.complete_epoch(
            Folder(open_store(job_folder(uri, JOB), new_id=new_id)).log.manifests()
        )


def test_what_savepoint_json_says_reads_back(world: World) -> None:
    counting(world, None)
    query = world.start(2)
    some_epochs(query)
    made = query.savepoint(f"file://{world.folder}/apart")
    assert read_savepoint(world.flow.setup.job.open_at(made.uri)) == made
    with pytest.raises(SettingError, match="lies there already"):
        query.savepoint(f"file://{world.folder}/apart")
    assert query.is_active
