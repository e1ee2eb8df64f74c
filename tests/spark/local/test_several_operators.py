"""Several operators in one query, ours and Spark's own, with one watermark that all agree on.

The truth is a simulation in plain Python: batch n is the n-th file of each input, its watermark
follows from the files before it, and after the last file come batches until nothing moves.
"""

from __future__ import annotations

import datetime
import sys
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupStateTimeout

from statebackend import CoProcessor, KeyedProcessor, tumbling
from statebackend.errors import (
    SchemaError,
    SettingError,
    StateMismatchError,
    UnsupportedQueryError,
)
from tests.spark.local.processors import Ledger
from tests.spark.local.world import Input, check_ledger_output, durable_state, setting, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

    from statebackend import ProcessorContext, StateBackend
    from tests.spark.local.world import World

register_pickle_by_value(sys.modules[__name__])  # workers need not find this module

SCHEMA = "k string, id bigint, at timestamp"
BASE_S = 1_767_225_600  # 2026-01-01 00:00:00
WINDOW_S = 10
COUNTS = "k string, until_s bigint, n bigint"
Files = list[list[tuple[str, int, int]]]  # (key, id, second after the base)


def _at(second: int) -> str:
    return str(datetime.datetime.fromtimestamp(BASE_S + second, datetime.UTC).replace(tzinfo=None))


def _fill(target: Input, files: Files) -> None:
    for rows in files:
        target.add([{"k": k, "id": i, "at": _at(second)} for k, i, second in rows])


def _files(batches: int, *, step_s: int = 7, keys: int = 5, shift: int = 0) -> Files:
    """Event time goes on by ``step_s`` a file; every file has rows that come too late, too."""
    found = []
    for batch in range(batches):
        rows = [
            (f"k{(i + batch) % keys}", 100 * batch + i, shift + batch * step_s + i)
            for i in range(8)
        ]
        rows += [(f"k{i}", 100 * batch + 50 + i, max(0, (batch - 3) * step_s)) for i in range(2)]
        found.append(rows)
    return found


def _watermarks(inputs: list[tuple[Files, int]]) -> list[int]:
    """W(0), W(1), .. in seconds after the base (-BASE_S: none), up to the last that moves."""
    marks = [-BASE_S]
    for n in range(max(len(files) for files, _ in inputs)):
        candidates = []
        for files, delay in inputs:
            seen = [second for rows in files[: n + 1] for _, _, second in rows]
            candidates.append(max(seen) - delay if seen else -BASE_S)
        marks.append(max(marks[-1], min(candidates)))
    return marks


def _on_time(files: Files, marks: list[int]) -> Files:
    """The rows that are not late: after the watermark of the batch before."""
    late = [-BASE_S, *marks]
    return [[row for row in rows if row[2] > late[n]] for n, rows in enumerate(files)]


def _end(second: int) -> int:
    return second // WINDOW_S * WINDOW_S + WINDOW_S


def _windows(
    files: Files, marks: list[int], *, by_sparks_rule: bool = False
) -> Counter[tuple[str, int, int]]:
    """(key, end of the window, rows) of the windows that the last watermark has closed.

    By Spark's rule a row is late for an aggregation when its window is closed, not before.
    """
    late, n = [-BASE_S, *marks], Counter[tuple[str, int]]()
    for batch, rows in enumerate(files):
        for k, _, second in rows:
            if (_end(second) if by_sparks_rule else second) > late[batch]:
                n[k, _end(second)] += 1
    return Counter({(k, BASE_S + end, c): 1 for (k, end), c in n.items() if end <= marks[-1]})


