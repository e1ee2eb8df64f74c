"""What users do wrong with timers by the column, and how they are told where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from statebackend.api.arrow import ArrowContext, ArrowProcessor
from statebackend.errors import ProcessorError, UnsupportedQueryError, UsageError
from tests.support.ids import stable
from tests.vector.trials import Alarms, alarms, timers


def test_without_a_time_mode_there_are_no_timers() -> None:
    with (
        alarms(timeMode="None") as tester,
        pytest.raises(UnsupportedQueryError, match="no time mode"),
    ):
        tester.testBatch(timers([("a", 1)]))


def test_a_processor_that_sets_timers_must_have_on_timers() -> None:
    class Forgets(ArrowProcessor):
        def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
            ctx.timers.register(ctx.keys, -5)

    with alarms(Forgets()) as tester, pytest.raises(UsageError, match="no on_timers"):
        tester.testBatch(timers([("a", 1)]))


@pytest.mark.parametrize(
    "at_ms",
    [
        1.5,
        "5",
        None,
        True,
        2**63,
        2**70,
        -(2**63) - 1,
        [1.0],
        [True],
        [1, 2],
        [],
        [2**63],
        [[1]],
        np.array([1.0]),
        np.array([2**63], np.uint64),
        pa.array([None], pa.int64()),
        pa.array([1.0]),
        pa.array([5], pa.timestamp("us")),
        object(),
    ],
    ids=stable,
)
def test_times_that_are_none_are_refused_with_the_users_line(at_ms: Any) -> None:
    class Bad(Alarms):
        def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
            ctx.timers.register(ctx.keys, at_ms)

    said = r"test_timer_mistakes\.py"
    with alarms(Bad()) as tester, pytest.raises(UsageError, match=said) as caught:
        tester.testBatch(timers([("a", 1)]))
    assert not isinstance(caught.value, ProcessorError)
    assert "whole milliseconds" in str(caught.value)


@pytest.mark.parametrize(
    "at_ms",
    [
        7,
        np.int32(7),
        np.array(7),
        [7],
        np.array([7], np.uint64),
        pa.array([7], pa.int8()),
        pa.chunked_array([[7]]),
        pa.array([0, 7], pa.int64()).slice(1),
    ],
    ids=stable,
)
def test_times_may_be_one_or_one_for_each_key(at_ms: Any) -> None:
    class Sets(Alarms):
        def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
            ctx.timers.register(ctx.keys, at_ms)

    with alarms(Sets()) as tester:
        tester.testBatch(timers([("a", 1)]))
        assert tester.peekTimers("a") == [7]


@pytest.mark.parametrize("verb", ["register", "delete", "list"])
def test_timers_are_asked_with_keys(verb: str) -> None:
    class Bad(Alarms):
        def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
            getattr(ctx.timers, verb)(batch, *([1] if verb != "list" else []))

    with (
        alarms(Bad()) as tester,
        pytest.raises(UsageError, match=r"RecordBatch.*test_timer_mistakes\.py"),
    ):
        tester.testBatch(timers([("a", 1)]))
