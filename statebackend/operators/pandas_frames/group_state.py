"""Spark's GroupState for the call of one key, and the changes of many calls, written at once.

A key has a row in state "state" and, with timeouts, its timeout in state "timeout" and as a timer.
Each may be there without the other: a function may remove the value and set a timeout.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from statebackend.operators.vector.column_states import ArrowValueState
from statebackend.operators.vector.column_timers import ArrowTimers
from statebackend.operators.vector.key_vector import Keys
from statebackend.schema.codec import RowCodec

__all__ = [
    "NO_TIME_MS",
    "STATE",
    "TIMEOUT",
    "Changes",
    "KeyState",
    "StateTimes",
    "Timeouts",
    "timer_ms",
    "with_timeouts",
]

STATE: Final = "state"
TIMEOUT: Final = "timeout"
NO_TIME_MS: Final = GroupState.NO_TIMESTAMP
_LAST_MS: Final = 2**63 - 2
# As Spark converts what pandas and numpy give; other types stay as they are.
_PLAIN: Final = frozenset({int, float, str, bool, bytes, type(None), list, dict, tuple})
_CONVERTED: Final = ("to_pytimedelta", "to_pydatetime")


def with_timeouts(timeout_conf: str) -> bool:
    """Whether keys time out."""
    return timeout_conf != GroupStateTimeout.NoTimeout


class StateTimes:
    """What all keys of an epoch are told of time.

    Args:
        timeout_conf: one of ``GroupStateTimeout``.
        watermark_ms: None where the input has no watermark.
    """

    def __init__(
        self, timeout_conf: str, processing_time_ms: int, watermark_ms: int | None
    ) -> None:
        self.timeout_conf, self.processing_time_ms = timeout_conf, processing_time_ms
        self.has_watermark = watermark_ms is not None
        self.watermark_ms = NO_TIME_MS if watermark_ms is None else watermark_ms


class KeyState(GroupState):
    """Spark's GroupState: what it gives and what it raises are pyspark's own methods."""

    def __init__(
        self, times: StateTimes, value: tuple[Any, ...] | None, *, timed_out: bool
    ) -> None:
        super().__init__(
            optionalValue=value,  # type: ignore[arg-type]  # all that is asked of it is its items
            batchProcessingTimeMs=times.processing_time_ms,
            eventTimeWatermarkMs=times.watermark_ms,
            timeoutConf=times.timeout_conf,
            hasTimedOut=timed_out,
            watermarkPresent=times.has_watermark,
            defined=value is not None,
            updated=False,
            removed=False,
            # A call does not see the timeout that was set before it, and need not set it again.
            timeoutTimestamp=NO_TIME_MS,
            keyAsUnsafe=b"",
            valueSchema=None,  # type: ignore[arg-type]  # for Spark's way back to the JVM
        )

    def update(self, newValue: Any) -> None:
        """As pyspark's, at a quarter of its cost, of which most is an import in each call."""
        if newValue is None:
            super().update(newValue)  # type: ignore[arg-type]  # says so
        self._value: Any = tuple([v if type(v) in _PLAIN else _as_python(v) for v in newValue])
        self._defined, self._updated, self._removed = True, True, False

    @property
    def change(self) -> tuple[bool, tuple[Any, ...] | None, int] | None:
        """What the call did: whether the value changed, the value, the timeout; None: nothing."""
        timeout_ms = self._timeout_timestamp
        touched = self._updated or self._removed
        if not touched and timeout_ms == NO_TIME_MS:
            return None
        return touched, self._value if self._defined else None, int(timeout_ms)


def _as_python(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.tolist()
    for name in _CONVERTED:
        if hasattr(value, name):
            return getattr(value, name)()
    return value


def timer_ms(timeout_ms: Any) -> Any:
    """Where the timer of a timeout stands: Spark's keys time out after that time, not at it."""
    return np.minimum(timeout_ms, _LAST_MS) + 1


class Timeouts:
    """The timeouts of keys, in a state of their own and as timers."""

    def __init__(self, state: ArrowValueState, timers: ArrowTimers) -> None:
        self._state, self._timers = state, timers

    def get(self, keys: Keys) -> Any:
        """Of each key, ``NO_TIME_MS`` without one (int64)."""
        return self._state.get(keys).column(0).fill_null(NO_TIME_MS).to_numpy()

    def replace(self, keys: Keys, old_ms: Any, new_ms: Any) -> None:
        """Set, move or clear those of keys that come once each."""
        changed = old_ms != new_ms
        had, has = changed & (old_ms != NO_TIME_MS), changed & (new_ms != NO_TIME_MS)
        if had.any():
            self._timers.delete(keys.take(had), timer_ms(old_ms[had]))
        self._write(keys, had & ~has, has, new_ms)

    def fired(self, keys: Keys, firing_ms: Any, places: Any, new_ms: Any) -> None:
        """Set or clear those of some keys; of the others they stay in force.

        Args:
            keys, firing_ms: all whose timers are firing, and the times of these.
        """
        stay = np.ones(len(keys), np.bool_)
        stay[places] = False
        if stay.any():
            self._timers.keep(keys.take(stay), firing_ms[stay])
        some = keys.take(places)
        self._write(some, new_ms == NO_TIME_MS, new_ms != NO_TIME_MS, new_ms)

    def _write(self, keys: Keys, cleared: Any, put: Any, new_ms: Any) -> None:
        if cleared.any():
            self._state.delete(keys.take(cleared))
        if put.any():
            some = keys.take(put)
            self._state.put(some, [new_ms[put]])
            self._timers.register(some, timer_ms(new_ms[put]))


class Changes:
    """What calls did to keys, in the order of these; held encoded until it is written."""

    def __init__(self, values: ArrowValueState, timeouts: Timeouts | None) -> None:
        self._values, self._timeouts = values, timeouts
        self._codec: RowCodec = values.codec
        self._clear()

    def _clear(self) -> None:
        self._put: list[int] = []
        self._rows: list[bytes] = []
        self._removed: list[int] = []
        self._timed: list[int] = []
        self._new_ms: list[int] = []
        self.nbytes = 0

    def note(self, place: int, state: KeyState) -> None:
        """Take what the call for a key did.

        Raises:
            ValueMismatchError: the value does not fit the state's schema.
        """
        change = state.change
        if change is None:
            return
        touched, value, timeout_ms = change
        if touched and value is not None:
            data = self._codec.encode(value)
            self.nbytes += len(data)
            self._put.append(place)
            self._rows.append(data)
        elif touched:
            self._removed.append(place)
        if self._timeouts is not None:
            self._timed.append(place)
            self._new_ms.append(timeout_ms)

    def write(self, keys: Keys, firing_ms: Any = None) -> None:
        """Write it all, and begin anew.

        Args:
            keys: those that places count. firing_ms: of keys that have timed out, their timers.
        """
        if self._put:
            self._values.put_encoded(keys.take(self._put), self._rows)
        if self._removed:
            self._values.delete(keys.take(self._removed))
        if self._timeouts is not None:
            self._write_timeouts(self._timeouts, keys, firing_ms)
        self._clear()

    def _write_timeouts(self, timeouts: Timeouts, keys: Keys, firing_ms: Any) -> None:
        places, new_ms = np.array(self._timed, np.int64), np.array(self._new_ms, np.int64)
        if firing_ms is not None:
            timeouts.fired(keys, firing_ms, places, new_ms)
        elif len(places):
            some = keys.take(places)
            timeouts.replace(some, timeouts.get(some), new_ms)
