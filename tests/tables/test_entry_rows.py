"""Rows of entries: of any types, what was stored comes back, for each kind of state."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from statebackend.errors import CorruptionError
from statebackend.operators.declared_states import StateDeclaration
from statebackend.schema.codec import codec_for
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.state.expiry_index import expiry_stamp
from statebackend.state.time_ranges import clamped
from statebackend.tables.entry_rows import StateRows
from statebackend.tables.stored_job import StoredState
from tests.schema.strategies import same, tables, to_arrow, types

KEYS = tables(types(maps=False))
VALUES = tables(types(maps=True))
Table = tuple[T.StructType, list[tuple[Any, ...]]]
ID, GROUP, TTL_MS, AT_MS = 7, 300, 60_000, 1_700_000_000_000


def stored(kind: str, value: T.StructType, map_key: T.StructType | None, ttl: bool) -> StoredState:
    declared = StateDeclaration(
        name="s",
        kind=kind,
        value_schema=value.json(),
        key_schema=map_key.json() if map_key else "",
        **({"ttl": True, "ttl_ms": TTL_MS} if ttl else {}),
    )
    return StoredState(declared, ID)


def as_structs(schema: T.StructType, rows: list[tuple[Any, ...]]) -> list[Any]:
    columns = to_arrow(schema, rows)
    names = [field.name for field in schema]
    return pa.StructArray.from_arrays(columns, names=names).to_pylist()


@pytest.mark.full  # random values of every type: some seconds
@given(KEYS, KEYS, VALUES, st.sampled_from(["value", "list", "map"]), st.booleans())
def test_what_was_stored_comes_back(
    keys: Table, map_keys: Table, values: Table, kind: str, ttl: bool
) -> None:
    count = min(len(keys[1]), len(values[1]), len(map_keys[1]))
    keys, map_keys, values = ((t[0], t[1][:count]) for t in (keys, map_keys, values))
    codec = codec_for(values[0])
    prefix = GROUP.to_bytes(2, "big") + ID.to_bytes(2, "big")

    def encoded(table: Table) -> list[bytes]:
        return KeyCodec(table[0], allow_all_null=True).encode_arrow(to_arrow(*table)).to_pylist()

    rows = codec.encode_arrow(to_arrow(*values)).to_pylist()
    stamp = expiry_stamp(clamped(AT_MS), TTL_MS)[: 8 if kind == "list" else None] if ttl else b""
    entries = []
    for n, (key, map_key) in enumerate(zip(encoded(keys), encoded(map_keys), strict=True)):
        rest = {"value": b"", "list": struct.pack(">Q", n), "map": map_key}[kind]
        if kind == "list":
            entries.append((prefix + key, b"\0" * (32 if ttl else 8)))  # the list's head
        entries.append((prefix + key + rest, stamp + rows[n]))
    state = stored(kind, values[0], map_keys[0] if kind == "map" else None, ttl)
    found = StateRows(state, keys[0]).batch([k for k, _ in entries], [v for _, v in entries])
    found.validate(full=True)
    assert found.num_rows == count
    assert found.column("key_group").to_pylist() == [GROUP] * count
    codec_back = KeyCodec(keys[0], allow_all_null=True)
    shown = [codec_back.decode(key)[0] for key in encoded(keys)]  # zeros and NaNs are made one
    assert same(found.column("key").to_pylist(), as_structs(keys[0], shown))
    assert same(found.column("value").to_pylist(), as_structs(values[0], values[1]))
    if kind == "list":
        assert found.column("index").to_pylist() == list(range(count))
    if ttl:
        assert found.column("expires_at_ms").to_pylist() == [AT_MS] * count


@pytest.mark.parametrize("kind", ["value", "list"])
def test_entries_that_are_cut_short_are_damage(kind: str) -> None:
    key = T.StructType().add("k", "long")
    rows = StateRows(stored(kind, T.StructType().add("n", "long"), None, True), key)
    whole = GROUP.to_bytes(2, "big") + ID.to_bytes(2, "big") + KeyCodec(key).encode((1,))
    index = struct.pack(">Q", 0) if kind == "list" else b""
    for damaged_key, value in ((whole[:-1], b"\0" * 30), (whole + index, b"\0\0")):
        with pytest.raises(CorruptionError):
            rows.batch([damaged_key], [value])
