"""The user's part of the simulated job: sources with offsets, processors, a two-phase sink.

The first processor numbers the rows of each key, and keeps the text in force in a broadcast map and
in a list of the operator; with event time every other row sets a timer, which gives a row. The
second one, where there is one, has them by another key, and holds how far each lane has come. Both
look at their state before they change it: all of it is known by arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from statebackend.api.processors import BroadcastProcessor, KeyedProcessor
from statebackend.continuous.sinks.sink import (
    Committer,
    Sink,
    SinkContext,
    SinkWriter,
    generation_of,
)
from statebackend.continuous.sources.source import Discovery, Json, Source, Split, SplitReader
from statebackend.errors import ConnectorError, OutputLostError
from statebackend.schema.types import arrow_schema
from tests.sim.continuous.model import RULE, SPLIT_ROWS
from tests.sim.continuous.times import DELAY_MS, owner_of
from tests.sim.kernel import Process, current
from tests.support.faults import Fault

if TYPE_CHECKING:
    from tests.sim.continuous.world import World

__all__ = [
    "OUTPUT",
    "Again",
    "Data",
    "LedgerSink",
    "Numbered",
    "Rules",
    "here",
    "owned",
    "within",
]

OUTPUT = "key BIGINT, n BIGINT, id BIGINT, bucket BIGINT"
_STAGE_S = 0.01
_IDLE_S = 0.02
_worlds: dict[Process, World] = {}


@contextlib.contextmanager
def within() -> Iterator[None]:
    """While this is open, processes have worlds: a processor travels by pickle, without its own."""
    try:
        yield
    finally:
        _worlds.clear()


def owned(process: Process, world: World) -> None:
    """Say whose job a process works for."""
    _worlds[process] = world


def here() -> World:
    """The job that the current actor works for."""
    return _worlds[current().process]


# --- sources --------------------------------------------------------------------------------------


class _Paced(Source):
    """So many rows a second of each split, for ever."""

    splits_end = False

    def __init__(self, world: World, schema: str, splits: int, rate: float, **time: Any) -> None:
        super().__init__(schema, bounded=False, **time)
        self.world, self.splits, self.rate = world, splits, rate
        self.arrow = arrow_schema(self.schema)

    def discover(self, state: Json | None) -> Discovery:
        found, later = state["found"] if state else 0, self.world.config.found_later
        count = min(found + 1, self.splits) if later else self.splits
        splits = [Split(id=f"{n}", data={"n": n}) for n in range(found, count)]
        if found and splits:
            self.world.sched.note("split found later")
        return Discovery(tuple(splits), {"found": count}, done=not later)

    def open(self, split: Split, position: Json | None) -> SplitReader:
        return _Reader(self, split.data["n"], position["given"] if position else 0)

    def rows(self, split: int, first: int, count: int) -> Sequence[tuple[Any, ...]]:
        raise NotImplementedError


class Data(_Paced):
    """Numbered rows of a few keys, out of order in event time by less than the delay."""

    def __init__(self, world: World) -> None:
        config, schema, time = world.config, "key BIGINT, id BIGINT", {}
        if config.timed:
            schema += ", at TIMESTAMP"
            time = {"event_time": "at", "watermark_delay": f"{DELAY_MS} ms"}
        super().__init__(world, schema, config.splits, config.rate, **time)

    def rows(self, split: int, first: int, count: int) -> Sequence[tuple[Any, ...]]:
        ids = range(split * SPLIT_ROWS + first, split * SPLIT_ROWS + first + count)
        key, at_ms = self.world.model.key, self.world.times.at_ms
        if not self.world.config.timed:
            return [(key(id), id) for id in ids]
        return [(key(id), id, at_ms(id) * 1000) for id in ids]


class Rules(_Paced):
    """Numbers: what each of them says is in the model."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "number BIGINT", 1, world.config.rule_rate)

    def rows(self, split: int, first: int, count: int) -> Sequence[tuple[Any, ...]]:
        return [(number,) for number in range(first, first + count)]


class _Reader(SplitReader):
    def __init__(self, source: _Paced, split: int, given: int) -> None:
        self._source, self._split, self._given = source, split, given

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        source = self._source
        due = int(source.world.sched.now_s * source.rate)
        count = min(due - self._given, max_rows)
        if count <= 0:
            source.world.sched.pause(_IDLE_S)  # each look is an event
            return None
        rows = source.rows(self._split, self._given, count)
        self._given += count
        arrays = [
            pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), source.arrow, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=source.arrow)

    @property
    def position(self) -> Json:
        return {"given": self._given}

    @property
    def ended(self) -> bool:
        return False


# --- the operator ---------------------------------------------------------------------------------


