"""A processor that uses every kind of state, and the same in plain Python."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from statebackend.api.processors import KeyedProcessor
from statebackend.operators.declared_states import StateDeclaration
from statebackend.operators.processor_calls import record_keyed_states
from statebackend.state.ttl_cells import TTL

OUTPUT = "k bigint, what string, a bigint, b bigint, c bigint, d bigint"
TTL_MS = 1000


class Ledger(KeyedProcessor):
    """Totals, a map, a list, timers, a value that expires, and a list of the subtask."""

    def open(self, ctx: Any) -> None:
        self.total = ctx.value_state("total", "n bigint, s bigint")
        self.seen = ctx.map_state("seen", "v bigint", "c bigint")
        self.rows = ctx.list_state("rows", "v bigint")
        self.fresh = ctx.value_state("fresh", "n bigint", ttl=TTL(TTL_MS))
        self.log = ctx.operator_list("log", "v bigint")

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[Any]:
        for row in rows:
            n, s = self.total.get() or (0, 0)
            self.total.update((n + 1, s + row.v))
            (c,) = self.seen.get_value((row.v % 5,)) or (0,)
            self.seen.update_value((row.v % 5,), (c + 1,))
            if row.v % 7 == 0:
                self.rows.clear()
            self.rows.append((row.v,))
            (f,) = self.fresh.get() or (0,)
            self.fresh.update((f + 1,))
            self.log.add((row.v,))
            at_ms = ctx.watermark_ms + 100 * (row.v % 4)
            ctx.timers.register(at_ms)
            if row.v % 11 == 0:
                ctx.timers.delete(ctx.watermark_ms + 100)
            found = len(list(self.rows.get()))
            yield (*key, "row", n + 1, s + row.v, 10 * (c + 1) + found, f + 1)

    def on_timer(self, key: Any, at_ms: int, ctx: Any) -> Iterator[Any]:
        n, s = self.total.get() or (0, 0)
        self.total.update((n, s + 1))
        if s % 3 == 0:
            ctx.timers.register(at_ms + 250)
        left = len(list(ctx.timers.list()))
        yield (*key, "timer", at_ms, s, left, 0)


def declared() -> dict[str, StateDeclaration]:
    return record_keyed_states(Ledger(), "op", time_mode="event").declared


class Model:
    """What a ledger comes to."""

    def __init__(self) -> None:
        self.total: dict[int, tuple[int, int]] = {}
        self.seen: dict[tuple[int, int], int] = {}
        self.rows: dict[int, list[int]] = {}
        self.fresh: dict[int, tuple[int, int]] = {}  # count, and when it expires
        self.log: list[int] = []
        self.timers: set[tuple[int, int]] = set()  # time, key
        self.watermark_ms = self.now_ms = 0

    def copy(self) -> Model:
        return copy.deepcopy(self)

    def process(self, rows: list[tuple[int, int, int]]) -> list[tuple[Any, ...]]:
        out = []
        for k, v, _ in rows:
            n, s = self.total.get(k, (0, 0))
            self.total[k] = n + 1, s + v
            self.seen[k, v % 5] = self.seen.get((k, v % 5), 0) + 1
            kept = self.rows.setdefault(k, [])
            if v % 7 == 0:
                kept.clear()
            kept.append(v)
            f, until_ms = self.fresh.get(k, (0, 0))
            f = f + 1 if until_ms > self.now_ms else 1
            self.fresh[k] = f, self.now_ms + TTL_MS
            self.log.append(v)
            self.timers.add((self.watermark_ms + 100 * (v % 4), k))
            if v % 11 == 0:
                self.timers.discard((self.watermark_ms + 100, k))
            out.append((k, "row", n + 1, s + v, 10 * self.seen[k, v % 5] + len(kept), f))
        return out

    def fire(self) -> list[tuple[Any, ...]]:
        out = []
        for at_ms, k in sorted(one for one in self.timers if one[0] <= self.watermark_ms):
            n, s = self.total.get(k, (0, 0))
            self.total[k] = n, s + 1
            if s % 3 == 0:
                self.timers.add((at_ms + 250, k))
            left = sum(key == k for _, key in self.timers)
            out.append((k, "timer", at_ms, s, left, 0))
            self.timers.discard((at_ms, k))
        return out
