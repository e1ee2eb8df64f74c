"""The processors of the comparison: one class for each work, which both sides run unmodified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row

from bench.works import ENTRIES, START_MS

__all__ = ["OUTPUT_SCHEMA", "PROCESSORS", "Alarm", "Counter", "PandasCounter", "Tally", "summed"]

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


class PandasCounter(StatefulProcessor):
    """The same, for transformWithStateInPandas."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "n bigint")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        count = sum(len(frame) for frame in rows)
        old = self._count.get()
        if old is not None:
            count += old[0]
        self._count.update((count,))
        yield pd.DataFrame({"k": [key[0]], "n": [count]})

    def close(self) -> None:
        pass


def summed(key: Any, frames: Any, state: GroupState) -> Iterator[pd.DataFrame]:
    """The sum of a column by key, for applyInPandasWithState."""
    total = sum(int(frame["v"].sum()) for frame in frames)
    if state.exists:
        total += state.get[0]
    state.update((total,))
    yield pd.DataFrame({"k": [key[0]], "n": [total]})


class Tally(StatefulProcessor):
    """How often each of a key's entries was seen; a negative value fills all of them with 0."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._seen = handle.getMapState("seen", "e bigint", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.v < 0:
                for number in range(ENTRIES):
                    self._seen.updateValue((number,), (0,))
                yield Row(k=key[0], n=0)
            else:
                entry = (row.v % ENTRIES,)
                old = self._seen.getValue(entry)
                count = 1 if old is None else old[0] + 1
                self._seen.updateValue(entry, (count,))
                yield Row(k=key[0], n=count)

    def close(self) -> None:
        pass


class Alarm(StatefulProcessor):
    """A timer at each row's own event time, which the next batch's watermark makes due."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self._handle.registerTimer(START_MS + row.v)
        return iter(())

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        yield Row(k=key[0], n=expiredTimerInfo.getExpiryTimeInMs() - START_MS)

    def close(self) -> None:
        pass


PROCESSORS: dict[str, type[StatefulProcessor]] = {
    "counter": Counter,
    "pandas": PandasCounter,
    "map": Tally,
    "timers": Alarm,
}
