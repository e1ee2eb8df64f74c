"""Checkpoints under backpressure whose barriers overtake rows: how long they take, and restores."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from recovery.decide.restart_strategy import FixedDelay
from statebackend import system
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.errors import RescaleError, SettingError, StateMismatchError
from statebackend.schema.ddl import parse_ddl
from tests.continuous.runtime.jobs import (
    KEYS,
    OUTPUT,
    Counting,
    Numbers,
    Paired,
    PerClass,
    Scaled,
    Windows,
    check_counts,
    truth,
    windows_truth,
)
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from snapshot.log.progress_events import ContinuousCheckpoint
    from statebackend.continuous.driver.continuous_query import ContinuousQuery
    from tests.continuous.runtime.world import World

pytestmark = pytest.mark.full  # whole jobs, whatever fails

SIDES = "key BIGINT, side INT, n BIGINT, total BIGINT"
SCALED = f"{OUTPUT}, rules BIGINT"
# Small messages: what is in the hands of a processor is not overtaken.
NARROW = {"channel_bytes": 16 << 10, "buffer_bytes": 1 << 10, "batch_rows": 64}
UNALIGNED = {**NARROW, "alignment_timeout_s": 0.02, "checkpoint_interval_s": 0.2}


ROW_S = 0.0008


def slowly(rows: Iterator[Any]) -> Iterator[Any]:
    for row in rows:
        system.sleep_s(ROW_S)
        yield row


class Slow:
    """Takes its time with every row; for processors."""

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Any:
        return super().process(key, slowly(rows), ctx)  # type: ignore[misc]


class SlowCounting(Slow, Counting):
    pass


class EachRow(Counting):
    """Counts, with the class of the key, after each row: what is next has as many rows."""

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Any:
        for row in rows:
            for k, n, total in super().process(key, iter((row,)), ctx):
                yield k % 5, k, n, total


class SlowEachRow(Slow, EachRow):
    pass


class SlowWindows(Slow, Windows):
    pass


class SlowPerClass(Slow, PerClass):
    pass


class SlowScaled(Slow, Scaled):
    pass


class SlowPaired(Paired):
    def process_left(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[Any]:
        return super().process_left(key, slowly(rows), ctx)


def count(world: World, sink: CollectSink, rows: int | None = 6000, splits: int = 3) -> CollectSink:
    keyed = world.source(Numbers(rows, splits=splits)).key_by("key")
    keyed.process(SlowCounting(), uid="count", output_schema=OUTPUT).sink(sink)
    return sink


def total(one: ContinuousCheckpoint, figure: str, vertex: str = "") -> float:
    """Over the subtasks of a vertex, or all."""
    return sum(f.get(figure, 0) for name, f in one.subtasks.items() if name.startswith(vertex))


def in_flight_bytes(query: ContinuousQuery) -> float:
    """In the newest checkpoint."""
    done = query.checkpoints()
    return total(done[-1], "inflight_bytes") if done else 0.0


def unaligned(query: ContinuousQuery) -> Callable[[], bool]:
    """Whether the newest checkpoint holds rows in flight."""

    def found() -> bool:
        assert query.exception() is None
        assert query.is_active
        return in_flight_bytes(query) > 0

    return found


def fail_once(world: World) -> None:
    world.cluster.slots[-1]._link.broken("drawn", 0, RuntimeError("drawn"))


class Given(Numbers):
    """Counts what it gives, for those in its process."""

    def __init__(self, given: list[int]) -> None:
        super().__init__(None, splits=3)
        self._to = given

    def batch(self, numbers: NDArray[np.int64]) -> pa.RecordBatch:
        self._to.append(len(numbers))
        return super().batch(numbers)


class Tallied(SlowCounting):
    """Counts what it takes, for those in its process."""

    taken: ClassVar[list[int]] = []

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Any:
        kept = list(rows)
        yield from super().process(key, iter(kept), ctx)
        self.taken.append(len(kept))


def test_a_checkpoint_under_backpressure_takes_as_long_as_the_rows_or_as_its_timeout(
    world: World,
) -> None:
    options = {**NARROW, "channel_bytes": 32 << 10, "checkpoint_interval_s": None}
    took: dict[float | None, int] = {}  # in rows: a clock that stands still while the machine does
    for timeout_s in (None, 0.1):
        given: list[int] = []
        Tallied.taken.clear()
        keyed = world.source(Given(given)).key_by("key")
        keyed.process(Tallied(), uid="count", output_schema=OUTPUT).sink(CollectSink())
        query = world.start(2, alignment_timeout_s=timeout_s, **options)
        # The channels are full.
        soon(lambda given=given: sum(given) - sum(Tallied.taken) > 2500)
        before = sum(Tallied.taken)
        assert query.checkpoint() is not None
        took[timeout_s] = sum(Tallied.taken) - before
        found = query.checkpoints()[-1]
        assert (total(found, "inflight_bytes", "count") > 0) == (timeout_s is not None)
        assert (total(found, "unaligned", "count") > 0) == (timeout_s is not None)
        query.stop()
        if timeout_s is None:
            world.renew()
            world.folder = world.folder / "other"
            world.renew()
    assert took[0.1] < took[None] / 2


def test_rows_in_flight_count_once_after_a_failure(world: World) -> None:
    sink = count(world, CollectSink())
    query = world.start(2, restart=FixedDelay(1, 0.0), **UNALIGNED)
    soon(unaligned(query))
    fail_once(world)
    assert query.await_termination(60.0)
    assert query.restarts == 1
    check_counts(sink.rows(), truth(6000))
    last = query.checkpoints()[-1]
    assert not total(last, "inflight_bytes")  # nothing is in flight any more


def chained(world: World, counts: CollectSink, classes: CollectSink, rows: int) -> None:
    """Two operators behind each other; the second one is slower."""
    keyed = world.source(Numbers(rows, splits=3)).key_by("key")
    counted = keyed.process(EachRow(), uid="count", output_schema=f"class BIGINT, {OUTPUT}")
    counted.sink(counts)
    slow = counted.key_by("class")
    slow.process(SlowPerClass(), uid="classes", output_schema="class BIGINT, n BIGINT").sink(
        classes
    )


def check_classes(found: list[dict[str, Any]], rows: int) -> None:
    """What each class came to: the newest counts of its keys, summed."""
    wanted: dict[int, int] = {}
    for key, (n, _) in truth(rows).items():
        wanted[key % 5] = wanted.get(key % 5, 0) + n
    last: dict[int, int] = {}
    for row in found:
        last[row["class"]] = max(last.get(row["class"], 0), row["n"])
    assert last == wanted


def test_of_two_operators_behind_each_other_both_have_rows_in_flight(world: World) -> None:
    counts, classes = CollectSink(), CollectSink()
    chained(world, counts, classes, 5000)
    query = world.start(2, restart=FixedDelay(1, 0.0), **UNALIGNED)
    soon(unaligned(query))
    assert total(query.checkpoints()[-1], "inflight_bytes", "classes") > 0
    fail_once(world)
    assert query.await_termination(60.0)
    assert query.restarts == 1
    check_counts(counts.rows(), truth(5000))
    check_classes(classes.rows(), 5000)


def test_both_inputs_of_an_operator_have_rows_in_flight(world: World) -> None:
    sink = CollectSink()
    left = world.source(Numbers(3000), "left").key_by("key")
    right = world.source(Numbers(4000, splits=3), "right").key_by("key")
    left.connect(right).process(SlowPaired(), uid="pairs", output_schema=SIDES).sink(sink)
    query = world.start(2, restart=FixedDelay(1, 0.0), **UNALIGNED)
    soon(unaligned(query))
    fail_once(world)
    assert query.await_termination(60.0)
    assert query.restarts == 1
    for side, rows in ((0, 3000), (1, 4000)):
        check_counts([row for row in sink.rows() if row["side"] == side], truth(rows))


def test_rules_for_all_are_never_overtaken(world: World) -> None:
    """Every subtask's checkpoint has come to the same rules, or it would be refused."""
    sink = CollectSink()
    rules = world.source(Numbers(1500, splits=3, rows_per_s=1500), "rules")
    data = world.source(Numbers(12_000), "data").key_by("key")
    scaled = data.connect_broadcast(rules)
    scaled.process(SlowScaled(), uid="scaled", output_schema=SCALED).sink(sink)
    query = world.start(2, restart=FixedDelay(1, 0.0), **UNALIGNED)
    soon(unaligned(query))
    assert not total(query.checkpoints()[-1], "inflight_bytes", "rules")
    fail_once(world)
    assert query.await_termination(60.0)
    assert query.restarts == 1
    check_counts(sink.rows(), truth(12_000))
    newest = {i * 7 % KEYS: i for i in range(1500)}
    assert max(row["rules"] for row in sink.rows()) <= sum(newest.values())


