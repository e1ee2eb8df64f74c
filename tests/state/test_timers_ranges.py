"""Reading by the range: what a store gives is what sorted keys give."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend.rocks.store import Marker, RocksStore
from statebackend.state.blocks import SortedRows, binary_array
from statebackend.state.table import MemoryBase, StateTable
from statebackend.state.time_ranges import set_between

MARKER = Marker(job_id="j", operator="o", key_group_start=0, key_group_end=4, epoch=0, chain="c")
KEY = st.binary(min_size=1, max_size=3).map(lambda tail: b"\0" + tail)
KEYS = st.lists(KEY, max_size=60, unique=True)


def expected(keys: list[bytes], ranges: list[tuple[bytes, bytes, bytes]]) -> list[bytes]:
    found = []
    for start, end, stop in ranges:
        found += [key for key in keys if start <= key < end]
        after = keys[bisect_left(keys, end) :][:1]
        found += [key for key in after if key < stop]
    return found


@given(keys=KEYS, bounds=st.lists(KEY, max_size=12, unique=True))
@settings(deadline=None, max_examples=40)
def test_a_store_reads_ranges_as_sorted_keys_do(
    tmp_path_factory: pytest.TempPathFactory, keys: list[bytes], bounds: list[bytes]
) -> None:
    bounds.sort()
    ranges: Any = [tuple(bounds[n : n + 3]) for n in range(0, len(bounds) - 2, 3)]
    ranges += [(b"\1", b"\1", b"\2")]  # nothing is there, and the marker is behind it
    folder = tmp_path_factory.mktemp("ranges", numbered=True)
    store, memory = RocksStore.open(str(folder / "db")), MemoryBase()
    try:
        store.apply(keys, [b""] * len(keys), MARKER)
        memory.apply(keys, [b""] * len(keys))
        want = expected(sorted(keys), ranges)
        for base in (store, memory):
            assert [key for some in base.scan_keys(ranges) for key in some] == want
    finally:
        store.close()


def test_a_long_range_comes_in_pieces(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = RocksStore.open(str(tmp_path_factory.mktemp("long") / "db"))
    keys = [n.to_bytes(4, "big") for n in range(30_000)]
    store.apply(keys, [b""] * len(keys), MARKER)
    pieces = list(store.scan_keys([(b"\0", b"\1", b"\2")]))
    store.close()
    assert [key for some in pieces for key in some] == keys
    assert len(pieces[0]) <= 16
    assert max(map(len, pieces)) <= 8192


LAYER = st.dictionaries(KEY, st.none() | st.just(b""), max_size=20)


@given(base=KEYS, layers=st.lists(LAYER, max_size=3), deleted=KEYS, ends=st.tuples(KEY, KEY))
@settings(deadline=None, max_examples=100)
def test_the_newest_word_about_a_key_counts(
    base: list[bytes], layers: list[Any], deleted: list[bytes], ends: tuple[bytes, bytes]
) -> None:
    memory = MemoryBase()
    memory.apply(base, [b""] * len(base))
    table, alive = StateTable(memory), set(base)
    for epoch, layer in enumerate(filter(None, layers)):
        keys = sorted(layer)
        values = [layer[key] for key in keys]
        table.add_layer(epoch, SortedRows(binary_array(keys), binary_array(values)))
        alive = (alive | {key for key in keys if layer[key] is not None}) - {
            key for key in keys if layer[key] is None
        }
    for key in deleted:
        table.put(key, None)
    start, end = min(ends), max(ends)
    want = sorted(key for key in alive - set(deleted) if start <= key < end)
    assert list(set_between(table, start, end)) == want
