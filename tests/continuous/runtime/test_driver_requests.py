"""The driver claims a job, loses messages, and is asked for checkpoints."""

from __future__ import annotations

import itertools
import threading
import uuid
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from recovery.decide.restart_strategy import FixedDelay, NoRestart
from snapshot.barriers.checkpoint_trigger import Request
from snapshot.barriers.pending_checkpoints import Reason
from snapshot.log.commit_log import CommitLog
from snapshot.storage.memory_store import MemoryStore
from statebackend.continuous.driver.checkpoint_book import CheckpointBook
from statebackend.continuous.driver.run_state import Settled
from statebackend.continuous.driver.savepoint_requests import SavepointRequests
from statebackend.continuous.exchange.closing_connections import sever
from statebackend.errors import (
    CoordinatorUnreachableError,
    FencedError,
    StateBackendError,
    StoreUnreachableError,
)
from statebackend.rpc.driver_server import Server
from statebackend.runtime.driver.job import Job, taken_from
from tests.continuous.runtime.jobs import Numbers, check_counts, truth
from tests.continuous.runtime.unruly import break_slot, count
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from statebackend.continuous.driver.continuous_query import ContinuousQuery
    from statebackend.continuous.worker.slot import Slot
    from tests.continuous.runtime.world import World

pytestmark = pytest.mark.full  # waits for checkpoints that expire

# --- who runs the job ----------------------------------------------------------------------------


def test_a_claim_of_its_own_that_landed_and_failed_is_no_other_driver(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = count(world, Numbers(1500, rows_per_s=1000))
    query = world.start(2, restart=FixedDelay(5, 0.0))
    soon(lambda: query.is_running)
    claim, claims = CommitLog.claim, itertools.count(1)

    def landing(self: CommitLog, **named: Any) -> Any:
        tenure = claim(self, **named)
        if next(claims) < 3:
            raise StoreUnreachableError("no answer")
        return tenure

    monkeypatch.setattr(CommitLog, "claim", landing)
    break_slot(world)
    assert query.await_termination(60.0)
    assert query.restarts == 3
    check_counts(sink.rows(), truth(1500))


def test_a_job_is_not_taken_back_because_the_log_did_not_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    count(world, Numbers(None, rows_per_s=1000))
    query = world.start(2, checkpoint_interval_s=None, restart=FixedDelay(5, 0.0))
    soon(lambda: query.is_running)
    other = Job(world.flow.setup.job.uri, "job").log()
    other.claim(query_id="continuous", run="another's")
    sequences, looks = CommitLog.sequences, itertools.count(1)

    def failing(self: CommitLog) -> list[int]:
        if threading.current_thread() is query._thread and next(looks) == 1:
            raise StoreUnreachableError("no answer")
        return sequences(self)

    monkeypatch.setattr(CommitLog, "sequences", failing)
    break_slot(world)
    with pytest.raises(FencedError):
        query.await_termination(30.0)
    assert query.restarts == 2  # the slot, and the log
    assert other.read(other.sequences()[-1]).run == "another's"


def test_every_claim_since_is_looked_at_and_not_only_the_newest() -> None:
    store = MemoryStore(uuid.uuid4().hex)

    def log() -> CommitLog:
        return CommitLog(store, job="job", writer="w", new_id=lambda: uuid.uuid4().hex)

    log().claim(run="somebody before")
    tenure = log().claim(run="a")
    assert taken_from(log(), tenure, {"a"}) is None
    log().claim(run="b")
    assert taken_from(log(), tenure, {"a", "b"}) is None
    log().claim(run="another's")
    log().claim(run="c")  # its own came after it all the same
    assert "generation 4" in str(taken_from(log(), tenure, {"a", "b", "c"}))


# --- what is lost --------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_messages_that_are_lost_between_slot_and_driver_cost_no_restart(
    world: World, lost: str
) -> None:
    dropped: list[str] = []

    def unreliable(slot: Slot) -> None:
        link: Any = slot._link
        call, calls = link.call, itertools.count(1)

        def some(kind: str, message: Any, timeout_s: float) -> bytes:
            drop = kind != "poll" and next(calls) % 3 == 0
            if drop and lost == "request":
                dropped.append(kind)
                raise CoordinatorUnreachableError("reset")
            answer: bytes = call(kind, message, timeout_s)
            if drop:
                dropped.append(kind)
                raise CoordinatorUnreachableError("reset")
            return answer

        link.call = some

    world.cluster.on_slot = unreliable
    sink = count(world, Numbers(1500, splits=6, rows_per_s=1000, clock=world.held(1.0)))
    query = world.start(2, restart=NoRestart())
    soon(lambda: len(dropped) > 5)
    world.go_on()
    assert query.await_termination(60.0)
    check_counts(sink.rows(), truth(1500))


