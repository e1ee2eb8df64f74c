"""A store in parts is one store to whoever uses it, also after crashes between its parts."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend.errors import LocalCopyError, StoreBusyError
from statebackend.rocks.layout import LAYOUT_FILE, Layout, Routes, read_layout, write_layout
from statebackend.rocks.parted import PartedStore, open_store
from statebackend.rocks.store import Marker, RocksStore
from statebackend.state.confirmed import MemoryBase
from tests.rocks.conftest import MEMORY
from tests.rocks.stores import ROOT, TINY, marker

# Eight key groups; the first part has two ranges of them.
ROUTES = [(0, 0), (2, 1), (4, 0), (6, 2)]
PARTS = 3
PLACE = MEMORY if os.access(MEMORY, os.W_OK) else None
Model = dict[bytes, bytes]


def make(path: str, routes: Sequence[tuple[int, int]] = ROUTES) -> PartedStore:
    os.mkdir(path)
    parts = [f"p{number}" for number in range(1 + max(part for _, part in routes))]
    for part in parts:
        RocksStore.open(os.path.join(path, part), TINY).close()
    write_layout(path, Layout(parts=parts, routes=list(routes)))
    return opened(path)


def opened(path: str) -> PartedStore:
    store = open_store(path, TINY)
    assert isinstance(store, PartedStore)
    return store


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "db")


@pytest.fixture
def store(path: str) -> Iterator[PartedStore]:
    one = make(path)
    yield one
    one.close()


def rows_of(epoch: int, count: int = 80) -> dict[bytes, bytes | None]:
    """A delta over all key groups; some of it deletes, and some keys are of other epochs too."""
    drawn = random.Random(epoch)
    rows: dict[bytes, bytes | None] = {}
    for _ in range(count):
        key = bytes([0, drawn.randrange(8), 0, 1, drawn.randrange(40)])
        rows[key] = None if drawn.random() < 0.2 else b"%d" % epoch + drawn.randbytes(20)
    return rows


def state_after(epoch: int, count: int = 80) -> Model:
    model: Model = {}
    for one in range(1, epoch + 1):
        changed(model, rows_of(one, count))
    return model


def changed(model: Model, rows: dict[bytes, bytes | None]) -> None:
    for key, value in rows.items():
        if value is None:
            model.pop(key, None)
        else:
            model[key] = value


def apply(store: PartedStore | RocksStore, rows: dict[bytes, Any], at: Marker | None) -> None:
    keys = sorted(rows)
    store.apply(keys, [rows[key] for key in keys], at)


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
from tests.rocks.test_parted import apply, opened, rows_of
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


# --- what lies on disk ---------------------------------------------------------------------------


def test_a_folder_without_a_layout_is_one_database(path: str) -> None:
    RocksStore.open(path, TINY).close()
    store = open_store(path, TINY)
    assert isinstance(store, RocksStore)
    store.close()


def test_a_store_is_busy_while_any_part_is_open(path: str, store: PartedStore) -> None:
    with pytest.raises(StoreBusyError):
        opened(path)
    store.close()
    part = RocksStore.open(os.path.join(path, "p1"), TINY)
    with pytest.raises(StoreBusyError):
        opened(path)
    part.close()
    opened(path).close()  # those that had been opened were let go


def _no_part(path: Path) -> None:
    shutil.rmtree(path / "p1")


def _no_manifest(path: Path) -> None:
    for file in (path / "p2").glob("MANIFEST-*"):
        file.unlink()


def _no_table(path: Path) -> None:
    next((path / "p0").glob("*.sst")).unlink()


def _short_table(path: Path) -> None:
    os.truncate(next((path / "p1").glob("*.sst")), 10)


@pytest.mark.parametrize("damage", [_no_part, _no_manifest, _no_table, _short_table])
def test_damage_in_one_part_is_damage_of_the_store(path: str, damage: Any) -> None:
    store = make(path)
    apply(store, rows_of(1), marker(1))
    store.close()
    damage(Path(path))
    with pytest.raises(LocalCopyError):
        opened(path)
    with pytest.raises(LocalCopyError):  # and nothing is still locked
        opened(path)


def test_a_bad_block_in_one_part_is_found_by_a_scan(path: str) -> None:
    store = make(path)
    apply(store, rows_of(1, 2000), marker(1))
    store.close()
    for table in (Path(path) / "p2").glob("*.sst"):
        data = bytearray(table.read_bytes())
        data[20:60] = bytes(40)
        table.write_bytes(data)
    store = opened(path)
    with pytest.raises(LocalCopyError):
        list(store.scan())
    store.close()


GOOD: dict[str, Any] = {"format": 1, "parts": ["p0", "p1"], "routes": [[0, 0], [3, 1]]}


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"parts": []},
        {"parts": ["p0", "p0"]},
        {"parts": ["p0", "../p1"]},
        {"parts": ["p0", "."]},
        {"parts": ["p0"]},
        {"routes": []},
        {"routes": [[1, 0]]},
        {"routes": [[0, 0], [0, 1]]},
        {"routes": [[0, 0], [5, 1], [3, 0]]},
        {"routes": [[0, 0], [32_768, 1]]},
        {"routes": [[0, -1]]},
        {"routes": "x"},
    ],
)
def test_a_layout_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    def signed(layout: object) -> bytes:
        text = msgspec.json.encode(layout)
        return text + b"\n" + blake3(text).hexdigest().encode()

    (tmp_path / LAYOUT_FILE).write_bytes(signed(GOOD))
    assert read_layout(str(tmp_path)) is not None
    (tmp_path / LAYOUT_FILE).write_bytes(signed(GOOD | change))
    with pytest.raises(LocalCopyError, match="layout"):
        open_store(str(tmp_path), TINY)


def test_a_layout_with_another_route_by_one_bit_is_refused(tmp_path: Path) -> None:
    write_layout(str(tmp_path), Layout(parts=["p0", "p1"], routes=[(0, 0), (64, 1)]))
    path = tmp_path / LAYOUT_FILE
    path.write_bytes(path.read_bytes().replace(b"64", b"65"))
    with pytest.raises(LocalCopyError, match="digest"):
        read_layout(str(tmp_path))


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_layout_that_does_not_read_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / LAYOUT_FILE).write_bytes(data)
    with pytest.raises(LocalCopyError, match="layout"):
        open_store(str(tmp_path), TINY)
