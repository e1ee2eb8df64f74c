"""Vectorised processors as users write and test them: epochs, times, keys of every kind."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend.api.arrow import ArrowContext, ArrowProcessor
from statebackend.errors import (
    LocalCopyError,
    NullKeyError,
    SettingError,
    UsageError,
    ValueMismatchError,
)
from statebackend.operators.declared_states import parse_schema
from statebackend.operators.vector.key_vector import Keys
from statebackend.state.table import StateTable
from statebackend.state.ttl_cells import TTL
from statebackend.testing.processor_tester import ProcessorTester
from tests.schema.strategies import to_arrow
from tests.vector.sides import KEYS, python_rows
from tests.vector.trials import SOME, Scripted, Totals, amounts, pairs, trial


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
        at = pa.array(
            [None if s is None else s * 10**6 for s in seconds], pa.timestamp("us", "UTC")
        )
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


class Counts(ArrowProcessor):
    """Counts rows by key, in state and (as many ms before 1000) in a timer."""

    def open(self, ctx: ArrowContext) -> None:
        self.count = ctx.value_state("count", "n bigint")

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> pa.RecordBatch:
        old = self.count.get(ctx.keys).column(0).fill_null(0)
        count = pc.add(old, pa.array(np.diff(ctx.keys.starts)))
        self.count.put(ctx.keys, count)
        ctx.timers.register(ctx.keys, 1000 - count.to_numpy())
        return self._said(ctx.keys, count)

    def on_timers(self, keys: Keys, at_ms: Any, ctx: ArrowContext) -> pa.RecordBatch:
        return self._said(keys, pa.array(at_ms))

    def _said(self, keys: Keys, number: pa.Array) -> pa.RecordBatch:
        columns = [*keys.columns.columns, number]
        return pa.RecordBatch.from_arrays(columns, [*keys.columns.schema.names, "n"])


@pytest.mark.parametrize("ddl", sorted(KEYS))
def test_keys_of_every_kind_come_back_from_state_and_timers(ddl: str) -> None:
    schema = parse_schema(ddl, "the key")
    rows = KEYS[ddl] * 2 + KEYS[ddl][:1]
    columns = to_arrow(schema, rows)
    batch = pa.table([*columns, pa.nulls(len(rows))], [*schema.names, "void"])
    counted = {repr(row): 3 if row == rows[0] else 2 for row in rows}
    counted |= {repr(rows[0]): 3}

    def found(table: pa.Table) -> dict[str, int]:
        keys = python_rows(schema, table.select(schema.names).combine_chunks())
        return {repr(key): n for key, n in zip(keys, table.column("n").to_pylist(), strict=True)}

    names = [repr(row) for row in python_rows(schema, pa.table(columns, schema.names))]
    shown = dict(zip(map(repr, rows), names, strict=True))
    expected = {shown[key]: n for key, n in counted.items()}
    options = {"keySchema": ddl, "outputSchema": ddl + ", n bigint", "timeMode": "ProcessingTime"}
    with ProcessorTester(Counts(), **options) as under_test:
        assert found(under_test.testBatch(batch)) == expected
        under_test.rescale(3)
        twice = {key: 2 * n for key, n in expected.items()}
        assert found(under_test.testBatch(batch.slice(0))) == twice
        under_test.restart()
        first = found(under_test.setProcessingTime(1000 - 4))
        assert first == {key: 1000 - n for key, n in twice.items()}
        second = found(under_test.setProcessingTime(1000))
        assert second == {key: 1000 - n for key, n in expected.items()}
        assert under_test.peekValueState("count", rows[0]) == (6,)


def test_zeros_are_one_key_and_nans_are_one() -> None:
    nan = float("nan")
    options = {"keySchema": "k double", "outputSchema": "k double, n bigint"}
    with ProcessorTester(Counts(), timeMode="ProcessingTime", **options) as under_test:
        got = under_test.testBatch(pa.table({"k": [0.0, nan, -0.0, -nan, 1.0]}))
        assert sorted(got.column("n").to_pylist()) == [1, 2, 2]
        got = under_test.testBatch(pa.table({"k": [-0.0, -nan]}))
        assert got.column("n").to_pylist() == [3, 3]
        assert under_test.peekValueState("count", 0.0) == (3,)
        fired = under_test.setProcessingTime(2000).column("k").to_pylist()
        assert sorted(map(repr, fired)) == ["0.0", "0.0", "1.0", "nan", "nan"]


def test_entries_too_short_for_their_time_are_damage() -> None:
    with trial(Totals(TTL(1000))) as under_test:
        under_test.testBatch(SOME)
        store = under_test._operator.stores[0]
        key = next(key for key, value in store.scan() if value)
        under_test._operator.apply(0, [key], [b"short"])
        with pytest.raises(LocalCopyError, match="shorter"):
            under_test.testBatch(SOME)


FRESH = """
import sys
import numpy as np, pyarrow as pa, pyarrow.compute as pc
from pyspark.sql import types as T
from statebackend.api.arrow import ArrowProcessor
from statebackend.operators.arrow_calls import record_arrow_states
from statebackend.key_hashing import key_groups
from statebackend.operators.declared_states import EpochTimes
from statebackend.operators.epoch_phases import StatefulEpoch
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.input.group_by_key import group_part
from statebackend.operators.input.staging import Part
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
            numbers = np.frombuffer(ctx.keys.columns.column(0).buffers()[1], np.int64)
            small = ctx.keys.take(numbers < 100)
            ctx.timers.register(small, np.full(len(small), 5))
            ctx.timers.delete(ctx.keys.take(numbers < 1), 5)
        return pa.RecordBatch.from_arrays([*ctx.keys.columns.columns, old], ["k", "total"])

    def on_timers(self, keys, at_ms, ctx):
        self.total.put(keys, [at_ms.astype(np.float64)])
        columns = [keys.columns.column(0), pa.nulls(len(keys), pa.float64())]
        return pa.RecordBatch.from_arrays(columns, ["k", "total"])

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
    rows = sum(len(batch) for batch in run.run(iter([groups])))
    assert rows == n // 2 + (99 if epoch == 3 else 0), rows
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


@pytest.mark.parametrize("ttl", [None, TTL(1000)])
def test_the_state_of_an_epoch_goes_with_it(
    ttl: TTL | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its count of references: whole columns hardly ever make Python look for rings."""

    class Totals(ArrowProcessor):
        def open(self, ctx: ArrowContext) -> None:
            ctx.value_state("total", "v double", ttl=ttl)

        def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
            return None

    alive: weakref.WeakSet[StateTable] = weakref.WeakSet()
    really = StateTable.__init__

    def made(self: StateTable, *args: Any, **more: Any) -> None:
        really(self, *args, **more)
        alive.add(self)

    monkeypatch.setattr(StateTable, "__init__", made)
    mode = "None" if ttl is None else "ProcessingTime"
    gc.collect()
    gc.disable()
    try:
        with ProcessorTester(
            Totals(), keySchema="k string", outputSchema="k string", timeMode=mode
        ) as tester:
            for _ in range(5):
                tester.testBatch(pa.record_batch({"k": ["a", "b"], "x": [1.0, 2.0]}))
                tester.restart()
            assert len(alive) <= 2
    finally:
        gc.enable()
