"""Value codecs: a row of a schema to bytes and back, one by one or by the column.

Byte 0 of every encoded row is the schema's version, so that rows of several versions can lie side
by side. What follows is `statebackend.schema.fixed_rows` where every field has a fixed width, and
`statebackend.schema.msgpack_rows` (msgpack) otherwise. Both are part of the format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import types as T

from statebackend.errors import SchemaError
from statebackend.schema.fixed_rows import FixedCodec
from statebackend.schema.msgpack_rows import MsgpackCodec
from statebackend.schema.types import check_value_schema, is_fixed_width

__all__ = ["RowCodec", "codec_for"]


class RowCodec(Protocol):
    """Encodes and decodes the rows of one version of one schema.

    Python values are those of `pyspark.sql.Row`: nested structs come back as Rows (tuples and
    lists are taken too), arrays as lists, maps as dicts. Rows are positional, whatever their names.
    """

    schema: T.StructType
    version: int

    def encode(self, values: tuple[Any, ...], /) -> bytes:
        """One row's bytes; they share nothing with the values.

        Raises:
            ValueMismatchError: not a tuple, a wrong number of values, or a value that its field
                cannot hold (another type, out of range, None where not nullable).
        """
        ...

    def decode(self, data: bytes, /) -> tuple[Any, ...]:
        """The row in `data`.

        Raises:
            FormatError: a row of another schema version.
            CorruptionError: bytes that are no row of this schema.
        """
        ...

    def encode_arrow(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.BinaryArray:
        """The bytes of every row, the same as `encode` gives.

        Args:
            columns: one array for each field, in the schema's order, all of one length.

        Raises:
            ValueMismatchError: a column of another type, or nulls where the field is not nullable.
        """
        ...

    def decode_arrow(self, values: pa.BinaryArray) -> list[pa.Array]:
        """One array for each field, of `len(values)`; a null row is null in every column.

        Raises:
            FormatError, CorruptionError: as `decode`.
        """
        ...

    def encode_many(self, rows: Sequence[tuple[Any, ...]]) -> list[bytes]:
        """`encode` for each of many; faster where each field has values of one type.

        Raises:
            ValueMismatchError: as `encode`, for the first row that does not fit.
        """
        ...

    def decode_many(self, rows: Sequence[bytes | None]) -> list[tuple[Any, ...] | None]:
        """`decode` for each of many, and faster; None stays None.

        Raises:
            FormatError, CorruptionError: as `decode`, for the first row that is to blame.
        """
        ...


def codec_for(schema: T.StructType, version: int = 0) -> RowCodec:
    """The codec for rows of a schema.

    Args:
        schema: the fields, in the order of the values.
        version: the schema's version, 0 to 255.

    Raises:
        SchemaError: no fields, two of one name, or a version that does not fit into a byte.
        UnsupportedTypeError: a type that has no place in state.
    """
    if not 0 <= version <= 255:
        raise SchemaError(
            f"Schema version {version} does not fit into one byte.",
            todo="Start a new job, which numbers schemas anew.",
        )
    check_value_schema(schema)
    if all(is_fixed_width(field.dataType) for field in schema):
        return FixedCodec(schema, version)
    return MsgpackCodec(schema, version)
