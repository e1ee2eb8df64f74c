"""How often in a row a store was opened with its level 0 full: a count in a file beside RocksDB's.

It is a hint. A count that is lost or does not read begins anew, and one that cannot be written
is the last one: neither may keep a store from being used.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final

__all__ = ["forget_due", "note_due"]

_NOTE: Final = "UNMERGED"  # RocksDB leaves files alone whose names say nothing to it
_DIGITS: Final = 4
_log = logging.getLogger("statebackend.rocks")


def note_due(path: str) -> int:
    """Count this opening of the store at ``path``; how many there were in a row, with it."""
    note = os.path.join(path, _NOTE)
    count = 0
    with contextlib.suppress(OSError, ValueError), open(note, "rb") as file:
        count = max(0, int(file.read(_DIGITS)))
    try:
        with open(note, "wb") as file:
            file.write(b"%d" % (count + 1))
    except OSError as error:
        _log.warning("%s: %s", note, error)
    return count + 1


def forget_due(path: str) -> None:
    """Level 0 is not full (any more): begin to count anew."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(path, _NOTE))
