"""What ProcessorTester has beyond TwsTester: our processors, TTL, restarts, sizes, schemas."""

from __future__ import annotations

import datetime as dt
import gc
import math
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import Row

from statebackend.api.context import ProcessorContext
from statebackend.api.processors import KeyedProcessor
from statebackend.errors import (
    NullKeyError,
    ParallelismError,
    ProcessorError,
    SettingError,
    UnsupportedQueryError,
    UsageError,
    ValueMismatchError,
    error_for_code,
)
from statebackend.operators.errors import spark_errors as sparkerrors
from statebackend.testing.tester import ProcessorTester
from tests.api.processors import (
    Alarm,
    Clock,
    Forgetting,
    Pairs,
    Refusing,
    Remembering,
    Reminder,
    RunningCount,
    RunningCountInPandas,
    Totals,
    Words,
)


def words(*some: str) -> list[Row]:
    return [Row(word=word) for word in some]


def amounts(*some: int) -> list[Row]:
    return [Row(amount=amount) for amount in some]


# --- processors of our own -----------------------------------------------------------------------


def test_a_keyed_processor_has_every_kind_of_state() -> None:
    with ProcessorTester(Totals()) as tester:
        assert tester.test("a", amounts(1, 5)) == [("a", 5, 3.0)]
        assert tester.test("b", amounts(7)) == [("b", 7, 7.0)]
        assert tester.test("a", amounts(3, 3)) == [("a", 5, 3.0)]
        assert tester.peekValueState("last", "a") == (3,)
        assert tester.peekListState("all", "a") == [(1,), (5,), (3,), (3,)]
        assert tester.peekMapState("times", "a") == {(1,): (1,), (3,): (2,), (5,): (1,)}
        assert tester.peekValueState("largest", "a") == (5,)
        assert tester.peekValueState("mean", "a") == (4, 12)
        assert tester.peekValueState("mean", "c") is None


def test_folded_states_can_be_set_by_their_accumulators() -> None:
    with ProcessorTester(Totals()) as tester:
        tester.updateValueState("largest", "a", (100,))
        tester.updateValueState("mean", "a", (1, 9))
        assert tester.test("a", amounts(3)) == [("a", 100, 6.0)]
        tester.deleteState("largest", "a")
        tester.deleteState("mean", "a")
        assert tester.test("a", amounts(3)) == [("a", 3, 3.0)]


def test_initial_rows_of_a_key_come_in_one_call() -> None:
    initial = [("a", Row(amount=9)), ("b", Row(amount=1)), ("a", Row(amount=3))]
    with ProcessorTester(Totals(), initialStateRow=initial) as tester:
        assert tester.peekListState("all", "a") == [(9,), (3,)]
        assert tester.test("a", amounts(3)) == [("a", 9, 5.0)]


def test_an_initial_state_that_nobody_takes_in_is_refused() -> None:
    with pytest.raises(UsageError, match="on_initial"):
        ProcessorTester(Reminder(), initialStateRow=[("a", Row(x=1))])


def test_timers_of_a_keyed_processor_fire_in_processing_time() -> None:
    with ProcessorTester(Reminder(), timeMode="ProcessingTime") as tester:
        assert tester.test("a", [Row(at=10), Row(at=20), Row(at=30), Row(at=-20)]) == []
        assert tester.peekTimers("a") == [10, 30]
        assert tester.peekTimers("b") == []
        assert tester.setProcessingTime(15) == [("a", 10, 15, -1, 2)]
        assert tester.setProcessingTime(35) == [("a", 30, 35, -1, 1)]
        assert tester.setProcessingTime(40) == []


def test_timers_of_a_keyed_processor_fire_in_event_time() -> None:
    how: dict[str, Any] = {"timeMode": "event", "eventTimeExtractor": lambda row: 100}
    with ProcessorTester(Reminder(), **how) as tester:
        tester.test("a", [Row(at=10)])
        tester.setProcessingTime(50)
        assert tester.peekTimers("a") == [10]
        assert tester.setWatermark(11) == [("a", 10, 50, 11, 1)]


