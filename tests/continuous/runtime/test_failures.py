"""What goes wrong around the operators: sinks, sources, the driver, checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recovery.decide.restart_strategy import FixedDelay, NoRestart
from statebackend import system
from statebackend.continuous.driver.run_loop import JobRun
from statebackend.continuous.job.slot_messages import Failed, Report
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.continuous.sinks.sink import Committer, SinkWriter
from statebackend.continuous.sources.file_source import FileSource
from statebackend.continuous.worker.driver_link import DriverLink
from statebackend.errors import CheckpointsFailedError, ConnectorError, StoreUnreachableError
from statebackend.runtime.driver.session import RunSession
from tests.continuous.runtime.jobs import (
    OUTPUT,
    Counting,
    FailingOnce,
    Numbers,
    check_counts,
    truth,
)
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from pathlib import Path

    from snapshot.protocol.messages import AckReply, AckRequest
    from statebackend.continuous.sinks.sink import SinkContext
    from tests.continuous.runtime.world import World


class Stubborn(CollectSink):
    """Its first commits fail, after they have committed a part."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.left = failures

    def committer(self, job: str, uid: str) -> Committer:
        inner, sink = super().committer(job, uid), self

        class Failing(Committer):
            def commit(self, committables: Sequence[bytes]) -> None:
                if committables and sink.left:
                    sink.left -= 1
                    inner.commit(committables[:1])
                    raise ConnectorError("The place is not reached.")
                inner.commit(committables)

        return Failing()


class Unprepared(CollectSink):
    """Cannot make its rows safe."""

    def open(self, context: SinkContext) -> SinkWriter:
        class Failing(SinkWriter):
            def write(self, batch: pa.RecordBatch) -> None:
                return None

            def prepare(self, checkpoint: int) -> list[bytes]:
                raise ConnectorError("The place is full.")

        return Failing()


class Undelivered(CollectSink):
    """Its rows are delivered behind the barrier, and some are lost there; it says so once."""

    def open(self, context: SinkContext) -> SinkWriter:
        class Failing(SinkWriter):
            lost = 0

            def write(self, batch: pa.RecordBatch) -> None:
                return None

            def prepare(self, checkpoint: int) -> list[bytes]:
                return []

            def await_prepared(self, checkpoint: int) -> None:
                self.lost += 1
                if self.lost == 1:
                    raise ConnectorError("Rows were lost on their way.")

        return Failing()


def count(world: World, sink: CollectSink, **source: Any) -> CollectSink:
    rows, rows_per_s = source.pop("rows", 2000), source.pop("rows_per_s", 2000)
    processor = source.pop("processor", None) or Counting()
    numbers = Numbers(rows, rows_per_s=rows_per_s, **source)
    keyed = world.source(numbers).key_by("key")
    keyed.process(processor, uid="count", output_schema=OUTPUT).sink(sink)
    return sink


def test_a_commit_that_fails_is_repeated_after_a_restart(world: World) -> None:
    sink = Stubborn(2)
    count(world, sink)
    query = world.start(2, restart=FixedDelay(4, 0.0))
    assert query.await_termination(60.0)
    assert query.restarts == 2
    check_counts(sink.rows(), truth(2000))


def test_a_sink_that_cannot_prepare_ends_the_job_with_its_own_error(world: World) -> None:
    count(world, Unprepared())
    query = world.start(2, restart=NoRestart())
    with pytest.raises(ConnectorError, match="full"):
        query.await_termination(60.0)


@pytest.mark.parametrize("keyed", [False, True])
def test_rows_that_a_sink_loses_behind_the_barrier_end_the_run_and_no_checkpoint_goes_without_them(
    world: World, *, keyed: bool
) -> None:
    if keyed:
        count(world, Undelivered())
    else:
        world.source(Numbers(2000, rows_per_s=2000)).sink(Undelivered())
    query = world.start(2, restart=NoRestart(), tolerable_failures=3)
    with pytest.raises(ConnectorError, match="lost on their way"):
        query.await_termination(60.0)
    assert not [one for one in query.checkpoints() if one.epoch is not None]


