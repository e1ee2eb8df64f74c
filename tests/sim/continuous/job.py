"""The user's part of the simulated job: sources with offsets, a processor, a two-phase sink.

The processor numbers the rows of each key, and keeps the text in force in a broadcast map and in a
list of the operator. It looks at its state before it changes it: all of it is known by arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from statebackend.api.processors import BroadcastProcessor
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
from tests.sim.kernel import current
from tests.support.faults import Fault

if TYPE_CHECKING:
    from tests.sim.continuous.world import World

__all__ = ["OUTPUT", "Data", "LedgerSink", "Numbered", "Rules", "within"]

OUTPUT = "key BIGINT, n BIGINT, id BIGINT"
_STAGE_S = 0.01
_IDLE_S = 0.02
_worlds: list[World] = []


@contextlib.contextmanager
def within(world: World) -> Iterator[None]:
    """Whose job it is, while this is open: a processor travels by pickle, without its world."""
    _worlds.append(world)
    try:
        yield
    finally:
        _worlds.remove(world)


# --- sources --------------------------------------------------------------------------------------


class _Paced(Source):
    """So many rows a second of each split, for ever."""

    splits_end = False

    def __init__(self, world: World, schema: str, splits: int, rate: float) -> None:
        super().__init__(schema, bounded=False)
        self.world, self.splits, self.rate = world, splits, rate
        self.arrow = arrow_schema(self.schema)

    def discover(self, state: Json | None) -> Discovery:
        splits = [] if state else [Split(id=f"{n}", data={"n": n}) for n in range(self.splits)]
        return Discovery(tuple(splits), {"all": True}, done=True)

    def open(self, split: Split, position: Json | None) -> SplitReader:
        return _Reader(self, split.data["n"], position["given"] if position else 0)

    def rows(self, split: int, first: int, count: int) -> Sequence[tuple[Any, ...]]:
        raise NotImplementedError


class Data(_Paced):
    """Numbered rows of a few keys."""

    def __init__(self, world: World) -> None:
        config = world.config
        super().__init__(world, "key BIGINT, id BIGINT", config.splits, config.rate)

    def rows(self, split: int, first: int, count: int) -> Sequence[tuple[Any, ...]]:
        ids = range(split * SPLIT_ROWS + first, split * SPLIT_ROWS + first + count)
        return [(self.world.model.key(id), id) for id in ids]


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
    """See the module."""

    def open(self, ctx: Any) -> None:
        self._count = ctx.value_state("count", "n BIGINT")
        self._rules = ctx.broadcast_state("rules", "key BIGINT", "text STRING")
        self._texts = ctx.operator_list("texts", "text STRING")

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[tuple[int, int, int]]:
        (n,) = self._count.get() or (0,)
        for row in rows:
            n += 1
            _worlds[-1].state.numbered(row.id, n)
            yield key[0], n, row.id
        self._count.update((n,))

    def process_broadcast(self, rows: Iterator[Any], ctx: Any) -> None:
        for row in rows:
            held = [text for _, (text,) in self._rules.items()]
            _worlds[-1].state.ruled(row.number, held, [text for (text,) in self._texts.get()])
            text = _worlds[-1].model.content(row.number + 1)
            if text:
                self._rules.put((RULE,), (text,))
            elif held:
                self._rules.remove((RULE,))
            self._texts.update([(text,)] if text else [])


# --- the sink -------------------------------------------------------------------------------------


class _Staged(msgspec.Struct, frozen=True):
    run: str
    subtask: int
    checkpoint: int


class LedgerSink(Sink):
    """Rows are staged at a barrier, and in the world's ledger once their checkpoint is complete."""

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

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += zip(*batch.to_pydict().values(), strict=True)

    def prepare(self, checkpoint: int) -> list[bytes]:
        rows, self._rows = self._rows, []
        if not rows:
            return []
        staged = _Staged(self._context.run, self._context.subtask, checkpoint)
        current().sched.pause(_STAGE_S)
        self._world.staged[staged] = rows
        return [msgspec.msgpack.encode(staged)]


class _Committer(Committer):
    def __init__(self, world: World) -> None:
        self._world = world

    def commit(self, committables: Sequence[bytes]) -> None:
        world = self._world
        for committable in committables:
            self._may_fail()
            staged = msgspec.msgpack.decode(committable, type=_Staged)
            world.sched.pause(_STAGE_S)
            if staged in world.output.seen:
                continue
            if staged not in world.staged:
                raise OutputLostError(f"{staged} is gone.")
            world.output.committed(staged, world.staged.pop(staged))
            self._may_fail()

    def _may_fail(self) -> None:
        if self._world.sched.chance(self._world.config.sink_fails):
            self._world.sched.note(Fault.SINK_FAILED)
            raise ConnectorError("The sink failed.")

    def sweep(self, run: str) -> None:
        own = generation_of(run)
        assert own is not None
        for staged in list(self._world.staged):
            if (generation_of(staged.run) or 0) < own:
                del self._world.staged[staged]
