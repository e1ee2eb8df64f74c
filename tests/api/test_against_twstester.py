"""Random runs: pyspark's tester and ours see the same calls and say the same, restarts or not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row

from statebackend.testing.processor_tester import ProcessorTester
from tests.api.processors import Alarm

TwsTester = pytest.importorskip(
    "pyspark.sql.streaming.tws_tester", reason="PySpark 4.1 has no TwsTester"
).TwsTester

KEYS = st.integers(0, 5)
STEPS = st.one_of(
    # Times from now on: what has passed already is where the two differ on purpose.
    st.tuples(st.just("test"), KEYS, st.lists(st.integers(1, 40), min_size=1, max_size=4)),
    st.tuples(st.just("drop"), KEYS, st.integers(1, 40)),
    st.tuples(st.just("move"), st.integers(1, 25)),
    st.tuples(st.just("set"), KEYS, st.integers(0, 9)),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("restart")),
    st.tuples(st.just("rescale"), st.integers(1, 5)),
)


def applied(tester: Any, step: tuple[Any, ...], now_ms: int) -> list[Any]:
    """What a step gave, in an order of its own."""
    match step:
        case ("test", key, later):
            return [tester.test(key, [Row(at=now_ms + ms) for ms in later])]
        case ("drop", key, ms):
            return [tester.test(key, [Row(at=-(now_ms + ms))])]
        case ("move", _):
            return sorted(map(tuple, tester.setProcessingTime(now_ms)))
        case ("set", key, count):
            tester.updateValueState("rung", key, (count,))
        case ("delete", key):
            tester.deleteState("rung", key)
    return [tester.peekValueState("rung", key) for key in range(6)]


@settings(max_examples=15)
@given(st.lists(STEPS, max_size=25))
def test_the_same_calls_give_the_same(steps: list[tuple[Any, ...]]) -> None:
    theirs = TwsTester(Alarm(), timeMode="ProcessingTime")
    with ProcessorTester(Alarm(), timeMode="ProcessingTime") as ours:
        now_ms = 0
        for step in steps:
            if step[0] == "restart":
                ours.restart()
            elif step[0] == "rescale":
                ours.rescale(step[1])
            now_ms += step[1] if step[0] == "move" else 0
            wanted, found = applied(theirs, step, now_ms), applied(ours, step, now_ms)
            if step[0] == "move":  # several timers of one key: theirs goes key by key
                assert [row[:2] for row in found] == [row[:2] for row in wanted]
            else:
                assert found == wanted
