"""Vectorised processors as users write them: batches, keys, output, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend.api.arrow import ArrowContext, ArrowProcessor
from statebackend.api.arrowcalls import record_arrow_states
from statebackend.api.tester import ProcessorTester
from statebackend.errors import (
    KeyContextError,
    NullKeyError,
    ProcessorError,
    SettingError,
    StateMismatchError,
    UsageError,
    ValueMismatchError,
)
from statebackend.state.ttl import TTL
from statebackend.vector.keys import Keys

KEY, OUT = "k string", "k string, total double"
Body = Callable[["Scripted", pa.RecordBatch, ArrowContext], Any]


class Totals(ArrowProcessor):
    """Sums amounts by key."""

    def __init__(self, ttl: TTL | None = None) -> None:
        self.ttl = ttl

    def open(self, ctx: ArrowContext) -> None:
        self.total = ctx.value_state("total", "amount double", ttl=self.ttl)

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> pa.RecordBatch:
        old = self.total.get(ctx.keys).column("amount").fill_null(0.0)
        added = np.add.reduceat(batch.column("amount").to_numpy(), ctx.keys.starts[:-1])
        total = pc.add(old, pa.array(added))
        self.total.put(ctx.keys, [total])
        return pa.RecordBatch.from_arrays([*ctx.keys.columns.columns, total], ["k", "total"])

    def on_initial(self, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        self.total.put(ctx.keys, batch.take(ctx.keys.starts[:-1]).select(["amount"]))


class Scripted(ArrowProcessor):
    """Has states of each kind; what it does with them is given."""

    def __init__(self, body: Body) -> None:
        self.body = body

    def open(self, ctx: ArrowContext) -> None:
        self.value = ctx.value_state("value", "x bigint, s string")
        self.map = ctx.map_state("map", "m string", "x bigint")
        self.list = ctx.list_state("list", "x bigint")
        self.ttl_list = ctx.list_state("ttl_list", "x bigint", ttl=TTL(1000))

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> Any:
        return self.body(self, batch, ctx)


def trial(processor: ArrowProcessor | Body, **options: Any) -> ProcessorTester:
    made = processor if isinstance(processor, ArrowProcessor) else Scripted(processor)
    return ProcessorTester(made, **{"keySchema": KEY, "outputSchema": OUT, **options})


def amounts(*rows: tuple[str, float]) -> pa.Table:
    return pa.table({"amount": [amount for _, amount in rows], "k": [k for k, _ in rows]})


def pairs(table: pa.Table) -> dict[str, float]:
    return {row["k"]: row["total"] for row in table.to_pylist()}


SOME = amounts(("b", 1.0), ("a", 2.0), ("b", 4.0))


# --- the tester -----------------------------------------------------------------------------------


def test_state_goes_on_from_batch_to_batch_over_restarts_and_subtasks() -> None:
    with trial(Totals()) as under_test:
        assert pairs(under_test.testBatch(SOME)) == {"a": 2.0, "b": 5.0}
        under_test.restart()
        assert pairs(under_test.testBatch(SOME.slice(0, 1))) == {"b": 6.0}
        under_test.rescale(4)
        assert pairs(under_test.testBatch(SOME.to_batches()[0])) == {"a": 4.0, "b": 11.0}
        under_test.rescale(1)
        under_test.restart(Totals())
        assert under_test.peekValueState("total", "b") == (11.0,)
        under_test.updateValueState("total", "b", (1.0,))
        under_test.deleteState("total", "a")
        found = under_test.testBatch(SOME)
        assert pairs(found) == {"a": 2.0, "b": 6.0}
        assert found.schema == pa.schema([("k", pa.string()), ("total", pa.float64())])
        assert under_test.testBatch(SOME.slice(0, 0)).num_rows == 0
        assert under_test.setProcessingTime(5).schema == found.schema


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(-9, 9)), max_size=12),
        max_size=5,
    ),
    st.integers(1, 4),
)
def test_sums_are_those_of_plain_python(
    batches: list[list[tuple[str, int]]], parallelism: int
) -> None:
    truth: dict[str, float] = {}
    with trial(Totals(), maxParallelism=16) as under_test:
        under_test.rescale(parallelism)
        for rows in batches:
            for key, amount in rows:
                truth[key] = truth.get(key, 0.0) + amount
            batch = amounts(*rows) if rows else SOME.slice(0, 0)
            touched = {key for key, _ in rows}
            got = under_test.testBatch(batch.cast(pa.schema([("amount", pa.float64()), KEY_FIELD])))
            assert pairs(got) == {key: truth[key] for key in touched}
            under_test.restart()


KEY_FIELD = ("k", pa.string())


def test_an_initial_state_is_taken_in() -> None:
    first = amounts(("a", 10.0), ("z", 1.0))
    with trial(Totals(), initialStateBatch=first) as under_test:
        assert under_test.peekValueState("total", "z") == (1.0,)
        assert pairs(under_test.testBatch(SOME)) == {"a": 12.0, "b": 5.0}


def test_time_to_live_passes_when_time_is_moved() -> None:
    with trial(Totals(TTL(1000))) as under_test:
        under_test.testBatch(SOME)
        under_test.setProcessingTime(999)
        assert under_test.peekValueState("total", "a") == (2.0,)
        under_test.setProcessingTime(1000)
        assert under_test.peekValueState("total", "a") is None
        assert pairs(under_test.testBatch(SOME)) == {"a": 2.0, "b": 5.0}


def test_if_the_processor_raises_nothing_of_the_batch_counts() -> None:
    def fails(self: Scripted, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        self.value.put(ctx.keys, {"x": [1] * len(ctx.keys), "s": ["y"] * len(ctx.keys)})
        if "a" in batch.column("k").to_pylist():
            raise KeyError("the processor's own")

    with trial(fails) as under_test:
        under_test.testBatch(SOME.slice(0, 1))
        under_test.deleteState("value", "b")
        with pytest.raises(KeyError, match="own"):
            under_test.testBatch(SOME)
        assert under_test.peekValueState("value", "b") is None


def test_rows_that_are_late_do_not_come_to_the_processor() -> None:
    def rows(*seconds: int | None) -> pa.Table:
        at = pa.array([None if s is None else s * 10**6 for s in seconds], pa.timestamp("us", "UTC"))
        return pa.table({"k": ["a"] * len(seconds), "amount": [1.0] * len(seconds), "at": at})

    options = {"timeMode": "EventTime", "eventTime": "at", "initialStateBatch": rows(-5)}
    with trial(Totals(), **options) as under_test:
        assert under_test.peekValueState("total", "a") == (1.0,)
        assert pairs(under_test.testBatch(rows(1, 2, 3))) == {"a": 4.0}
        under_test.setWatermark(2000)
        assert pairs(under_test.testBatch(rows(1, 2))) == {}
        assert pairs(under_test.testBatch(rows(1, 2, 3, None))) == {"a": 6.0}
        with pytest.raises(UsageError, match="no timestamp column"):
            under_test.testBatch(rows(3).drop_columns(["at"]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keySchema": None}, "keySchema is missing"),
        ({"outputSchema": None}, "outputSchema is missing"),
        ({"timeMode": "EventTime"}, "eventTime=None"),
        ({"eventTime": "at"}, "eventTime='at'"),
        ({"timeMode": "EventTime", "eventTimeExtractor": len}, "another kind"),
        ({"initialStateRow": []}, "another kind"),
    ],
)
def test_what_the_tester_needs_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        trial(Totals(), **options)


def test_the_verbs_of_other_processors_are_refused() -> None:
    with trial(Totals()) as under_test:
        for verb in (
            lambda: under_test.test("a", []),
            lambda: under_test.testSides("a"),
            lambda: under_test.testInPandas("a", None),
        ):
            with pytest.raises(UsageError, match=r"testBatch\(batch\)"):
                verb()


@pytest.mark.parametrize(
    ("batch", "error", "said"),
    [
        (pa.table({"amount": [1.0]}), ValueMismatchError, r"the key is \(k\)"),
        (pa.table({"k": [1], "amount": [1.0]}), ValueMismatchError, "'k' is string"),
        (pa.table({"k": ["a", None], "amount": [1.0, 2.0]}), NullKeyError, "null key"),
        (pa.table([["a"], ["b"]], ["k", "k"]), ValueMismatchError, "no name twice"),
        (pa.table({"k": ["a"], "u": pa.array([1], pa.uint16())}), ValueMismatchError, "type"),
        ([{"k": "a"}], ValueMismatchError, "given a list"),
    ],
)
def test_batches_that_are_none_are_refused(batch: Any, error: type[Exception], said: str) -> None:
    with trial(Totals()) as under_test, pytest.raises(error, match=said):
        under_test.testBatch(batch)


# --- the keys of a batch --------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["", "a", "ab", "b", "ccc"]), min_size=1, max_size=20))
def test_rows_stand_by_key_and_keep_their_order(names: list[str]) -> None:
    seen = []

    def looks(self: Scripted, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        keys = ctx.keys
        assert keys is ctx.keys
        rows = batch.column("k").to_pylist(), batch.column("row").to_pylist()
        distinct = keys.columns.column("k").to_pylist()
        assert len(keys) == len(distinct) == len(set(distinct))
        assert keys.starts.dtype == keys.index.dtype == np.int64
        assert keys.starts[0] == 0
        assert keys.starts[-1] == batch.num_rows == len(keys.index)
        for which, name in enumerate(distinct):
            start, end = keys.starts[which], keys.starts[which + 1]
            assert start < end
            assert rows[0][start:end] == [name] * (end - start)
            assert rows[1][start:end] == [n for n, other in enumerate(names) if other == name]
            assert (keys.index[start:end] == which).all()
        seen.append(distinct)

    table = pa.table({"k": names, "row": range(len(names))})
    with trial(looks) as under_test:
        under_test.testBatch(table)
    assert sorted(name for some in seen for name in some) == sorted(set(names))


def with_keys(check: Callable[[Keys], None]) -> None:
    """Calls `check` with the keys a, b, c, d of a batch."""

    def body(self: Scripted, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        check(ctx.keys)

    with trial(body, maxParallelism=1) as under_test:
        under_test.testBatch(amounts(("c", 1), ("a", 1), ("d", 1), ("b", 1)))


def names_of(keys: Keys) -> list[str]:
    found: list[str] = keys.columns.column("k").to_pylist()
    # Bytes and columns are of the same keys.
    assert [full[7:].decode() for full in keys.full.to_pylist()] == found
    assert len(keys) == len(found)
    return found


@pytest.mark.parametrize(
    ("which", "found", "ascending"),
    [
        (np.array([True, False, True, False]), "ac", True),
        ([True, False, True, False], "ac", True),
        (pa.array([True, None, True, False]), "ac", True),
        (pa.chunked_array([[True, False], [True, True]]), "acd", True),
        (pa.array([False, True, False, False, True]).slice(1), "ad", True),
        (np.zeros(4, bool), "", True),
        ([], "", True),
        (np.zeros(0, np.int64), "", True),
        ([0, 1, 3], "abd", True),
        ([3, 0], "da", False),
        ([1, 1], "bb", False),
        (np.array([2], np.uint8), "c", True),
        (np.array([0, 2], np.uint64), "ac", True),
        (pa.array([3, 3, 0], pa.int32()), "dda", False),
        (pa.array([9, 1, 2]).slice(1), "bc", True),
        (range(4), "abcd", True),
    ],
    ids=repr,
)
def test_keys_are_taken_by_mask_or_by_place(which: Any, found: str, ascending: bool) -> None:
    def check(keys: Keys) -> None:
        taken = keys.take(which)
        assert names_of(taken) == list(found)
        assert taken.ascending is ascending
        assert names_of(taken.take(np.arange(len(taken))[::-1])) == list(found)[::-1]
        with pytest.raises(UsageError, match="not a batch's own"):
            _ = taken.starts
        with pytest.raises(UsageError, match="not a batch's own"):
            _ = taken.index
        assert "Keys(4 of (k))" in repr(keys)

    with_keys(check)


@pytest.mark.parametrize(
    "which",
    [
        3,
        None,
        "a",
        [0.5],
        [True],
        np.zeros(0, bool),
        np.zeros(5, bool),
        np.zeros((4, 1), bool),
        np.array([[0]]),
        [4],
        [-1],
        pa.array([0, None]),
        pa.array([0.0]),
        pa.array(["a"]),
        np.array([2**63], np.uint64),
        [None],
        [[0], [1, 2]],
        object(),
    ],
    ids=repr,
)
def test_what_selects_no_keys_is_refused_with_the_users_line(which: Any) -> None:
    def check(keys: Keys) -> None:
        keys.take(which)

    with pytest.raises(UsageError, match=r"test_processors\.py") as caught:
        with_keys(check)
    assert not isinstance(caught.value, ProcessorError), caught.value


# --- what is refused ------------------------------------------------------------------------------

BATCHES: list[tuple[str, Body]] = [
    ("was given a RecordBatch as its keys", lambda p, b, c: p.value.get(b)),
    ("was given a RecordBatch as its keys", lambda p, b, c: p.value.exists(c.keys.columns)),
    ("was given a ndarray as its keys", lambda p, b, c: p.map.items(c.keys.starts)),
    ("was given a list as its keys", lambda p, b, c: p.list.get([1])),
    ("was given a list as its keys", lambda p, b, c: p.list.delete([1])),
    ("was given a NoneType as its keys", lambda p, b, c: p.map.clear(None)),
    ("was given a list as its keys", lambda p, b, c: p.ttl_list.get(["a"])),
    ("was given a list as its keys", lambda p, b, c: p.ttl_list.append([1], [[1]])),
    ("was given a list as its keys", lambda p, b, c: p.list.put([1], [0], [[1]])),
    ("was given a list as its keys", lambda p, b, c: p.ttl_list.put([1], [0], [[1]])),
    ("'x' is bigint", lambda p, b, c: p.value.put(c.keys, [["a", "b"], ["a", "b"]])),
    ("'s' is string", lambda p, b, c: p.value.put(c.keys, {"x": [1, 2], "s": [1, 2]})),
    ("'x' is bigint", lambda p, b, c: p.value.put(c.keys, [np.array([1.5, 2]), ["", ""]])),
    (r"given 3 rows for 2 keys", lambda p, b, c: p.value.put(c.keys, [[1, 2, 3], [""] * 3])),
    (r"different lengths", lambda p, b, c: p.value.put(c.keys, [[1, 2, 3], ["", ""]])),
    (r"the fields \(x, s\)", lambda p, b, c: p.value.put(c.keys, [[1, 2]])),
    (r"the fields \(x, s\)", lambda p, b, c: p.value.put(c.keys, {"x": [1, 2], "y": [1, 2]})),
    (r"the fields \(x, s\)", lambda p, b, c: p.value.put(c.keys, b.select(["k"]))),
    ("was given a int", lambda p, b, c: p.value.put(c.keys, 5)),
    ("was given a NoneType", lambda p, b, c: p.value.put(c.keys, None)),
    ("was given a str", lambda p, b, c: p.value.put(c.keys, "ab")),
    ("'list'", lambda p, b, c: p.list.append(c.keys, [5])),
    ("'list'", lambda p, b, c: p.list.append(c.keys, [None])),
    ("'list'", lambda p, b, c: p.list.append(c.keys, ["ab"])),
    ("'list'", lambda p, b, c: p.list.append(c.keys, [pa.scalar(1)])),
    ("'list'", lambda p, b, c: p.list.append(c.keys, [[1, "a"]])),
    ("'list'", lambda p, b, c: p.list.append(c.keys, [np.zeros((2, 2))])),
    ("'list'", lambda p, b, c: p.list.append(c.keys, [[object(), object()]])),
    ("'list'", lambda p, b, c: p.list.append(c.keys, {"x": {1, 2}})),
    ("given 1 rows for 2", lambda p, b, c: p.list.append(c.keys, [[1]])),
    ("given 1 rows for 2", lambda p, b, c: p.ttl_list.append(c.keys, [[1]])),
    ("Place 2 was taken", lambda p, b, c: p.list.put(c.keys, [2], [[1]])),
    ("given 1 rows for 2", lambda p, b, c: p.list.put(c.keys, [1, 0], [[1]])),
    ("map keys of state 'map'", lambda p, b, c: p.map.get(c.keys, [["a"]])),
    ("'m' is string", lambda p, b, c: p.map.get(c.keys, [[1, 2]])),
    ("map keys of state 'map'", lambda p, b, c: p.map.put(c.keys, [["a"]], [[1, 2]])),
    ("given 1 rows", lambda p, b, c: p.map.put(c.keys, [["a", "b"]], [[1]])),
    ("map keys of state 'map'", lambda p, b, c: p.map.delete(c.keys, None)),
    ("outside open", lambda p, b, c: c.value_state("more", "x int")),
]


@pytest.mark.parametrize(("said", "body"), BATCHES, ids=range(len(BATCHES)))
def test_what_states_are_wrongly_given_is_refused_with_the_users_line(
    said: str, body: Body
) -> None:
    def wrong(self: Scripted, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        body(self, batch, ctx)

    with trial(wrong) as under_test, pytest.raises(UsageError, match=said) as caught:
        under_test.testBatch(SOME)
    assert not isinstance(caught.value, ProcessorError), caught.value
    assert "test_processors.py" in str(caught.value)


OUTPUTS: list[tuple[str, Any]] = [
    ("gave a int", lambda: [5]),
    ("gave a dict", lambda: [{"k": ["a"], "total": [1.0]}]),
    ("gave a tuple", lambda: [("a", 1.0)]),
    ("gave a int", lambda: 5),
    ("gave a float", lambda: iter([1.0])),
    (r"the fields \(k, total\)", lambda: pa.table({"k": ["a"]})),
    ("'total' is double", lambda: pa.table({"k": ["a"], "total": ["x"]})),
    ("'k' is string", lambda: pa.table({"x": [1.0], "y": ["a"]})),
    ("'k' is string", lambda: pa.record_batch({"k": [1.5], "total": [1]})),
]


@pytest.mark.parametrize(("said", "make"), OUTPUTS, ids=range(len(OUTPUTS)))
def test_output_of_another_kind_is_refused_with_where_it_comes_from(said: str, make: Any) -> None:
    with (
        trial(lambda p, b, c: make()) as under_test,
        pytest.raises(ValueMismatchError, match=said) as caught,
    ):
        under_test.testBatch(SOME)
    assert "test_processors.py" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda: None, 0),
        (lambda: [], 0),
        (lambda: iter(()), 0),
        (lambda: pa.table({"k": ["a"], "total": [1]}), 1),
        (lambda: pa.table({"total": [1.0], "k": ["a"]}), 1),
        (lambda: pa.table({"x": ["a"], "y": [1.0]}), 1),
        (lambda: [pa.record_batch({"k": ["a", "b"], "total": pa.nulls(2)})] * 2, 4),
        (lambda: (pa.table({"k": [c], "total": [1.0]}) for c in "abc"), 3),
        (lambda: [pa.table({"k": pa.array([], pa.string()), "total": pa.nulls(0)})], 0),
        (lambda: pa.table({"k": pa.array(["a"]).dictionary_encode(), "total": [1.0]}), 1),
    ],
)
def test_output_is_taken_in_any_iterable_and_made_to_fit(make: Any, rows: int) -> None:
    with trial(lambda p, b, c: make()) as under_test:
        found = under_test.testBatch(SOME)
        assert found.schema == pa.schema([("k", pa.string()), ("total", pa.float64())])
        assert found.num_rows == rows


def test_output_may_be_yielded() -> None:
    class Yields(Totals):
        def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> Iterator[pa.RecordBatch]:
            made = super().process(batch, ctx)
            yield made.slice(0, 1)
            assert len(ctx.keys) == made.num_rows
            yield made.slice(1)

    with trial(Yields(), maxParallelism=1) as under_test:
        assert pairs(under_test.testBatch(SOME)) == {"a": 2.0, "b": 5.0}


def test_the_keys_of_a_batch_are_there_while_it_is_processed_only() -> None:
    class Keeps(Totals):
        def open(self, ctx: ArrowContext) -> None:
            super().open(ctx)
            self.ctx = ctx

        def close(self) -> None:
            _ = self.ctx.keys

    class Opens(Totals):
        def open(self, ctx: ArrowContext) -> None:
            _ = ctx.keys

    with pytest.raises(UsageError, match="outside process"):
        trial(Opens())
    with pytest.raises(UsageError, match="outside process"):
        trial(Keeps())

    class Later(Keeps):
        def __init__(self) -> None:
            super().__init__()
            self.closes = False

        def close(self) -> None:
            if self.closes:
                super().close()

    with trial(Later()) as under_test:
        under_test.testBatch(SOME)
        under_test.processor.closes = True
        with pytest.raises(UsageError, match="outside process"):
            under_test.testBatch(SOME)


def test_mistakes_in_the_processor_itself_are_refused_on_the_driver() -> None:
    class Short(Totals):
        def process(self, batch: pa.RecordBatch) -> None:  # type: ignore[override]
            pass

    class Twice(Totals):
        def open(self, ctx: ArrowContext) -> None:
            ctx.value_state("x", "x int")
            ctx.value_state("x", "x int")

    class Reads(Totals):
        def open(self, ctx: ArrowContext) -> None:
            ctx.value_state("x", "x int").get(None)  # type: ignore[arg-type]

    for processor, error, said in (
        (Totals, UsageError, "the class Totals"),
        (object(), UsageError, "a object as its processor"),
        (Short(), ProcessorError, "cannot be called with 2 arguments"),
        (Twice(), StateMismatchError, "declared twice"),
        (Reads(), KeyContextError, "belongs to no key"),
    ):
        with pytest.raises(error, match=said):
            record_arrow_states(processor, "u")


def test_an_initial_state_needs_on_initial_which_gives_nothing() -> None:
    class Returns(Totals):
        def on_initial(self, batch: pa.RecordBatch, ctx: ArrowContext) -> Any:
            return batch

    with pytest.raises(UsageError, match="no on_initial"):
        trial(lambda p, b, c: None, initialStateBatch=SOME)
    with pytest.raises(ValueMismatchError, match="returned something"):
        trial(Returns(), initialStateBatch=SOME)


# --- what is imported -----------------------------------------------------------------------------

FRESH = """
import sys
import numpy as np, pyarrow as pa, pyarrow.compute as pc
from pyspark.sql import types as T
from statebackend.api.arrow import ArrowProcessor
from statebackend.api.arrowcalls import record_arrow_states
from statebackend.hashing import key_groups
from statebackend.ops.declared import EpochTimes
from statebackend.ops.epoch import OperatorPlan, StatefulEpoch
from statebackend.ops.grouping import group_part
from statebackend.ops.staging import Part
from statebackend.state.table import MemoryBase, StateTable

