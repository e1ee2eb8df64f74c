"""Whether another driver has claimed a job that this one runs."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from recovery.inspect.tolerant_log import read_one
from snapshot.formats.record import LOG_PREFIX, parse_record_name
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import StateBackendError

__all__ = ["NewerDriver"]

LOOK_S: Final = 10.0
AGAIN_S: Final = 60.0  # after the store did not answer, for which a page has waited


class NewerDriver:
    """Looks at the newest record. A driver without input commits nothing, so it is told of none.

    Args:
        store: the job's folder. began_s: when this driver began.
    """

    def __init__(self, store: ObjectStore, job: str, began_s: float) -> None:
        self._store, self._job = store, job
        self._looked_s, self._pause_s = began_s, LOOK_S
        self._generation, self._writer, self._sequence = 0, "", -1

    def than(self, generation: int, committed_s: float | None, now_s: float) -> str:
        """Who has claimed the job since, for people; empty if nobody has.

        One listing, and one read of a new record; none within 10 s of a commit or of the last look,
        or within 60 s of one that failed.

        Args:
            generation: of this driver. committed_s: when it last committed; None: not yet.
        """
        if now_s - max(self._looked_s, committed_s or self._looked_s) > self._pause_s:
            self._looked_s, self._pause_s = now_s, AGAIN_S
            with suppress(StateBackendError):  # the page says elsewhere that the store is out
                self._look()
                self._pause_s = LOOK_S
        return self._writer if 0 < generation < self._generation else ""

    def _look(self) -> None:
        numbers = (parse_record_name(info.name) for info in self._store.list(LOG_PREFIX))
        newest = max((number for number in numbers if number is not None), default=-1)
        if newest > self._sequence:
            tip = read_one(self._store, newest, self._job)
            self._sequence, self._generation, self._writer = newest, tip.generation, tip.writer
