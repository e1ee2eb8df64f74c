"""What expires, when, for whom it is still there, and that nothing of it stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from statebackend.errors import (
    KeyContextError,
    LocalCopyError,
    SettingError,
    ValueMismatchError,
)
from statebackend.rocks.store import Marker, RocksStore
from statebackend.schema.codec import codec_for
from statebackend.schema.keys import KeyCodec
from statebackend.state import expiry
from statebackend.state.blocks import SortedRows, binary_array
from statebackend.state.cells import KeyCursor
from statebackend.state.expiry import ListHead
from statebackend.state.folds import AggregatingCell, ReducingCell
from statebackend.state.spill import OverlaySpill
from statebackend.state.table import MemoryBase, StateTable
from statebackend.state.ttl import TTL, ExpiryIndex, TtlListCell, TtlMapCell, TtlValueCell

ROWS = codec_for(T.StructType([T.StructField("n", T.LongType())]))
NAMES = KeyCodec(T.StructType([T.StructField("name", T.StringType())]))
GROUPS = range(4, 7)
OWNERS = [(group.to_bytes(2, "big"), NAMES.encode((n,))) for group in GROUPS for n in ("a", "bbb")]
MARKER = Marker(job_id="j", operator="o", key_group_start=4, key_group_end=7, epoch=0, chain="c")
ALL = 10**6


class Subtask:
    """Cells with a TTL through epochs, each with its own time."""

    def __init__(
        self, base: Any, folder: Path, ttl: TTL, *, limit_bytes: int = 1 << 30, now_ms: int = 0
    ) -> None:
        self.base, self.ttl, self.now_ms = base, ttl, now_ms
        self.spill = OverlaySpill(limit_bytes=limit_bytes, folder=lambda: folder)
        self.table = StateTable(base, spill=self.spill)
        self.waiting: list[Any] = []
        self.begin(now_ms)

    def begin(self, now_ms: int, ttl: TTL | None = None) -> None:
        self.now_ms, self.ttl = now_ms, ttl or self.ttl
        self.cursor = KeyCursor()
        times: Any = {"ttl": self.ttl, "now_ms": now_ms}
        args: Any = (self.cursor, self.table)
        self.value = TtlValueCell(*args, "value", 1, ROWS, **times)
        self.list = TtlListCell(*args, "list", 2, ROWS, **times)
        self.map = TtlMapCell(*args, "map", 3, NAMES, ROWS, **times)
        self.at(0)

    def at(self, owner: int) -> Subtask:
        self.cursor.load([group for group, _ in OWNERS], [key for _, key in OWNERS])
        self.cursor.index = owner
        return self

    def clean(self, limit: int = ALL) -> int:
        return ExpiryIndex(self.table).clean(GROUPS, self.now_ms, limit)

    def end(self, now_ms: int, ttl: TTL | None = None, then: str = "end") -> None:
        """Close the epoch; what ``then`` says becomes of it; begin the next."""
        self.waiting.append(self.table.freeze(0))
        if then == "confirm":
            for frozen in self.waiting:
                rows = frozen.sorted()
                self.base.apply(*rows, *([MARKER] if isinstance(self.base, RocksStore) else []))
                self.table.applied(frozen)
            self.waiting = []
        elif then == "reopen":
            deltas = [frozen.sorted() for frozen in self.waiting]
            self.table = StateTable(self.base, spill=self.spill)
            self.waiting = [
                self.table.add_layer(n, SortedRows(binary_array(keys), binary_array(values)))
                for n, (keys, values) in enumerate(deltas)
                if keys
            ]
        self.begin(now_ms, ttl)

    def stored(self) -> list[bytes]:
        """Every key that is physically there."""
        return [key for key, _ in self.table.snapshot()]


@pytest.fixture
def subtask(tmp_path: Path) -> Subtask:
    return Subtask(MemoryBase(), tmp_path, TTL(100))


@pytest.fixture(params=["memory", "rocks"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subtask]:
    if request.param == "memory":
        yield Subtask(MemoryBase(), tmp_path / "spill", TTL(100))
        return
    store = RocksStore.open(str(tmp_path / "db"))
    yield Subtask(store, tmp_path / "spill", TTL(100))
    store.close()


def write_all(subtask: Subtask, n: int) -> None:
    subtask.value.update((n,))
    subtask.list.append((n,))
    subtask.map.update_value((f"m{n}",), (n,))


def seen(subtask: Subtask) -> tuple[Any, Any, Any]:
    """What a processor sees of the current key; asserts that its questions agree."""
    value, rows = subtask.value.get(), list(subtask.list.get())
    entries = dict(subtask.map.iterator())
    assert subtask.value.exists() == (value is not None)
    assert subtask.list.exists() == bool(rows)
    assert subtask.map.exists() == bool(entries)
    assert list(subtask.map.keys()) == list(entries)
    assert list(subtask.map.values()) == list(entries.values())
    for key, row in entries.items():
        assert subtask.map.contains_key(key)
        assert subtask.map.get_value(key) == row
    return value, rows, entries


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
    monkeypatch.setattr(expiry, "_PIECE_ROWS", 4)


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


# --- against a model ----------------------------------------------------------------------------

OWNER = st.integers(0, len(OWNERS) - 1)
NAME = st.sampled_from(["x", "y", "zz"])
CHANGE = st.tuples(
    st.sampled_from(
        ["update", "clear value", "append", "put", "clear list", "set", "set", "remove",
         "clear map", "read"]
    ),
    OWNER,
    NAME,
)  # fmt: skip
RULES = st.sampled_from(
    [TTL(64, update=u, expired=e) for u in ("write", "create", "read")
     for e in ("hide", "until_cleaned")]
)  # fmt: skip
PIECES = st.sampled_from([1, 2, 1 << 16])  # how many elements of a list are read at once
EPOCH = st.tuples(
    st.integers(0, 70),  # time that goes by
    st.lists(CHANGE, max_size=15),
    st.sampled_from([0, 1, 3, ALL]),  # limit of the removal
    st.sampled_from(["end", "confirm", "reopen"]),
    st.sampled_from([None, 20, 64, 200]),  # the TTL from here on
)


class Model:
    """What is there by the rules: for each owner, slots in order, each (row, expiry)."""

    def __init__(self) -> None:
        self.slots: dict[int, dict[Any, tuple[Any, int]]] = {n: {} for n in range(len(OWNERS))}
        self.appended = 0

    def write(self, owner: int, slot: Any, row: Any, ttl: TTL, now_ms: int) -> None:
        before = self.slots[owner].get(slot)
        expiry = now_ms + ttl.ms
        if ttl.update == "create" and before is not None and before[1] > now_ms:
            expiry = before[1]
        self.slots[owner][slot] = (row, expiry)

    def drop(self, owner: int, kind: str) -> None:
        slots = self.slots[owner]
        self.slots[owner] = {slot: kept for slot, kept in slots.items() if slot[0] != kind}

    def shown(self, owner: int, kind: str, now_ms: int) -> list[tuple[Any, Any]]:
        return [
            (slot[1], row)
            for slot, (row, expiry) in sorted(self.slots[owner].items())
            if slot[0] == kind and expiry > now_ms
        ]


def _apply(subtask: Subtask, model: Model, change: tuple[str, int, str], n: int) -> None:
    verb, owner, name = change
    ttl, now_ms, row = subtask.ttl, subtask.now_ms, (n,)
    subtask.at(owner)
    if verb == "update":
        subtask.value.update(row)
        model.write(owner, ("value", 0), row, ttl, now_ms)
    elif verb == "append":
        subtask.list.append(row)
        model.write(owner, ("list", n), row, ttl, now_ms)
    elif verb == "put":
        subtask.list.put([row, row])
        model.drop(owner, "list")
        model.write(owner, ("list", n), row, ttl, now_ms)
        model.write(owner, ("list", n + 0.5), row, ttl, now_ms)
    elif verb == "set":
        subtask.map.update_value((name,), row)
        model.write(owner, ("map", (name,)), row, ttl, now_ms)
    elif verb == "remove":
        subtask.map.remove_key((name,))
        model.slots[owner].pop(("map", (name,)), None)
    elif verb == "read":
        _compare(subtask, model, owner)
    else:
        kind = verb.split()[1]
        getattr(subtask, kind).clear()
        model.drop(owner, kind)


def _compare(subtask: Subtask, model: Model, owner: int) -> None:
    subtask.at(owner)
    ttl, now_ms = subtask.ttl, subtask.now_ms
    value, rows, entries = seen(subtask)
    shown = {
        "value": [(0, value)] if value is not None else [],
        "list": [(None, row) for row in rows],
        "map": sorted(entries.items()),
    }
    for kind, found in shown.items():
        expected = model.shown(owner, kind, now_ms)
        stored = model.shown(owner, kind, -1)
        if kind == "list":
            expected = [(None, row) for _, row in expected]
            stored = [(None, row) for _, row in stored]
        if ttl.expired == "hide":
            assert found == expected
        else:  # between what is not expired and what was ever written, in its order
            assert [one for one in found if one in expected] == expected
            assert [one for one in stored if one in found] == found
    if ttl.update == "read":
        for slot, (row, expiry) in model.slots[owner].items():
            if expiry > now_ms and now_ms + ttl.ms - expiry >= max(1, ttl.ms // 100):
                model.slots[owner][slot] = (row, now_ms + ttl.ms)


def _check_index(subtask: Subtask) -> None:
    """Every stored value, map entry and list has exactly one place in the index."""
    stored = subtask.stored()
    listed = [key for key in stored if key[2:4] == b"\xff\xfd"]
    meant = []
    for key in listed:
        kind, rest = key[12], key[13:]
        meant.append(key[:2] + (rest[4:] if kind == 2 else rest))
    heads = {group + b"\0\2" + key for group, key in OWNERS}
    entries = [
        key
        for key in stored
        if key[2:4] in (b"\0\1", b"\0\3") or (key[2:4] == b"\0\2" and key in heads)
    ]
    assert sorted(meant) == sorted(entries)


def _runs_like_the_model(base: Any, folder: Path, limit: int, ttl: TTL, epochs: Any) -> None:
    subtask, model = Subtask(base, folder, ttl, limit_bytes=limit), Model()
    n = 0
    try:
        for ahead_ms, changes, cleaned, then, ttl_ms in epochs:
            for change in changes:
                n += 1
                _apply(subtask, model, change, n)
            subtask.clean(cleaned)
            _check_index(subtask)
            new = TTL(ttl_ms, subtask.ttl.update, subtask.ttl.expired) if ttl_ms else None
            subtask.end(subtask.now_ms + ahead_ms, new, then)
            for owner in range(len(OWNERS)):
                _compare(subtask, model, owner)
        subtask.end(subtask.now_ms + 1000)
        subtask.clean()
        assert subtask.stored() == []
    finally:
        subtask.spill.close()


@pytest.mark.parametrize("limit_bytes", [1 << 30, 1_500, 1])
@given(ttl=RULES, epochs=st.lists(EPOCH, max_size=6), piece_rows=PIECES)
@settings(deadline=None, max_examples=50)
def test_state_with_a_ttl_is_like_its_model_however_it_is_spilled_and_layered(
    tmp_path_factory: pytest.TempPathFactory,
    limit_bytes: int,
    ttl: TTL,
    epochs: Any,
    piece_rows: int,
) -> None:
    folder = tmp_path_factory.mktemp("ttl", numbered=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expiry, "_PIECE_ROWS", piece_rows)
        _runs_like_the_model(MemoryBase(), folder / "spill", limit_bytes, ttl, epochs)


@given(ttl=RULES, epochs=st.lists(EPOCH, max_size=5), limit=st.sampled_from([1 << 30, 1_500]))
@settings(deadline=None, max_examples=25)
def test_state_with_a_ttl_is_like_its_model_on_the_real_store(
    tmp_path_factory: pytest.TempPathFactory, limit: int, ttl: TTL, epochs: Any
) -> None:
    folder = tmp_path_factory.mktemp("ttl", numbered=True)
    store = RocksStore.open(str(folder / "db"))
    try:
        _runs_like_the_model(store, folder / "spill", limit, ttl, epochs)
    finally:
        store.close()
