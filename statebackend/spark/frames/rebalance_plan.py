"""When subtasks are to be placed anew, and which of them have to move: pure, times passed in.

A subtask stays with the executor that holds its part of the anchor. One that was lost leaves its
subtasks to the others, and its replacement gets none, until they are placed anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

__all__ = ["PlacementWatch", "surplus"]

_PATIENCE: Final = 3  # settling times that those who stay wait for those who come and go
_PAUSE_SETTLINGS: Final = 6
_PAUSE_S_MAX: Final = 900.0


@dataclass(frozen=True, kw_only=True)
class PlacementWatch:
    """What was seen of the executors since subtasks were placed last.

    An executor that flaps never settles, and so moves nothing; others do not wait for it long.
    Where settled ones keep dying all the same, the pause between two placings doubles. One that is
    gone is given time to be replaced.

    Attributes:
        placed: the executors that had their share then, and are still there.
        settle_s: how long a newcomer must have been there without a break.
        newcomers: those that had none, each with the time from which on it was seen.
        gone_s: when one that had its share was last seen to be gone.
        earliest_s: the next placing is not before.
        pause_s: between the last placing and that.
    """

    placed: frozenset[str]
    settle_s: float
    newcomers: Mapping[str, float] = field(default_factory=dict)
    gone_s: float | None = None
    earliest_s: float = float("-inf")
    pause_s: float = 0.0

    def seen(self, executors: Collection[str], now_s: float) -> PlacementWatch:
        """After a look at the executors."""
        still = self.placed.intersection(executors)
        since = {e: self.newcomers.get(e, now_s) for e in executors if e not in still}
        gone_s = self.gone_s if still == self.placed else now_s
        return replace(self, placed=still, newcomers=since, gone_s=gone_s)

    def due(self, now_s: float) -> bool:
        """Whether subtasks are to be placed anew."""
        if now_s < self.earliest_s:
            return False
        patience_s = _PATIENCE * self.settle_s
        if not self.newcomers:
            if self.gone_s is None or not self.placed:
                return False
            return now_s - self.gone_s >= patience_s
        ages = [now_s - since_s for since_s in self.newcomers.values()]
        settled = [age for age in ages if age >= self.settle_s]
        return bool(settled) and (len(settled) == len(ages) or max(ages) >= patience_s)

    def tried(self, executors: Collection[str], now_s: float, *, done: bool) -> PlacementWatch:
        """After subtasks were placed over ``executors``, or could not be (``done`` is false)."""
        first = _PAUSE_SETTLINGS * self.settle_s
        again_soon = now_s - self.earliest_s < self.pause_s
        pause_s = min(2 * self.pause_s, max(first, _PAUSE_S_MAX)) if again_soon else first
        waiting = replace(self, earliest_s=now_s + pause_s, pause_s=pause_s)
        if not done:
            return waiting
        return replace(waiting, placed=frozenset(executors), newcomers={}, gone_s=None)


def surplus(places: Mapping[int, str], executors: Collection[str], subtasks: int) -> list[int]:
    """The fewest subtasks that must leave their executors for all to have the same share.

    Args:
        places: the executor of each subtask that has one.
        executors: those that are there.
        subtasks: how many there are.
    """
    if not executors:
        return []
    held: dict[str, list[int]] = {executor: [] for executor in sorted(executors)}
    for subtask, executor in sorted(places.items()):
        if executor in held:
            held[executor].append(subtask)
    share, extra = divmod(subtasks, len(held))
    leaving: list[int] = []
    # One more for those that have the most: so that nobody gives what another has to get back.
    for number, mine in enumerate(sorted(held.values(), key=len, reverse=True)):
        leaving += mine[share + (number < extra) :]
    return sorted(leaving)
