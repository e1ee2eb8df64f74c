"""A processor whose states have other schemas goes on with what the one before it left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statebackend.api.context import ProcessorContext
from statebackend.api.processors import CoProcessor, KeyedProcessor
from statebackend.errors import StateMismatchError, UsageError
from statebackend.state.ttl_cells import TTL
from statebackend.testing.processor_tester import ProcessorTester

HOUR = TTL(3_600_000)


class Made(KeyedProcessor):
    """States by declaration; ``process`` runs a function over them and gives what that gives."""

    def __init__(self, declare: Callable[..., None], process: Callable[..., Any]) -> None:
        self.declare, self.function = declare, process

    def open(self, ctx: ProcessorContext) -> None:
        self.declare(self, ctx)

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
        return [(self.function(self, row),) for row in rows]


def ran(tester: ProcessorTester, key: str = "k", **row: Any) -> Any:
    return tester.test(key, [Row(**(row or {"n": 0}))])[0][0]


@pytest.mark.parametrize("ttl", [None, HOUR], ids=["plain", "ttl"])
def test_a_value_state_takes_its_new_fields(ttl: TTL | None) -> None:
    def first(p: Any, ctx: ProcessorContext) -> None:
        p.state = ctx.value_state("s", "n int, word string, gone double", ttl=ttl)

    def second(p: Any, ctx: ProcessorContext) -> None:
        p.state = ctx.value_state("s", "word string, m int DEFAULT 7, n bigint, x date", ttl=ttl)

    def put(p: Any, row: Row) -> Any:
        return p.state.update((row.n, "w", 1.5))

    with ProcessorTester(Made(first, put)) as tester:
        for key in ("a", "b"):
            ran(tester, key, n=5)
        tester.restart(Made(second, lambda p, row: p.state.get()))
        assert ran(tester, "a") == ("w", 7, 5, None)
        assert tester.peekValueState("s", "b") == ("w", 7, 5, None)
        tester.updateValueState("s", "b", (None, 1, 2**40, None))
        tester.rescale(3)
        assert ran(tester, "a") == ("w", 7, 5, None)
        assert ran(tester, "b") == (None, 1, 2**40, None)


@pytest.mark.parametrize("ttl", [None, HOUR], ids=["plain", "ttl"])
@pytest.mark.parametrize("rows", [3, 40])
def test_a_list_holds_rows_of_several_versions(ttl: TTL | None, rows: int) -> None:
    def declaring(schema: str) -> Callable[..., None]:
        def declare(p: Any, ctx: ProcessorContext) -> None:
            p.state = ctx.list_state("s", schema, ttl=ttl)

        return declare

    def append(*row: Any) -> Callable[..., Any]:
        def function(p: Any, _: Row) -> Any:
            p.state.append(row)
            return list(p.state.get())

        return function

    with ProcessorTester(Made(declaring("n int"), append(1))) as tester:
        for _ in range(rows):
            ran(tester)
        tester.restart(Made(declaring("n bigint, s string DEFAULT 'old'"), append(2, "new")))
        for _ in range(rows):
            ran(tester)
        tester.restart(Made(declaring("s string, n decimal(20,1)"), append("newest", Decimal(3))))
        expected = [("old", Decimal(1))] * rows + [("new", Decimal(2))] * rows
        assert ran(tester) == [*expected, ("newest", Decimal(3))]


@pytest.mark.parametrize("ttl", [None, HOUR], ids=["plain", "ttl"])
def test_a_map_reads_each_entry_by_its_own_version(ttl: TTL | None) -> None:
    def declaring(schema: str) -> Callable[..., None]:
        def declare(p: Any, ctx: ProcessorContext) -> None:
            p.state = ctx.map_state("s", "page string", schema, ttl=ttl)

        return declare

    def put(*value: Any) -> Callable[..., Any]:
        def function(p: Any, row: Row) -> Any:
            p.state.update_value((row.page,), value)
            return dict(p.state.iterator())

        return function

    visits = "n int, at struct<where: array<struct<x: int>>>"
    with ProcessorTester(Made(declaring(visits), put(1, ([(5,), None],)))) as tester:
        ran(tester, page="a")
        ran(tester, page="b")
        wider = "at struct<where: array<struct<y: int DEFAULT 9, x: double>>>, n int"
        tester.restart(Made(declaring(wider), put(None, 2)))
        assert ran(tester, page="b") == {
            ("a",): (Row(where=[Row(y=9, x=5.0), None]), 1),
            ("b",): (None, 2),
        }
        tester.restart(Made(declaring(wider), lambda p, row: p.state.get_value((row.page,))))
        at, n = ran(tester, page="a")
        assert (at.where[0].y, at.where[0].x, n) == (9, 5.0, 1)


def test_an_accumulator_and_a_reduced_row_go_on_with_their_new_fields() -> None:
    def first(p: Any, ctx: ProcessorContext) -> None:
        p.most = ctx.reducing_state("most", "n int", max)
        p.mean = ctx.aggregating_state(
            "mean", "n int, sum int", create=lambda: (0, 0), add=lambda a, x: (a[0] + 1, a[1] + x)
        )

    def add_first(p: Any, row: Row) -> None:
        p.most.add((row.n,))
        p.mean.add(row.n)

    def second(p: Any, ctx: ProcessorContext) -> None:
        p.most = ctx.reducing_state(
            "most", "n bigint, times int DEFAULT 1", lambda a, b: (max(a[0], b[0]), a[1] + b[1])
        )
        p.mean = ctx.aggregating_state(
            "mean",
            "sum bigint, n bigint, squares double DEFAULT 0",
            create=lambda: (0, 0, 0.0),
            add=lambda a, x: (a[0] + x, a[1] + 1, a[2] + x * x),
        )

    def add_second(p: Any, row: Row) -> Any:
        p.most.add((row.n, 1))
        p.mean.add(row.n)
        return p.most.get(), p.mean.get()

    with ProcessorTester(Made(first, add_first)) as tester:
        ran(tester, n=3)
        ran(tester, n=4)
        tester.restart(Made(second, add_second))
        assert ran(tester, n=2) == ((4, 2), (9, 3, 4.0))


def test_timestamps_of_old_rows_are_shown_with_the_zone_as_those_of_new_ones() -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)

    def first(p: Any, ctx: ProcessorContext) -> None:
        p.state = ctx.value_state("s", "at timestamp")

    def second(p: Any, ctx: ProcessorContext) -> None:
        p.state = ctx.value_state(
            "s", "n int, at timestamp, b timestamp DEFAULT '2026-01-01T12:00Z'"
        )

    with ProcessorTester(Made(first, lambda p, row: p.state.update((noon,)))) as tester:
        ran(tester)
        tester.restart(Made(second, lambda p, row: p.state.get()))
        _, at, default = ran(tester)
        assert at == default == noon
        assert at.utcoffset() == default.utcoffset() == noon.utcoffset()


class Count(StatefulProcessor):
    """Spark's own interface."""

    def __init__(self, schema: str, row: Callable[..., tuple[Any, ...]], *, anew: bool = False):
        self.schema, self.row, self.anew = schema, row, anew

    def init(self, handle: Any) -> None:
        if self.anew:
            handle.deleteIfExists("count")
        self.count = handle.getValueState("count", self.schema)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        self.count.update(self.row(self.count.get(), len(list(rows))))
        yield Row(count=self.count.get())


