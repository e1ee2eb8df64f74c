"""Which channel a row goes to. Vectorised: one reordering of a batch, not a filter per channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from statebackend.key_hashing import key_groups
from statebackend.keygroups import check_parallelism, subtask_of
from statebackend.state.binary_columns import take

__all__ = ["Partitioner", "broadcast", "by_key_group", "forward", "rebalance"]

Partitioner = Callable[[pa.RecordBatch], Sequence[tuple[int, pa.RecordBatch]]]
"""From rows to (channel, its rows in their order); a channel without rows is left out."""


def forward(channel: int = 0) -> Partitioner:
    """All rows to one channel."""
    return lambda batch: [(channel, batch)]


def broadcast(channels: int) -> Partitioner:
    """All rows to each of so many channels."""
    return lambda batch: [(channel, batch) for channel in range(channels)]


def rebalance(channels: int, first: int = 0) -> Partitioner:
    """Each batch, whole, to the next of so many channels, from ``first`` on.

    Give each sender another ``first``, or all begin with the same receiver.
    """
    return _Turns(channels, first % channels)


def by_key_group(
    key_positions: Sequence[int], parallelism: int, max_parallelism: int
) -> Partitioner:
    """Each row to the subtask that owns its key group: as Spark's plan does in micro-batches.

    Args:
        key_positions: where the key columns stand among a batch's columns.
        parallelism: of the receiver; channel i goes to its subtask i.
        max_parallelism: key groups of the job.

    Raises:
        ParallelismError: it cannot be run.
    """
    check_parallelism(parallelism, max_parallelism)
    if parallelism == 1:
        return forward()
    return _Keyed(tuple(key_positions), parallelism, max_parallelism)


@dataclass
class _Turns:
    channels: int
    at: int

    def __call__(self, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        channel, self.at = self.at, (self.at + 1) % self.channels
        return [(channel, batch)]


@dataclass(frozen=True)
class _Keyed:
    key_positions: tuple[int, ...]
    parallelism: int
    max_parallelism: int
    _owners: np.ndarray[tuple[int], np.dtype[np.uint16]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # A table of at most 64 KB instead of a multiplication and a division for each row.
        groups = np.arange(self.max_parallelism)
        owners = subtask_of(groups, self.parallelism, self.max_parallelism)
        object.__setattr__(self, "_owners", owners.astype(np.uint16))

    def __call__(self, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        if not batch.num_rows:
            return []
        keys = [batch.column(position) for position in self.key_positions]
        owners = self._owners[key_groups(keys, self.max_parallelism)]
        counts = np.bincount(owners, minlength=self.parallelism)
        present = np.flatnonzero(counts)
        if len(present) == 1:
            return [(int(present[0]), batch)]
        # numpy sorts numbers of 16 bits by radix: rows of one channel keep their order.
        dealt = take(batch, np.argsort(owners, kind="stable"))
        ends = np.cumsum(counts)
        return [
            (int(channel), dealt.slice(int(ends[channel] - counts[channel]), int(counts[channel])))
            for channel in present
        ]
