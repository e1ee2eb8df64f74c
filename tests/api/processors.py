"""Processors that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from statebackend.api.context import ProcessorContext
from statebackend.api.processors import CoProcessor, KeyedProcessor
from statebackend.state.ttl_cells import TTL

# --- Spark's -------------------------------------------------------------------------------------


class RunningCount(StatefulProcessor):
    """Rows per key, on top of an initial count."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.count = handle.getValueState("count", "n bigint")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.count.update((initialState.start,))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        count = self.count.get()[0] if self.count.exists() else 0
        count += sum(1 for _ in rows)
        self.count.update((count,))
        yield Row(key=key[0], count=count)


class RunningCountInPandas(RunningCount):
    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.count.update((int(initialState["start"].iloc[0]),))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        count = self.count.get()[0] if self.count.exists() else 0
        count += sum(len(frame) for frame in rows)
        self.count.update((count,))
        yield pd.DataFrame({"key": [key[0]], "count": [count]})


class Words(StatefulProcessor):
    """The words of a key in order, and how often each came."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.words = handle.getListState("words", "word string")
        self.times = handle.getMapState("times", "word string", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.words.appendValue((row.word,))
            before = self.times.getValue((row.word,))
            self.times.updateValue((row.word,), (1 if before is None else before[0] + 1,))
        yield Row(words=sorted(word for (word,) in self.words.get()))


class Alarm(StatefulProcessor):
    """Sets a timer for each row's ``at``; tells the times it sees."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.rung = handle.getValueState("rung", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.at < 0:
                self.handle.deleteTimer(-row.at)
            else:
                self.handle.registerTimer(row.at)
        yield Row(timers=sorted(self.handle.listTimers()))

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        rung = (self.rung.get() or (0,))[0] + 1
        self.rung.update((rung,))
        yield Row(key=key[0], at=expiredTimerInfo.getExpiryTimeInMs(), rung=rung)


class AlarmInPandas(Alarm):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for frame in rows:
            for at in frame["at"].tolist():
                self.handle.registerTimer(at)
        return iter([])

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Any]:
        yield pd.DataFrame({"key": [key[0]], "at": [expiredTimerInfo.getExpiryTimeInMs()]})


class Clock(StatefulProcessor):
    """Tells what time it is."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        rows = list(rows)
        yield Row(
            rows=len(rows),
            now=timerValues.getCurrentProcessingTimeInMs(),
            watermark=timerValues.getCurrentWatermarkInMs(),
        )


class Refusing(RunningCount):
    """Counts, but takes no row that says stop."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        rows = list(rows)
        yield from super().handleInputRows(key, iter(rows), timerValues)
        if any(row.word == "stop" for row in rows):
            raise LookupError("told to stop")


