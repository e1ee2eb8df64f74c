"""Every flavour of processor over a stream: opened once, given batches, timers, rules and times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statebackend.api.arrow import ArrowProcessor
from statebackend.api.processors import BroadcastProcessor, CoProcessor, KeyedProcessor
from statebackend.errors import NullKeyError, ProcessorError
from statebackend.operators.arrow_calls import record_arrow_states
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.operator_snapshot import HeldOperatorState, StoredOperatorState
from statebackend.operators.processor_calls import record_keyed_states
from statebackend.operators.rows.row_conversion import arrow_schema
from statebackend.operators.stateful_processor_calls import record_states
from statebackend.operators.streaming_operator import StreamOperator, StreamTimes
from statebackend.schema.ddl import parse_ddl
from statebackend.state.column_table import ColumnTable
from statebackend.state.table import MemoryBase, StateTable
from statebackend.state.ttl_cells import TTL
from tests.continuous.state.streamjob import GROUPS, batch_of, plan_of, taken

Record = Callable[..., Any]


class Stream:
    """One subtask with every key group, over a dict."""

    def __init__(
        self,
        processor: Any,
        record: Record,
        output: str,
        *,
        late_position: int | None = None,
        **plan: Any,
    ) -> None:
        mode = plan.get("time_mode", "none")
        declared = record(type(processor)(), "op", time_mode=mode).declared
        self.base = MemoryBase()
        self.table = StateTable(self.base, small_writes=True)
        self.times = StreamTimes()
        self.processor = processor
        self.plan = plan_of(declared, output, **plan)
        self.late_position = late_position
        self.open()

    def open(self, stored: StoredOperatorState | None = None) -> None:
        self.operator = StreamOperator(
            self.plan,
            self.processor,
            table=self.table,
            state_ids={name: n for n, name in enumerate(self.plan.states, start=1)},
            times=self.times,
            key_groups=range(GROUPS),
            max_parallelism=GROUPS,
            late_position=self.late_position,
            stored=stored,
        )

    def process(self, *rows: tuple[int, int, int]) -> list[tuple[Any, ...]]:
        return sorted(taken(self.operator.process(batch_of(list(rows)))))

    def fire(self, **times: int) -> list[tuple[Any, ...]]:
        vars(self.times).update(times)
        return taken(self.operator.fire())

    def checkpoint(self) -> None:
        """What was written becomes confirmed, and what was confirmed the base."""
        layer = self.table.freeze(self.times.epoch)
        self.base.apply(*layer.sorted())
        self.table.applied(layer)


# --- keyed -------------------------------------------------------------------------------------


class Clocked(KeyedProcessor):
    """What time it is, and how often it was opened."""

    opened = 0

    def open(self, ctx: Any) -> None:
        self.opened += 1
        self.kept = ctx.value_state("kept", "n bigint", ttl=TTL(100))
        self.calls = 0

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[Any]:
        (n,) = self.kept.get() or (0,)
        n += sum(1 for _ in rows)
        self.kept.update((n,))
        self.calls += 1
        yield (*key, n, ctx.epoch, ctx.processing_time_ms, ctx.watermark_ms, self.calls)

    def close(self) -> None:
        self.closed = True


CLOCKED = "k bigint, n bigint, epoch bigint, now bigint, watermark bigint, calls bigint"


def test_a_processor_is_opened_once_and_told_the_time_at_each_call() -> None:
    stream = Stream(Clocked(), record_keyed_states, CLOCKED, time_mode="event")
    assert stream.process((1, 0, 0), (1, 0, 0)) == [(1, 2, 0, -1, 0, 1)]
    vars(stream.times).update(epoch=3, processing_time_ms=50, watermark_ms=7)
    assert stream.process((1, 0, 0)) == [(1, 3, 3, 50, 7, 2)]
    stream.checkpoint()
    stream.times.processing_time_ms = 149
    assert stream.process((1, 0, 0)) == [(1, 4, 3, 149, 7, 3)]
    stream.times.processing_time_ms = 249
    assert stream.process((1, 0, 0)) == [(1, 1, 3, 249, 7, 4)], "its time to live was over"
    stream.operator.close()
    assert (stream.processor.opened, stream.processor.closed) == (1, True)


def test_state_that_nobody_touches_expires() -> None:
    stream = Stream(Clocked(), record_keyed_states, CLOCKED)
    stream.times.processing_time_ms = 0
    stream.process(*[(k, 0, 0) for k in range(50)])
    assert stream.operator.clean() == 0
    stream.checkpoint()
    stream.times.processing_time_ms = 1000
    assert stream.operator.clean() == 50
    stream.checkpoint()
    assert not stream.base.entries
    assert stream.operator.counted.since({"rows": 20}) == {"rows": 30, "expired_entries": 50}


def test_late_rows_are_left_out_and_counted() -> None:
    stream = Stream(Clocked(), record_keyed_states, CLOCKED, time_mode="event", late_position=2)
    assert stream.process((1, 0, 0), (1, 0, -1)) == [], "the watermark begins there, as Spark's"
    assert stream.process((1, 0, 1))[0][1] == 1
    stream.times.late_watermark_ms = 10
    assert stream.process((1, 0, 10)) == []
    assert stream.process((1, 0, 10), (1, 0, 11), (2, 0, 3))[0][1] == 2
    assert stream.operator.counted.late_rows == 5
    assert stream.operator.counted.rows == 7


def test_a_null_key_is_refused() -> None:
    stream = Stream(Clocked(), record_keyed_states, CLOCKED)
    with pytest.raises(NullKeyError):
        stream.process((None, 0, 0))  # type: ignore[arg-type]


class Failing(Clocked):
    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[Any]:
        raise ValueError("no")


def test_what_a_processor_raises_names_its_key() -> None:
    stream = Stream(Failing(), record_keyed_states, CLOCKED)
    with pytest.raises(ProcessorError, match=r"\b5\b"):
        stream.process((5, 0, 0))


# --- Spark's own class -------------------------------------------------------------------------


class Tws(StatefulProcessor):
    """A count, and a timer that tells it."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        from pyspark.sql import Row

        n = (self.count.get() or (0,))[0] + len(list(rows))
        self.count.update((n,))
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 10)
        yield Row(k=key[0], n=n)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        from pyspark.sql import Row

        yield Row(k=key[0], n=-expiredTimerInfo.getExpiryTimeInMs())

    def close(self) -> None:
        pass


