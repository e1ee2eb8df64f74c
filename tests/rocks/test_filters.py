"""Filters of a map's store: whole and beside the cache while small, in parts from then on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from statebackend.rocks import rocksdb_options as options
from statebackend.rocks.parted import PartedStore
from statebackend.rocks.parts_layout import Layout
from statebackend.rocks.store import RocksStore
from tests.rocks.stores import TINY, apply, entries_of, marker

ROOMY = replace(TINY, block_cache_bytes=64 << 20, for_maps=True, whole_filters=True)
TIGHT = replace(ROOMY, block_cache_bytes=1 << 14)  # 1 KB for filters
ENTRIES = entries_of(3_000)


def filled(path: str, settings: options.RocksSettings) -> RocksStore:
    store = RocksStore.open(path, settings)
    apply(store, ENTRIES, marker(0))
    store.flush()
    return store


def outside_cache_bytes(store: RocksStore) -> int:
    return int(store._db.property_int_value("rocksdb.estimate-table-readers-mem"))


def test_a_store_goes_over_to_parts_when_filters_outgrow_their_share(tmp_path: Path) -> None:
    path = str(tmp_path / "db")
    store = filled(path, TIGHT)
    before = outside_cache_bytes(store)
    assert before > 3_000  # ten bits for each of 3,000 keys
    assert store.give_up_whole_filters()
    store.close()
    for _ in range(2):  # for good
        store = RocksStore.open(path, TIGHT)
        assert not store.give_up_whole_filters()
        assert dict(store.scan()) == ENTRIES
        keys = sorted(ENTRIES)
        assert [store.get(key) for key in keys] == [ENTRIES[key] for key in keys]
        assert outside_cache_bytes(store) < before
        store.close()


def test_a_small_store_has_not_outgrown_anything(tmp_path: Path) -> None:
    store = filled(str(tmp_path / "db"), ROOMY)
    assert not store.give_up_whole_filters()
    assert store.get(b"\0\0\0\1none") is None
    store.close()


def test_many_open_stores_share_the_room(tmp_path: Path) -> None:
    """4 KB for each of two; a quarter of that, once there are eight."""
    settings = replace(ROOMY, block_cache_bytes=1 << 16)
    entries = dict(sorted(ENTRIES.items())[:300])
    stores = []
    for number in range(8):
        store = RocksStore.open(str(tmp_path / str(number)), settings)
        apply(store, entries, marker(0))
        store.flush()
        stores.append(store)
        if number == 0:
            assert 1 << 10 < outside_cache_bytes(store) <= 1 << 12
            assert not store.give_up_whole_filters()
    assert stores[0].give_up_whole_filters()
    for store in stores:
        store.close()
    for number in range(2, 8):  # let go of, as after an error
        RocksStore.open(str(tmp_path / str(number)), settings)
    alone = RocksStore.open(str(tmp_path / "1"), settings)
    assert not alone.give_up_whole_filters()
    alone.close()


def test_who_does_not_open_stores_anew_never_has_whole_ones(tmp_path: Path) -> None:
    whole = filled(str(tmp_path / "a"), TIGHT)
    parts = filled(str(tmp_path / "b"), replace(TIGHT, whole_filters=False))
    assert outside_cache_bytes(parts) < outside_cache_bytes(whole) - 2_000
    assert not parts.give_up_whole_filters()
    whole.close()
    parts.close()


def test_a_store_that_was_made_with_parts_is_read_as_before(tmp_path: Path) -> None:
    path = str(tmp_path / "db")
    filled(path, replace(TIGHT, whole_filters=False)).close()
    store = RocksStore.open(path, ROOMY)
    assert [store.get(key) for key in sorted(ENTRIES)] == [ENTRIES[k] for k in sorted(ENTRIES)]
    assert not store.give_up_whole_filters()
    store.close()


def test_one_that_cannot_note_it_stays_open_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would be closed after each epoch."""
    store = filled(str(tmp_path / "db"), TIGHT)
    assert store._filters is not None
    monkeypatch.setattr(store._filters, "_path", str(tmp_path / "gone"))
    for _ in range(3):
        assert not store.give_up_whole_filters()
    assert len(caplog.records) == 1
    store.close()


def test_all_parts_that_outgrew_go_over_together(tmp_path: Path) -> None:
    layout = Layout(parts=["p0", "p1"], routes=[(0, 0), (4, 1)])
    for name in layout.parts:
        filled(str(tmp_path / name), TIGHT).close()
    store = PartedStore.open(str(tmp_path), layout, TIGHT)
    assert store.give_up_whole_filters()
    store.close()
    store = PartedStore.open(str(tmp_path), layout, TIGHT)
    assert not store.give_up_whole_filters()
    assert dict(store.scan()) == ENTRIES
    store.close()