class Numbered(BroadcastProcessor):
    """The first one.

    Args:
        timed: rows set timers.
    """

    def __init__(self, timed: bool) -> None:
        self._timed = timed

    def open(self, ctx: Any) -> None:
        self._count = ctx.value_state("count", "n BIGINT")
        self._rules = ctx.broadcast_state("rules", "key BIGINT", "text STRING")
        self._texts = ctx.operator_list("texts", "text STRING")
        if self._timed:
            self._fired = ctx.value_state("fired", "n BIGINT")

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[Any]:
        world = here()
        (n,) = self._count.get() or (0,)
        if self._timed:
            (fired,) = self._fired.get() or (0,)
            set_ms = list(ctx.timers.list())
            world.state.timers_are(world.model.ids(key[0], n), fired, set_ms)
        for row in rows:
            n += 1
            world.state.numbered(row.id, n)
            _set_timer(self._timed, row.id, ctx)
            yield key[0], n, row.id, world.model.bucket(row.id)
        self._count.update((n,))

    def on_timer(self, key: Any, at_ms: int, ctx: Any) -> Iterator[Any]:
        world = here()
        (n,), (fired,) = self._count.get() or (0,), self._fired.get() or (0,)
        world.state.fires(key[0], at_ms, fired + 1, {key[0]: n})
        self._fired.update((fired + 1,))
        yield key[0], fired + 1, -at_ms, world.model.bucket(-at_ms)

    def process_broadcast(self, rows: Iterator[Any], ctx: Any) -> None:
        for row in rows:
            held = [text for _, (text,) in self._rules.items()]
            here().state.ruled(row.number, held, [text for (text,) in self._texts.get()])
            text = here().model.content(row.number + 1)
            if text:
                self._rules.put((RULE,), (text,))
            elif held:
                self._rules.remove((RULE,))
            self._texts.update([(text,)] if text else [])


def _set_timer(timed: bool, id: int, ctx: Any) -> None:
    at_ms = here().times.timer_ms(id) if timed and id >= 0 else None
    if at_ms is not None:
        ctx.timers.register(at_ms)


class Again(KeyedProcessor):
    """The second one, by bucket: rows of one key come from one subtask, those of a bucket of all.

    Args:
        timed: as of the first.
    """

    def __init__(self, timed: bool) -> None:
        self._timed = timed

    def open(self, ctx: Any) -> None:
        self._last = ctx.map_state("last", "key BIGINT, timer BOOLEAN", "n BIGINT")
        if self._timed:
            self._fired = ctx.value_state("fired", "n BIGINT")

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[Any]:
        world = here()
        if self._timed:
            (fired,) = self._fired.get() or (0,)
            set_ms = list(ctx.timers.list())
            seen = [id for k, n in self._ranks().items() for id in world.model.ids(k, n)]
            ids = [id for id in seen if world.model.bucket(id) == key[0]]
            world.state.timers_are(ids, fired, set_ms)
        for row in rows:
            lane = row.key, row.id < 0
            (last,) = self._last.get_value(lane) or (0,)
            world.state.came(last, (row.key, row.n, row.id))
            self._last.update_value(lane, (row.n,))
            _set_timer(self._timed, row.id, ctx)
            yield row.key, row.n, row.id, row.bucket

    def _ranks(self) -> dict[int, int]:
        """By key, the last of its rows that came."""
        return {key: n for (key, timer), (n,) in self._last.iterator() if not timer}

    def on_timer(self, key: Any, at_ms: int, ctx: Any) -> Iterator[Any]:
        owner, ranks = owner_of(key[0]), self._ranks()
        (fired,) = self._fired.get() or (0,)
        here().state.fires(owner, at_ms, fired + 1, ranks)
        self._fired.update((fired + 1,))
        yield owner, fired + 1, -at_ms, key[0]


# --- the sink -------------------------------------------------------------------------------------


class _Staged(msgspec.Struct, frozen=True):
    run: str
    subtask: int
    checkpoint: int


def _may_fail(world: World) -> None:
    """Raises `ConnectorError` now and then."""
    if world.sched.chance(world.config.sink_fails):
        world.sched.note(Fault.SINK_FAILED)
        raise ConnectorError("The sink failed.")


class LedgerSink(Sink):
    """Rows are staged at a barrier, and in the world's ledger once their checkpoint is complete.

    Half of the staging is done after the barrier, beside the rows that come behind it.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def open(self, context: SinkContext) -> SinkWriter:
        return _Writer(self.world, context)

    def committer(self, job: str, uid: str) -> Committer:
        return _Committer(self.world)


class _Writer(SinkWriter):
    def __init__(self, world: World, context: SinkContext) -> None:
        self._world, self._context = world, context
        self._rows: list[tuple[int, int, int]] = []
        self._begun: dict[_Staged, list[tuple[int, int, int]]] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        columns = batch.to_pydict()
        self._rows += zip(*(columns[name] for name in ("key", "n", "id")), strict=True)

    def prepare(self, checkpoint: int) -> list[bytes]:
        rows, self._rows = self._rows, []
        if not rows:
            return []
        staged = _Staged(self._context.run, self._context.subtask, checkpoint)
        current().sched.pause(_STAGE_S / 2)
        self._begun[staged] = rows
        return [msgspec.msgpack.encode(staged)]

    def await_prepared(self, checkpoint: int) -> None:
        current().sched.pause(_STAGE_S / 2)
        for staged in [one for one in self._begun if one.checkpoint <= checkpoint]:
            rows = self._begun.pop(staged)
            _may_fail(self._world)  # these rows are gone, and it will not be said again
            self._world.staged[staged] = rows


class _Committer(Committer):
    def __init__(self, world: World) -> None:
        self._world = world

    def commit(self, committables: Sequence[bytes]) -> None:
        world = self._world
        for committable in committables:
            _may_fail(world)
            staged = msgspec.msgpack.decode(committable, type=_Staged)
            world.sched.pause(_STAGE_S)
            if staged in world.output.seen:
                continue
            if staged not in world.staged:
                raise OutputLostError(f"{staged} is gone.")
            world.output.committed(staged, world.staged.pop(staged))
            _may_fail(world)

    def sweep(self, run: str) -> None:
        own = generation_of(run)
        assert own is not None
        for staged in list(self._world.staged):
            if (generation_of(staged.run) or 0) < own:
                del self._world.staged[staged]