def test_a_timer_in_the_past_fires_in_the_batch_that_set_it() -> None:
    with ProcessorTester(Alarm(), timeMode="ProcessingTime") as tester:
        tester.setProcessingTime(1000)
        found = tester.test("a", [Row(at=5)])
        assert found == [Row(timers=[5]), Row(key="a", at=5, rung=1)]
        assert tester.peekTimers("a") == []


def test_timers_fire_in_the_order_of_their_times_not_key_by_key() -> None:
    with ProcessorTester(Alarm(), timeMode="ProcessingTime") as tester:
        tester.test("a", [Row(at=10), Row(at=30), Row(at=50)])
        tester.test("b", [Row(at=20), Row(at=40)])
        found = tester.setProcessingTime(45)
        assert [(row.key, row.at) for row in found] == [("a", 10), ("b", 20), ("a", 30), ("b", 40)]


def test_a_timer_set_while_timers_fire_waits_for_the_next_batch() -> None:
    class Again(Reminder):
        def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Any:
            ctx.timers.register(at_ms + 1)
            return [(at_ms,)]

    with ProcessorTester(Again(), timeMode="ProcessingTime") as tester:
        tester.test("a", [Row(at=10)])
        assert tester.setProcessingTime(100) == [(10,)]
        assert tester.setProcessingTime(101) == [(11,)]
        assert tester.peekTimers("a") == [12]


def test_a_coprocessor_is_given_left_rows_first() -> None:
    with ProcessorTester(Pairs()) as tester:
        left, right = [Row(name="x"), Row(name="y")], [Row(score=1.5)]
        found = tester.testSides("k", left=left, right=right)
        assert found == [("k", "left", "x"), ("k", "left", "y"), ("k", 1.5, "x,y")]
        assert tester.peekListState("waiting", "k") == []
        assert tester.testSides("k", right=right) == [("k", 1.5, "")]
        assert tester.testSides("k", left=left[:1]) == [("k", "left", "x")]
        assert tester.testSides("k") == []


def test_a_coprocessor_takes_in_an_initial_state() -> None:
    with ProcessorTester(Pairs(), initialStateRow=[("k", Row(name="x"))]) as tester:
        assert tester.testSides("k", right=[Row(score=2)]) == [("k", 2, "x")]


def test_the_verb_must_fit_the_processor() -> None:
    with ProcessorTester(Pairs()) as tester, pytest.raises(UsageError, match="testSides"):
        tester.test("k", [])
    with ProcessorTester(Totals()) as tester:
        with pytest.raises(UsageError, match="one input"):
            tester.testSides("k")
        with pytest.raises(UsageError, match="rows, not DataFrames"):
            tester.testInPandas("k", pd.DataFrame({"amount": [1]}))


# --- time to live --------------------------------------------------------------------------------


def test_sparks_ttl_passes_when_time_is_moved() -> None:
    with ProcessorTester(Remembering(), timeMode="ProcessingTime") as tester:
        tester.setProcessingTime(1000)
        assert tester.test("a", words("x")) == [Row(count=1)]
        tester.setProcessingTime(1600)
        assert tester.test("a", words("y")) == [Row(count=2)]
        tester.setProcessingTime(2100)
        assert tester.peekValueState("count", "a") == (2,)
        assert tester.peekListState("words", "a") == [("y",)]
        assert tester.peekMapState("times", "a") == {("y",): (2,)}
        tester.setProcessingTime(2600)
        assert tester.peekValueState("count", "a") is None
        assert tester.peekListState("words", "a") == []
        assert tester.peekMapState("times", "a") == {}
        assert tester.test("a", words("z")) == [Row(count=1)]


