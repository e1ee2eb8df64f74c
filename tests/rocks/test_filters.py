"""Filters of a map's store: whole and beside the cache while small, in parts from then on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from statebackend.rocks import options
from statebackend.rocks.layout import Layout
from statebackend.rocks.parted import PartedStore
from statebackend.rocks.store import RocksStore
from tests.rocks.test_store import TINY, apply, entries_of, marker

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
    assert store.outgrown()
    store.close()
    for _ in range(2):  # for good
        store = RocksStore.open(path, TIGHT)
        assert not store.outgrown()
        assert dict(store.scan()) == ENTRIES
        keys = sorted(ENTRIES)
        assert [store.get(key) for key in keys] == [ENTRIES[key] for key in keys]
        assert outside_cache_bytes(store) < before
        store.close()


def test_a_small_store_has_not_outgrown_anything(tmp_path: Path) -> None:
    store = filled(str(tmp_path / "db"), ROOMY)
    assert not store.outgrown()
    assert store.get(b"\0\0\0\1none") is None
    store.close()


def test_who_does_not_open_stores_anew_never_has_whole_ones(tmp_path: Path) -> None:
    store = filled(str(tmp_path / "db"), replace(TIGHT, whole_filters=False))
    assert not store.outgrown()
    store.close()


def test_one_that_cannot_note_it_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be closed after each epoch."""
    store = filled(str(tmp_path / "db"), TIGHT)
    monkeypatch.setattr(store, "path", str(tmp_path / "gone"))
    assert not store.outgrown()
    store.close()


def test_all_parts_that_outgrew_go_over_together(tmp_path: Path) -> None:
    layout = Layout(parts=["p0", "p1"], routes=[(0, 0), (4, 1)])
    for name in layout.parts:
        filled(str(tmp_path / name), TIGHT).close()
    store = PartedStore.open(str(tmp_path), layout, TIGHT)
    assert store.outgrown()
    store.close()
    store = PartedStore.open(str(tmp_path), layout, TIGHT)
    assert not store.outgrown()
    assert dict(store.scan()) == ENTRIES
    store.close()
