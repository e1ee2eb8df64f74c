"""Which plans and commits a query that goes back takes back, and which are put back. Pure.

A Hadoop file system cannot fence a driver. One that goes back may freeze right before it takes a
file away, and thaw long after another driver has gone on. So no file is deleted under the name that
Spark knows. It is renamed to a hidden name of its own (`TakenBack`), which Spark's logs do not look
at. The hidden files are an undo log:

* a driver that has gone back makes sure that nobody else has claimed the job, and deletes its
  hidden files. Then Spark starts. So no query runs beside hidden files that its start could have
  seen;
* so a hidden file that a start finds has one of two causes. Either the start that took it was cut
  off, or that start was overtaken and took it from a healthy query. In both cases the file is put
  back (`decide_repair`), and where the query starts is decided anew.

A hidden name is used once, so a rename or a deletion of it that comes late finds nothing. A file
system that cannot replace a file by renaming another hides what is to be replaced first: see
`TakenBack.replaced`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from recovery.decide.start_batch import COMMITS, OFFSETS, LocationProgress

__all__ = ["Repair", "TakenBack", "decide_repair", "next_to_take"]

_REPLACED: Final = "replaced-"
_HIDDEN: Final = re.compile(r"\.(\d+)\.(\d+)\.([0-9A-Za-z-]+)\.taken-back")


@dataclass(frozen=True, order=True)
class TakenBack:
    """A plan or a commit under the hidden name that a start gave it.

    Attributes:
        folder: ``offsets`` or ``commits``.
        generation: that of the tenure that took it.
        id: never used for another.
    """

    folder: str
    batch: int
    generation: int
    id: str

    @property
    def place(self) -> str:
        """Where Spark looks for it."""
        return f"{self.folder}/{self.batch}"

    @property
    def name(self) -> str:
        """Its hidden name."""
        return f"{self.folder}/.{self.batch}.{self.generation}.{self.id}.taken-back"

    @property
    def is_replaced(self) -> bool:
        """Whether it was only hidden to make room: see `replaced`."""
        return self.id.startswith(_REPLACED)

    def replaced(self, id: str) -> TakenBack:
        """The hidden name of what has this one's place while this one is put back.

        For file systems that cannot replace a file by renaming another. It is deleted after that.

        Args:
            id: never used for another.
        """
        return TakenBack(self.folder, self.batch, self.generation, _REPLACED + id)

    @classmethod
    def parse(cls, folder: str, name: str) -> TakenBack | None:
        """Reads a hidden name in a folder; None for any other file."""
        match = _HIDDEN.fullmatch(name)
        return match and cls(folder, int(match[1]), int(match[2]), match[3])


def next_to_take(location: LocationProgress, batch: int) -> tuple[str, int] | None:
    """The next file to take back so that Spark repeats ``batch``: folder and number.

    Plans first, the newest first: with a later plan still there, Spark skips a batch that is not
    committed.
    """
    if location.last_offset > batch:
        return OFFSETS, location.last_offset
    if location.last_commit >= batch:
        return COMMITS, location.last_commit
    return None


@dataclass(frozen=True)
class Repair:
    """Which hidden files to put back, and which to delete.

    ``put_back``: get their own names again, and replace what has them now. ``drop``: are deleted.
    """

    put_back: tuple[TakenBack, ...]
    drop: tuple[TakenBack, ...]


def decide_repair(
    hidden: Iterable[TakenBack],
    location: LocationProgress,
    *,
    recorded: Mapping[int, int],
    stamps: Mapping[str, int],
) -> Repair:
    """Decides about the files that other starts hid. Only for a start that has claimed the job.

    Commits of one batch are alike. Of several plans of a batch the one that was run counts: the
    log's record of the epoch has its stamp. If there is no record, the hidden plan counts. What has
    the plan's own name was then written later, by a driver that had been fenced or by one whose
    first batch is refused (`Coordinator`). Without a record nothing of the batch was put out,
    except perhaps with asynchronous commits. What was hidden to make room counts only where nothing
    else is left: then a start that was overtaken hid what had been put back by another.

    Args:
        recorded: stamps of the epochs in the log.
        stamps: those of plans, hidden or not, by name.
    """
    by_place: dict[str, list[TakenBack]] = {}
    for one in sorted(hidden):
        by_place.setdefault(one.place, []).append(one)
    put_back, drop = [], []
    for place, ones in sorted(by_place.items()):
        folder, batch = ones[0].folder, ones[0].batch
        there = batch in ((location.offsets if folder == OFFSETS else location.commits) or ())
        stamp_ms = recorded.get(batch)
        run = [one for one in ones if stamp_ms is not None and stamps.get(one.name) == stamp_ms]
        was_run = stamp_ms is not None and stamps.get(place) == stamp_ms
        taken = [one for one in ones if not one.is_replaced]
        stays = there and (folder == COMMITS or was_run or not (run or taken))
        chosen = None if stays else (run or taken or ones)[0]
        put_back += [chosen] if chosen else []
        drop += [one for one in ones if one is not chosen]
    return Repair(tuple(put_back), tuple(drop))
