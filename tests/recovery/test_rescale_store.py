"""One store out of several: from any parents, at any epochs, cut anywhere while it is made."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.restore import rescaled_store
from recovery.restore.rescaled_store import Piece, PieceError, assemble, clip_pieces, clip_rows
from snapshot.formats.delta import DeltaRows
from snapshot.formats.delta_in_pieces import as_lists
from statebackend.errors import LocalCopyError, LocalDirError
from statebackend.rocks.parted import PartedStore, Store, open_store
from statebackend.rocks.store import Marker, RocksSettings, RocksStore
from statebackend.state.blocks import binary_array
from tests.rocks.conftest import MEMORY

PLACE = MEMORY if os.access(MEMORY, os.W_OK) else None
SMALL = RocksSettings(block_cache_bytes=1 << 20, write_buffer_bytes=1 << 20)
GROUPS = 16
TARGET = 5
Model = dict[bytes, bytes]


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="statebackend-", dir=PLACE) as path:
        yield Path(path)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all of it were large."""
    monkeypatch.setattr(rescaled_store, "SMALL_BYTES", 0)


def marker(epoch: int, groups: tuple[int, int]) -> Marker:
    return Marker(
        job_id="j",
        operator="op",
        key_group_start=groups[0],
        key_group_end=groups[1],
        epoch=epoch,
        chain=f"{epoch}:{groups}",
    )


def delta_of(epoch: int, groups: tuple[int, int]) -> DeltaRows:
    """What an epoch changed in these key groups."""
    drawn = random.Random(epoch)
    rows: dict[bytes, bytes | None] = {}
    for _ in range(150):
        group = drawn.randrange(GROUPS)
        key = bytes([0, group, 0, 1, drawn.randrange(12)])
        value = None if drawn.random() < 0.2 else b"%d" % epoch + drawn.randbytes(9)
        if groups[0] <= group <= groups[1]:
            rows[key] = value
    keys = sorted(rows)
    return DeltaRows(binary_array(keys), binary_array([rows[key] for key in keys]))


def state_of(epoch: int, groups: tuple[int, int]) -> Model:
    model: Model = {}
    for one in range(1, epoch + 1):
        delta = delta_of(one, groups)
        for key, value in zip(delta.keys.to_pylist(), delta.values.to_pylist(), strict=True):
            model.pop(key, None)
            if value is not None:
                model[key] = value
    return model


def parent(path: Path, epoch: int, groups: tuple[int, int]) -> Store:
    store = RocksStore.open(str(path), SMALL)
    for one in range(1, epoch + 1):
        store.apply_batches(as_lists([delta_of(one, groups)]), marker(one, groups))
    return store


def brought(store: Store, pieces: list[Piece], groups: tuple[int, int]) -> None:
    """As a restore does it: each parent's deltas since, then the marker."""
    for piece in pieces:
        stood = piece.source.marker()
        assert stood is not None
        held = stood.key_group_start, stood.key_group_end
        for epoch in range(stood.epoch + 1, TARGET + 1):
            rows = clip_pieces([delta_of(epoch, held)], piece.first_group, piece.last_group)
            store.apply_batches(as_lists(rows), None)
    assert store.marker() is None
    store.apply((), (), marker(TARGET, groups))
    store.flush()


def cut(drawn: st.DataObject, first: int, last: int) -> list[tuple[int, int]]:
    """Ranges that together are ``first`` to ``last``."""
    ends = drawn.draw(st.sets(st.integers(first + 1, last), max_size=4)) if last > first else ()
    starts = [first, *sorted(ends)]
    return [(a, b - 1) for a, b in itertools.pairwise([*starts, last + 1])]


@settings(max_examples=25, deadline=None)
@given(drawn=st.data(), small=st.booleans(), parts_max=st.integers(1, 4))
def test_any_parallelism_after_any_other_gives_the_same_state(
    drawn: st.DataObject, small: bool, parts_max: int
) -> None:
    """Twice in a row: from databases, and then from what came of them."""
    with (
        tempfile.TemporaryDirectory(prefix="statebackend-", dir=PLACE) as folder,
        pytest.MonkeyPatch.context() as patched,
    ):
        root = Path(folder)
        patched.setattr(rescaled_store, "SMALL_BYTES", 1 << 20 if small else 0)
        patched.setattr(rescaled_store, "PARTS_MAX", parts_max)
        stores = {
            groups: parent(root / f"0-{groups[0]}", drawn.draw(st.integers(1, TARGET)), groups)
            for groups in cut(drawn, 0, GROUPS - 1)
        }
        for level in (1, 2):
            made: dict[tuple[int, int], Store] = {}
            for groups in cut(drawn, 0, GROUPS - 1):
                pieces = [
                    Piece(store, max(a, groups[0]), min(b, groups[1]))
                    for (a, b), store in stores.items()
                    if max(a, groups[0]) <= min(b, groups[1])
                ]
                path = root / f"{level}-{groups[0]}"
                made[groups] = assemble(path, pieces, SMALL)
                brought(made[groups], pieces, groups)
            for store in stores.values():
                store.close()
            for groups, store in made.items():
                assert dict(store.scan()) == state_of(TARGET, groups)
                assert list(store.scan()) == sorted(store.scan())
                assert store.marker() == marker(TARGET, groups)
                store.compact_clipped()
                store.settle_compaction()
                store.close()
                made[groups] = again = open_store(store.path, SMALL)
                assert dict(again.scan()) == state_of(TARGET, groups)
                if isinstance(again, PartedStore):
                    assert len(again._parts) <= parts_max
            stores = made
        for store in stores.values():
            store.close()


