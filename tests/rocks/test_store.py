"""The one place that touches RocksDB: what a store holds, and how it is opened and closed."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from statebackend.errors import LocalCopyError
from statebackend.rocks.store import RocksStore
from tests.rocks.stores import *  # noqa: F403
from tests.rocks.stores import TINY, apply, entries_of, marker

# --- what it holds -------------------------------------------------------------------------------


def test_a_new_store_is_empty_and_stands_nowhere(store: RocksStore) -> None:
    assert store.marker() is None
    assert list(store.scan()) == []
    assert store.get(b"\0\0") is None
    assert store.multi_get([]) == []


def test_a_delta_is_read_back_in_every_way_and_survives_a_reopen(path: str) -> None:
    entries = entries_of(500)
    keys = sorted(entries)
    store = RocksStore.open(path, TINY)
    apply(store, entries, marker(3))
    for _ in range(2):
        assert [store.get(key) for key in keys] == [entries[key] for key in keys]
        assert store.multi_get([b"\0\0none", *keys]) == [None, *(entries[key] for key in keys)]
        assert list(store.scan()) == sorted(entries.items())
        assert store.marker() == marker(3)
        store.close()
        store = RocksStore.open(path, TINY)
    store.close()


def test_none_deletes_and_an_empty_value_does_not(store: RocksStore) -> None:
    store.apply([b"a", b"b", b"c"], [b"1", b"2", b""], marker(0))
    store.apply([b"a", b"b", b"x"], [None, b"", None], marker(1))
    assert list(store.scan()) == [(b"b", b""), (b"c", b"")]
    assert store.multi_get([b"a", b"b", b"c", b"x"]) == [None, b"", b"", None]


def test_multi_get_answers_in_the_order_asked_with_repeats(store: RocksStore) -> None:
    store.apply([b"a", b"b"], [b"1", b"2"], marker(0))
    assert store.multi_get([b"b", b"zz", b"a", b"b"]) == [b"2", None, b"1", b"2"]


def test_applying_a_delta_again_changes_nothing(store: RocksStore) -> None:
    store.apply([b"a", b"b", b"c"], [b"1", b"2", b"3"], marker(0))
    for _ in range(2):
        store.apply([b"a", b"b", b"d"], [None, b"x", b"4"], marker(1))
        assert list(store.scan()) == [(b"b", b"x"), (b"c", b"3"), (b"d", b"4")]
        assert store.marker() == marker(1)


def test_an_epoch_without_changes_moves_the_marker(store: RocksStore) -> None:
    store.apply([b"a"], [b"1"], marker(0))
    store.apply([], [], marker(1))
    assert store.marker() == marker(1)
    assert list(store.scan()) == [(b"a", b"1")]


# --- scans ---------------------------------------------------------------------------------------


EDGES = [
    b"\0\0\0\1",
    b"\0\0\0\1\0",
    b"\0\0\0\1\xff",
    b"\0\0\0\1\xff\xff",
    b"\0\0\0\1\xff\xff\0",
    b"\0\0\0\2",
    b"\0\0\xff\xff",
    b"\0\0\xff\xff\xff",
    b"\0\1\0\0",
    b"\0\xff",
    b"\0\xff\xff\xff",
    b"\1\0\0\1",
    b"\x7f\xff\xff\xff\xff",
]
PREFIXES = sorted({key[:length] for key in EDGES for length in range(len(key) + 1)} | {b"\0\2"})


@pytest.mark.parametrize("flushed", [False, True], ids=["memtable", "file"])
def test_a_scan_gives_what_starts_with_its_prefix_and_nothing_else(
    path: str, flushed: bool
) -> None:
    store = RocksStore.open(path, TINY)
    store.apply(EDGES, EDGES, marker(0))
    if flushed:
        store.close()
        store = RocksStore.open(path, TINY)
    for prefix in PREFIXES:
        expected = [(key, key) for key in sorted(EDGES) if key.startswith(prefix)]
        assert list(store.scan(prefix)) == expected, prefix
    store.close()


def test_the_marker_is_not_part_of_the_state(store: RocksStore) -> None:
    store.apply([b"\x7f\xff"], [b"last"], marker(0))
    assert list(store.scan()) == [(b"\x7f\xff", b"last")]
    for prefix in (b"\xff", b"\xff\xff", b"\xff\xffmarker"):
        assert list(store.scan(prefix)) == []


def test_a_scan_sees_the_moment_it_was_started(store: RocksStore) -> None:
    store.apply([b"a", b"b"], [b"1", b"2"], marker(0))
    scan = store.scan()
    assert next(scan) == (b"a", b"1")
    store.apply([b"b", b"c"], [None, b"3"], marker(1))
    assert list(scan) == [(b"b", b"2")]


def test_a_scan_left_half_way_does_not_keep_the_lock(path: str) -> None:
    store = RocksStore.open(path, TINY)
    store.apply([b"a", b"b"], [b"1", b"2"], marker(0))
    scan = store.scan()
    next(scan)
    scan.close()
    store.close()
    RocksStore.open(path, TINY).close()


@pytest.mark.parametrize("for_maps", [False, True])
def test_a_store_that_is_only_let_go_of_does_not_keep_the_lock(path: str, for_maps: bool) -> None:
    """As what an error leaves behind half opened; with nothing in it that waits for the gc."""
    settings = replace(TINY, for_maps=for_maps, whole_filters=for_maps)
    gc.disable()
    try:
        for epoch in range(2):
            store = RocksStore.open(path, settings)
            store.apply([b"a", b"b"], [b"1", b"2"], marker(epoch))
            store.flush()
            assert store.level0_files() == epoch + 1
            del store
        RocksStore.open(path, settings).close()
    finally:
        gc.enable()


# --- upkeep --------------------------------------------------------------------------------------


def test_closing_twice_is_fine(path: str) -> None:
    store = RocksStore.open(path, TINY)
    store.apply([b"a"], [b"1"], marker(0))
    store.close()
    store.close()
    again = RocksStore.open(path, TINY)
    assert again.get(b"a") == b"1"
    again.close()


def test_a_close_that_cannot_flush_raises_a_typed_error(path: str) -> None:
    store = RocksStore.open(path, TINY)
    store.apply([b"a"], [b"1"], marker(0))
    shutil.rmtree(path)
    with pytest.raises(LocalCopyError):
        store.close()
    # It is closed all the same: the lock is free.
    store.close()
    RocksStore.open(path, TINY).close()


def test_a_store_that_must_be_there_is_not_made_anew(tmp_path: Path) -> None:
    """What was put together a moment ago may have been taken away: empty is another state."""
    for path in (tmp_path / "none", tmp_path / "emptied"):
        if path.name == "emptied":
            path.mkdir()
        with pytest.raises(LocalCopyError):
            RocksStore.open(str(path), TINY, make=False)
        assert not (path / "CURRENT").exists()
