"""The wall clock steps back: batches get the logged time of earlier ones, and the query goes on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.local.world import checkpoints, finish, manifests

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

    from tests.spark.local.world import World


def _planned_ms(world: World, batch: int, *, becomes: int | None = None) -> int:
    """The time that Spark logged for a batch, or another one in its place."""
    path = world.location / "offsets" / str(batch)
    lines = path.read_text().splitlines()
    head = json.loads(lines[1])
    found: int = head["batchTimestampMs"]
    if becomes is not None:
        lines[1] = json.dumps({**head, "batchTimestampMs": becomes})
        path.write_text("\n".join(lines))
        path.with_name(f".{batch}.crc").unlink(missing_ok=True)
    return found


def _dies_in(world: World, batch: int) -> Callable[..., None]:
    """A sink that fails once Spark has planned a batch, before anything of it is evaluated."""

    def function(frame: DataFrame, number: int) -> None:
        if number == batch:
            raise RuntimeError("the driver dies")
        world.sink(frame, number)

    return function


def _set_clock(world: World, at_ms: int) -> None:
    """What the running query's batches will take for the time from now on."""
    jvm: Any = world.spark._jvm
    (query,) = world.spark.streams.active
    execution = query._jsq.streamingQuery()
    kind = execution.getClass()
    while kind.getSimpleName() != "StreamExecution":
        kind = kind.getSuperclass()
    field = kind.getDeclaredField("triggerClock")
    field.setAccessible(True)
    field.set(execution, jvm.org.apache.spark.util.ManualClock(at_ms))


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_planned_batch_with_the_time_of_an_earlier_one_runs(world: World, earlier: int) -> None:
    world.input.add_batches(4)
    backend = world.backend()
    world.fail(backend, world.ledger(backend), _dies_in(world, 2))
    _planned_ms(world, 2, becomes=_planned_ms(world, earlier))
    again = world.run_ledger()
    world.check(again)
    times = [m.stamp_ms for m in manifests(again) if m.kind == "checkpoint"]
    assert times[2] == times[earlier], "the log says the batch's time as Spark does"


def test_a_running_query_outlives_a_clock_that_steps_back(world: World) -> None:
    def stepping(frame: DataFrame, batch: int) -> None:
        world.sink(frame, batch)
        if batch == 1:
            _set_clock(world, _planned_ms(world, 0))

    world.input.add_batches(5)
    backend = world.run_ledger(stepping)
    world.check(backend)
    assert checkpoints(backend) == [("ledger", n) for n in range(5)]
    assert len({_planned_ms(world, n) for n in range(5)}) == 2, "the clock stands still"


@pytest.mark.parametrize("own_first", [True, False])
def test_a_kept_frame_is_refused_although_its_time_is_the_batchs_own(
    world: World, own_first: bool
) -> None:
    kept: list[DataFrame] = []

    def function(frame: DataFrame, batch: int) -> None:
        if batch == 0:
            kept.append(frame)
            _set_clock(world, _planned_ms(world, 0))
        if batch == 2 and kept:
            if own_first:
                world.sink(frame, batch)
            world.sink.write(kept.pop().collect(), batch)
            return
        world.sink(frame, batch)

    world.input.add_batches(3)
    backend = world.backend()
    frame = world.ledger(backend)
    text = world.fail(backend, frame, function)
    assert _planned_ms(world, 2) == _planned_ms(world, 0)
    assert "SB5002" in text
    assert "belongs to another batch was evaluated in batch 2" in text
    world.run(backend, frame)
    world.check(backend)


def test_a_frame_kept_from_an_earlier_run_of_the_driver_is_refused(world: World) -> None:
    kept: list[DataFrame] = []

    def keeping(frame: DataFrame, batch: int) -> None:
        kept.append(frame)
        _dies_in(world, 2)(frame, batch)

    world.input.add_batches(3)
    backend = world.backend()
    frame = world.ledger(backend)
    world.fail(backend, frame, keeping)
    _planned_ms(world, 2, becomes=_planned_ms(world, 1))

    text = world.fail(backend, frame, lambda own, batch: world.sink(kept[1], batch))
    assert "SB5002" in text
    finish(world.start(backend, frame))
    world.check(backend)
