"""A store in parts after a crash between its parts: it says which epoch it is good for."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from statebackend.errors import LocalCopyError
from statebackend.rocks.parted import PartedStore
from statebackend.rocks.parts_layout import Routes
from statebackend.rocks.store import Marker
from tests.rocks.stores import ROOT, marker
from tests.rocks.stores_in_parts import *  # noqa: F403
from tests.rocks.stores_in_parts import ROUTES, apply, make, opened, rows_of, state_after

PARTS = 3


# --- where it stands -----------------------------------------------------------------------------


def put_part(store: PartedStore, part: int, epoch: int) -> None:
    """One part's share of an epoch, as a crash may leave it."""
    rows = rows_of(epoch)
    routes = Routes(ROUTES)
    apply(
        store._parts[part],
        {k: v for k, v in rows.items() if routes.parts[routes.place(k)] == part},
        marker(epoch),
    )


@pytest.mark.parametrize("stands", list(itertools.product((1, 2, 4), repeat=PARTS)))
def test_parts_at_different_epochs_are_good_for_the_newest_and_by_all_deltas_since_the_oldest(
    store: PartedStore, path: str, stands: tuple[int, ...]
) -> None:
    for part, epoch in enumerate(stands):
        for one in range(1, epoch + 1):
            put_part(store, part, one)
    store.close()
    store = opened(path)
    oldest, newest = min(stands), max(stands)
    for target in range(oldest, 6):
        found = store.marker()
        assert found is not None
        assert found.epoch == target
        assert found.chain == marker(target).chain
        if target < newest:
            assert found.applying == marker(newest).chain
            assert (found.applying_epoch or target + 1) == newest
        else:
            assert found == marker(target)
            assert dict(store.scan()) == state_after(target)
        # A cut here, and what comes next is applied to what is on disk.
        store.close()
        store = opened(path)
        apply(store, rows_of(target + 1), marker(target + 1))
    store.close()


def test_a_part_that_is_ahead_is_never_taken_back(store: PartedStore) -> None:
    for epoch in (1, 2, 3):
        put_part(store, 0, epoch)
    put_part(store, 1, 1)
    put_part(store, 2, 1)
    before = dict(store._parts[0].scan())
    apply(store, rows_of(2), marker(2))
    assert dict(store._parts[0].scan()) == before
    assert store._parts[0].marker() == marker(3)


def test_a_part_that_is_half_way_says_so_for_the_store(store: PartedStore) -> None:
    apply(store, rows_of(1), marker(1))

    def broken() -> Iterator[Any]:
        yield [b"\0\0a"], [b"1"]
        yield [b"\0\2a"], [b"1"]
        raise OSError("cut")

    with pytest.raises(OSError, match="cut"):
        store.apply_batches(broken(), marker(2))
    assert store.marker() == msgspec.structs.replace(marker(1), applying=marker(2).chain)
    apply(store, rows_of(2), marker(2))
    assert store.marker() == marker(2)
    # Half way from there, while the others are behind.
    store._parts[1].write_before(marker(3))
    assert store.marker() == msgspec.structs.replace(marker(2), applying=marker(3).chain)


def test_what_fails_before_the_second_piece_changes_nothing(store: PartedStore) -> None:
    apply(store, rows_of(1), marker(1))

    def broken() -> Iterator[Any]:
        yield [b"\0\0a"], [b"1"]
        raise OSError("cut")

    with pytest.raises(OSError, match="cut"):
        store.apply_batches(broken(), marker(2))
    assert store.marker() == marker(1)
    assert dict(store.scan()) == state_after(1)


