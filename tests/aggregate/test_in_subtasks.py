"""Aggregations over real stores, in several subtasks, started again and split anew on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from statebackend.errors import StateMismatchError
from statebackend.operators.aggregate.aggregation_plan import AggregatePlan, plan_aggregate
from statebackend.operators.aggregate.functions import (
    approx_count_distinct,
    count_distinct,
    first,
    last,
    top_k,
)
from statebackend.operators.aggregate.processor_for_plan import processor_for
from statebackend.operators.aggregate.windows import session, sliding
from statebackend.testing.processor_tester import ProcessorTester
from tests.aggregate.engine import Row, batch_of, rows_of

SCHEMA = T.StructType(
    [
        T.StructField("user", T.StringType()),
        T.StructField("at", T.TimestampType()),
        T.StructField("page", T.StringType()),
    ]
)
ASKED: dict[str, Any] = {
    "n": "count",
    "pages": count_distinct("page"),
    "about": approx_count_distinct("page"),
    "top": top_k("page", 2),
    "least": ("min", "page"),
    "latest": last("page", by="at"),
    "first": first("page"),
}


def subject_of(plan: AggregatePlan) -> ProcessorTester:
    return ProcessorTester(
        processor_for(plan),
        timeMode="None" if plan.window is None else "EventTime",
        keySchema="user string",
        outputSchema=plan.output_schema,
        eventTime=plan.event_time,
    )


def seen(rows: Sequence[tuple[str, int, str | None]]) -> pa.RecordBatch:
    """(user, second, page)."""
    named = [{"user": u, "at": s * 1_000_000, "page": p} for u, s, p in rows]
    return batch_of(SCHEMA, named)


def found(table: pa.Table) -> list[Row]:
    rows = [row for batch in table.to_batches() for row in rows_of(batch)]
    return sorted(rows, key=lambda row: (row["user"], row.get("window_start", 0)))


def test_totals_go_on_after_a_restart_at_any_parallelism() -> None:
    plan = plan_aggregate(SCHEMA, keys="user", aggregations=ASKED)
    with subject_of(plan) as subject:
        subject.testBatch(seen([("ann", 1, "a"), ("bob", 2, "b"), ("ann", 3, "b")]))
        subject.rescale(3)
        subject.testBatch(seen([("ann", 4, "b"), ("cy", 1, None)]))
        subject.restart()
        output = found(subject.testBatch(seen([("ann", 0, "c"), ("cy", 9, "z")])))
    ann, cy = output
    assert ann == {
        "user": "ann",
        "n": 4,
        "pages": 3,
        "about": 3,
        "top": [{"value": "b", "count": 2}, {"value": "a", "count": 1}],
        "least": "a",
        "latest": "b",
        "first": "a",
    }
    assert (cy["n"], cy["pages"], cy["first"], cy["latest"]) == (2, 1, None, "z")


def test_windows_close_after_a_restart_at_another_parallelism() -> None:
    plan = plan_aggregate(
        SCHEMA,
        keys="user",
        aggregations=ASKED,
        window=sliding("10 seconds", "5 seconds"),
        event_time="at",
        emit="closed",
    )
    with subject_of(plan) as subject:
        assert found(subject.testBatch(seen([("ann", 7, "a"), ("bob", 8, "b")]))) == []
        subject.rescale(4)
        assert found(subject.setWatermark(9_999)) == []
        closed = found(subject.setWatermark(10_000))
        assert [(row["user"], row["window_start"], row["n"]) for row in closed] == [
            ("ann", 0, 1),
            ("bob", 0, 1),
        ]
        subject.testBatch(seen([("ann", 12, "c"), ("ann", 3, "late")]))
        both, later, bob = found(subject.setWatermark(60_000))
    assert (both["n"], both["top"][0]["value"], later["n"], bob["n"]) == (2, "a", 1, 1)


def test_sessions_meet_across_batches_and_take_what_they_counted_along() -> None:
    plan = plan_aggregate(
        SCHEMA, keys="user", aggregations=ASKED, window=session("10 seconds"), event_time="at"
    )
    with subject_of(plan) as subject:
        subject.testBatch(seen([("ann", 10, "a"), ("ann", 10, "b"), ("ann", 30, "c")]))
        subject.rescale(2)
        (met,) = found(subject.testBatch(seen([("ann", 20, "c")])))
        assert (met["window_start"], met["window_end"]) == (10_000_000, 40_000_000)
        assert (met["n"], met["pages"], met["about"]) == (4, 3, 3)
        assert met["top"] == [{"value": "c", "count": 2}, {"value": "a", "count": 1}]
        (earlier,) = found(subject.testBatch(seen([("ann", 1, "b"), ("ann", 1, "b")])))
        assert (earlier["window_start"], earlier["n"], earlier["pages"]) == (1_000_000, 6, 3)
        assert earlier["top"] == [{"value": "b", "count": 3}, {"value": "c", "count": 2}]
        assert found(subject.setWatermark(40_000)) == []
        (new,) = found(subject.testBatch(seen([("ann", 41, "d")])))
        assert (new["window_start"], new["n"], new["pages"]) == (41_000_000, 1, 1)


def test_a_top_k_that_would_need_values_it_has_not_kept_is_refused() -> None:
    before, after = (
        plan_aggregate(SCHEMA, keys="user", aggregations={"top": top_k("page", k)}) for k in (2, 5)
    )
    with subject_of(before) as subject:
        subject.testBatch(seen([("ann", 1, "z")]))
        with pytest.raises(StateMismatchError, match=r"top_k\(page, 5\)"):
            subject.restart(processor_for(after))
