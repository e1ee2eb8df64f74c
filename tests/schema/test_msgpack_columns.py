"""Rows that are decoded by the column are those that the codec decodes one by one."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from statebackend.errors import StateBackendError
from statebackend.schema import msgpack_rows
from statebackend.schema.msgpack_columns import decode_columns
from statebackend.schema.msgpack_rows import MsgpackCodec

EDGES = [0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**32 - 1, 2**32, 2**63 - 1]
LONGS = [*EDGES, *(-n - 1 for n in EDGES), -32, -33, None]
TEXTS = ["", "x" * 31, "x" * 32, "é" * 127, "x" * 255, "x" * 256, "x" * 70_000, None]
MOMENT = datetime.datetime(1969, 3, 4, 5, 6, 7, 8, datetime.UTC)
COLUMNS: dict[str, tuple[T.DataType, list[Any]]] = {
    "long": (T.LongType(), LONGS),
    "int": (T.IntegerType(), [n for n in LONGS if n is None or -(2**31) <= n < 2**31]),
    "byte": (T.ByteType(), [-128, 127, None]),
    "double": (T.DoubleType(), [0.0, -0.0, math.inf, 1e-300, None]),
    "float": (T.FloatType(), [0.5, -math.inf, None]),
    "flag": (T.BooleanType(), [True, False, None]),
    "text": (T.StringType(), TEXTS),
    "data": (T.BinaryType(), [None if t is None else t.encode() for t in TEXTS]),
    "day": (T.DateType(), [datetime.date(1, 1, 1), datetime.date(9999, 12, 31), None]),
    "at": (T.TimestampType(), [MOMENT, None]),
    "price": (T.DecimalType(18, 2), [Decimal("-9999999999999999.99"), Decimal("0.01"), None]),
}


def one_by_one(codec: MsgpackCodec, values: pa.BinaryArray) -> list[pa.Array] | None:
    """None: it is refused."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(msgpack_rows, "decode_columns", lambda *_: None)
        try:
            return codec.decode_arrow(values)
        except (StateBackendError, pa.ArrowException, OverflowError):
            return None


def codec_and_rows(*names: str) -> tuple[MsgpackCodec, list[bytes]]:
    # A text makes it a schema of msgpack's.
    fields = [T.StructField(name, COLUMNS[name][0]) for name in names]
    codec = MsgpackCodec(T.StructType([*fields, T.StructField("tail", T.StringType())]), 3)
    columns = [COLUMNS[name][1] for name in names]
    count = max(map(len, columns))
    rows = [(*(c[n % len(c)] for c in columns), f"t{n}") for n in range(count)]
    return codec, [codec.encode(row) for row in rows]


@pytest.mark.parametrize("names", [*((name,) for name in COLUMNS), tuple(COLUMNS)])
def test_edges_of_every_plain_type(names: tuple[str, ...]) -> None:
    codec, rows = codec_and_rows(*names)
    for some in (rows, rows[:1], [None, *rows, None], rows[-1:] * 3):
        values = pa.array(some, pa.binary())
        for part in (values, values.slice(1)):
            found = decode_columns(part, codec.schema, codec.version)
            if len(part):
                assert found is not None
                assert found == one_by_one(codec, part)
                for column in found:
                    column.validate(full=True)


def test_more_fields_than_a_short_array_has() -> None:
    fields = [T.StructField(f"f{n}", T.LongType()) for n in range(20)]
    codec = MsgpackCodec(T.StructType(fields))
    values = pa.array([codec.encode(tuple(range(20)))], pa.binary())
    found = decode_columns(values, codec.schema, 0)
    assert [column.to_pylist() for column in found or ()] == [[n] for n in range(20)]


def test_damage_is_left_to_the_codec() -> None:
    codec, rows = codec_and_rows("int", "double", "flag", "text", "price")
    rows = [row for row in rows if len(row) < 100][:2]
    for place, row in enumerate(rows):
        for at in range(len(row)):
            for bits in (0x01, 0x80, 0xFF):
                broken = bytearray(row)
                broken[at] ^= bits
                values = pa.array([*rows[:place], bytes(broken), *rows[place + 1 :]], pa.binary())
                found = decode_columns(values, codec.schema, codec.version)
                if found is not None:
                    slow = one_by_one(codec, values)
                    assert slow is not None, (at, bits)
                    assert [*map(str, found)] == [*map(str, slow)], (at, bits)
        values = pa.array([*rows[:place], row[:-1], *rows[place + 1 :]], pa.binary())
        assert decode_columns(values, codec.schema, codec.version) is None


def test_nested_fields_are_left_to_the_codec() -> None:
    schema = T.StructType([T.StructField("a", T.ArrayType(T.LongType()))])
    values = pa.array([MsgpackCodec(schema).encode(([1],))], pa.binary())
    assert decode_columns(values, schema, 0) is None
