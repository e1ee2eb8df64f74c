"""Entries of a store as rows of a table: keys and values decoded by the column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.types import Row, StructField, StructType

from statebackend.errors import CorruptionError
from statebackend.operators.vector.given_columns import arrow_fields
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.keys.key_column_decoding import decode_key_columns, decode_leading_columns
from statebackend.schema.types import schema_from_json
from statebackend.schema.versioned_rows import codec_of_versions
from statebackend.state.binary_columns import tail
from statebackend.state.blocks import binary_array
from statebackend.state.expiry_index import STAMP_BYTES, TIME_BYTES
from statebackend.state.table_base import after
from statebackend.state.time_ranges import BIAS
from statebackend.state.timers import BY_KEY, BY_TIME
from statebackend.tables.stored_job import StoredState

__all__ = ["EntryRows", "StateRows", "TimerRows", "group_prefix"]

_PREFIX_BYTES: Final = 4  # key group and state
_INDEX_BYTES: Final = 8
_TIME_BYTES: Final = 8


def group_prefix(key_group: int, state: bytes) -> bytes:
    """How the keys of a state begin in a key group."""
    return key_group.to_bytes(2, "big") + state


class EntryRows(Protocol):
    """The rows of one kind of entry.

    Attributes:
        schema: of the batches.
    """

    schema: pa.Schema

    def ranges(
        self, groups: Sequence[int], keys: Sequence[bytes] | None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Where the entries lie: of all keys of these key groups, or of some keys (in order)."""
        ...

    def batch(self, keys: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        """Their rows.

        Raises:
            CorruptionError, FormatError: the bytes are no entries of these schemas.
        """
        ...


class StateRows:
    """The rows of a state of keys: value, list or map.

    Attributes:
        value_names: of the fields of its values.

    Columns: ``key_group``; ``key``, a struct; ``index`` of a list's element, or ``map_key``;
    ``value``, a struct; ``expires_at_ms``, if the state has a TTL.
    """

    def __init__(self, state: StoredState, key_schema: StructType) -> None:
        declared = state.declared
        self._kind = declared.kind
        self._id = state.id.to_bytes(2, "big")
        self._stamped = bool(declared.ttl)
        self._keys = key_schema
        self._codec = codec_of_versions([schema_from_json(text) for text in declared.versions])
        self._map_keys = schema_from_json(declared.key_schema) if declared.key_schema else None
        self.value_names: list[str] = self._codec.schema.names
        fields = [pa.field("key_group", pa.int32()), _struct("key", key_schema)]
        if self._kind == "list":
            fields.append(pa.field("index", pa.int64()))
        if self._map_keys is not None:
            fields.append(_struct("map_key", self._map_keys))
        fields.append(_struct("value", self._codec.schema))
        if self._stamped:
            fields.append(pa.field("expires_at_ms", pa.int64()))
        self.schema = pa.schema(fields)

    def ranges(
        self, groups: Sequence[int], keys: Sequence[bytes] | None
    ) -> Iterator[tuple[bytes, bytes]]:
        """See `EntryRows`; a key comes with its key group before it."""
        if keys is None:
            prefixes = (group_prefix(group, self._id) for group in groups)
        else:
            prefixes = (key[:2] + self._id + key[2:] for key in keys)
        for prefix in prefixes:
            yield prefix, after(prefix)

    def batch(self, keys: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        """See `EntryRows`."""
        full, data = binary_array(keys), binary_array(values)
        named, places = self.named(full)
        if places is not None:
            data = data.take(places)
        expires = [pa.array(_times(data, 0))] if self._stamped else []
        arrays = [*named, self.values(data), *expires]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def named(self, full: pa.BinaryArray) -> tuple[list[pa.Array], pa.Array | None]:
        """The columns that say where entries are: key group, key, and index or map key.

        Returns:
            the columns; and which of the entries they are for, if not for all.
        """
        own: list[pa.Array] = []
        places = None
        if self._map_keys is not None:
            both = StructType(_renamed("k", self._keys) + _renamed("m", self._map_keys))
            columns = decode_key_columns(full, both, _PREFIX_BYTES)
            columns, map_columns = columns[: len(self._keys)], columns[len(self._keys) :]
            own = [_rows_of(map_columns, self._map_keys)]
        elif self._kind == "list":
            columns, left = decode_leading_columns(full, self._keys, _PREFIX_BYTES)
            elements = np.flatnonzero(left == _INDEX_BYTES)  # the others are heads of lists
            if len(elements) < len(full):
                places = pa.array(elements)
                full = full.take(places)
                columns = [column.take(places) for column in columns]
            own = [pa.array(_numbers(full, -_INDEX_BYTES).astype(np.int64))]
        else:
            columns = decode_key_columns(full, self._keys, _PREFIX_BYTES)
        return [pa.array(_groups(full)), _rows_of(columns, self._keys), *own], places

    def values(self, data: pa.BinaryArray) -> pa.StructArray:
        """The rows in what is stored; null where nothing is."""
        if self._stamped:
            data = tail(data, TIME_BYTES if self._kind == "list" else STAMP_BYTES)
        columns, fields = self._codec.decode_arrow(data), list(arrow_fields(self._codec.schema))
        mask = data.is_null() if data.null_count else None
        return pa.StructArray.from_arrays(columns, fields=fields, mask=mask)

    def decoded(self, values: Sequence[bytes | None], now_ms: int) -> list[tuple[Any, ...] | None]:
        """The rows in what is stored, as a processor has them; None of what expires by then."""
        if self._stamped:
            size = TIME_BYTES if self._kind == "list" else STAMP_BYTES
            after_ms = now_ms + BIAS
            values = [
                None
                if one is None or int.from_bytes(one[:TIME_BYTES], "big") <= after_ms
                else one[size:]
                for one in values
            ]
        return self._codec.decode_many(values)

    def map_keys(self, keys: Iterable[bytes], places: Iterable[int]) -> list[Row]:
        """The keys of a map's entries, from these places on in theirs."""
        assert self._map_keys is not None
        made, decode = Row(*self._map_keys.names), KeyCodec(self._map_keys, allow_all_null=True)
        found = (decode.decode(key, at)[0] for key, at in zip(keys, places, strict=True))
        return [made(*map(_hashable, one)) for one in found]


class TimerRows:
    """The rows of an operator's timers: ``key_group``, ``key``, ``at_ms``.

    Args:
        by_key: they are looked up by their keys, and not read in the order of their times.
    """

    def __init__(self, key_schema: StructType, *, by_key: bool) -> None:
        self._keys, self._by_key = key_schema, by_key
        self.schema = pa.schema(
            [
                pa.field("key_group", pa.int32()),
                _struct("key", key_schema),
                pa.field("at_ms", pa.int64()),
            ]
        )

    def ranges(
        self, groups: Sequence[int], keys: Sequence[bytes] | None
    ) -> Iterator[tuple[bytes, bytes]]:
        """See `EntryRows`."""
        if keys is None:
            prefixes = (group_prefix(group, BY_TIME) for group in groups)
        else:
            prefixes = (key[:2] + BY_KEY + key[2:] for key in keys)
        for prefix in prefixes:
            yield prefix, after(prefix)

    def batch(self, keys: list[bytes], values: list[bytes]) -> pa.RecordBatch:
        """See `EntryRows`."""
        full = binary_array(keys)
        if self._by_key:
            columns, _ = decode_leading_columns(full, self._keys, _PREFIX_BYTES)
            times = _times(full, -_TIME_BYTES)
        else:
            columns = decode_key_columns(full, self._keys, _PREFIX_BYTES + _TIME_BYTES)
            times = _times(full, _PREFIX_BYTES)
        arrays = [pa.array(_groups(full)), _rows_of(columns, self._keys), pa.array(times)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _hashable(value: Any) -> Any:
    """With tuples for lists: what is the key of a dict has to have a hash."""
    if isinstance(value, Row):
        return Row(*value.__fields__)(*map(_hashable, value))
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _struct(name: str, schema: StructType) -> pa.Field:
    return pa.field(name, pa.struct(list(arrow_fields(schema))))


def _rows_of(columns: list[pa.Array], schema: StructType) -> pa.StructArray:
    return pa.StructArray.from_arrays(columns, fields=list(arrow_fields(schema)))


def _renamed(letter: str, schema: StructType) -> list[StructField]:
    """The fields under names that no other schema has."""
    return [StructField(f"{letter}{n}", one.dataType) for n, one in enumerate(schema.fields)]


def _groups(full: pa.BinaryArray) -> NDArray[np.int32]:
    return _pieces(full, 0, 2).view(">u2").reshape(-1).astype(np.int32)


def _numbers(column: pa.BinaryArray, start: int) -> NDArray[np.uint64]:
    """The 8 bytes from ``start`` of each item (from its end, if that is negative)."""
    return _pieces(column, start, 8).view(">u8").reshape(-1).astype(np.uint64)


def _pieces(column: pa.BinaryArray, start: int, size: int) -> NDArray[np.uint8]:
    """So many bytes of each item, as rows."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32)[column.offset :][: len(column) + 1].astype(np.int64)
    at = bounds[:-1] + start if start >= 0 else bounds[1:] + start
    content = np.frombuffer(data or b"", np.uint8)
    if len(at) and (np.min(at) < 0 or (at + size > bounds[1:]).any()):
        raise CorruptionError(
            "An entry of the state is shorter than its kind can be.",
            todo="Run statebackend verify on the job.",
        )
    return np.ascontiguousarray(content[at[:, None] + np.arange(size)])


def _times(column: pa.BinaryArray, start: int) -> NDArray[np.int64]:
    return (_numbers(column, start) ^ np.uint64(BIAS)).view(np.int64)