def test_states_of_sparks_own_interface_may_change_too() -> None:
    def first(old: Any, n: int) -> tuple[Any, ...]:
        return ((old or (0,))[0] + n,)

    def second(old: Any, n: int) -> tuple[Any, ...]:
        return old[0], old[1] + n

    with ProcessorTester(Count("n int", first)) as tester:
        tester.test("k", [Row(x=1)] * 3)
        tester.restart(Count("since string DEFAULT 'ever', n bigint", second))
        assert tester.test("k", [Row(x=1)]) == [Row(count=("ever", 4))]


def test_a_change_that_cannot_be_leaves_the_tester_as_it_was() -> None:
    def first(old: Any, n: int) -> tuple[Any, ...]:
        return ((old or (0,))[0] + n,)

    with ProcessorTester(Count("n bigint", first)) as tester:
        tester.test("k", [Row(x=1)] * 3)
        with pytest.raises(
            StateMismatchError, match="field 'n' is bigint in the checkpoint and int"
        ):
            tester.restart(Count("n int", first))
        assert tester.test("k", [Row(x=1)]) == [Row(count=(4,))]
        # Deleted and declared again it is another state, which may be anything.
        tester.restart(Count("n string", lambda old, n: (f"{old} {n}",), anew=True))
        assert tester.peekValueState("count", "k") is None
        assert tester.test("k", [Row(x=1)]) == [Row(count=("None 1",))]


class Other(CoProcessor):
    """Another kind of processor."""

    def open(self, ctx: ProcessorContext) -> None:
        """Asks for nothing."""

    def process_left(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        """Gives nothing."""

    def process_right(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        """Gives nothing."""


def test_a_processor_of_another_kind_or_without_a_state_cannot_take_its_place() -> None:
    def declare(p: Any, ctx: ProcessorContext) -> None:
        ctx.value_state("s", "n int")

    with ProcessorTester(Made(declare, lambda p, row: None)) as tester:
        with pytest.raises(UsageError, match="cannot take the place"):
            tester.restart(Other())
        with pytest.raises(StateMismatchError, match="State 's' is not declared any more"):
            tester.restart(Made(lambda p, ctx: None, lambda p, row: None))
