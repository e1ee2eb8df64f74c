"""The model of what goes by time: timers, a value that expires, and the job's watermark.

It is plain Python beside the product: what the timers and values of all keys are, and, from how
the product's modules say that they lie in the store, what the store must hold for them. What the
played processor does with a row or a timer follows from the row alone, so that both may ask for it.

Due is what is at or below the time of the batch: the watermark of the job, or the time that Spark
has logged for the batch, which may be an earlier one than that of the batch before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from tests.sim.clocks import BEGAN_MS
from tests.sim.location import Plan, State

__all__ = [
    "DELAY_MS",
    "EVENT",
    "PROCESSING",
    "SEEN_ID",
    "TTL_MS",
    "Clock",
    "after",
    "begun_at_ms",
    "event_ms",
    "next_timer_ms",
    "set_again_ms",
    "set_ms",
    "takes_back_last",
    "takes_back_next",
]

EVENT: Final = "event"
PROCESSING: Final = "processing"
DELAY_MS: Final = 1_200  # of the watermark
TTL_MS: Final = 2_500
SEEN_ID: Final = 1  # the number of the state that expires
_DELAYS_MS: Final = (0, 1, 200, 900, 3_000, 3_600_000)
_BIAS: Final = 1 << 63
_BY_TIME, _BY_KEY, _BY_EXPIRY = b"\xff\xff", b"\xff\xfe", b"\xff\xfd"
_OF_COUNTS: Final = b"\x00\x00"
_OF_SEEN: Final = SEEN_ID.to_bytes(2, "big")
_VALUE: Final = b"\x00"  # the kind, in the index of what expires
_WIDTH: Final = 9  # 2 ** 9 ms: between an eighth and a quarter of the time to live

Row = tuple[bytes, int]


# --- what the processor does ---------------------------------------------------------------------


def _roll(plan: Plan, key: bytes, amount: int) -> int:
    return crc32(b"%d %d " % (plan.seed, amount) + key)


def event_ms(plan: Plan, key: bytes, amount: int) -> int:
    """When a row happened; later batches have later rows on the whole."""
    return BEGAN_MS + 700 * plan.batch + _roll(plan, key, amount) % 4_000


def set_ms(mode: str, plan: Plan, key: bytes, amount: int) -> int | None:
    """The time for which a row sets a timer, if it does."""
    roll = _roll(plan, key, amount) >> 12
    if roll % 3:
        return None
    now_ms = event_ms(plan, key, amount) if mode == EVENT else plan.stamp_ms
    return now_ms + _DELAYS_MS[roll // 3 % len(_DELAYS_MS)]


def takes_back_next(plan: Plan, key: bytes, amount: int) -> bool:
    """Whether a row deletes its key's next timer."""
    return (_roll(plan, key, amount) >> 20) % 11 == 0


def _roll_at(key: bytes, at_ms: int) -> int:
    return crc32(b"%d " % at_ms + key)


def set_again_ms(key: bytes, at_ms: int) -> int | None:
    """The time for which a timer sets another one, if it does."""
    roll = _roll_at(key, at_ms)
    return None if roll % 4 else at_ms + 1 + roll // 4 % 3_000


def takes_back_last(key: bytes, at_ms: int) -> bool:
    """Whether a timer deletes the last of its key's."""
    return _roll_at(key, at_ms) % 4 == 1


def begun_at_ms(key: bytes) -> int:
    """The timer that a key of the initial state has."""
    return BEGAN_MS + crc32(key) % 5_000


# --- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clock:
    """The job's watermark in a batch, and what there is before it.

    Attributes:
        late_ms: the watermark of the batch before: rows up to it are late.
        seen_ms: the latest event time of all batches before.
    """

    watermark_ms: int = 0
    late_ms: int = 0
    seen_ms: int | None = None

    def after(self, mode: str, plan: Plan, rows: Iterable[Row]) -> Clock:
        """Of the next batch; late rows count, too."""
        if mode != EVENT:
            return self
        seen = [event_ms(plan, key, amount) for key, amount in rows]
        latest = max([*seen, *([] if self.seen_ms is None else [self.seen_ms])], default=None)
        reached_ms = 0 if latest is None else latest - DELAY_MS
        return Clock(max(self.watermark_ms, reached_ms), self.watermark_ms, latest)


