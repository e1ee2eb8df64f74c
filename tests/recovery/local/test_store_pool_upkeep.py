"""Stores that stay open and unused: flushed, closed, and let go where another needs the room."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from recovery.local.local_copies import StoreDirectory
from recovery.local.store_directory import HOLDER
from recovery.local.store_pool import Clock, StorePool, StorePoolSettings, ask_for
from statebackend.errors import LocalCopyError
from statebackend.rocks.store import RocksStore
from tests.recovery.driver import new_id
from tests.recovery.local.open_stores import TIMEOUT_S, deltas, keeping, seen, subtask, written
from tests.recovery.local.small_copies import SMALL


class HandClock(Clock):
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.time_s = 0.0
        super().__init__(lambda: self.time_s, time.sleep)


def on_disk(held: StoreDirectory, scratch: Path) -> int:
    """The epoch that the store would stand at if its process died now; -1 for none."""
    copy = scratch / new_id()
    shutil.copytree(held.path / "db", copy, ignore=shutil.ignore_patterns("LOCK"))
    store = RocksStore.open(str(copy), SMALL)
    found = store.marker()
    store.close()
    return found.epoch if found else -1


def told(held: StoreDirectory, method: str) -> threading.Event:
    """Set once a method of this object has been called, by whomever."""
    event, real = threading.Event(), getattr(held, method)

    def call(*args: Any) -> None:
        try:
            real(*args)
        finally:
            event.set()

    setattr(held, method, call)
    return event


def test_a_store_that_nobody_used_for_a_while_is_closed(tmp_path: Path) -> None:
    clock = HandClock()
    with keeping(clock, idle_close_s=30) as store_pool:
        old, young = (subtask(tmp_path, store_pool, n) for n in (0, 1))
        first, _ = old.acquire(0)
        written(first, 0)
        old.give_back(first)
        clock.time_s = 20
        second, _ = young.acquire(0)
        written(second, 0)
        young.give_back(second)
        released = told(first, "release")
        clock.time_s = 31
        assert released.wait(TIMEOUT_S)
        assert first.store is None
        assert second.store is not None
        again, reason = subtask(tmp_path).acquire(0)
        assert (again.path, reason) == (first.path, "")
        again.release()


def test_a_socket_that_takes_a_deleted_ones_place_lies_in_a_temporary_folder(
    tmp_path: Path,
) -> None:
    clock = HandClock()
    store_pool = StorePool(clock, StorePoolSettings(), lambda: tmp_path / "first")
    try:
        held, _ = (local := subtask(tmp_path / "copies", store_pool)).acquire(0)
        local.give_back(held)
        named = told(held, "say_holder")
        shutil.rmtree(tmp_path / "first")
        clock.time_s = 1
        assert named.wait(TIMEOUT_S)
        assert (held.path / HOLDER).read_text() == store_pool.address
        assert Path(store_pool.address).is_socket()
        assert not (tmp_path / "first").exists(), "what was deleted stays deleted"
        again, reason = subtask(tmp_path / "copies").acquire(TIMEOUT_S)
        assert (again.path, reason) == (held.path, "")
        again.release()
    finally:
        store_pool.close()
    assert not Path(store_pool.address).exists()


def test_the_store_that_was_unused_for_longest_makes_room(tmp_path: Path) -> None:
    with keeping(open_limit=2) as store_pool:
        held = []
        for number in range(2):
            local = subtask(tmp_path, store_pool, number)
            held.append(local.acquire(0)[0])
            written(held[-1], 0)
            local.give_back(held[-1])
        first = subtask(tmp_path, store_pool, 0)
        first.give_back(first.acquire(0)[0])  # used again: now 1 is the oldest
        third = subtask(tmp_path, store_pool, 2)
        held.append(third.acquire(0)[0])
        written(held[-1], 0)
        third.give_back(held[-1])
        assert [one.store is None for one in held] == [False, True, False]


def test_without_room_for_any_every_store_is_let_go(tmp_path: Path) -> None:
    with keeping(open_limit=0) as store_pool:
        local = subtask(tmp_path, store_pool)
        held, _ = local.acquire(0)
        written(held, 0)
        local.give_back(held)
        assert held.store is None


def test_after_many_epochs_in_memory_the_store_is_flushed_and_only_what_it_holds_is_forgotten(
    tmp_path: Path,
) -> None:
    clock = HandClock()
    with keeping(clock, unflushed_epochs=4, idle_close_s=1e9) as store_pool:
        local = subtask(tmp_path, store_pool)
        held, _ = local.acquire(0)
        written(held, 0, 1, 2)
        held.write_delta(3, "acked", b"of an epoch that is not applied yet")
        looked = told(held, "flush")
        local.give_back(held)
        clock.time_s += 1
        assert not looked.wait(1.2)  # three epochs are not enough
        assert on_disk(held, tmp_path) == -1
        assert deltas(held) == [0, 1, 2, 3]
        held, _ = local.acquire(0)
        written(held, 3)
        held.write_delta(4, "acked", b"of an epoch that is not applied yet")
        local.give_back(held)
        clock.time_s += 1
        assert looked.wait(TIMEOUT_S)
        assert on_disk(held, tmp_path) == 3
        assert deltas(held) == [4]
        assert held.unflushed_epochs == 0


def test_a_store_that_is_used_again_while_it_is_flushed_keeps_what_came_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, _ = subtask(tmp_path).acquire(0)
    written(held, 0, 1)
    flush = RocksStore.flush

    def while_it_goes_on(self: RocksStore) -> None:
        flush(self)
        monkeypatch.undo()
        written(held, 2)  # by the task's thread, after the flush took what there was

    monkeypatch.setattr(RocksStore, "flush", while_it_goes_on)
    held.flush()
    assert on_disk(held, tmp_path) == 1
    assert deltas(held) == [2]
    held.release()


def test_a_store_that_cannot_be_flushed_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: RocksStore) -> None:
        raise LocalCopyError("The disk is gone.")

    clock = HandClock()
    with keeping(clock, unflushed_epochs=1, idle_close_s=1e9) as store_pool:
        local = subtask(tmp_path, store_pool)
        held, _ = local.acquire(0)
        written(held, 0)
        marked = told(held, "mark_bad")
        monkeypatch.setattr(RocksStore, "flush", broken)
        local.give_back(held)
        clock.time_s += 1
        assert marked.wait(TIMEOUT_S)
        monkeypatch.undo()
        other, reason = local.acquire(0)
        assert reason == "the local copy was marked bad: The disk is gone."
        assert other.path != held.path
        assert deltas(held) == [0]
        other.release()


def test_a_store_that_fails_to_close_in_a_way_nobody_expects_is_let_go_and_so_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: RocksStore) -> None:
        raise RuntimeError("a bug")

    with keeping() as store_pool:
        locals_ = [subtask(tmp_path, store_pool, number) for number in (0, 1)]
        first, second = (local.acquire(0)[0] for local in locals_)
        for local, held in zip(locals_, (first, second), strict=True):
            written(held, 0)
            local.give_back(held)
        with monkeypatch.context() as patched:
            patched.setattr(RocksStore, "close", broken)
            assert ask_for(first.path, TIMEOUT_S)
        assert ask_for(second.path, TIMEOUT_S)
        for number, held in enumerate((first, second)):  # nobody has their leases
            again, reason = subtask(tmp_path, None, number).acquire(0)
            assert (again.path, reason) == (held.path, "")
            again.release()


def test_a_store_that_another_has_taken_over_from_is_let_go_when_its_turn_comes(
    tmp_path: Path,
) -> None:
    with keeping() as store_pool:
        local = subtask(tmp_path, store_pool)
        held, _ = local.acquire(0)
        written(held, 0)
        local.give_back(held)
        successor = subtask(tmp_path).create()
        written(successor, 5)
        successor.release()
        again, _ = local.acquire(0)
        assert again.path == successor.path
        assert seen(again) == (5, b"5")
        assert held.store is None
        again.release()
