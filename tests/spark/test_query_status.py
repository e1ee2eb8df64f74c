"""Whether a query is behind its input, by what Spark says of its newest batches."""

from __future__ import annotations

from typing import Any

import pytest

from statebackend.spark.query_status import _behind


def batch(second: int, took_ms: int, came: float, done: float) -> dict[str, Any]:
    return {
        "timestamp": f"2026-11-28T08:00:{second:02}.000Z",
        "batchDuration": took_ms,
        "inputRowsPerSecond": came,
        "processedRowsPerSecond": done,
    }


def test_batches_that_follow_each_other_and_grow_are_behind() -> None:
    said = _behind([batch(0, 1000, 90, 50), batch(1, 2000, 90, 50), batch(3, 4000, 90, 50)])
    assert said == "90 rows come in a second and 50 are processed; the newest batch took 4.0 s"


@pytest.mark.parametrize("rows_a_second", [4546.0, 1e9])
def test_a_query_that_waits_for_rows_is_not_behind_whatever_rate_spark_names(
    rows_a_second: float,
) -> None:
    assert not _behind([batch(second, 300, rows_a_second, 155) for second in range(3)])
