"""The processors of the jobs that are killed; imported by drivers and workers alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statebackend import BroadcastProcessor, CoProcessor, KeyedProcessor

SLOTS = 32  # rules that are held at a time
SETTLES_MS = 200
END_OF_TIME_MS = 4_102_444_800_000  # 2100: only the end of the input gets there


class PandasTotals(StatefulProcessor):
    """For each row its key's count and sum so far, in frames."""

    def init(self, handle: Any) -> None:
        self._totals = handle.getValueState("totals", "n bigint, total bigint")
        self._of_file = handle.getMapState("of_file", "file int", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        n, total = self._totals.get() or (0, 0)
        given = pd.concat(list(rows)).sort_values("seq")
        of_file = []
        for file in given["file"]:
            before = self._of_file.getValue((file,))
            of_file.append((before[0] if before else 0) + 1)
            self._of_file.updateValue((file,), (of_file[-1],))
        totals = given["v"].cumsum() + total
        yield pd.DataFrame(
            {
                "k": key[0],
                "seq": given["seq"].to_numpy(),
                "n": range(n + 1, n + len(given) + 1),
                "total": totals.to_numpy(),
                "of_file": of_file,
            }
        )
        self._totals.update((n + len(given), int(totals.iloc[-1])))

    def close(self) -> None:
        """Nothing to close."""


class Settled(KeyedProcessor):
    """Keeps rows until a timer of the clock; then puts them out with the key's count and sum."""

    def open(self, ctx: Any) -> None:
        self._totals = ctx.value_state("totals", "n bigint, total bigint, due_ms bigint")
        self._waiting = ctx.list_state("waiting", "seq bigint, v bigint")

    def process(self, key: Any, rows: Any, ctx: Any) -> None:
        n, total, due_ms = self._totals.get() or (0, 0, 0)
        for row in rows:
            self._waiting.append((row.seq, row.v))
        if not due_ms:
            due_ms = ctx.processing_time_ms + SETTLES_MS
            ctx.timers.register(due_ms)
        self._totals.update((n, total, due_ms))

    def on_timer(self, key: Any, at_ms: int, ctx: Any) -> Iterator[tuple[Any, ...]]:
        n, total, due_ms = self._totals.get()
        if due_ms != at_ms:
            raise AssertionError(f"a timer of {at_ms} fires, and the key waits for {due_ms}")
        for seq, v in sorted(self._waiting.get()):
            n, total = n + 1, total + v
            yield key[0], seq, n, total
        self._waiting.clear()
        self._totals.update((n, total, 0))


class Pairs(CoProcessor):
    """For each row of either side that side's count and sum by then, and the other's is kept."""

    def open(self, ctx: Any) -> None:
        self._left = ctx.value_state("left", "n bigint, total bigint")
        self._right = ctx.value_state("right", "n bigint, total bigint")

    def process_left(self, key: Any, rows: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        yield from self._counted(key, 0, self._left, rows)

    def process_right(self, key: Any, rows: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        yield from self._counted(key, 1, self._right, rows)

    @staticmethod
    def _counted(key: Any, side: int, state: Any, rows: Any) -> Iterator[tuple[Any, ...]]:
        n, total = state.get() or (0, 0)
        for row in sorted(rows, key=lambda row: row.seq):
            n, total = n + 1, total + row.v
            yield key[0], row.seq, side, n, total
        state.update((n, total))


class _Ruled(BroadcastProcessor):
    """Each file's rows are multiplied by its rule, which came some files before."""

    def open(self, ctx: Any) -> None:
        self._rules = ctx.broadcast_state("rules", "slot int", "file int, factor bigint")

    def process_broadcast(self, rows: Any, ctx: Any) -> None:
        for row in rows:
            self._rules.put((row.file % SLOTS,), (row.file, row.factor))

    def _factor(self, file: int) -> int | None:
        found = self._rules.get((file % SLOTS,))
        return found[1] if found is not None and found[0] == file else None


class RuledRows(_Ruled):
    """In micro-batches; a list of each subtask has what no key holds, and each row once."""

    def open(self, ctx: Any) -> None:
        super().open(ctx)
        self._totals = ctx.value_state("totals", "n bigint, total bigint")
        self._seen = ctx.operator_list("seen", "seq bigint")
        seen = [seq for (seq,) in self._seen.get()]
        if len(seen) != len(set(seen)):
            raise AssertionError("an operator's list has a row twice")

    def process(self, key: Any, rows: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        n, total = self._totals.get() or (0, 0)
        for row in sorted(rows, key=lambda row: row.seq):
            factor = self._factor(row.file)
            n, total = n + 1, total + row.v * (-1 if factor is None else factor)
            if row.seq % 20 == 0:
                self._seen.add((row.seq,))
            yield key[0], row.seq, n, total
        self._totals.update((n, total))


class RuledAtTheEnd(_Ruled):
    """In a continuous job: a row waits in state until its rule is there, or the end of time."""

    def open(self, ctx: Any) -> None:
        super().open(ctx)
        self._waiting = ctx.list_state("waiting", "seq bigint, v bigint, file int")
        self._totals = ctx.value_state("totals", "n bigint, total bigint")

    def process(self, key: Any, rows: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        ctx.timers.register(END_OF_TIME_MS)
        waiting = [*self._waiting.get(), *((row.seq, row.v, row.file) for row in rows)]
        yield from self._put_out(key, waiting)

    def on_timer(self, key: Any, at_ms: int, ctx: Any) -> Iterator[tuple[Any, ...]]:
        yield from self._put_out(key, list(self._waiting.get()))
        n, total = self._totals.get() or (0, 0)
        yield key[0], -n, total

    def _put_out(self, key: Any, rows: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        n, total = self._totals.get() or (0, 0)
        left = []
        for seq, v, file in rows:
            factor = self._factor(file)
            if factor is None:
                left.append((seq, v, file))
                continue
            n, total = n + 1, total + v * factor
            yield key[0], seq, v * factor
        self._totals.update((n, total))
        if left:
            self._waiting.put(left)
        else:
            self._waiting.clear()