@pytest.mark.parametrize("tolerable", [0, 2])
def test_a_store_that_fails_under_a_snapshot_costs_checkpoints_and_then_the_job(
    world: World, tolerable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from statebackend.continuous.worker.keyed_state import SubtaskState

    failing, persist = [3], SubtaskState.persist

    def fails(self: SubtaskState, frozen: Any) -> Any:
        ack = persist(self, frozen)
        if self._participant.who.subtask == 0 and failing[0]:
            failing[0] -= 1
            raise StoreUnreachableError("The store is down.")
        return ack

    monkeypatch.setattr(SubtaskState, "persist", fails)
    sink = count(world, CollectSink())
    query = world.start(2, restart=NoRestart(), tolerable_failures=3 if tolerable else 0)
    if not tolerable:
        with pytest.raises(CheckpointsFailedError):
            query.await_termination(60.0)
        return
    assert query.await_termination(60.0)
    assert [one.aborted for one in query.checkpoints()][:3] == ["declined"] * 3
    assert query.checkpoints()[3].epoch == 0
    check_counts(sink.rows(), truth(2000))


@pytest.mark.parametrize("cut", [pytest.param("sink-count", marks=pytest.mark.full), "source"])
def test_a_checkpoint_whose_records_are_cut_off_never_was(
    world: World, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of one checkpoint are written one after the other; some are there already."""
    left, ack = [2], RunSession.ack

    def fails(self: RunSession, request: AckRequest) -> AckReply:
        if request.operator == cut and request.epoch in (2, 4) and left[0]:
            left[0] -= 1
            raise StoreUnreachableError("The store is down.")
        return ack(self, request)

    monkeypatch.setattr(RunSession, "ack", fails)
    sink = count(world, CollectSink(), rows_per_s=300)  # for more than four checkpoints
    query = world.start(2, restart=FixedDelay(3, 0.0))
    assert query.await_termination(60.0)
    assert query.restarts == 2
    check_counts(sink.rows(), truth(2000))


def test_slots_end_when_their_driver_does_not_answer_any_more(world: World) -> None:
    count(world, CollectSink(), rows=None)
    query = world.start(2, silence_s=6.0, restart=NoRestart())
    soon(lambda: query.is_running)
    slots = world.cluster.slots
    world.cluster.server().shutdown()
    soon(lambda: all(not thread.is_alive() for slot in slots for thread in slot._threads))
    with pytest.raises(Exception, match=r"heard|stage|failed"):
        query.await_termination(60.0)


def test_files_that_arrive_later_are_read_once_over_a_restart(world: World, tmp_path: Path) -> None:
    folder, size = tmp_path / "in", 500
    folder.mkdir()
    numbers = Numbers(None, splits=1)

    def arrives(number: int) -> None:
        reader = numbers.open(numbers.discover(None).splits[0], {"rows": number * size})
        draft = folder / f".{number}"
        pq.write_table(pa.Table.from_batches([reader.read(size)]), draft)
        draft.rename(folder / f"{number:03}.parquet")

    sink = CollectSink()
    arrives(0)
    source = FileSource(folder, schema=numbers.schema, follow=True)
    keyed = world.source(source).key_by("key")
    keyed.process(Counting(), uid="count", output_schema=OUTPUT).sink(sink)
    query = world.start(2, restart=FixedDelay(1, 0.0), discover_every_s=0.1)

    def read() -> int:
        newest: dict[int, int] = {}
        for row in sink.rows():
            newest[row["key"]] = max(newest.get(row["key"], 0), row["n"])
        return sum(newest.values())

    soon(lambda: read() == size)
    arrives(1)
    soon(lambda: read() == 2 * size)
    world.cluster.slots[-1]._link.broken("drawn", 0, RuntimeError("drawn"))
    arrives(2)
    soon(lambda: read() == 3 * size)
    assert query.stop()
    assert query.restarts == 1
    check_counts(sink.rows(), truth(3 * size))


def test_a_stopped_query_says_so_at_once(world: World) -> None:
    count(world, CollectSink(), rows=None)
    query = world.start(2)
    soon(lambda: query.is_running)
    began_s = system.monotonic_s()
    assert query.stop()
    assert system.monotonic_s() - began_s < 10.0
    assert not query.is_active
    assert query.exception() is None
    assert query.await_termination()


class Closing(Counting):
    """Says when it is closed."""

    closed: ClassVar[list[str]] = []

    def close(self) -> None:
        self.closed.append(threading.current_thread().name)


def test_a_slot_that_hears_of_the_end_after_the_others_has_not_failed(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call, stopping = DriverLink.call, threading.Event()

    def late(link: DriverLink, kind: str, message: Any, timeout_s: float) -> bytes:
        answer = call(link, kind, message, timeout_s)
        if kind == "poll" and link._slot == 1 and stopping.is_set():
            system.sleep_s(1.0)
        return answer

    monkeypatch.setattr(DriverLink, "call", late)
    Closing.closed.clear()
    keyed = world.source(Numbers(None, rows_per_s=500)).key_by("key")
    keyed.process(Closing(), uid="count", output_schema=OUTPUT).sink(CollectSink())
    query = world.start(2)
    soon(lambda: (query.epoch or 0) > 1)
    stopping.set()
    assert query.stop()
    assert world.cluster.errors == []  # Spark would print them
    assert sorted(Closing.closed) == ["count/0", "count/1"]
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == []


class Breaking(Closing):
    """Fails once, in one subtask, with a text that is not well-formed."""

    broken: ClassVar[list[str]] = []

    def process(self, key: Any, rows: Any, ctx: Any) -> Any:
        name = threading.current_thread().name
        if name == "count/0" and not self.broken:
            self.broken.append(name)
            raise ValueError("a \udcff")
        return super().process(key, rows, ctx)


def test_the_failure_of_one_slot_is_told_whatever_it_says_and_is_none_of_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = JobRun._heard

    def late(run: JobRun, said: Any) -> Any:
        out = heard(run, said)
        if isinstance(said, Report) and any(isinstance(one, Failed) for one in said.events):
            system.sleep_s(0.5)  # the others miss the slot before the loop has ended
        return out

    monkeypatch.setattr(JobRun, "_heard", late)
    Closing.closed.clear()
    Breaking.broken.clear()
    sink = CollectSink()
    keyed = world.source(Numbers(2000, rows_per_s=500)).key_by("key")
    keyed.process(Breaking(), uid="count", output_schema=OUTPUT).sink(sink)
    query = world.start(3, restart=FixedDelay(1, 0.0))
    assert query.await_termination(60.0)
    assert query.restarts == 1
    check_counts(sink.rows(), truth(2000))
    (error,) = world.cluster.errors
    assert "a \udcff" in str(error)
    # Twice, but for the one that failed.
    assert sorted(Closing.closed) == ["count/0", *["count/1"] * 2, *["count/2"] * 2]


def test_between_a_failure_and_the_next_run_no_subtask_has_its_state(
    world: World, tmp_path: Path
) -> None:
    count(world, CollectSink(), processor=FailingOnce(str(tmp_path / "failed"), 500))
    query = world.start(2, restart=FixedDelay(1, 2.0))
    soon(lambda: query.restarts == 1)
    assert query.session is None
    assert query.run is not None
    assert query.run.restored == (0, 0)
    query.stop()
