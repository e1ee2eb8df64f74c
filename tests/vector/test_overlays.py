"""Columns in the overlay: what is read is what was written, whichever way each of them went."""

from __future__ import annotations

import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from snapshot.formats.delta import decode_delta, encode_delta
from snapshot.formats.delta_in_pieces import encode_frozen
from statebackend.operators.input.group_by_key import group_part, group_rows
from statebackend.operators.input.staging import Part
from statebackend.operators.vector.column_entries import scan_state, under_keys
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.state.blocks import SortedRows, binary_array
from statebackend.state.column_table import ColumnTable
from statebackend.state.spill import OverlaySpill
from statebackend.state.table import FrozenOverlay, MemoryBase, StateTable
from tests.schema.strategies import present, struct_of, to_arrow, types
from tests.vector.sides import Operator

PREFIXES = [b"\0\1\0\1" + user for user in (b"a", b"b", b"ca", b"cbb")]
SUFFIXES = [b"", b"\0", b"\1", b"\x7f", b"\xff", b"\xff\xff", b"ab"]
KEYS = [prefix + suffix for prefix in PREFIXES for suffix in SUFFIXES]
OTHERS = [b"\0\0\xff\xffzz", b"\0\1\0\2a", b"\0\2\0\1a"]
CHANGES = st.dictionaries(
    st.sampled_from([*KEYS, *OTHERS]),
    st.one_of(st.none(), st.binary(max_size=4), st.just(b""), st.just(b"x" * 60)),
    max_size=12,
)
Entries = dict[bytes, bytes | None]


def arrays(changes: Entries, cut: int = 0) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    """Sorted columns of changes, cut off from longer ones."""
    keys = sorted(changes)
    values = [changes[key] for key in keys]
    return (
        pa.array([b""] * cut + keys, pa.binary()).slice(cut),
        pa.array([None] * cut + values, pa.binary()).slice(cut),
    )


