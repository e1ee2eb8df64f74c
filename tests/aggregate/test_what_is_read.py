"""Values of windows and sessions are read where they are needed, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import types as T

from statebackend.operators.aggregate.aggregation_plan import plan_aggregate
from statebackend.operators.aggregate.functions import count_distinct, top_k
from statebackend.operators.aggregate.windows import Window, session, tumbling
from tests.aggregate.engine import Job

SECOND_US = 1_000_000
MANY = 2_000
VALUE_BYTES = 100
SCHEMA = T.StructType().add("k", "long").add("at", "timestamp").add("v", "string")
ASKED = {"d": count_distinct("v"), "t": top_k("v", 2)}


def job_of(window: Window) -> Job:
    made = plan_aggregate(
        SCHEMA, keys="k", aggregations=ASKED, window=window, event_time="at", emit="closed"
    )
    return Job(made)


def rows(at_s: int, count: int) -> list[dict[str, Any]]:
    return [
        {"k": 1, "at": at_s * SECOND_US, "v": f"{at_s}-{i}".ljust(VALUE_BYTES)}
        for i in range(count)
    ]


@pytest.mark.parametrize("window", [tumbling("10 seconds"), session("10 seconds")])
def test_what_closes_is_read_without_what_its_keys_have_open(window: Window) -> None:
    job = job_of(window)
    job.run([*rows(0, 3), *rows(100, MANY)])
    (closed,) = job.run([], watermark_ms=50_000)
    assert closed["d"] == 3
    assert job.read_bytes < 20 * VALUE_BYTES
    (closed,) = job.run([], watermark_ms=500_000)
    assert closed["d"] == MANY
    assert job.read_bytes > MANY * VALUE_BYTES, "what is read is counted"
    assert job.entries() == 0


def test_a_session_that_stays_where_it_is_is_not_read() -> None:
    job = job_of(session("10 seconds"))
    job.run(rows(0, MANY))
    job.run(rows(5, 1))
    assert job.read_bytes < 20 * VALUE_BYTES
    (closed,) = job.run([], watermark_ms=500_000)
    assert closed["d"] == MANY + 1


def test_of_a_keys_sessions_only_those_that_move_are_read() -> None:
    job = job_of(session("10 seconds"))
    job.run([*rows(100, MANY), *rows(50, 3), *rows(65, 4)])
    # It joins those at 50 and 65: the latter moves.
    job.run(rows(58, 1))
    assert job.read_bytes < 40 * VALUE_BYTES
    job.run([])
    closed = {row["window_start"]: row["d"] for row in job.run([], watermark_ms=500_000)}
    assert closed == {50 * SECOND_US: 8, 100 * SECOND_US: MANY}
    assert job.entries() == 0
