"""Key groups: the unit of rescaling, and which subtask owns which.

A key's hash names its key group (`statebackend.key_hashing`), a number below the job's max
parallelism, which is fixed for the job's life. Each subtask owns one contiguous range of groups.
Formulas and cases are those of Apache Flink's `KeyGroupRangeAssignment`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from statebackend.errors import ParallelismError

__all__ = [
    "MAX_PARALLELISM",
    "TABLES_MAX_PARALLELISM",
    "KeyGroupRange",
    "check_parallelism",
    "default_max_parallelism",
    "key_group_range",
    "subtask_of",
]

MAX_PARALLELISM = 32768
"""The upper bound of parallelism and max parallelism; key groups fit into two bytes."""
TABLES_MAX_PARALLELISM = 1024
"""Of a savepoint that is made of tables, by default."""

_LOWEST_DEFAULT = 128


@dataclass(frozen=True, slots=True, order=True)
class KeyGroupRange:
    """A contiguous range of key groups, both ends inclusive; `end < start` is the empty range."""

    start: int
    end: int

    def __contains__(self, key_group: int) -> bool:
        return self.start <= key_group <= self.end

    def __len__(self) -> int:
        return max(0, self.end - self.start + 1)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end + 1))

    def intersection(self, other: KeyGroupRange) -> KeyGroupRange:
        """The groups that both ranges hold; an empty range (length 0) if there are none."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        # One shape for "nothing in common", so that empty intersections compare equal.
        return KeyGroupRange(start, end) if start <= end else KeyGroupRange(0, -1)


def default_max_parallelism(parallelism: int) -> int:
    """The max parallelism of a job that names none: `parallelism` with room to grow.

    The next power of two of one and a half times the parallelism, within 128 and 32768.

    Raises:
        ParallelismError: `parallelism` is outside 1 to 32768.
    """
    check_parallelism(parallelism, MAX_PARALLELISM)
    wanted = parallelism + parallelism // 2
    power = 1 << (wanted - 1).bit_length()
    return min(max(power, _LOWEST_DEFAULT), MAX_PARALLELISM)


def check_parallelism(parallelism: int, max_parallelism: int) -> None:
    """Refuse a parallelism that cannot be run.

    Raises:
        ParallelismError: either number is outside 1 to 32768, or there would be more subtasks
            than key groups.
    """
    for name, value in (("parallelism", parallelism), ("max_parallelism", max_parallelism)):
        if not 1 <= value <= MAX_PARALLELISM:
            raise ParallelismError(
                f"{name} is {value}, which is outside 1 to {MAX_PARALLELISM}.",
                todo=f"Give a {name} between 1 and {MAX_PARALLELISM}.",
            )
    if parallelism > max_parallelism:
        raise ParallelismError(
            f"parallelism {parallelism} is above max_parallelism {max_parallelism}: "
            "some subtasks would own no key group.",
            todo=f"Lower the parallelism to {max_parallelism} or less; "
            "the max parallelism of a new job may be raised instead.",
        )


def key_group_range(subtask: int, parallelism: int, max_parallelism: int) -> KeyGroupRange:
    """The key groups that `subtask` (0 to `parallelism` - 1) owns.

    Raises:
        ParallelismError: the parallelism cannot be run, or there is no such subtask.
    """
    check_parallelism(parallelism, max_parallelism)
    if not 0 <= subtask < parallelism:
        raise ParallelismError(
            f"There is no subtask {subtask} among {parallelism}.",
            todo=f"Subtasks are numbered 0 to {parallelism - 1}.",
        )
    start = (subtask * max_parallelism + parallelism - 1) // parallelism
    end = ((subtask + 1) * max_parallelism - 1) // parallelism
    return KeyGroupRange(start, end)


@overload
def subtask_of(key_group: int, parallelism: int, max_parallelism: int) -> int: ...


@overload
def subtask_of(
    key_group: NDArray[Any], parallelism: int, max_parallelism: int
) -> NDArray[np.int32]: ...


def subtask_of(
    key_group: int | NDArray[Any], parallelism: int, max_parallelism: int
) -> int | NDArray[np.int32]:
    """The subtask that owns a key group: `key_group * parallelism // max_parallelism`.

    Args:
        key_group: a group below `max_parallelism`, or an integer array of any shape of them.
        parallelism: subtasks of the operator.
        max_parallelism: key groups of the job.

    Returns:
        The subtask, or an int32 array of the same shape. The numbers are not checked: this is on
        the record path.
    """
    if isinstance(key_group, np.ndarray):
        # uint16 groups times parallelism reach 2**30: widen before multiplying.
        wide = key_group.astype(np.int64)
        subtasks: NDArray[np.int32] = (wide * parallelism // max_parallelism).astype(np.int32)
        return subtasks
    return key_group * parallelism // max_parallelism
