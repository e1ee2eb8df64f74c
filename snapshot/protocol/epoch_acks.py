"""The acks of one operator in one epoch: which of them count, and what is durable.

Spark may evaluate an operator more than once in a batch: in whole or in part, one evaluation after
the other or at the same time. An *evaluation* is one execution of Spark's, which is one action on
the frame. Within it the latest ack of a subtask counts. What is latest is decided in this order:

1. by the stage: what runs again for lost output may be a stage of its own;
2. by the task in that stage: if a frame is united with itself, two tasks need the subtask;
3. by the attempt of that task (SPARK-54556).

A record is made of one whole evaluation, the latest. So the state follows from what a foreachBatch
function wrote, even if it looks at a few rows afterwards. Sometimes no evaluation is whole, but all
of them together are: some partitions of a frame were persisted, or lost and evaluated alone. Then
the latest ack of each subtask counts.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from snapshot.protocol.messages import AckRequest

__all__ = ["Acked", "EpochState"]

# How many partial evaluations after the latest whole one are kept: they may become whole.
_PARTIAL_KEPT: Final = 16


class Acked(enum.Enum):
    """What an ack did to its epoch."""

    PARTIAL = "partial"  # others are still missing: return at once
    COMPLETE = "complete"  # all are here: return when what counts is durable
    STALE = "stale"  # a newer attempt of the same task has acked


@dataclass(eq=False)
class _Evaluation:
    """One evaluation: the latest ack of each subtask, and the latest stage.

    Attributes:
        run: how often the stage has run again so far.
        runs: by subtask, the run of the stage that its ack is of.
    """

    acks: dict[int, AckRequest] = field(default_factory=dict)
    stage: int = 0
    run: int = 0
    runs: dict[int, int] = field(default_factory=dict)

    def note_run(self, ack: AckRequest, known: AckRequest | None) -> None:
        """Note which run of its stage an ack is of.

        Spark tells a task no number of the stage's run. So a run begins where a subtask acks again
        with another broadcast state.

        Args:
            known: the subtask's ack before.
        """
        if known is not None and known.use.stage == ack.use.stage:
            other = known.broadcast_digest != ack.broadcast_digest
            self.run += other and self.runs[ack.subtask] == self.run
        self.runs[ack.subtask] = self.run


@dataclass
class EpochState:
    """Acks of one operator in one epoch of one run."""

    parallelism: int
    durable: dict[int, AckRequest] = field(default_factory=dict)
    _taken: dict[int, AckRequest] = field(default_factory=dict)
    _whole: _Evaluation | None = None  # the latest whole one
    # By execution: the latest whole one, and later ones.
    _evaluations: dict[int, _Evaluation] = field(default_factory=dict)
    _latest: dict[int, AckRequest] = field(default_factory=dict)

    def take(self, ack: AckRequest) -> Acked:
        """Take in an ack."""
        own = self._evaluations.setdefault(ack.use.execution, _Evaluation())
        known = own.acks.get(ack.subtask)
        if known is not None and known.use == ack.use and ack.attempt < known.attempt:
            return Acked.STALE
        own.stage = max(own.stage, ack.use.stage)
        if _put_later(own.acks, ack):
            own.note_run(ack, known)
        _put_later(self._latest, ack)
        before = self._whole
        if len(own.acks) == self.parallelism and (before is None or own.stage >= before.stage):
            self._whole = own
        self._forget_old(own)
        return Acked.COMPLETE if self.acked else Acked.PARTIAL

    def _forget_old(self, running: _Evaluation) -> None:
        """Drops the evaluations before the latest whole one: they do not count any more.

        If too many later ones are left, it drops those with the fewest acks: looks at a few rows,
        beside an evaluation that may become whole.
        """
        spared = self._whole, running
        others = [(n, one) for n, one in self._evaluations.items() if one not in spared]
        others.sort(key=lambda of: (len(of[1].acks), of[1].stage), reverse=True)
        for place, (number, one) in enumerate(others):
            old = self._whole is not None and one.stage < self._whole.stage
            if old or place >= _PARTIAL_KEPT:
                del self._evaluations[number]

    @property
    def acks(self) -> dict[int, AckRequest]:
        """The acks that count, as far as they have come; not to be changed."""
        return self._latest if self._whole is None else self._whole.acks

    def all_acks(self) -> Iterator[AckRequest]:
        """The acks that count, or may come to count."""
        yield from self._latest.values()
        for one in self._evaluations.values():
            yield from one.acks.values()

    def take_due(self) -> dict[int, AckRequest] | None:
        """The acks that a record must be written for now; None if that was done, or too early."""
        if not self.acked or _same(self.acks, self._taken):
            return None
        self._taken = dict(self.acks)
        return self._taken

    @property
    def recorded(self) -> dict[int, AckRequest]:
        """The acks of the newest record, durable or on its way; empty where there is none."""
        return self._taken

    def made_durable(self, acks: dict[int, AckRequest]) -> None:
        """A record with ``acks`` is durable."""
        self.durable = acks

    def on_its_way(self) -> dict[int, AckRequest] | None:
        """The acks of a record that is being written; None where there is none."""
        # Not by content: a third attempt may have made what the first had, a second between them.
        return None if self._taken is self.durable else self._taken

    @property
    def disagrees(self) -> bool:
        """Whether every subtask has acked, and they came to different broadcast states."""
        if len(self.acks) < self.parallelism:
            return False
        return len({ack.broadcast_digest for ack in self.acks.values()}) > 1

    @property
    def acked(self) -> bool:
        """Whether every subtask has acked, and what they acked belongs together."""
        return len(self.acks) == self.parallelism and not self.disagrees

    def stage_runs(self) -> list[dict[int, AckRequest]]:
        """The acks that count, by the stage run that they are of."""
        runs: dict[tuple[int, int, int], dict[int, AckRequest]] = {}
        for subtask, ack in self.acks.items():
            own = self._evaluations.get(ack.use.execution)
            run = 0 if own is None else own.runs.get(subtask, 0)
            runs.setdefault((ack.use.execution, ack.use.stage, run), {})[subtask] = ack
        return list(runs.values())

    def drop(self, ack: AckRequest) -> None:
        """Forget an ack that was refused: the next attempt of its task is of the same run."""
        for acks in (self._latest, *(one.acks for one in self._evaluations.values())):
            if acks.get(ack.subtask) is ack:
                del acks[ack.subtask]

    @property
    def scheduled(self) -> bool:
        """Whether a record with every subtask is durable or being written."""
        return bool(self._taken) and self.acked

    @property
    def complete(self) -> bool:
        """Whether a record with every subtask is durable."""
        return len(self.durable) == self.parallelism and self.acked

    def missing(self) -> list[int]:
        """Subtasks without an ack."""
        return [s for s in range(self.parallelism) if s not in self.acks]


def _put_later(acks: dict[int, AckRequest], ack: AckRequest) -> bool:
    """Keeps the later of two acks of a subtask, whichever came first; whether it is the new one."""
    known = acks.get(ack.subtask)
    if known is not None and (known.use, known.attempt) > (ack.use, ack.attempt):
        return False
    acks[ack.subtask] = ack
    return True


def _same(acks: dict[int, AckRequest], others: dict[int, AckRequest]) -> bool:
    """Whether a record of the one would be a record of the other.

    Late rows move the operator's largest event time and change no state.
    """
    return acks.keys() == others.keys() and all(
        _recorded(ack) == _recorded(others[subtask]) for subtask, ack in acks.items()
    )


def _recorded(ack: AckRequest) -> tuple[str | int | None, ...]:
    times = ack.max_event_ms, ack.second_event_ms, ack.next_timer_ms
    lists = ack.operator_state.digest if ack.operator_state is not None else None
    return ack.chain, *times, lists, ack.broadcast_digest
