"""States by the column against plain dicts, and byte for byte against the row-wise cells.

Whatever is written by the column is written by the row to a twin, which always applies its epochs
at once: after every step both hold the same bytes. Reads go by the one or the other way, with
epochs above the base that are not applied yet, and with an overlay that spills.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from snapshot.formats.delta import encode_delta
from snapshot.formats.delta_in_pieces import encode_frozen
from statebackend.operators.vector.key_vector import Keys
from statebackend.state.blocks import SortedRows, binary_array
from statebackend.state.expiry_index import read_share_ms
from statebackend.state.spill import OverlaySpill
from statebackend.state.table import FrozenOverlay, MemoryBase, StateTable
from statebackend.state.ttl_cells import TTL, ExpiryIndex
from tests.vector.sides import (
    FIXED,
    FIXEDS,
    KEYS,
    MAP_KEY,
    MAP_KEYS,
    VALUE,
    VALUES,
    Operator,
    Row,
    columns,
    places,
    rows_of,
)

pytestmark = pytest.mark.full  # a model of long histories

TTLS = st.none() | st.builds(
    TTL,
    ms=st.sampled_from([1, 40, 1000]),
    update=st.sampled_from(["write", "create", "read"]),
    expired=st.sampled_from(["hide", "until_cleaned"]),
)
PLACES = st.lists(st.integers(0, 2), max_size=5)  # few, so that they meet again
BY = st.sampled_from(["column", "row"])


class States(RuleBasedStateMachine):
    @initialize(
        ddl=st.sampled_from(sorted(KEYS)),
        ttl=TTLS,
        limit_bytes=st.sampled_from([None, 0, 300]),
        now_ms=st.integers(0, 50),
    )
    def begin(self, ddl: str, ttl: TTL | None, limit_bytes: int | None, now_ms: int) -> None:
        self.operator = Operator(ddl, ttl)
        self.folder = Path(tempfile.mkdtemp(prefix="vector-"))
        self.limit_bytes = limit_bytes
        self.now_ms, self.epoch = now_ms, 0
        self.base, self.twin_base = MemoryBase(), MemoryBase()
        self.twin = StateTable(self.twin_base)
        self.left: list[FrozenOverlay] = []
        self.truth: dict[str, dict[Any, Any]] = {name: {} for name in ("value", "fixed", "list")}
        self.truth["map"] = {}
        self._start()

    def _start(self) -> None:
        spill = None
        if self.limit_bytes is not None:
            folder = self.folder / str(self.epoch)
            spill = OverlaySpill(limit_bytes=self.limit_bytes, folder=lambda: folder)
        self.table = StateTable(self.base, spill=spill)
        self._open()

    def _open(self) -> None:
        self.probe = self.operator.by_column(self.table, self.now_ms)
        self.rows = self.operator.by_row(self.table, self.now_ms)
        self.twins = self.operator.by_row(self.twin, self.now_ms)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _places(self, some: list[int]) -> list[int]:
        return [place % len(self.operator.full) for place in some]

    def _keys(self, some: list[int]) -> Keys:
        return self.operator.all_keys().take(places(*some))

    # --- values

    @rule(some=PLACES, data=st.data(), by=BY, name=st.sampled_from(["value", "fixed"]))
    def put(self, some: list[int], data: st.DataObject, by: str, name: str) -> None:
        some = self._places(some)
        rows = [data.draw(st.sampled_from(VALUES if name == "value" else FIXEDS)) for _ in some]
        if by == "column":
            ddl = VALUE if name == "value" else FIXED
            getattr(self.probe, name).put(self._keys(some), columns(ddl, rows))
        for place, row in zip(some, rows, strict=True):
            if by == "row":
                self.rows.at(place, name).update(row)
            self.twins.at(place, name).update(row)
            self.truth[name][place] = row

    @rule(some=PLACES, by=BY, name=st.sampled_from(["value", "fixed"]))
    def delete(self, some: list[int], by: str, name: str) -> None:
        some = self._places(some)
        if by == "column":
            getattr(self.probe, name).delete(self._keys(some))
        for place in some:
            if by == "row":
                self.rows.at(place, name).clear()
            self.twins.at(place, name).clear()
            self.truth[name].pop(place, None)

    @rule(some=PLACES, by=BY, name=st.sampled_from(["value", "fixed"]))
    def get(self, some: list[int], by: str, name: str) -> None:
        some = self._places(some)
        there = [self.twins.at(place, name).exists() for place in some]
        expected = [self.twins.at(place, name).get() for place in some]
        if self.operator.ttl is None:
            assert expected == [self.truth[name].get(place) for place in some]
        if by == "row":
            assert [self.rows.at(place, name).exists() for place in some] == there
            assert [self.rows.at(place, name).get() for place in some] == expected
            return
        state, keys = getattr(self.probe, name), self._keys(some)
        assert state.exists(keys).to_pylist() == there
        got = state.get(keys)
        got.validate(full=True)
        assert rows_of(got) == [(None, None) if row is None else row for row in expected]

    @rule(name=st.sampled_from(["value", "fixed"]))
    def scan(self, name: str) -> None:
        twin = self._copy(self.twin)
        seen = [
            (full, row)
            for place, full in enumerate(self.operator.full)
            if (row := twin.at(place, name).get()) is not None
        ]
        found = []
        for keys, batch in getattr(self.probe, name).scan():
            assert keys.columns.num_rows == len(keys) == batch.num_rows
            assert self.operator.codec.encode_arrow(keys.columns.columns).to_pylist() == [
                full[2:] for full in keys.full.to_pylist()
            ]
            found += list(zip(keys.full.to_pylist(), rows_of(batch), strict=True))
            # What scan gives can be asked with.
            assert getattr(self.probe, name).exists(keys).to_pylist() == [True] * len(keys)
        assert found == seen

    # --- maps

    @rule(some=PLACES, data=st.data(), by=BY)
    def put_entries(self, some: list[int], data: st.DataObject, by: str) -> None:
        some = self._places(some)
        map_keys, rows = self._map_keys(some, data), [data.draw(VALUE_ROWS) for _ in some]
        if by == "column":
            entries = columns(MAP_KEY, map_keys), columns(VALUE, rows)
            self.probe.map.put(self._keys(some), *entries)
        for place, map_key, row in zip(some, map_keys, rows, strict=True):
            if by == "row":
                self.rows.at(place, "map").update_value(map_key, row)
            self.twins.at(place, "map").update_value(map_key, row)
            self.truth["map"].setdefault(place, {})[map_key] = row

    @rule(some=PLACES, data=st.data(), by=BY)
    def delete_entries(self, some: list[int], data: st.DataObject, by: str) -> None:
        some = self._places(some)
        map_keys = self._map_keys(some, data)
        if by == "column":
            self.probe.map.delete(self._keys(some), columns(MAP_KEY, map_keys))
        for place, map_key in zip(some, map_keys, strict=True):
            if by == "row":
                self.rows.at(place, "map").remove_key(map_key)
            self.twins.at(place, "map").remove_key(map_key)
            self.truth["map"].get(place, {}).pop(map_key, None)

    @rule(some=PLACES, data=st.data(), by=BY)
    def get_entries(self, some: list[int], data: st.DataObject, by: str) -> None:
        some = self._places(some)
        pairs = list(zip(some, self._map_keys(some, data), strict=True))
        there = [self.twins.at(place, "map").contains_key(key) for place, key in pairs]
        expected = [self.twins.at(place, "map").get_value(key) for place, key in pairs]
        if self.operator.ttl is None:
            assert expected == [self.truth["map"].get(p, {}).get(key) for p, key in pairs]
        if by == "row":
            assert [self.rows.at(p, "map").contains_key(key) for p, key in pairs] == there
            assert [self.rows.at(p, "map").get_value(key) for p, key in pairs] == expected
            return
        keys, map_keys = self._keys(some), columns(MAP_KEY, [key for _, key in pairs])
        assert self.probe.map.exists(keys, map_keys).to_pylist() == there
        got = rows_of(self.probe.map.get(keys, map_keys))
        assert got == [(None, None) if row is None else row for row in expected]

    @rule(some=PLACES, by=BY)
    def items(self, some: list[int], by: str) -> None:
        some = self._places(some)
        expected = [list(self.twins.at(place, "map").iterator()) for place in some]
        if self.operator.ttl is None:
            assert list(map(dict, expected)) == [self.truth["map"].get(p, {}) for p in some]
        if by == "row":
            assert [list(self.rows.at(p, "map").iterator()) for p in some] == expected
            return
        index, map_keys, rows = self.probe.map.items(self._keys(some))
        found: list[list[tuple[Row, Row]]] = [[] for _ in some]
        assert index.tolist() == sorted(index.tolist())
        for which, key, row in zip(index, rows_of(map_keys), rows_of(rows), strict=True):
            found[which].append((key, row))
        assert found == expected

    @rule(some=PLACES, by=BY)
    def clear(self, some: list[int], by: str) -> None:
        some = self._places(some)
        if by == "column":
            self.probe.map.clear(self._keys(some))
        for place in some:
            if by == "row":
                self.rows.at(place, "map").clear()
            self.twins.at(place, "map").clear()
            self.truth["map"].pop(place, None)

    def _map_keys(self, some: list[int], data: st.DataObject) -> list[Row]:
        return [data.draw(st.sampled_from(MAP_KEYS[1:4])) for _ in some]

    # --- lists

    @rule(some=PLACES, data=st.data(), by=BY)
    def append(self, some: list[int], data: st.DataObject, by: str) -> None:
        some = self._places(some)
        rows = [data.draw(FIXED_ROWS) for _ in some]
        if by == "column":
            self.probe.list.append(self._keys(some), columns(FIXED, rows))
        for place, row in zip(some, rows, strict=True):
            if by == "row":
                self.rows.at(place, "list").append(row)
            self.twins.at(place, "list").append(row)
            self.truth["list"].setdefault(place, []).append(row)

    @rule(some=st.sets(st.integers(0, 9), max_size=5), data=st.data())
    def put_lists(self, some: set[int], data: st.DataObject) -> None:
        distinct = sorted(set(self._places(list(some))), key=lambda p: (p * 7) % 5)
        index = data.draw(st.lists(st.integers(0, max(0, len(distinct) - 1)), max_size=6))
        index = index if distinct else []
        rows = [data.draw(FIXED_ROWS) for _ in index]
        self.probe.list.put(self._keys(distinct), places(*index), columns(FIXED, rows))
        for place in distinct:
            self.twins.at(place, "list").clear()
            self.truth["list"].pop(place, None)
        for which, row in zip(index, rows, strict=True):
            self.twins.at(distinct[which], "list").append(row)
            self.truth["list"].setdefault(distinct[which], []).append(row)

    @rule(some=PLACES, by=BY)
    def delete_lists(self, some: list[int], by: str) -> None:
        some = self._places(some)
        if by == "column":
            self.probe.list.delete(self._keys(some))
        for place in some:
            if by == "row":
                self.rows.at(place, "list").clear()
            self.twins.at(place, "list").clear()
            self.truth["list"].pop(place, None)

    @rule(some=PLACES, by=BY)
    def get_lists(self, some: list[int], by: str) -> None:
        some = self._places(some)
        there = [self.twins.at(place, "list").exists() for place in some]
        expected = [list(self.twins.at(place, "list").get()) for place in some]
        if self.operator.ttl is None:
            assert expected == [self.truth["list"].get(place, []) for place in some]
        if by == "row":
            assert [list(self.rows.at(place, "list").get()) for place in some] == expected
            return
        keys = self._keys(some)
        assert self.probe.list.exists(keys).to_pylist() == there
        index, rows = self.probe.list.get(keys)
        found: list[list[Row]] = [[] for _ in some]
        assert index.tolist() == sorted(index.tolist())
        for which, row in zip(index, rows_of(rows), strict=True):
            found[which].append(row)
        assert found == expected

    # --- epochs

    @rule()
    def relieve(self) -> None:
        self.table.relieve()

    @rule()
    def seal(self) -> None:
        self.table.seal()

    @rule(
        after=st.sampled_from(["nothing", "a share", "half", "all but one", "all", "long"]),
        applied=st.integers(0, 3),
        restart=st.booleans(),
    )
    def end_epoch(self, after: str, applied: int, restart: bool) -> None:
        for table in (self.table, self.twin):
            ExpiryIndex(table).clean(range(512), self.now_ms, 10_000)
        frozen, twin = self.table.freeze(self.epoch), self.twin.freeze(self.epoch)
        self._check(frozen)
        self.left.append(frozen)
        self.twin_base.apply(*twin.sorted())
        self.twin.applied(twin)
        for _ in range(min(applied, len(self.left))):
            oldest = self.left.pop(0)
            self.base.apply(*oldest.sorted())
            self.table.applied(oldest)
        self.epoch += 1
        ttl_ms = 30 if self.operator.ttl is None else self.operator.ttl.ms
        self.now_ms += {
            "nothing": 0,
            "a share": read_share_ms(ttl_ms),  # now a read moves the expiry
            "half": ttl_ms // 2,
            "all but one": ttl_ms - 1,
            "all": ttl_ms,  # now it is expired
            "long": 3 * ttl_ms,
        }[after]
        if restart:
            changes = [one.sorted() for one in self.left]
            self._start()
            self.left = [
                self.table.add_layer(place, self._layer(place, *some))
                for place, some in enumerate(changes)
            ]
        self._open()

    def _layer(self, place: int, keys: list[bytes], values: list[bytes | None]) -> Any:
        rows = SortedRows(binary_array(keys), binary_array(values))
        if place % 2:
            return rows
        return iter(
            [
                SortedRows(rows.keys.slice(at, 2), rows.values.slice(at, 2))
                for at in range(0, len(keys), 2)
            ]
        )

    def _check(self, frozen: FrozenOverlay) -> None:
        """All ways of reading an epoch's changes agree."""
        keys, values = frozen.sorted()
        assert keys == sorted(set(keys))
        assert len(frozen) == len(keys) == len(values)
        merged = [
            entry
            for some, data in frozen.merged()
            for entry in zip(some.to_pylist(), data.to_pylist(), strict=True)
        ]
        assert merged == list(zip(keys, values, strict=True))
        assert frozen.spilled is (
            frozen.columns is None and bool(frozen.runs) and any(run.on_disk for run in frozen.runs)
        )
        if frozen.columns is not None:
            assert [one.to_pylist() for one in frozen.columns] == [keys, values]
        encoded = encode_frozen(frozen, lambda: self.folder / "delta")
        assert encoded.rows == len(keys)
        if keys and encoded.data is not None:
            assert encoded.data == encode_delta(keys, values).data

    def _copy(self, table: StateTable) -> Any:
        """The row-wise cells over what a table holds; reads leave no trace in it."""
        base = MemoryBase()
        base.entries = dict(table.snapshot())
        return self.operator.by_row(StateTable(base), self.now_ms)

    @invariant()
    def both_hold_the_same_bytes(self) -> None:
        if hasattr(self, "table"):
            assert list(self.table.snapshot()) == list(self.twin.snapshot())


VALUE_ROWS, FIXED_ROWS = st.sampled_from(VALUES), st.sampled_from(FIXEDS)

States.TestCase.settings = settings(max_examples=100, stateful_step_count=25)
TestStates = States.TestCase