def test_sparks_own_class_runs_over_a_stream() -> None:
    stream = Stream(
        Tws(), record_states, "k bigint, n bigint", flavour="rows", time_mode="processing"
    )
    stream.times.processing_time_ms = 5
    assert stream.process((1, 0, 0), (2, 0, 0), (1, 0, 0)) == [(1, 2), (2, 1)]
    stream.times.processing_time_ms = 9
    assert stream.process((1, 0, 0)) == [(1, 3)]
    assert stream.fire(processing_time_ms=14) == []
    assert stream.operator.next_timer_ms == 15
    assert sorted(stream.fire(processing_time_ms=15)) == [(1, -15), (2, -15)]
    assert stream.fire(processing_time_ms=19) == [(1, -19)]
    assert stream.operator.counted.timers_fired == 3
    assert stream.operator.next_timer_ms is None


# --- arrow -------------------------------------------------------------------------------------


class Columns(ArrowProcessor):
    """Counts, maps, lists and timers by the column."""

    def open(self, ctx: Any) -> None:
        self.count = ctx.value_state("count", "n bigint")
        self.seen = ctx.map_state("seen", "v bigint", "c bigint")
        self.rows = ctx.list_state("rows", "v bigint", ttl=TTL(100))
        self.short = ctx.value_state("short", "n bigint", ttl=TTL(100))

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        keys = ctx.keys
        counts = np.diff(keys.starts)
        n = _ints(self.count.get(keys), "n") + counts
        short = _ints(self.short.get(keys), "n") + counts
        self.count.put(keys, {"n": pa.array(n)})
        self.short.put(keys, {"n": pa.array(short)})
        first = batch.column("v").take(pa.array(keys.starts[:-1]))
        self.rows.append(keys, {"v": first})
        self.seen.put(keys, {"v": first}, {"c": pa.array(n)})
        ctx.timers.register(keys, ctx.watermark_ms + 10)
        index, _ = self.rows.get(keys)
        of_map = self.seen.items(keys)[0]
        yield {
            "k": keys.columns.column(0),
            "n": pa.array(n),
            "m": pa.array(short),
            "lists": pa.array(np.bincount(index, minlength=len(keys))),
            "maps": pa.array(np.bincount(of_map, minlength=len(keys))),
        }

    def on_timers(self, keys: Any, at_ms: Any, ctx: Any) -> Any:
        n = _ints(self.count.get(keys), "n")
        zeros = pa.array(np.zeros(len(keys), np.int64))
        yield {
            "k": keys.columns.column(0),
            "n": pa.array(-n),
            "m": pa.array(at_ms),
            "lists": zeros,
            "maps": zeros,
        }


