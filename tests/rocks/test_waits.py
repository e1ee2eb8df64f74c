"""Who waits for a merge: no opening, no copy, a closing only where level 0 would grow for ever.

Merges are slowed down here, so that none ends by itself while something is done beside it. What was
waited for is read off the files that are left, not off a clock.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from rocksdict import Checkpoint, Rdict

from statebackend.errors import LocalDirError
from statebackend.rocks import store as store_module
from statebackend.rocks.clipping import group_key
from statebackend.rocks.rocksdb_options import LEVEL0_FULL_FILES, LEVEL0_STOP_FILES, store_options
from statebackend.rocks.store import RocksStore
from tests.rocks.stores import TINY, Entries, apply, marker

FULL = LEVEL0_FULL_FILES + 4
ROWS = 100  # of a file
SLOW, QUICK = (
    10_000,
    400_000,
)  # bytes a second: a full level 0 takes half a minute, or less than 1 s
NEW = {b"\0\2\0\1": b"new"}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "db")


def limited(patch: pytest.MonkeyPatch, bytes_per_s: int) -> None:
    """Let merges of stores that are opened from here on write so much."""

    def options(*args: Any, **kwargs: Any) -> Any:
        made = store_options(*args, **kwargs)
        made.set_ratelimiter(bytes_per_s, 100_000, 10)
        made.set_writable_file_max_buffer_size(4096)  # or a merge of this size writes once
        return made

    patch.setattr(store_module, "store_options", options)


def fill(path: str, files: int) -> Entries:
    """A store with so many files in level 0; no merge makes fewer rows of theirs."""
    expected: Entries = {}
    store = RocksStore.open(path, TINY, compacting=False)
    for epoch in range(files):
        drawn = random.Random(epoch)
        rows = {bytes([0, n % 8, 0, 1, epoch, n]): drawn.randbytes(100) for n in range(ROWS)}
        expected.update(rows)
        apply(store, rows, marker(epoch))
        store.flush()
    assert store.level0_files() == files
    store.close()
    return expected


def left(path: str, expected: Entries) -> int:
    """How many files there are in level 0 of a closed store that holds what it should."""
    store = RocksStore.open(path, TINY, compacting=False)
    assert dict(store.scan()) == expected
    files = store.level0_files()
    store.close()
    return files


def await_a_merge(store: RocksStore) -> None:
    """Return once a merge is under way."""
    tick = threading.Event()
    running = "rocksdb.num-running-compactions"
    assert any(store._db.property_int_value(running) or tick.wait(0.02) for _ in range(1500))


def test_no_opening_waits_for_a_merge(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fill(path, FULL)
    limited(monkeypatch, SLOW)
    for _ in range(6):  # however often it was called off
        store = RocksStore.open(path, TINY)
        assert dict(store.scan()) == expected
        assert store.level0_files() == FULL
        await_a_merge(store)
        store.close()


def test_neither_a_flush_nor_a_copy_waits_for_a_merge(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fill(path, FULL)
    limited(monkeypatch, SLOW)
    store = RocksStore.open(path, TINY)
    await_a_merge(store)
    for epoch in (FULL, FULL + 1):
        apply(store, NEW, marker(epoch))
        store.flush()
    store.checkpoint(path + "-taken")
    assert store.level0_files() == FULL + 2
    store.close()  # nor does this: nothing is left to flush
    assert left(path, expected | NEW) == FULL + 2
    assert left(path + "-taken", expected | NEW) == FULL + 2


@pytest.mark.parametrize(("files", "wrote"), [(LEVEL0_FULL_FILES - 5, True), (FULL, False)])
def test_closing_calls_a_merge_off_while_level_0_has_room_or_nothing_is_new(
    path: str, monkeypatch: pytest.MonkeyPatch, files: int, *, wrote: bool
) -> None:
    expected = fill(path, files)
    limited(monkeypatch, SLOW)
    store = RocksStore.open(path, TINY)
    await_a_merge(store)
    if wrote:
        apply(store, NEW, marker(files))
        expected |= NEW
    store.close()
    assert left(path, expected) == files + wrote


def test_closing_with_new_rows_waits_once_level_0_is_full(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fill(path, LEVEL0_FULL_FILES)
    limited(monkeypatch, QUICK)
    store = RocksStore.open(path, TINY)
    await_a_merge(store)
    apply(store, NEW, marker(LEVEL0_FULL_FILES))
    store.close()
    assert left(path, expected | NEW) < LEVEL0_FULL_FILES


def test_closing_waits_where_level_0_would_grow_without_end(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who flushes and closes after each epoch calls off one merge after the other."""
    expected = fill(path, LEVEL0_STOP_FILES)
    limited(monkeypatch, QUICK)
    store = RocksStore.open(path, TINY)
    await_a_merge(store)
    apply(store, NEW, marker(LEVEL0_STOP_FILES))
    store.flush()
    store.close()
    assert left(path, expected | NEW) < LEVEL0_FULL_FILES


class Merges:
    """In the place of rocksdict's database: keeps which ranges are merged by hand."""

    asked: list[tuple[bytes, bytes]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._db = Rdict(*args, **kwargs)

    def compact_range(self, start: bytes, end: bytes) -> None:
        self.asked.append((start, end))
        self._db.compact_range(start, end)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def test_nothing_is_merged_by_hand_but_what_was_cut_off(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "Rdict", Merges)
    monkeypatch.setattr(store_module, "Checkpoint", lambda merges: Checkpoint(merges._db))
    monkeypatch.setattr(Merges, "asked", [], raising=False)
    fill(path, FULL)
    child = path + "-part"
    store = RocksStore.open(path, TINY, compacting=False)
    store.branch(child, ((3, 4),), TINY)
    store.close()
    for epoch in range(FULL, FULL + 6):
        store = RocksStore.open(path, TINY)
        store.compact_clipped(after_s=0.0)
        store.settle_compaction()
        apply(store, NEW, marker(epoch))
        store.flush()
        store.close()
    assert Merges.asked == []
    for _ in range(2):  # once is enough
        part = RocksStore.open(child, TINY)
        part.compact_clipped(after_s=0.0)
        part.settle_compaction()
        part.close()
    kept = group_key(3), group_key(5)
    assert Merges.asked
    assert all(end <= kept[0] or kept[1] <= start for start, end in Merges.asked)
    assert len(set(Merges.asked)) == len(Merges.asked)


def test_triggers_come_back_although_they_could_not_be_raised(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB says so of a full disk, on which it cannot note them: they hold all the same."""
    told: list[int] = []

    def noted(db: Any, full: int, stop: int) -> None:
        told.append(full)
        if len(told) == 1:
            raise OSError("No space left on device")

    fill(path, LEVEL0_FULL_FILES)
    store = RocksStore.open(path, TINY, compacting=False)
    monkeypatch.setattr(store_module, "hold_up_writes", noted)
    with pytest.raises(LocalDirError, match="No space left"):
        store.flush()
    assert told[1:] == [LEVEL0_FULL_FILES]
    store.flush()
    assert told[2:] == [1 << 20, LEVEL0_FULL_FILES]
    store.close()
