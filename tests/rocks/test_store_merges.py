"""The lock of a store, and its merges: nobody waits for them, and nothing is lost by them."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
from rocksdict import Checkpoint

from statebackend.errors import StoreBusyError
from statebackend.rocks import store as store_module
from statebackend.rocks.rocksdb_options import LEVEL0_FULL_FILES
from statebackend.rocks.store import RocksStore
from tests.rocks.stores import *  # noqa: F403
from tests.rocks.stores import ROOT, TINY, Entries, _filled, apply, entries_of, marker

# --- the lock ------------------------------------------------------------------------------------


HOLD = """
import sys
import threading
from statebackend.rocks.store import RocksStore
store = RocksStore.open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
store.close()
"""


def test_a_store_that_another_process_has_open_is_busy_and_free_once_it_died(path: str) -> None:
    _filled(path, rows=10)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(StoreBusyError, match="another process"):
            RocksStore.open(path, TINY)
    finally:
        holder.kill()
        holder.communicate()
    store = RocksStore.open(path, TINY)
    assert store.marker() == marker(0)
    store.close()


def test_a_store_is_busy_within_one_process_too(path: str, store: RocksStore) -> None:
    with pytest.raises(StoreBusyError):
        RocksStore.open(path, TINY)


# --- upkeep --------------------------------------------------------------------------------------


def fill_level0(path: str, *, files: int) -> Entries:
    """A store that was never open for long enough to merge anything."""
    expected: Entries = {}
    store = RocksStore.open(path, TINY, compacting=False)
    for epoch in range(files):
        changes = entries_of(20, seed=epoch)
        expected.update(changes)
        apply(store, changes, marker(epoch))
        store.flush()
    assert store.level0_files() == files
    store.close()
    return expected


def merged_by_itself(store: RocksStore) -> bool:
    """Whether level 0 becomes less than full while nobody does anything."""
    tick = threading.Event()
    return any(store.level0_files() < 8 or tick.wait(0.02) for _ in range(1500))


class NotWaitedFor:
    """A database that nobody may merge by hand."""

    def __init__(self, db: Any) -> None:
        self._db = db

    def compact_range(self, *args: object) -> None:
        raise AssertionError("somebody waits for a merge")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def test_a_full_level_0_is_merged_beside_the_first_rows(path: str) -> None:
    expected = fill_level0(path, files=20)
    store = RocksStore.open(path, TINY)
    assert dict(store.scan()) == expected
    apply(store, {b"\0\2\0\1": b"new"}, marker(20))  # meanwhile
    store.checkpoint(path + "-taken")
    store.branch(path + "-part", ((0, 3),), TINY)
    assert merged_by_itself(store)
    assert dict(store.scan()) == {**expected, b"\0\2\0\1": b"new"}
    store.close()
    for copy in (path, path + "-taken"):
        again = RocksStore.open(copy, TINY)
        assert dict(again.scan()) == {**expected, b"\0\2\0\1": b"new"}
        assert again.marker() == marker(20)
        again.close()


def test_a_store_that_is_closed_while_it_merges_loses_nothing(path: str) -> None:
    expected = fill_level0(path, files=20)
    for _ in range(3):
        RocksStore.open(path, TINY).close()
    store = RocksStore.open(path, TINY)
    assert dict(store.scan()) == expected
    assert store.marker() == marker(19)
    store.close()


def test_rows_that_were_flushed_without_their_marker_are_merged_too(path: str) -> None:
    store = RocksStore.open(path, TINY, compacting=False)
    apply(store, {b"\0\0": b""}, marker(0))
    batches = [(sorted(rows), [rows[key] for key in sorted(rows)]) for rows in _many(40)]
    store.apply_batches(batches, marker(1))  # over the buffer: flushed as it goes
    store.flush()
    assert store.level0_files() >= 8
    store.close()
    store = RocksStore.open(path, TINY)
    assert merged_by_itself(store)
    assert store.marker() == marker(1)
    store.close()


def _many(pieces: int) -> list[Entries]:
    return [entries_of(300, seed=seed, size_bytes=100) for seed in range(pieces)]


def test_what_was_only_read_is_neither_flushed_nor_waited_for(path: str) -> None:
    """RocksDB's flush waits while level 0 is as full as it may be, also where it has no rows."""
    fill_level0(path, files=24)
    counted = Flushes(path)
    store = counted.open()
    store.flush()
    store.close()
    assert counted.flushes == 0
    store = counted.open()
    apply(store, {b"\0\2\0\1": b"new"}, marker(24))
    store.close()
    assert counted.flushes == 1
    store = counted.open()
    assert store.marker() == marker(24)
    store.close()


class Flushes:
    """Counts those of the stores that it opens."""

    def __init__(self, path: str) -> None:
        self.path, self.flushes = path, 0

    def open(self) -> RocksStore:
        store, counting = RocksStore.open(self.path, TINY), self

        class Counted(NotWaitedFor):
            def flush(self) -> None:
                counting.flushes += 1
                self._db.flush()

        store._db = Counted(store._db)
        return store


def test_a_copy_is_taken_without_waiting_for_a_merge(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB's flush waits while level 0 is full; a checkpoint with the interpreter held."""
    expected = fill_level0(path, files=24)
    store = RocksStore.open(path, TINY, compacting=False)
    told: list[str] = []

    class Told(NotWaitedFor):
        def set_options(self, options: dict[str, str]) -> None:
            told.append(options["level0_slowdown_writes_trigger"])
            self._db.set_options(options)

        def flush(self) -> None:
            told.append("flush")
            self._db.flush()

    class Checkpoints:
        def __init__(self, db: Any) -> None:
            self._real = Checkpoint(db._db)

        def create_checkpoint(self, path: str) -> None:
            told.append("checkpoint")
            self._real.create_checkpoint(path)

    store._db = Told(store._db)
    monkeypatch.setattr(store_module, "Checkpoint", Checkpoints)
    changes = {b"\0\2\0\1": b"new"}
    apply(store, changes, marker(24))
    store.checkpoint(path + "-taken")
    raised, lowered = str(1 << 20), "20"
    assert told == [raised, "flush", "checkpoint", lowered]
    store.close()
    again = RocksStore.open(path + "-taken", TINY)
    assert dict(again.scan()) == {**expected, **changes}
    again.close()


def test_a_store_that_is_closed_after_each_epoch_loses_nothing(path: str) -> None:
    expected: Entries = {}
    for epoch in range(40):
        store = RocksStore.open(path, TINY)
        changes = entries_of(20, seed=epoch)
        expected.update(changes)
        apply(store, changes, marker(epoch))
        store.close()
        again = RocksStore.open(path, TINY, compacting=False)
        assert dict(again.scan()) == expected
        again.close()


def test_a_copy_goes_on_beside_merges_while_a_flush_comes_to_its_end(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up: list[bool] = []
    monkeypatch.setattr(
        store_module, "hold_up_writes", lambda db, full, stop: held_up.append(full < 100)
    )
    monkeypatch.setattr(store_module, "_NEARLY_FULL", LEVEL0_FULL_FILES)
    store = RocksStore.open(path, TINY)
    with store._beside_merges():
        with store._beside_merges():
            pass
        assert held_up == [False, False]
    assert held_up == [False, False, True]
    store.close()
