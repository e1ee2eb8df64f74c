"""A store of some of another's key groups, without a byte of it written anew."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statebackend.errors import LocalCopyError, LocalDirError
from statebackend.rocks import clipping
from statebackend.rocks.clipping import LAST_GROUP, GroupRange, bytes_of, outside
from statebackend.rocks.store import RocksStore
from tests.rocks.stores import TINY, Entries, apply, entries_of, marker
from tests.rocks.stores_in_parts import ROUTES, make
from tests.rocks.test_parted_cuts import PARTS
from tests.support.waiting import until

KEPT: tuple[GroupRange, ...] = ((2, 4),)
HOLES: tuple[GroupRange, ...] = ((0, 1), (3, 3), (6, 7))
MANY = tuple((group, group) for group in range(0, 40, 2))


def of(entries: Entries, ranges: tuple[GroupRange, ...]) -> Entries:
    return {k: v for k, v in entries.items() if any(a <= k[1] <= b for a, b in ranges)}


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[RocksStore]:
    store = RocksStore.open(str(tmp_path / "parent"), TINY)
    apply(store, entries_of(3000), marker(1))
    store.flush()
    apply(store, entries_of(2000, seed=1), marker(2))
    yield store
    store.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "child")


STATE = {**entries_of(3000), **entries_of(2000, seed=1)}


def branched(parent: RocksStore, path: str, ranges: tuple[GroupRange, ...] = KEPT) -> RocksStore:
    parent.branch(path, ranges, TINY)
    return RocksStore.open(path, TINY)


@pytest.mark.parametrize("ranges", [KEPT, HOLES, MANY, ((0, 7),), ((7, 7),), ((0, 0),), ((9, 12),)])
def test_a_branch_holds_its_key_groups_and_stands_nowhere(
    parent: RocksStore, path: str, ranges: tuple[GroupRange, ...]
) -> None:
    child = branched(parent, path, ranges)
    expected = of(STATE, ranges)
    assert dict(child.scan()) == expected
    keys = sorted(STATE)
    assert child.multi_get(keys) == [expected.get(key) for key in keys]
    assert child.marker() is None
    # And the parent is as it was.
    assert dict(parent.scan()) == STATE
    assert parent.marker() == marker(2)
    child.close()


def test_no_table_file_of_the_parent_is_written_anew(parent: RocksStore, path: str) -> None:
    parent.flush()
    before = {os.stat(file).st_ino for file in Path(parent.path).glob("*.sst")}
    parent.branch(path, KEPT, TINY)
    files = {os.stat(file).st_ino: file.stat().st_size for file in Path(path).glob("*.sst")}
    assert before <= set(files)
    assert sum(size for inode, size in files.items() if inode not in before) < 8192


def test_a_branch_goes_on_by_itself(parent: RocksStore, path: str) -> None:
    child = branched(parent, path)
    rows = dict.fromkeys(of(entries_of(100), KEPT), b"new")
    apply(child, rows, marker(3))
    apply(parent, {b"\0\2\0\1": b"parent's"}, marker(3))
    child.close()
    child = RocksStore.open(path, TINY)
    assert dict(child.scan()) == {**of(STATE, KEPT), **rows}
    assert child.marker() == marker(3)
    child.close()


def test_key_groups_that_were_cut_off_may_come_back(parent: RocksStore, path: str) -> None:
    child = branched(parent, path)
    back = {b"\0\0\0\1a": b"1", b"\0\7\0\1a": b"2"}
    apply(child, back, marker(3))
    child.compact_clipped()
    child.settle_compaction()
    assert dict(child.scan()) == {**of(STATE, KEPT), **back}
    child.close()


def test_what_was_cut_off_is_freed_in_the_background(parent: RocksStore, path: str) -> None:
    parent.flush()
    child = branched(parent, path)
    assert child.clipped
    full_bytes = parent.slices(0, 7)[0].size_bytes
    child.apply((), (), marker(2))
    child.compact_clipped()
    child.compact_clipped()  # once is enough
    child.settle_compaction()
    assert not child.clipped
    assert child.live_bytes() < 0.6 * full_bytes
    assert dict(child.scan()) == of(STATE, KEPT)
    assert child.marker() == marker(2)
    child.compact_clipped()  # nothing to do
    child.close()
    child = RocksStore.open(path, TINY)
    assert not child.clipped
    assert dict(child.scan()) == of(STATE, KEPT)
    child.close()


def test_what_was_not_freed_yet_is_known_to_the_next_branch(
    parent: RocksStore, tmp_path: Path
) -> None:
    child = branched(parent, str(tmp_path / "child"))
    child.branch(str(tmp_path / "all of it"), KEPT, TINY, whole=True)
    grandchild = RocksStore.open(str(tmp_path / "all of it"), TINY)
    assert grandchild.clipped
    grandchild.compact_clipped()
    grandchild.settle_compaction()
    assert not grandchild.clipped
    assert dict(grandchild.scan()) == of(STATE, KEPT)
    grandchild.branch(str(tmp_path / "and of that"), KEPT, TINY, whole=True)
    assert not clipping.is_clipped(str(tmp_path / "and of that"))
    child.close()
    grandchild.close()


class Held:
    """A database whose compaction waits until background work is called off."""

    def __init__(self, db: Any) -> None:
        self._db, self.compacting, self.called_off = db, threading.Event(), threading.Event()

    def compact_range(self, start: bytes, end: bytes) -> None:
        self.compacting.set()
        assert self.called_off.wait(30)

    def cancel_all_background(self, wait: bool) -> None:
        self.called_off.set()
        self._db.cancel_all_background(wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def test_closing_does_not_wait_for_it(parent: RocksStore, path: str) -> None:
    child = branched(parent, path)
    held = child._db = Held(child._db)
    apply(child, {b"\0\2\0\1a": b"1"}, marker(3))
    child.compact_clipped(0.0)
    assert held.compacting.wait(30)
    assert child.get(b"\0\2\0\1a") == b"1"  # meanwhile all else goes on
    apply(child, {b"\0\2\0\1a": b"2"}, marker(4))
    child.close()
    child.close()
    child = RocksStore.open(path, TINY)
    assert child.clipped  # there is something left to do
    assert child.marker() == marker(4)
    assert dict(child.scan()) == {**of(STATE, KEPT), b"\0\2\0\1a": b"2"}
    child.compact_clipped()
    child.settle_compaction()
    assert not child.clipped
    assert dict(child.scan()) == {**of(STATE, KEPT), b"\0\2\0\1a": b"2"}
    child.close()


def test_closing_does_not_wait_for_its_begin(parent: RocksStore, path: str) -> None:
    child = branched(parent, path)
    child.compact_clipped(after_s=10_000.0)
    child.close()
    child = RocksStore.open(path, TINY)
    assert child.clipped
    child.close()


def test_rocksdb_compacts_by_itself_once_that_is_done(parent: RocksStore, path: str) -> None:
    child = branched(parent, path)
    flushed(child, range(3, 13))
    assert child.level0_files() >= 10  # not yet
    child.compact_clipped()
    child.settle_compaction()
    flushed(child, range(13, 33))
    until(lambda: child.level0_files() < 10)  # RocksDB does it beside the writes
    child.close()


def flushed(store: RocksStore, epochs: range) -> None:
    for epoch in epochs:
        apply(store, {b"\0\2\0\1": b"%d" % epoch, b"\0\4\0\1": b""}, marker(epoch))
        store.flush()


def test_a_store_that_is_closed_at_once_loses_nothing(parent: RocksStore, path: str) -> None:
    child = branched(parent, path)
    for epoch in range(3, 9):
        apply(child, {b"\0\3\0\1": b"%d" % epoch}, marker(epoch))
        child.compact_clipped()
        child.close()
        child = RocksStore.open(path, TINY)
        assert child.marker() == marker(epoch)
        assert dict(child.scan()) == {**of(STATE, KEPT), b"\0\3\0\1": b"%d" % epoch}
    child.close()


def test_a_note_that_does_not_read_is_in_nobody_s_way(parent: RocksStore, path: str) -> None:
    child = branched(parent, path)
    (Path(path) / "CLIPPED").write_bytes(b"\xff{")
    child.compact_clipped()
    child.settle_compaction()
    assert dict(child.scan()) == of(STATE, KEPT)
    child.close()


def test_a_flush_that_fails_at_closing_is_said(
    parent: RocksStore, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = branched(parent, path)
    child.compact_clipped()
    child.settle_compaction()
    assert child._compaction is not None
    child.apply([b"\0\1"], [b"new"], marker(9))

    class Full:
        def __init__(self, db: Any) -> None:
            self._db = db

        def flush(self) -> None:
            raise Exception("IO error: No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._db, name)

    child._db = Full(child._db)
    with pytest.raises(LocalDirError, match="No space left"):
        child.close()
    RocksStore.open(path, TINY).close()  # and it is closed all the same


def test_a_branch_of_a_damaged_store_fails_by_name(parent: RocksStore, path: str) -> None:
    parent.flush()
    for file in Path(parent.path).glob("*.sst"):
        file.unlink()
    with pytest.raises(LocalCopyError):
        parent.branch(path, KEPT, TINY)


def test_a_store_in_parts_gives_what_each_part_has(tmp_path: Path) -> None:
    store = make(str(tmp_path / "db"))  # 0-1 and 4-5; 2-3; 6 and above
    apply(store, entries_of(800), marker(1))  # type: ignore[arg-type]
    slices = store.slices(1, 4)
    assert [one.ranges for one in slices] == [((1, 1), (4, 4)), ((2, 3),)]
    assert [one.whole for one in slices] == [False, True]
    assert [one.ranges for one in store.slices(6, 7)] == [((6, 7),)]
    found: Entries = {}
    for number, one in enumerate(slices):
        assert dict(one.entries()) == of(entries_of(800), one.ranges)
        one.branch(str(tmp_path / f"{number}"), TINY)
        child = RocksStore.open(str(tmp_path / f"{number}"), TINY)
        assert child.clipped == (not one.whole)
        found.update(child.scan())
        child.close()
    assert found == of(entries_of(800), ((1, 4),))
    assert [one.whole for one in store.slices(0, 7)] == [True] * PARTS
    assert len(ROUTES) == 4
    store.close()


def test_a_store_knows_by_its_marker_whether_it_is_wanted_as_a_whole(parent: RocksStore) -> None:
    assert parent.slices(0, 7)[0].whole
    assert not parent.slices(0, 6)[0].whole
    assert not parent.slices(1, 7)[0].whole


def test_the_size_of_key_groups_is_estimated(parent: RocksStore) -> None:
    parent.flush()
    whole, half = parent.slices(0, 7)[0].size_bytes, parent.slices(0, 3)[0].size_bytes
    assert whole > 3000 * 40
    assert 0.4 * whole < half < 0.6 * whole
    assert parent.slices(9, 12)[0].size_bytes == 0
    assert bytes_of([], [(0, 7)], [(0, 7)]) == 0


def test_the_size_of_a_part_is_not_that_of_the_store(tmp_path: Path) -> None:
    store = make(str(tmp_path / "db"))
    apply(store, entries_of(4000), marker(1))  # type: ignore[arg-type]
    store.flush()
    sizes = {one.ranges: one.size_bytes for one in store.slices(0, 7)}
    whole = sum(sizes.values())
    assert whole > 4000 * 40
    assert 0.4 * whole < sizes[(0, 1), (4, 5)] < 0.6 * whole
    assert 0.15 * whole < sizes[((2, 3),)] < 0.35 * whole
    store.close()


def test_what_was_cut_off_counts_until_it_is_freed(parent: RocksStore, path: str) -> None:
    """A small state is uploaded whole, from memory: a large one is never taken for one."""
    parent.flush()
    child = branched(parent, path)
    assert child.live_bytes() > 3000 * 40
    assert child.stored_bytes() > 3000 * 40
    child.close()


RANGES = st.lists(st.integers(0, LAST_GROUP), unique=True, max_size=8).map(
    lambda ends: list(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


@given(ranges=RANGES, group=st.integers(0, LAST_GROUP), rest=st.binary(max_size=3))
def test_a_key_is_inside_or_outside(ranges: list[GroupRange], group: int, rest: bytes) -> None:
    key = group.to_bytes(2, "big") + rest
    inside = any(first <= group <= last for first, last in ranges)
    assert sum(start <= key < end for start, end in outside(ranges)) == (not inside)
    assert not any(start <= b"\xff\xffmarker" < end for start, end in outside(ranges))


@pytest.mark.parametrize("again", [False, True])
def test_a_store_that_is_opened_again_has_its_filters_and_the_one_cache(
    path: str, again: bool
) -> None:
    """Left to itself, the library reads the options of a family that is there from its files."""
    store = RocksStore.open(path, TINY)
    apply(store, entries_of(10), marker(1))
    if again:
        store.close()
        store = RocksStore.open(path, TINY)
    log = (Path(path) / "LOG").read_text()
    assert "filter_policy: bloomfilter" in log
    assert "block_cache_name: AutoHyperClockCache" in log
    assert f"Options.write_buffer_size: {TINY.write_buffer_bytes}" in log
    store.close()