def _ints(rows: pa.RecordBatch, name: str) -> Any:
    return np.array([0 if n is None else n for n in rows.column(name).to_pylist()], np.int64)


def test_columns_over_a_stream_are_the_same_in_every_layer() -> None:
    stream = Stream(
        Columns(),
        record_arrow_states,
        "k bigint, n bigint, m bigint, lists bigint, maps bigint",
        flavour="arrow",
        time_mode="event",
    )
    counts: dict[int, int] = {}
    since: dict[int, int] = {}
    values: dict[int, set[int]] = {}
    timers: set[tuple[int, int]] = set()
    rng = np.random.default_rng(3)
    for step in range(40):
        keys = [int(k) for k in rng.integers(0, 12, rng.integers(1, 30))]
        now = step // 10 * 1000
        vars(stream.times).update(processing_time_ms=now, watermark_ms=step)
        if step % 10 == 0:
            since.clear()  # of those with a time to live nothing is left
        expected = []
        for k in sorted(set(keys)):
            counts[k] = counts.get(k, 0) + keys.count(k)
            since[k] = since.get(k, 0) + keys.count(k)
            values.setdefault(k, set()).add(step % 4)
            timers.add((step + 10, k))
            expected.append((k, counts[k], since[k]))
        found = stream.process(*[(k, step % 4, 0) for k in keys])
        assert [row[:3] for row in found] == expected
        assert [row[4] for row in found] == [len(values[row[0]]) for row in found]
        due = sorted((k, -counts[k], at) for at, k in timers if at <= step)
        timers = {one for one in timers if one[0] > step}
        assert sorted(row[:3] for row in stream.fire()) == due
        if step % 7 == 3:
            stream.checkpoint()
        elif step % 7 == 5:
            stream.table.freeze(0)
            layer = stream.table.frozen[0]
            stream.base.apply(*layer.sorted())
            if step % 2:
                stream.table.applied(layer)
            else:
                stream.table.put_joined(layer, [layer])
                stream.table.applied(layer)
    assert stream.operator.next_timer_ms == min(at for at, _ in timers)


# --- two inputs, and rules ---------------------------------------------------------------------


class Join(CoProcessor):
    def open(self, ctx: Any) -> None:
        self.left = ctx.value_state("left", "word string")

    def process_left(self, key: Any, rows: Iterator[Any], ctx: Any) -> Any:
        for row in rows:
            self.left.update((row.word,))

    def process_right(self, key: Any, rows: Iterator[Any], ctx: Any) -> Any:
        for row in rows:
            yield (*key, (self.left.get() or (None,))[0], row.n)


