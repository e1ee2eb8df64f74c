"""What became of a continuous job's checkpoints, over all its runs, and who waits for one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from snapshot.barriers.checkpoint_trigger import Kind
from snapshot.barriers.pending_checkpoints import Subtask
from snapshot.formats.epoch_figures import FailedCheckpoint
from snapshot.log.figures_book import Barriers, FiguresBook, PartFigures
from snapshot.log.progress_book import tell
from snapshot.log.progress_events import ContinuousCheckpoint
from statebackend.continuous.driver.run_state import Settled, Write
from statebackend.continuous.job.slot_messages import Acked
from statebackend.system import SYSTEM, System

__all__ = ["CheckpointBook", "barriers_of"]

_log = logging.getLogger("statebackend.continuous")
_KEPT: Final = 200
_NAMED: Final = 10  # of those that a checkpoint waited for, in a record


class Asked(Protocol):
    """A run, as far as it is asked for checkpoints (see `JobRun`)."""

    @property
    def number(self) -> int:
        """Of the newest attempt."""

    def request(self, kind: Kind) -> None:
        """A user wants a checkpoint."""


def barriers_of(write: Write) -> Barriers:
    """What every subtask says of its part of a checkpoint that is about to be written."""
    parts: dict[str, list[PartFigures]] = {}
    for one, part in sorted(write.parts.items()):
        parts.setdefault(one.vertex, []).append(PartFigures(part.timings_ms, part.figures))
    return Barriers(write.checkpoint, write.began_s, parts)


class CheckpointBook:
    """Thread-safe.

    Args:
        publish: is told of each checkpoint that is over.
        figures: told of those that were given up, for the records to come.

    Attributes:
        epoch: of the last complete checkpoint; None before the first.
        newest: the newest that are over, the oldest first.
    """

    def __init__(
        self,
        job: str,
        system: System = SYSTEM,
        publish: Callable[[ContinuousCheckpoint], None] = tell,
        figures: FiguresBook | None = None,
    ) -> None:
        self._job, self._system, self._publish = job, system, publish
        self._figures = figures
        self.epoch: int | None = None
        self.newest: deque[ContinuousCheckpoint] = deque(maxlen=_KEPT)
        self._changed = system.threads.condition()
        self._run: Asked | None = None
        self._complete = (0, -1)  # the newest complete one: its number, its epoch
        self._given_up = 0  # the newest that was
        self._over = False

    def run_begins(self, run: Asked) -> None:
        """Requests go there from now on; those that an earlier run left are repeated."""
        with self._changed:
            self._run = run
            self._changed.notify_all()

    def job_ended(self) -> None:
        """There will be no checkpoint any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def settled(self, settled: Settled, parts: Mapping[Subtask, Acked]) -> None:
        """A checkpoint is over; ``parts``: of one that is complete."""
        waited_for = [f"{one.vertex}/{one.index}" for one in sorted(settled.waited_for)]
        said = ContinuousCheckpoint(
            job=self._job,
            checkpoint=settled.checkpoint,
            epoch=settled.epoch,
            aborted=settled.reason.value if settled.reason else "",
            took_ms=round(settled.took_s * 1000, 3),
            subtasks={
                f"{one.vertex}/{one.index}": {
                    **{f"{name}_ms": value for name, value in part.timings_ms.items()},
                    **part.figures,
                }
                for one, part in sorted(parts.items())
            },
            waited_for=waited_for,
        )
        if settled.reason is not None:
            _log.warning(
                "checkpoint %d was given up (%s) after %.1f s; it waited for %s",
                settled.checkpoint,
                settled.reason.value,
                settled.took_s,
                ", ".join(waited_for) or "nobody",
            )
            self._note_failed(settled, settled.reason.value, waited_for)
        with self._changed:
            self.newest.append(said)
            if settled.reason is None:
                self.epoch = settled.epoch
                self._complete = settled.checkpoint, settled.epoch
            else:
                self._given_up = settled.checkpoint
            self._changed.notify_all()
        self._publish(said)

    def _note_failed(self, settled: Settled, why: str, waited_for: list[str]) -> None:
        if self._figures is None:
            return
        took_ms = round(settled.took_s * 1000, 3)
        self._figures.failed(
            FailedCheckpoint(
                epoch=settled.epoch,
                checkpoint=settled.checkpoint,
                started_ms=self._system.wall_ms() - round(took_ms),
                took_ms=took_ms,
                reason=why,
                waited_for=waited_for[:_NAMED],
            )
        )

    def ask(self, kind: Kind, timeout_s: float) -> int | None:
        """Have a checkpoint taken, by this run or a later one, and wait for it.

        One that is given up is asked for again.

        Returns:
            the epoch of a complete one that began after the call; None: there was none in time.
        """
        until_s = self._system.monotonic_s() + timeout_s
        told: tuple[Asked, int] | None = None
        with self._changed:
            asked = max(self._complete[0], self._given_up)
            if self._run is not None:
                asked = max(asked, self._run.number)
            while self._complete[0] <= asked and not self._over:
                left_s = until_s - self._system.monotonic_s()
                if left_s <= 0:
                    return None
                if self._run is not None and told != (self._run, max(asked, self._given_up)):
                    told = self._run, max(asked, self._given_up)
                    self._run.request(kind)
                self._changed.wait(left_s)
            number, epoch = self._complete
            return epoch if number > asked else None
