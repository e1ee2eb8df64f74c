"""Several operators in one query, ours and Spark's own, with one watermark that all agree on."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import functions as F

from statebackend import CoProcessor
from statebackend.errors import StateMismatchError
from tests.spark.local.processors import Ledger
from tests.spark.local.world import Input, check_ledger_output, durable_state, setting, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

    from statebackend import ProcessorContext, StateBackend
    from tests.spark.local.world import World
from tests.spark.local.windows import *  # noqa: F403
from tests.spark.local.windows import (
    BASE_S,
    COUNTS,
    SCHEMA,
    WINDOW_S,
    Files,
    Sorted,
    Windows,
    _at,
    _files,
    _fill,
    _given,
    _on_time,
    _passing,
    _watermarks,
    _windows,
)

register_pickle_by_value(sys.modules[__name__])  # workers need not find this module


def _windows_frame(
    backend: StateBackend, df: DataFrame, uid: str = "windows", **time: Any
) -> DataFrame:
    return backend.process(
        df,
        keys="k",
        processor=Windows(),
        output_schema=COUNTS,
        uid=uid,
        time_mode="event",
        event_time="at",
        **time,
    )


def test_an_operator_behind_another_closes_its_windows_by_the_same_watermark(
    world: World,
) -> None:
    files = _files(5)
    for part in (files[:3], files[3:]):  # two starts
        _fill(world.input, part)
        backend = world.backend()
        held = backend.process(
            world.input.stream(world.spark),
            keys="k",
            processor=Sorted(),
            output_schema=SCHEMA,
            uid="sorted",
            time_mode="event",
            event_time="at",
            watermark_delay="3 seconds",
        )
        world.run(backend, _windows_frame(backend, held))
    # The first start ended when nothing moved any more: with a batch of no data, and W(3).
    marks = _watermarks([(files[:3], 3)])
    files.insert(3, [])
    marks = [*marks, *_watermarks([(files, 3)])[4:]]
    assert _given(world) == _windows(files, marks)
    assert max(_given(world).values()) == 1


def test_operators_side_by_side_wait_for_the_slower_watermark(world: World) -> None:
    left, right = _files(5), _files(3, step_s=4, shift=2)
    other = Input(world.root / "other", SCHEMA)
    _fill(world.input, left)
    _fill(other, right)
    backend = world.backend()
    frames = [
        _windows_frame(backend, source.stream(world.spark), uid, watermark_delay=delay)
        for uid, source, delay in (("left", world.input, "1 second"), ("right", other, "0 seconds"))
    ]
    both = frames[0].withColumn("side", F.lit("left"))
    world.run(backend, both.union(frames[1].withColumn("side", F.lit("right"))))
    marks = _watermarks([(left, 1), (right, 0)])
    assert _given(world, side="left") == _windows(left, marks)
    assert _given(world, side="right") == _windows(right, marks)
    assert marks[-1] == 2 + 2 * 4 + 7, "the slower one's"
    assert _given(world, side="left")


# --- Spark's own operators before ours ----------------------------------------------------------


@pytest.mark.parametrize("partitions", ["2", "5"])
def test_sparks_deduplication_by_watermark_may_stand_before_ours(
    world: World, partitions: str
) -> None:
    once = _files(4)
    files = [rows + (once[n - 1][4:7] if n else []) for n, rows in enumerate(once)]
    _fill(world.input, files)
    with setting(world.spark, "spark.sql.shuffle.partitions", partitions):
        backend = world.backend()
        df = world.input.stream(world.spark).withWatermark("at", "3 seconds")
        world.run(backend, _windows_frame(backend, df.dropDuplicates(["k", "id", "at"])))
    marks = _watermarks([(files, 3)])
    seen: set[tuple[str, int, int]] = set()
    distinct: Files = []
    for rows in _on_time(files, marks):
        distinct.append([row for row in dict.fromkeys(rows) if row not in seen])
        seen.update(rows)
    assert _given(world) == _windows(distinct, marks)
    assert sum(map(len, distinct)) < sum(map(len, _on_time(files, marks)))


@pytest.mark.parametrize("partitions", ["2", "5"])
def test_sparks_windows_may_stand_before_ours_over_a_restart(world: World, partitions: str) -> None:
    files = _files(5)
    for part in (files[:3], files[3:]):
        _fill(world.input, part)
        with setting(world.spark, "spark.sql.shuffle.partitions", partitions):
            backend = world.backend(parallelism=3)
            df = world.input.stream(world.spark).withWatermark("at", "3 seconds")
            counts = df.groupBy("k", F.window("at", f"{WINDOW_S} seconds")).count()
            counts = counts.select("k", F.col("count").alias("id"))
            world.run(backend, world.ledger(backend, counts, processor=Ledger()))
    marks = _watermarks([(files[:3], 3)])
    files.insert(3, [])
    marks = [*marks, *_watermarks([(files, 3)])[4:]]
    truth: dict[str, list[int]] = defaultdict(list)
    for k, _, n in _windows(files, marks, by_sparks_rule=True):
        truth[k].append(n)
    check_ledger_output(world.sink.batches(), truth)
    wanted = {(k,): (len(counts), sum(counts)) for k, counts in truth.items()}
    assert durable_state(backend, "ledger")["acc"] == wanted


def test_sparks_join_of_two_streams_may_stand_before_ours(world: World) -> None:
    files = _files(4)
    _fill(world.input, files)
    other = Input(world.root / "other", "key string, number bigint, moment timestamp")
    for rows in files:
        other.add([{"key": k, "number": i, "moment": _at(second)} for k, i, second in rows])
    backend = world.backend()
    left = world.input.stream(world.spark).withWatermark("at", "3 seconds")
    right = other.stream(world.spark).withWatermark("moment", "3 seconds")
    within = "moment BETWEEN at AND at + INTERVAL 1 SECOND"
    joined = left.join(right, F.expr(f"k = key AND id = number AND {within}"))
    with setting(world.spark, "spark.sql.shuffle.partitions", "3"):
        narrow = joined.select("k", "id", "at")
        world.run(backend, _windows_frame(backend, narrow, watermark_delay="3 seconds"))
    assert _given(world) == _windows(files, _watermarks([(files, 3)]))


# --- batches without data -----------------------------------------------------------------------


def test_with_a_trigger_by_time_the_last_timers_need_no_data(world: World) -> None:
    files = _files(3)
    _fill(world.input, files)
    backend = world.backend()
    frame = _windows_frame(backend, world.input.stream(world.spark), watermark_delay="3 seconds")
    query = backend.start(world.writer(frame).trigger(processingTime="50 milliseconds"))
    until(lambda: len(world.committed()) > len(files) or query.exception(), "the empty batch")
    query.stop()
    assert query.exception() is None
    assert _given(world) == _windows(files, _watermarks([(files, 3)]))
    assert world.committed() == [0, 1, 2, 3]


def test_an_operator_is_given_a_time_mode_later_without_a_heartbeat_only(world: World) -> None:
    _fill(world.input, _files(1))
    backend = world.backend()
    world.run(backend, _passing(world, backend).drop("at"))
    _fill(world.input, _files(1, shift=7))
    backend = world.backend()
    frame = _passing(world, backend, time_mode="processing").drop("at")
    with pytest.raises(StateMismatchError, match="one more source"):
        world.run(backend, frame)
    backend = world.backend(settings={"heartbeat": 0})
    world.run(backend, _passing(world, backend, time_mode="processing").drop("at"))
    assert world.committed() == [0, 1]


def test_the_order_in_which_frames_are_built_may_change_if_the_query_is_the_same(
    world: World,
) -> None:
    other = Input(world.root / "other", SCHEMA)
    inputs = {"left": world.input, "right": other}
    for names in (("left", "right"), ("right", "left")):
        for source in inputs.values():
            _fill(source, _files(1))
        backend = world.backend()
        made = {
            name: _windows_frame(
                backend, inputs[name].stream(world.spark), name, watermark_delay="3 seconds"
            )
            for name in names
        }
        world.run(backend, made["left"].union(made["right"]))


# --- two inputs ---------------------------------------------------------------------------------


class Matches(CoProcessor):
    """Orders left, payments right: tells when both are there, or that the payment never came."""

    def open(self, ctx: ProcessorContext) -> None:
        self.total = ctx.reducing_state("total", "id bigint", lambda a, b: (a[0] + b[0],))
        self.paid = ctx.aggregating_state(
            "paid", "n bigint", create=lambda: (0,), add=lambda n, many: (n[0] + many,)
        )

    def process_left(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        for row in rows:
            self.total.add((row.id,))
            ctx.timers.register(round(row.at.timestamp()) * 1000)

    def process_right(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        self.paid.add(sum(1 for _ in rows))

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Iterator[Any]:
        (paid,) = self.paid.get() or (0,)
        yield (*key, at_ms // 1000, self.total.get()[0], paid)


def test_connected_streams_share_their_state_and_their_watermark(world: World) -> None:
    left, right = _files(4), _files(5, step_s=9)
    other = Input(world.root / "other", "key string, id bigint")
    _fill(world.input, left)
    for rows in right:
        other.add([{"key": k, "id": i} for k, i, _ in rows])
    backend = world.backend()
    frame = backend.connect(
        world.input.stream(world.spark),
        other.stream(world.spark),
        keys="k",
        right_keys="key",
        processor=Matches(),
        output_schema="k string, until_s bigint, total bigint, paid bigint",
        uid="matches",
        time_mode="event",
        event_time="at",
        watermark_delay="3 seconds",
    )
    world.run(backend, frame)
    marks = _watermarks([(left, 3)])
    marks += marks[-1:] * (len(right) - len(left))  # nothing moves while only the right one goes on
    on_time = _on_time(left, marks)
    wanted = Counter()
    for batch, rows in enumerate(on_time):
        for k, _, second in {(k, 0, second) for k, _, second in rows if second <= marks[-1]}:
            fired = next(n for n in range(batch, len(marks)) if marks[n] >= second)
            total = sum(i for file in on_time[: fired + 1] for key, i, _ in file if key == k)
            paid = sum(key == k for file in right[: fired + 1] for key, _, _ in file)
            wanted[k, BASE_S + second, total, paid] = 1
    assert Counter(tuple(row.values()) for row in world.sink.rows()) == wanted