class Totals(ArrowProcessor):
    def open(self, ctx):
        self.total = ctx.value_state("total", "amount double")

    def process(self, batch, ctx):
        old = self.total.get(ctx.keys).column("amount")
        added = np.add.reduceat(np.frombuffer(batch.column("v").buffers()[1])[
            batch.column("v").offset:][:len(batch)], ctx.keys.starts[:-1])
        odd = ctx.keys.take(np.arange(len(ctx.keys)) % 2 == 1)
        assert not pc.any(self.total.exists(odd)).as_py() or ctx.epoch
        self.total.put(ctx.keys, [added])
        self.total.delete(odd)
        if ctx.epoch == 3:
            ctx.timers.register(ctx.keys, np.arange(len(ctx.keys)))
            ctx.timers.delete(odd, 5)
        return pa.RecordBatch.from_arrays([*ctx.keys.columns.columns, old], ["k", "total"])

    def on_timers(self, keys, at_ms, ctx):
        self.total.put(keys, [at_ms.astype(np.float64)])
        return pa.RecordBatch.from_arrays([keys.columns.column(0), pa.nulls(len(keys), pa.float64())], ["k", "total"])

S = T.StructType().add("k", "long").add("v", "double")
O = T.StructType().add("k", "long").add("total", "double")
declared = record_arrow_states(Totals(), "u", time_mode="processing").declared
plan = OperatorPlan(uid="u", flavour="arrow", input_schema=S, key_positions=(0,), output_schema=O,
                    states=declared, time_mode="processing")
