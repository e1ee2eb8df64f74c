"""After a large load: what it left in level 0 is merged, not kept until the level is full.

Every point read looks into each file of level 0 whose range holds the key. Once a bulk load is
over, and epochs are small again, there are a few such files for long: RocksDB merges them only with
the next ones, much later, beside the rows. They are merged right away instead.
"""

from __future__ import annotations

import logging
from typing import Any, Final

__all__ = ["Settling"]

_BULK_ROWS: Final = 400_000  # more than a write buffer holds, of small rows
_TRIGGER: Final = "level0_file_num_compaction_trigger"
_FILES: Final = 2
_log = logging.getLogger("statebackend.rocks")


class Settling:
    """Of one open database; ``trigger`` is the number of files that usually begins a merge.

    It is lost with the store's closing, and nothing depends on it.
    """

    def __init__(self, db: Any, trigger: int) -> None:
        self._db, self._trigger = db, trigger
        self._rows = 0
        self._due = self._merging = False

    def wrote(self, rows: int, *, whole: bool) -> None:
        """A batch of so many rows was written; ``whole``: with it, its delta."""
        self._rows += rows
        if not whole:
            return
        bulk, self._rows = self._rows >= _BULK_ROWS, 0
        if self._merging:
            if self._level0_files() < _FILES:
                self._merging = False
                self._merge_from(self._trigger)
        elif self._due and not bulk and self._level0_files() >= _FILES:
            self._merging = True
            self._merge_from(_FILES)
        self._due = bulk

    def _merge_from(self, files: int) -> None:
        try:
            self._db.set_options({_TRIGGER: str(files)})
        except Exception as error:  # a full disk, for one: the rows were written
            _log.warning("level 0 is not merged from %d files on (%s)", files, error)

    def _level0_files(self) -> int:
        return int(self._db.property_int_value("rocksdb.num-files-at-level0") or 0)