def halves(root: Path, epoch: int = TARGET) -> list[Piece]:
    return [
        Piece(parent(root / "low", epoch, (0, 7)), 0, 7),
        Piece(parent(root / "high", epoch, (8, 15)), 8, 15),
    ]


@pytest.mark.usefixtures("apart")
def test_two_large_stores_become_parts_and_no_row_is_written_anew(root: Path) -> None:
    pieces = halves(root)
    for piece in pieces:
        piece.source.flush()
    before = {os.stat(file).st_ino for file in root.glob("*/*.sst")}
    store = assemble(root / "db", pieces, SMALL)
    assert isinstance(store, PartedStore)
    assert not store.clipped  # each was wanted as a whole
    after = {os.stat(file).st_ino for file in (root / "db").glob("*/*.sst")}
    assert before <= after
    assert store.marker() is None
    for piece in pieces:
        assert piece.source.marker() is not None
        piece.source.close()
    store.close()


def test_small_stores_become_one_database(root: Path) -> None:
    pieces = halves(root)
    store = assemble(root / "db", pieces, SMALL)
    assert isinstance(store, RocksStore)
    brought(store, pieces, (0, 15))
    assert dict(store.scan()) == state_of(TARGET, (0, 15))
    for piece in pieces:
        piece.source.close()
    store.close()


@pytest.mark.usefixtures("apart")
def test_key_groups_that_nobody_has_are_empty_and_may_be_filled(root: Path) -> None:
    low = parent(root / "low", TARGET, (2, 5))
    high = parent(root / "high", TARGET, (9, 10))
    store = assemble(root / "db", [Piece(high, 9, 10), Piece(low, 3, 5)], SMALL)
    rows = {bytes([0, group, 0, 1]): b"%d" % group for group in (0, 7, 8, 13)}
    store.apply(sorted(rows), [rows[key] for key in sorted(rows)], None)
    store.apply((), (), marker(TARGET, (0, 15)))
    expected = state_of(TARGET, (3, 5)) | state_of(TARGET, (9, 10)) | rows
    assert dict(store.scan()) == expected
    for one in (low, high, store):
        one.close()


def test_of_nobody_s_key_groups_an_empty_store_is_made(root: Path) -> None:
    store = assemble(root / "db", [], SMALL)
    assert list(store.scan()) == []
    assert store.marker() is None
    store.close()


@pytest.mark.usefixtures("apart")
def test_a_parent_that_is_half_way_to_the_target_is_good_for_it(root: Path) -> None:
    low, high = (piece.source for piece in halves(root, TARGET - 1))

    def broken() -> Iterator[Any]:
        delta = delta_of(TARGET, (0, 7))
        yield delta.keys.to_pylist()[:10], delta.values.to_pylist()[:10]
        yield [], []
        raise OSError("cut")

    with pytest.raises(OSError, match="cut"):
        low.apply_batches(broken(), marker(TARGET, (0, 7)))
    stood = low.marker()
    assert stood is not None
    assert stood.applying
    pieces = [Piece(low, 0, 7), Piece(high, 8, 15)]
    store = assemble(root / "db", pieces, SMALL)
    brought(store, pieces, (0, 15))
    assert dict(store.scan()) == state_of(TARGET, (0, 15))
    for one in (low, high, store):
        one.close()


class Cut(BaseException):
    """Stands for a process that ends."""


