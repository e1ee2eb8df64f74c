"""What lies on a host's disk: pointers, marks, markers, names of deltas, spilled blocks."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from recovery.local.local_copies import LocalSubtask, StoreDirectory
from recovery.local.store_pool import Clock
from snapshot.formats.file_index import FileEntry, FileIndex, encode_index
from statebackend.keygroups import KeyGroupRange
from statebackend.rocks.store import Marker, RocksStore
from statebackend.schema.codec import codec_for
from statebackend.schema.ddl import parse_ddl
from statebackend.state.blocks import BlockFile
from statebackend.state.cells import ListCell
from statebackend.state.expiry_index import ListHead, list_items
from statebackend.state.key_cursor import KeyCursor
from statebackend.state.table import StateTable
from statebackend.state.table_base import MemoryBase
from tests.fuzz.mutate import damaged_bytes, damaged_value
from tests.fuzz.target import REFUSED, SAME, TAKEN, Target, refused_or
from tests.recovery.driver import new_id

__all__ = ["targets"]

MEMORY: Final = "/dev/shm"
_ROWS: Final = codec_for(parse_ddl("n BIGINT"))
_LIST: Final = b"\0\5\0\2key"  # key group, state, key


def _folder() -> Path:
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    holder = tempfile.TemporaryDirectory(prefix="statebackend-fuzz-", dir=place)
    _kept.append(holder)
    return Path(holder.name)


_kept: list[Any] = []  # until the process ends


class _Pointers:
    """A subtask's folder whose small files are damaged."""

    def __init__(self) -> None:
        self.root = _folder()
        self._number = 0
        self.local = self._subtask()
        self.whole: dict[str, bytes] = {}

    def _subtask(self) -> LocalSubtask:
        self._number += 1
        return LocalSubtask(
            str(self.root / str(self._number)),
            job="j",
            operator="op",
            key_groups=KeyGroupRange(0, 7),
            new_id=new_id,
            clock=Clock(lambda: 0.0, lambda s: None),
        )

    def make(self, rng: random.Random) -> tuple[str, bytes]:
        if self._number % 500 == 1 or not self.whole:
            self.local = self._subtask()
            held = self.local.create()
            entry = FileEntry(name="1.sst", object="base/1/g/1", size_bytes=1, digest="0" * 64)
            index = FileIndex(incarnation=held.path.name, files=[entry])
            self.whole = {
                "current": held.path.name.encode(),
                "BAD": b"why",
                "uploaded": encode_index(index),
                "holder": b"/tmp/door",
                "delta": b"5-" + b"a" * 64,
            }
            held.release()
        self._number += 1
        kind = rng.choice(list(self.whole))
        others = [
            *self.whole.values(),
            b"lease",
            b"../j",
            b".",
            b"..",
            b"/etc/passwd",
            "٣-x".encode(),
        ]
        return kind, damaged_bytes(rng, self.whole[kind], others)

    def take(self, given: tuple[str, bytes]) -> str:
        kind, data = given
        if kind == "current":
            (self.local.path / "current").write_bytes(data)
            held, reason = self.local.acquire(0.0)
            self.local.sweep(held)
            name = held.path.name
            held.release()
            assert held.path.parent == self.local.path, "a copy elsewhere"
            (self.local.path / "current").write_bytes(self.whole["current"] or b"")
            self.whole["current"] = name.encode()
            (self.local.path / "current").write_text(name)
            return REFUSED if reason else SAME
        path = self.local.path / self.whole["current"].decode()
        if kind == "delta":
            return self._delta(path, data)
        (path / kind).write_bytes(data)
        held = StoreDirectory(path, os.open(path / "lease", os.O_RDWR | os.O_CREAT))
        found = (held.bad, held.uploaded)
        held.release()
        (path / kind).unlink(missing_ok=True)  # a holder's goes with its release
        return SAME if kind == "BAD" and found[0] else TAKEN

    def _delta(self, path: Path, name: bytes) -> str:
        folder = path / "deltas"
        folder.mkdir(exist_ok=True)
        name = name.replace(b"/", b"_").replace(b"\0", b"_")[:200]
        if name in (b"", b".", b".."):
            return REFUSED
        file = folder / os.fsdecode(name)
        file.write_bytes(b"")
        held = StoreDirectory(path, os.open(path / "lease", os.O_RDWR | os.O_CREAT))
        found = held.describe().deltas
        held.drop_deltas(1 << 80)
        held.release()
        file.unlink(missing_ok=True)
        return TAKEN if found else REFUSED