@dataclass
class _Keys:
    """All keys' counts, timers and values that expire (until when, and how many)."""

    counts: State = field(default_factory=dict)
    timers: dict[bytes, set[int]] = field(default_factory=dict)
    seen: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    def add(self, key: bytes, amount: int) -> bytes:
        self.counts[key] = b"%d" % (int(self.counts.get(key, b"0")) + amount)
        return self.counts[key]

    def drop(self, key: bytes, at_ms: int) -> None:
        self.timers[key].discard(at_ms)


def _at(at_ms: int) -> bytes:
    return (at_ms + _BIAS).to_bytes(8, "big")


def _ms(at: bytes) -> int:
    return int.from_bytes(at, "big") - _BIAS


def _in_index(expiry_ms: int) -> int:
    """When what expires is looked at: its expiry, rounded up."""
    return (-(-(expiry_ms + _BIAS) >> _WIDTH) << _WIDTH) - _BIAS


def _decoded(state: State) -> _Keys:
    keys = _Keys()
    for full, value in state.items():
        group, kind, rest = full[:2], full[2:4], full[4:]
        if kind == _OF_COUNTS:
            keys.counts[full] = value
        elif kind == _BY_TIME:
            keys.timers.setdefault(group + _OF_COUNTS + rest[8:], set()).add(_ms(rest[:8]))
        elif kind == _OF_SEEN:
            keys.seen[group + _OF_COUNTS + rest] = _ms(value[:8]), int(value[9:])
    return keys


def _encoded(keys: _Keys) -> State:
    state = dict(keys.counts)
    for key, times in keys.timers.items():
        for at_ms in times:
            state[key[:2] + _BY_TIME + _at(at_ms) + key[4:]] = b""
            state[key[:2] + _BY_KEY + key[4:] + _at(at_ms)] = b""
    for key, (expiry_ms, count) in keys.seen.items():
        state[key[:2] + _OF_SEEN + key[4:]] = _at(expiry_ms) + bytes([_WIDTH]) + b"%d" % count
        listed = _at(_in_index(expiry_ms)) + _VALUE + _OF_SEEN
        state[key[:2] + _BY_EXPIRY + listed + key[4:]] = b""
    return state


def next_timer_ms(state: State) -> int | None:
    """The earliest timer of a state."""
    return min((_ms(key[4:12]) for key in state if key[2:4] == _BY_TIME), default=None)


def after(
    mode: str, before: State, plan: Plan, rows: Iterable[Row], clock: Clock, initial: State
) -> tuple[State, State]:
    """State after a batch, and what is put out for it.

    Args:
        initial: what the keys begin with, in the first batch.
    """
    keys, output = _decoded(before), State()
    for key, total in initial.items():
        keys.counts[key] = total
        keys.timers.setdefault(key, set()).add(begun_at_ms(key))
    for key, amount in rows:
        if mode != EVENT or event_ms(plan, key, amount) > clock.late_ms:
            _take(keys, output, mode, plan, key, amount)
    _fire(keys, output, clock.watermark_ms if mode == EVENT else plan.stamp_ms)
    gone = [
        key for key, (expiry_ms, _) in keys.seen.items() if _in_index(expiry_ms) <= plan.stamp_ms
    ]
    for key in gone:
        del keys.seen[key]
    return _encoded(keys), output


def _take(keys: _Keys, output: State, mode: str, plan: Plan, key: bytes, amount: int) -> None:
    if amount:
        output[key] = keys.add(key, amount)
    else:
        keys.counts.pop(key, None)
        output[key] = b""
    expiry_ms, count = keys.seen.get(key, (plan.stamp_ms, 0))
    count = count + 1 if expiry_ms > plan.stamp_ms else 1
    keys.seen[key] = plan.stamp_ms + TTL_MS, count
    output[key + b"~"] = b"%d" % count
    own = keys.timers.setdefault(key, set())
    if own and takes_back_next(plan, key, amount):
        own.discard(min(own))
    at_ms = set_ms(mode, plan, key, amount)
    if at_ms is not None:
        own.add(at_ms)


def _fire(keys: _Keys, output: State, now_ms: int) -> None:
    """Those that are set now, in the order of their times; one that is set meanwhile waits."""
    due = sorted((at, key) for key, own in keys.timers.items() for at in own if at <= now_ms)
    taken_back: set[tuple[int, bytes]] = set()
    for at_ms, key in due:
        own = keys.timers[key]
        if (at_ms, key) in taken_back:
            continue
        output[key + b"@%d" % at_ms] = keys.add(key, 1)
        if takes_back_last(key, at_ms):
            taken_back.add((max(own), key))
            own.discard(max(own))
        again_ms = set_again_ms(key, at_ms)
        if again_ms is not None:
            own.add(again_ms)
        own.discard(at_ms)
