"""What expires, when, and for whom it is still there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import types as T

from statebackend.errors import KeyContextError, SettingError, ValueMismatchError
from statebackend.rocks.store import RocksStore
from statebackend.schema.codec import codec_for
from statebackend.state.folding_cells import AggregatingCell, ReducingCell
from statebackend.state.ttl_cells import TTL
from tests.state.expiring import *  # noqa: F403
from tests.state.expiring import ROWS, Subtask, _check_index, seen, write_all

# --- what a TTL may be --------------------------------------------------------------------------


@pytest.mark.parametrize("ms", [0, -1, -(2**63), 2**63, 1.5, "100", None, True])
def test_a_time_to_live_that_is_none_is_refused(ms: Any) -> None:
    with pytest.raises(SettingError, match="TTL"):
        TTL(ms)


@pytest.mark.parametrize("rule", [{"update": "never"}, {"expired": "show"}, {"update": None}])
def test_an_unknown_rule_is_refused_by_name(rule: Any) -> None:
    with pytest.raises(SettingError, match=next(iter(rule))):
        TTL(100, **rule)


def test_state_with_a_ttl_outside_the_call_for_a_key_is_refused(subtask: Subtask) -> None:
    cells = subtask
    cells.cursor.index = -1
    for call in (
        cells.value.get, cells.value.exists, cells.value.clear, lambda: cells.value.update((1,)),
        cells.list.get, cells.list.exists, cells.list.clear, lambda: cells.list.append((1,)),
        lambda: cells.list.put([(1,)]), lambda: cells.list.extend([(1,)]),
        cells.map.exists, cells.map.iterator, cells.map.keys, cells.map.values, cells.map.clear,
        lambda: cells.map.get_value(("x",)), lambda: cells.map.contains_key(("x",)),
        lambda: cells.map.update_value(("x",), (1,)), lambda: cells.map.remove_key(("x",)),
    ):  # fmt: skip
        with pytest.raises(KeyContextError):
            call()
    assert len(cells.table.freeze(0)) == 0


# --- expiry -------------------------------------------------------------------------------------


NOW_MS = 1_800_000_000_000
LONGEST = [2**63 - 1, 2**63 - 2, 2**63 - NOW_MS, 2**62, 10**17]


@pytest.mark.parametrize("update", ["write", "create", "read"])
@pytest.mark.parametrize("ms", LONGEST)
def test_the_longest_ttl_that_spark_takes_does_not_overflow(
    tmp_path: Path, ms: int, update: Any
) -> None:
    store = RocksStore.open(str(tmp_path / "db"))
    ttl = TTL(ms, update=update)
    subtask = Subtask(store, tmp_path / "spill", ttl, now_ms=NOW_MS)
    try:
        write_all(subtask, 7)
        for later_ms in (0, 1, 10**12, 10**15):
            assert subtask.clean() == 0
            subtask.end(NOW_MS + later_ms, then="confirm")
            _check_index(subtask)
            assert seen(subtask) == ((7,), [(7,)], {("m7",): (7,)})
            subtask.value.update((7,))
            subtask.map.update_value(("m7",), (7,))
            subtask.list.append((8,))
            subtask.list.put([(7,)])
        subtask.end(NOW_MS, TTL(100, update=update), then="reopen")  # shorter from here on
        write_all(subtask, 7)
        subtask.list.put([(7,)])
        subtask.end(NOW_MS + 200)
        subtask.clean()
        assert seen(subtask) == (
            ((7,), [], {("m7",): (7,)}) if update == "create" else (None, [], {})
        )
        for kind in (subtask.value, subtask.list, subtask.map):
            kind.clear()
        assert subtask.stored() == []
    finally:
        subtask.spill.close()
        store.close()


def test_an_entry_is_there_until_its_time_and_gone_at_it(stored: Subtask) -> None:
    write_all(stored, 7)
    assert seen(stored) == ((7,), [(7,)], {("m7",): (7,)})
    stored.end(99, then="confirm")
    assert seen(stored) == ((7,), [(7,)], {("m7",): (7,)})
    stored.end(100)
    assert seen(stored) == (None, [], {})


def test_each_element_and_each_entry_has_its_own_time(stored: Subtask) -> None:
    for now_ms, n in ((0, 1), (40, 2), (80, 3)):
        stored.begin(now_ms)
        write_all(stored, n)
        stored.end(now_ms, then="confirm")
    stored.begin(120)
    assert seen(stored) == ((3,), [(2,), (3,)], {("m2",): (2,), ("m3",): (3,)})
    stored.begin(150)
    assert seen(stored) == ((3,), [(3,)], {("m3",): (3,)})


def test_with_update_create_only_the_first_write_counts(subtask: Subtask) -> None:
    subtask.begin(0, TTL(100, update="create"))
    write_all(subtask, 1)
    subtask.end(60)
    subtask.value.update((2,))
    subtask.map.update_value(("m1",), (2,))
    subtask.end(99)
    assert subtask.value.get() == (2,)
    subtask.end(100)
    assert seen(subtask) == (None, [], {})
    subtask.value.update((3,))
    subtask.map.update_value(("m1",), (3,))
    subtask.end(199)
    assert seen(subtask) == ((3,), [], {("m1",): (3,)})


def test_with_update_read_what_is_read_lives_on(stored: Subtask) -> None:
    stored.begin(0, TTL(100, update="read"))
    write_all(stored, 1)
    for now_ms in (60, 120, 180):
        stored.end(now_ms, then="confirm")
        assert seen(stored) == ((1,), [(1,)], {("m1",): (1,)})
    stored.end(279)
    assert stored.value.exists()
    assert stored.list.exists()
    assert stored.map.contains_key(("m1",))
    stored.end(280)
    assert seen(stored) == (None, [], {})


def test_a_read_soon_after_the_last_one_writes_nothing(subtask: Subtask) -> None:
    subtask.begin(0, TTL(1000, update="read"))
    write_all(subtask, 1)
    subtask.end(9, then="confirm")
    seen(subtask)
    assert len(subtask.table.freeze(0)) == 0
    subtask.begin(10)
    assert subtask.value.get() == (1,)
    assert len(subtask.table.freeze(0)) == 1  # the value alone: it stays where it is in the index


def test_until_cleaned_shows_what_is_expired_until_it_is_removed(stored: Subtask) -> None:
    stored.begin(0, TTL(100, expired="until_cleaned"))
    write_all(stored, 1)
    stored.end(5000, then="confirm")
    assert seen(stored) == ((1,), [(1,)], {("m1",): (1,)})
    assert stored.clean() == 3
    stored.end(5000)
    assert seen(stored) == (None, [], {})


def test_a_row_that_does_not_fit_changes_nothing(subtask: Subtask) -> None:
    write_all(subtask, 1)
    for call in (
        lambda: subtask.value.update(("x",)),
        lambda: subtask.list.extend([(2,), ("x",)]),
        lambda: subtask.list.put([]),
        lambda: subtask.map.update_value(("m1",), ("x",)),
    ):
        with pytest.raises(ValueMismatchError):
            call()
    assert seen(subtask) == ((1,), [(1,)], {("m1",): (1,)})


# --- another time to live, and clearing ---------------------------------------------------------


def test_a_shorter_ttl_holds_for_what_is_written_from_then_on(subtask: Subtask) -> None:
    subtask.begin(0, TTL(100_000))
    write_all(subtask, 1)
    subtask.end(10, TTL(50), then="confirm")
    write_all(subtask, 2)
    subtask.end(80, then="confirm")
    assert subtask.clean() == 3  # of the list, the second element
    subtask.end(80, then="confirm")
    assert seen(subtask) == (None, [(1,)], {("m1",): (1,)})


def test_the_index_of_a_dropped_state_goes_in_time(subtask: Subtask) -> None:
    write_all(subtask, 1)
    subtask.end(10, then="confirm")
    for key in subtask.stored():
        if key[2:4] in (b"\0\1", b"\0\2", b"\0\3"):
            subtask.table.put(key, None)
    subtask.end(200, then="confirm")
    assert subtask.clean() == 0
    assert subtask.stored() == []


def test_clearing_leaves_nothing_behind(stored: Subtask) -> None:
    write_all(stored, 1)
    stored.end(50, then="confirm")
    write_all(stored, 2)
    stored.value.clear()
    stored.list.clear()
    stored.map.clear()
    assert stored.stored() == []
    assert seen(stored) == (None, [], {})


# --- folds --------------------------------------------------------------------------------------


def folds(subtask: Subtask, ttl: TTL | None = None) -> tuple[ReducingCell, AggregatingCell[float]]:
    reducing = ReducingCell(
        subtask.cursor, subtask.table, "top", 8, ROWS, max, ttl=ttl, now_ms=subtask.now_ms
    )
    pair = codec_for(T.StructType().add("sum", T.LongType()).add("count", T.LongType()))
    aggregating = AggregatingCell(
        subtask.cursor,
        subtask.table,
        "mean",
        9,
        pair,
        lambda: (0, 0),
        lambda acc, n: (acc[0] + n, acc[1] + 1),
        lambda acc: acc[0] / acc[1],
        lambda one, other: (one[0] + other[0], one[1] + other[1]),
        ttl=ttl,
        now_ms=subtask.now_ms,
    )
    subtask.at(0)
    return reducing, aggregating


def test_folded_state_expires_and_begins_anew(stored: Subtask) -> None:
    top, mean = folds(stored, TTL(100))
    top.add((5,))
    mean.add(4)
    stored.end(60, then="confirm")
    top, mean = folds(stored, TTL(100))
    top.add((3,))
    mean.add(8)
    assert (top.get(), mean.get()) == ((5,), 6.0)
    stored.end(159, then="confirm")
    top, mean = folds(stored, TTL(100))
    assert (top.get(), mean.get()) == ((5,), 6.0)
    stored.end(160)
    top, mean = folds(stored, TTL(100))
    assert (top.exists(), top.get(), mean.exists(), mean.get()) == (False, None, False, None)
    top.add((1,))
    mean.add_all([1, 2])
    assert (top.get(), mean.get()) == ((1,), 1.5)
