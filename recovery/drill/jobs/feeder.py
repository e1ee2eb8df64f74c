"""Feeds a drill's inputs as fast as Spark commits, and writes down what it has committed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from recovery.drill.jobs.committed_epochs import committed_epochs
from recovery.drill.report.drill_report import EpochDone

__all__ = ["Feeder"]

_LOOK_EVERY_S: Final = 0.05
_LEAD: Final = 2  # inputs that wait, so that a batch can begin when one ends
_LEAD_MAX: Final = 8
_PATIENCE_S: Final = 5.0  # then one more is fed: a batch may have taken two
_STOP_WITHIN_S: Final = 30.0


class Feeder(threading.Thread):
    """Watches the checkpoint, and feeds until it is told that it is enough.

    Args:
        checkpoint: Spark's.
        feed: writes an input by its number; None: the input is there.
        now_s: seconds since the drill began.
        driver: the number of the driver that runs.
        committed: is told of each epoch.
    """

    def __init__(
        self,
        checkpoint: Path,
        feed: Callable[[int], None] | None,
        *,
        now_s: Callable[[], float],
        driver: Callable[[], int],
        committed: Callable[[EpochDone], None],
    ) -> None:
        super().__init__(name="drill-feeder", daemon=True)
        self.epochs: list[EpochDone] = []
        self.failure: Exception | None = None
        self.hung = False  # an input was still being fed when it was to end
        self.fed = 0
        self.done = threading.Event()  # all that is wanted has been fed
        self._checkpoint, self._feed = checkpoint, feed
        self._now_s, self._driver, self._committed = now_s, driver, committed
        self._seen: set[tuple[int, int]] = set()
        self._last = -1
        self._fed_s = 0.0
        self._wanted: int | None = None  # without end, as long as faults are to come
        self._stopping = threading.Event()
        if feed is None:
            self.done.set()

    def last(self) -> int:
        """The last epoch that Spark has committed; -1 for none."""
        return max(committed_epochs(self._checkpoint), default=-1)

    def enough(self, inputs: int) -> None:
        """Feed up to so many in all, and then no more."""
        self._wanted = inputs

    def stop(self, timeout_s: float = _STOP_WITHIN_S) -> None:
        """End, after one more look; an input that takes longer to feed is left alone (`hung`)."""
        self._stopping.set()
        if self.is_alive() and not self.hung:
            self.join(timeout_s)
            self.hung = self.is_alive()
        self._look()

    def run(self) -> None:
        """Until it is stopped."""
        try:
            while not self._stopping.wait(_LOOK_EVERY_S):
                self._look()
                self._feed_on()
        except Exception as error:  # the drill's own thread raises it
            self.failure = error

    def _look(self) -> None:
        found = committed_epochs(self._checkpoint)
        self._last = max(found, default=-1)
        for epoch in sorted(found):
            mark = (epoch, found[epoch])
            if mark not in self._seen:  # a batch that is repeated counts again
                self._seen.add(mark)
                done = EpochDone(epoch=epoch, at_s=self._now_s(), driver=self._driver())
                self.epochs.append(done)
                self._committed(done)

    def _feed_on(self) -> None:
        if self._feed is None or self.done.is_set():
            return
        if self._wanted is not None and self.fed >= self._wanted:
            self.done.set()
            return
        lead = self.fed - (self._last + 1)
        waited = self._now_s() - self._fed_s > _PATIENCE_S
        if lead <= _LEAD or (waited and lead < _LEAD_MAX):
            self._feed(self.fed)
            self.fed += 1
            self._fed_s = self._now_s()