class Remembering(StatefulProcessor):
    """A count with a TTL of a second."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.count = handle.getValueState("count", "n bigint", 1000)
        self.words = handle.getListState("words", "word string", 1000)
        self.times = handle.getMapState("times", "word string", "n bigint", 1000)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        count = (self.count.get() or (0,))[0]
        for row in rows:
            count += 1
            self.words.appendValue((row.word,))
            self.times.updateValue((row.word,), (count,))
        self.count.update((count,))
        yield Row(count=count)


METHODS = (
    "value.clear",
    "list.clear",
    "map.clear",
    "fill",
    "value.exists",
    "value.get",
    "list.get",
    "map.keys",
    "map.values",
    "map.containsKey",
    "map.exists",
    "map.getValue",
)


class Methods(StatefulProcessor):
    """Calls the methods of states by name."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("value", "v string")
        self.list = handle.getListState("list", "int")
        self.map = handle.getMapState("map", "string", "int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            kind, _, method = row.call.partition(".")
            yield Row(found=self._fill() if kind == "fill" else self._call(kind, method))

    def _fill(self) -> None:
        self.value.update(("v",))
        self.list.put([(1,)])
        self.list.appendValue((2,))
        self.list.appendList([(3,)])
        for name, number in (("x", 1), ("y", 2), ("z", 3), ("x", 9)):
            self.map.updateValue((name,), (number,))
        self.map.removeKey(("y",))

    def _call(self, kind: str, method: str) -> Any:
        state = getattr(self, kind)
        if (kind, method) == ("map", "exists"):
            self.map.clear()
        if method in ("containsKey", "getValue"):
            return getattr(state, method)(("x",))
        found = getattr(state, method)()
        if method in ("get", "keys", "values") and kind != "value":
            return [one for (one,) in found]
        return found


# --- ours ----------------------------------------------------------------------------------------


class Totals(KeyedProcessor):
    """Every kind of state."""

    def open(self, ctx: ProcessorContext) -> None:
        self.last = ctx.value_state("last", "amount bigint")
        self.all = ctx.list_state("all", "amount bigint")
        self.times = ctx.map_state("times", "amount bigint", "n bigint")
        self.largest = ctx.reducing_state("largest", "amount bigint", max)
        self.mean = ctx.aggregating_state(
            "mean",
            "n bigint, total bigint",
            create=lambda: (0, 0),
            add=lambda so_far, amount: (so_far[0] + 1, so_far[1] + amount),
            result=lambda so_far: so_far[1] / so_far[0],
        )

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Iterator[tuple[Any, ...]]:
        for row in rows:
            self.last.update((row.amount,))
            self.all.append((row.amount,))
            (before,) = self.times.get_value((row.amount,)) or (0,)
            self.times.update_value((row.amount,), (before + 1,))
            self.largest.add((row.amount,))
            self.mean.add(row.amount)
        yield (*key, self.largest.get()[0], self.mean.get())

    def on_initial(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        for row in rows:
            self.all.append((row.amount,))
            self.largest.add((row.amount,))
            self.mean.add(row.amount)


class Reminder(KeyedProcessor):
    """A timer for each row; says when it was told, and when it rang."""

    def open(self, ctx: ProcessorContext) -> None:
        self.told = ctx.value_state("told", "epoch bigint")

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        self.told.update((ctx.epoch,))
        for row in rows:
            if row.at < 0:
                ctx.timers.delete(-row.at)
            else:
                ctx.timers.register(row.at)

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> list[tuple[Any, ...]]:
        assert self.told.exists()
        return [(*key, at_ms, ctx.processing_time_ms, ctx.watermark_ms, len(ctx.timers.list()))]


class Forgetting(KeyedProcessor):
    """Every kind of state with a TTL of a second."""

    def open(self, ctx: ProcessorContext) -> None:
        ttl = TTL(1000)
        self.last = ctx.value_state("last", "amount bigint", ttl=ttl)
        self.all = ctx.list_state("all", "amount bigint", ttl=ttl)
        self.times = ctx.map_state("times", "amount bigint", "n bigint", ttl=ttl)
        self.largest = ctx.reducing_state("largest", "amount bigint", max, ttl=ttl)
        self.sum = ctx.aggregating_state(
            "sum", "total bigint", create=lambda: (0,), add=lambda a, b: (a[0] + b,), ttl=ttl
        )

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Iterator[tuple[Any, ...]]:
        for row in rows:
            self.last.update((row.amount,))
            self.all.append((row.amount,))
            self.times.update_value((row.amount,), (1,))
            self.largest.add((row.amount,))
            self.sum.add(row.amount)
        yield self.largest.get()[0], self.sum.get()[0]


class Pairs(CoProcessor):
    """What came left and waits for a right, in one state."""

    def open(self, ctx: ProcessorContext) -> None:
        self.waiting = ctx.list_state("waiting", "name string")

    def process_left(self, key: Any, rows: Any, ctx: ProcessorContext) -> Iterator[Any]:
        for row in rows:
            self.waiting.append((row.name,))
            yield (*key, "left", row.name)

    def process_right(self, key: Any, rows: Any, ctx: ProcessorContext) -> Iterator[Any]:
        waiting = [name for (name,) in self.waiting.get()]
        for row in rows:
            yield (*key, row.score, ",".join(waiting))
        self.waiting.clear()

    def on_initial(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        self.waiting.extend([(row.name,) for row in rows])