@pytest.mark.parametrize("mode", ["None", "ProcessingTime", "EventTime"])
def test_our_ttl_passes_in_every_time_mode(mode: str) -> None:
    extractor = {"eventTimeExtractor": lambda row: 100} if mode == "EventTime" else {}
    with ProcessorTester(Forgetting(), timeMode=mode, **extractor) as tester:
        assert tester.test("a", amounts(9)) == [(9, 9)]
        tester.setProcessingTime(500)
        assert tester.test("a", amounts(5)) == [(9, 14)]
        tester.setProcessingTime(1400)
        assert tester.peekValueState("last", "a") == (5,)
        assert tester.peekListState("all", "a") == [(5,)]
        assert tester.peekMapState("times", "a") == {(5,): (1,)}
        assert tester.peekValueState("largest", "a") == (9,)
        tester.setProcessingTime(1500)
        for state in ("last", "largest", "sum"):
            assert tester.peekValueState(state, "a") is None
        assert tester.peekListState("all", "a") == []
        assert tester.peekMapState("times", "a") == {}
        assert tester.test("a", amounts(2)) == [(2, 2)]


def test_expired_state_leaves_the_store() -> None:
    with ProcessorTester(Forgetting()) as tester:
        for key in range(50):
            tester.test(key, amounts(key))
        assert stored(tester) > 250
        tester.setProcessingTime(100_000)
        for now_ms in range(100_001, 100_010):
            tester.setProcessingTime(now_ms)
        assert stored(tester) == 0


def test_a_peek_does_not_lengthen_a_life() -> None:
    with ProcessorTester(Forgetting()) as tester:
        tester.test("a", amounts(1))
        tester.setProcessingTime(999)
        assert tester.peekValueState("last", "a") == (1,)
        tester.setProcessingTime(1000)
        assert tester.peekValueState("last", "a") is None


def stored(tester: ProcessorTester) -> int:
    """Entries in all stores."""
    return sum(len(list(store.scan())) for store in tester._harness.stores)


# --- restart and rescale -------------------------------------------------------------------------


class Leaky(KeyedProcessor):
    """Keeps a count beside state, as nobody should."""

    def __init__(self) -> None:
        self.beside = 0

    def open(self, ctx: ProcessorContext) -> None:
        self.count = ctx.value_state("count", "n bigint")

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Iterator[tuple[Any, ...]]:
        self.beside += 1
        self.count.update(((self.count.get() or (0,))[0] + 1,))
        yield self.beside, self.count.get()[0]


def test_nothing_but_state_survives_a_restart() -> None:
    with ProcessorTester(Leaky()) as tester:
        before = tester.processor
        assert tester.test("a", words("x")) == [(1, 1)]
        assert tester.test("a", words("x")) == [(2, 2)]
        tester.restart()
        assert tester.processor is not before
        assert tester.test("a", words("x")) == [(1, 3)]


def test_timers_and_times_survive_a_restart() -> None:
    with ProcessorTester(Alarm(), timeMode="ProcessingTime") as tester:
        tester.test("a", [Row(at=1000)])
        tester.setProcessingTime(500)
        tester.restart()
        assert tester.peekTimers("a") == [1000]
        assert tester.setProcessingTime(1001) == [Row(key="a", at=1000, rung=1)]
        tester.restart()
        assert tester.setProcessingTime(2000) == []


def test_a_state_that_init_deletes_is_empty_after_a_restart() -> None:
    class Starting(RunningCount):
        def init(self, handle: Any) -> None:
            handle.deleteIfExists("count")
            super().init(handle)
            self.kept = handle.getValueState("kept", "n bigint")

    with ProcessorTester(Starting()) as tester:
        for _ in range(2):
            for key in "abc":
                tester.test(key, words("x"))
                tester.updateValueState("kept", key, (7,))
        assert tester.peekValueState("count", "a") == (2,)
        tester.restart()
        assert tester.test("a", words("x")) == [Row(key="a", count=1)]
        assert tester.peekValueState("count", "b") is None
        assert tester.peekValueState("kept", "b") == (7,)


@pytest.mark.parametrize("sizes", [[4], [3, 7], [5, 2, 1], [16, 1]])
def test_keys_keep_their_state_over_any_number_of_subtasks(sizes: list[int]) -> None:
    keys = [f"key-{n}" for n in range(40)]
    with ProcessorTester(Words()) as tester:
        for key in keys:
            tester.test(key, words(key, "x"))
        for step, size in enumerate(sizes, start=1):
            tester.rescale(size)
            for key in keys:
                assert tester.peekMapState("times", key) == {(key,): (1,), ("x",): (step,)}
                (row,) = tester.test(key, words("x"))
                assert row.words == sorted([key] + ["x"] * (step + 1))


