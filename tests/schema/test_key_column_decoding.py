"""Keys back to columns: what was encoded comes back, and damaged bytes are said to be damaged."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql import types as T

from statebackend.errors import CorruptionError, StateBackendError
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.keys.key_column_decoding import decode_key_columns
from statebackend.schema.types import arrow_type
from tests.schema.strategies import same, struct_of, tables, to_arrow, types

TABLES = tables(types(maps=False))
Rows = list[tuple[Any, ...]]


def binary(items: list[bytes]) -> pa.BinaryArray:
    return pa.array(items, pa.binary())


def one_by_one(codec: KeyCodec, keys: list[bytes]) -> list[pa.Array]:
    """What the scalar decoder makes of keys, as columns."""
    return to_arrow(codec.schema, [codec.decode(key)[0] for key in keys])


def assert_same(got: list[pa.Array], wanted: list[pa.Array]) -> None:
    assert [one.type for one in got] == [one.type for one in wanted]
    for one, other in zip(got, wanted, strict=True):
        one.validate(full=True)
        assert len(one) == len(other)
        assert same(one.to_pylist(), other.to_pylist())


@given(TABLES, st.integers(0, 3), st.integers(0, 3))
def test_columns_come_back_as_they_were_encoded(
    table: tuple[T.StructType, Rows], before: int, after: int
) -> None:
    schema, rows = table
    codec = KeyCodec(schema, allow_all_null=True)
    keys = codec.encode_arrow(to_arrow(schema, rows)).to_pylist()
    # Bytes that no key is, which a slice cuts off.
    padded = binary([b"\xff" * 9] * before + keys + [b"\xfe"] * after)
    got = decode_key_columns(padded.slice(before, len(keys)), schema)
    assert_same(got, one_by_one(codec, keys))
    assert codec.encode_arrow(got).to_pylist() == keys


@given(TABLES, st.data())
def test_each_key_may_stand_behind_bytes_of_its_own(
    table: tuple[T.StructType, Rows], data: st.DataObject
) -> None:
    schema, rows = table
    codec = KeyCodec(schema, allow_all_null=True)
    keys = codec.encode_arrow(to_arrow(schema, rows)).to_pylist()
    fronts = [data.draw(st.binary(max_size=5)) for _ in keys]
    full = binary([front + key for front, key in zip(fronts, keys, strict=True)])
    skip = np.array([len(front) for front in fronts], np.int64)
    assert_same(decode_key_columns(full, schema, skip), one_by_one(codec, keys))
    four = binary([b"head" + key for key in keys])
    assert_same(decode_key_columns(four, schema, 4), one_by_one(codec, keys))


@st.composite
def damaged(
    draw: st.DrawFn, of: st.SearchStrategy[tuple[T.StructType, Rows]] = TABLES
) -> tuple[T.StructType, list[bytes]]:
    """Keys, of which some had bytes changed, cut off or added."""
    schema, rows = draw(of)
    codec = KeyCodec(schema, allow_all_null=True)
    keys = [bytearray(key) for key in codec.encode_arrow(to_arrow(schema, rows)).to_pylist()]
    for key in keys:
        for _ in range(draw(st.integers(0, 3))):
            place = draw(st.integers(0, max(0, len(key) - 1)))
            what = draw(st.sampled_from(["set", "cut", "add", "lengthen"]))
            if what == "set" and key:
                key[place] = draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF]))
            elif what == "cut":
                del key[place:]
            elif what == "add":
                key[place:place] = draw(st.binary(min_size=1, max_size=3))
            else:
                lengths = [0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 1 << 24, 300]
                key[place : place + 4] = struct.pack(">I", draw(st.sampled_from(lengths)))
    return schema, [bytes(key) for key in keys]


def attempted(schema: T.StructType, keys: list[bytes]) -> list[pa.Array] | None:
    """The columns; None: refused as damaged. Nothing else is ever raised."""
    try:
        return decode_key_columns(binary(keys), schema)
    except CorruptionError:
        return None


@given(damaged())
def test_damaged_keys_are_refused_and_never_read_beyond_their_end(
    case: tuple[T.StructType, list[bytes]],
) -> None:
    schema, keys = case
    together = attempted(schema, keys)
    alone = [attempted(schema, [key]) for key in keys]
    if any(one is None for one in alone):
        assert together is None
        return
    # What each row gives depends on its own bytes only.
    assert together is not None
    for place, one in enumerate(alone):
        assert one is not None
        for column, single in zip(together, one, strict=True):
            assert repr(column[place]) == repr(single[0])


# Of the others not all bytes are values of Python's, though they are values.
PLAIN = st.recursive(
    st.sampled_from([T.BooleanType(), T.LongType(), T.FloatType(), T.StringType(), T.BinaryType()]),
    lambda inner: inner.map(T.ArrayType) | st.lists(inner, min_size=1, max_size=3).map(struct_of),
    max_leaves=4,
)


@given(damaged(tables(PLAIN)))
def test_what_the_scalar_decoder_refuses_is_refused(
    case: tuple[T.StructType, list[bytes]],
) -> None:
    schema, keys = case
    codec = KeyCodec(schema, allow_all_null=True)
    for key in keys:
        try:
            bad = codec.decode(key)[1] != len(key)
        except StateBackendError:
            bad = True
        if bad:
            assert attempted(schema, [key]) is None


LONG_KEY = struct_of([T.LongType()])
TEXT_KEY = struct_of([T.StringType()])


@pytest.mark.parametrize(
    ("schema", "key"),
    [
        (LONG_KEY, b""),
        (LONG_KEY, b"\1"),
        (LONG_KEY, b"\1" + bytes(7)),
        (LONG_KEY, b"\1" + bytes(9)),
        (LONG_KEY, b"\2" + bytes(8)),
        (TEXT_KEY, b"\1\xff\xff\xff\xffabc"),
        (TEXT_KEY, b"\1\x80\0\0\0abc"),
        (TEXT_KEY, b"\1\0\0\0\4abc"),
        (TEXT_KEY, b"\1\0\0\0\2abc"),
        (TEXT_KEY, b"\1\0\0\0\1\xff"),
        (TEXT_KEY, b"\3\0\0\0\1a"),
        (struct_of([T.ArrayType(T.IntegerType())]), b"\1\xff\xff\xff\xff"),
        (struct_of([T.ArrayType(T.IntegerType())]), b"\1\0\0\0\1\1\0"),
        (struct_of([T.ArrayType(T.IntegerType())]), b"\1\0\0\0\0\0"),
        (struct_of([struct_of([T.ByteType()])]), b"\1\1"),
        (struct_of([T.DecimalType(38, 0)]), b"\1" + bytes(15)),
        (struct_of([T.BooleanType()]), b"\1"),
    ],
)
def test_bytes_that_are_no_key_are_said_to_be_damaged(schema: T.StructType, key: bytes) -> None:
    good = KeyCodec(schema).encode(_some(schema))
    for keys in ([key], [good, key], [key, good], [good, key, good, good]):
        with pytest.raises(CorruptionError, match="not keys of"):
            decode_key_columns(binary(keys), schema)


def _some(schema: T.StructType) -> tuple[Any, ...]:
    from decimal import Decimal

    values: dict[type[T.DataType], Any] = {
        T.LongType: 1,
        T.StringType: "abc",
        T.ArrayType: [1, None],
        T.StructType: (5,),
        T.DecimalType: Decimal(7),
        T.BooleanType: True,
    }
    return tuple(values[type(field.dataType)] for field in schema)


@given(TABLES)
def test_no_keys_are_no_rows_of_the_right_types(table: tuple[T.StructType, Rows]) -> None:
    schema, _ = table
    for keys in (binary([]), binary([b"x"]).slice(1), binary([b"x"]).slice(0, 0)):
        got = decode_key_columns(keys, schema, np.zeros(0, np.int64))
        assert [one.type for one in got] == [arrow_type(field.dataType) for field in schema]
        assert [len(one) for one in got] == [0] * len(schema)


@given(st.lists(st.floats() | st.none(), min_size=1))
@example([0.0, -0.0, float("nan"), -float("nan"), None, float("-inf")])
def test_zeros_and_nans_come_back_as_the_one_that_is_stored(values: list[float | None]) -> None:
    schema = struct_of([T.DoubleType()])
    codec = KeyCodec(schema, allow_all_null=True)
    keys = codec.encode_arrow([pa.array(values, pa.float64())])
    (got,) = decode_key_columns(keys, schema)
    bits = np.frombuffer(got.buffers()[1], np.uint64)
    for value, found, bit in zip(values, got.to_pylist(), bits.tolist(), strict=True):
        if value is None:
            assert found is None
        elif value != value:
            assert bit == 0x7FF8 << 48
        else:
            assert found == value
            assert bit != 1 << 63
