"""What is expired is removed: nothing of it stays behind, and lists keep their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from statebackend.errors import LocalCopyError
from statebackend.state import expiry_index
from statebackend.state.expiry_index import ListHead
from statebackend.state.table import MemoryBase, StateTable
from statebackend.state.ttl_cells import TTL, ExpiryIndex
from tests.state.expiring import *  # noqa: F403
from tests.state.expiring import GROUPS, OWNERS, Subtask, write_all

# --- removal ------------------------------------------------------------------------------------


def test_what_nobody_touches_is_removed_without_a_trace(stored: Subtask) -> None:
    for owner in range(len(OWNERS)):
        write_all(stored.at(owner), owner)
    stored.end(125, then="confirm")
    assert stored.clean() == 3 * len(OWNERS)
    assert stored.stored() == []


def test_an_entry_whose_expiry_moved_on_is_not_removed(stored: Subtask) -> None:
    for now_ms in range(0, 1000, 50):
        stored.begin(now_ms)
        stored.value.update((now_ms,))
        stored.map.update_value(("m",), (now_ms,))
        assert stored.clean() == 0
        stored.end(now_ms, then="confirm")
    assert stored.value.get() == (950,)
    assert len(stored.stored()) == 4  # with one entry each in the index


def test_an_entry_that_is_updated_often_moves_seldom_in_the_index(subtask: Subtask) -> None:
    changes = 0
    for now_ms in range(1000):
        subtask.begin(now_ms, TTL(1000))
        subtask.value.update((now_ms,))
        changes += len(subtask.table.freeze(0)) - 1
    assert changes <= 2 * 9


def test_removal_in_the_middle_keeps_the_order_of_a_list(stored: Subtask) -> None:
    for n, ttl_ms in enumerate((1000, 100, 500, 100, 1000)):
        stored.begin(0, TTL(ttl_ms))
        stored.list.append((n,))
        stored.end(0, then="confirm")
    stored.begin(400)
    assert stored.clean() == 2
    stored.end(400, TTL(1000), then="confirm")
    assert len(stored.stored()) == 3 + 2
    stored.list.append((5,))
    assert list(stored.list.get()) == [(0,), (2,), (4,), (5,)]
    stored.end(700)
    assert list(stored.list.get()) == [(0,), (4,), (5,)]


def test_an_element_that_lives_long_does_not_make_a_list_long(stored: Subtask) -> None:
    stored.begin(0, TTL(10**6))
    stored.list.append((-1,))
    for now_ms in range(0, 2000, 10):
        stored.begin(now_ms, TTL(100))
        stored.list.append((now_ms,))
        stored.clean()
        stored.end(now_ms, then="confirm")
    asked: list[int] = []

    class Counting(MemoryBase):
        def multi_get(self, keys: Any) -> list[bytes | None]:
            asked.append(len(keys))
            return super().multi_get(keys)

    counting = Counting()
    counting.entries = dict(stored.table.snapshot())
    reader = Subtask(counting, Path("unused"), TTL(100), now_ms=1995)
    asked.clear()
    assert list(reader.list.get()) == [(-1,), *((n,) for n in range(1900, 2000, 10))]
    assert sum(asked) <= 3 * 20


# --- lists with long gaps -----------------------------------------------------------------------


LONG, SHORT = TTL(10**7), TTL(100)
WHERE = ["same epoch", "end", "confirm", "reopen", "spilled"]


@pytest.fixture
def pieces_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry_index, "_PIECE_ROWS", 4)


def _appended(subtask: Subtask, ttl: TTL, rows: range) -> None:
    subtask.begin(subtask.now_ms, ttl)
    subtask.list.extend([(n,) for n in rows])


def _go_on(subtask: Subtask, now_ms: int, where: str) -> None:
    """To the next epoch, with what there is in one of the places where it may be."""
    if where == "spilled":
        subtask.spill.limit_bytes = 1
        subtask.table.relieve()
    if where in ("same epoch", "spilled"):
        subtask.begin(now_ms, LONG)
    else:
        subtask.end(now_ms, LONG, then=where)


def _head(subtask: Subtask) -> ListHead:
    data = subtask.table.get(OWNERS[0][0] + b"\0\2" + OWNERS[0][1])
    assert data is not None
    return ListHead.decode(data)


@pytest.mark.usefixtures("pieces_of_four")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("behind", [1, 9])
def test_a_gap_as_long_as_the_list_hides_nothing_behind_it(
    stored: Subtask, where: str, behind: int
) -> None:
    _appended(stored, LONG, range(10))
    _appended(stored, SHORT, range(10, 20))
    _appended(stored, LONG, range(20, 20 + behind))
    _go_on(stored, 200, "end" if where == "same epoch" else where)
    assert stored.clean() == 10
    left = [(n,) for n in (*range(10), *range(20, 20 + behind))]
    head = _head(stored)
    assert (head.first, head.following) == (0, 20 + behind)  # the gap was not closed
    _go_on(stored, 201, where)
    assert list(stored.list.get()) == left
    stored.list.append((99,))
    assert list(stored.list.get()) == [*left, (99,)]
    _go_on(stored, 202, where)
    assert list(stored.list.get()) == [*left, (99,)]
    stored.list.put([(7,)])
    assert list(stored.list.get()) == [(7,)]
    stored.list.clear()
    assert stored.stored() == []


@pytest.mark.usefixtures("pieces_of_four")
@pytest.mark.parametrize("where", WHERE)
def test_a_list_whose_end_went_is_read_and_goes_on_where_it_ends(
    stored: Subtask, where: str
) -> None:
    _appended(stored, LONG, range(10))
    _appended(stored, SHORT, range(10, 20))
    before = _head(stored)
    _go_on(stored, 200, "end" if where == "same epoch" else where)
    assert stored.clean() == 10
    assert _head(stored).following == 10
    # As it was written before the end of a list was drawn in.
    old = _head(stored)._replace(following=before.following)
    stored.table.put(OWNERS[0][0] + b"\0\2" + OWNERS[0][1], old.encode())
    _go_on(stored, 201, where)
    rows = [(n,) for n in range(10)]
    assert list(stored.list.get()) == rows
    stored.list.append((99,))
    assert list(stored.list.get()) == [*rows, (99,)]
    stored.end(3 * 10**7, LONG, then="confirm")
    assert stored.clean() == 11
    assert stored.stored() == []


@pytest.mark.usefixtures("pieces_of_four")
def test_a_head_that_names_more_than_there_is_gives_what_there_is(stored: Subtask) -> None:
    _appended(stored, LONG, range(6))
    key = OWNERS[0][0] + b"\0\2" + OWNERS[0][1]
    for following in (1 << 33, 2**63, 2**64 - 1):
        stored.table.put(key, _head(stored)._replace(following=following).encode())
        stored.at(0)
        assert list(stored.list.get()) == [(n,) for n in range(6)]
    stored.list.clear()
    assert stored.stored() == []


@pytest.mark.usefixtures("pieces_of_four")
def test_a_head_without_any_element_is_damage(subtask: Subtask) -> None:
    _appended(subtask, LONG, range(6))
    for key in subtask.stored():
        if len(key) == len(OWNERS[0][1]) + 4 + 8 and key[2:4] == b"\0\2":
            subtask.table.put(key, None)
    with pytest.raises(LocalCopyError, match="elements 0 to 6"):
        subtask.list.get()


# --- how much is removed, and when --------------------------------------------------------------


def test_removal_takes_no_more_than_its_limit_and_goes_on_in_the_next_epoch(
    subtask: Subtask,
) -> None:
    for n in range(1000):
        subtask.map.update_value((f"m{n}",), (n,))
    subtask.end(125, then="confirm")
    assert subtask.clean(limit=600) == 600
    subtask.end(126, then="confirm")
    assert subtask.clean(limit=600) == 400
    assert subtask.stored() == []


def test_no_key_group_waits_for_ever(subtask: Subtask) -> None:
    for owner in range(len(OWNERS)):
        subtask.at(owner).value.update((owner,))
    subtask.end(1000, then="confirm")
    first = set()
    for now_ms in range(1000, 1003):
        table = StateTable(subtask.base)
        assert ExpiryIndex(table).clean(GROUPS, now_ms, 1) == 1
        first |= {key[:2] for key in table.entries}
    assert len(first) == len(GROUPS)


def test_a_repeated_epoch_removes_the_same(subtask: Subtask) -> None:
    for owner in range(len(OWNERS)):
        write_all(subtask.at(owner), owner)
    subtask.end(1000)
    write_all(subtask.at(2), 9)
    subtask.end(1120, then="reopen")
    delta = subtask.waiting[0].sorted(), subtask.waiting[1].sorted()
    subtask.clean(limit=7)
    removed = subtask.table.freeze(0).sorted()
    again = MemoryBase()
    again.apply(*delta[0])
    again.apply(*delta[1])
    table = StateTable(again)
    ExpiryIndex(table).clean(GROUPS, 1120, 7)
    assert table.freeze(0).sorted() == removed
