"""Damage on the disk of a store is an error with its own type, and never a wrong row."""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from statebackend.errors import LocalCopyError, LocalDirError, StateBackendError, StoreBusyError
from statebackend.rocks import store as store_module
from statebackend.rocks.store import RocksSettings, RocksStore, classify
from tests.rocks.stores import *  # noqa: F403
from tests.rocks.stores import TINY, Entries, _filled, marker

# --- the marker and the batches ------------------------------------------------------------------


DEEP = b'{"x":' + b"[" * 100_000


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"job_id": 3}', b"\xff\xfe", b"null", DEEP])
def test_a_marker_that_does_not_parse_is_damage(store: RocksStore, raw: bytes) -> None:
    store._db[store_module._MARKER_KEY] = raw
    with pytest.raises(LocalCopyError, match="marker"):
        store.marker()


def test_a_marker_of_a_later_release_with_more_fields_is_read(store: RocksStore) -> None:
    fields = {**msgspec.to_builtins(marker(5)), "later": 1}
    store._db[store_module._MARKER_KEY] = msgspec.json.encode(fields)
    assert store.marker() == marker(5)


# --- damage --------------------------------------------------------------------------------------


def _tables(path: str) -> list[Path]:
    return sorted(Path(path).glob("*.sst"))


def _flip(file: Path, position: int) -> None:
    with file.open("r+b") as handle:
        handle.seek(position)
        old = handle.read(1)
        handle.seek(position)
        handle.write(bytes([old[0] ^ 0xFF]))


def test_a_flipped_byte_in_a_block_is_an_error_in_get_multi_get_and_scan(path: str) -> None:
    entries = _filled(path)
    (table,) = _tables(path)
    _flip(table, table.stat().st_size // 2)
    store = RocksStore.open(path, TINY)
    keys = sorted(entries)
    with pytest.raises(LocalCopyError, match="Corruption"):
        list(map(store.get, keys))
    with pytest.raises(LocalCopyError, match="Corruption"):
        store.multi_get(keys)
    with pytest.raises(LocalCopyError, match="Corruption"):
        list(store.scan())
    with pytest.raises(LocalCopyError, match="Corruption"):
        list(itertools.chain.from_iterable(store.scan(bytes([0, group])) for group in range(8)))
    store.close()


def test_wherever_a_byte_is_flipped_nothing_wrong_is_read(path: str, tmp_path: Path) -> None:
    """Data, filter, index, properties, footer: the right bytes or a typed error, never less."""
    entries = _filled(path, rows=1200)
    keys = sorted(entries)
    (table,) = _tables(path)
    size_bytes = table.stat().st_size
    positions = [*range(0, size_bytes, size_bytes // 30), *range(size_bytes - 200, size_bytes, 13)]
    refused = 0
    for number, position in enumerate(positions):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(path, copy)
        _flip(copy / table.name, position)
        # A cache of its own: copies share blocks in the cache that a process has for one size.
        settings = replace(TINY, block_cache_bytes=TINY.block_cache_bytes + number)
        refused += _reads_right_or_says_so(str(copy), entries, keys, settings)
        shutil.rmtree(copy)
    assert refused > len(positions) * 0.9


def _reads_right_or_says_so(
    path: str, entries: Entries, keys: list[bytes], settings: RocksSettings
) -> bool:
    """Whether damage was reported; anything else than that or the right answer fails."""
    refused = False
    try:
        store = RocksStore.open(path, settings)
    except LocalCopyError:
        return True
    for read in (
        lambda: {key: store.get(key) for key in keys},
        lambda: dict(zip(keys, store.multi_get(keys), strict=True)),
        lambda: dict(store.scan()),
    ):
        try:
            assert read() == entries
        except LocalCopyError:
            refused = True
    store.close()
    return refused


def test_a_table_file_cut_short_is_noticed_at_open(path: str) -> None:
    _filled(path)
    (table,) = _tables(path)
    os.truncate(table, table.stat().st_size - 1)
    with pytest.raises(LocalCopyError, match="damaged"):
        RocksStore.open(path, TINY)


def test_a_missing_table_file_is_noticed_at_open(path: str) -> None:
    _filled(path)
    _tables(path)[0].unlink()
    with pytest.raises(LocalCopyError, match="damaged"):
        RocksStore.open(path, TINY)


@pytest.mark.parametrize("text", ["MANIFEST-999999\n", "nonsense", ""])
def test_a_foreign_current_file_is_damage(path: str, text: str) -> None:
    _filled(path)
    (Path(path) / "CURRENT").write_text(text)
    with pytest.raises(LocalCopyError):
        RocksStore.open(path, TINY)


def test_a_damaged_manifest_is_damage(path: str) -> None:
    _filled(path)
    (manifest,) = Path(path).glob("MANIFEST-*")
    _flip(manifest, manifest.stat().st_size // 2)
    with pytest.raises(LocalCopyError, match="damaged"):
        RocksStore.open(path, TINY)


def test_a_table_file_of_another_store_is_not_taken_for_this_one_s(
    path: str, tmp_path: Path
) -> None:
    _filled(path)
    other = str(tmp_path / "other")
    _filled(other, rows=2000)
    ours, theirs = _tables(path)[0], _tables(other)[0]
    assert ours.name == theirs.name  # names alone tell nothing
    shutil.copy(theirs, ours)
    with pytest.raises(LocalCopyError, match="damaged"):
        RocksStore.open(path, TINY)


def test_a_file_in_the_store_s_place_is_a_local_copy_error(tmp_path: Path) -> None:
    place = tmp_path / "db"
    place.write_text("not a directory")
    with pytest.raises(LocalCopyError):
        RocksStore.open(str(place), TINY)


@pytest.mark.parametrize(
    ("message", "kind", "says"),
    [
        ("Corruption: block checksum mismatch", LocalCopyError, "is damaged"),
        ("Invalid argument: no such", LocalCopyError, "is damaged"),
        ("Not found: /x", LocalCopyError, "is damaged"),
        ("Result incomplete: ", LocalCopyError, "is damaged"),
        ("IO error: Input/output error", LocalCopyError, "Check the disk"),
        ("IO error: No space left on device: /disk/db/1.sst", LocalDirError, "with room"),
        ("IO error: While mkdir: Read-only file system", LocalDirError, "cannot be written"),
        ("IO error: While open: Permission denied", LocalDirError, "cannot be written"),
        ("IO error: lock hold by current process", StoreBusyError, "open in another process"),
        ("IO error: While lock file: /x/LOCK: busy", StoreBusyError, "open in another process"),
        ("something new", LocalCopyError, "failed"),
    ],
)
def test_every_message_of_rocksdb_has_a_type(
    message: str, kind: type[StateBackendError], says: str
) -> None:
    error = classify(Exception(message), "/disk/db")
    assert type(error) is kind
    assert "/disk/db" in str(error)
    assert says in str(error)