def test_state_is_spread_over_the_subtasks() -> None:
    with ProcessorTester(RunningCount()) as tester:
        for key in range(60):
            tester.test(key, words("x"))
        tester.rescale(3)
        sizes = [len(list(store.scan())) for store in tester._harness.stores]
        assert sum(sizes) == 60
        assert min(sizes) > 5


def test_timers_and_expiry_are_rescaled_too() -> None:
    with ProcessorTester(Reminder(), timeMode="ProcessingTime") as tester:
        for key in range(30):
            tester.test(key, [Row(at=1000 + key)])
        tester.rescale(4)
        found = tester.setProcessingTime(5000)
        assert sorted(found) == [(key, 1000 + key, 5000, -1, 1) for key in range(30)]
    with ProcessorTester(Forgetting()) as tester:
        for key in range(30):
            tester.test(key, amounts(1))
        tester.rescale(4)
        for now_ms in range(100_000, 100_010):
            tester.setProcessingTime(now_ms)
        assert stored(tester) == 0


def test_a_failure_in_one_subtask_leaves_all_of_them_as_they_were() -> None:
    class Explosive(Reminder):
        def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Any:
            if key == (7,) and ctx.processing_time_ms < 200:
                raise OSError("boom")
            return [(*key, at_ms)]

    with ProcessorTester(Explosive(), timeMode="ProcessingTime") as tester:
        for key in range(20):
            tester.test(key, [Row(at=50)])
        tester.rescale(5)
        with pytest.raises(OSError, match="boom"):
            tester.setProcessingTime(100)
        assert sorted(tester.setProcessingTime(300)) == [(key, 50) for key in range(20)]


@pytest.mark.parametrize("size", [0, -1, 129])
def test_an_impossible_number_of_subtasks_is_refused(size: int) -> None:
    with ProcessorTester(RunningCount()) as tester:
        tester.test("a", words("x"))
        with pytest.raises(ParallelismError):
            tester.rescale(size)
        assert tester.peekValueState("count", "a") == (1,)


# --- failures ------------------------------------------------------------------------------------


def test_nothing_of_a_batch_counts_if_the_processor_raises() -> None:
    with ProcessorTester(Refusing()) as tester:
        tester.test("a", words("x"))
        with pytest.raises(LookupError, match="told to stop"):
            tester.test("a", words("y", "stop"))
        assert tester.peekValueState("count", "a") == (1,)


def test_a_stop_iteration_of_the_processors_is_no_end_of_anything() -> None:
    class Stopping(Leaky):
        def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
            next(iter(()))

    with ProcessorTester(Stopping()) as tester, pytest.raises(StopIteration):
        tester.test("a", words("x"))


def test_a_tester_whose_start_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unready(Leaky):
        def on_initial(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
            raise OSError("not today")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="not today"):
        ProcessorTester(Unready(), initialStateRow=[("a", Row(x=1))])
    assert not list(tmp_path.iterdir())


def test_a_processor_that_cannot_be_shipped_is_refused() -> None:
    processor = RunningCount()
    processor.rows = (row for row in ())  # type: ignore[attr-defined]
    with pytest.raises(ProcessorError, match="cannot be shipped"):
        ProcessorTester(processor)


