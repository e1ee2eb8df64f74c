"""What a processor may rely on from its timers, and who fires them from the index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend.errors import KeyContextError, ValueMismatchError
from statebackend.rocks.store import Marker, RocksStore
from statebackend.state.blocks import SortedRows, binary_array
from statebackend.state.cells import KeyCursor
from statebackend.state.spill import OverlaySpill
from statebackend.state.table import FrozenOverlay, MemoryBase, StateTable
from statebackend.state.timers import TimerIndex

GROUPS = range(3, 7)
# Self-delimiting, of several lengths, some alike.
OWNERS = [
    (group.to_bytes(2, "big"), bytes([len(key)]) + key)
    for group in GROUPS
    for key in (b"a", b"b", b"\xff\xff\xff\xff", b"long" * 5)
]
MARKER = Marker(job_id="j", operator="o", key_group_start=3, key_group_end=7, epoch=0, chain="c")
Timer = tuple[int, bytes, bytes]


class Subtask:
    """A table through its epochs, with confirmed state in a store or in memory."""

    def __init__(self, base: Any, folder: Path, *, limit_bytes: int = 1 << 30) -> None:
        self.base = base
        self.spill = OverlaySpill(limit_bytes=limit_bytes, folder=lambda: folder)
        self.table = StateTable(base, spill=self.spill)
        self.waiting: list[FrozenOverlay] = []
        self.begin()

    def begin(self) -> None:
        self.cursor = KeyCursor()
        self.timers = TimerIndex(self.cursor, self.table)

    def at(self, owner: int) -> TimerIndex:
        self.cursor.load([group for group, _ in OWNERS], [key for _, key in OWNERS])
        self.cursor.index = owner
        return self.timers

    def end(self) -> None:
        self.waiting.append(self.table.freeze(len(self.waiting)))
        self.begin()

    def confirm(self) -> None:
        frozen = self.waiting.pop(0)
        keys, values = frozen.sorted()
        if isinstance(self.base, RocksStore):
            self.base.apply(keys, values, MARKER)
        else:
            self.base.apply(keys, values)
        self.table.applied(frozen)
        self.begin()

    def reopen(self) -> None:
        """As a task does: a new table, what is not confirmed comes as layers."""
        deltas = [frozen.sorted() for frozen in self.waiting]
        self.table = StateTable(self.base, spill=self.spill)
        self.waiting = [
            self.table.add_layer(epoch, SortedRows(binary_array(keys), binary_array(values)))
            for epoch, (keys, values) in enumerate(deltas)
            if keys
        ]
        self.begin()

    def fire(self, before_ms: int) -> list[Timer]:
        fired = []
        for at_ms, group, key in self.timers.due(GROUPS, before_ms):
            if not self.timers.cancelled(group, key, at_ms):
                fired.append((at_ms, group, key))
                self.timers.remove(group, key, at_ms)
        return fired


@pytest.fixture
def subtask(tmp_path: Path) -> Subtask:
    return Subtask(MemoryBase(), tmp_path / "spill")


@pytest.fixture(params=["memory", "rocks"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subtask]:
    if request.param == "memory":
        yield Subtask(MemoryBase(), tmp_path / "spill")
        return
    store = RocksStore.open(str(tmp_path / "db"))
    yield Subtask(store, tmp_path / "spill")
    store.close()


def owned(owner: int, *times: int) -> list[Timer]:
    return [(at_ms, *OWNERS[owner]) for at_ms in times]


def test_timers_fire_in_the_order_of_time_then_key_group_then_key(stored: Subtask) -> None:
    times = [500, -7, 500, 3, 2**40, 3]
    for owner in reversed(range(len(OWNERS))):
        stored.at(owner).register(times[owner % len(times)])
    expected = sorted((times[n % len(times)], *OWNERS[n]) for n in range(len(OWNERS)))
    for _ in range(3):  # from the overlay, from a frozen one, from the base
        assert list(stored.timers.due(GROUPS, 2**41)) == expected
        stored.end()
        if len(stored.waiting) > 1:
            stored.confirm()
    stored.confirm()
    assert list(stored.timers.due(GROUPS, 2**41)) == expected


def test_a_timer_is_due_from_its_very_time_on(subtask: Subtask) -> None:
    subtask.at(0).register(100)
    assert list(subtask.timers.due(GROUPS, 99)) == []
    assert list(subtask.timers.due(GROUPS, 100)) == owned(0, 100)


def test_a_timer_that_is_set_twice_is_one_timer(stored: Subtask) -> None:
    stored.at(0).register(5)
    stored.end()
    stored.confirm()
    stored.at(0).register(5)
    stored.at(0).register(5)
    assert stored.at(0).list() == [5]
    assert stored.fire(10) == owned(0, 5)
    assert stored.fire(10) == []


def test_a_timer_that_is_set_for_every_row_takes_no_more_memory(subtask: Subtask) -> None:
    timers = subtask.at(0)
    for _ in range(1000):
        timers.register(5)
    assert len(timers._log) == 1
    timers.delete(5)
    assert timers.list() == []
    timers.register(5)
    assert subtask.fire(5) == owned(0, 5)


def test_a_key_sees_its_own_timers_in_order(stored: Subtask) -> None:
    for at_ms in (30, -10, 20):
        stored.at(0).register(at_ms)
    stored.at(1).register(99)
    stored.end()
    stored.at(0).delete(20)
    stored.at(0).register(25)
    stored.at(0).register(-10)
    assert stored.at(0).list() == [-10, 25, 30]
    assert stored.at(1).list() == [99]
    assert stored.at(2).list() == []


def test_a_deleted_timer_does_not_fire(stored: Subtask) -> None:
    stored.at(0).register(5)
    stored.at(1).register(5)
    stored.end()
    stored.confirm()
    stored.at(0).delete(5)
    assert stored.fire(10) == owned(1, 5)


def test_deleting_a_timer_that_is_not_set_changes_nothing(subtask: Subtask) -> None:
    subtask.at(0).delete(5)
    assert len(subtask.table.freeze(0)) == 0


def test_a_timer_deleted_while_firing_does_not_fire(subtask: Subtask) -> None:
    subtask.at(0).register(5)
    subtask.at(0).register(6)
    subtask.at(1).register(7)
    fired = []
    for at_ms, group, key in subtask.timers.due(GROUPS, 10):
        subtask.at(OWNERS.index((group, key)))
        if not subtask.timers.cancelled(group, key, at_ms):
            fired.append(at_ms)
            subtask.timers.delete(6)
            subtask.timers.remove(group, key, at_ms)
    assert fired == [5, 7]
    assert subtask.timers.next_ms() is None


def test_a_timer_set_while_firing_waits_for_a_later_epoch(stored: Subtask) -> None:
    stored.at(0).register(5)
    fired = []
    for at_ms, group, key in stored.timers.due(GROUPS, 10):
        fired.append(at_ms)
        stored.at(0).register(1)
        stored.at(0).register(8)
        stored.timers.remove(group, key, at_ms)
    assert fired == [5]
    assert stored.timers.next_ms() == 1
    stored.end()
    assert stored.fire(10) == owned(0, 1, 8)


def test_a_timer_deleted_and_set_again_while_firing_waits_for_a_later_epoch(
    subtask: Subtask,
) -> None:
    subtask.at(0).register(5)
    subtask.at(0).register(6)
    fired = []
    for at_ms, group, key in subtask.timers.due(GROUPS, 10):
        subtask.at(OWNERS.index((group, key)))
        if not subtask.timers.cancelled(group, key, at_ms):
            fired.append(at_ms)
            subtask.timers.delete(6)
            subtask.timers.register(6)
            subtask.timers.remove(group, key, at_ms)
    assert fired == [5]
    assert subtask.timers.next_ms() == 6
    subtask.end()
    assert subtask.fire(10) == owned(0, 6)


def test_the_timer_that_fires_is_still_listed_during_its_call(subtask: Subtask) -> None:
    subtask.at(0).register(5)
    subtask.at(0).register(50)
    for at_ms, group, key in subtask.timers.due(GROUPS, 10):
        assert subtask.at(0).list() == [5, 50]
        subtask.timers.remove(group, key, at_ms)
    assert subtask.at(0).list() == [50]


@pytest.mark.parametrize("at_ms", [1.5, "5", None, 2**63, -(2**63) - 1])
def test_a_time_that_is_none_is_refused(subtask: Subtask, at_ms: Any) -> None:
    timers = subtask.at(0)
    for call in (timers.register, timers.delete):
        with pytest.raises(ValueMismatchError, match="timer"):
            call(at_ms)
    assert len(subtask.table.freeze(0)) == 0


def test_the_ends_of_the_time_line_are_times(subtask: Subtask) -> None:
    subtask.at(0).register(-(2**63))
    subtask.at(0).register(2**63 - 1)
    assert subtask.timers.list() == [-(2**63), 2**63 - 1]
    assert subtask.fire(2**70) == owned(0, -(2**63))
    assert subtask.timers.next_ms() == 2**63 - 1


def test_timers_without_a_current_key_are_refused(subtask: Subtask) -> None:
    timers = subtask.at(0)
    subtask.cursor.index = -1
    for call in (lambda: timers.register(1), lambda: timers.delete(1), timers.list):
        with pytest.raises(KeyContextError):
            call()


def test_the_next_timer_is_known_without_asking_for_due_ones(stored: Subtask) -> None:
    assert stored.timers.next_ms(GROUPS) is None
    stored.at(4).register(70)
    stored.end()
    stored.confirm()
    stored.at(3).register(60)
    stored.end()
    stored.at(2).register(80)
    assert stored.timers.next_ms(GROUPS) == 60
    stored.at(3).delete(60)
    assert stored.timers.next_ms() == 70


def test_timers_of_other_key_groups_are_left_alone(subtask: Subtask) -> None:
    for owner in range(len(OWNERS)):
        subtask.at(owner).register(5)
    some = list(subtask.timers.due(range(4, 6), 10))
    assert {group for _, group, _ in some} == {b"\0\4", b"\0\5"}


def test_timers_come_by_the_chunk_and_each_key_is_loaded_once(subtask: Subtask) -> None:
    for owner in range(len(OWNERS)):
        for at_ms in (5, 6, 7):
            subtask.at(owner).register(at_ms)
    chunks = list(subtask.timers.due_chunks(GROUPS, 10, max_rows=20))
    assert [len(chunk) for chunk in chunks] == [20, 20, 8]
    for chunk in chunks:
        groups, keys, places = chunk.by_key()
        owners = list(zip(groups, keys, strict=True))
        assert owners == sorted(set(owners))
        assert [owners[n] for n in places] == list(zip(chunk.groups, chunk.keys, strict=True))


# --- against a set -----------------------------------------------------------------------------

TIMES = st.integers(0, 12)
OWNER = st.integers(0, len(OWNERS) - 1)
CHANGE = st.tuples(st.sampled_from(["register", "register", "delete", "list"]), OWNER, TIMES)
EPOCH = st.tuples(
    st.lists(CHANGE, max_size=25),
    st.none() | TIMES,  # the limit of the timers that fire
    st.lists(st.none() | CHANGE, max_size=12),  # what the n-th call does
    st.sampled_from(["end", "confirm", "reopen"]),
)


def _change(subtask: Subtask, model: set[Timer], change: tuple[str, int, int]) -> None:
    verb, owner, at_ms = change
    timers, timer = subtask.at(owner), (at_ms, *OWNERS[owner])
    if verb == "register":
        timers.register(at_ms)
        model.add(timer)
    elif verb == "delete":
        timers.delete(at_ms)
        model.discard(timer)
    assert timers.list() == sorted(t for t, *who in model if tuple(who) == OWNERS[owner])
    assert timers.is_set(*OWNERS[owner], at_ms) == (timer in model)


def _epoch(subtask: Subtask, model: set[Timer], epoch: Any) -> None:
    changes, limit, in_calls, then = epoch
    for change in changes:
        _change(subtask, model, change)
    if limit is not None:
        due = sorted(timer for timer in model if timer[0] <= limit)
        deleted: set[Timer] = set()
        calls = iter(in_calls)
        seen = []
        for timer in subtask.timers.due(GROUPS, limit):
            seen.append(timer)
            at_ms, group, key = timer
            subtask.at(OWNERS.index((group, key)))
            assert subtask.timers.cancelled(group, key, at_ms) == (timer in deleted)
            if timer in deleted:
                continue
            if change := next(calls, None):
                before = set(model)
                _change(subtask, model, change)
                deleted |= before - model
            subtask.timers.remove(group, key, at_ms)
            model.discard(timer)
        assert seen == due
    left = min((at_ms for at_ms, *_ in model), default=None)
    assert subtask.timers.next_ms(GROUPS) == left
    subtask.end()
    if then == "confirm":
        while subtask.waiting:
            subtask.confirm()
    elif then == "reopen":
        subtask.reopen()
    assert subtask.timers.next_ms(GROUPS) == left


def _runs_like_a_set(base: Any, folder: Path, limit_bytes: int, epochs: Any) -> None:
    subtask, model = Subtask(base, folder, limit_bytes=limit_bytes), set[Timer]()
    try:
        for epoch in epochs:
            _epoch(subtask, model, epoch)
        assert list(subtask.timers.due(GROUPS, 1000)) == sorted(model)
    finally:
        subtask.spill.close()


@pytest.mark.parametrize("limit_bytes", [1 << 30, 2_000, 1])
@given(epochs=st.lists(EPOCH, max_size=5))
@settings(deadline=None, max_examples=60)
def test_timers_are_a_set_however_they_are_spilled_and_layered(
    tmp_path_factory: pytest.TempPathFactory, limit_bytes: int, epochs: Any
) -> None:
    folder = tmp_path_factory.mktemp("timers", numbered=True)
    _runs_like_a_set(MemoryBase(), folder / "spill", limit_bytes, epochs)


@given(epochs=st.lists(EPOCH, max_size=4), limit_bytes=st.sampled_from([1 << 30, 1_500]))
@settings(deadline=None, max_examples=25)
def test_timers_are_a_set_on_the_real_store(
    tmp_path_factory: pytest.TempPathFactory, limit_bytes: int, epochs: Any
) -> None:
    folder = tmp_path_factory.mktemp("timers", numbered=True)
    store = RocksStore.open(str(folder / "db"))
    try:
        _runs_like_a_set(store, folder / "spill", limit_bytes, epochs)
    finally:
        store.close()
