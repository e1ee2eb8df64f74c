"""What goes by time, in the simulation: a processor with timers and a value that expires.

Its timers are a real `TimerIndex` and its value is a real cell with a time to live, on the real
table; which timers are due, in which order they fire, and what has expired at the end of an epoch,
the real phases of an operator say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final

from pyspark.sql.types import LongType, StructField, StructType

from snapshot.protocol.messages import BeginReply
from statebackend.operators.declared_states import EpochTimes
from statebackend.operators.epoch_phases import OperatorPhases
from statebackend.operators.operator_plan import EpochFigures
from statebackend.operators.per_key_loop import KeyOperator
from statebackend.state.cells import KeyCursor
from statebackend.state.table import StateTable
from statebackend.state.timers import TimerIndex
from statebackend.state.ttl_cells import TTL, TtlValueCell
from tests.sim import timemodel
from tests.sim.location import Plan, State

__all__ = ["Timed", "event_max_ms"]

Row = tuple[bytes, int]

_TTL: Final = TTL(timemodel.TTL_MS)


class _Codec:
    """Rows of one number."""

    schema = StructType([StructField("n", LongType())])

    def encode(self, row: tuple[int]) -> bytes:
        return b"%d" % row[0]

    def decode(self, data: bytes) -> tuple[int]:
        return (int(data),)

    def decode_many(self, rows: Sequence[bytes | None]) -> list[tuple[int] | None]:
        return [None if row is None else self.decode(row) for row in rows]


class _Writer:
    """Takes nothing: the processor puts its rows out itself."""

    pending = 0

    def collect(self, output: Iterable[Any]) -> Iterable[Any]:
        return output


class Timed(OperatorPhases):
    """The played processor in one epoch, without what asks for columns."""

    def __init__(
        self,
        mode: str,
        plan: Plan,
        table: StateTable,
        reply: BeginReply,
        rows: Sequence[Row],
        output: State,
    ) -> None:
        states = {"seen": SimpleNamespace(time_to_live=_TTL)}
        self._plan: Any = SimpleNamespace(uid="op", time_mode=mode, states=states)
        self._table, self._batch, self._output = table, plan, output
        self._key_groups = range(reply.key_group_start, reply.key_group_end + 1)
        self._times = EpochTimes(
            epoch=plan.batch,
            processing_time_ms=plan.stamp_ms,
            watermark_ms=reply.watermark_ms,
            late_watermark_ms=reply.late_watermark_ms,
        )
        self.figures = EpochFigures()
        self.cursor = KeyCursor()
        self.timers: Any = TimerIndex(self.cursor, table)
        codec: Any = _Codec()
        self._seen = TtlValueCell(
            self.cursor, table, "seen", timemodel.SEEN_ID, codec, ttl=_TTL, now_ms=plan.stamp_ms
        )
        self._writer: Any = _Writer()
        self._calls: Any = SimpleNamespace(timer=self._timer)
        self.late = 0
        self._load({key for key, _ in rows})

    def _load(self, keys: Iterable[bytes]) -> None:
        ordered = sorted(keys)
        self.cursor.load([key[:2] for key in ordered], [key[4:] for key in ordered])
        self._places = {key: place for place, key in enumerate(ordered)}

    def begin_with(self, initial: State) -> None:
        """The initial state: a timer for each key. Before any row."""
        loaded = set(self._places)
        self._load(initial)
        for key, place in self._places.items():
            self.cursor.index = place
            self.timers.register(timemodel.begun_at_ms(key))
        self._load(loaded)

    def is_late(self, key: bytes, amount: int) -> bool:
        """Whether a row is left out, by its event time."""
        if self._plan.time_mode != timemodel.EVENT:
            return False
        at_ms = timemodel.event_ms(self._batch, key, amount)
        is_late = at_ms <= self._times.late_watermark_ms
        self.late += is_late
        return is_late

    def take(self, key: bytes, amount: int) -> None:
        """A row, but for what it adds to its key's count."""
        self.cursor.index = self._places[key]
        found = self._seen.get()
        count = 1 if found is None else found[0] + 1
        self._seen.update((count,))
        self._output[key + b"~"] = b"%d" % count
        plan, timers = self._batch, self.timers
        if timemodel.takes_back_next(plan, key, amount) and (own := timers.list()):
            timers.delete(own[0])
        at_ms = timemodel.set_ms(self._plan.time_mode, plan, key, amount)
        if at_ms is not None:
            timers.register(at_ms)
        self.cursor.index = -1

    def end(self) -> None:
        """What is due, and then what has expired."""
        operator = KeyOperator(
            uid="op",
            cursor=self.cursor,
            reader=None,
            writer=self._writer,  # type: ignore[arg-type]
        )
        for _ in self._timers(operator, self.timers):
            raise AssertionError("the writer gave a batch")
        self.figures.next_timer_ms = self.timers.next_ms()
        self.figures.expired = self._clean()

    def _keys_of(self, encoded: Sequence[bytes]) -> Sequence[Any]:
        return encoded

    def _timer(self, encoded: Any, at_ms: int) -> None:
        group = self.cursor.prefixes[self.cursor.index]
        key = group + b"\x00\x00" + encoded
        total = b"%d" % (int(self._table.get(key) or b"0") + 1)
        self._table.put(key, total)
        self._output[key + b"@%d" % at_ms] = total
        if timemodel.takes_back_last(key, at_ms):
            self.timers.delete(self.timers.list()[-1])
        again_ms = timemodel.set_again_ms(key, at_ms)
        if again_ms is not None:
            self.timers.register(again_ms)


def event_max_ms(mode: str, plan: Plan, rows: Iterable[Row]) -> int | None:
    """The latest event time of an attempt's rows, as its ack says it."""
    if mode != timemodel.EVENT:
        return None
    return max((timemodel.event_ms(plan, key, amount) for key, amount in rows), default=None)
