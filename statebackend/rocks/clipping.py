"""Cutting a store down to some key groups: at once for readers, later for the disk.

A clipped store is a hard-linked copy with range tombstones over what lies outside of its key
groups. It can be read and written at once; the files still hold what was cut off, until they are
compacted. That is done in the background, a few files at a time and not in the first seconds, which
belong to the first rows. A file beside the database's own says that there is something to do, and
goes when it is done; until then RocksDB begins no compaction by itself (it would at once, because
of the tombstones).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from statebackend.rocks.rocksdb_errors import classify
from statebackend.rocks.rocksdb_reads import META_PREFIX

__all__ = [
    "LAST_GROUP",
    "Compaction",
    "GroupRange",
    "bytes_of",
    "group_key",
    "is_clipped",
    "note_clipped",
    "outside",
]

LAST_GROUP: Final = 32_767
_NOTE: Final = "CLIPPED"  # RocksDB leaves files alone whose names say nothing to it
_SLICE_BYTES: Final = 128 << 20
_log = logging.getLogger("statebackend.rocks")

GroupRange = tuple[int, int]
"""First and last key group."""


def group_key(group: int) -> bytes:
    """Below all keys of a key group, above those of the groups before it."""
    return group.to_bytes(2, "big")


def outside(ranges: Sequence[GroupRange]) -> Iterator[tuple[bytes, bytes]]:
    """The ranges of keys that belong to other key groups than these, which ascend."""
    after = 0
    for first, last in ranges:
        if first > after:
            yield group_key(after), group_key(first)
        after = last + 1
    yield group_key(after), META_PREFIX


def bytes_of(
    files: Sequence[dict[str, Any]], ranges: Sequence[GroupRange], held: Sequence[GroupRange]
) -> int:
    """About how many bytes of table files (as ``live_files`` has them) are of these key groups.

    Args:
        held: the key groups that are in the files at all. (A file with the marker does not say
            which its last one is.)
    """
    total = 0.0
    wanted = [(max(a, c), min(b, d)) for a, b in ranges for c, d in held]
    for file in files:
        start, end = (int.from_bytes(file[key][:2], "big") for key in ("start_key", "end_key"))
        count = _shared(held, start, end)
        if count:
            total += file["size"] * _shared(wanted, start, end) / count
    return int(total)


def _shared(ranges: Sequence[GroupRange], start: int, end: int) -> int:
    return sum(max(0, min(end, last) - max(start, first) + 1) for first, last in ranges)


def note_clipped(path: str, ranges: Sequence[GroupRange]) -> None:
    """Say that of a store all but these key groups was cut off, and still takes room."""
    with open(os.path.join(path, _NOTE), "wb") as file:
        file.write(msgspec.json.encode(ranges))


def is_clipped(path: str) -> bool:
    """Whether :func:`note_clipped` said so, and it was not freed yet."""
    return os.path.exists(os.path.join(path, _NOTE))


def _pieces(
    files: Sequence[dict[str, Any]], cut: Sequence[tuple[bytes, bytes]]
) -> Iterator[tuple[bytes, bytes]]:
    """The same ranges, so that a piece takes a second or less to compact."""
    for start, end in cut:
        size_bytes = 0
        for file in sorted(files, key=lambda one: bytes(one["start_key"])):
            at = bytes(file["start_key"])
            if not start < at < end:
                continue
            if size_bytes >= _SLICE_BYTES:
                yield start, at
                start, size_bytes = at, 0
            size_bytes += file["size"]
        yield start, end


class Compaction:
    """Frees what was cut off from an open database, in a thread."""

    def __init__(self, db: Any, path: str, after_s: float) -> None:
        self._db, self._path = db, path
        self._after_s, self._at_once = after_s, threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="statebackend-compact", daemon=True)
        _running.add(self)
        self._thread.start()

    def _run(self) -> None:
        self._at_once.wait(self._after_s)
        note = os.path.join(self._path, _NOTE)
        try:
            with open(note, "rb") as file:
                ranges = msgspec.json.decode(file.read(), type=list[GroupRange])
            for start, end in _pieces(self._db.live_files(), list(outside(ranges))):
                if self._stopping:
                    return
                self._db.compact_range(start, end)
            if not self._stopping:
                os.unlink(note)
                self._db.set_options({"disable_auto_compactions": "false"})
        except Exception as error:
            # It is in nobody's way: what is damaged is found by those who read it.
            _log.warning("%s: %s", self._path, classify(error, self._path).what)
            with contextlib.suppress(Exception):  # a store that never compacts becomes slow
                self._db.set_options({"disable_auto_compactions": "false"})
        finally:
            _running.discard(self)

    def wait(self) -> None:
        """Begin now, and wait until it is done."""
        self._at_once.set()
        self._thread.join()

    def stop(self) -> None:
        """End it at once; the database refuses all but reads and being closed from here on."""
        self._stopping = True
        self._at_once.set()
        self._db.cancel_all_background(True)
        self._thread.join()


_running: weakref.WeakSet[Compaction] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that comes back from RocksDB into an interpreter that is gone ends the process."""
    for compaction in list(_running):
        compaction.stop()
