"""If something of the user's fails to close at a job's end, the job fails and loses nothing."""

from __future__ import annotations

import queue
import threading
import traceback
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from recovery.decide.restart_strategy import FixedDelay
from statebackend.continuous.driver.run_loop import JobRun, StageEnded
from statebackend.continuous.job.job_options import RunOptions
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.continuous.worker.slot import Slot
from statebackend.errors import ConnectorError, PeerLostError, ProcessorError, StateBackendError
from statebackend.system import SYSTEM
from tests.continuous.runtime import jobs
from tests.continuous.runtime.jobs import (
    OUTPUT,
    Counting,
    Numbers,
    Unclosed,
    check_counts,
    truth,
)
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from pathlib import Path

    from statebackend.continuous.driver.continuous_query import ContinuousQuery
    from statebackend.continuous.sinks.sink import SinkContext, SinkWriter
    from tests.continuous.runtime.world import World

ROWS = 2000
CLOSING = threading.Event()
GO_ON = threading.Event()


class SlowlyClosed(Counting):
    def close(self) -> None:
        CLOSING.set()
        assert GO_ON.wait(60.0)


class UnclosedSink(CollectSink):
    def open(self, context: SinkContext) -> SinkWriter:
        writer = super().open(context)

        def close() -> None:
            raise ConnectorError("The place is not let go.")

        writer.close = close  # type: ignore[method-assign]
        return writer


def started(
    world: World,
    processor: Any,
    sink: CollectSink | None = None,
    rows: int | None = ROWS,
    **options: Any,
) -> tuple[ContinuousQuery, CollectSink]:
    sink = sink or CollectSink()
    keyed = world.source(Numbers(rows, rows_per_s=None if rows else 1000)).key_by("key")
    keyed.process(processor, uid="count", output_schema=OUTPUT).sink(sink)
    return world.start(2, restart=FixedDelay(12, 0.0), **options), sink


def failed(query: ContinuousQuery) -> StateBackendError:
    with pytest.raises(StateBackendError) as caught:
        query.await_termination(60.0)
    return caught.value


def test_a_processor_that_cannot_be_closed_fails_the_job_and_its_output_stays(
    world: World,
) -> None:
    query, sink = started(world, Unclosed())
    error = failed(query)
    assert isinstance(error, ProcessorError)
    assert "Subtask" in error.what
    assert "of 'count' was not closed in order" in error.what
    assert "ValueError: the connection is gone" in error.what
    assert f"{jobs.__file__}:" in error.what
    assert 'raise ValueError("the connection is gone")' in "".join(
        traceback.format_exception(error)
    ), "the user's traceback"
    assert query.restarts == 0, "another run would have nothing to do"
    check_counts(sink.rows(), truth(ROWS))
    assert not query.checkpoints()[-1].aborted


def test_the_traceback_of_what_does_not_close_is_logged_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    line = 'raise ValueError("the connection is gone")'
    query, _ = started(world, Unclosed())
    told = failed(query)
    assert "".join(traceback.format_exception(told)).count(line) == 1
    soon(lambda: len(world.cluster.errors) > 0)
    for raised in world.cluster.errors:  # as Spark logs it, once in the executor and once here
        assert str(raised)
        assert line not in "".join(traceback.format_exception(raised))
    assert caplog.text.count(line) == 1
    assert any(isinstance(raised, ProcessorError) for raised in world.cluster.errors)


def test_the_next_start_closes_what_was_mended_and_gives_nothing_twice(world: World) -> None:
    query, sink = started(world, Unclosed())
    failed(query)
    epoch = query.epoch
    world.renew()
    query, again = started(world, Counting())
    assert query.await_termination(60.0)
    assert epoch is not None
    assert (query.epoch or 0) > epoch
    rows = {tuple(row.values()) for row in sink.rows()}
    assert {tuple(row.values()) for row in again.rows()} <= rows


def test_a_sink_that_cannot_be_closed_fails_it_too(world: World) -> None:
    query, sink = started(world, Counting(), UnclosedSink())
    error = failed(query)
    assert isinstance(error, ConnectorError)
    assert "The place is not let go" in error.what
    check_counts(sink.rows(), truth(ROWS))


def test_a_slot_that_dies_while_it_closes_fails_the_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = Slot._end

    def dies(slot: Slot) -> None:
        end(slot)
        if slot._job_ended and slot._slot == 1:
            raise MemoryError("drawn")

    monkeypatch.setattr(Slot, "_end", dies)
    query, sink = started(world, Counting())
    error = failed(query)
    assert isinstance(error, PeerLostError)
    assert "drawn" in error.what
    assert query.restarts == 0
    check_counts(sink.rows(), truth(ROWS))


def test_what_is_said_right_after_the_end_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in the queue behind the message with which the job has ended."""
    run: Any = JobRun.__new__(JobRun)
    run._options, run._system = RunOptions(), SYSTEM
    run._ended, run._stopping, run._said = False, False, queue.SimpleQueue()
    run._said.put("savepoint")
    run._said.put(StageEnded(MemoryError("drawn")))
    run._machine = SimpleNamespace(failed=lambda error: [])
    monkeypatch.setattr(JobRun, "_do", lambda self, outs: setattr(self, "_ended", True))
    monkeypatch.setattr(run._machine, "requested", lambda *asked: None, raising=False)
    run._take_in()
    with pytest.raises(PeerLostError, match="drawn"):
        run.closed()


def test_a_job_that_is_stopped_does_not_fail_by_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    query, _ = started(world, Unclosed(), rows=None)
    soon(lambda: (query.epoch or 0) >= 1)
    assert query.stop()
    assert query.exception() is None
    assert "the connection is gone" in caplog.text


def test_a_job_that_ends_with_a_savepoint_has_it_and_is_not_started_again(
    world: World, tmp_path: Path
) -> None:
    query, _ = started(world, Unclosed(), rows=None)
    soon(lambda: (query.epoch or 0) >= 1)
    query.stop_with_savepoint(f"file://{tmp_path}/savepoint", timeout_s=60.0)
    assert "the connection is gone" in failed(query).what
    assert query.restarts == 0


def test_the_job_goes_on_until_what_takes_its_time_is_closed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    CLOSING.clear()
    GO_ON.clear()
    query, sink = started(world, SlowlyClosed(), silence_s=2.0)
    assert CLOSING.wait(60.0)
    soon(lambda: len(sink.rows()) > 0)
    # Longer than a slot may be silent: it says that it is still there.
    assert not query.await_termination(4.0)
    GO_ON.set()
    assert query.await_termination(60.0)
    check_counts(sink.rows(), truth(ROWS))
