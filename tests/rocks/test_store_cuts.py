"""A store that is cut between two batches, or whose process dies, says what it is good for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from statebackend.errors import LocalCopyError
from statebackend.rocks import store as store_module
from statebackend.rocks.store import RocksStore
from tests.rocks.stores import *  # noqa: F403
from tests.rocks.stores import ROOT, TINY, Entries, apply, entries_of, marker

# --- the marker and the batches ------------------------------------------------------------------


class PowerCut(Exception):
    """Stands for a crash; RocksDB never raises it."""


def cut_after(monkeypatch: pytest.MonkeyPatch, store: RocksStore, batches: int) -> None:
    """Let so many batches through, then fail."""
    write, left = store._write, iter(range(batches))

    def counted(*args: object) -> None:
        if next(left, None) is None:
            raise PowerCut
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "_write", counted)


@pytest.mark.parametrize("batches", range(6))
def test_a_store_cut_between_two_batches_says_what_it_is_good_for(
    path: str, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    monkeypatch.setattr(store_module, "_BATCH_ROWS", 100)
    before = entries_of(300)
    after: Entries = {**before, **entries_of(350, seed=1)}
    store = RocksStore.open(path, TINY)
    apply(store, before, marker(0))
    # 350 rows: a batch that says what is coming, three of rows, one of rows and the marker.
    cut_after(monkeypatch, store, batches)
    if batches < 5:
        with pytest.raises(LocalCopyError):
            apply(store, after, marker(1))
    else:
        apply(store, after, marker(1))
    store.close()

    store = RocksStore.open(path, TINY)
    found, content = store.marker(), dict(store.scan())
    if batches == 0:
        assert found == marker(0)
        assert content == before
    elif batches < 5:
        assert found == msgspec.structs.replace(marker(0), applying=marker(1).chain)
        assert (content == before) is (batches == 1)
        assert content != after
        # It is good for that epoch: applied again, it is whole.
        monkeypatch.undo()
        apply(store, after, marker(1))
        assert dict(store.scan()) == after
        assert store.marker() == marker(1)
    else:
        assert found == marker(1)
        assert content == after
    store.close()


@pytest.mark.parametrize("batches", [1, 3])
def test_a_base_cut_between_two_batches_leaves_no_marker(
    path: str, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    monkeypatch.setattr(store_module, "_BATCH_ROWS", 100)
    store = RocksStore.open(path, TINY)
    cut_after(monkeypatch, store, batches)
    with pytest.raises(LocalCopyError):
        apply(store, entries_of(350), marker(7))
    store.close()
    store = RocksStore.open(path, TINY)
    assert store.marker() is None
    store.close()


@pytest.mark.parametrize("rows", [0, 1, 99, 100])
def test_a_delta_of_one_batch_is_all_or_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(store_module, "_BATCH_ROWS", 100)
    store = RocksStore.open(path, TINY)
    apply(store, entries_of(50), marker(0))
    cut_after(monkeypatch, store, 0)
    with pytest.raises(LocalCopyError):
        apply(store, entries_of(rows, seed=1), marker(1))
    store.close()
    store = RocksStore.open(path, TINY)
    assert store.marker() == marker(0)
    assert dict(store.scan()) == entries_of(50)
    cut_after(monkeypatch, store, 1)
    apply(store, entries_of(rows, seed=1), marker(1))
    assert store.marker() == marker(1)
    store.close()


DIE = """
import os, sys
from statebackend.rocks import store as module
from tests.rocks.stores import TINY, apply, entries_of, marker
module._BATCH_ROWS = 500
store = module.RocksStore.open(sys.argv[1], TINY)
write, left = store._write, iter(range(int(sys.argv[2])))
def until(*args):
    if next(left, None) is None:
        os._exit(9)
    write(*args)
store._write = until
for epoch in (1, 2):
    apply(store, entries_of(4000, seed=epoch, size_bytes=100), marker(epoch))
os._exit(9)
"""


@pytest.mark.parametrize("batches", [4, 9, 13, 18])
def test_a_process_that_dies_leaves_an_epoch_or_a_store_that_says_otherwise(
    path: str, batches: int
) -> None:
    """Nothing is closed or flushed: only what RocksDB wrote by itself (its buffer is full) stays.

    Two epochs of nine batches each, cut anywhere.
    """
    store = RocksStore.open(path, TINY)
    apply(store, entries_of(4000, size_bytes=100), marker(0))
    store.close()
    done = subprocess.run(
        [sys.executable, "-c", DIE, path, str(batches)], cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == 9
    store = RocksStore.open(path, TINY)
    found = store.marker()
    assert found is not None
    next_chain = marker(found.epoch + 1).chain
    assert found.applying in ("", next_chain)
    if not found.applying:
        assert dict(store.scan()) == entries_of(4000, seed=found.epoch, size_bytes=100)
    # In either case the epoch after it brings it to where it should be.
    following = entries_of(4000, seed=found.epoch + 1, size_bytes=100)
    apply(store, following, marker(found.epoch + 1))
    assert dict(store.scan()) == following
    store.close()


def test_no_write_ahead_log_is_kept(store: RocksStore, path: str) -> None:
    apply(store, entries_of(200), marker(0))
    assert sum(log.stat().st_size for log in Path(path).glob("*.log")) == 0