def test_connections_to_the_driver_that_are_reset_cost_no_restart(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, answer = itertools.count(1), Server.do_action
    resets: list[str] = []

    def resetting(self: Server, context: Any, action: Any) -> Any:
        bodies = list(answer(self, context, action))
        if next(answered) % 7 == 0:
            resets.append(context.peer())
            sever(resets[-1], self.port)
        return iter(bodies)

    monkeypatch.setattr(Server, "do_action", resetting)
    sink = count(world, Numbers(1500, splits=6, rows_per_s=1000, clock=world.held(1.0)))
    query = world.start(2, restart=NoRestart())
    soon(lambda: len(resets) > 2)
    world.go_on()
    assert query.await_termination(60.0)
    check_counts(sink.rows(), truth(1500))


# --- asking for checkpoints ----------------------------------------------------------------------


def test_a_checkpoint_that_is_asked_for_right_after_the_start_is_taken(world: World) -> None:
    count(world, Numbers(None, rows_per_s=1000))
    query = world.start(2, checkpoint_interval_s=None)
    assert query.checkpoint(60.0) == 0
    assert query.checkpoint(60.0) == 1


def test_a_checkpoint_is_asked_for_again_after_a_restart(world: World) -> None:
    """The run that was asked ends before it has begun one."""
    count(world, Numbers(None, rows_per_s=1000))
    query = world.start(2, checkpoint_interval_s=None, restart=FixedDelay(3, 0.0))
    soon(lambda: query.is_running)
    lost = query.run
    assert lost is not None
    lost.request = lambda kind: break_slot(world)  # type: ignore[method-assign]
    assert query.checkpoint(60.0) == 0
    assert query.restarts == 1


class Cleaner:
    """Whether it cleans, and who waits for its end."""

    def __init__(self, *, cleans: bool) -> None:
        self.over, self.waits = threading.Event(), threading.Event()
        self.entered: Callable[[], None] = lambda: None
        if not cleans:
            self.over.set()

    @contextmanager
    def held(self, timeout_s: float | None = None) -> Iterator[None]:
        self.entered()
        self.waits.set()
        assert self.over.wait(60.0 if timeout_s is None else min(timeout_s, 60.0))
        yield


def test_the_loop_of_a_run_does_not_wait_for_a_cleaning_that_a_savepoint_waits_for() -> None:
    """That of a run which begins while the savepoint gets in line."""
    savings = SavepointRequests(Job("file:///nowhere", "job"), CheckpointBook("job"))

    def taken(cleaner: Cleaner) -> Any:
        return SimpleNamespace(session=SimpleNamespace(cleaner=cleaner))

    requests: list[str] = []
    run: Any = SimpleNamespace(number=0, request=requests.append)
    first, second = Cleaner(cleans=False), Cleaner(cleans=True)
    savings.run_begins(run, taken(first))
    first.entered = lambda: savings.run_begins(run, taken(second))

    def take() -> None:
        with pytest.raises(StoreUnreachableError, match="waiting for the checkpoint"):
            savings.take(None, 3.0)

    taking = threading.Thread(target=take)
    taking.start()
    assert second.waits.wait(10.0)
    asked = Request(id=1, kind="checkpoint", periodic=True, asked_s=0.0)
    given_up = Settled(1, -1, Reason.EXPIRED, 1.0, asked)
    telling = threading.Thread(target=savings.settled, args=(given_up, {}))
    telling.start()
    telling.join(2.0)
    told = not telling.is_alive()
    second.over.set()
    taking.join(10.0)
    assert told
    assert requests == ["savepoint"]  # and it got in line behind the cleaning
    assert savings._wanted == []


def test_nobody_waits_for_a_checkpoint_of_a_job_that_has_ended(world: World) -> None:
    count(world, Numbers(100))
    query = world.start(2)
    assert query.await_termination(60.0)
    assert query.checkpoint(60.0) is None


def test_a_checkpoint_that_expires_names_those_it_waited_for(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from statebackend.continuous.worker.keyed_state import SubtaskState

    persist = SubtaskState.persist

    def silent(self: SubtaskState, frozen: Any) -> Any:
        return None if self._participant.who.subtask == 1 else persist(self, frozen)

    monkeypatch.setattr(SubtaskState, "persist", silent)
    count(world, Numbers(None, rows_per_s=1000))
    # All the others ack in that time, on a machine that pauses too.
    query: ContinuousQuery = world.start(2, timeout_s=8.0, restart=NoRestart())
    with pytest.raises(StateBackendError, match="waited for count/1"):
        query.await_termination(60.0)
    assert query.checkpoints()[-1].waited_for == ["count/1"]
    assert "it waited for count/1" in caplog.text