base = MemoryBase()
for epoch in range(5):
    n = 40_000
    k = np.arange(n, dtype=np.int64)[::-1] % (n // 2)
    columns = [pa.Array.from_buffers(pa.int64(), n, [None, pa.py_buffer(np.ascontiguousarray(k))]),
               pa.Array.from_buffers(pa.float64(), n, [None, pa.py_buffer(np.ones(n))])]
    table = StateTable(base)
    groups = group_part(Part(pa.table(columns, ["k", "v"]), key_groups(columns[:1], 128)),
                        plan.key_codec.encode_arrow, (0,))
    run = StatefulEpoch(plan, Totals(), table=table, state_ids={"total": 1},
                        times=EpochTimes(epoch=epoch, processing_time_ms=99), key_groups=range(128))
    # Two batches of keys: of each the first hundred timers are due, but for one that was deleted.
    rows = sum(len(batch) for batch in run.run(iter([groups])))
    assert rows == n // 2 + (198 if epoch == 3 else 0), rows
    frozen = table.freeze(epoch)
    assert frozen.columns is not None
    base.apply(*frozen.sorted())
found = [name for name in ("pandas", "scipy", "sklearn") if name in sys.modules]
assert not found, found
print("fine")
"""


def test_an_epoch_of_numbers_imports_no_pandas() -> None:
    run = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout.strip() == "fine", run.stderr[-2000:]
