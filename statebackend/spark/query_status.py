"""How a query with micro-batches stands, as Spark tells it."""

from __future__ import annotations

import json
import math
from datetime import datetime
from itertools import pairwise
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from statebackend.runtime.driver.job_status import JobStatus
from statebackend.spark.query_failures import told_in

__all__ = ["status_of"]

_BATCHES: Final = 3  # in a row that are slower than their input
_FASTER: Final = 1.1
_LINE_LIMIT: Final = 500


def status_of(query: StreamingQuery | None) -> JobStatus:
    """What Spark says of a query; nothing, where Spark does not answer, or it is not started."""
    if query is None:
        return JobStatus()
    try:
        if not query.isActive:
            return JobStatus(failure=_failure(query))
        status = query.status
        available = bool(status["isDataAvailable"] or status["isTriggerActive"])
        return JobStatus(input=available, behind=_behind(_newest(query)))
    except (Py4JError, PySparkException, OSError):
        return JobStatus()


def _failure(query: StreamingQuery) -> str:
    error = query.exception()
    if error is None:
        return ""
    told = told_in(str(error))
    if told is not None:
        return f"[{told.code}] {told.what}"
    return str(error).strip().partition("\n")[0][:_LINE_LIMIT]


def _newest(query: StreamingQuery) -> list[dict[str, Any]]:
    """The progress of the newest batches: of all that Spark keeps, PySpark would make objects."""
    kept: Any = query._jsq.recentProgress()
    newest = [kept[place] for place in range(max(0, len(kept) - _BATCHES), len(kept))]
    return [json.loads(one.json()) for one in newest]


def _behind(batches: list[dict[str, Any]]) -> str:
    """Whether rows came faster than they were processed, batch after batch."""
    rates = [
        (_rate(one, "inputRowsPerSecond"), _rate(one, "processedRowsPerSecond")) for one in batches
    ]
    if len(rates) < _BATCHES or not all(came > _FASTER * done > 0 for came, done in rates):
        return ""
    # Spark takes the rows for those since its last look, so after a short look they seem many.
    if any(_pauses(before, after) for before, after in pairwise(batches)):
        return ""
    came, done = rates[-1]
    took_s = batches[-1].get("batchDuration", 0) / 1000
    return (
        f"{came:,.0f} rows come in a second and {done:,.0f} are processed; the newest batch took "
        f"{took_s:.1f} s"
    )


def _pauses(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether a query waited for rows between two batches: then it keeps up with them."""
    if "timestamp" not in before or "timestamp" not in after:
        return False
    began, next_began = (datetime.fromisoformat(one["timestamp"]) for one in (before, after))
    took_ms: float = before.get("batchDuration", 0)
    return (next_began - began).total_seconds() * 1000 > _FASTER * took_ms


def _rate(batch: dict[str, Any], name: str) -> float:
    value = batch.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
