"""What Spark's own tests and examples do with a processor, and with its tester."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statebackend import (
    TTL,
    ArrowProcessor,
    BroadcastProcessor,
    CoProcessor,
    KeyedProcessor,
    ProcessorTester,
)
from statebackend.errors import (
    KeyContextError,
    SettingError,
    StateMismatchError,
    ValueMismatchError,
)
from statebackend.operators.arrow_calls import record_arrow_states
from statebackend.operators.processor_calls import record_keyed_states
from statebackend.operators.stateful_processor_calls import record_states
from tests.api.processors import Alarm, AlarmInPandas, Remembering, RunningCountInPandas, Words

# --- a processor goes from its test into a query -------------------------------------------------


class EveryState(KeyedProcessor):
    """All that a processor of ours can be given, kept as attributes."""

    def open(self, ctx: Any) -> None:
        self.ctx, self.timers = ctx, ctx.timers
        self.value = ctx.value_state("value", "n bigint")
        self.list = ctx.list_state("list", "n bigint", ttl=TTL(1000))
        self.map = ctx.map_state("map", "k string", "n bigint")
        self.folded = ctx.reducing_state("folded", "n bigint", max)
        self.all = ctx.aggregating_state(
            "all", "n bigint", create=lambda: (0,), add=lambda row, n: (row[0] + n,)
        )
        self.seen = ctx.operator_list("seen", "k string")

    def process(self, key: Any, rows: Any, ctx: Any) -> Any:
        self.value.update((1,))
        self.timers.register(10**9)
        self.seen.add(key)
        return [(len(list(rows)),)]


class Both(CoProcessor):
    def open(self, ctx: Any) -> None:
        self.ctx, self.value = ctx, ctx.value_state("value", "n bigint")

    def process_left(self, key: Any, rows: Any, ctx: Any) -> Any:
        return ()

    process_right = process_left


class Ruled(BroadcastProcessor):
    def open(self, ctx: Any) -> None:
        self.ctx, self.rules = ctx, ctx.broadcast_state("rules", "k string", "n bigint")

    def process_broadcast(self, rows: Any, ctx: Any) -> None:
        self.rules.put(("a",), (1,))

    def process(self, key: Any, rows: Any, ctx: Any) -> Any:
        return ()


class Columns(ArrowProcessor):
    def open(self, ctx: Any) -> None:
        self.ctx, self.timers = ctx, ctx.timers
        self.value = ctx.value_state("value", "n bigint")
        self.list = ctx.list_state("list", "n bigint")
        self.aging = ctx.list_state("aging", "n bigint", ttl=TTL(1000))
        self.map = ctx.map_state("map", "k string", "n bigint", ttl=TTL(1000))

    def process(self, batch: Any, ctx: Any) -> Any:
        self.value.put(ctx.keys, [pa.array([1] * len(ctx.keys))])
        self.timers.register(ctx.keys, 10**9)


ARROW = {"keySchema": "k string", "outputSchema": "n bigint"}
WORD = [Row(word="x", at=10**9)]
ROWS: list[tuple[Any, dict[str, Any], Any]] = [
    (Words, {}, lambda tester: tester.test("a", WORD)),
    (Alarm, {"timeMode": "ProcessingTime"}, lambda tester: tester.test("a", WORD)),
    (Remembering, {"timeMode": "ProcessingTime"}, lambda tester: tester.test("a", WORD)),
    (RunningCountInPandas, {}, lambda tester: tester.testInPandas("a", pd.DataFrame(WORD))),
    (
        AlarmInPandas,
        {"timeMode": "ProcessingTime"},
        lambda tester: tester.testInPandas("a", pd.DataFrame({"at": [10**9]})),
    ),
    (EveryState, {"timeMode": "ProcessingTime"}, lambda tester: tester.test("a", WORD)),
    (Both, {}, lambda tester: tester.testSides("a", left=WORD)),
    (Ruled, {}, lambda tester: tester.testBroadcast(WORD)),
    (
        Columns,
        {"timeMode": "ProcessingTime", **ARROW},
        lambda tester: tester.testBatch(pa.table({"k": ["a"]})),
    ),
]


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(("kind", "how", "feed"), ROWS, ids=[one[0].__name__ for one in ROWS])
def test_a_processor_can_be_shipped_after_its_test(
    kind: Any, how: dict[str, Any], feed: Any, closed: bool
) -> None:
    processor = kind()
    tester = ProcessorTester(processor, **how)
    feed(tester)
    if closed:
        tester.close()
    shipped = cloudpickle.loads(cloudpickle.dumps(processor))
    tester.close()
    with ProcessorTester(shipped, **how) as another:
        feed(another)
    with ProcessorTester(processor, **how) as another:
        feed(another)


def test_what_a_processor_counts_is_there_after_its_test_and_goes_along() -> None:
    processor = Words()
    processor.calls = 3  # type: ignore[attr-defined]
    with ProcessorTester(processor) as tester:
        tester.test("a", WORD)
        assert tester.processor is processor
    shipped = cloudpickle.loads(cloudpickle.dumps(processor))
    assert shipped.calls == processor.calls == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda one: cloudpickle.loads(cloudpickle.dumps(one))]
)
def test_a_state_in_a_copy_says_where_it_stayed(copied: Any) -> None:
    processor = Words()
    with ProcessorTester(processor):
        left = copied(processor)
    with pytest.raises(KeyContextError, match=r"State 'words' belongs to the processor that this"):
        left.words.get()


def test_a_tester_leaves_a_class_alone_whose_fields_only_pickle_can_copy() -> None:
    calls = []

    class Looked(StatefulProcessor):
        def __init__(self) -> None:
            self.table = MappingProxyType({"a": [1]})
            self.all = (self.table, Looked, calls.append, self.taken)

        def taken(self, what: str) -> None:
            calls.append(what)

        def init(self, handle: Any) -> None:
            self.all[3]("init")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            self.taken("rows")
            yield Row(n=self.table["a"][0])

        def close(self) -> None:
            pass

    before = dict(vars(Looked))
    processor = Looked()
    with ProcessorTester(processor) as tester:
        assert tester.test("a", []) == [Row(n=1)]
        assert calls[-2:] == ["init", "rows"]
        tester.restart()
        assert tester.test("a", []) == [Row(n=1)]
        assert calls[-2:] == ["init", "rows"]
        again: Any = tester.processor
    assert {name: vars(Looked)[name] for name in before} == before
    assert type(again) is Looked is again.all[1]
    assert again is not processor
    assert again.table == processor.table
    assert again.table["a"] is not processor.table["a"]
    assert again.table is again.all[0]
    assert again.all[3].__self__ is again


RECORDERS = {
    StatefulProcessor: record_states,
    KeyedProcessor: record_keyed_states,
    CoProcessor: record_keyed_states,
    BroadcastProcessor: record_keyed_states,
    ArrowProcessor: record_arrow_states,
}


@pytest.mark.parametrize("kind", [one[0] for one in ROWS])
def test_a_processor_that_ran_on_the_driver_can_be_shipped(kind: Any) -> None:
    processor = kind()
    record = next(one for base, one in RECORDERS.items() if issubclass(kind, base))
    record(processor, "u", time_mode="processing")  # type: ignore[operator]
    shipped = cloudpickle.loads(cloudpickle.dumps(processor))
    record(shipped, "u", time_mode="processing")  # type: ignore[operator]


# --- states that init() asks for and deletes -----------------------------------------------------


class Deleting(StatefulProcessor):
    """As the processors of Spark's tests: a state is asked for, and deleted at once."""

    uses = False

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n bigint")
        self.temporary = handle.getMapState("temporary", "k string", "n bigint")
        handle.deleteIfExists("temporary")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        if self.uses:
            self.temporary.updateValue(("a",), (1,))
        n = (self.count.get() or (0,))[0] + len(list(rows))
        self.count.update((n,))
        yield Row(n=n)


