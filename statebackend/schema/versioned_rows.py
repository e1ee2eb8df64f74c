"""Rows of several versions of one schema: written in the newest, read in any.

Byte 0 of a row is the number of its schema in the state's history. Rows are not rewritten when the
schema changes: each is migrated when it is read, and written anew when it is written anyway. Where
all rows are of the newest version nothing more is done than by that version's own codec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from statebackend.errors import FormatError
from statebackend.schema.codec import RowCodec, codec_for
from statebackend.schema.evolution import Evolution, resolve

__all__ = ["VERSIONS_MAX", "VersionedCodec", "codec_of_versions"]

VERSIONS_MAX: Final = 256  # version is one byte

Row = tuple[Any, ...]


def codec_of_versions(schemas: Sequence[T.StructType]) -> RowCodec:
    """The codec of a state whose schema was each of these, one after the other.

    Args:
        schemas: the version is the index; the last one is in force.

    Raises:
        SchemaError, UnsupportedTypeError: as `codec_for`.
    """
    return codec_for(schemas[0]) if len(schemas) == 1 else VersionedCodec(schemas)


class _Older(NamedTuple):
    """How rows of one earlier version are read: its codec, then each step up to the newest."""

    codec: RowCodec
    steps: list[Evolution]

    def row(self, data: bytes) -> Row:
        return self.migrated(self.codec.decode(data))

    def migrated(self, row: Row) -> Row:
        for step in self.steps:
            row = step.row(row)
        return row

    def columns(self, values: pa.BinaryArray) -> list[pa.Array]:
        columns = self.codec.decode_arrow(values)
        for step in self.steps:
            columns = step.columns(columns)
        return columns


class VersionedCodec:
    """The `RowCodec` of a state that has had other schemas before.

    Args:
        schemas: oldest first, at least two; each follows from the one before (see `resolve`).
    """

    decode: Callable[[bytes], Row]

    def __init__(self, schemas: Sequence[T.StructType]) -> None:
        self._schemas = tuple(schemas)
        self._newest = newest = codec_for(schemas[-1], len(schemas) - 1)
        self._older: dict[int, _Older] = {}
        self.schema, self.version = newest.schema, newest.version
        self.encode, self.encode_many = newest.encode, newest.encode_many
        self.encode_arrow = newest.encode_arrow
        self.decode = self._decoder()

    def __reduce__(self) -> tuple[object, ...]:
        return VersionedCodec, (self._schemas,)

    def __repr__(self) -> str:
        return f"VersionedCodec({self.schema.simpleString()}, version={self.version})"

    def _decoder(self) -> Callable[[bytes], Row]:
        decode, prefix, older = self._newest.decode, bytes([self.version]), self._older_row

        def decode_any(data: bytes, /) -> Row:
            return decode(data) if data.startswith(prefix) else older(data)

        return decode_any

    def _older_row(self, data: bytes) -> Row:
        if not data:
            return self._newest.decode(data)  # says what is wrong
        return self._of(data[0]).row(data)

    def _of(self, version: int) -> _Older:
        found = self._older.get(version)
        if found is None:
            if version > self.version:
                raise FormatError(
                    f"A row of schema version {version} is in a state whose newest version is "
                    f"{self.version} ({self.schema.simpleString()}).",
                    todo="Restore from the durable copy; the local one is damaged.",
                )
            later = self._schemas[version:]
            steps = [resolve(old, new) for old, new in pairwise(later)]
            found = self._older[version] = _Older(codec_for(later[0], version), steps)
        return found

    def decode_many(self, rows: Sequence[bytes | None]) -> list[Row | None]:
        """`decode` for each of many: see `RowCodec.decode_many`."""
        try:
            return self._newest.decode_many(rows)
        except FormatError:  # some are older, or damaged: that is said below
            return self._mixed(rows)

    def _mixed(self, rows: Sequence[bytes | None]) -> list[Row | None]:
        places: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            if row is not None:
                # A row of no bytes is nobody's: the newest codec refuses it.
                places.setdefault(row[0] if row else self.version, []).append(place)
        decoded: list[Row | None] = [None] * len(rows)
        for version, where in places.items():
            some = [rows[place] for place in where]
            if version == self.version:
                found = self._newest.decode_many(some)
            else:
                older = self._of(version)
                found = [one and older.migrated(one) for one in older.codec.decode_many(some)]
            for place, one in zip(where, found, strict=True):
                decoded[place] = one
        return decoded

    def decode_arrow(self, values: pa.BinaryArray) -> list[pa.Array]:
        """One array for each field: see `RowCodec.decode_arrow`."""
        try:
            return self._newest.decode_arrow(values)
        except FormatError:
            return self._mixed_columns(values)

    def _mixed_columns(self, values: pa.BinaryArray) -> list[pa.Array]:
        versions = self._versions(values)
        parts: list[list[pa.Array]] = []
        place, rows = np.zeros(len(values), np.int64), 0
        for version in np.unique(versions[versions >= 0]).tolist():
            where = np.flatnonzero(versions == version)
            some = values.take(pa.array(where))
            newest = self._newest if version == self.version else None
            parts.append(newest.decode_arrow(some) if newest else self._of(version).columns(some))
            place[where] = np.arange(rows, rows + len(where))
            rows += len(where)
        index = pa.array(place, mask=versions < 0)
        return [pa.concat_arrays(part).take(index) for part in zip(*parts, strict=True)]

    def _versions(self, values: pa.BinaryArray) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The first byte of each row; -1 for null. A row of no bytes has the newest version."""
        values = values.cast(pa.binary())
        _, offset_buffer, data = values.buffers()
        bounds = np.frombuffer(offset_buffer, np.int32)[values.offset :][: len(values) + 1]
        content = np.frombuffer(data or b"", np.uint8)
        versions = np.full(len(values), self.version, np.int64)
        filled = np.diff(bounds) > 0
        versions[filled] = content[bounds[:-1][filled]]
        if values.null_count:
            versions[~values.is_valid().to_numpy(zero_copy_only=False)] = -1
        return versions
