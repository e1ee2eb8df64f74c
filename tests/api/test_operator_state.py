"""Operator and broadcast state as processors use them, through the tester."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import Row

from statebackend import ArrowProcessor, BroadcastProcessor, KeyedProcessor, ProcessorTester
from statebackend.errors import (
    BroadcastDivergedError,
    BroadcastWriteError,
    KeyContextError,
    ProcessorError,
    SettingError,
    StateMismatchError,
    UsageError,
    ValueMismatchError,
)


def no_change(processor: Any) -> None:
    pass


class Limits(BroadcastProcessor):
    """Lets through what is over its country's limit."""

    def __init__(self, process: Callable[[Any], None] = no_change) -> None:
        self.extra = process

    def open(self, ctx: Any) -> None:
        self.ctx = ctx
        self.limits = ctx.broadcast_state("limits", "country string", "cents bigint")
        self.seen = ctx.operator_list("seen", "key string")
        self.count = ctx.value_state("count", "n bigint")

    def process_broadcast(self, rows: Iterator[Row], ctx: Any) -> None:
        for row in rows:
            if row.cents is None:
                self.limits.remove((row.country,))
            else:
                self.limits.put((row.country,), (row.cents,))

    def process(self, key: Any, rows: Iterator[Row], ctx: Any) -> Iterator[tuple[Any, ...]]:
        self.extra(self)
        if self.count.get() is None:
            self.seen.add(key)
        for row in rows:
            (n,) = self.count.get() or (0,)
            self.count.update((n + 1,))
            (limit,) = self.limits.get((row.country,)) or (0,)
            if row.cents > limit:
                yield (*key, row.cents)


class Diverging(Limits):
    def process_broadcast(self, rows: Iterator[Row], ctx: Any) -> None:
        self.limits.put(("x",), (random.SystemRandom().getrandbits(60),))


