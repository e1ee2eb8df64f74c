"""Timers by the column: when they fire, in which order, and what else happens meanwhile."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statebackend.api.arrow import ArrowContext
from statebackend.operators.vector.key_vector import Keys
from statebackend.state.spill import OverlaySpill
from statebackend.state.table import MemoryBase, StateTable
from statebackend.state.timers import TimerIndex
from tests.vector.sides import KEYS, Operator, RowSide, places
from tests.vector.trials import Alarms, alarms, fired, timers


def test_timers_fire_in_the_order_of_their_times_and_are_gone() -> None:
    with alarms() as tester:
        assert fired(tester.testBatch(timers([("a", 30), ("b", 10), ("a", 20), ("a", 40)]))) == []
        assert tester.peekTimers("a") == [20, 30, 40]
        assert fired(tester.setProcessingTime(30)) == [("b", 10), ("a", 20), ("a", 30)]
        assert tester.peekTimers("a") == [40]
        assert fired(tester.setProcessingTime(39)) == []
        assert fired(tester.setProcessingTime(40)) == [("a", 40)]
        assert tester.peekTimers("a") == []


def test_a_timer_in_the_past_fires_in_the_same_batch_and_twice_set_fires_once() -> None:
    with alarms() as tester:
        tester.setProcessingTime(100)
        some = [("a", 50), ("a", 100), ("a", 101), ("a", 50), ("b", -5)]
        assert fired(tester.testBatch(timers(some))) == [("b", -5), ("a", 50), ("a", 100)]
        assert tester.peekTimers("a") == [101]


def test_a_deleted_timer_does_not_fire() -> None:
    with alarms() as tester:
        tester.testBatch(timers([("a", 10), ("a", 20), ("b", 10)]))
        tester.testBatch(timers([("a", 10), ("b", 99)], deletes=True))
        assert fired(tester.setProcessingTime(50)) == [("b", 10), ("a", 20)]


def test_timers_survive_a_restart_and_go_with_their_keys() -> None:
    with alarms() as tester:
        names = [f"key{n}" for n in range(40)]
        tester.testBatch(timers([(name, 10 + n) for n, name in enumerate(names)]))
        tester.restart()
        tester.rescale(5)
        found = fired(tester.setProcessingTime(29))
        assert sorted(found) == sorted((name, 10 + n) for n, name in enumerate(names) if n < 20)
        tester.rescale(1)
        assert fired(tester.setProcessingTime(100)) == [
            (name, 10 + n) for n, name in enumerate(names) if n >= 20
        ]


def test_in_event_time_the_watermark_fires_timers() -> None:
    class Late(Alarms):
        def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
            ctx.timers.register(ctx.keys, 1000)

    batch = pa.table({"k": ["a", "b"], "when": pa.array([500_000, 1_500_000], pa.timestamp("us"))})
    with alarms(Late(), timeMode="EventTime", eventTime="when") as tester:
        assert fired(tester.testBatch(batch)) == []
        assert sorted(fired(tester.setWatermark(1000))) == [("a", 1000), ("b", 1000)]
        # The row of "a" is late now; the timer of "b" is in the past.
        assert fired(tester.testBatch(batch)) == [("b", 1000)]


class Reacts(Alarms):
    """Does something with the timers that come before 100."""

    def __init__(self, react: Callable[[Keys, ArrowContext], None]) -> None:
        self.react = react

    def fired(self, keys: Keys, at_ms: Any, ctx: ArrowContext) -> None:
        first = at_ms < 100
        if first.any():
            self.react(keys.take(first), ctx)


def test_a_timer_that_is_set_while_timers_fire_waits_for_the_next_batch() -> None:
    again = Reacts(lambda keys, ctx: ctx.timers.register(keys, 100))
    with alarms(again) as tester:
        tester.testBatch(timers([("a", 10), ("b", 500)]))
        assert fired(tester.setProcessingTime(200)) == [("a", 10)]
        assert tester.peekTimers("a") == [100]
        assert fired(tester.setProcessingTime(201)) == [("a", 100)]


def test_a_timer_that_is_being_called_for_is_gone_after_the_call() -> None:
    with alarms(Reacts(lambda keys, ctx: ctx.timers.register(keys, 10))) as tester:
        tester.testBatch(timers([("a", 10)]))
        assert fired(tester.setProcessingTime(50)) == [("a", 10)]
        assert tester.peekTimers("a") == []
        assert fired(tester.setProcessingTime(51)) == []


@pytest.mark.parametrize("again", [False, True])
def test_a_due_timer_that_is_deleted_before_its_call_does_not_fire(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statebackend.operators.vector.column_timers._CHUNK_ROWS", 1)

    def react(keys: Keys, ctx: ArrowContext) -> None:
        ctx.timers.delete(keys, 200)
        if again:  # then it stays set, for a later batch
            ctx.timers.register(keys, 200)

    with alarms(Reacts(react)) as tester:
        tester.testBatch(timers([("a", 10), ("a", 200), ("a", 201), ("b", 200)]))
        assert fired(tester.setProcessingTime(300)) == [("a", 10), ("b", 200), ("a", 201)]
        assert tester.peekTimers("a") == [200] * again
        assert fired(tester.setProcessingTime(301)) == [("a", 200)] * again


class Lists(Alarms):
    """Lists timers, too, of a key twice."""

    seen: tuple[list[int], list[int]]

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        super().process(batch, ctx)
        index, at_ms = ctx.timers.list(ctx.keys.take([len(ctx.keys) - 1, 0, len(ctx.keys) - 1]))
        self.seen = index.tolist(), at_ms.tolist()


def test_of_keys_the_timers_are_listed_in_their_order() -> None:
    with alarms(Lists(), maxParallelism=1) as tester:
        tester.testBatch(timers([("a", 30), ("b", 10), ("a", -20), ("a", 40)]))
        assert tester.processor.seen == ([0, 1, 1, 1, 2], [10, -20, 30, 40, 10])
        tester.testBatch(timers([("c", 30)], deletes=True))
        assert tester.processor.seen == ([], [])


# --- against the row-wise timers ------------------------------------------------------------------

OPS = st.lists(
    st.tuples(
        st.sampled_from(["register", "delete"]),
        st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 12)), max_size=6),
        st.booleans(),
    ),
    max_size=6,
)


@pytest.mark.full  # long random histories
@given(
    st.sampled_from(sorted(KEYS)),
    st.lists(st.tuples(OPS, st.integers(-4, 12), OPS), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_they_are_the_timers_that_rows_have(
    ddl: str, epochs: list[tuple[Any, int, Any]], applied: bool, spills: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spill = OverlaySpill(limit_bytes=0, folder=lambda: Path(folder) / "runs")
        _as_rows_have_them(ddl, epochs, applied, spill if spills else None)


class _Both:
    """Timers by the column (or row) and, in a twin, by the row."""

    def __init__(
        self,
        operator: Operator,
        table: StateTable,
        twin: StateTable,
        truth: set[tuple[int, int]],
    ) -> None:
        self.operator, self.table, self.truth = operator, table, truth
        self.probe, self.rows = operator.by_column(table, 0), operator.by_row(table, 0)
        self.twins = operator.by_row(twin, 0)

    def change(self, ops: Any, *, by_row: bool) -> None:
        for verb, timers_, _ in ops:
            some = [(place % len(self.operator.full), at) for place, at in timers_]
            if by_row:
                self._by_row(self.rows, verb, some)
            else:
                keys = self.operator.all_keys().take(places(*[place for place, _ in some]))
                getattr(self.probe.timers, verb)(keys, places(*[at for _, at in some]))
            self._by_row(self.twins, verb, some)
            for timer in some:
                (self.truth.add if verb == "register" else self.truth.discard)(timer)
            self.table.relieve()

    def _by_row(self, side: RowSide, verb: str, some: list[tuple[int, int]]) -> None:
        for place, at in some:
            side.current(place)
            getattr(side.timers, verb)(at)


def _as_rows_have_them(
    ddl: str, epochs: list[tuple[Any, int, Any]], applied: bool, spill: OverlaySpill | None
) -> None:
    operator = Operator(ddl)
    base, twin_base = MemoryBase(), MemoryBase()
    table, twin = StateTable(base, spill=spill), StateTable(twin_base)
    truth: set[tuple[int, int]] = set()
    everywhere = range(512)
    for epoch, (ops, now_ms, while_firing) in enumerate(epochs):
        both = _Both(operator, table, twin, truth)
        probe, twins = both.probe, both.twins

        for op in ops:
            both.change([op], by_row=op[2])
        index, at_ms = probe.timers.list(operator.all_keys())
        assert list(zip(index.tolist(), at_ms.tolist(), strict=True)) == sorted(truth)

        expected = sorted((at, place) for place, at in truth if at <= now_ms)
        got = []
        for some in probe.timers.due(everywhere, now_ms, lambda: 3):
            owners = [operator.full.index(full) for full in some.owners.to_pylist()]
            got += list(zip(some.at_ms.tolist(), owners, strict=True))
            probe.timers.fired(some)
            table.relieve()
        twin_got = []
        for at, group, key in list(twins.timers.due(everywhere, now_ms)):
            twin_got.append((at, operator.full.index(group + key)))
            twins.timers.remove(group, key, at)
        assert got == twin_got == expected
        truth.difference_update((place, at) for at, place in expected)
        both.change(while_firing, by_row=False)
        wanted = min((at for _, at in truth), default=None)
        assert probe.timers.next_ms() == wanted
        assert list(table.snapshot()) == list(twin.snapshot())
        frozen, twin_frozen = table.freeze(epoch), twin.freeze(epoch)
        twin_base.apply(*twin_frozen.sorted())
        twin.applied(twin_frozen)
        if applied:
            base.apply(*frozen.sorted())
            table.applied(frozen)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=20),
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sampled_from(["register", "delete"]), st.integers(0, 4), st.integers(0, 15)),
        max_size=10,
    ),
)
def test_what_is_deleted_while_timers_fire_does_not_fire_later(
    set_before: list[tuple[int, int]], size: int, changes: list[tuple[str, int, int]]
) -> None:
    operator = Operator("k string")
    table = StateTable(MemoryBase())
    probe = operator.by_column(table, 0)
    every = operator.all_keys()
    owners, times = zip(*set_before, strict=True)
    probe.timers.register(every.take(places(*owners)), places(*times))
    left = sorted({(at, place) for place, at in set_before})
    gone: set[tuple[int, int]] = set()
    again: set[tuple[int, int]] = set()
    from statebackend.operators.vector import column_timers as module

    before, module._CHUNK_ROWS = module._CHUNK_ROWS, size  # type: ignore[misc]
    try:
        due = probe.timers.due(range(512), 20, lambda: size)
        pending = list(changes)
        while left:
            chunk, rest = left[:size], left[size:]
            expected = [timer for timer in chunk if timer not in gone]
            left = rest
            if not expected:
                continue
            some = next(due)
            found = [operator.full.index(full) for full in some.owners.to_pylist()]
            assert list(zip(some.at_ms.tolist(), found, strict=True)) == expected
            for verb, place, at in pending[:2]:
                getattr(probe.timers, verb)(every.take(places(place)), at)
                if verb == "delete":
                    gone.add((at, place))
                    again.discard((at, place))
                else:
                    again.add((at, place))
            del pending[:2]
            probe.timers.fired(some)
            again -= set(expected)
        assert list(due) == []
    finally:
        module._CHUNK_ROWS = before  # type: ignore[misc]
    assert probe.timers.next_ms() == min((at for at, _ in again), default=None)
    index, at_ms = probe.timers.list(every)
    assert sorted(zip(at_ms.tolist(), index.tolist(), strict=True)) == sorted(again)


def test_timers_lie_where_rows_would_look_for_them() -> None:
    operator = Operator("k bigint")
    table = StateTable(MemoryBase())
    probe = operator.by_column(table, 0)
    probe.timers.register(operator.all_keys(), np.arange(len(operator.full)) * 10)
    rows = operator.by_row(table, 0)
    for place in range(len(operator.full)):
        rows.current(place)
        assert rows.timers.list() == [place * 10]
    index = TimerIndex(rows._cursor, table)
    due = list(index.due(range(512), 20))
    assert [at for at, _, _ in due] == [0, 10, 20]
    for at, group, key in due:
        index.remove(group, key, at)
    assert index.next_ms() == 30
