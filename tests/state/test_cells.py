"""What a processor may rely on from a cell, and the table's own promises."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from statebackend.errors import KeyContextError, LocalCopyError, ValueMismatchError
from statebackend.schema.codec import codec_for
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.state.cells import KeyCursor, ListCell, MapCell, ValueCell
from statebackend.state.table import MemoryBase, StateTable

ROWS = codec_for(T.StructType([T.StructField("n", T.LongType())]))
NAMES = KeyCodec(T.StructType([T.StructField("name", T.StringType())]))


class Cells:
    def __init__(self, base: MemoryBase | None = None) -> None:
        self.base = base or MemoryBase()
        self.table = StateTable(self.base)
        self.cursor = KeyCursor()
        self.value = ValueCell(self.cursor, self.table, "total", 1, ROWS)
        self.list = ListCell(self.cursor, self.table, "seen", 2, ROWS)
        self.map = MapCell(self.cursor, self.table, "by name", 3, NAMES, ROWS)

    def at(self, *names: str) -> None:
        """Load these keys and stand at the first."""
        self.cursor.load([b"\0\5"] * len(names), [NAMES.encode((name,)) for name in names])
        self.cursor.index = 0


CALLS: dict[str, Callable[[Cells], Any]] = {
    "value.exists": lambda c: c.value.exists(),
    "value.get": lambda c: c.value.get(),
    "value.update": lambda c: c.value.update((1,)),
    "value.clear": lambda c: c.value.clear(),
    "list.exists": lambda c: c.list.exists(),
    "list.get": lambda c: c.list.get(),
    "list.put": lambda c: c.list.put([(1,)]),
    "list.append": lambda c: c.list.append((1,)),
    "list.extend": lambda c: c.list.extend([(1,)]),
    "list.clear": lambda c: c.list.clear(),
    "map.exists": lambda c: c.map.exists(),
    "map.get_value": lambda c: c.map.get_value(("x",)),
    "map.contains_key": lambda c: c.map.contains_key(("x",)),
    "map.update_value": lambda c: c.map.update_value(("x",), (1,)),
    "map.iterator": lambda c: c.map.iterator(),
    "map.keys": lambda c: c.map.keys(),
    "map.values": lambda c: c.map.values(),
    "map.remove_key": lambda c: c.map.remove_key(("x",)),
    "map.clear": lambda c: c.map.clear(),
}


@pytest.mark.parametrize("call", CALLS)
def test_state_outside_the_call_for_a_key_is_refused_by_name(call: str) -> None:
    cells = Cells()
    cells.at("a")
    cells.cursor.index = -1
    name = {"value": "total", "list": "seen", "map": "by name"}[call.partition(".")[0]]
    with pytest.raises(KeyContextError, match=repr(name)):
        CALLS[call](cells)
    assert len(cells.table.freeze(0)) == 0


@pytest.mark.parametrize("call", CALLS)
def test_loading_a_chunk_makes_no_key_current(call: str) -> None:
    cells = Cells()
    cells.at("a")
    cells.cursor.load([b"\0\5"], [NAMES.encode(("b",))])
    with pytest.raises(KeyContextError):
        CALLS[call](cells)


def test_an_iterator_does_not_show_later_changes() -> None:
    cells = Cells()
    cells.at("a")
    cells.list.put([(1,), (2,)])
    cells.map.update_value(("x",), (1,))
    rows, entries, keys, values = (
        cells.list.get(),
        cells.map.iterator(),
        cells.map.keys(),
        cells.map.values(),
    )
    cells.list.put([(9,)])
    cells.map.clear()
    cells.map.update_value(("y",), (9,))
    assert list(rows) == [(1,), (2,)]
    assert list(entries) == [(("x",), (1,))]
    assert list(keys) == [("x",)]
    assert list(values) == [(1,)]


def test_a_value_changed_after_it_was_written_does_not_show_in_the_snapshot() -> None:
    schema = T.StructType([T.StructField("many", T.ArrayType(T.LongType()))])
    cells = Cells()
    value = ValueCell(cells.cursor, cells.table, "many", 4, codec_for(schema))
    cells.at("a")
    many = [1, 2]
    value.update((many,))
    many.append(3)
    assert value.get() == ([1, 2],)
    read = value.get()
    assert read is not None
    read[0].append(4)
    assert value.get() == ([1, 2],)


def test_what_is_frozen_does_not_change_while_the_next_epoch_writes() -> None:
    cells = Cells()
    cells.at("a")
    cells.value.update((1,))
    cells.map.update_value(("x",), (1,))
    frozen = cells.table.freeze(0)
    before = frozen.sorted()
    cells.value.update((2,))
    cells.map.clear()
    cells.list.append((3,))
    assert frozen.sorted() == before
    assert cells.value.get() == (2,)
    assert not cells.map.exists()


def test_reads_see_through_every_frozen_epoch_newest_first() -> None:
    cells = Cells()
    for n in range(3):
        cells.at("a", "b")
        cells.value.update((n,))
        cells.map.update_value((f"x{n}",), (n,))
        cells.map.update_value(("y",), (n,))
        cells.table.freeze(n)
    cells.at("a", "b")
    assert cells.value.get() == (2,)
    assert cells.map.get_value(("y",)) == (2,)
    entries = dict(cells.map.iterator())
    assert entries == {("x0",): (0,), ("x1",): (1,), ("x2",): (2,), ("y",): (2,)}
    cells.cursor.index = 1
    assert cells.value.get() is None


def test_frozen_epochs_are_applied_in_their_order() -> None:
    cells = Cells()
    first, second = cells.table.freeze(0), cells.table.freeze(1)
    with pytest.raises(AssertionError, match="order"):
        cells.table.applied(second)
    cells.table.applied(first)
    cells.table.applied(second)
    with pytest.raises(AssertionError):
        cells.table.applied(second)


def test_a_change_is_read_at_once() -> None:
    cells = Cells()
    cells.at("a")
    cells.value.update((1,))
    cells.value.clear()
    assert not cells.value.exists()
    assert cells.value.get() is None
    cells.list.put([(1,), (2,), (3,)])
    cells.list.put([(9,)])
    assert list(cells.list.get()) == [(9,)]
    cells.list.clear()
    assert not cells.list.exists()
    cells.list.append((4,))
    assert list(cells.list.get()) == [(4,)]


def test_a_shorter_list_leaves_nothing_behind() -> None:
    cells = Cells()
    cells.at("a")
    cells.list.put([(1,), (2,), (3,)])
    cells.list.put([(9,)])
    assert len(list(cells.table.snapshot())) == 2  # the count and one element
    cells.list.clear()
    assert list(cells.table.snapshot()) == []


def test_clearing_what_is_not_there_writes_nothing() -> None:
    cells = Cells()
    cells.at("a")
    cells.value.clear()
    cells.list.clear()
    cells.map.clear()
    cells.map.remove_key(("x",))
    assert len(cells.table.freeze(0)) == 0


def test_a_chunk_of_point_states_costs_one_read_of_the_base_per_state() -> None:
    class Counting(MemoryBase):
        reads = 0

        def get(self, key: bytes) -> bytes | None:
            raise AssertionError("a point read")

        def multi_get(self, keys: Any) -> list[bytes | None]:
            self.reads += 1
            return super().multi_get(keys)

    base = Counting()
    cells = Cells(base)
    cells.at(*(f"k{i:04}" for i in range(1000)))
    assert base.reads == 2  # the value, and the list's count
    for index in range(1000):
        cells.cursor.index = index
        assert cells.value.get() is None
        cells.value.update((index,))
    assert base.reads == 2


def test_a_map_entry_is_read_without_the_others() -> None:
    class NoScans(MemoryBase):
        def scan(self, prefix: bytes = b"") -> Any:
            raise AssertionError("a scan")

    cells = Cells(NoScans())
    cells.at("a")
    cells.map.update_value(("x",), (1,))
    assert cells.map.get_value(("x",)) == (1,)
    assert cells.map.contains_key(("x",))
    cells.map.remove_key(("x",))
    assert cells.map.get_value(("x",)) is None


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where 2020-11-01 01:30 came twice."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


SUMMER, TWICE, WINTER = datetime(2020, 7, 1), datetime(2020, 11, 1, 1, 30), datetime(2020, 12, 1)


@pytest.mark.usefixtures("new_york")
def test_a_map_key_in_the_hour_that_a_clock_repeats_is_found_again() -> None:
    moments = KeyCodec(T.StructType([T.StructField("at", T.TimestampType())]))
    cells = Cells()
    by_time = MapCell(cells.cursor, cells.table, "by time", 4, moments, ROWS)
    cells.at("a")
    # What mktime says of that hour depends on what it was asked before.
    for n, moment in enumerate((SUMMER, TWICE, WINTER, TWICE.replace(fold=1))):
        by_time.update_value((moment,), (n,))
    for before in (SUMMER, WINTER):
        assert by_time.contains_key((before,))
        assert by_time.get_value((TWICE,)) == (1,)
        assert by_time.get_value((TWICE.replace(fold=1),)) == (3,)


@pytest.mark.usefixtures("new_york")
@pytest.mark.parametrize("codec", ["fixed", "mixed"])
def test_a_value_in_the_hour_that_a_clock_repeats_has_one_encoding(codec: str) -> None:
    fields = [T.StructField("at", T.TimestampType())]
    if codec == "mixed":
        fields.append(T.StructField("s", T.StringType()))
    rows = codec_for(T.StructType(fields))
    rest = ("x",) * (len(fields) - 1)
    seen = set()
    for before in (SUMMER, WINTER):
        rows.encode((before, *rest))
        seen.add(rows.encode((TWICE, *rest)))
    assert len(seen) == 1
    for fold in (0, 1):
        (back, *_) = rows.decode(rows.encode((TWICE.replace(fold=fold), *rest)))
        assert (back, back.fold) == (TWICE, fold)


def test_a_list_with_a_missing_element_is_not_silently_shorter() -> None:
    cells = Cells()
    cells.at("a")
    cells.list.put([(1,), (2,), (3,)])
    keys, values = cells.table.freeze(0).sorted()
    cells.base.apply(keys, values)
    del cells.base.entries[keys[2]]
    damaged = Cells(cells.base)
    damaged.at("a")
    with pytest.raises(LocalCopyError, match="'seen' has 3 elements"):
        list(damaged.list.get())


def test_what_was_decoded_with_the_chunk_does_not_hide_a_change() -> None:
    base = MemoryBase()
    cells = Cells(base)
    names = [f"k{i:02}" for i in range(40)]
    cells.at(*names)
    for index in range(40):
        cells.cursor.index = index
        cells.value.update((index,))
    base.apply(*cells.table.freeze(0).sorted())
    cells = Cells(base)
    cells.at(*names)
    cells.cursor.index = 1
    cells.value.update((-1,))  # before the chunk is decoded
    cells.cursor.index = 0
    assert cells.value.get() == (0,)
    cells.value.update((-2,))
    assert cells.value.get() == (-2,)
    cells.cursor.index = 2
    cells.value.clear()
    assert cells.value.get() is None
    cells.cursor.index = 1
    assert cells.value.get() == (-1,)
    cells.cursor.index = 39
    assert cells.value.get() == (39,)
    cells.cursor.index = -1
    with pytest.raises(KeyContextError):
        cells.value.get()


def test_a_map_entry_that_was_just_read_is_not_read_again() -> None:
    class Counting(MemoryBase):
        reads = 0

        def get(self, key: bytes) -> bytes | None:
            self.reads += 1
            return super().get(key)

    base = Counting()
    cells = Cells(base)
    cells.at("a", "b")
    assert not cells.map.contains_key(("x",))
    assert cells.map.get_value(("x",)) is None
    cells.map.remove_key(("x",))
    assert base.reads == 1
    cells.map.update_value(("x",), (1,))
    assert cells.map.get_value(("x",)) == (1,)
    cells.map.clear()
    assert cells.map.get_value(("x",)) is None
    cells.map.update_value(("x",), (2,))
    assert cells.map.get_value(("x",)) == (2,)
    assert base.reads == 1
    cells.cursor.index = 1
    assert cells.map.get_value(("x",)) is None
    assert base.reads == 2


def test_a_map_key_that_is_changed_and_used_again_is_another_one() -> None:
    lists = KeyCodec(T.StructType([T.StructField("many", T.ArrayType(T.LongType()))]))
    cells = Cells()
    by_list = MapCell(cells.cursor, cells.table, "by list", 4, lists, ROWS)
    cells.at("a", "b")
    many = [1]
    key: Any = (many,)
    by_list.update_value(key, (1,))
    assert by_list.get_value(key) == (1,)
    many.append(2)
    assert by_list.get_value(key) is None
    plain: Any = ["x"]
    cells.map.update_value(plain, (1,))
    assert cells.map.get_value(plain) == (1,)
    plain[0] = "y"
    assert cells.map.get_value(plain) is None
    same = ("x",)
    assert cells.map.get_value(same) == (1,)
    cells.cursor.index = 1
    assert cells.map.get_value(same) is None
    cells.map.update_value(same, (2,))
    cells.cursor.index = 0
    assert cells.map.get_value(same) == (1,)


@pytest.mark.parametrize("last", ["read", "written", "removed", "cleared", "loaded"])
def test_the_last_map_entry_is_not_mistaken_for_another_one(last: str) -> None:
    cells = Cells()
    cells.at("a", "b")
    same, other = ("x",), ("y",)
    cells.map.update_value(other, (5,))
    cells.map.update_value(same, (1,))
    if last == "read":
        assert cells.map.get_value(same) == (1,)
    elif last == "removed":
        cells.map.remove_key(same)
    elif last == "cleared":
        cells.map.clear()
    elif last == "loaded":
        cells.at("a", "b")
    gone = last in ("removed", "cleared")
    assert cells.map.get_value(same) == (None if gone else (1,))
    assert cells.map.get_value(other) == (None if last == "cleared" else (5,))
    assert cells.map.contains_key(same) is not gone
    cells.cursor.index = 1
    assert cells.map.get_value(same) is None
    cells.cursor.index = -1
    for call in (cells.map.get_value, cells.map.contains_key, cells.map.remove_key):
        with pytest.raises(KeyContextError):
            call(same)
    with pytest.raises(KeyContextError):
        cells.map.update_value(same, (2,))
    cells.at("a", "b")  # nothing was read or written of it: it is the last one still
    cells.cursor.index = -1
    with pytest.raises(KeyContextError):
        cells.map.get_value(same)
    with pytest.raises(KeyContextError):
        cells.map.update_value(same, (2,))


def test_map_entries_are_listed_however_often_they_were_written() -> None:
    cells = Cells()
    cells.at("a", "b")
    for name in "xxyxzy":
        cells.map.update_value((name,), (1,))
    cells.map.remove_key(("y",))
    assert list(cells.map.keys()) == [("x",), ("z",)]
    cells.cursor.index = 1
    cells.map.update_value(("only",), (1,))
    cells.map.update_value(("only",), (2,))
    assert list(cells.map.iterator()) == [(("only",), (2,))]
    cells.map.remove_key(("only",))
    assert not cells.map.exists()


def test_keys_come_as_one_column_or_as_two_lists() -> None:
    cells = Cells()
    keys = [NAMES.encode((name,)) for name in ("a", "bc")]
    groups = [b"\0\5", b"\0\6"]
    full = pa.array([b"before", *(g + k for g, k in zip(groups, keys, strict=True))], pa.binary())
    for _ in range(2):
        cells.cursor.load_full(full.slice(1))
        cells.cursor.index = 1
        cells.value.update((7,))
        (written,) = cells.table.freeze(0).sorted()[0]
        assert written == b"\0\6\0\1" + keys[1]
    assert (cells.cursor.prefixes, cells.cursor.suffixes) == (groups, keys)
    cells.cursor.load(groups[:1], keys[:1])
    assert (cells.cursor.prefixes, cells.cursor.suffixes) == (groups[:1], keys[:1])
    cells.cursor.index = 0
    assert cells.value.get() is None


@pytest.mark.parametrize("rows", [1, 23, 24, 300])
def test_a_list_comes_back_in_its_order_however_long_it_is(rows: int) -> None:
    cells = Cells()
    cells.at("a")
    expected = [(n,) for n in range(rows)]
    cells.list.put(expected[:1])
    for row in expected[1:]:
        cells.list.append(row)
    assert list(cells.list.get()) == expected
    cells.list.extend(expected)
    assert list(cells.list.get()) == expected * 2
    cells.list.put(expected)
    assert list(cells.list.get()) == expected
    assert len(list(cells.table.snapshot())) == rows + 1


def test_none_is_no_map_key_even_before_any_was_used() -> None:
    cells = Cells()
    cells.at("a")
    for use in (
        lambda: cells.map.update_value(None, (1,)),  # type: ignore[arg-type]
        lambda: cells.map.get_value(None),  # type: ignore[arg-type]
        lambda: cells.map.contains_key(None),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueMismatchError):
            use()
    assert list(cells.map.iterator()) == []