class UsingDeleted(Deleting):
    uses = True


class Temporary(Deleting):
    """The code before it: the state is in use."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n bigint")
        self.temporary = handle.getMapState("temporary", "k string", "n bigint")

    uses = True


class Again(Deleting):
    """Asked for, deleted, and asked for as another kind of state."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        self.list = handle.getListState("temporary", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for _ in rows:
            self.list.appendValue((1,))
        yield Row(n=len(list(self.list.get())))


def test_a_state_may_be_asked_for_and_deleted_in_one_init() -> None:
    with ProcessorTester(Deleting()) as tester:
        assert tester.test("a", WORD) == [Row(n=1)]
        assert tester.test("a", WORD) == [Row(n=2)]
        tester.restart()
        assert tester.test("a", WORD) == [Row(n=3)]
        with pytest.raises(AssertionError, match="temporary"):
            tester.peekMapState("temporary", "a")


def test_a_state_that_init_deletes_cannot_be_used() -> None:
    with (
        ProcessorTester(UsingDeleted()) as tester,
        pytest.raises(KeyContextError, match=r"State 'temporary' is used, but init\(\) deletes it"),
    ):
        tester.test("a", WORD)


class CatchingAsInSpark(Deleting):
    """As programs written for Spark find out that the state is gone."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        self.value = handle.getValueState("value", "n bigint")
        handle.deleteIfExists("value")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        with pytest.raises(PySparkRuntimeError, match="Error checking value state exists"):
            self.value.exists()
        with pytest.raises(PySparkRuntimeError, match="Error checking map state exists") as caught:
            self.temporary.exists()
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (type(caught.value), str(caught.value))
        yield from super().handleInputRows(key, rows, timerValues)


def test_code_that_catches_sparks_error_of_a_deleted_state_goes_on() -> None:
    with ProcessorTester(CatchingAsInSpark()) as tester:
        assert tester.test("a", WORD) == [Row(n=1)]


def test_what_it_held_is_gone() -> None:
    with ProcessorTester(Temporary()) as tester:
        tester.test("a", WORD)
        assert tester.peekMapState("temporary", "a") == {("a",): (1,)}
        tester.restart(Deleting())
        assert tester.test("a", WORD) == [Row(n=2)]
        tester.restart(Temporary())
        assert tester.peekMapState("temporary", "a") == {}


def test_a_deleted_state_may_be_asked_for_again() -> None:
    with ProcessorTester(Again()) as tester:
        assert tester.test("a", WORD) == [Row(n=1)]
        assert tester.test("a", WORD) == [Row(n=2)]


def test_a_name_is_still_given_only_once() -> None:
    class Twice(Deleting):
        def init(self, handle: Any) -> None:
            handle.getValueState("count", "n bigint")
            super().init(handle)

    with pytest.raises(StateMismatchError, match="declared twice"):
        ProcessorTester(Twice())


# --- time to live ---------------------------------------------------------------------------------


class Aging(Words):
    def __init__(self, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n bigint", self.ttl_ms)
        self.words = handle.getListState("words", "word string", self.ttl_ms)
        self.times = handle.getMapState("times", "word string", "n bigint", self.ttl_ms)


@pytest.mark.parametrize("ttl_ms", [2**63 - 1, 10**15, 0])
def test_a_ttl_may_be_as_long_as_spark_takes_it(ttl_ms: int) -> None:
    with ProcessorTester(Aging(ttl_ms), timeMode="ProcessingTime") as tester:
        tester.setProcessingTime(1_800_000_000_000)
        for words in (["x"], ["x", "x"]):
            assert tester.test("a", WORD) == [Row(words=words)]
            tester.setProcessingTime(1_800_000_000_000 + len(words) * 10**13)
        tester.rescale(3)
        assert tester.peekMapState("times", "a") == {("x",): (2,)}


@pytest.mark.parametrize("ttl_ms", [-1, -(2**63), 2**63])
def test_a_ttl_that_spark_refuses_is_refused(ttl_ms: int) -> None:
    with pytest.raises(SettingError, match=rf"TTL of {ttl_ms} ms"):
        ProcessorTester(Aging(ttl_ms), timeMode="ProcessingTime")


# --- keys of maps --------------------------------------------------------------------------------


class Letters(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.map = handle.getMapState("map", "k string", "n bigint")
        self.pairs = handle.getMapState("pairs", "k string, j string", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.map.updateValue(row.k, (row.n,))
            assert self.map.containsKey(row.k)
            assert self.map.getValue(row.k) == (row.n,)
            yield Row(keys=list(self.map.keys()))
            self.map.removeKey(row.k)
            assert not self.map.exists()


def test_one_character_is_the_key_of_a_map_as_in_spark() -> None:
    with ProcessorTester(Letters()) as tester:
        assert tester.test("a", [Row(k="x", n=1)]) == [Row(keys=[("x",)])]
        tester.updateMapState("map", "a", {"y": (2,)})  # type: ignore[dict-item]
        assert tester.peekMapState("map", "a") == {("y",): (2,)}
        with pytest.raises(ValueMismatchError, match="cannot be made of a str"):
            tester.test("a", [Row(k="xy", n=1)])
        with pytest.raises(ValueMismatchError, match="cannot be made of a str"):
            tester.updateMapState("pairs", "a", {"xy": (2,)})  # type: ignore[dict-item]
