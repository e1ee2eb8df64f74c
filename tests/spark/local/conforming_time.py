"""As :mod:`tests.spark.local.conforming`: processors with timers, watermarks and a TTL."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

from tests.spark.local.batched_processors import InFrames
from tests.spark.local.conforming import frame_shown, shown

if TYPE_CHECKING:
    from collections.abc import Iterator


class Timers(StatefulProcessor):
    """Registers (+) and deletes (-) the timers that its rows name, and tells all it sees of time.

    ``seq`` counts the calls of a key, so their order shows.
    """

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.calls = handle.getValueState("calls", "n bigint")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.handle.registerTimer(initialState.at_ms)
        self.tell(key, "")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        ids = []
        for row in rows:
            ids.append(row.id)
            for op in (row.ops or "").split():
                action = self.handle.registerTimer if op[0] == "+" else self.handle.deleteTimer
                action(int(op[1:]))
        yield self.tell(key, f"rows {sorted(ids)} {self.seen(timerValues)} key {shown(key)}")

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        yield self.tell(key, f"timer {at} {self.seen(timerValues)} key {shown(key)} {key.k}")
        if at == 2000:
            self.handle.registerTimer(2100)  # in the past: for the next batch
            self.handle.registerTimer(2000)  # its own time: deleted with it
        if at == 2500:
            self.handle.deleteTimer(2500)
            self.handle.deleteTimer(9000)
        yield self.tell(key, f"after {at} {self.seen(timerValues)}")

    def seen(self, times: Any) -> str:
        timers = sorted(self.handle.listTimers())
        return f"watermark {times.getCurrentWatermarkInMs()} timers {timers}"

    def tell(self, key: Any, what: str) -> Row:
        n = (self.calls.get() or (0,))[0] + 1
        self.calls.update((n,))
        return Row(k=key[0], seq=n, what=what)

    def close(self) -> None:
        pass


class TimersInFrames(InFrames, Timers):
    """The same for frames."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        for at_ms in initialState["at_ms"]:
            self.handle.registerTimer(int(at_ms))
        self.tell(key, frame_shown(initialState))


class Delayed(StatefulProcessor):
    """Holds each row back for a second of event time, and passes it on with its new time."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.held = handle.getMapState("held", "at bigint", "id bigint, ops string")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            at = round(row.at.timestamp() * 1000) + 1000
            self.held.updateValue((at,), (row.id, row.ops))
            self.handle.registerTimer(at)
        yield from ()

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        held = self.held.getValue((at,))
        self.held.removeKey((at,))
        moment = datetime.datetime.fromtimestamp(at / 1000, datetime.UTC)
        yield Row(k=key.k, id=held.id, at=moment, ops=held.ops)

    def close(self) -> None:
        pass


class Clock(StatefulProcessor):
    """Processing time, told without a number that differs from run to run.

    A timer is named by where it was set: how far from the batch's time. States whose TTL is a
    millisecond are gone in the next batch, those of a day are not.
    """

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.names = handle.getMapState("names", "at bigint", "name string")
        self.calls = handle.getValueState("calls", "n bigint", 0)
        for name, ttl_ms in (("brief", 1), ("long", 86_400_000)):
            setattr(self, f"{name}_value", handle.getValueState(f"{name}_value", "n int", ttl_ms))
            setattr(self, f"{name}_list", handle.getListState(f"{name}_list", "n int", ttl_ms))
            states = handle.getMapState(f"{name}_map", "n int", "n int", ttl_ms)
            setattr(self, f"{name}_map", states)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        now = timerValues.getCurrentProcessingTimeInMs()
        assert now > 1_600_000_000_000
        for row in rows:
            before = self.kept()
            if row.id % 2:
                for value in (self.brief_value, self.long_value):
                    value.update((row.id,))
                for items in (self.brief_list, self.long_list):
                    items.appendList([(row.id,), (row.id,)])
                for entries in (self.brief_map, self.long_map):
                    entries.updateValue((row.id,), (row.id,))
            for after in (-86_400_000, -1, 0, 1) if row.id < 3 else ():
                self.names.updateValue((now + after,), (f"{row.id} {after:+}",))
                self.handle.registerTimer(now + after)
            told = f"row {row.id} {before} {self.kept()} {timerValues.getCurrentWatermarkInMs()}"
            yield self.tell(key, told)

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        assert at <= timerValues.getCurrentProcessingTimeInMs()
        left = len(list(self.handle.listTimers()))
        yield self.tell(key, f"timer {self.names.getValue((at,))[0]}, {left} timers")

    def kept(self) -> str:
        told = []
        for name in ("brief", "long"):
            value, items = getattr(self, f"{name}_value"), getattr(self, f"{name}_list")
            entries = getattr(self, f"{name}_map")
            told += [name, value.exists(), value.get(), items.exists(), list(items.get())]
            told += [entries.exists(), sorted(entries.keys()), sorted(entries.values())]
            told += [sorted(entries.iterator()), entries.containsKey((1,)), entries.getValue((1,))]
        return shown(told)

    def tell(self, key: Any, what: str) -> Row:
        n = (self.calls.get() or (0,))[0] + 1
        self.calls.update((n,))
        return Row(k=key[0], seq=n, what=what)

    def close(self) -> None:
        pass


# --- where we differ ------------------------------------------------------------------------------


class Different(StatefulProcessor):
    """Does on purpose what comes out otherwise here than in Spark."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n bigint")
        self.items = handle.getListState("items", "n bigint")
        handle.deleteIfExists("emptied")
        self.emptied = handle.getValueState("emptied", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        k, ids = key[0], sorted(row.id for row in rows)
        if k == "timers":
            self.handle.registerTimer(1000)
            self.handle.registerTimer(2000)
        if k == "lazy":
            self.items.appendValue((1,))
            items = self.items.get()
            self.items.clear()
            yield Row(k=k, seq=0, what=shown(list(items)))
        elif k == "emptied":
            n = (self.emptied.get() or (0,))[0] + len(ids)
            self.emptied.update((n,))
            yield Row(k=k, seq=n, what="")
        else:
            n = (self.count.get() or (0,))[0] + len(ids)
            self.count.update((n,))
            yield Row(k=k, seq=n, what=shown(ids))

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        self.handle.deleteTimer(2000)
        yield Row(k=key[0], seq=expiredTimerInfo.getExpiryTimeInMs(), what="timer")

    def close(self) -> None:
        pass
