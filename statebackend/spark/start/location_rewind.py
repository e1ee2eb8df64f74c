"""Takes plans and commits back at a start, and puts back what other starts took.

`recovery.decide.taken_back_files` says what holds wherever a start is cut off or frozen, and why.
It does not hold on a store that renames by copying and deleting (S3A, and Google's without a
hierarchy): a start that freezes between the two deletes, when it thaws, what has that name by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from recovery.decide.start_batch import OFFSETS
from recovery.decide.taken_back_files import TakenBack, decide_repair, next_to_take
from statebackend.errors import CheckpointLocationError, FencedError
from statebackend.spark.start.checkpoint_location import CheckpointLocation

__all__ = ["LocationRewind"]

_log = logging.getLogger("statebackend.spark")


class LocationRewind:
    """Changes a checkpoint location for one tenure, before its query starts.

    Args:
        generation: the tenure's.
        look: looks at the log anew; it raises `FencedError` where another driver has claimed the
            job since.
        new_id: gives an id that is used for nothing else.
    """

    def __init__(
        self,
        location: CheckpointLocation,
        *,
        generation: int,
        look: Callable[[], object],
        new_id: Callable[[], str],
    ) -> None:
        self._location, self._generation = location, generation
        self._look, self._new_id = look, new_id

    def repair(self, recorded: Mapping[int, int]) -> None:
        """Put back what starts took that were cut off or overtaken. It may itself be repeated.

        Args:
            recorded: stamps of the epochs in the log.

        Raises:
            CheckpointLocationError: a file cannot be renamed or deleted.
        """
        location = self._location
        while hidden := location.taken_back():
            plans = [one for one in hidden if one.folder == OFFSETS]
            names = {name for one in plans for name in (one.name, one.place)}
            stamps = {name: location.stamp_ms(name) for name in names}
            known = {name: ms for name, ms in stamps.items() if ms is not None}
            repair = decide_repair(hidden, location.progress(), recorded=recorded, stamps=known)
            for one in repair.put_back:
                if location.put_back(one):
                    _log.warning(
                        "%s: %s is put back: an earlier start took it (generation %d), and was cut "
                        "off or overtaken",
                        location.path,
                        one.place,
                        one.generation,
                    )
            for one in repair.drop:
                location.drop(one)

    def back_to(self, batch: int, last_commit: int, recorded: Mapping[int, int]) -> None:
        """Make Spark repeat ``batch``. It may be cut off at any point, and repeated.

        Args:
            last_commit: Spark's, when this was decided. recorded: as for `repair`.

        Raises:
            FencedError: another driver has claimed the job; what was taken since is put back.
            CheckpointLocationError: a file cannot be renamed or deleted, or somebody else commits.
        """
        own: list[TakenBack] = []
        while not self._is_done(batch, last_commit, own, recorded):
            pass
        self._look_again(own)
        # From here on nothing of it can be put back. The plans are deleted first: if a later plan
        # came back when the commit was gone for good, Spark would skip a batch.
        for one in own:
            self._location.drop(one)
        _log.warning(
            "went back: %s will repeat batch %d, which Spark had committed or planned past before "
            "every operator had finished it",
            self._location.path,
            batch,
        )

    def _is_done(
        self, batch: int, last_commit: int, own: list[TakenBack], recorded: Mapping[int, int]
    ) -> bool:
        """Take one step; whether none was left to take."""
        location = self._location
        found = location.progress()
        if found.last_commit > last_commit:
            self._look_again(own)
            raise CheckpointLocationError(
                f"Batch {found.last_commit} was committed in {location.path} while this start "
                f"went back to batch {batch}.",
                todo="Stop the other query that uses this location, then start again.",
            )
        step = next_to_take(found, batch)
        if step is None:
            others = [one for one in location.taken_back() if one not in own]
            if others:  # from a start that did not know that it was overtaken
                self._undo(own)
                own.clear()
                self.repair(recorded)
            return not others
        taken = TakenBack(*step, self._generation, self._new_id())
        if location.take_back(taken):
            own.append(taken)
        self._look_again(own)
        return False

    def _look_again(self, own: list[TakenBack]) -> None:
        try:
            self._look()
        except FencedError:
            self._undo(own)
            raise

    def _undo(self, own: list[TakenBack]) -> None:
        """Put back what this tenure took, where the name is free; else the next start decides."""
        for one in reversed(own):
            self._location.put_back(one, replace=False)
