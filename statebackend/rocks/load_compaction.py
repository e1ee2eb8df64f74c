"""After a large load: what it left in level 0 is merged, not kept until the level is full.

Every point read looks into each file of level 0 whose range holds the key. Once a bulk load is
over, and epochs are small again, there are a few such files for long: RocksDB merges them only with
the next ones, much later, beside the rows. They are merged right away instead.
"""

from __future__ import annotations

import logging
from typing import Any, Final

__all__ = ["LoadCompaction", "flush_rows", "hold_up_writes", "level0_files"]

_BULK_ROWS: Final = 400_000  # more than a write buffer holds, of small rows
_TRIGGER: Final = "level0_file_num_compaction_trigger"
_SLOWDOWN: Final = "level0_slowdown_writes_trigger"
_STOP: Final = "level0_stop_writes_trigger"
_UNFLUSHED: Final = ("rocksdb.num-entries-active-mem-table", "rocksdb.num-immutable-mem-table")
_FILES: Final = 2
_EPOCHS_MAX: Final = 16
_log = logging.getLogger("statebackend.rocks")


def level0_files(db: Any) -> int:
    """Files of ``db`` that every point read may have to look into."""
    return int(db.property_int_value("rocksdb.num-files-at-level0") or 0)


def hold_up_writes(db: Any, full: int, stop: int) -> None:
    """Set how many files in level 0 make flushes wait (``full``), or writes stop (``stop``)."""
    db.set_options({_SLOWDOWN: str(full), _STOP: str(stop)})


def flush_rows(db: Any) -> None:
    """Flush, if there is anything to flush: RocksDB's flush may wait even if there is not."""
    if any(db.property_int_value(count) for count in _UNFLUSHED):
        db.flush()


class LoadCompaction:
    """Of one open database. What it knows is lost when that is closed, and nothing depends on it.

    It knows the database, not the store that has it: a store that is only let go of closes at once,
    not when cycles are next collected.

    Args:
        trigger: the number of files that usually begins a merge.
        due: a load is over, by what is known from before.
    """

    def __init__(self, db: Any, trigger: int, *, due: bool = False) -> None:
        self._db, self._trigger, self._due = db, trigger, due
        self._rows = 0
        self._epochs_left = 0  # not 0: it is being merged

    def begins(self) -> None:
        """A delta of several batches begins, perhaps once more."""
        self._rows = 0

    def wrote(self, rows: int, *, whole: bool) -> None:
        """A batch of so many rows was written; ``whole``: with it, its delta."""
        try:
            self._rows += rows
            bulk = self._rows >= _BULK_ROWS
            if self._epochs_left and (bulk or whole):
                left = 0 if bulk else self._epochs_left - 1
                if not left or level0_files(self._db) < _FILES:
                    self._merge_from(self._trigger)  # where that fails: again after the next one
                    left = 0
                self._epochs_left = left
            elif whole and self._due and not bulk and level0_files(self._db) >= _FILES:
                self._merge_from(_FILES)
                self._epochs_left = _EPOCHS_MAX
            if whole:
                self._due, self._rows = bulk, 0
        except Exception as error:  # a full disk, for one: the rows were written
            _log.warning("level 0 is not merged after a large load (%s)", error)

    def _merge_from(self, files: int) -> None:
        self._db.set_options({_TRIGGER: str(files)})
