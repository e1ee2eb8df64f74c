"""From measured load to a suggested parallelism: pure, times passed in.

The model is that of Flink's autoscaler (FLIP-271): the work that there is, in subtasks that would
each be busy for the target share of their time. Suggested is the smallest parallelism that has as
much, if the load has left the band around the target for a whole window, and what was changed last
is some time ago.

Subtasks have whole key groups, so the one with the most of them sets the pace: 128 groups on 100
subtasks are done no sooner than on 64. Such parallelisms are never suggested.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from statebackend.errors import SettingError

__all__ = ["Load", "RescalePolicy", "Suggestion", "suggest"]

_ROUND_UP: Final = 1.5  # so many times what is needed, at most, to keep key groups together
_EPSILON: Final = 1e-9


@dataclass(frozen=True, kw_only=True)
class Load:
    """One measurement of a running query.

    Attributes:
        at_s: when, by a clock that never goes backwards.
        busy_share: the share of its time that the query was in a batch, 0 to 1.
        input_rows_per_s: how fast rows come in.
        processed_rows_per_s: how fast they are worked on while a batch runs; 0: not known.
        waiting_rows: how many lie in the source; None: it does not say.
        state_bytes: on disk, over all subtasks of all operators; 0: not known.
    """

    at_s: float
    busy_share: float
    input_rows_per_s: float = 0.0
    processed_rows_per_s: float = 0.0
    waiting_rows: float | None = None
    state_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RescalePolicy:
    """When a query gets another parallelism, and which.

    Attributes:
        min_parallelism: the least.
        max_parallelism: the most; 0: as many as the job has key groups.
        target_busy_share: how busy subtasks are to be.
        lower_busy_share: nothing is done above it; at most half the target. So a parallelism that
            was suggested is never changed for itself.
        upper_busy_share: nothing is done below it; at least the target.
        window_s: the load is looked at for so long.
        min_samples: and for so many batches.
        warm_up_s: what is measured so soon after a start does not count.
        up_pause_s: after a start, before a change upwards.
        down_pause_s: after a start, before a change downwards.
        min_change_share: a smaller change, of the parallelism there is, is not worth a restart.
        up_factor_max: the largest step upwards.
        down_factor_max: the largest step downwards.
        catch_up_s: rows that wait are to be worked off within this time.
        batch_target_s: batches that follow each other at once are as long as they are: one that
            takes less than this counts as idle for the rest of it.
        state_bytes_per_subtask_max: more state than that asks for more subtasks; 0: never.
        subtasks_per_core_max: more subtasks than that on the cores there are do nothing sooner.
    """

    min_parallelism: int = 1
    max_parallelism: int = 0
    target_busy_share: float = 0.7
    lower_busy_share: float = 0.3
    upper_busy_share: float = 0.9
    window_s: float = 120.0
    min_samples: int = 3
    warm_up_s: float = 60.0
    up_pause_s: float = 120.0
    down_pause_s: float = 900.0
    min_change_share: float = 0.2
    up_factor_max: float = 4.0
    down_factor_max: float = 2.0
    catch_up_s: float = 600.0
    batch_target_s: float = 1.0
    state_bytes_per_subtask_max: int = 0
    subtasks_per_core_max: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot be followed. Raises `SettingError`."""
        lower, target, upper = self.lower_busy_share, self.target_busy_share, self.upper_busy_share
        checks = {
            "min_parallelism is at least 1": self.min_parallelism >= 1,
            "max_parallelism is 0, or not below min_parallelism": self.max_parallelism == 0
            or self.max_parallelism >= self.min_parallelism,
            "0 < lower_busy_share <= target_busy_share / 2": 0 < lower <= target / 2,
            "target_busy_share <= upper_busy_share <= 1": target <= upper <= 1,
            "times are positive": self._times_are_positive(),
            "min_samples is at least 1": self.min_samples >= 1,
            "min_change_share is 0 to below 1": 0 <= self.min_change_share < 1,
            "steps are larger than 1": min(self.up_factor_max, self.down_factor_max) > 1,
            "limits are not negative": self.state_bytes_per_subtask_max >= 0
            and self.subtasks_per_core_max > 0,
        }
        broken = [what for what, holds in checks.items() if not holds]
        if broken:
            raise SettingError(
                f"The policy cannot be followed: {self}.", todo=f"What must hold: {broken[0]}."
            )

    def _times_are_positive(self) -> bool:
        pauses = min(self.warm_up_s, self.up_pause_s, self.down_pause_s)
        return pauses >= 0 and min(self.window_s, self.catch_up_s, self.batch_target_s) > 0


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Another parallelism, and why."""

    parallelism: int
    reason: str


def suggest(
    window: Sequence[Load],
    *,
    policy: RescalePolicy,
    parallelism: int,
    max_parallelism: int,
    now_s: float,
    changed_s: float = float("-inf"),
    cores: int | None = None,
) -> Suggestion | None:
    """The parallelism that the load asks for; None: the one that there is will do.

    Args:
        window: measurements, oldest first.
        parallelism: what it was measured at. max_parallelism: the job's key groups.
        changed_s: when the query was started at this parallelism.
        cores: of the cluster; None: as many as are asked for.
    """
    warm_s = changed_s + policy.warm_up_s
    warm = [load for load in window if load.at_s >= warm_s]
    if now_s - policy.window_s < warm_s or len(warm) < policy.min_samples:
        return None
    recent = sum(load.at_s >= now_s - policy.window_s for load in warm)
    loads = warm[-max(recent, policy.min_samples) :]
    chosen = _wanted(loads, policy, parallelism, max_parallelism, cores)
    if chosen is None:
        return None
    pause_s = policy.up_pause_s if chosen.parallelism > parallelism else policy.down_pause_s
    return chosen if now_s >= changed_s + pause_s else None


def _wanted(
    loads: Sequence[Load],
    policy: RescalePolicy,
    parallelism: int,
    max_parallelism: int,
    cores: int | None,
) -> Suggestion | None:
    # Upwards by what is usual, downwards only if there was no moment in which it was needed.
    demands = [_demand(load, policy) for load in loads]
    usual, most = sum(demands) / len(demands), max(demands)
    state_bytes = max(load.state_bytes for load in loads)
    by_state = _for_state(state_bytes, policy.state_bytes_per_subtask_max)
    groups = _Groups(max_parallelism, parallelism)
    lowest = min(policy.min_parallelism, max_parallelism)
    highest = min(max_parallelism, policy.max_parallelism or max_parallelism)
    if cores is not None:
        useful = max(1, int(cores * policy.subtasks_per_core_max))
        highest = min(highest, max(useful, parallelism))
    highest = max(highest, lowest)
    too_busy = usual > policy.upper_busy_share + _EPSILON
    if too_busy or by_state > parallelism:
        busy = usual if too_busy else 0.0
        wanted = max(groups.smallest(busy, policy), by_state)
        largest = max(int(parallelism * policy.up_factor_max), groups.next_larger())
        wanted = min(wanted, largest, highest)
        why = f"{usual:.0%} busy" if too_busy else f"{state_bytes} bytes of state"
        upwards = True
    elif most < policy.lower_busy_share - _EPSILON:
        # With room to grow: state that has just fitted would bring the subtasks back.
        by_state = _for_state(2 * state_bytes, policy.state_bytes_per_subtask_max)
        wanted = max(groups.smallest(most, policy), by_state)
        least = min(math.ceil(parallelism / policy.down_factor_max), parallelism - 1)
        wanted = max(wanted, least)
        why, upwards = f"{most:.0%} busy at most", False
    else:
        return _within(parallelism, lowest, highest)
    wanted = groups.tight(max(lowest, min(wanted, highest)), lowest)
    if upwards != (wanted > parallelism) or wanted == parallelism:
        return _within(parallelism, lowest, highest)
    if abs(wanted - parallelism) < policy.min_change_share * parallelism:
        return None
    return Suggestion(parallelism=wanted, reason=f"{why} at parallelism {parallelism}")


def _within(parallelism: int, lowest: int, highest: int) -> Suggestion | None:
    """What the range asks for, whatever the load is."""
    allowed = max(lowest, min(parallelism, highest))
    if allowed == parallelism:
        return None
    return Suggestion(parallelism=allowed, reason=f"the policy's range ends at {allowed}")


def _demand(load: Load, policy: RescalePolicy) -> float:
    """The work that there is, in shares of the time of the subtasks there are."""
    waiting = load.waiting_rows or 0.0
    if not waiting or load.processed_rows_per_s <= 0:
        return load.busy_share
    return load.busy_share + waiting / (policy.catch_up_s * load.processed_rows_per_s)


def _for_state(state_bytes: int, per_subtask_max: int) -> int:
    return math.ceil(state_bytes / per_subtask_max) if per_subtask_max else 0


class _Groups:
    """What parallelisms are worth, by the key groups of the subtask that has the most."""

    def __init__(self, max_parallelism: int, parallelism: int) -> None:
        self._all, self._now = max_parallelism, parallelism

    def worth(self, parallelism: int) -> float:
        """How many subtasks with equally many groups would be done as soon."""
        return self._all / math.ceil(self._all / parallelism)

    def tight(self, parallelism: int, lowest: int = 1) -> int:
        """The smallest parallelism (not below ``lowest``) that is worth as much."""
        return max(lowest, math.ceil(self._all / math.ceil(self._all / parallelism)))

    def next_larger(self) -> int:
        """The smallest parallelism that is worth more than the one there is."""
        share = math.ceil(self._all / self._now)
        return math.ceil(self._all / max(1, share - 1))

    def smallest(self, busy: float, policy: RescalePolicy) -> int:
        """What has room for the load, with one that keeps key groups together preferred.

        Subtasks that are cut in whole numbers, or put together so, move less state: each new one
        has one parent, or whole ones. Else a divisor of the number of groups gives all the same.
        """
        needed = self.worth(self._now) * busy / policy.target_busy_share
        if needed >= self._all:
            return self._all
        largest_share = math.floor(self._all / max(needed, 1.0) + _EPSILON)
        least = math.ceil(self._all / largest_share)
        roomy = needed * policy.target_busy_share / policy.lower_busy_share
        last = min(self._all, math.floor(least * _ROUND_UP))
        near = [
            p
            for p in range(least, last + 1)
            if p == least or (self.worth(p) <= roomy and self.tight(p) == p)
        ]
        kept = _first(p for p in near if p % self._now == 0 or self._now % p == 0)
        return kept or _first(p for p in near if self._all % p == 0) or least


def _first(found: Iterable[int]) -> int:
    return next(iter(found), 0)
