"""States that belong to no key, in the simulation: the played processor's, and the model of them.

The processor uses the real lists and maps, which come and go by the real `OperatorStateIO`. The
model says with plain tuples what must be in them after a batch, and what a subtask begins with at
any parallelism. Contents return after they were gone, stay as they are, and have sizes on both
sides of what a record takes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

from pyspark.sql.types import BinaryType, StructField, StructType

from statebackend.operators.operator_snapshot import (
    HeldOperatorState,
    OperatorSnapshot,
    StoredOperatorState,
)
from statebackend.state.operator_state import StoredList, StoredMap
from tests.sim.location import Plan

__all__ = ["KeylessState", "Part", "Played", "Rows", "decoded_part", "part_after", "whole_after"]

Rows = Sequence[tuple[bytes, int]]

_QUEUE, _SEEN, _RULES = "queue", "seen", "rules"
_MODES: Final = {_QUEUE: "split", _SEEN: "union"}
_QUEUED_MAX: Final = 12
_SEEN_MAX: Final = 6
_RETURNING: Final = tuple(b"%d: as it was before" % n for n in range(5))
_EACH_RULE: Final = 5


@dataclass(frozen=True)
class Part:
    """What one subtask has: its lists' rows, by name, and the map that all have."""

    lists: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)
    rules: Mapping[bytes, bytes] = field(default_factory=dict)

    def rows(self, name: str) -> tuple[bytes, ...]:
        """Of one list."""
        return self.lists.get(name, ())


@dataclass(frozen=True)
class KeylessState:
    """What all subtasks have after a batch: their parts, in their order."""

    parts: tuple[Part, ...] = ()

    def begun(self, subtask: int, parallelism: int) -> Part:
        """What a subtask begins the next batch with."""
        if not self.parts:
            return Part()
        if len(self.parts) == parallelism:
            return self.parts[subtask]
        queued, seen = (
            [row for part in self.parts for row in part.rows(name)] for name in (_QUEUE, _SEEN)
        )
        lengths = [len(queued[n::parallelism]) for n in range(parallelism)]
        start = sum(lengths[:subtask])
        own = tuple(queued[start : start + lengths[subtask]])
        return _part(own, tuple(seen), self.parts[0].rules)


def _part(queue: Sequence[bytes], seen: Sequence[bytes], rules: Mapping[bytes, bytes]) -> Part:
    lists = {_QUEUE: tuple(queue), _SEEN: tuple(seen)}
    return Part({name: rows for name, rows in lists.items() if rows}, dict(rules))


# --- the model -----------------------------------------------------------------------------------


def part_after(before: Part, plan: Plan, salt: int, subtask: int, rows: Rows) -> Part:
    """What a subtask has after a batch, by what it had before."""
    kind, queue, rules = plan.seed % 4, before.rows(_QUEUE), dict(before.rules)
    if kind == 0:
        queue, rules = _RETURNING, {b"%d" % n: row for n, row in enumerate(_RETURNING)}
    elif kind == 1:
        queue, rules = (), {}
    elif kind == 2:
        queue = (*queue, *_queued(plan, rows))[-_QUEUED_MAX:]
        rules |= _ruled(plan, salt)
    seen = before.rows(_SEEN)
    if kind != 3:
        seen = (*_summed(seen), b"%d of %d: %d" % (subtask, plan.batch, _total(rows)))
    return _part(queue, seen, rules)


def whole_after(
    before: KeylessState, plan: Plan, salt: int, by_subtask: Sequence[Rows]
) -> KeylessState:
    """What all subtasks have after a batch."""
    parallelism = len(by_subtask)
    return KeylessState(
        tuple(
            part_after(before.begun(subtask, parallelism), plan, salt, subtask, rows)
            for subtask, rows in enumerate(by_subtask)
        )
    )


def _queued(plan: Plan, rows: Rows) -> list[bytes]:
    return [b"%d: %s %d" % (plan.batch, key[4:], amount) for key, amount in rows[:3]]


def _ruled(plan: Plan, salt: int) -> dict[bytes, bytes]:
    return {b"%d" % (plan.seed // 4 % _EACH_RULE): b"%d of %d" % (plan.seed % 1000, salt)}


def _total(rows: Rows) -> int:
    return sum(amount for _, amount in rows)


def _summed(seen: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Many rows as one, which depends on each of them and on their order."""
    return seen if len(seen) < _SEEN_MAX else (b"sum %08x" % crc32(b",".join(seen)),)


# --- the processor -------------------------------------------------------------------------------


class _Codec:
    """Rows of one field of bytes, after a byte that is the schema's version."""

    version = 1
    schema = StructType([StructField("content", BinaryType())])

    def encode(self, row: tuple[bytes]) -> bytes:
        return b"\x01" + row[0]

    def decode(self, data: bytes) -> tuple[bytes]:
        return (data[1:],)

    def decode_many(self, rows: Iterable[bytes]) -> list[tuple[bytes]]:
        return [self.decode(row) for row in rows]


class _KeyCodec(_Codec):
    """Keys are read together with where they end."""

    def decode(self, data: bytes) -> Any:
        return (data[1:],), len(data)


class Played:
    """What the played processor does with its states in one epoch."""

    def __init__(self, stored: StoredOperatorState) -> None:
        self.begun = decoded_part(stored)
        self._held = HeldOperatorState(stored)
        for name, kind in {**_MODES, _RULES: "broadcast"}.items():
            self._held.hold(name, kind, _Codec(), _KeyCodec(), "{}", "{}")

    def process(self, plan: Plan, salt: int, subtask: int, rows: Rows) -> None:
        """A batch's rows, as `part_after` has them."""
        queue: Any = self._held.states[_QUEUE]
        seen: Any = self._held.states[_SEEN]
        kind = plan.seed % 4
        if kind == 0:
            queue.update((row,) for row in _RETURNING)
        elif kind == 1:
            queue.clear()
        elif kind == 2:
            for row in _queued(plan, rows):
                queue.add((row,))
            queue.update(list(queue.get())[-_QUEUED_MAX:])
        if kind != 3:
            seen.update((row,) for row in _summed(tuple(row for (row,) in seen.get())))
            seen.add((b"%d of %d: %d" % (subtask, plan.batch, _total(rows)),))
        self._held.gate.is_open = True
        self._rule(plan, salt, kind)
        self._held.gate.is_open = False

    def _rule(self, plan: Plan, salt: int, kind: int) -> None:
        rules: Any = self._held.states[_RULES]
        if kind < 2:
            rules.clear()
        if kind == 0:
            for number, row in enumerate(_RETURNING):
                rules.put((b"%d" % number,), (row,))
        elif kind == 2:
            for key, row in _ruled(plan, salt).items():
                rules.put((key,), (row,))

    def snapshot(self) -> OperatorSnapshot:
        """What is there at the end."""
        return self._held.snapshot()


def decoded_part(stored: StoredOperatorState) -> Part:
    """What is stored, as the model has it."""
    decode: Callable[[bytes], tuple[bytes]] = _Codec().decode
    lists: Mapping[str, StoredList] = stored.lists
    maps: Mapping[str, StoredMap] = stored.maps
    rows = {name: tuple(decode(row)[0] for row in one.rows) for name, one in lists.items()}
    rules = maps[_RULES].entries if _RULES in maps else {}
    return _part(
        rows.get(_QUEUE, ()),
        rows.get(_SEEN, ()),
        {decode(key)[0]: decode(row)[0] for key, row in rules.items()},
    )
