"""What must not live on: epochs that the user gave up, and a run that never opened."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statebackend.errors import ProtocolError, RewindError
from statebackend.runtime.driver.services import Services
from statebackend.runtime.driver.session import RunSession
from statebackend.spark.frames.heartbeat import HeartbeatFile
from tests.spark.local.world import finish, job_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from statebackend import StateBackend
    from tests.spark.local.world import World

register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call] # workers need not find this module

FAR_MS = 33_000_000_000_000  # no timer of these tests fires


def _lose(world: World, *batches: int) -> None:
    """Take batches from the checkpoint location, as a power cut may."""
    for kind in ("commits", "offsets"):
        for batch in batches:
            path = world.location / kind / str(batch)
            path.unlink()
            path.with_name(f".{batch}.crc").unlink(missing_ok=True)


def _go_back(world: World, backend: StateBackend, frame: Any, epoch: int) -> None:
    finish(backend.start(world.writer(frame), go_back_to=epoch))


# --- timers --------------------------------------------------------------------------------------


class EarlierAndEarlier(StatefulProcessor):
    """Each row sets a timer before all others."""

    def init(self, handle: Any) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.handle.registerTimer(FAR_MS - row.id)
        yield Row(k=key[0])

    def close(self) -> None:
        pass


def test_the_heartbeat_is_not_told_of_epochs_that_were_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int | None]] = []
    say = HeartbeatFile.write

    def heard(file: HeartbeatFile, run: str, epoch: int, **due: Any) -> None:
        told.append((epoch, due["processing_due_ms"]))
        say(file, run, epoch, **due)

    monkeypatch.setattr(HeartbeatFile, "write", heard)
    for start in range(2):
        backend = world.backend()
        frame = backend.transform_with_state(
            world.input.stream(world.spark),
            keys="k",
            processor=EarlierAndEarlier(),
            output_schema="k string",
            uid="earlier",
            time_mode="processing",
        )
        if start == 0:
            for _ in range(4):
                world.input.add_keys("a")  # ids 1 to 4
            world.run(backend, frame)
            assert told[-1] == (3, FAR_MS - 4)
            _lose(world, 2, 3)
            told.clear()
        else:
            _go_back(world, backend, frame, 1)
    assert told[0] == (1, FAR_MS - 2)
    before_the_first = told[: [epoch for epoch, _ in told].index(2)]
    assert set(before_the_first) == {(1, FAR_MS - 2)}
    assert [epoch for epoch, _ in told] == sorted(epoch for epoch, _ in told)


def test_a_watermark_of_an_epoch_that_was_given_up_is_none_of_this_run_s(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated epoch keeps its watermark although a delay was changed: this is no such epoch."""
    told: list[tuple[int, bool]] = []
    say = HeartbeatFile.write

    def heard(file: HeartbeatFile, run: str, epoch: int, **due: Any) -> None:
        told.append((epoch, due["watermark_moves"]))
        say(file, run, epoch, **due)

    monkeypatch.setattr(HeartbeatFile, "write", heard)
    for start, delay in enumerate(["0 seconds", "1 hour"]):
        backend = world.backend()
        frame = backend.transform_with_state(
            world.input.stream(world.spark).withColumn("at", F.timestamp_seconds("id")),
            keys="k",
            processor=EarlierAndEarlier(),
            output_schema="k string",
            uid="earlier",
            time_mode="event",
            event_time="at",
            watermark_delay=delay,
        )
        if start == 0:
            for _ in range(4):
                world.input.add_keys("a")  # at 1 to 4 seconds
            world.run(backend, frame)
            last = max(epoch for epoch, _ in told)
            _lose(world, *range(2, last + 1))
            told.clear()
        else:
            _go_back(world, backend, frame, 1)
    before_the_first = set(told[: [epoch for epoch, _ in told].index(2)])
    assert before_the_first == {(1, False)}


# --- states that were deleted --------------------------------------------------------------------


