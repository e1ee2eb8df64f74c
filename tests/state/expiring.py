"""A subtask whose state expires, and what is seen of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import types as T

from statebackend.rocks.store import Marker, RocksStore
from statebackend.schema.codec import codec_for
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.state.blocks import SortedRows, binary_array
from statebackend.state.cells import KeyCursor
from statebackend.state.spill import OverlaySpill
from statebackend.state.table import MemoryBase, StateTable
from statebackend.state.ttl_cells import TTL, ExpiryIndex, TtlListCell, TtlMapCell, TtlValueCell

__all__ = ["stored", "subtask"]

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
