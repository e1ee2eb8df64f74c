"""Time to live by the column: at every moment that matters, the bytes are those of rows."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from statebackend.state import expiry_index
from statebackend.state.expiry_index import read_share_ms
from statebackend.state.table import MemoryBase, StateTable
from statebackend.state.ttl_cells import TTL, ExpiryIndex
from tests.vector.sides import FIXED, MAP_KEY, VALUE, Operator, columns, rows_of

pytestmark = pytest.mark.full  # a model of long histories

PLACES = [0, 2]
VERBS = ("get", "exists", "put", "delete", "items", "clear")
MAP_KEYS = [("a", 1), (None, 0)]


def by_column(probe: Any, operator: Operator, verb: str, number: int) -> Any:
    """Do something to value, map and list; what is read."""
    keys = operator.all_keys().take(PLACES)
    rows = columns(VALUE, [(number, "x")] * 2)
    map_keys = columns(MAP_KEY, MAP_KEYS)
    if verb == "put":
        probe.value.put(keys, rows)
        probe.map.put(keys, map_keys, rows)
        probe.list.append(keys, columns(FIXED, [(number, None)] * 2))
    elif verb == "delete":
        probe.value.delete(keys)
        probe.map.delete(keys, map_keys)
    elif verb == "exists":
        there = [probe.value.exists(keys), probe.map.exists(keys, map_keys)]
        return [one.to_pylist() for one in (*there, probe.list.exists(keys))]
    elif verb == "get":
        index, found = probe.list.get(keys)
        read = probe.value.get(keys), probe.map.get(keys, map_keys)
        return [rows_of(one) for one in read], list(zip(index, rows_of(found), strict=True))
    elif verb == "items":
        index, found, values = probe.map.items(keys)
        return list(zip(index, rows_of(found), rows_of(values), strict=True))
    else:
        probe.map.clear(keys)
        probe.list.delete(keys)
    return None


def by_row(side: Any, verb: str, number: int) -> Any:
    """As `by_column`, with the row-wise cells."""
    pairs = list(zip(PLACES, MAP_KEYS, strict=True))
    none = (None, None)
    if verb == "put":
        for place, map_key in pairs:
            side.at(place, "value").update((number, "x"))
            side.at(place, "map").update_value(map_key, (number, "x"))
            side.at(place, "list").append((number, None))
    elif verb == "delete":
        for place, map_key in pairs:
            side.at(place, "value").clear()
            side.at(place, "map").remove_key(map_key)
    elif verb == "exists":
        return [
            [side.at(place, "value").exists() for place in PLACES],
            [side.at(place, "map").contains_key(key) for place, key in pairs],
            [side.at(place, "list").exists() for place in PLACES],
        ]
    elif verb == "get":
        lists = [(n, row) for n, place in enumerate(PLACES) for row in side.at(place, "list").get()]
        values = [side.at(place, "value").get() or none for place in PLACES]
        return [values, [side.at(p, "map").get_value(key) or none for p, key in pairs]], lists
    elif verb == "items":
        return [
            (n, key, row)
            for n, place in enumerate(PLACES)
            for key, row in side.at(place, "map").iterator()
        ]
    else:
        for place in PLACES:
            side.at(place, "map").clear()
            side.at(place, "list").clear()
    return None


@pytest.mark.parametrize("ms", [1, 40, 1000])
@pytest.mark.parametrize("update", ["write", "create", "read"])
@pytest.mark.parametrize("expired", ["hide", "until_cleaned"])
def test_at_every_moment_the_bytes_are_those_of_rows(ms: int, update: Any, expired: Any) -> None:
    ttl = TTL(ms, update=update, expired=expired)
    operator = Operator("k string", ttl)
    share = read_share_ms(ms)
    moments = sorted({0, share, ms // 2, ms - 1, ms})
    for first, verb, cleaned in product(moments, VERBS, (False, True)):
        last, second = ("put", ms) if cleaned else ("get", share)
        bases = MemoryBase(), MemoryBase()
        now_ms = 17
        steps = (("put", first), (verb, second), (last, ms + 1), ("exists", 0))
        for number, (what, after_ms) in enumerate(steps):
            tables = [StateTable(base) for base in bases]
            got = by_column(operator.by_column(tables[0], now_ms), operator, what, number)
            assert got == by_row(operator.by_row(tables[1], now_ms), what, number)
            for base, table in zip(bases, tables, strict=True):
                if cleaned:
                    ExpiryIndex(table).clean(range(512), now_ms, 1000)
                base.apply(*table.freeze(0).sorted())
            assert bases[0].entries == bases[1].entries, (what, number, now_ms)
            now_ms += after_ms


@pytest.mark.parametrize("ms", [2**63 - 1, 2**63 - 2, 2**62, 10**17])
@pytest.mark.parametrize("update", ["write", "create", "read"])
def test_the_longest_ttl_does_not_overflow(ms: int, update: Any) -> None:
    operator = Operator("k string", TTL(ms, update=update))
    bases = MemoryBase(), MemoryBase()
    now_ms = 1_800_000_000_000
    steps = [("put", 0), ("get", 1), ("put", 10**12), ("get", 10**15), ("items", 1), ("exists", 0)]
    for number, (verb, after_ms) in enumerate(steps):
        tables = [StateTable(base) for base in bases]
        got = by_column(operator.by_column(tables[0], now_ms), operator, verb, number)
        assert got == by_row(operator.by_row(tables[1], now_ms), verb, number)
        if verb != "put":
            assert got, "nothing has expired"
        if verb == "exists":
            assert all(map(all, got))
        for base, table in zip(bases, tables, strict=True):
            assert ExpiryIndex(table).clean(range(512), now_ms, 1000) == 0
            base.apply(*table.freeze(0).sorted())
        assert bases[0].entries == bases[1].entries
        now_ms += after_ms


@pytest.mark.parametrize("behind", [0, 1])
def test_a_list_with_a_gap_as_long_as_itself_is_read_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    monkeypatch.setattr(expiry_index, "_PIECE_ROWS", 4)
    base = MemoryBase()

    def epoch(ttl_ms: int, now_ms: int, appended: int) -> list[int]:
        """Append so many rows, numbered on from 100 times the epoch; what the list holds then."""
        table = StateTable(base)
        operator = Operator("k string", TTL(ttl_ms))
        keys, states = operator.all_keys().take([1]), operator.by_column(table, now_ms).list
        many = keys.take([0] * appended)
        states.append(many, columns(FIXED, [(now_ms * 100 + n, None) for n in range(appended)]))
        index, found = states.get(keys)
        assert index.tolist() == [0] * found.num_rows
        ExpiryIndex(table).clean(range(512), now_ms, 1000)
        base.apply(*table.freeze(0).sorted())
        return found.column("n").to_pylist()  # type: ignore[no-any-return]

    epoch(10**6, 0, 10)
    epoch(100, 1, 10)
    epoch(10**6, 2, behind)
    stay = [*range(10), *range(200, 200 + behind)]
    assert epoch(10**6, 300, 0) == stay  # the end of this one cleans
    assert epoch(10**6, 301, 0) == stay
    assert epoch(10**6, 302, 2) == [*stay, 30200, 30201]
    assert epoch(10**6, 303, 0) == [*stay, 30200, 30201]