def stopped_in_flight(world: World, sink: CollectSink, rows: int = 6000) -> None:
    """A job that was stopped behind an unaligned checkpoint; then there is another driver."""
    count(world, sink, rows)
    query = world.start(2, **{**UNALIGNED, "checkpoint_interval_s": 0.5})
    soon(unaligned(query))
    query.stop()
    assert total(query.checkpoints()[-1], "inflight_bytes") > 0
    world.renew()


def test_another_driver_puts_back_what_was_in_flight(world: World) -> None:
    sink = CollectSink()
    stopped_in_flight(world, sink)
    count(world, sink)
    query = world.start(2)  # and takes aligned checkpoints
    assert query.await_termination(60.0)
    assert not any(total(one, "inflight_bytes") for one in query.checkpoints())
    check_counts(sink.rows(), truth(6000))


def test_rows_in_flight_go_to_the_same_parallelism_only(world: World) -> None:
    sink = CollectSink()
    stopped_in_flight(world, sink)
    count(world, sink)
    query = world.start(3, restart=FixedDelay(None, 0.0))
    with pytest.raises(RescaleError, match="unaligned"):
        query.await_termination(60.0)
    assert query.restarts == 0
    world.renew()
    count(world, sink)
    assert world.start(2).await_termination(60.0)  # nothing was lost by it
    check_counts(sink.rows(), truth(6000))


