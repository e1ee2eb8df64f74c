"""What a run's state decides on (see `run_state`): the effects to be had, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from snapshot.barriers.checkpoint_trigger import Request
from snapshot.barriers.pending_checkpoints import Reason, Subtask
from statebackend.continuous.job.slot_messages import Acked, Command
from statebackend.errors import StateBackendError

__all__ = ["Broken", "Ended", "Out", "Publish", "Send", "Settled", "Write", "named"]

_NAMED: Final = 10


@dataclass(frozen=True)
class Send:
    """Say something to a slot; None: to all."""

    slot: int | None
    command: Command


@dataclass(frozen=True)
class Write:
    """Write the records of a checkpoint, then say `written`.

    Attributes:
        parts: of every subtask.
        cuts: of every source's splits that nobody had, by vertex.
        began_s: when it was triggered.
    """

    checkpoint: int
    epoch: int
    parts: Mapping[Subtask, Acked]
    cuts: Mapping[str, bytes]
    began_s: float


@dataclass(frozen=True)
class Publish:
    """The checkpoint is durable: commit what its sinks have prepared, then say `published`."""

    checkpoint: int
    epoch: int
    parts: Mapping[Subtask, Acked]
    is_last: bool


@dataclass(frozen=True)
class Settled:
    """A checkpoint is over.

    Attributes:
        reason: why it was given up; None: it is complete.
        waited_for: those that had not acked when it was given up.
    """

    checkpoint: int
    epoch: int
    reason: Reason | None
    took_s: float
    request: Request | None
    waited_for: frozenset[Subtask] = frozenset()


@dataclass(frozen=True)
class Ended:
    """The job is over; every slot was told to stop."""


@dataclass(frozen=True)
class Broken:
    """The run has failed: end it."""

    error: StateBackendError


Out: TypeAlias = Send | Write | Publish | Settled | Ended | Broken


def named(subtasks: frozenset[Subtask]) -> str:
    """Some of them, for people."""
    names = [f"{one.vertex}/{one.index}" for one in sorted(subtasks)]
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
