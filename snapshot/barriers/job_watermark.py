"""The job's watermark, and what is due next: pure arithmetic on what the operators have seen.

One epoch has one watermark W(n), in force for the whole job, and the one of the epoch before, by
which rows are late. W(n) follows from what was seen up to the end of epoch n - 1:

* an operator with a delay *defines* a watermark: its largest event time less that delay; one that
  has seen nothing counts as 0. It need not be in event mode: one whose timers run on processing
  time, or that has none, may show its function the watermark;
* W(n) is the smallest of these, or W(n - 1) if that is larger: it never goes back. A delay that is
  made longer at a restart holds it where it is; one that is made shorter moves it at once;
* an operator in event mode without a delay takes the job's, and has no say in it.

All of it stands in the records of epoch n - 1, and W(n) itself in those of n. So an epoch that is
repeated sees the same times, whichever of its records were written before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["JobTime", "NextDue", "OperatorTime", "next_due", "resumed"]


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """One operator at the end of an epoch.

    Attributes:
        time_mode: none, processing or event.
        delay_ms: of its watermark; None: it takes the job's.
        event_max_ms: the largest event time that it ever saw; None: none yet.
        two_inputs: it measures two streams, and ``second_max_ms`` is the other one's.
        next_timer_ms: its earliest timer, in its own time; None for none.
    """

    time_mode: str = "none"
    delay_ms: int | None = None
    event_max_ms: int | None = None
    two_inputs: bool = False
    second_max_ms: int | None = None
    next_timer_ms: int | None = None

    @property
    def candidate_ms(self) -> int | None:
        """The watermark that it would have the job go to; None: it defines none."""
        if self.delay_ms is None:
            return None
        seen = [self.event_max_ms, self.second_max_ms] if self.two_inputs else [self.event_max_ms]
        # An input that has seen nothing holds it: its first rows may be of any time.
        return min(0 if ms is None else ms - self.delay_ms for ms in seen)


@dataclass(frozen=True)
class JobTime:
    """The job's times in one epoch: the watermark in force, and that of the epoch before."""

    watermark_ms: int = 0
    late_watermark_ms: int = 0

    def following(self, operators: Iterable[OperatorTime]) -> JobTime:
        """The next epoch's times, from what every operator had seen at the end of this one."""
        candidates = [one.candidate_ms for one in operators]
        lowest_ms = min((ms for ms in candidates if ms is not None), default=self.watermark_ms)
        return JobTime(max(self.watermark_ms, lowest_ms), self.watermark_ms)


def resumed(
    before: Iterable[int | None],
    operators: Iterable[OperatorTime],
    again: Iterable[int | None] = (),
) -> JobTime:
    """The times of an epoch that is the first of a run.

    Args:
        before: the watermarks that the records of the epoch before name, as far as they do.
        operators: at the end of the epoch before.
        again: the watermarks of records of the epoch itself: it is repeated, and some operators had
            finished it. Then it keeps the watermark it had, even if a delay was changed since.
    """
    last = JobTime(max((ms for ms in before if ms is not None), default=0))
    known = [ms for ms in again if ms is not None]
    if known:
        return JobTime(max(last.watermark_ms, *known), last.watermark_ms)
    return last.following(operators)


@dataclass(frozen=True)
class NextDue:
    """What waits for the next epoch, once ``epoch`` was acked in full.

    Attributes:
        processing_due_ms: the earliest processing-time timer; None for none.
        watermark_moves: the next epoch's watermark is a later one than this epoch's.
    """

    epoch: int
    processing_due_ms: int | None
    watermark_moves: bool


def next_due(epoch: int, following: JobTime, operators: Sequence[OperatorTime]) -> NextDue:
    """What is due once ``epoch`` is over; ``following`` are the next epoch's times."""
    timers = [(one.time_mode, one.next_timer_ms) for one in operators]
    return NextDue(
        epoch=epoch,
        processing_due_ms=min(
            (at_ms for mode, at_ms in timers if mode == "processing" and at_ms is not None),
            default=None,
        ),
        watermark_moves=following.watermark_ms > following.late_watermark_ms,
    )