def _pointer_target() -> Target:
    pointers = _Pointers()
    return Target("pointers and marks of a local copy", pointers.make, pointers.take)


def _marker_target() -> Target:
    whole = Marker(
        job_id="j", operator="op", key_group_start=0, key_group_end=7, epoch=3, chain="a" * 64
    )
    plain = msgspec.to_builtins(whole)

    def make(rng: random.Random) -> bytes:
        try:
            text = msgspec.json.encode(damaged_value(rng, plain))
        except (ValueError, TypeError):
            text = b"[" * 50_000
        return damaged_bytes(rng, text, [text]) if rng.random() < 0.5 else text

    def take(data: bytes) -> str:
        class Rows:
            def get(self, key: bytes) -> bytes:
                return data

        def read() -> str:
            return SAME if RocksStore(Rows(), "x").marker() == whole else TAKEN

        return refused_or(read)

    return Target("marker of a local store", make, take)


def _block_target() -> Target:
    folder = _folder()
    schema = pa.schema([pa.field("key", pa.binary()), pa.field("n", pa.int64())])
    blocks = BlockFile(folder / "blocks", schema)
    for count in (1, 40, 900):
        keys = pa.array([b"k%d" % n for n in range(count)], pa.binary())
        columns = [keys, pa.array(range(count), pa.int64())]
        blocks.append(pa.RecordBatch.from_arrays(columns, schema=schema))
    whole = blocks.path.read_bytes()
    honest = [blocks.read(index) for index in range(3)]

    def make(rng: random.Random) -> tuple[int, bytes]:
        return rng.randrange(3), damaged_bytes(rng, whole, [whole])

    def take(given: tuple[int, bytes]) -> str:
        index, data = given
        blocks.path.write_bytes(data)

        def read() -> str:
            assert blocks.read(index).equals(honest[index]), "damage went unnoticed"
            return SAME

        return refused_or(read)

    return Target("block that was spilled", make, take)


def _list_target() -> Target:
    """Counts and heads of lists: what is said there must not be allocated."""

    head = ListHead(0, 2, bytes(8), bytes(8)).encode()
    count = (2).to_bytes(8, "big")

    def make(rng: random.Random) -> tuple[bool, bytes]:
        ttl = rng.random() < 0.02  # it looks for a quarter of a million elements first
        whole = head if ttl else count
        return ttl, damaged_bytes(rng, whole, [whole])

    def take(given: tuple[bool, bytes]) -> str:
        ttl, data = given
        base = MemoryBase()
        table, cursor = StateTable(base), KeyCursor()
        cell = ListCell(cursor, table, "seen", 2, _ROWS)
        base.entries[_LIST] = data
        for place in range(2):
            base.entries[_LIST + place.to_bytes(8, "big")] = _ROWS.encode((place,))
        if ttl:
            return refused_or(lambda: _same(list_items(table, _LIST, ListHead.decode(data)), 2))
        cursor.load([_LIST[:2]], [_LIST[4:]])
        cursor.index = 0
        found = refused_or(lambda: _same(list(cell.get()), 2))
        refused_or(lambda: _same(cell.clear(), 0))
        return found

    return Target("count of a list state", make, take)


def _same(found: Any, count: int) -> str:
    return SAME if found and len(found) == count else TAKEN


def targets() -> list[Target]:
    """All of them."""
    return [_pointer_target(), _marker_target(), _block_target(), _list_target()]
