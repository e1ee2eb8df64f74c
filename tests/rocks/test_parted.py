"""A store in parts is one store to whoever uses it: it reads as one sorted map."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend.rocks.parted import PartedStore
from statebackend.rocks.parts_layout import LAYOUT_FILE
from statebackend.state.table_base import MemoryBase
from tests.rocks.conftest import MEMORY
from tests.rocks.stores import marker
from tests.rocks.stores_in_parts import *  # noqa: F403
from tests.rocks.stores_in_parts import apply, make, opened, rows_of, state_after

PLACE = MEMORY if os.access(MEMORY, os.W_OK) else None


# --- one face ------------------------------------------------------------------------------------


KEYS = st.builds(
    lambda group, state, rest: bytes([0, group, 0, state]) + rest,
    st.integers(0, 7),
    st.integers(0, 1),
    st.binary(max_size=2),
)
DELTAS = st.dictionaries(KEYS, st.none() | st.binary(max_size=3), max_size=30)
POINTS = st.one_of(KEYS, st.binary(max_size=3).map(lambda rest: b"\0" + rest))
MANY_ROUTES = st.lists(st.integers(0, 3), min_size=8, max_size=8).map(
    lambda owners: [(group, part) for group, part in enumerate(owners)]
)


@pytest.mark.full  # long random histories
@settings(max_examples=40, deadline=None)
@given(
    routes=MANY_ROUTES,
    deltas=st.lists(st.tuples(DELTAS, st.booleans(), st.booleans()), max_size=4),
    asked=st.lists(KEYS, max_size=12),
    points=st.lists(POINTS, max_size=9),
    prefix=st.binary(max_size=3),
    budget=st.integers(0, 60),
)
def test_every_read_is_that_of_one_sorted_map(
    routes: list[tuple[int, int]],
    deltas: list[tuple[dict[bytes, bytes | None], bool, bool]],
    asked: list[bytes],
    points: list[bytes],
    prefix: bytes,
    budget: int,
) -> None:
    folder = tempfile.TemporaryDirectory(prefix="statebackend-", dir=PLACE)
    path = os.path.join(folder.name, "db")
    store, model = make(path, routes), MemoryBase()
    for epoch, (rows, in_order, reopen) in enumerate(deltas):
        keys = sorted(rows) if in_order else list(rows)
        values = [rows[key] for key in keys]
        if reopen:
            pieces = [(keys[at : at + 7], values[at : at + 7]) for at in range(0, len(keys), 7)]
            store.apply_batches(pieces, marker(epoch))
            store.close()
            store = opened(path)
        else:
            store.apply(keys, values, marker(epoch))
        model.apply(keys, values)
        assert store.marker() == marker(epoch)
    try:
        assert list(store.scan()) == list(model.scan())
        assert list(store.scan(prefix)) == list(model.scan(prefix))
        assert list(store.scan(b"\0" + prefix[:1])) == list(model.scan(b"\0" + prefix[:1]))
        assert [store.get(key) for key in asked] == model.multi_get(asked)
        assert store.multi_get(asked) == model.multi_get(asked)
        in_order_keys = sorted({*asked, *list(model.entries)[::3]})
        wanted = model.multi_get(in_order_keys)
        assert store.multi_get(in_order_keys) == wanted
        assert store.merge_get(in_order_keys, 10_000) == wanted
        some = store.merge_get(in_order_keys, budget)
        assert some == wanted[: len(some)]
        ends = sorted(points)
        ranges = [tuple(ends[at : at + 3]) for at in range(0, len(ends) - 2, 3)]
        expected = [key for keys in model.scan_keys(ranges) for key in keys]  # type: ignore[arg-type]
        assert [key for keys in store.scan_keys(ranges) for key in keys] == expected  # type: ignore[arg-type]
    finally:
        store.close()
        folder.cleanup()


def test_a_scan_sees_the_moment_it_was_started(store: PartedStore) -> None:
    apply(store, rows_of(1), marker(1))
    seen = store.scan()
    first = next(seen)
    apply(store, rows_of(2), marker(2))
    assert dict([first, *seen]) == state_after(1)
    assert dict(store.scan()) == state_after(2)


def test_a_scan_that_is_given_up_does_not_keep_the_store(path: str, store: PartedStore) -> None:
    apply(store, rows_of(1), marker(1))
    scans = [store.scan(), store.scan(b"\0\2"), store.scan_keys([(b"\0\0", b"\0\7", b"\0\7")])]
    for scan in scans:
        next(scan)  # type: ignore[call-overload]
    del scans, scan
    store.close()
    opened(path).close()


def test_sizes_are_of_all_parts(store: PartedStore) -> None:
    for epoch in (1, 2):  # RocksDB merges four by itself
        apply(store, rows_of(epoch, 400), marker(epoch))
        assert store.stored_bytes() > store.live_bytes()
        store.flush()
        assert store.level0_files() == epoch
    assert store.live_bytes() > 200 * 20
    assert store.live_bytes() == sum(part.live_bytes() for part in store._parts)
    assert dict(store.scan()) == state_after(2, 400)
    figures = store.figures()
    assert figures["stored_bytes"] == store.stored_bytes()
    assert figures["level0_files"] == store.level0_files()
    assert figures["estimated_rows"] >= len(state_after(2, 400))
    assert figures["memory_bytes"] > 0


def test_a_checkpoint_names_the_files_that_make_the_store_up(
    store: PartedStore, tmp_path: Path
) -> None:
    apply(store, rows_of(1), marker(1))
    names = store.checkpoint(str(tmp_path / "taken"))
    apply(store, rows_of(2), marker(2))
    assert {name.split("/")[0] for name in names} == {LAYOUT_FILE, "p0", "p1", "p2"}
    for name in names:  # nothing else is needed
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tmp_path / "taken" / name, tmp_path / "copy" / name)
    copy = opened(str(tmp_path / "copy"))
    assert dict(copy.scan()) == state_after(1)
    assert copy.marker() == marker(1)
    copy.close()