def test_what_is_no_processor_is_refused() -> None:
    for wrong in (object(), Totals, None):
        with pytest.raises(UsageError):
            ProcessorTester(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how",
    [
        {"timeMode": "sometimes"},
        {"outputMode": "Backward"},
    ],
)
def test_arguments_that_mean_nothing_are_refused(how: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        ProcessorTester(RunningCount(), **how)


def test_errors_that_are_sparks_too_travel_as_ours_do() -> None:
    for name in sparkerrors.__all__:
        kind = getattr(sparkerrors, name)
        error = pickle.loads(pickle.dumps(kind("It happened.", todo="Do this.")))
        assert type(error) is kind
        assert str(error).startswith(f"[{kind.code}] ")
        assert str(error).endswith("It happened. Do this.")
        assert (error.what, error.todo) == ("It happened.", "Do this.")
        # By its code, an error of ours is found, and not one of a test.
        assert type(error_for_code(kind.code, "", "")).__module__ == "statebackend.errors"


def test_sparks_ttl_needs_processing_time_as_in_spark() -> None:
    with pytest.raises(UnsupportedQueryError, match="TTL"):
        ProcessorTester(Remembering())


def test_if_all_rows_are_late_the_processor_is_not_called() -> None:
    with ProcessorTester(
        Clock(), timeMode="EventTime", eventTimeExtractor=lambda row: row.at
    ) as tester:
        tester.setWatermark(10)
        assert tester.test("a", [Row(at=10), Row(at=3)]) == []
        assert tester.test("a", [Row(at=11)]) != []


# --- keys and rows -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        dt.date(2024, 2, 29),
        dt.datetime(2024, 2, 29, 12, 30, 1, 5),
        dt.timedelta(days=1, microseconds=7),
        Decimal("12.340"),
        -(2**63),
        "ä€𝄞",
        "",
        ("a", 1),
        (1, None, "x"),
    ],
)
def test_a_key_finds_its_state_again(key: Any) -> None:
    schema = "a bigint, b string, c string" if isinstance(key, tuple) and None in key else None
    with ProcessorTester(RunningCount(), keySchema=schema) as tester:
        first = key if isinstance(key, tuple) else (key,)
        assert tester.test(key, words("x")) == [Row(key=first[0], count=1)]
        tester.rescale(3)
        assert tester.test(key, words("x")) == [Row(key=first[0], count=2)]
        assert tester.peekValueState("count", key) == (2,)


def test_timers_know_a_key_of_several_columns() -> None:
    with ProcessorTester(Reminder(), timeMode="ProcessingTime") as tester:
        tester.test(("a", 1), [Row(at=5)])
        assert tester.setProcessingTime(6) == [("a", 1, 5, 6, -1, 1)]


def test_a_numpy_key_is_the_same_as_a_plain_one() -> None:
    with ProcessorTester(RunningCount()) as tester:
        tester.test(np.int64(7), words("x"))
        assert tester.peekValueState("count", 7) == (1,)


def test_keys_must_be_of_one_type() -> None:
    with ProcessorTester(RunningCount()) as tester:
        tester.test(1, words("x"))
        with pytest.raises(ValueMismatchError):
            tester.test("one", words("x"))
        with pytest.raises(NullKeyError):
            tester.test(None, words("x"))


def test_a_key_of_unknown_type_asks_for_a_schema() -> None:
    with (
        ProcessorTester(RunningCount()) as tester,
        pytest.raises(UsageError, match="keySchema") as caught,
    ):
        tester.test((1, None), words("x"))
    assert "None" in str(caught.value)


def test_rows_reach_the_processor_as_they_are() -> None:
    seen: list[Any] = []

    class Looking(Leaky):
        def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
            seen.extend(rows)

    given = [Row(odd=object()), {"no": "row"}]
    tester = ProcessorTester(Leaky())
    tester._harness.processors[0] = Looking()  # a closure would be pickled with its list
    tester.test("a", given)  # type: ignore[arg-type]
    tester.close()
    assert seen == given
    assert seen[0] is given[0]


def test_output_is_checked_and_converted_with_a_schema() -> None:
    with ProcessorTester(Totals(), outputSchema="k string, top bigint, mean double") as tester:
        (row,) = tester.test("a", amounts(4))
        assert row == Row(k="a", top=4, mean=4.0)
        assert row.top == 4
    with (
        ProcessorTester(Totals(), outputSchema="k string, top bigint") as tester,
        pytest.raises(ValueMismatchError, match="2 fields"),
    ):
        tester.test("a", amounts(4))


def test_output_that_does_not_fit_undoes_the_batch() -> None:
    with ProcessorTester(Totals(), outputSchema="k bigint, top bigint, mean double") as tester:
        with pytest.raises(ValueMismatchError, match="'k'"):
            tester.test("a", amounts(4))
        assert tester.peekListState("all", "a") == []


