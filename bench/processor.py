"""The counter of the comparison: one class, which both sides run unmodified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row

__all__ = ["OUTPUT_SCHEMA", "Counter"]

OUTPUT_SCHEMA = "k bigint, n bigint"


class Counter(StatefulProcessor):
    """How often each key was seen."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        count = sum(1 for _ in rows)
        old = self._count.get()
        if old is not None:
            count += old[0]
        self._count.update((count,))
        yield Row(k=key[0], n=count)

    def close(self) -> None:
        pass