class Overlays(RuleBasedStateMachine):
    """Writes by the key and by the column, spills, freezes, applies; reads are those of a dict."""

    @initialize(
        base=CHANGES,
        layers=st.lists(st.tuples(CHANGES, st.booleans()), max_size=3),
        limit_bytes=st.sampled_from([None, 0, 200, 5000]),
    )
    def begin(
        self, base: Entries, layers: list[tuple[Entries, bool]], limit_bytes: int | None
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="overlays-"))
        spill = None
        if limit_bytes is not None:
            folder = self.folder / "runs"
            spill = OverlaySpill(limit_bytes=limit_bytes, folder=lambda: folder)
        self.base = MemoryBase()
        self.base.entries = {key: value for key, value in base.items() if value is not None}
        self.truth: dict[bytes, bytes] = dict(self.base.entries)
        self.table = StateTable(self.base, spill=spill)
        self.columns = ColumnTable(self.table)
        self.left: list[FrozenOverlay] = []
        for epoch, (changes, in_pieces) in enumerate(layers):
            keys, values = arrays(changes)
            rows: Any = SortedRows(keys, values)
            if in_pieces:
                step = range(0, len(keys), 3)
                rows = [SortedRows(keys.slice(at, 3), values.slice(at, 3)) for at in step]
            self.left.append(self.table.add_layer(epoch, rows))
            self._take(changes)
        self.epoch = len(layers)
        self.own: Entries = {}

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _take(self, changes: Entries) -> None:
        for key, value in changes.items():
            if value is None:
                self.truth.pop(key, None)
            else:
                self.truth[key] = value

    def _own(self, changes: Entries) -> None:
        self._take(changes)
        self.own.update(changes)

    @rule(changes=CHANGES)
    def put(self, changes: Entries) -> None:
        for key, value in changes.items():
            prefix = next((p for p in PREFIXES if key.startswith(p)), None)
            if prefix is None:
                self.table.put(key, value)
            else:
                self.table.put_under(prefix, key, value)
        self._own(changes)

    @rule(changes=CHANGES, cut=st.integers(0, 2))
    def put_columns(self, changes: Entries, cut: int) -> None:
        self.columns.put_columns(*arrays(changes, cut))
        self._own(changes)

    @rule()
    def relieve(self) -> None:
        self.table.relieve()

    @rule()
    def seal(self) -> None:
        self.table.seal()

    @rule(applied=st.integers(0, 4))
    def freeze(self, applied: int) -> None:
        frozen = self.table.freeze(self.epoch)
        keys = sorted(self.own)
        values = [self.own[key] for key in keys]
        assert frozen.sorted() == (keys, values)
        assert len(frozen) == len(keys)
        pieces = list(frozen.merged())
        assert [key for some, _ in pieces for key in some.to_pylist()] == keys
        assert [value for _, some in pieces for value in some.to_pylist()] == values
        if frozen.columns is not None:
            assert [one.to_pylist() for one in frozen.columns] == [keys, values]
        encoded = encode_frozen(frozen, lambda: self.folder / "delta")
        assert encoded.rows == len(keys)
        if keys:
            data = (self.folder / "delta").read_bytes() if encoded.data is None else encoded.data
            found = decode_delta(data)
            assert (found.keys.to_pylist(), found.values.to_pylist()) == (keys, values)
            if encoded.data is not None:
                assert encoded.data == encode_delta(keys, values).data
        self.left.append(frozen)
        self.own = {}
        self.epoch += 1
        for _ in range(min(applied, len(self.left))):
            oldest = self.left.pop(0)
            self.base.apply(*oldest.sorted())
            self.table.applied(oldest)

    @rule(keys=st.lists(st.sampled_from([*KEYS, *OTHERS]), max_size=12), cut=st.integers(0, 2))
    def get(self, keys: list[bytes], cut: int) -> None:
        expected = [self.truth.get(key) for key in keys]
        column = pa.array([b"?"] * cut + keys, pa.binary()).slice(cut)
        before = self.columns.read_bytes
        assert self.columns.get_columns(column).to_pylist() == expected
        assert self.columns.read_bytes >= before
        assert self.table.multi_get(keys) == expected
        assert [self.table.get(key) for key in keys] == expected
        ascending = pa.array(sorted(set(keys)), pa.binary())
        assert self.columns.get_columns(ascending).to_pylist() == [
            self.truth.get(key) for key in sorted(set(keys))
        ]

    @rule(
        prefixes=st.lists(st.sampled_from([*PREFIXES, b"\0\1\0\1none", b"\0\2\0\1a"]), max_size=6)
    )
    def under(self, prefixes: list[bytes]) -> None:
        index, full, data = under_keys(self.columns, pa.array(prefixes, pa.binary()))
        found: list[list[tuple[bytes, bytes]]] = [[] for _ in prefixes]
        assert all(a <= b for a, b in pairwise(index.tolist()))
        for which, key, value in zip(index, full.to_pylist(), data.to_pylist(), strict=True):
            found[which].append((key, value))
        assert found == [self._under(prefix) for prefix in prefixes]

    def _under(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        return sorted(item for item in self.truth.items() if item[0].startswith(prefix))

    @rule(prefix=st.sampled_from(PREFIXES))
    def scan(self, prefix: bytes) -> None:
        assert self.table.scan(prefix) == self._under(prefix)

    @rule()
    def scan_all_of_a_state(self) -> None:
        found = []
        for full, data in scan_state(self.columns, b"\0\1", range(4)):
            found += list(zip(full.to_pylist(), data.to_pylist(), strict=True))
        assert found == sorted(item for item in self.truth.items() if item[0][2:4] == b"\0\1")

    @invariant()
    def everything_is_seen(self) -> None:
        if hasattr(self, "table"):
            assert list(self.table.snapshot()) == sorted(self.truth.items())


Overlays.TestCase.settings = settings(max_examples=80, stateful_step_count=20)
TestOverlays = Overlays.TestCase


def test_nothing_written_is_nothing_frozen() -> None:
    table = StateTable(MemoryBase())
    columns = ColumnTable(table)
    columns.put_columns(*arrays({}))
    table.seal()
    frozen = table.freeze(0)
    assert len(frozen) == 0
    assert frozen.sorted() == ([], [])
    assert list(frozen.merged()) == []
    assert columns.get_columns(binary_array([])).to_pylist() == []
    assert [len(one) for one in under_keys(columns, binary_array([]))] == [0, 0, 0]


def test_many_small_columns_are_held_within_the_limit(tmp_path: Path) -> None:
    spill = OverlaySpill(limit_bytes=4096, folder=lambda: tmp_path / "runs")
    table = StateTable(MemoryBase(), spill=spill)
    columns = ColumnTable(table)
    truth: Entries = {}
    for number in range(200):
        changes: Entries = {
            b"\0\1\0\1" + (n * 7 % 997).to_bytes(4, "big"): b"v%d" % number
            for n in range(number, number + 30)
        }
        columns.put_columns(*arrays(changes))
        truth.update(changes)
        table.relieve()
        assert table._held_bytes <= 4096
    frozen = table.freeze(0)
    assert frozen.spilled
    assert frozen.columns is None
    assert frozen.sorted() == (sorted(truth), [truth[key] for key in sorted(truth)])
    assert len(frozen) == len(truth)
    table.applied(frozen)
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("limit_bytes", [0, 10**9])
def test_the_bytes_are_the_same_with_and_without_spilling(limit_bytes: int, tmp_path: Path) -> None:
    operator = Operator("a string, b int")
    plain = StateTable(MemoryBase())
    spill = OverlaySpill(limit_bytes=limit_bytes, folder=lambda: tmp_path / "runs")
    spilled = StateTable(MemoryBase(), spill=spill)
    for table in (plain, spilled):
        probe = operator.by_column(table, 0)
        keys = operator.all_keys()
        rng = np.random.default_rng(5)
        for _ in range(10):
            which = keys.take(rng.integers(0, len(keys), 6))
            numbers = rng.integers(0, 9, 6)
            texts = pa.array([str(n) for n in numbers])
            probe.value.put(which, [numbers, texts])
            table.relieve()
            probe.map.put(which, [texts, numbers.astype(np.int32)], [numbers, texts])
            probe.list.append(which, {"d": numbers.astype(np.float64), "n": numbers.astype("i4")})
            table.relieve()
            probe.timers.register(which, numbers)
            probe.map.delete(which, [texts, numbers[::-1].astype(np.int32)])
            probe.list.delete(which.take([0]))
            probe.timers.delete(which, 3)
            table.relieve()
    one, other = plain.freeze(0), spilled.freeze(0)
    assert other.spilled is (limit_bytes == 0)
    assert one.sorted() == other.sorted()
    encoded = [encode_frozen(each, lambda: tmp_path / "delta") for each in (one, other)]
    assert encoded[0].data is not None
    if limit_bytes:
        assert encoded[0].data == encoded[1].data
    else:
        found = decode_delta((tmp_path / "delta").read_bytes())
        assert (found.keys.to_pylist(), found.values.to_pylist()) == one.sorted()


# --- grouping -------------------------------------------------------------------------------------


@st.composite
def keyed(draw: st.DrawFn) -> tuple[Any, list[tuple[Any, ...]]]:
    """A key schema, often of one column, and keys of which many are equal; none all null."""
    schema = struct_of(draw(st.lists(types(maps=False), min_size=1, max_size=2)))
    key = st.tuples(
        *[
            present(field.dataType) if place == 0 else st.none() | present(field.dataType)
            for place, field in enumerate(schema)
        ]
    )
    distinct = draw(st.lists(key, min_size=1, max_size=5))
    return schema, draw(st.lists(st.sampled_from(distinct), max_size=20))


@given(keyed(), st.booleans())
def test_the_quick_grouping_is_the_grouping_by_encoded_keys(case: Any, chunked: bool) -> None:
    schema, keys = case
    arrays_ = to_arrow(schema, keys)
    codec = KeyCodec(schema)
    encoded = codec.encode_arrow(arrays_)
    # Any number will do that is the key's own.
    groups = np.array([sum(key) % 5 for key in encoded.to_pylist()], np.uint16)
    table = pa.table([*arrays_, pa.array(range(len(keys)))], [*schema.names, "row"])
    if chunked and len(keys) > 2:
        table = pa.concat_tables([table.slice(0, 2), table.slice(2)])
    places = tuple(range(len(schema.fields)))
    quick = group_part(Part(table, groups), codec.encode_arrow, places)
    slow = group_rows(table, encoded, groups)
    assert quick is not None
    assert quick.full.to_pylist() == slow.full.to_pylist()
    assert quick.starts.tolist() == slow.starts.tolist()
    assert quick.rows.column("row").to_pylist() == slow.rows.column("row").to_pylist()
    expected: dict[bytes, list[int]] = {}
    full = [
        g.to_bytes(2, "big") + key
        for g, key in zip(groups.tolist(), encoded.to_pylist(), strict=True)
    ]
    for row, key in enumerate(full):
        expected.setdefault(key, []).append(row)
    assert quick.full.to_pylist() == sorted(expected)
    assert quick.rows.column("row").to_pylist() == [
        row for key in sorted(expected) for row in expected[key]
    ]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0.0, -0.0, float("nan"), -float("nan"), 0.0]),
        pa.array([0.0, -0.0, float("nan"), 1.0, 0.0], pa.float32()),
    ],
    ids=["double", "float"],
)
def test_zeros_are_one_key_and_nans_are_one(column: pa.Array) -> None:
    kind = {"double": "double", "float": "float"}[str(column.type)]
    from statebackend.operators.declared_states import parse_schema

    codec = KeyCodec(parse_schema(f"k {kind}", "the key"))
    table = pa.table([column, pa.array(range(5))], ["k", "row"])
    groups = group_part(Part(table, np.zeros(5, np.uint16)), codec.encode_arrow, (0,))
    assert groups is not None
    numbers = groups.rows.column("row").to_pylist()
    ends = groups.starts.tolist()
    found = sorted(numbers[a:b] for a, b in pairwise(ends))
    assert found == ([[0, 1, 4], [2, 3]] if kind == "double" else [[0, 1, 4], [2], [3]])
