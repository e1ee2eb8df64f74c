"""What a bulk load leaves in level 0 is merged once epochs are small again, and only then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from statebackend.rocks import load_compaction as settling
from statebackend.rocks.store import RocksStore
from tests.rocks.stores import TINY, apply, entries_of, marker

FOR_MAPS = replace(TINY, for_maps=True)  # merges from 8 files on
BULK, SMALL = entries_of(2_000), entries_of(10, seed=1)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RocksStore]:
    monkeypatch.setattr(settling, "_BULK_ROWS", len(BULK))
    opened = RocksStore.open(str(tmp_path / "db"), FOR_MAPS)
    yield opened
    opened.close()


class Slow:
    """A database that takes options and merges nothing."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self.triggers: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def set_options(self, options: dict[str, str]) -> None:
        self.triggers += options.values()


def load(store: RocksStore, epoch: int, files: int) -> None:
    """A large epoch, in batches; each is flushed, as a full buffer is."""
    before, keys = store.level0_files(), sorted(BULK)
    flushing = store._db.write

    class Flushed:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def write(self, *args: Any) -> None:
            flushing(*args)
            real.flush()

    real, store._db = store._db, Flushed()
    try:
        pieces = [keys[number::files] for number in range(files)]
        rows = [(some, [BULK[key] for key in some]) for some in pieces]
        store.apply_batches(rows, marker(epoch))
    finally:
        store._db = real
    assert store.level0_files() >= before + files


def merged(store: RocksStore, within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while store.level0_files() > 1:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def test_what_a_load_left_is_merged_with_the_first_small_epoch(store: RocksStore) -> None:
    load(store, 0, files=3)
    apply(store, SMALL, marker(1))
    assert merged(store, 30.0)
    assert dict(store.scan()) == BULK | SMALL


def test_nothing_is_merged_while_large_epochs_follow_each_other(store: RocksStore) -> None:
    load(store, 0, files=2)
    load(store, 1, files=2)
    assert not merged(store, 0.3)


def test_a_load_that_follows_a_small_epoch_is_not_merged_file_by_file(store: RocksStore) -> None:
    store._db = Slow(store._db)
    assert store._settling is not None
    store._settling._db = store._db
    load(store, 0, files=3)
    apply(store, SMALL, marker(1))
    assert store._db.triggers == ["2"]
    load(store, 2, files=2)
    assert store._db.triggers == ["2", "8"]


def test_it_is_given_up_after_some_epochs_that_fill_level_0_themselves(store: RocksStore) -> None:
    store._db = Slow(store._db)
    assert store._settling is not None
    store._settling._db = store._db
    load(store, 0, files=3)
    for epoch in range(1, 17):
        apply(store, SMALL, marker(epoch))
        assert store._db.triggers == ["2"]
    apply(store, SMALL, marker(17))
    assert store._db.triggers == ["2", "8"]


def test_what_was_due_when_filters_went_over_to_parts_is_done_after(tmp_path: Path) -> None:
    """A load is what makes them too large."""
    tight = replace(FOR_MAPS, block_cache_bytes=1 << 12, whole_filters=True)
    path = str(tmp_path / "other")
    store = RocksStore.open(path, tight)
    load(store, 0, files=3)
    assert store.give_up_whole_filters()
    store.close()
    store = RocksStore.open(path, tight)
    apply(store, SMALL, marker(1))
    assert merged(store, 30.0)
    assert dict(store.scan()) == BULK | SMALL
    store.close()


def test_afterwards_files_come_together_as_before(store: RocksStore) -> None:
    load(store, 0, files=3)
    apply(store, SMALL, marker(1))
    assert merged(store, 30.0)
    for epoch in range(2, 6):
        apply(store, SMALL, marker(epoch))
        store.flush()
    assert store.level0_files() >= 3
    assert not merged(store, 0.3)


def test_epochs_that_were_never_large_are_left_alone(store: RocksStore) -> None:
    for epoch in range(4):
        apply(store, SMALL, marker(epoch))
        store.flush()
    assert store.level0_files() == 4
    assert not merged(store, 0.3)


def test_rows_are_written_where_rocksdb_takes_no_option(
    store: RocksStore, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        def __init__(self, db: object) -> None:
            self._db = db

        def __getattr__(self, name: str) -> object:
            return getattr(self._db, name)

        def set_options(self, options: dict[str, str]) -> None:
            raise OSError("no space left on device")

    load(store, 0, files=3)
    assert store._settling is not None
    store._settling._db = Refusing(store._settling._db)
    apply(store, SMALL, marker(1))
    assert "no space left" in caplog.text
    assert dict(store.scan()) == BULK | SMALL
    assert store.marker() == marker(1)


def test_a_store_that_is_read_once_is_read_as_it_lies(tmp_path: Path) -> None:
    path = str(tmp_path / "db")
    written = RocksStore.open(path, TINY, compacting=False)
    for epoch in range(10):
        apply(written, SMALL, marker(epoch))
        written.flush()
    written.close()
    for settings, merges in ((replace(TINY, read_once=True), False), (TINY, True)):
        store = RocksStore.open(path, settings)
        assert dict(store.scan()) == SMALL
        assert merged(store, 30.0 if merges else 0.3) == merges
        store.close()