class Renamed(Numbers):
    """With another name for a column."""

    def __init__(self, rows: int, **more: Any) -> None:
        super().__init__(rows, **more)
        self.schema = parse_ddl("key BIGINT, value BIGINT, seen TIMESTAMP")


def test_rows_in_flight_go_into_a_channel_of_the_same_columns_only(world: World) -> None:
    sink = CollectSink()
    stopped_in_flight(world, sink)
    keyed = world.source(Renamed(6000, splits=3)).key_by("key")
    keyed.process(SlowCounting(), uid="count", output_schema=OUTPUT).sink(sink)
    query = world.start(2, restart=FixedDelay(None, 0.0))
    with pytest.raises(StateMismatchError, match="columns"):
        query.await_termination(60.0)
    assert query.restarts == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_result_is_exact_whatever_fails_and_when(world: World, seed: int) -> None:
    drawn = random.Random(seed)
    rows = 4000
    counts, classes, windows = CollectSink(), CollectSink(), CollectSink()
    source = world.held_back(
        rows,
        splits=drawn.choice([2, 3, 5]),
        rows_per_s=drawn.choice([None, 4000]),
        event_time="at",
        watermark_delay="5 ms",
    )
    keyed = world.source(source).key_by("key")
    keyed.process(
        drawn.choice([Windows, SlowWindows])(100),
        uid="windows",
        output_schema="key BIGINT, start BIGINT, n BIGINT, total BIGINT",
        time_mode="event",
        event_time="at",
    ).sink(windows)
    first = drawn.choice([EachRow, SlowEachRow])()
    counted = keyed.process(first, uid="count", output_schema=f"class BIGINT, {OUTPUT}")
    counted.sink(counts)
    schema = "class BIGINT, n BIGINT"
    by_class = counted.key_by("class")
    by_class.process(SlowPerClass(), uid="classes", output_schema=schema).sink(classes)
    given = {**UNALIGNED, "checkpoint_interval_s": 0.1}
    query = world.start(drawn.choice([2, 3]), restart=FixedDelay(None, 0.0), **given)
    failures, next_s, patient = 0, system.monotonic_s() + drawn.uniform(0.3, 1.0), True
    while not query.await_termination(0.02):
        if query.restarts >= 2:
            world.go_on()
        if not query.is_running or query.restarts < failures or failures == 5:
            continue
        late_s, held = system.monotonic_s() - next_s, in_flight_bytes(query)
        # The first one always finds rows in flight.
        if late_s < 0 or (not held and (not failures or (patient and late_s < 2.0))):
            continue
        fail_once(world)
        failures += 1
        next_s, patient = system.monotonic_s() + drawn.uniform(0.3, 1.0), drawn.random() < 0.7
    assert query.restarts >= 2
    check_counts(counts.rows(), truth(rows))
    check_classes(classes.rows(), rows)
    found = [tuple(row.values()) for row in windows.rows()]
    assert len(found) == len(set(found))
    assert set(found) == windows_truth(rows, 100)


@pytest.mark.parametrize(
    "given", [{"alignment_timeout_s": -1.0}, {"alignment_timeout_s": 1.0, "mode": "at_least_once"}]
)
def test_timeouts_that_mean_nothing_are_refused(world: World, given: dict[str, Any]) -> None:
    count(world, CollectSink())
    with pytest.raises(SettingError):
        world.start(2, **given)
