"""Processors of batches, in each form Spark takes; workers get them by value (see conftest)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

from statebackend import ArrowProcessor, KeyedProcessor

if TYPE_CHECKING:
    from collections.abc import Iterator


class Batched(StatefulProcessor):
    """Counts a key's rows on top of its initial state; some timers are due, and one is not."""

    def __init__(self, mode: str, early: bool = False) -> None:
        self.mode, self.early = mode, early

    def init(self, handle: Any) -> None:
        self.handle = handle
        if self.early:
            handle.registerTimer(1)
        ttl_ms = 86_400_000 if self.mode == "processing" else None
        self.n = handle.getValueState("n", "n bigint", ttl_ms)
        self.starts = handle.getListState("starts", "n bigint")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.starts.appendValue((initialState.start,))
        self.set_timers(timerValues)

    def set_timers(self, times: Any) -> None:
        if self.mode == "processing":
            now = times.getCurrentProcessingTimeInMs()
            assert now > 1_600_000_000_000
            for at in (now - 1, now, now + 1_000_000):
                self.handle.registerTimer(at)
        if self.mode == "event":
            for at in (-5, -1, 0, 1_767_225_600_000):
                self.handle.registerTimer(at)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        self.set_timers(timerValues)
        count = (self.n.get() or (0,))[0] + sum(1 for _ in rows)
        self.n.update((count,))
        starts = sorted(n for (n,) in self.starts.get())
        watermark = timerValues.getCurrentWatermarkInMs()
        yield Row(k=key[0], what=f"rows {key!r} {starts} {watermark}", n=self.n.get()[0])

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        at, left = expiredTimerInfo.getExpiryTimeInMs(), len(list(self.handle.listTimers()))
        if self.mode == "processing":
            at -= timerValues.getCurrentProcessingTimeInMs()
        what = f"timer {at} {left} {timerValues.getCurrentWatermarkInMs()} {self.n.get()}"
        yield Row(k=key[0], what=what, n=0)


class InFrames(StatefulProcessor):
    """Comes before a processor of rows among the bases: its input and output are frames then."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        import pandas as pd

        whole = [row for frame in rows for row in frame.itertuples()]
        for row in super().handleInputRows(key, iter(whole), timerValues):
            yield pd.DataFrame([row.asDict()])

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Any]:
        import pandas as pd

        for row in super().handleExpiredTimer(key, timerValues, expiredTimerInfo):
            yield pd.DataFrame([row.asDict()])


class BatchedInFrames(InFrames, Batched):
    """The same for frames."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        for start in initialState["start"]:
            self.starts.appendValue((int(start),))
        self.set_timers(timerValues)


class BatchedOfOurs(KeyedProcessor):
    def open(self, ctx: Any) -> None:
        self.n = ctx.value_state("n", "n bigint")

    def process(self, key: Any, rows: Any, ctx: Any) -> Any:
        assert self.n.get() is None
        self.n.update((len(list(rows)),))
        return [(key[0], "rows", self.n.get()[0])]


class BatchedInColumns(ArrowProcessor):
    def open(self, ctx: Any) -> None:
        self.n = ctx.value_state("n", "n bigint")

    def process(self, batch: Any, ctx: Any) -> Any:
        import numpy as np

        counts = np.diff(ctx.keys.starts)
        self.n.put(ctx.keys, [pa.array(counts)])
        return {"k": ctx.keys.columns.column("k"), "n": self.n.get(ctx.keys).column("n")}


class Withdrawing(StatefulProcessor):
    """As those of Spark's tests: asks for a state, and deletes it at once."""

    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n bigint")
        self.brief = handle.getListState("brief", "n bigint")
        handle.deleteIfExists("brief")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        n = (self.n.get() or (0,))[0] + len(list(rows))
        self.n.update((n,))
        yield Row(k=key[0], n=n)

    def close(self) -> None:
        pass


class Lettered(StatefulProcessor):
    """Gives a map's key as Spark's tests do: one character, and no tuple."""

    def init(self, handle: Any) -> None:
        self.map = handle.getMapState("map", "letter string", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.map.updateValue("abc"[row.id % 3], (row.id,))
        assert self.map.containsKey("z") is False
        assert self.map.getValue("z") is None
        self.map.removeKey("b")
        yield Row(k=key[0], keys=repr(sorted(self.map.keys())))

    def close(self) -> None:
        pass


class Chunks(StatefulProcessor):
    """Counts the frames of a key."""

    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n bigint")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.n.update((int(initialState["start"].iloc[0]),))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        import pandas as pd

        yield pd.DataFrame({"k": [key[0]], "n": [len(list(rows))]})

    def close(self) -> None:
        pass


class Soon(StatefulProcessor):
    """Sets a timer for a moment after its batch."""

    def init(self, handle: Any) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1)
        yield Row(k=key[0], what="rows")

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        yield Row(k=key[0], what="timer")

    def close(self) -> None:
        pass


class NotNull(StatefulProcessor):
    """A value state of a schema that is given."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema

    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", self.schema)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        yield Row(k=key[0], n=len(list(rows)))

    def close(self) -> None:
        pass
