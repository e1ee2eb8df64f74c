"""What lies on the disk of a store in parts: its layout, and damage in one part."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from statebackend.errors import LocalCopyError, StoreBusyError
from statebackend.rocks.parted import PartedStore, open_store
from statebackend.rocks.parts_layout import LAYOUT_FILE, Layout, read_layout, write_layout
from statebackend.rocks.store import RocksStore
from tests.rocks.stores import TINY, marker
from tests.rocks.stores_in_parts import *  # noqa: F403
from tests.rocks.stores_in_parts import apply, make, opened, rows_of

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