def test_frames_are_checked_with_a_schema_too() -> None:
    frame = pd.DataFrame({"word": ["x"]})
    with ProcessorTester(RunningCountInPandas(), outputSchema="count bigint, key string") as tester:
        found = tester.testInPandas("a", frame)
        assert found.columns.tolist() == ["count", "key"]
        assert found["count"].tolist() == [1]
    with (
        ProcessorTester(RunningCountInPandas(), outputSchema="count bigint, k string") as tester,
        pytest.raises(ValueMismatchError),
    ):
        tester.testInPandas("a", frame)


def test_an_output_mode_that_is_none_of_sparks_is_refused_with_those_that_are() -> None:
    with pytest.raises(SettingError, match="outputMode='Foo'") as caught:
        ProcessorTester(RunningCount(), outputMode="Foo")
    assert "outputMode append, update or complete" in caught.value.todo


def test_output_that_is_no_row_is_refused_without_a_schema() -> None:
    class Careless(Leaky):
        def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
            return [1, 2]

    with ProcessorTester(Careless()) as tester, pytest.raises(ValueMismatchError, match="no row"):
        tester.test("a", words("x"))


def test_a_value_that_does_not_fit_its_schema_is_refused() -> None:
    with ProcessorTester(RunningCount()) as tester, pytest.raises(ValueMismatchError):
        tester.updateValueState("count", "a", ("one",))


def test_counters_and_spies_of_a_test_see_every_call() -> None:
    rows_seen, opened = [], 0
    extra = 0

    def scaled(n: int) -> int:
        return n + extra

    class Spied(KeyedProcessor):
        def __init__(self) -> None:
            self.scale = lambda n: scaled(n)
            self.kept: list[int] = []
            self.module = math

        def open(self, ctx: Any) -> None:
            nonlocal opened
            opened += 1

        def process(self, key: Any, rows: Any, ctx: Any) -> Any:
            self.kept.append(1)
            for row in rows:
                rows_seen.append(row.n)
                yield (self.scale(row.n), len(self.kept))

    before = dict(vars(Spied))
    with ProcessorTester(Spied()) as tester:
        assert tester.test("a", [Row(n=1)]) == [(1, 1)]
        tester.restart()
        assert isinstance(tester.processor, Spied)
        extra = 100
        assert tester.test("a", [Row(n=2)]) == [(102, 1)], "a new object, the same code"
        tester.rescale(2)
        opened_before = opened
        tester.test("a", [Row(n=3)])
        assert opened == opened_before + 1
    assert rows_seen == [1, 2, 3]
    assert {k: v for k, v in vars(Spied).items() if k != "__slotnames__"} == before


# --- what it leaves ------------------------------------------------------------------------------


def test_the_directory_goes_with_the_tester() -> None:
    folders = []
    with ProcessorTester(RunningCount()) as tester:
        folders.append(Path(tester._harness.stores[0].path).parent)
        assert folders[0].is_dir()
    other = ProcessorTester(RunningCount())
    folders.append(Path(other._harness.stores[0].path).parent)
    del other
    gc.collect()
    assert not any(folder.exists() for folder in folders)


def test_a_closed_tester_is_refused() -> None:
    tester = ProcessorTester(RunningCount())
    tester.close()
    tester.close()
    with pytest.raises(UsageError, match="closed"):
        tester.test("a", words("x"))


_ALONE = """
import sys
from pyspark import SparkContext
from pyspark.sql import Row
from statebackend.testing.tester import ProcessorTester
from tests.api.processors import Words
with ProcessorTester(Words(), keySchema="key string") as tester:
    assert tester.test("a", [Row(word="x")]) == [Row(words=["x"])]
assert SparkContext._gateway is None
assert SparkContext._active_spark_context is None
assert not any(name.startswith("statebackend.spark") for name in sys.modules)
"""


def test_no_jvm_is_started_and_none_is_needed() -> None:
    root = Path(__file__).parents[2]
    nowhere = {"JAVA_HOME": "/nowhere", "SPARK_HOME": "/nowhere", "PATH": "/nowhere"}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", _ALONE],
        cwd=root,
        env={**nowhere, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
