"""Every kind of state against plain dicts, through the real pieces: cells, overlay, delta, RocksDB.

A machine runs epochs as a subtask does (load keys, operate, freeze, encode, apply), and at any
moment restores, reopens, repeats or gives up. After every step each cell reads what the model
holds, and a scan of all state is, byte for byte, what the documented layout says.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)
from pyspark.sql import types as T

from snapshot.formats.delta import Delta, decode_delta, encode_delta
from snapshot.formats.lineage_digest import chain, chain_start
from statebackend.errors import ValueMismatchError
from statebackend.rocks.store import Marker, RocksSettings, RocksStore
from statebackend.schema.codec import codec_for
from statebackend.schema.fixed_rows import FixedCodec
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.msgpack_rows import MsgpackCodec
from statebackend.state.cells import KeyCursor, ListCell, MapCell, ValueCell
from statebackend.state.table import FrozenOverlay, StateTable, state_prefix

SMALL = RocksSettings(block_cache_bytes=1 << 20, write_buffer_bytes=1 << 20)
# RocksDB syncs its files at every open and close; what a crash leaves is not the question here.
MEMORY_DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
Row = tuple[Any, ...]
Truth = dict[tuple[str, int], Any]


def _schema(*fields: tuple[str, T.DataType]) -> T.StructType:
    return T.StructType([T.StructField(name, dtype) for name, dtype in fields])


FIXED = codec_for(_schema(("n", T.LongType()), ("x", T.DoubleType()), ("b", T.BooleanType())))
MIXED = codec_for(_schema(("text", T.StringType()), ("many", T.ArrayType(T.IntegerType()))))
FIXED_ROWS: list[Row] = [(0, 0.0, False), (-1, 1.5, None), (2**63 - 1, None, True), (None,) * 3]
MIXED_ROWS: list[Row] = [("", []), ("ä\0z", [1, None, -7]), (None, None), ("x" * 300, [2**31 - 1])]

# Neighbours in every respect: one key a prefix of another, bytes of 0 and 0xff, group edges.
KEYS = KeyCodec(_schema(("name", T.StringType()), ("part", T.LongType())))
GROUPED: list[tuple[int, Row]] = [
    (0, ("", 0)),
    (0, ("a", None)),
    (0, ("a", -1)),
    (1, ("ab", 255)),
    (255, ("a", -1)),
    (256, ("\0", 1)),
    (32767, ("ÿ" * 3, 2**63 - 1)),
]
POSITIONS = sorted(
    (group.to_bytes(2, "big"), KEYS.encode(key), i) for i, (group, key) in enumerate(GROUPED)
)
ORDERED = [i for _, _, i in POSITIONS]

LONG_KEYS = KeyCodec(_schema(("k", T.LongType())))
LOOSE_KEYS = KeyCodec(_schema(("s", T.StringType()), ("d", T.DoubleType())), allow_all_null=True)
LONG_MAP_KEYS: list[Row] = [(0,), (-1,), (255,), (2**63 - 1,)]
LOOSE_MAP_KEYS: list[Row] = [(None, None), ("", None), ("a", 1.0), ("a\xff", -2.5)]


@dataclass(frozen=True)
class Declared:
    kind: str
    state_id: int
    codec: Any
    rows: list[Row]
    map_codec: Any = None
    map_keys: list[Row] = field(default_factory=list)


STATES = {
    "fixed value": Declared("value", 1, FIXED, FIXED_ROWS),
    "mixed value": Declared("value", 2, MIXED, MIXED_ROWS),
    "fixed list": Declared("list", 255, FIXED, FIXED_ROWS),
    "mixed list": Declared("list", 256, MIXED, MIXED_ROWS),
    "fixed map": Declared("map", 257, FIXED, FIXED_ROWS, LOOSE_KEYS, LOOSE_MAP_KEYS),
    "mixed map": Declared("map", 65535, MIXED, MIXED_ROWS, LONG_KEYS, LONG_MAP_KEYS),
}


@dataclass(frozen=True)
class Step:
    """One call on one cell for one key; rows and map keys by their place in the domain."""

    key: int
    state: str
    action: str
    rows: tuple[int, ...]
    map_key: int


ACTIONS = {
    "value": ["update", "clear", "refused"],
    "list": ["append", "append", "extend", "put", "clear", "refused"],
    "map": ["update", "update", "remove", "clear", "refused"],
}


@st.composite
def _steps(draw: st.DrawFn, names: list[str]) -> list[Step]:
    name = draw(st.sampled_from(names))
    rows = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
    return [
        Step(
            draw(st.sampled_from([1, 1, 1, 4, 4, 0, 2, 3, 5, 6])),
            name,
            draw(st.sampled_from(ACTIONS[STATES[name].kind])),
            draw(rows),
            draw(st.integers(0, 3)),
        )
        for _ in range(draw(st.integers(1, 6)))
    ]


class Attempt:
    """One attempt at an epoch: a fresh table, cursor and cells over a store, as a task makes."""

    def __init__(self, store: RocksStore, names: Iterable[str]) -> None:
        self.table = StateTable(store)
        self.cursor = KeyCursor()
        self.cells: dict[str, Any] = {}
        for name in names:
            one = STATES[name]
            head = (self.cursor, self.table, name, one.state_id)
            if one.kind == "map":
                self.cells[name] = MapCell(*head, one.map_codec, one.codec)
            else:
                self.cells[name] = {"value": ValueCell, "list": ListCell}[one.kind](
                    *head, one.codec
                )

    def load(self, keys: Iterable[int]) -> list[int]:
        """Load keys as the operator does: by group, then by encoded key."""
        wanted = set(keys)
        chosen = [i for i in ORDERED if i in wanted]
        self.cursor.load(
            [GROUPED[i][0].to_bytes(2, "big") for i in chosen],
            [KEYS.encode(GROUPED[i][1]) for i in chosen],
        )
        return chosen

    def run(self, steps: list[Step], truth: Truth) -> Truth:
        """A chunk: its keys in their order, the steps of one key in theirs; what is true after."""
        truth = dict(truth)
        for index, key in enumerate(self.load(step.key for step in steps)):
            self.cursor.index = index
            for step in steps:
                if step.key == key:
                    self._one(step)
                    _in_model(truth, step)
                    self.check(step.state, truth.get((step.state, key)))
        self.cursor.index = -1
        return truth

    def check(self, name: str, expected: Any) -> None:
        """Every way of reading the current key's state gives what is expected."""
        one, cell = STATES[name], self.cells[name]
        assert cell.exists() is (expected is not None)
        if one.kind == "value":
            assert cell.get() == expected
        elif one.kind == "list":
            assert tuple(cell.get()) == (expected or ())
        else:
            entries = {one.map_keys[k]: row for k, row in (expected or {}).items()}
            in_order = sorted(entries, key=one.map_codec.encode)
            assert list(cell.keys()) == in_order
            assert list(cell.values()) == [entries[k] for k in in_order]
            assert list(cell.iterator()) == [(k, entries[k]) for k in in_order]
            for k in one.map_keys:
                assert cell.contains_key(k) is (k in entries)
                assert cell.get_value(k) == entries.get(k)

    def _one(self, step: Step) -> None:
        one, cell = STATES[step.state], self.cells[step.state]
        rows = [one.rows[i] for i in step.rows]
        if step.action == "refused":
            self._refused(one.kind, cell, one.map_keys[step.map_key] if one.map_keys else ())
        elif step.action == "clear":
            cell.clear()
        elif one.kind == "value":
            cell.update(rows[0])
        elif one.kind == "list":
            if step.action == "append":
                cell.append(rows[0])
            else:
                (cell.extend if step.action == "extend" else cell.put)(rows)
        elif step.action == "update":
            cell.update_value(one.map_keys[step.map_key], rows[0])
        else:
            cell.remove_key(one.map_keys[step.map_key])

    @staticmethod
    def _refused(kind: str, cell: Any, map_key: Row) -> None:
        """What does not fit is refused, and leaves everything as it was."""
        bad: Row = ("no", "such", "row", "at", "all")
        calls: dict[str, list[Any]] = {
            "value": [lambda: cell.update(bad)],
            "list": [
                lambda: cell.append(bad),
                lambda: cell.extend([bad]),
                lambda: cell.put([bad]),
                lambda: cell.put([]),
                lambda: cell.extend([]),
            ],
            "map": [
                lambda: cell.update_value(map_key, bad),
                lambda: cell.update_value((*map_key, 1), bad),
            ],
        }
        for call in calls[kind]:
            with pytest.raises(ValueMismatchError):
                call()