class Counts(StatefulProcessor):
    """Counts rows in each of some states; others are deleted."""

    def __init__(self, *names: str, deleted: tuple[str, ...] = ()) -> None:
        self.names, self.deleted = names, deleted

    def init(self, handle: Any) -> None:
        for name in self.deleted:
            handle.deleteIfExists(name)
        self.cells = {name: handle.getValueState(name, "n bigint") for name in self.names}

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        found = len(list(rows))
        for name, cell in self.cells.items():
            n = (cell.get() or (0,))[0] + found
            cell.update((n,))
            yield Row(k=key[0], state=name, n=n)

    def close(self) -> None:
        pass


def test_no_epoch_before_a_deletion_can_be_gone_back_to(world: World) -> None:
    """The name of what was deleted stands for another, empty state by now."""

    def counting(processor: Counts) -> tuple[StateBackend, Any]:
        backend = world.backend()
        return backend, backend.transform_with_state(
            world.input.stream(world.spark),
            keys="k",
            processor=processor,
            output_schema="k string, state string, n bigint",
            uid="counts",
        )

    for _ in range(2):
        world.input.add_keys("a")
    world.run(*counting(Counts("kept", "gone")))
    for _ in range(3):
        world.input.add_keys("a")
    world.run(*counting(Counts("kept", deleted=("gone",))))
    _lose(world, 3, 4)
    both = Counts("kept", "gone")
    backend, frame = counting(both)
    with pytest.raises(RewindError, match=r"cannot go back to epoch 1.* can go back to 2[.]"):
        _go_back(world, backend, frame, 1)
    _go_back(world, backend, frame, 2)
    # The deletion is no part of what was given up: what is there again began after it.
    last = {row["state"]: row["n"] for row in world.sink.batches()[world.committed()[-1]]}
    assert last == {"kept": 5, "gone": 2}


def test_no_epoch_before_a_state_was_left_out_can_be_gone_back_to_with_it(world: World) -> None:
    """Declared again it would begin empty. Left out still, nothing is missing."""

    def counting(*names: str) -> tuple[StateBackend, Any]:
        backend = world.backend(allow_dropped_state=True)
        return backend, backend.transform_with_state(
            world.input.stream(world.spark),
            keys="k",
            processor=Counts(*names),
            output_schema="k string, state string, n bigint",
            uid="counts",
        )

    def last() -> dict[str, int]:
        return {row["state"]: row["n"] for row in world.sink.batches()[world.committed()[-1]]}

    for _ in range(2):
        world.input.add_keys("a")
    world.run(*counting("kept", "gone"))
    for _ in range(3):
        world.input.add_keys("a")
    world.run(*counting("kept"))
    _lose(world, 3, 4)
    backend, frame = counting("kept", "gone")
    with pytest.raises(RewindError, match=r"cannot go back to epoch 1.* can go back to 2[.]"):
        _go_back(world, backend, frame, 1)
    _go_back(world, *counting("kept"), 1)
    assert last() == {"kept": 5}


# --- runs that never opened ----------------------------------------------------------------------


def test_a_start_that_fails_at_its_opening_is_no_run_of_the_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(session: RunSession, *args: Any) -> NoReturn:
        raise ProtocolError("It does not open.", todo="Wait.")

    def fail() -> str:
        world.input.add_batches(1)
        backend = world.backend()
        frame = world.ledger(backend)
        with monkeypatch.context() as patched:
            patched.setattr(RunSession, "open", fails)
            with pytest.raises(ProtocolError, match="does not open"):
                world.run(backend, frame)
        assert not world.spark.streams.active
        return str(job_store(backend).uri)

    uri = fail()
    assert uri not in Services.running
    world.check(world.run_ledger())
    seen = Services.running[uri].session.stamps
    assert seen is not None
    assert fail() == uri
    assert Services.running[uri].session.stamps is seen, (
        "frames of the run before are known as such"
    )
    world.check(world.run_ledger())