STEPS = ("checkpoint", "clip", "close", "_write", "open")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("small", [False, True])
def test_what_is_cut_off_while_it_is_made_is_never_taken_for_a_copy(
    root: Path, monkeypatch: pytest.MonkeyPatch, step: str, small: bool
) -> None:
    """Cut before and after each call of a step, as long as there is one more."""
    monkeypatch.setattr(rescaled_store, "SMALL_BYTES", 1 << 20 if small else 0)
    pieces = halves(root, TARGET - 2)
    cuts = 0
    for number in itertools.count():
        path = root / f"db{number}"
        left, after = iter(range(number // 2)), number % 2
        opened: list[Any] = []
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # it cannot tidy up
            really = getattr(RocksStore, step)
            really = getattr(really, "__func__", really)

            def or_cut(*args: Any, really: Any = really, **kwargs: Any) -> Any:
                if next(left, None) is not None:  # noqa: B023
                    return really(*args, **kwargs)
                if after:  # noqa: B023
                    really(*args, **kwargs)
                raise Cut

            patched.setattr(RocksStore, step, classmethod(or_cut) if step == "open" else or_cut)
            try:
                store = assemble(path, pieces, SMALL)
                opened.append(store)
                brought(store, pieces, (0, 15))
                break
            except Cut:
                cuts += 1
        for one in opened:
            one.close()
        if path.exists():
            found = open_store(str(path), SMALL)
            stood = found.marker()
            # Everything but the marker may be there already; with it, everything is.
            assert stood is None or dict(found.scan()) == state_of(TARGET, (0, 15))
            found.close()
    assert cuts >= 2
    assert dict(store.scan()) == state_of(TARGET, (0, 15))
    for one in (store, *(piece.source for piece in pieces)):
        one.close()


@pytest.mark.usefixtures("apart")
def test_after_an_error_nothing_is_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = halves(root)

    def full(*args: object, **kwargs: object) -> None:
        raise LocalDirError("The disk is full.")

    with monkeypatch.context() as patched:
        patched.setattr(RocksStore, "clip", full)
        with pytest.raises(LocalDirError):
            assemble(root / "db", pieces, SMALL)
    assert sorted(os.listdir(root)) == ["high", "low"]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lambda *args: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(LocalDirError, match="full"):
            assemble(root / "db", pieces, SMALL)
    assert sorted(os.listdir(root)) == ["high", "low"]
    store = assemble(root / "db", pieces, SMALL)
    for one in (store, *(piece.source for piece in pieces)):
        one.close()


@pytest.mark.usefixtures("apart")
def test_what_a_dead_process_left_behind_is_in_nobody_s_way(root: Path) -> None:
    (root / "db.making" / "p0").mkdir(parents=True)
    (root / "db.making" / "p0" / "CURRENT").write_text("MANIFEST-000001\n")
    pieces = halves(root)
    store = assemble(root / "db", pieces, SMALL)
    brought(store, pieces, (0, 15))
    assert dict(store.scan()) == state_of(TARGET, (0, 15))
    for one in (store, *(piece.source for piece in pieces)):
        one.close()


@pytest.mark.parametrize("small", [False, True])
def test_the_parent_that_is_damaged_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    monkeypatch.setattr(rescaled_store, "SMALL_BYTES", 1 << 20 if small else 0)
    parent(root / "high", TARGET, (8, 15)).close()
    tables = list((root / "high").glob("*.sst"))
    for table in tables if small else ():  # found by reading it
        data = bytearray(table.read_bytes())
        data[20:60] = bytes(40)
        table.write_bytes(data)
    source = open_store(str(root / "high"), SMALL)
    for table in () if small else tables:  # found by linking it
        table.unlink()
    larger = parent(root / "low", TARGET, (0, 7))
    for epoch in range(TARGET + 1, TARGET + 30):
        larger.apply_batches(as_lists([delta_of(epoch, (0, 7))]), marker(epoch, (0, 7)))
        larger.flush()
    bad = Piece(source, 8, 15)
    with pytest.raises(PieceError) as caught:
        assemble(root / "db", [Piece(larger, 0, 7), bad], SMALL)
    assert caught.value.piece is bad
    assert isinstance(caught.value.error, LocalCopyError)
    assert not (root / "db").exists()
    larger.close()
    source.close()


# --- rows of some key groups ---------------------------------------------------------------------


@given(
    groups=st.lists(st.integers(0, 300), max_size=40),
    first=st.integers(0, 300),
    count=st.integers(0, 300),
)
def test_rows_are_cut_to_key_groups(groups: list[int], first: int, count: int) -> None:
    keys = sorted({group.to_bytes(2, "big") + bytes([n]) for n, group in enumerate(groups)})
    values = [None if key[-1] % 3 == 0 else key for key in keys]
    last = first + count
    rows = clip_rows(DeltaRows(binary_array(keys), binary_array(values)), first, last)
    expected = [
        (key, value)
        for key, value in zip(keys, values, strict=True)
        if first <= int.from_bytes(key[:2], "big") <= last
    ]
    assert list(zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True)) == expected


def test_all_pieces_are_asked_for_and_empty_ones_left_out() -> None:
    """What only the whole of a delta shows (its number of rows) is looked at at its end."""
    asked = []

    def pieces() -> Iterator[DeltaRows]:
        for group in range(5):
            asked.append(group)
            yield DeltaRows(binary_array([bytes([0, group, 0])]), binary_array([b"v"]))

    found = [rows.keys.to_pylist() for rows in clip_pieces(pieces(), 1, 2)]
    assert found == [[b"\0\1\0"], [b"\0\2\0"]]
    assert asked == [0, 1, 2, 3, 4]


def test_the_marker_says_nothing_of_epochs_that_are_not_half_applied() -> None:
    assert msgspec.json.decode(msgspec.json.encode(marker(1, (0, 1))))["applying_epoch"] == 0