def _in_model(truth: Truth, step: Step) -> None:
    one, where = STATES[step.state], (step.state, step.key)
    rows = [one.rows[i] for i in step.rows]
    if step.action == "refused":
        return
    if step.action == "clear":
        truth.pop(where, None)
    elif one.kind == "value":
        truth[where] = rows[0]
    elif one.kind == "list":
        before = () if step.action == "put" else truth.get(where, ())
        truth[where] = (*before, *(rows[:1] if step.action == "append" else rows))
    else:
        entries = {k: v for k, v in truth.get(where, {}).items() if k != step.map_key}
        if step.action == "update":
            entries[step.map_key] = rows[0]
        truth[where] = entries
        if not entries:
            del truth[where]


def _as_bytes(truth: Truth) -> list[tuple[bytes, bytes]]:
    """What the layout in cells.py says that this state looks like on disk."""
    entries: dict[bytes, bytes] = {}
    for (name, key), content in truth.items():
        one = STATES[name]
        group, user_key = GROUPED[key]
        prefix = state_prefix(group, one.state_id) + KEYS.encode(user_key)
        if one.kind == "value":
            entries[prefix] = one.codec.encode(content)
        elif one.kind == "list":
            entries[prefix] = len(content).to_bytes(8, "big")
            for i, row in enumerate(content):
                entries[prefix + i.to_bytes(8, "big")] = one.codec.encode(row)
        else:
            for map_key, row in content.items():
                full = prefix + one.map_codec.encode(one.map_keys[map_key])
                entries[full] = one.codec.encode(row)
    return sorted(entries.items())


