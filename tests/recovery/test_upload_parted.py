"""Bases of stores in parts: the same files, each under its part's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3

from recovery.local.store_directory import StoreDirectory
from recovery.restore.fetch import fetch_index
from snapshot.formats.file_index import (
    FORMAT_VERSION,
    FileEntry,
    FileIndex,
    decode_index,
    encode_index,
    index_of,
    reusable,
)
from snapshot.formats.object_names import BaseName, base_file_name, parse_base_name
from snapshot.retention.deletable import Fate, View, classify
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import ObjectInfo, ObjectStore
from statebackend.errors import CorruptionError, UnsupportedFormatError
from statebackend.rocks.parted import PartedStore, open_store
from statebackend.rocks.parts_layout import LAYOUT_FILE, Layout, write_layout
from statebackend.rocks.store import RocksStore
from tests.recovery.local.open_stores import subtask as subtask_of
from tests.recovery.local.small_copies import SMALL, marker
from tests.recovery.upload.uploads import Voice, grant_of, left_over, upload


def opened(path: Path) -> StoreDirectory:
    """A store directory whose store has two parts: key groups 0 to 3, and from 4 on."""
    held = subtask_of(path).create()
    folder = held.path / "db"
    folder.mkdir()
    for part in ("p0", "p1"):
        RocksStore.open(str(folder / part), SMALL).close()
    write_layout(str(folder), Layout(parts=["p0", "p1"], routes=[(0, 0), (4, 1)]))
    assert isinstance(held.open_store(SMALL), PartedStore)
    return held


def wrote(held: StoreDirectory, epoch: int, groups: range = range(8)) -> dict[bytes, bytes]:
    rows = {bytes([0, g]) + b"%d-%d" % (epoch, n): os.urandom(50) for g in groups for n in range(5)}
    keys = sorted(rows)
    store = held.open_store(SMALL)
    store.apply(keys, [rows[key] for key in keys], marker(epoch, f"c{epoch}"))
    store.flush()
    return rows


def uploaded(
    held: StoreDirectory, epoch: int, store: ObjectStore, index: bytes = b""
) -> tuple[FileIndex, bytes]:
    voice = Voice()
    upload(held, grant_of(epoch, index=index), store, voice).run()
    (one,) = voice.told
    assert one.kind == "files"
    assert not left_over(held)
    return decode_index(one.part.data), one.part.data


def objects(index: FileIndex, part: str) -> dict[str, str]:
    return {
        f.name: f.object for f in index.files if f.name.startswith(f"{part}/") and "sst" in f.name
    }


def test_a_store_in_parts_comes_back_from_its_base(tmp_path: Path) -> None:
    store, held = MemoryStore(), opened(tmp_path / "a")
    rows = wrote(held, 0)
    index, _ = uploaded(held, 0, store)
    rows_later = wrote(held, 1)
    assert index.format == FORMAT_VERSION
    names = [file.name for file in index.files]
    assert LAYOUT_FILE in names
    assert {name.split("/")[0] for name in names} == {LAYOUT_FILE, "p0", "p1"}
    # Equal file names of two parts are two objects, under names that cleaning can read.
    assert len({file.object for file in index.files}) == len(names)
    for file in index.files:
        found = parse_base_name(file.object)
        assert found is not None
        assert found.grant == "g0"
        assert blake3(store.get(file.object)).hexdigest() == file.digest
    fetch_index(store, index, tmp_path / "b")
    copy = open_store(str(tmp_path / "b"), SMALL)
    assert isinstance(copy, PartedStore)
    assert dict(copy.scan()) == rows
    assert copy.marker() == marker(0, "c0")
    copy.close()
    assert dict(held.open_store(SMALL).scan()) == {**rows, **rows_later}
    held.release()


def test_of_each_part_only_new_files_are_sent_again(tmp_path: Path) -> None:
    store, held = MemoryStore(), opened(tmp_path)
    wrote(held, 0)
    first, data = uploaded(held, 0, store)
    wrote(held, 1, range(4, 8))
    second, data = uploaded(held, 1, store, data)
    for part in ("p0", "p1"):
        assert objects(first, part).items() < objects(second, part).items()
        # The marker alone, of the part where nothing else changed.
        (added,) = objects(second, part).keys() - objects(first, part).keys()
        assert objects(second, part)[added].split("/")[2] == "g1"
    changing = [f for f in second.files if "MANIFEST" in f.name or "CURRENT" in f.name]
    assert {file.object.split("/")[2] for file in changing} == {"g1"}
    assert len(changing) == 4
    # The layout never changes.
    (layout,) = (file for file in second.files if file.name == LAYOUT_FILE)
    assert layout.object.split("/")[2] == "g0"
    held.release()


def test_a_store_that_was_restored_goes_on_from_the_base_it_came_from(tmp_path: Path) -> None:
    store, held = MemoryStore(), opened(tmp_path / "a")
    rows = wrote(held, 0)
    index, data = uploaded(held, 0, store)
    held.release()
    other = subtask_of(tmp_path / "b").create()
    fetch_index(store, index, other.path / "db")
    other.remember_uploaded(data)
    rows |= wrote(other, 1)
    second, _ = uploaded(other, 1, store, data)
    for part in ("p0", "p1"):
        assert objects(index, part).items() < objects(second, part).items()
    fetch_index(store, second, tmp_path / "c")
    copy = open_store(str(tmp_path / "c"), SMALL)
    assert dict(copy.scan()) == rows
    copy.close()
    other.release()


def test_small_state_in_parts_is_one_delta(tmp_path: Path) -> None:
    store, voice, held = MemoryStore(), Voice(), opened(tmp_path)
    rows = wrote(held, 0)
    upload(held, grant_of(0, whole=1 << 20), store, voice).run()
    (one,) = voice.told
    assert (one.kind, one.part.rows) == ("base", len(rows))
    held.release()


# --- the index -----------------------------------------------------------------------------------


def entry(name: str) -> FileEntry:
    return FileEntry(name=name, object=f"base/0/g/{name}", size_bytes=1, digest="0" * 64)


def test_an_index_without_folders_is_of_the_format_that_older_releases_read() -> None:
    index = index_of("i", [entry("CURRENT"), entry("000012.sst")])
    assert index.format == 1
    assert decode_index(encode_index(index)) == index
    index = index_of("i", [entry("PARTS"), entry("p0/000012.sst"), entry("p1/000012.sst")])
    assert index.format == 2
    assert decode_index(encode_index(index)) == index


@pytest.mark.parametrize(
    "name",
    [
        "../p0",
        "p0/../p1",
        "p0/..",
        "p0/.",
        "./x",
        "/p0/x",
        "p0//x",
        "p0/p1/x",
        "p0/",
        "/x",
        "P0/x",
        "p0\\x",
        "p0/\0x",
        "p" * 17 + "/x",
    ],
)
def test_a_name_outside_of_the_store_s_folder_is_refused(name: str) -> None:
    with pytest.raises(CorruptionError, match="no store's"):
        decode_index(encode_index(FileIndex(format=2, incarnation="i", files=[entry(name)])))


@pytest.mark.parametrize("names", [["p0/x", "p0/x"], ["p0", "p0/x"], ["x", "x"]])
def test_names_that_cannot_be_together_are_refused(names: list[str]) -> None:
    index = FileIndex(format=2, incarnation="i", files=[entry(name) for name in names])
    with pytest.raises(CorruptionError, match="twice"):
        decode_index(encode_index(index))


def test_folders_are_not_of_the_first_format() -> None:
    with pytest.raises(CorruptionError, match="no store's"):
        decode_index(encode_index(FileIndex(format=1, incarnation="i", files=[entry("p0/x")])))


def test_a_later_format_is_refused_as_such() -> None:
    with pytest.raises(UnsupportedFormatError):
        decode_index(encode_index(FileIndex(format=3, incarnation="i", files=[])))


def test_what_is_written_anew_every_time_is_never_taken_for_the_same() -> None:
    names = ["PARTS", "p0/CURRENT", "p0/MANIFEST-000005", "p0/000012.sst", "p1/000012.sst"]
    index = index_of("i", [entry(name) for name in names])
    assert set(reusable(index, index)) == {"PARTS", "p0/000012.sst", "p1/000012.sst"}
    only = index_of("i", [entry("p0/000012.sst"), entry("000012.sst")])
    assert set(reusable(index, only)) == {"p0/000012.sst"}


def test_a_file_of_a_part_is_known_for_a_bases_and_so_is_cleaned() -> None:
    name = base_file_name(3, "grant", "p0/000012.sst")
    assert parse_base_name(name) == BaseName(3, "grant")
    view = View(
        generation=4,
        oldest_needed=0,
        cleaned_below=0,
        named=frozenset(),
        kinds={},
    )
    (item,) = classify([ObjectInfo(name, 1, 0)], view).items
    assert item.fate is Fate.DEAD
