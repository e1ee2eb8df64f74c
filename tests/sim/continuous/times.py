"""The truth about event time: when each row happened, which timers it sets, and what fires when.

An *owner* of timers is a key of the first operator, or of the second one a bucket: ``-1 - bucket``.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from typing import Final

from tests.sim.continuous.model import SPLIT_ROWS, Model

__all__ = ["BASE_MS", "DELAY_MS", "Times", "owner_of"]

BASE_MS: Final = 1_700_000_000_000
DELAY_MS: Final = 400
"""By so much a row may be out of order, and by so much the watermark is behind."""


def owner_of(bucket: int) -> int:
    """Whose timers those of a bucket are."""
    return -1 - bucket


class Times:
    """The event times of all splits.

    Args:
        rate: rows of a split in a second. hold_ms: from a row to the timer that it sets.
    """

    def __init__(self, model: Model, *, splits: int, rate: float, hold_ms: int) -> None:
        self._model, self._splits = model, splits
        self._step_ms, self._hold_ms = int(1000 / rate), hold_ms
        self._places = 0  # of each split, that are known
        self._timers: dict[int, list[int]] = {}  # by owner, in order
        self._rows: dict[int, list[tuple[int, int, int]]] = {}  # by owner: time, key and rank

    def at_ms(self, id: int) -> int:
        """When a row happened."""
        jitter_ms = self._model.drawn("jitter", id) % DELAY_MS
        return BASE_MS + id % SPLIT_ROWS * self._step_ms + jitter_ms

    def timer_ms(self, id: int) -> int | None:
        """The timer that a row sets; every other row sets one."""
        return self.at_ms(id) + self._hold_ms if self._model.drawn("timer", id) % 2 else None

    def timers_until(self, owner: int, at_ms: int) -> list[int]:
        """Those of an owner that fire up to then, each time once."""
        self._look(at_ms)
        known = self._timers.get(owner, [])
        return known[: bisect_right(known, at_ms)]

    def owners(self, at_ms: int) -> list[int]:
        """Who has timers up to then."""
        self._look(at_ms)
        return [owner for owner, known in self._timers.items() if known[0] <= at_ms]

    def pending(self, ids: Iterable[int], fired: int) -> list[int]:
        """The timers that are set once these rows were seen and so many have fired."""
        set_ms = {at_ms for id in ids if (at_ms := self.timer_ms(id)) is not None}
        return sorted(set_ms)[fired:]

    def ranks_until(self, owner: int, at_ms: int) -> dict[int, int]:
        """By key, the last of an owner's rows that happened up to then."""
        self._look(at_ms)
        known = self._rows.get(owner, [])
        found: dict[int, int] = {}
        for _, key, rank in known[: bisect_right(known, (at_ms + 1,))]:
            found[key] = max(found.get(key, 0), rank)
        return found

    def _look(self, at_ms: int) -> None:
        while BASE_MS + self._places * self._step_ms <= at_ms:
            for split in range(self._splits):
                self._take(split * SPLIT_ROWS + self._places)
            self._places += 1

    def _take(self, id: int) -> None:
        key, rank = self._model.key(id), self._model.rank(id)
        for owner in (key, owner_of(self._model.bucket(id))):
            insort(self._rows.setdefault(owner, []), (self.at_ms(id), key, rank))
            timer_ms = self.timer_ms(id)
            if timer_ms is not None and timer_ms not in self._timers.get(owner, ()):
                insort(self._timers.setdefault(owner, []), timer_ms)
