"""Uploads of bases: what is sent, and what becomes of the store meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from recovery.local.local_copies import StoreDirectory
from snapshot.formats.file_index import decode_index
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import ObjectStore
from statebackend.rocks.store import RocksStore
from statebackend.runtime.worker.background_upload import BaseUpload
from tests.recovery.local.open_stores import keeping
from tests.recovery.local.open_stores import subtask as subtask_of
from tests.recovery.local.small_copies import SMALL
from tests.recovery.upload.uploads import (
    LONG_S,
    Gate,
    Voice,
    grant_of,
    left_over,
    opened,
    tables,
    upload,
    uploaded,
    wrote,
)


def test_an_upload_is_paced_and_keeps_its_grant_meanwhile(tmp_path: Path) -> None:
    held = opened(tmp_path)
    wrote(held, 0)
    voice = Voice()
    BaseUpload(
        held,
        grant_of(0),
        store=MemoryStore(),
        generation=1,
        reporter=voice,
        now_s=time.monotonic,
        bytes_per_s=4_000,
    ).run()
    (one,) = voice.told
    size_bytes = sum(file.size_bytes for file in decode_index(one.part.data).files)
    assert size_bytes > 400
    assert one.seconds >= size_bytes / 4_000
    held.release()


# --- what is sent --------------------------------------------------------------------------------


def test_small_state_is_one_delta_and_one_request(tmp_path: Path) -> None:
    store, voice, held = MemoryStore(), Voice(), opened(tmp_path)
    wrote(held, 0)
    upload(held, grant_of(0, whole=1 << 20), store, voice).run()
    (one,) = voice.told
    (info,) = store.list("")
    assert (one.kind, info.name) == ("base", "base/0000000001/g0/whole")
    assert (one.part.name, one.part.rows) == (info.name, 20)
    data = store.get(info.name)
    assert (one.part.size_bytes, one.uploaded_bytes, one.state_bytes) == (len(data),) * 3
    assert blake3(data).hexdigest() == one.part.digest
    assert not left_over(held)
    held.release()


def test_of_large_state_only_new_files_are_sent_again(tmp_path: Path) -> None:
    store, held = MemoryStore(), opened(tmp_path)
    wrote(held, 0)
    first, data, all_bytes = uploaded(held, 0, store)
    assert all(name.startswith("base/0000000001/g0/") for name in tables(first).values())
    assert all_bytes == first.size_bytes + len(data)
    wrote(held, 1)
    second, _, sent_bytes = uploaded(held, 1, store, data)
    assert tables(first).items() < tables(second).items()
    (added,) = tables(second).keys() - tables(first).keys()
    assert tables(second)[added] == f"base/0000000001/g1/{added}"
    # MANIFEST and CURRENT may keep their names, never their objects.
    changing = [file for file in second.files if not file.name.endswith(".sst")]
    assert {file.object.split("/")[2] for file in changing} == {"g1"}
    assert sent_bytes < second.size_bytes
    names = {info.name for info in store.list("")}
    assert {file.object for file in (*first.files, *second.files)} == names
    held.release()


def _another_s(held: StoreDirectory, store: ObjectStore, tmp_path: Path) -> bytes:
    other = opened(tmp_path / "other")
    wrote(other, 0)
    _, data, _ = uploaded(other, 0, store)
    other.release()
    return data


def _forgotten(held: StoreDirectory, store: ObjectStore, tmp_path: Path) -> bytes:
    data = (held.path / "uploaded").read_bytes()
    (held.path / "uploaded").unlink()
    return data


def _torn(held: StoreDirectory, store: ObjectStore, tmp_path: Path) -> bytes:
    data = (held.path / "uploaded").read_bytes()
    (held.path / "uploaded").write_bytes(data[:-3])
    return data


NOT_OURS: dict[str, Callable[[StoreDirectory, ObjectStore, Path], bytes]] = {
    "none": lambda held, store, tmp_path: b"",
    "torn on its way": lambda held, store, tmp_path: b"torn",
    "of another directory, with equal names": _another_s,
    "of this one, which does not remember": _forgotten,
    "of this one, which remembers half": _torn,
}


@pytest.mark.parametrize("how", NOT_OURS)
def test_without_a_base_that_is_known_to_be_shared_everything_is_sent(
    tmp_path: Path, how: str
) -> None:
    store, held = MemoryStore(), opened(tmp_path)
    wrote(held, 0)
    uploaded(held, 0, store)
    wrote(held, 1)
    given = NOT_OURS[how](held, store, tmp_path)
    second, _, _ = uploaded(held, 1, store, given)
    assert {name.split("/")[2] for name in tables(second).values()} == {"g1"}
    held.release()


# --- the store that it is taken from -------------------------------------------------------------


def test_a_store_is_written_to_and_closed_only_once_the_base_is_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, store, voice = opened(tmp_path), MemoryStore(), Voice()
    wrote(held, 0)
    there, gate, checkpoint = threading.Event(), threading.Event(), RocksStore.checkpoint

    def slow(self: RocksStore, path: str) -> list[str]:
        there.set()
        assert gate.wait(LONG_S)
        return checkpoint(self, path)

    monkeypatch.setattr(RocksStore, "checkpoint", slow)
    upload(held, grant_of(0), store, voice).start()
    assert there.wait(LONG_S)
    settled = threading.Event()
    waiting = threading.Thread(target=lambda: (held.release(), settled.set()))
    waiting.start()
    assert not settled.wait(0.2)
    assert held.store is not None
    gate.set()
    assert settled.wait(LONG_S)
    assert voice.at_end.wait(LONG_S)


@pytest.mark.parametrize("how", ["written to", "closed", "opened by another"])
def test_an_upload_goes_on_whatever_becomes_of_the_store_after_that(
    tmp_path: Path, how: str
) -> None:
    held, store, voice = opened(tmp_path), Gate(), Voice()
    wrote(held, 0)
    upload(held, grant_of(0), store, voice).start()
    assert store.there.wait(LONG_S)
    held.settle()
    wrote(held, 1)
    if how != "written to":
        held.release()
    if how == "opened by another":  # after a while without use, or in another process
        held, _ = subtask_of(tmp_path).acquire(0)
        wrote(held, 2)
    store.gate.set()
    assert voice.at_end.wait(LONG_S)
    index = decode_index(voice.told[0].part.data)
    for file in index.files:
        assert blake3(store.get(file.object)).hexdigest() == file.digest
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in index.files:
        (copy / file.name).write_bytes(store.get(file.object))
    restored = RocksStore.open(str(copy), SMALL)
    found = restored.marker()
    assert found is not None
    assert (found.epoch, len(list(restored.scan()))) == (0, 20)
    restored.close()
    held.release()


def test_what_was_left_behind_by_an_upload_that_died_is_removed_at_the_next_open(
    tmp_path: Path,
) -> None:
    held = opened(tmp_path)
    wrote(held, 0)
    dead = held.work_folder("base-dead") / "files"
    held.open_store(SMALL).checkpoint(str(dead))
    held.release()
    held, _ = subtask_of(tmp_path).acquire(0)
    held.open_store(SMALL)
    assert not left_over(held)
    held.release()


def test_a_store_that_went_on_is_not_uploaded_for_the_epoch_before(tmp_path: Path) -> None:
    held, store, voice = opened(tmp_path), MemoryStore(), Voice()
    wrote(held, 1)
    upload(held, grant_of(0), store, voice).run()
    assert not voice.told
    assert not list(store.list(""))
    held.release()


def test_a_store_that_is_kept_open_is_uploaded_while_others_ask_for_it(tmp_path: Path) -> None:
    store, voice = Gate(), Voice()
    with keeping() as store_pool:
        local = subtask_of(tmp_path, store_pool)
        held, _ = local.acquire(0)
        wrote(held, 0)
        upload(held, grant_of(0), store, voice).start()
        assert store.there.wait(LONG_S)
        local.give_back(held)
        other, reason = subtask_of(tmp_path).acquire(LONG_S)
        assert (other.path, reason) == (held.path, "")
        wrote(other, 1)
        store.gate.set()
        assert voice.at_end.wait(LONG_S)
        other.release()
