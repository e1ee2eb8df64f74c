"""The jobs in `tests/golden/jobs`: what runs in them, and what they hold.

In every epoch e comes each key k of 0 to 9 with (k + e) % 3 != 0, with the value e. Run as a
program, it makes such a job with the code that it finds:

    python -m tests.support.golden format2|format2-evolved|format3 FOLDER

format3 has a broadcast processor with rules: the word "w<e>" for e cents in each epoch e, and -1
for "w0" in the last. It ran at parallelism 2 up to epoch 2, then at 3.

Format 1 has a maker of its own (tests/golden/make_format1.py), for that code had less to offer.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

from statebackend.api.processors import BroadcastProcessor, KeyedProcessor
from statebackend.state.ttl_cells import TTL
from tests.support.inprocess import STAMP_MS, InProcessJob

__all__ = [
    "EPOCHS",
    "EVOLVED_FROM",
    "LATER_MS",
    "RESCALED_FROM",
    "WEEK",
    "Changed",
    "Kept",
    "Seen",
    "Shared",
    "Wider",
    "keys_of",
    "values_of",
]

EPOCHS = 5
EVOLVED_FROM = 3  # the epoch from which on format2-evolved has other schemas
RESCALED_FROM = 3  # the epoch from which on format3 has three subtasks; before it had two
KEYS = range(10)
WEEK = TTL(7 * 86_400_000)
LATER_MS = 10_000


def keys_of(epoch: int) -> list[int]:
    """The keys that come in an epoch."""
    return [k for k in KEYS if (k + epoch) % 3]


def values_of(key: int, epochs: int = EPOCHS) -> list[int]:
    """The values that have come for a key."""
    return [e for e in range(epochs) if key in keys_of(e)]


class Seen(StatefulProcessor):
    """What format 1 was made with, which now only looks."""

    def init(self, handle: Any) -> None:
        """Ask for the states."""
        self.last = handle.getValueState("last", "n bigint, word string, at timestamp")
        self.all = handle.getListState("all", "v bigint")
        self.times = handle.getMapState("times", "word string", "n int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        """Say what there is."""
        last, times = self.last.get(), {k[0]: v for k, v in self.times.iterator()}
        yield Row(k=key[0], seen=repr((last, list(self.all.get()), times)))

    def close(self) -> None:
        """Nothing is open."""


class Wider(Seen):
    """The same with other schemas."""

    def init(self, handle: Any) -> None:
        """Ask for the states."""
        self.last = handle.getValueState(
            "last", "word string, n decimal(20,0), by string DEFAULT 'x'"
        )
        self.all = handle.getListState("all", "v decimal(19,0), more int")
        self.times = handle.getMapState("times", "word string", "n bigint")


class Kept(KeyedProcessor):
    """Every kind of state, with and without a TTL, and a timer. A value of -1 only looks."""

    value, element, entry, reduced = "n int, word string, gone double", "v int", "n int", "n int"

    def open(self, ctx: Any) -> None:
        """Ask for the states."""
        self.last = ctx.value_state("last", self.value)
        self.last_ttl = ctx.value_state("last_ttl", self.value, ttl=WEEK)
        self.all = ctx.list_state("all", self.element)
        self.all_ttl = ctx.list_state("all_ttl", self.element, ttl=WEEK)
        self.times = ctx.map_state("times", "word string", self.entry)
        self.times_ttl = ctx.map_state("times_ttl", "word string", self.entry, ttl=WEEK)
        self.most = ctx.reducing_state("most", self.reduced, max)

    def process(self, key: Any, rows: Any, ctx: Any) -> Any:
        """Put each row into every state, or say what there is."""
        for row in rows:
            if row.v < 0:
                yield key[0], repr(self.shown(ctx))
                continue
            for state in (self.last, self.last_ttl):
                state.update(self.made_value(row.v))
            for state in (self.all, self.all_ttl):
                state.append(self.made_element(row.v))
            for state in (self.times, self.times_ttl):
                state.update_value((f"w{row.v}",), self.made_entry(row.v))
            self.most.add((row.v,))
            ctx.timers.delete(STAMP_MS + LATER_MS)
            ctx.timers.register(STAMP_MS + LATER_MS)

    def shown(self, ctx: Any) -> Any:
        """All state of a key."""
        return (
            [state.get() for state in (self.last, self.last_ttl, self.most)],
            [list(state.get()) for state in (self.all, self.all_ttl)],
            [{k[0]: v for k, v in state.iterator()} for state in (self.times, self.times_ttl)],
            list(ctx.timers.list()),
        )

    def made_value(self, v: int) -> Any:
        """A row of `value`."""
        return (v, f"w{v}", 0.5)

    def made_element(self, v: int) -> Any:
        """A row of `element`."""
        return (v,)

    def made_entry(self, v: int) -> Any:
        """A row of `entry`."""
        return (v,)


class Changed(Kept):
    """The same with a field dropped, some added, widened and in another order."""

    value = "word string, m int DEFAULT 7, n bigint"
    element, entry, reduced = "v bigint, note string", "at struct<x: int>, n bigint", "n bigint"

    def made_value(self, v: int) -> Any:
        """A row of `value`."""
        return (f"w{v}", 8, v)

    def made_element(self, v: int) -> Any:
        """A row of `element`."""
        return (v, "new")

    def made_entry(self, v: int) -> Any:
        """A row of `entry`."""
        return ((v,), v)


class Shared(BroadcastProcessor):
    """State of keys, lists of the subtask in both modes, and rules. A value of -1 only looks."""

    rule = "cents bigint"

    def open(self, ctx: Any) -> None:
        """Ask for the states."""
        self.last = ctx.value_state("last", "n int, word string")
        self.all = ctx.list_state("all", "v int")
        self.mine = ctx.operator_list("mine", "k bigint, v int")
        self.everybodys = ctx.operator_list("everybodys", "k bigint, v int", mode="union")
        self.rules = ctx.broadcast_state("rules", "word string", self.rule)

    def process_broadcast(self, rows: Any, ctx: Any) -> None:
        """Keep a rule, or remove it."""
        for row in rows:
            if row.cents < 0:
                self.rules.remove((row.word,))
            else:
                self.rules.put((row.word,), self.made_rule(row.cents))

    def process(self, key: Any, rows: Any, ctx: Any) -> Any:
        """Put each row into every state, or say what there is."""
        for row in rows:
            if row.v < 0:
                lists = [sorted(one.get()) for one in (self.mine, self.everybodys)]
                keyed = self.last.get(), list(self.all.get())
                yield key[0], repr((keyed, lists, sorted(self.rules.items())))
                continue
            self.last.update((row.v, f"w{row.v}"))
            self.all.append((row.v,))
            self.mine.add((key[0], row.v))
            self.everybodys.add((key[0], row.v))

    def made_rule(self, cents: int) -> Any:
        """A row of `rule`."""
        return (cents,)


def make(name: str, target: Path) -> None:
    """Make a job as it is in the folder of golden ones."""
    with tempfile.TemporaryDirectory() as folder:
        job = InProcessJob(Path(folder), time_mode="processing", base_every_epochs=2)
        (_make_shared if name == "format3" else _make_kept)(name, job)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(Path(folder) / "store", target)
        shutil.rmtree(target / "probe", ignore_errors=True)


def _make_kept(name: str, job: InProcessJob) -> None:
    job.start(Kept())
    for epoch in range(EPOCHS):
        if name == "format2-evolved" and epoch == EVOLVED_FROM:
            job.start(Changed())
        job.run([(key, epoch) for key in keys_of(epoch)])


def _make_shared(name: str, job: InProcessJob) -> None:
    # Some slices in objects of their own; and no base since the parallelism changed.
    job.start(Shared(), parallelism=2, inline_limit_bytes=1500)
    for epoch in range(EPOCHS):
        if epoch == RESCALED_FROM:
            job.start(Shared(), parallelism=3, base_every_epochs=64)
        rules = [(f"w{epoch}", epoch)] + ([("w0", -1)] if epoch == EPOCHS - 1 else [])
        job.run([(key, epoch) for key in keys_of(epoch)], rules)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
