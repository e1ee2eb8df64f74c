"""The sides of `python -m bench kafka` by name, and a side's figures out of all rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

__all__ = ["EXACTLY_ONCE", "NAMES", "SIDES", "medians"]

NAMES = {
    "ours": "this, continuous",
    "spark-realtime": "Spark, real-time mode",
    "spark": "Spark, micro-batches",
    "flink": "Flink",
    "quix": "Quix Streams",
}
SIDES = tuple(NAMES)
EXACTLY_ONCE = ("ours", "flink", "quix")
_FIELDS = {"p50_ms": "rate", "p99_ms": "rate", "rows_per_s": "most"}


def medians(rounds: Sequence[dict[str, Any]], table: str, side: str) -> dict[str, float | None]:
    """Of all rounds; None where a side never came to its end."""
    of = [one[table][side] for one in rounds if side in one[table]]
    values: dict[str, float | None] = {}
    for name, kind in _FIELDS.items():
        found = [run[kind][name] for run in of if name in run[kind]]
        values[name] = statistics.median(found) if found else None
    return values