def _of_side(
    plan: OperatorPlan, side: int, batch: pa.RecordBatch, key: str, event: str | None = None
) -> pa.RecordBatch:
    """Rows of one side as the operator takes them: side, key, both sides' columns, event time."""
    schema, sides = arrow_schema(plan.input_schema), plan.sides
    assert sides is not None
    first = 2 + (len(sides[0].fields) if side else 0)
    columns = [pa.nulls(batch.num_rows, kind) for kind in schema.types]
    columns[0] = pa.array([side] * batch.num_rows, schema.types[0])
    columns[1] = batch.column(key)
    columns[first : first + batch.num_columns] = batch.columns
    if event is not None:
        columns[-1] = batch.column(event)
    exact = [one.cast(kind) for one, kind in zip(columns, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(exact, schema=schema)


def test_two_inputs_come_side_by_side() -> None:
    left, right = parse_ddl("word string, id bigint"), parse_ddl("id bigint, n int, t timestamp")
    both = parse_ddl(
        "side tinyint, k0 bigint, l0 string, l1 bigint, r0 bigint, r1 int, r2 timestamp, "
        "t timestamp"
    )
    stream = Stream(
        Join(),
        record_keyed_states,
        "k bigint, word string, n int",
        flavour="sides",
        input_schema=both,
        key_positions=(1,),
        sides=(left, right),
        time_mode="event",
        late_position=7,
    )
    moments = pa.array([5_000, 50_000], pa.timestamp("us", tz="UTC"))
    words = pa.RecordBatch.from_pydict({"word": ["a", "b"], "id": [1, 2]})
    numbers = pa.RecordBatch.from_pydict(
        {"id": [1, 2], "n": pa.array([10, 20], pa.int32()), "t": moments}
    )
    stream.times.late_watermark_ms = 10
    left = _of_side(stream.plan, 0, words, "id")
    right = _of_side(stream.plan, 1, numbers, "id", "t")
    assert taken(stream.operator.process(left)) == [], "without event time never late"
    assert taken(stream.operator.process(right)) == [(2, "b", 20)]
    assert stream.operator.counted.late_rows == 1


class Limits(BroadcastProcessor):
    def open(self, ctx: Any) -> None:
        self.limits = ctx.broadcast_state("limits", "name string", "top bigint")
        self.log = ctx.operator_list("log", "n bigint")

    def process_broadcast(self, rows: Iterator[Any], ctx: Any) -> None:
        for row in rows:
            self.limits.put((row.name,), (row.top,))
        self.log.add((len(self.limits),))

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Any:
        (top,) = self.limits.get(("all",)) or (0,)
        yield from ((*key, row.v) for row in rows if row.v > top)


def test_rules_come_between_batches_and_go_into_the_snapshot() -> None:
    rules = parse_ddl("name string, top bigint")
    stream = Stream(
        Limits(), record_keyed_states, "k bigint, v bigint", flavour="broadcast", rules_schema=rules
    )
    assert stream.process((1, 5, 0)) == [(1, 5)]
    batch = pa.RecordBatch.from_pydict({"name": ["all", "x"], "top": [7, 1]})
    stream.operator.broadcast(batch)
    assert stream.process((1, 5, 0), (1, 8, 0)) == [(1, 8)]
    frozen = stream.operator.frozen_operator_state()
    stream.operator.broadcast(pa.RecordBatch.from_pydict({"name": ["all"], "top": [100]}))
    assert stream.process((1, 8, 0)) == []
    assert stream.operator.counted.broadcast_rows == 3
    stream.processor = Limits()
    stream.open(frozen)
    assert stream.process((1, 8, 0), (1, 7, 0)) == [(1, 8)], "as it was when it was frozen"
    held = stream.operator.state.operator
    assert isinstance(held, HeldOperatorState)
    assert list(stream.processor.log.get()) == [(2,)]


def test_columns_may_be_kept_by_folder(tmp_path: Path) -> None:
    """Columns that are written key by key, spilled, sealed and read again."""
    from statebackend.state.blocks import binary_array
    from statebackend.state.spill import OverlaySpill

    spill = OverlaySpill(limit_bytes=2000, folder=lambda: tmp_path / "spill")
    table = StateTable(MemoryBase(), spill=spill, small_writes=True)
    columns = ColumnTable(table)
    model: dict[bytes, bytes | None] = {}
    rng = np.random.default_rng(5)
    for step in range(60):
        keys = sorted({b"%05d" % n for n in rng.integers(0, 300, 20)})
        random = rng.integers(0, 99, len(keys))
        values = [None if n % 5 == 0 else b"%d" % (n + step) for n in random]
        columns.put_columns(binary_array(keys), binary_array(values))
        model.update(zip(keys, values, strict=True))
        if step % 3 == 0:
            table.seal()
        if step % 4 == 0:
            table.relieve()
        wanted = [b"%05d" % n for n in range(0, 300, 7)]
        found = columns.get_columns(binary_array(wanted)).to_pylist()
        assert found == [model.get(key) for key in wanted]
    live = {key: value for key, value in model.items() if value is not None}
    assert dict(table.snapshot()) == live
    spill.close()