@dataclass
class Epoch:
    """An epoch that was frozen, and may not have been applied yet."""

    number: int
    frozen: FrozenOverlay | None  # None once the table it came from is gone
    delta: Delta
    truth: Truth


class StateMachine(RuleBasedStateMachine):
    names: tuple[str, ...] = tuple(STATES)

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="state-model-", dir=MEMORY_DISK))
        self.stores = 0
        self.store = self._new_store()
        self.attempt = Attempt(self.store, self.names)
        self.chunks: list[list[Step]] = []
        self.pending: list[Epoch] = []
        self.applied = Epoch(-1, None, encode_delta([], []), {})
        self.truth: Truth = {}
        self.base: Epoch | None = None
        self.since_base: list[Epoch] = []
        self.chains = {-1: chain_start("job", "op", (0, 32767))}

    def _new_store(self) -> RocksStore:
        self.stores += 1
        return RocksStore.open(str(self.root / str(self.stores)), SMALL)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)

    # --- one epoch

    @rule(data=st.data())
    def operate(self, data: st.DataObject) -> None:
        steps = data.draw(_steps(list(self.names)))
        self.truth = self.attempt.run(steps, self.truth)
        self.chunks.append(steps)

    @property
    def newest(self) -> Epoch:
        return self.pending[-1] if self.pending else self.applied

    @rule()
    def freeze(self) -> None:
        number = self.newest.number + 1
        frozen = self.attempt.table.freeze(number)
        keys, values = frozen.sorted()
        assert len(frozen) == len(keys)
        delta = encode_delta(keys, values)
        self.chains[number] = chain(self.chains[number - 1], delta.digest)
        self.pending.append(Epoch(number, frozen, delta, dict(self.truth)))
        self.since_base.append(self.pending[-1])
        self.chunks = []

    def _write(self, store: RocksStore, epoch: Epoch) -> None:
        rows = decode_delta(epoch.delta.data, digest=epoch.delta.digest, name="delta")
        marker = Marker(
            job_id="job",
            operator="op",
            key_group_start=0,
            key_group_end=32767,
            epoch=epoch.number,
            chain=self.chains[epoch.number].hex(),
        )
        store.apply(rows.keys.to_pylist(), rows.values.to_pylist(), marker)
        assert store.marker() == marker

    @precondition(lambda self: self.pending)
    @rule()
    def apply_the_oldest(self) -> None:
        epoch = self.pending.pop(0)
        self._write(self.store, epoch)
        if epoch.frozen is not None:
            self.attempt.table.applied(epoch.frozen)
        self.applied = epoch

    # --- what goes wrong, and what comes back

    def _fresh_attempt(self) -> None:
        """A new attempt over the same store: local deltas are applied, the overlay is lost."""
        while self.pending:
            self.applied = self.pending.pop(0)
            self._write(self.store, self.applied)
        self.attempt = Attempt(self.store, self.names)
        self.truth = dict(self.applied.truth)

    @rule()
    def close_and_reopen(self) -> None:
        path = self.store.path
        self.store.close()
        self.store = RocksStore.open(path, SMALL)
        marker = self.store.marker()
        assert (marker.epoch if marker else -1) == self.applied.number
        self._fresh_attempt()
        self.chunks = []

    def _again(self, chunks: list[list[Step]]) -> None:
        for steps in chunks:
            self.truth = self.attempt.run(steps, self.truth)

    @rule()
    def repeat_the_epoch(self) -> None:
        first = encode_delta(*self.attempt.table.freeze(0).sorted())
        expected, chunks = self.truth, self.chunks
        self._fresh_attempt()
        self._again(chunks)
        assert self.truth == expected
        assert encode_delta(*self.attempt.table.freeze(0).sorted()) == first
        # That freeze was only to look: do it once more, and go on.
        self._fresh_attempt()
        self._again(chunks)

    @rule()
    def give_the_epoch_up(self) -> None:
        self._fresh_attempt()
        self.chunks = []

    @precondition(lambda self: self.pending)
    @rule()
    def give_a_frozen_epoch_up(self) -> None:
        gone = self.pending.pop()
        self.since_base = [e for e in self.since_base if e is not gone]
        if self.base is not None and self.base.number >= gone.number:
            self.base = None
        self._fresh_attempt()
        self.chunks = []

    @precondition(lambda self: self.newest.number >= 0 and not self.chunks)
    @rule()
    def take_a_base(self) -> None:
        entries = list(self.attempt.table.snapshot())
        delta = encode_delta([key for key, _ in entries], [value for _, value in entries])
        self.base = Epoch(self.newest.number, None, delta, self.newest.truth)
        self.since_base = []

    @precondition(lambda self: self.base is not None)
    @rule(adopt=st.booleans())
    def restore_from_the_base_and_the_deltas_after_it(self, adopt: bool) -> None:
        assert self.base is not None
        store = self._new_store()
        self._write(store, self.base)
        assert list(store.scan()) == _as_bytes(self.base.truth)
        for epoch in self.since_base:
            self._write(store, epoch)
            assert list(store.scan()) == _as_bytes(epoch.truth)
        if adopt:
            store, self.store = self.store, store
            self.applied, self.pending = self.newest, []
            self._fresh_attempt()
            self.chunks = []
        store.close()

    # --- what always holds

    @invariant()
    def every_cell_reads_what_the_model_holds(self) -> None:
        chosen = self.attempt.load(range(len(GROUPED)))
        for index, key in enumerate(chosen):
            self.attempt.cursor.index = index
            for name in self.attempt.cells:
                self.attempt.check(name, self.truth.get((name, key)))
        self.attempt.cursor.index = -1

    @invariant()
    def a_scan_of_everything_is_what_the_layout_says(self) -> None:
        assert list(self.attempt.table.snapshot()) == _as_bytes(self.truth)

    @invariant()
    def the_store_holds_confirmed_epochs_only(self) -> None:
        assert list(self.store.scan()) == _as_bytes(self.applied.truth)


class ValueMachine(StateMachine):
    names = ("fixed value", "mixed value")


class ListMachine(StateMachine):
    names = ("fixed list", "mixed list")


class MapMachine(StateMachine):
    names = ("fixed map", "mixed map")


def _case(machine: type[StateMachine]) -> Any:
    case = machine.TestCase
    # A step costs milliseconds of RocksDB: a fraction of the profile's examples, four times.
    case.settings = settings(
        max_examples=max(1, settings.default.max_examples // 4), stateful_step_count=25
    )
    return case


TestValueState = _case(ValueMachine)
TestListState = _case(ListMachine)
TestMapState = _case(MapMachine)
TestStatesOfAllKindsTogether = _case(StateMachine)


def test_the_rows_of_both_codecs_take_part() -> None:
    assert isinstance(FIXED, FixedCodec)
    assert isinstance(MIXED, MsgpackCodec)