class Misused(Limits):
    def __init__(self, broadcast: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.broadcast = broadcast

    def process_broadcast(self, rows: Iterator[Row], ctx: Any) -> None:
        return self.broadcast(self, rows)  # type: ignore[no-any-return]


def rule(country: str, cents: int | None) -> Row:
    return Row(country=country, cents=cents)


def pay(country: str, cents: int) -> Row:
    return Row(country=country, cents=cents)


def seen(tester: ProcessorTester, subtasks: int) -> list[list[str]]:
    return [[k for (k,) in tester.peekOperatorList("seen", i)] for i in range(subtasks)]


def test_rules_are_in_force_from_the_micro_batch_on_that_brings_them() -> None:
    with ProcessorTester(Limits()) as tester:
        assert tester.test("u", [pay("DE", 5)]) == [("u", 5)]
        assert tester.testBroadcast([rule("DE", 10)]) == []
        assert tester.test("u", [pay("DE", 5)]) == []
        both = tester.testBroadcast([rule("DE", 3)], key="u", input=[pay("DE", 5)])
        assert both == [("u", 5)], "rules come before data"
        tester.testBroadcast([rule("DE", None), rule("FR", 1)])
        assert tester.peekBroadcastState("limits") == {("FR",): (1,)}


def test_broadcast_state_is_the_same_in_all_subtasks_after_restart_and_rescale() -> None:
    with ProcessorTester(Limits()) as tester:
        tester.testBroadcast([rule("DE", 10), rule("FR", 20)])
        for parallelism in (3, 2, 5, 1):
            tester.rescale(parallelism)
            tester.restart()
            tester.testBroadcast([rule("IT", parallelism)])
            found = [tester.peekBroadcastState("limits", i) for i in range(parallelism)]
            assert found == [{("DE",): (10,), ("FR",): (20,), ("IT",): (parallelism,)}] * (
                parallelism
            )
            assert tester.test("u", [pay("FR", 15), pay("FR", 25)]) == [("u", 25)]


class Gathering(KeyedProcessor):
    """Keeps its keys in a list that every subtask gets whole at another parallelism."""

    def open(self, ctx: Any) -> None:
        self.seen = ctx.operator_list("seen", "key string", mode="union")

    def process(self, key: Any, rows: Iterator[Row], ctx: Any) -> Any:
        self.seen.add(key)
        return ()


def test_at_the_same_parallelism_nothing_is_redistributed_as_in_a_query() -> None:
    with ProcessorTester(Gathering()) as tester:
        tester.rescale(3)
        for key in range(7):
            tester.test(f"k{key}", [pay("DE", 0)])
        before = seen(tester, 3)
        every = list(chain.from_iterable(before))
        assert sorted(every) == [f"k{i}" for i in range(7)]
        processors = tester.processor
        tester.rescale(3)
        assert seen(tester, 3) == before
        assert tester.processor is not processors, "it is a restart all the same"
        tester.rescale(2)
        assert seen(tester, 2) == [every] * 2


def test_an_operator_list_is_split_over_other_subtasks() -> None:
    with ProcessorTester(Limits()) as tester:
        keys = [f"k{i}" for i in range(7)]
        for key in keys:
            tester.test(key, [pay("DE", 0)])
        assert seen(tester, 1) == [keys]
        tester.rescale(4)
        assert seen(tester, 4) == [keys[:2], keys[2:4], keys[4:6], keys[6:]]
        tester.restart()
        for key in keys:
            tester.test(key, [pay("DE", 0)])
        tester.rescale(1)
        assert seen(tester, 1) == [keys], "known keys were not added again"


def test_what_an_epoch_that_failed_did_is_not_kept() -> None:
    def fail(processor: Any) -> None:
        processor.seen.add(("never",))
        raise RuntimeError("no")

    with ProcessorTester(Limits()) as tester:
        tester.test("a", [pay("DE", 0)])
        tester.processor.extra = fail
        with pytest.raises(RuntimeError):
            tester.test("b", [pay("DE", 0)])
        assert seen(tester, 1) == [["a"]]


def test_subtasks_that_come_to_different_states_are_refused() -> None:
    with ProcessorTester(Diverging()) as tester:
        tester.rescale(2)
        with pytest.raises(BroadcastDivergedError, match="different broadcast states"):
            tester.testBroadcast([rule("DE", 1)])


def test_broadcast_state_is_not_written_for_a_key() -> None:
    def write(processor: Any) -> None:
        processor.limits.put(("DE",), (1,))

    with ProcessorTester(Limits(write)) as tester:
        with pytest.raises(BroadcastWriteError, match=r"limits.*for key"):
            tester.test("u", [pay("DE", 5)])
        assert tester.peekBroadcastState("limits") == {}


@pytest.mark.parametrize(
    ("use", "error", "said"),
    [
        (lambda self, rows: self.count.get(), KeyContextError, "count"),
        (lambda self, rows: [(1,)], ValueMismatchError, "gives no output"),
        (lambda self, rows: (yield), ProcessorError, "generator"),
    ],
)
def test_process_broadcast_has_no_key_and_gives_no_output(
    use: Callable[..., Any], error: type[Exception], said: str
) -> None:
    with ProcessorTester(Misused(use)) as tester, pytest.raises(error, match=said):
        tester.testBroadcast([rule("DE", 1)])


class Keyed(KeyedProcessor):
    def __init__(self, mode: str = "union", kind: str = "list") -> None:
        self.mode, self.kind = mode, kind

    def open(self, ctx: Any) -> None:
        if self.kind == "broadcast":
            ctx.broadcast_state("s", "k string", "n bigint")
        elif self.kind == "value":
            ctx.value_state("s", "n bigint")
        else:
            self.s = ctx.operator_list("s", "n bigint", mode=self.mode)
            self.before = len(list(self.s.get()))

    def process(self, key: Any, rows: Iterator[Row], ctx: Any) -> Iterator[tuple[Any, ...]]:
        self.s.add((len(list(rows)),))
        yield (self.before,)


def test_a_union_list_is_given_whole_to_each() -> None:
    with ProcessorTester(Keyed()) as tester:
        tester.test("a", [Row(n=1)])
        tester.test("a", [Row(n=1), Row(n=2)])
        tester.rescale(3)
        assert [tester.peekOperatorList("s", i) for i in range(3)] == [[(1,), (2,)]] * 3
        tester.rescale(1)
        assert len(tester.peekOperatorList("s")) == 6


class Highest(KeyedProcessor):
    """As docs/howto/operator-state.md tells to use a union."""

    def open(self, ctx: Any) -> None:
        self.highest = ctx.operator_list("highest", "sensor string, celsius double", mode="union")
        merged: dict[str, float] = {}
        for sensor, celsius in self.highest.get():
            merged[sensor] = max(celsius, merged.get(sensor, celsius))
        self.highest.update(sorted(merged.items()))

    def process(self, key: Any, rows: Iterator[Row], ctx: Any) -> Iterator[tuple[Any, ...]]:
        for row in rows:
            self.highest.add((key[0], row.celsius))
        yield tuple(self.highest.get())


def test_a_union_that_is_merged_when_it_is_opened_does_not_grow() -> None:
    with ProcessorTester(Highest()) as tester:
        for degrees in (1.0, 3.0, 2.0):
            for sensor in ("a", "b"):
                tester.test(sensor, [Row(celsius=degrees)])
        for parallelism in (3, 2, 4, 1):
            tester.rescale(parallelism)
            tester.test("a", [Row(celsius=2.5)])
        ((seen),) = tester.test("a", [Row(celsius=0.0)])
        assert seen == (("a", 3.0), ("b", 3.0), ("a", 0.0))


def test_a_list_is_read_in_open_too() -> None:
    with ProcessorTester(Keyed("split")) as tester:
        tester.test("a", [Row(n=1)])
        tester.restart()
        tester.test("a", [Row(n=1)])
        assert tester.test("a", [Row(n=1)]) == [(2,)]


@pytest.mark.parametrize("other", [Keyed("split"), Keyed(kind="value")])
def test_a_name_under_another_mode_or_kind_is_refused(other: Keyed) -> None:
    with ProcessorTester(Keyed()) as tester:
        tester.test("a", [Row(n=1)])
        with pytest.raises(StateMismatchError, match="an operator list of mode 'union'"):
            tester.restart(other)
        assert tester.peekOperatorList("s") == [(1,)]


def test_wrong_declarations_are_refused() -> None:
    with pytest.raises(SettingError, match="mode='round-robin'"):
        ProcessorTester(Keyed("round-robin"))
    with pytest.raises(UsageError, match="nothing is broadcast"):
        ProcessorTester(Keyed(kind="broadcast"))


def test_verbs_belong_to_their_kind() -> None:
    with ProcessorTester(Keyed()) as tester:
        with pytest.raises(UsageError):
            tester.testBroadcast([rule("DE", 1)])
        with pytest.raises(UsageError, match="has not been initialized"):
            tester.peekBroadcastState("s")
        with pytest.raises(UsageError, match="subtask 1 of 1"):
            tester.peekOperatorList("s", 1)


class Wider(Limits):
    def open(self, ctx: Any) -> None:
        self.limits = ctx.broadcast_state("limits", "country string", "cents bigint, note string")
        self.seen = ctx.operator_list("seen", "key string, n int")
        self.count = ctx.value_state("count", "n bigint")

    def process_broadcast(self, rows: Iterator[Row], ctx: Any) -> None:
        for row in rows:
            self.limits.put((row.country,), (row.cents, "new"))

    def process(self, key: Any, rows: Iterator[Row], ctx: Any) -> Iterator[tuple[Any, ...]]:
        self.seen.add((*key, 1))
        yield from ()


def test_another_schema_goes_on_from_the_one_before() -> None:
    with ProcessorTester(Limits()) as tester:
        tester.testBroadcast([rule("DE", 10)])
        tester.test("a", [pay("DE", 0)])
        tester.restart(Wider())
        tester.rescale(2)
        tester.testBroadcast([rule("FR", 20)])
        for subtask in range(2):
            found = tester.peekBroadcastState("limits", subtask)
            assert found == {("DE",): (10, None), ("FR",): (20, "new")}
        assert tester.peekOperatorList("seen", 0) == [("a", None)]


class Batches(ArrowProcessor):
    def open(self, ctx: Any) -> None:
        self.sizes = ctx.operator_list("sizes", "rows bigint")

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        self.sizes.add((batch.num_rows,))


def test_an_arrow_processor_has_lists_too() -> None:
    with ProcessorTester(Batches(), keySchema="k bigint", outputSchema="k bigint") as tester:
        tester.testBatch(pa.table({"k": [1, 2, 3]}))
        tester.testBatch(pa.table({"k": [1]}))
        tester.rescale(2)
        assert [tester.peekOperatorList("sizes", i) for i in range(2)] == [[(3,)], [(1,)]]
