"""What state is moved by: stores in parts, operator state, savepoints."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from blake3 import blake3

from recovery.inspect.job_list import BEGUN_NAME
from recovery.savepoints.savepoint import (
    SAVEPOINT_NAME,
    Savepoint,
    encode_savepoint,
    read_savepoint,
)
from snapshot.formats.file_index import FileEntry, decode_index, encode_index, index_of
from snapshot.storage.memory_store import MemoryStore
from statebackend.rocks.parts_layout import Layout, Routes, decode_layout, encode_layout
from statebackend.state.operator_state import (
    StoredList,
    StoredMap,
    decode_lists,
    decode_maps,
    encode_lists,
    encode_maps,
)
from tests.fuzz.mutate import damaged_bytes, damaged_value
from tests.fuzz.target import SAME, TAKEN, Target, refused_or

__all__ = ["targets"]


def _sealed(name: str, whole: Sequence[tuple[Any, bytes]], read: Callable[[bytes], Any]) -> Target:
    """A format with a digest in it: whatever is taken means what was written."""
    others = [data for _, data in whole]

    def make(rng: random.Random) -> tuple[int, bytes]:
        number = rng.randrange(len(whole))
        return number, damaged_bytes(rng, others[number], others)

    def take(given: tuple[int, bytes]) -> str:
        number, data = given

        def judge() -> str:
            found = read(data)
            # A splice may be another whole one.
            assert found == whole[number][0] or data in others, "another meaning was believed"
            return SAME

        return refused_or(judge)

    return Target(name, make, take)


def _layouts() -> list[tuple[Layout, bytes]]:
    found = [
        Layout(parts=["p0", "p1"], routes=[(0, 0), (64, 1)]),
        Layout(parts=["p0"], routes=[(0, 0)]),
        Layout(parts=["p0", "p1", "p2"], routes=[(0, 2), (7, 0), (9, 2), (4000, 1)]),
    ]
    return [(one, encode_layout(one)) for one in found]


def _layout_meaning() -> Target:
    """Signed as if it were honest: it must still be one that a store can go by."""
    plain = msgspec.to_builtins(_layouts()[2][0])

    def make(rng: random.Random) -> bytes:
        try:
            text = msgspec.json.encode(damaged_value(rng, plain))
        except (ValueError, TypeError):
            text = b"[" * 3000
        return text

    def take(text: bytes) -> str:
        def judge() -> str:
            layout = decode_layout(_signed(text), "PARTS")
            routes = Routes(layout.routes)
            for group in (0, 1, 63, 64, 32_767):
                assert 0 <= routes.place(group.to_bytes(2, "big") + b"k") < len(layout.routes)
            assert all("/" not in part and part[0] == "p" for part in layout.parts)
            return TAKEN

        return refused_or(judge)

    return Target("layout of a store in parts, signed", make, take)


def _signed(text: bytes) -> bytes:
    return text + b"\n" + blake3(text).hexdigest().encode()


def _lists() -> list[tuple[Any, bytes]]:
    found = [
        {},
        {"offsets": StoredList("split", '{"type":"struct","fields":[]}', 0, (b"\x01a", b"\x01b"))},
        {
            "a": StoredList("union", "{}", 1, tuple(bytes([n]) * n for n in range(1, 40))),
            "b": StoredList("split", "{}", 0, ()),
        },
    ]
    return [(one, encode_lists(one)) for one in found]


def _maps() -> list[tuple[Any, bytes]]:
    found = [
        {},
        {"rules": StoredMap("{}", "{}", 0, {b"k%d" % n: b"v%d" % n for n in range(30)})},
    ]
    return [(one, encode_maps(one)) for one in found]


def _savepoints() -> list[tuple[Savepoint, bytes]]:
    one = Savepoint(
        id="s",
        uri="memory://x",
        job="clicks",
        job_id="j",
        job_uri="memory://x",
        query_id="q",
        location="/c",
        epoch=7,
        stamp_ms=1,
        watermark_ms=None,
        created_ms=2,
        operators=[],
        records=3,
        objects=4,
        size_bytes=5,
        spark=[],
    )
    found = [one, msgspec.structs.replace(one, epoch=8, watermark_ms=9)]
    return [(one, encode_savepoint(one)) for one in found]


def _read_savepoint(data: bytes) -> Savepoint:
    store = MemoryStore()
    store.put(SAVEPOINT_NAME, [data])
    store.put(BEGUN_NAME, [b"{}"])  # says nothing, which forbids nothing
    return msgspec.structs.replace(read_savepoint(store), uri="memory://x")


def _index_in_parts() -> Target:
    files = [
        FileEntry(name=f"p{n % 2}/{n:06d}.sst", object=f"base/1/g/{n}", size_bytes=n, digest="0")
        for n in range(6)
    ]
    index = index_of("id", [*files, FileEntry(name="PARTS", object="o", size_bytes=1, digest="0")])
    plain = msgspec.to_builtins(index)

    def make(rng: random.Random) -> bytes:
        try:
            changed = msgspec.convert(damaged_value(rng, plain), type(index))
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            return damaged_bytes(rng, encode_index(index))
        return encode_index(changed)

    def take(data: bytes) -> str:
        def judge() -> str:
            for file in decode_index(data, "base/x").files:
                folder, _, name = file.name.rpartition("/")
                assert "/" not in folder, file.name
                assert "\0" not in file.name, file.name
                assert folder[:1] != ".", file.name
                assert name[:1] not in ("", "."), file.name
                assert file.size_bytes >= 0, "a file that cannot be"
            return TAKEN

        return refused_or(judge)

    return Target("file index of a base in parts", make, take)


def targets() -> list[Target]:
    """All of them."""
    return [
        _sealed("layout of a store in parts", _layouts(), lambda data: decode_layout(data, "P")),
        _layout_meaning(),
        _index_in_parts(),
        _sealed("lists of an operator", _lists(), decode_lists),
        _sealed("broadcast state of an operator", _maps(), decode_maps),
        _sealed("savepoint.json", _savepoints(), _read_savepoint),
    ]