@pytest.mark.parametrize("failing", range(PARTS))
def test_a_write_that_fails_on_one_part_leaves_a_store_for_that_epoch_only(
    store: PartedStore, path: str, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    apply(store, rows_of(1), marker(1))

    def full(*args: object) -> None:
        raise Exception("IO error: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store._parts[failing], "_write", full)
        with pytest.raises(Exception, match="No space left"):
            apply(store, rows_of(2), marker(2))
    expected = marker(1)
    if failing:
        expected = msgspec.structs.replace(expected, applying=marker(2).chain)
    assert store.marker() == expected
    store.close()
    store = opened(path)
    assert store.marker() == expected
    apply(store, rows_of(2), marker(2))
    assert store.marker() == marker(2)
    assert dict(store.scan()) == state_after(2)
    store.close()


def test_a_store_that_is_being_put_together_stands_nowhere(store: PartedStore, path: str) -> None:
    apply(store, rows_of(1), None)
    store.apply_batches([([b"\0\0z"], [b"1"]), ([b"\0\7z"], [b"2"])], None)
    store.close()
    store = opened(path)
    assert store.marker() is None
    assert dict(store.scan()) == {**state_after(1), b"\0\0z": b"1", b"\0\7z": b"2"}
    store._parts[0].apply((), (), marker(5))  # cut between two parts
    store._parts[2].apply((), (), marker(5))
    assert store.marker() is None
    store.apply((), (), marker(5))
    assert store.marker() == marker(5)
    with pytest.raises(AssertionError, match="without a marker"):
        store.apply([b"\0\0a"], [b"1"], None)
    with pytest.raises(AssertionError, match="without a marker"):
        store.apply_batches([([b"\0\0a"], [b"1"])], None)
    store.close()


@pytest.mark.parametrize(
    "other",
    [
        marker(1, "ee"),
        msgspec.structs.replace(marker(2), job_id="another"),
        msgspec.structs.replace(marker(1), key_group_end=6),
        msgspec.structs.replace(marker(0), applying="ee"),
    ],
)
def test_parts_that_are_not_of_one_line_are_damage(store: PartedStore, other: Marker) -> None:
    store._parts[0].apply((), (), marker(1))
    store._parts[1].apply((), (), other)
    store._parts[2].apply((), (), marker(1))
    with pytest.raises(LocalCopyError, match="not of one line"):
        store.marker()


def test_another_state_of_an_epoch_is_not_put_over_it(store: PartedStore) -> None:
    apply(store, rows_of(1), marker(1))
    with pytest.raises(LocalCopyError, match="not of one line"):
        apply(store, rows_of(2), marker(1, "ee"))
    assert dict(store.scan()) == state_after(1)


DIE = """
import os, sys
from tests.rocks.stores_in_parts import apply, opened, rows_of
from tests.rocks.stores import marker
store = opened(sys.argv[1])
write, left = store._parts[0].__class__._write, iter(range(int(sys.argv[2])))
def until(self, *args):
    if next(left, None) is None:
        os._exit(9)
    write(self, *args)
store._parts[0].__class__._write = until
for epoch in range(2, 13):
    rows = rows_of(epoch, 400)
    if epoch % 2:
        apply(store, rows, marker(epoch))
    else:
        keys = sorted(rows)
        pieces = [(keys[a:a+60], [rows[k] for k in keys[a:a+60]]) for a in range(0, len(keys), 60)]
        store.apply_batches(pieces, marker(epoch))
    if epoch in (3, 8):
        store._parts[epoch % 3].flush()
    if epoch == 6:
        store._parts[1].flush()
os._exit(9)
"""


@pytest.mark.parametrize("writes", [3, 14, 33, 60, 82, 1000])
def test_a_process_that_dies_leaves_a_store_that_says_what_it_is_good_for(
    path: str, writes: int
) -> None:
    """Nothing is closed; parts were flushed at different times, as RocksDB does when it likes."""
    store = make(path)
    apply(store, rows_of(1, 400), marker(1))
    store.close()
    done = subprocess.run(
        [sys.executable, "-c", DIE, path, str(writes)], cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == 9
    store = opened(path)
    found = store.marker()
    assert found is not None
    assert found.chain == marker(found.epoch).chain
    newest = found.epoch
    if found.applying:
        newest = found.applying_epoch or found.epoch + 1
        assert found.applying == marker(newest).chain
    else:
        assert dict(store.scan()) == state_after(found.epoch, 400)
    for epoch in range(found.epoch + 1, newest + 1):
        apply(store, rows_of(epoch, 400), marker(epoch))
    assert store.marker() == marker(newest)
    assert dict(store.scan()) == state_after(newest, 400)
    store.close()
