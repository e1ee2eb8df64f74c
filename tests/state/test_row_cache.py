from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from statebackend.state.blocks import ABSENT, binary_array
from statebackend.state.column_table import ColumnTable
from statebackend.state.overlay import FrozenOverlay, joined
from statebackend.state.row_cache import RowCache
from statebackend.state.spill import OverlaySpill
from statebackend.state.table import MemoryBase, StateTable

PREFIX = b"\0\1\0\5"


def keys_of(*numbers: int) -> list[bytes]:
    return [PREFIX + number.to_bytes(9, "big") for number in sorted(numbers)]


def column(items: list[bytes | None]) -> pa.BinaryArray:
    return binary_array(items)


@pytest.mark.parametrize("width", [1, 7, 8, 9, 24])
def test_rows_are_found_among_many_whose_keys_differ_in_one_byte(width: int) -> None:
    hot = RowCache(width + 1, 2)
    keys = [bytes([place % 256]) + bytes(width - 1) + bytes([place // 256]) for place in range(900)]
    for start in range(0, 900, 90):
        some = keys[start : start + 90]
        hot.put(column(some), column([key[:1] + b"v" for key in some]))
    assert hot.get_many(keys) == [key[:1] + b"v" for key in keys]
    assert hot.get_many([b"", bytes(width) + b"\xff", b"\xff" * 99]) == [ABSENT] * 3
    assert hot.entries()[0].to_pylist() == sorted(keys)
    assert len(hot) == 900


def test_what_is_deleted_is_known_to_be_gone() -> None:
    hot = RowCache(13, 1)
    one, two, three = keys_of(1, 2, 3)
    hot.put(column([one, two]), column([b"a", b"b"]))
    hot.put(column([two, three]), None)
    assert hot.get_many([one, two, three]) == [b"a", None, None]
    assert hot.entries()[1].to_pylist() == [b"a", None, None]


class Model:
    """A table by the column beside a dict, and what a base would have been told."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.base = MemoryBase()
        spill = OverlaySpill(limit_bytes=1 << (30 if seed % 3 else 16), folder=lambda: folder)
        self.table = StateTable(self.base, small_writes=True, spill=spill)
        self.columns = ColumnTable(self.table)
        self.known: dict[bytes, bytes] = {}
        self.frozen: list[FrozenOverlay] = []
        self.changed: set[bytes] = set()  # since the last barrier

    def some(self) -> list[bytes]:
        return keys_of(*self.random.sample(range(300), self.random.choice([1, 5, 60, 200])))

    def put(self, width: int) -> None:
        keys = self.some()
        values = [self.random.randbytes(width) for _ in keys]
        self.columns.put_values(column(keys), column(values))
        self.changed.update(keys)
        self.known.update(zip(keys, values, strict=True))

    def delete(self) -> None:
        keys = self.some()
        self.columns.put_values(column(keys), None)
        self.changed.update(keys)
        for key in keys:
            self.known.pop(key, None)

    def read_and_put(self) -> None:
        keys = self.some()
        wanted = column(keys)
        assert self.columns.get_values(wanted).to_pylist() == list(map(self.known.get, keys))
        values = [self.random.randbytes(4) for _ in keys]
        self.columns.put_values(wanted, column(values))
        self.changed.update(keys)
        self.known.update(zip(keys, values, strict=True))

    def freeze(self) -> None:
        if len(self.frozen) < 3:
            self.frozen.append(self.table.freeze(0))
            assert sorted(self.changed) == self.frozen[-1].sorted()[0]
            self.changed.clear()

    def apply(self) -> None:
        if self.frozen:
            layer = self.frozen.pop(0)
            for keys, values in layer.merged():
                self.base.apply(keys.to_pylist(), values.to_pylist())
            self.table.applied(layer)

    def join(self) -> None:
        if len(self.frozen) > 1:
            made = joined(self.frozen[:2])
            self.table.put_joined(made, self.frozen[:2])
            self.frozen[:2] = [made]

    def check(self) -> None:
        keys = keys_of(*range(300))
        wanted = list(map(self.known.get, keys))
        assert self.columns.get_values(column(keys)).to_pylist() == wanted
        assert self.columns.get_columns(column(keys)).to_pylist() == wanted
        assert self.table.multi_get(keys) == wanted
        assert [self.table.get(key) for key in keys[:20]] == wanted[:20]
        assert dict(self.table.snapshot()) == self.known


@pytest.mark.parametrize("seed", range(24))
def test_a_table_by_the_column_is_a_dict(seed: int, tmp_path: Path) -> None:
    model = Model(seed, tmp_path)
    steps = [model.read_and_put] * 6 + [model.delete, model.freeze, model.freeze, model.apply]
    if seed % 2:
        steps += [model.join, model.table.seal, model.table.relieve]
    if seed % 5 == 4:
        steps.append(lambda: model.put(6))  # another width: from then on as it was before
    for _ in range(60):
        model.random.choice(steps)()
        if model.random.random() < 0.2:
            model.check()
    model.check()


def test_the_base_is_not_asked_for_what_was_applied_last() -> None:
    model = Model(1, Path("unused"))
    model.put(4)
    model.freeze()
    model.apply()
    keys = sorted(model.known)
    asked: list[bytes] = []
    model.base.multi_get = lambda keys: asked.extend(keys) or []  # type: ignore[method-assign]
    model.base.merge_get = lambda keys, _: asked.extend(keys) or []  # type: ignore[method-assign]
    assert model.columns.get_values(column(keys)).to_pylist() == [model.known[key] for key in keys]
    assert not asked


def test_what_is_written_over_and_over_is_found_in_one_place_after_a_barrier() -> None:
    hot = RowCache(13, 1)
    keys = keys_of(*range(2_000))
    hot.put(column(keys), column([b"a"] * 2_000))
    after = hot.following()
    after.put(column(keys[:1_500]), column([b"b"] * 1_500))
    assert after.get_many(keys[1_499:1_501]) == [b"b", b"a"]
    assert after.entries()[0].to_pylist() == keys[:1_500]
    assert hot.get_many(keys[:1]) == [b"a"]  # it never changes any more
    last = after.following()
    last.put(column(keys[:10]), None)
    assert last.entries()[1].to_pylist() == [None] * 10
    assert len(last.following()) == 0  # most of it was not touched for an epoch: it is let go


def test_parts_of_an_epoch_count_by_what_they_hold_against_the_limit(tmp_path: Path) -> None:
    """A table that is sealed again and again is not written to disk for a few rows."""
    spill = OverlaySpill(limit_bytes=8 << 20, folder=lambda: tmp_path)
    table = StateTable(MemoryBase(), small_writes=True, spill=spill)
    columns = ColumnTable(table)
    many = column(keys_of(*range(30_000)))
    columns.put_values(many, column([b"12345678"] * len(many)))
    frozen = table.freeze(0)
    table.base.apply(*frozen.sorted())  # type: ignore[attr-defined]
    table.applied(frozen)
    for number in range(500):
        some = keys_of(*range(number, number + 10))
        columns.put_values(column(some), column([b"87654321"] * 10))
        table.seal()
        table.relieve()
    assert not any(run.on_disk for run in table.sorted_runs_of_overlay)
    assert columns.get_values(column(keys_of(3))).to_pylist() == [b"87654321"]


@pytest.mark.parametrize(("states", "rows"), [(2, 12_500), (4, 3_750)])
def test_what_is_kept_of_the_epoch_before_sends_nothing_to_disk(
    states: int, rows: int, tmp_path: Path
) -> None:
    """Keys drift, several states share the limit, and the changes alone are far below it."""
    spill = OverlaySpill(limit_bytes=4 << 20, folder=lambda: tmp_path)
    table = StateTable(MemoryBase(), small_writes=True, spill=spill)
    columns = ColumnTable(table)
    for epoch in range(8):
        for start in range(0, rows, 1_250):
            for state in range(states):
                numbers = range(epoch * rows + start, epoch * rows + start + 1_250)
                keys = [b"\0\1\0" + bytes([state]) + n.to_bytes(8, "big") for n in numbers]
                columns.put_values(column(keys), column([b"12345678"] * len(keys)))
                table.relieve()
        assert not any(run.on_disk for run in table.sorted_runs_of_overlay)
        assert len(table.freeze(epoch)) == rows * states
        if epoch:
            table.applied(table.frozen[0])


def test_copies_are_let_go_before_changes_go_to_disk(tmp_path: Path) -> None:
    spill = OverlaySpill(limit_bytes=4 << 20, folder=lambda: tmp_path)
    table = StateTable(MemoryBase(), small_writes=True, spill=spill)
    columns = ColumnTable(table)
    columns.put_values(column(keys_of(*range(9_000))), column([b"12345678"] * 9_000))
    table.freeze(0)
    columns.put_values(column(keys_of(1)), column([b"87654321"]))
    columns.put_values(column(keys_of(2)), None)
    copied_bytes = table._overlay.hot_bytes
    spill.limit_bytes = copied_bytes // 2
    table.relieve()
    assert table._overlay.hot_bytes < copied_bytes / 5
    assert not table.sorted_runs_of_overlay
    wanted = [b"12345678", b"87654321", None, b"12345678"]
    assert columns.get_values(column(keys_of(*range(4)))).to_pylist() == wanted
    assert table.freeze(1).sorted() == (keys_of(1, 2), [b"87654321", None])


def test_a_state_whose_first_change_is_a_deletion_stays_by_the_column() -> None:
    base = MemoryBase()
    keys = keys_of(*range(20))
    base.apply(keys, [b"1234"] * 20)
    table = StateTable(base, small_writes=True)
    columns = ColumnTable(table)
    columns.put_values(column(keys[:3]), None)
    assert not table.entries
    columns.put_values(column(keys[2:9]), column([b"5678"] * 7))
    assert not table.entries
    assert columns.get_values(column(keys[:4])).to_pylist() == [None, None, b"5678", b"5678"]
