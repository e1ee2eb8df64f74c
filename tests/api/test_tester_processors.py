"""ProcessorTester with processors of our own: kinds of state, timers, two inputs, times to live."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from pyspark.sql import Row

from statebackend.api.context import ProcessorContext
from statebackend.errors import UsageError
from statebackend.testing.processor_tester import ProcessorTester
from tests.api.processors import Alarm, Forgetting, Pairs, Remembering, Reminder, Totals
from tests.api.tester_inputs import amounts, stored, words

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