class Windows(KeyedProcessor):
    """Counts per key and tumbling window; told when the watermark has passed its end."""

    def open(self, ctx: ProcessorContext) -> None:
        self.counts = ctx.map_state("counts", "until_s bigint", "n bigint")

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        for row in rows:
            until_s = _end(int(row.at.timestamp()))
            (n,) = self.counts.get_value((until_s,)) or (0,)
            self.counts.update_value((until_s,), (n + 1,))
            ctx.timers.register(until_s * 1000)

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Iterator[Any]:
        (n,) = self.counts.get_value((at_ms // 1000,))
        self.counts.remove_key((at_ms // 1000,))
        yield (*key, at_ms // 1000, n)


class Sorted(KeyedProcessor):
    """Holds rows until the watermark has reached them, and gives them out in order."""

    def open(self, ctx: ProcessorContext) -> None:
        self.held = ctx.map_state("held", "at_ms bigint, id bigint", "at timestamp")

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        for row in rows:
            at_ms = round(row.at.timestamp() * 1000)
            self.held.update_value((at_ms, row.id), (row.at,))
            ctx.timers.register(at_ms)

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Iterator[Any]:
        moment = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
        for found in [k for k in self.held.keys() if k[0] == at_ms]:  # noqa: SIM118 - no dict
            self.held.remove_key(found)
            yield (*key, found[1], moment)


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


def _given(world: World, **wanted: Any) -> Counter[tuple[str, int, int]]:
    rows = [r for r in world.sink.rows() if all(r[k] == v for k, v in wanted.items())]
    return Counter((row["k"], row["until_s"], row["n"]) for row in rows)


@pytest.fixture
def world(make_world: Any) -> World:
    return make_world(schema=SCHEMA)


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


# --- Spark's own operators after ours -----------------------------------------------------------


class Passing(KeyedProcessor):
    """Passes rows on and numbers them per key, with reducing and aggregating state."""

    def open(self, ctx: ProcessorContext) -> None:
        self.largest = ctx.reducing_state("largest", "id bigint", max)
        self.mean = ctx.aggregating_state(
            "mean",
            "n bigint, total bigint",
            create=lambda: (0, 0),
            add=lambda so_far, number: (so_far[0] + 1, so_far[1] + number),
            result=lambda so_far: so_far[1] / so_far[0],
        )

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Iterator[Any]:
        for row in rows:
            self.largest.add((row.id,))
            self.mean.add(row.id)
            yield (*key, row.id, row.at, self.largest.get()[0], self.mean.get())


def _passing(world: World, backend: StateBackend, **time: Any) -> DataFrame:
    return backend.process(
        world.input.stream(world.spark),
        keys="k",
        processor=Passing(),
        output_schema=f"{SCHEMA}, largest bigint, mean double",
        uid="passing",
        **time,
    )


def test_reducing_and_aggregating_state_count_each_row_once_over_restarts(world: World) -> None:
    files = _files(4)
    for part in (files[:2], files[2:]):
        _fill(world.input, part)
        backend = world.backend()
        world.run(backend, _passing(world, backend).drop("at"))
    ids: dict[str, list[int]] = defaultdict(list)
    for row in world.sink.rows():
        own = ids[row["k"]]
        own.append(row["id"])
        assert row["largest"] == max(own)
        assert row["mean"] == sum(own) / len(own)
    truth: dict[str, list[int]] = defaultdict(list)
    for rows in files:
        for k, number, _ in rows:
            truth[k].append(number)
    assert {k: sorted(own) for k, own in ids.items()} == {
        k: sorted(own) for k, own in truth.items()
    }


@pytest.mark.parametrize("partitions", ["2", "5"])
def test_sparks_windows_may_stand_after_ours(world: World, partitions: str) -> None:
    files = _files(5)
    _fill(world.input, files)
    with setting(world.spark, "spark.sql.shuffle.partitions", partitions):
        backend = world.backend()
        marked = _passing(world, backend).withWatermark("at", "3 seconds")
        counts = marked.groupBy("k", F.window("at", f"{WINDOW_S} seconds")).count()
        until_s = F.unix_timestamp(F.col("window.end")).alias("until_s")
        world.run(backend, counts.select("k", until_s, F.col("count").alias("n")))
    marks = _watermarks([(files, 3)])
    assert _given(world) == _windows(files, marks, by_sparks_rule=True)
    assert _windows(files, marks) != _windows(files, marks, by_sparks_rule=True)


def test_ours_with_timers_and_sparks_windows_behind_it_lose_no_row(world: World) -> None:
    files = _files(5)
    _fill(world.input, files)
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
    marked = held.withWatermark("at", "0 seconds")
    counts = marked.groupBy("k", F.window("at", f"{WINDOW_S} seconds")).count()
    until_s = F.unix_timestamp(F.col("window.end")).alias("until_s")
    world.run(backend, counts.select("k", until_s, F.col("count").alias("n")))
    marks = _watermarks([(files, 3)])
    # Spark's watermark is the last event time that ours let go: at most our own watermark.
    kept = [row[2] for rows in _on_time(files, marks) for row in rows if row[2] <= marks[-1]]
    wanted = Counter(w for w in _windows(files, marks) if w[1] - BASE_S <= max(kept))
    assert _given(world) == wanted
    assert wanted


# --- event time that goes on behind an operator ---------------------------------------------------


class Closing(Windows):
    """The same, and each window's end is its event time."""

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Iterator[Any]:
        for k, until_s, n in super().on_timer(key, at_ms, ctx):
            yield Row(k=k, n=n, at=datetime.datetime.fromtimestamp(until_s, datetime.UTC))


class Rushing(Closing):
    """Gives its windows the time of their beginning, which the watermark has passed long ago."""

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Iterator[Any]:
        for row in super().on_timer(key, at_ms, ctx):
            yield (*row[:2], row.at - datetime.timedelta(seconds=3 * WINDOW_S))


MINUTE_S = 3 * WINDOW_S


class Summing(KeyedProcessor):
    """Sums of the counts by key and longer window, given out by the watermark."""

    def open(self, ctx: ProcessorContext) -> None:
        self.sums = ctx.map_state("sums", "until_s bigint", "n bigint")

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        for row in rows:
            until_s = _longer(int(row.at.timestamp()) - 1)
            (n,) = self.sums.get_value((until_s,)) or (0,)
            self.sums.update_value((until_s,), (n + row.n,))
            ctx.timers.register(until_s * 1000)

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Iterator[Any]:
        (n,) = self.sums.get_value((at_ms // 1000,))
        self.sums.remove_key((at_ms // 1000,))
        yield (*key, at_ms // 1000, n)


def _longer(second: int) -> int:
    return second // MINUTE_S * MINUTE_S + MINUTE_S


def _sums(files: Files, marks: list[int]) -> Counter[tuple[str, int, int]]:
    """(key, end of the longer window, rows) of those that the last watermark has closed."""
    late, n = [-BASE_S, *marks], Counter[tuple[str, int]]()
    for batch, rows in enumerate(files):
        for k, _, second in rows:
            if second > late[batch]:
                n[k, _longer(_end(second) - 1)] += 1
    return Counter({(k, BASE_S + end, c): 1 for (k, end), c in n.items() if end <= marks[-1]})


def _closing(world: World, backend: StateBackend, way: str, processor: Any = None) -> DataFrame:
    df = world.input.stream(world.spark)
    given: dict[str, Any] = {"event_time": "at", "watermark_delay": "3 seconds"}
    if way == "withWatermark":
        df, given = df.withWatermark("at", "3 seconds"), {}
    return backend.process(
        df,
        keys="k",
        processor=processor or Closing(),
        output_schema="k string, n bigint, at timestamp",
        uid="closing",
        time_mode="event",
        eventTimeColumnName="at",
        **given,
    )


@pytest.mark.parametrize("way", ["withWatermark", "arguments"])
@pytest.mark.parametrize("behind", ["ours", "Spark's"])
def test_event_time_goes_on_behind_an_operator_by_a_column_of_its_output(
    world: World, way: str, behind: str
) -> None:
    files = _files(14)
    for part in (files[:9], files[9:]):  # two starts
        _fill(world.input, part)
        backend = world.backend()
        closed = _closing(world, backend, way)
        if behind == "ours":
            summed = backend.process(
                closed,
                keys="k",
                processor=Summing(),
                output_schema=COUNTS,
                uid="summing",
                time_mode="event",
            )
        else:
            sums = closed.groupBy("k", F.window("at", f"{MINUTE_S} seconds", None, "1 second"))
            until_s = F.unix_timestamp(F.col("window.end")).alias("until_s")
            summed = sums.agg(F.sum("n").alias("n")).select("k", until_s - F.lit(1), "n")
            summed = summed.toDF("k", "until_s", "n")
        world.run(backend, summed)
    marks = _watermarks([(files[:9], 3)])
    files.insert(9, [])
    marks = [*marks, *_watermarks([(files, 3)])[10:]]
    wanted = _sums(files, marks)
    if behind != "ours":  # its windows end a second later
        wanted = Counter({w: n for w, n in wanted.items() if w[1] - BASE_S + 1 <= marks[-1]})
    assert _given(world) == wanted
    assert max(n for _, _, n in wanted) > 2
    assert len(wanted) > 8


def test_output_that_the_watermark_has_passed_is_refused_where_event_time_goes_on(
    world: World,
) -> None:
    _fill(world.input, _files(5))
    backend = world.backend()
    text = world.fail(backend, _closing(world, backend, "arguments", Rushing()))
    assert "SB1021" in text
    assert "operators behind it would drop the row" in text


def test_a_watermark_on_top_of_another_is_refused_with_the_way_out(world: World) -> None:
    backend = world.backend()
    marked = _closing(world, backend, "withWatermark").withWatermark("at", "0 seconds")
    counts = marked.groupBy("k", F.window("at", "10 seconds")).count()
    with pytest.raises(UnsupportedQueryError, match="eventTimeColumnName"):
        world.start(backend, counts)


def test_a_watermark_may_be_defined_again_where_spark_gives_none_on(world: World) -> None:
    def passes(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
        yield from frames

    files = _files(4)
    _fill(world.input, files)
    groups = world.input.stream(world.spark).withWatermark("at", "3 seconds").groupBy("k")
    schema, timeout = "k string, id bigint, at timestamp", GroupStateTimeout.EventTimeTimeout
    passed = groups.applyInPandasWithState(passes, schema, "n bigint", "append", timeout)
    backend = world.backend()
    out = backend.process(
        passed.withWatermark("at", "3 seconds"),
        keys="k",
        processor=Passing(),
        output_schema=f"{SCHEMA}, largest bigint, mean double",
        uid="passing",
    )
    world.run(backend, out.drop("at"))
    late = [-BASE_S, *_watermarks([(files, 3)])]  # Spark's operator drops these
    wanted = {i for n, rows in enumerate(files) for _, i, second in rows if second > late[n]}
    assert {row["id"] for row in world.sink.rows()} == wanted
    assert len(wanted) > 30


def test_behind_an_aggregation_the_watermark_is_defined_on_the_output_alone(world: World) -> None:
    files = _files(4, step_s=60)
    _fill(world.input, files)

    def hours(df: DataFrame, backend: StateBackend, **given: Any) -> DataFrame:
        sums = backend.aggregate(
            df,
            keys="k",
            aggregations={"n": "count"},
            window=tumbling("10 seconds"),
            emit="closed",
            uid="sums",
            **given,
        )
        marked = sums.withWatermark("window_end", "0 seconds")
        return (
            marked.groupBy(F.window("window_end", "1 minute"))
            .agg(F.sum("n").alias("n"))
            .select("n")
        )

    df, backend = world.input.stream(world.spark), world.backend()
    twice = hours(df.withWatermark("at", "3 seconds"), backend)
    with pytest.raises(UnsupportedQueryError, match="connect_broadcast\\(\\) keep it") as caught:
        world.start(backend, twice)
    assert "give them event_time= and watermark_delay= instead" in caught.value.todo
    backend = world.backend()
    world.run(backend, hours(df, backend, event_time="at", watermark_delay="3 seconds"))
    assert sum(row["n"] for row in world.sink.rows()) > 8


def test_event_time_that_cannot_go_on_is_refused_at_the_call(world: World) -> None:
    backend = world.backend()
    df = world.input.stream(world.spark)

    def frame(df: DataFrame, uid: str, **given: Any) -> DataFrame:
        return backend.process(
            df,
            keys="k",
            processor=Closing(),
            output_schema="k string, n bigint, at timestamp",
            uid=uid,
            **{"eventTimeColumnName": "at", "time_mode": "event", **given},
        )

    with pytest.raises(SettingError, match="no event time"):
        frame(df, "a")
    with pytest.raises(SettingError, match="time_mode='event'"):
        frame(df, "a", time_mode="processing")
    marked = df.withWatermark("at", "3 seconds")
    with pytest.raises(SchemaError, match="0 columns named 'moment'"):
        frame(marked, "a", eventTimeColumnName="moment")
    with pytest.raises(SchemaError, match="'n' is bigint"):
        frame(marked, "a", eventTimeColumnName="n")
    with pytest.raises(UnsupportedQueryError, match="last step before the operator"):
        frame(marked.where("id > 5"), "a")
    assert frame(frame(marked, "b"), "c").schema["at"].metadata["spark.watermarkDelayMs"] == 3000


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
