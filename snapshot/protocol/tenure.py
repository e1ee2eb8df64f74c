"""One driver's right to append, and what an answer of the store means for it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Protocol

from snapshot.formats.record import Manifest
from snapshot.storage.object_store import CreateOutcome
from statebackend.errors import StateBackendError
from statebackend.threads import THREADS, Threads

__all__ = ["NoPatience", "Patience", "Tenure", "Verdict", "judge", "next_generation"]


class Verdict(enum.Enum):
    """What became of a commit."""

    COMMITTED = "committed"
    FENCED = "fenced"
    UNKNOWN = "unknown"


def judge(outcome: CreateOutcome | None, found_write_id: str | None, own_write_id: str) -> Verdict:
    """What an answer and a read-back mean together.

    Args:
        outcome: of the create; None if no answer came.
        found_write_id: in the slot when it was read back; None if it was absent or unreadable, or
            was not read (after CREATED it need not be).
        own_write_id: of this write, never used for another.
    """
    if outcome is CreateOutcome.CREATED or found_write_id == own_write_id:
        return Verdict.COMMITTED
    if found_write_id is not None:
        return Verdict.FENCED
    # Nothing there is no proof of failure: a write was seen to land after its client gave up.
    return Verdict.UNKNOWN


def next_generation(manifests: Iterable[Manifest]) -> int:
    """The generation that a claim takes, if no other claim comes first."""
    return 1 + max((m.generation for m in manifests), default=0)


class Tenure:
    """One driver's right to append, from its claim until it is fenced or in doubt.

    Attributes:
        generation: raised by every claim; from 1.
        sequence: of the claim record.
        job_id: the job's identity for life.
        oldest_needed: of the last record written; the claim takes it over from the one before.
        listed: the log's sequences right after the claim.
        cleaned_below: what retention has left below it are claims; goes into the next record.
    """

    def __init__(
        self,
        *,
        generation: int,
        sequence: int,
        job_id: str,
        oldest_needed: int,
        cleaned_below: int = 0,
        listed: Sequence[int] = (),
        threads: Threads = THREADS,
    ) -> None:
        self.generation = generation
        self.sequence = sequence
        self.job_id = job_id
        self.oldest_needed = oldest_needed
        self.cleaned_below = cleaned_below
        self.listed = listed
        self._next = sequence + 1
        self._ended: StateBackendError | None = None
        self._lock = threads.lock()

    @classmethod
    def of(cls, claim: Manifest, listed: Sequence[int], threads: Threads = THREADS) -> Tenure:
        """The one that a claim record began."""
        return cls(
            generation=claim.generation,
            sequence=claim.sequence,
            job_id=claim.job_id,
            oldest_needed=claim.oldest_needed,
            cleaned_below=claim.cleaned_below,
            listed=listed,
            threads=threads,
        )

    @property
    def next_sequence(self) -> int:
        """The sequence that the next append takes."""
        return self._next

    @property
    def ended(self) -> StateBackendError | None:
        """Why nothing can be appended any more; None while it can."""
        return self._ended

    def __repr__(self) -> str:
        return (
            f"Tenure(generation={self.generation}, sequence={self.sequence}, "
            f"job_id={self.job_id!r}, next_sequence={self._next}, ended={self._ended!r})"
        )


class Patience(Protocol):
    """How a commit waits while the store cannot be reached (I/O and clocks are the caller's)."""

    def wait(self, attempt: int, error: StateBackendError) -> bool:
        """Wait before the same write is tried again; False: give up, the outcome is unknown."""


class NoPatience:
    """Gives up at once."""

    def wait(self, attempt: int, error: StateBackendError) -> bool:
        """Never."""
        return False
