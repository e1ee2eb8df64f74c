"""Value codecs: what goes in comes out, one by one and by the column; nothing else goes in."""

from __future__ import annotations

import pickle
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from statebackend.errors import (
    CorruptionError,
    FormatError,
    SchemaError,
    UnsupportedTypeError,
    ValueMismatchError,
)
from statebackend.schema.codec import RowCodec, codec_for
from statebackend.schema.fixed_rows import FixedCodec
from statebackend.schema.msgpack_rows import MsgpackCodec
from statebackend.schema.types import (
    arrow_schema,
    as_schema,
    is_fixed_width,
    schema_from_json,
)
from tests.schema.strategies import SIMPLE, same, struct_of, tables, to_arrow, types

Table = tuple[T.StructType, list[tuple[Any, ...]]]


class Money(T.UserDefinedType):
    """A user's own type."""

    @classmethod
    def sqlType(cls) -> T.DataType:
        return T.LongType()

    @classmethod
    def module(cls) -> str:
        return __name__


def _codec(*kinds: T.DataType, version: int = 0) -> RowCodec:
    return codec_for(struct_of(list(kinds)), version)


def _check(table: Table) -> None:
    schema, rows = table
    codec = codec_for(schema, 7)
    singly = [codec.encode(row) for row in rows]
    assert all(data[0] == 7 for data in singly)
    for row, data in zip(rows, singly, strict=True):
        assert same(codec.decode(data), row)
    columns = to_arrow(schema, rows)
    encoded = codec.encode_arrow(columns)
    assert encoded.to_pylist() == singly
    assert codec.encode_arrow(codec.decode_arrow(encoded)).to_pylist() == singly
    for column, back in zip(columns, codec.decode_arrow(encoded), strict=True):
        assert back.type == column.type
        back.validate(full=True)
    # Every second row missing, and a slice's offset in front.
    gaps = pa.array(
        [b"x", *(None if i % 2 else data for i, data in enumerate(singly))], pa.binary()
    )
    blank = (None,) * len(schema.fields)
    spread = codec.encode_arrow(codec.decode_arrow(gaps.slice(1))).to_pylist()
    assert spread == [codec.encode(blank) if i % 2 else data for i, data in enumerate(singly)]
    assert same(codec.decode_many([*singly, None]), [*rows, None])
    # Many rows go another way, with nulls among them or without.
    assert same(codec.decode_many(singly * 9), rows * 9)
    assert same(codec.decode_many([None, *singly] * 9), [None, *rows] * 9)
    assert codec.encode_many(rows * 2) == singly * 2
    for row, data in zip(rows, singly, strict=True):
        assert codec.encode_many([row] * 3) == [data] * 3
        assert same(codec.decode_many([data] * 30), [row] * 30)


@given(tables(st.sampled_from(SIMPLE)))
def test_fixed_width_rows_round_trip(table: Table) -> None:
    assert isinstance(codec_for(table[0]), FixedCodec)
    _check(table)


@given(tables(types(maps=True)))
def test_rows_of_any_type_round_trip(table: Table) -> None:
    _check(table)


def test_the_codec_is_fixed_exactly_where_every_field_is() -> None:
    assert isinstance(_codec(*SIMPLE), FixedCodec)
    for kind in (T.StringType(), T.DecimalType(19, 0), T.ArrayType(T.LongType())):
        assert isinstance(_codec(T.LongType(), kind), MsgpackCodec)
        assert not is_fixed_width(kind)


def test_fixed_bytes_are_those_of_the_format() -> None:
    codec = _codec(T.LongType(), T.BooleanType(), T.DecimalType(5, 2), T.DateType(), version=3)
    data = codec.encode((-2, None, Decimal("1.5"), date(1970, 1, 2)))
    words = ["03", "02", "feffffffffffffff", "00", "9600000000000000", "01000000"]
    assert data.hex() == "".join(words)
    nine = _codec(*[T.ByteType()] * 9)
    assert (
        nine.encode((None, 1, 2, 3, 4, 5, 6, 7, None)).hex() == "00" + "0101" + "000102030405060700"
    )


def test_msgpack_bytes_are_those_of_the_format() -> None:
    kinds = [
        T.LongType(),
        T.StringType(),
        T.DecimalType(20, 0),
        T.MapType(T.DateType(), T.ByteType()),
    ]
    data = _codec(*kinds, version=1).encode((1, "a", Decimal(-129), {date(1970, 1, 2): None}))
    assert data.hex() == "01" + "94" + "01" + "a161" + "c402ff7f" + "91" + "9201c0"


def test_one_bad_value_is_found_among_many_and_named() -> None:
    for codec in (_codec(*[T.LongType()] * 3), _codec(T.LongType(), T.LongType(), T.StringType())):
        with pytest.raises(ValueMismatchError, match=r"Field 'f1' is bigint .*type str"):
            codec.encode((1, "a", "b"))


@pytest.mark.parametrize("companion", [T.LongType(), T.StringType()], ids=str)
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (T.LongType(), True),
        (T.LongType(), np.bool_(True)),
        (T.LongType(), 1.0),
        (T.LongType(), 1 << 63),
        (T.LongType(), np.uint64(1 << 63)),
        (T.IntegerType(), -(1 << 31) - 1),
        (T.ShortType(), np.int64(1 << 15)),
        (T.ByteType(), 128),
        (T.DoubleType(), False),
        (T.DoubleType(), Decimal(1)),
        (T.DoubleType(), 10**400),
        (T.FloatType(), 1e39),
        (T.BooleanType(), 0),
        (T.DateType(), datetime(2020, 1, 1)),
        (T.TimestampType(), 5),
        (T.TimestampNTZType(), datetime(2020, 1, 1, tzinfo=UTC)),
        (T.DayTimeIntervalType(), 5),
        (T.DecimalType(5, 2), 1.5),
        (T.DecimalType(5, 2), Decimal("1.005")),
        (T.DecimalType(5, 2), Decimal("Infinity")),
        (T.StringType(), 1),
        (T.StringType(), "\ud800"),
        (T.BinaryType(), "a"),
        (T.ArrayType(T.LongType()), (1, "a")),
        (T.ArrayType(T.LongType(), containsNull=False), [None]),
        (T.ArrayType(T.LongType()), {1}),
        (T.MapType(T.StringType(), T.LongType()), {"a": "b"}),
        (T.MapType(T.StringType(), T.LongType()), {None: 1}),
        (T.MapType(T.StringType(), T.LongType()), [("a", 1)]),
        (struct_of([T.LongType()]), (1, 2)),
        (struct_of([T.LongType()]), {"f0": 1, "x": 1}),
        (struct_of([T.LongType()]), {"f0": "a"}),
        (T.StructType([T.StructField("x", T.LongType(), nullable=False)]), (None,)),
    ],
    ids=repr,
)
def test_a_value_that_does_not_fit_is_refused_by_name(
    kind: T.DataType, value: Any, companion: T.DataType
) -> None:
    codec = _codec(kind, companion)
    for _ in range(2):  # the second time, the types are known
        with pytest.raises(ValueMismatchError, match="Field 'f0"):
            codec.encode((value, None))


@pytest.mark.parametrize("kind", [T.LongType(), T.StringType()], ids=str)
def test_a_null_where_none_may_be_is_refused(kind: T.DataType) -> None:
    codec = codec_for(T.StructType([T.StructField("x", kind, nullable=False)]))
    with pytest.raises(ValueMismatchError, match=r"'x' is .* and not nullable"):
        codec.encode((None,))
    with pytest.raises(ValueMismatchError, match="not nullable, but its column has 1 null"):
        codec.encode_arrow([pa.array([None], pa.null())])


@pytest.mark.parametrize("kind", [T.LongType(), T.StringType()], ids=str)
@pytest.mark.parametrize("row", [5, "a", [5, 6], {"f0": 1}, (), [], (1, 2), None], ids=repr)
def test_what_is_not_a_tuple_of_the_right_length_is_refused(kind: T.DataType, row: Any) -> None:
    with pytest.raises(ValueMismatchError, match="cannot be made of"):
        _codec(kind).encode(row)


def test_numbers_of_numpy_and_ints_for_floats_are_taken() -> None:
    kinds = (T.LongType(), T.DoubleType(), T.FloatType(), T.BooleanType())
    given_ = (np.int32(1), 2, np.float64(0.5), np.bool_(False))
    for extra, more in (((), ()), ((T.StringType(),), (np.str_("x"),))):
        codec = _codec(*kinds, *extra)
        back = codec.decode(codec.encode((*given_, *more)))
        assert same(back, (1, 2.0, 0.5, False, *map(str, more)))
        assert same(codec.decode(codec.encode(T.Row(*given_, *more))), back)


def test_floats_are_rounded_to_single_precision_by_either_codec() -> None:
    for codec, rest in (
        (_codec(T.FloatType()), ()),
        (_codec(T.FloatType(), T.StringType()), ("",)),
    ):
        assert codec.decode(codec.encode((0.1, *rest)))[0] == float(np.float32(0.1))


def test_what_is_stored_does_not_follow_the_callers_objects() -> None:
    codec = _codec(T.ArrayType(T.LongType()), T.BinaryType())
    numbers, blob = [1, 2], bytearray(b"ab")
    data = codec.encode((numbers, blob))
    numbers.append(3)
    blob[0] = 0
    assert codec.decode(data) == ([1, 2], b"ab")


@pytest.mark.parametrize("kind", [T.IntegerType(), T.StringType()], ids=str)
def test_one_bad_row_among_many_is_found_and_named(kind: T.DataType) -> None:
    codec = _codec(T.IntegerType(), kind)
    good = (1, 2 if isinstance(kind, T.IntegerType) else "2")
    for bad, named in (
        ((1 << 31, good[1]), "'f0' is int .* out of range"),
        (("x", good[1]), "'f0' is int .* type str"),
        ((1, 1.5), "'f1' is .* type float"),
        ((1,), "cannot be made of 1 values"),
        (5, "cannot be made of a int"),
    ):
        for rows in ([good] * 40 + [bad], [bad] * 2):
            with pytest.raises(ValueMismatchError, match=named):
                codec.encode_many(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [T.LongType(), T.StringType()], ids=str)
@pytest.mark.parametrize("version", [0, 127, 128, 255])
def test_one_damaged_row_among_many_is_refused(kind: T.DataType, version: int) -> None:
    codec, other = _codec(kind, version=version), _codec(kind, version=5)
    value = 300 if isinstance(kind, T.LongType) else "abc"
    good = codec.encode((value,))
    assert codec.decode_many([good] * 40) == [(value,)] * 40
    for damaged in (b"", good[:1], good[:-1], good + b"x", good + good):
        with pytest.raises(CorruptionError):
            codec.decode_many([good] * 40 + [damaged])
    # Together they are as long as two rows, and made of the same bytes.
    with pytest.raises(CorruptionError):
        codec.decode_many([good[:-1], good[-1:] + good] * 20)
    with pytest.raises(FormatError, match="schema version 5"):
        codec.decode_many([good] * 40 + [other.encode((value,))])


def test_rows_of_every_kind_of_tuple_encode_alike() -> None:
    for kind in (T.LongType(), T.StringType()):
        codec = _codec(kind)
        value = 1 if isinstance(kind, T.LongType) else "1"
        data = codec.encode((value,))
        rows: list[Any] = [(value,), T.Row(value), T.Row(f0=value), [value]]
        assert codec.encode_many(rows) == [data] * 4
        assert codec.encode_many([rows[1]] * 2) == [data] * 2
    assert codec.encode_many([]) == []
    assert codec.decode_many([]) == []


def test_nested_structs_come_back_as_rows_with_names() -> None:
    codec = _codec(struct_of([T.LongType(), T.ArrayType(struct_of([T.StringType()]))]))
    (back,) = codec.decode(codec.encode(([1, [("a",), None]],)))
    assert back == T.Row(f0=1, f1=[T.Row(f0="a"), None])
    assert back.f1[0].f0 == "a"


def test_more_combinations_of_nulls_than_are_remembered_still_encode() -> None:
    for kinds in ([T.LongType()] * 9, [T.StringType()] * 9):
        codec = _codec(*kinds)
        one = 1 if isinstance(kinds[0], T.LongType) else "1"
        for bits in range(512):
            row = tuple(one if bits >> i & 1 else None for i in range(9))
            assert codec.decode(codec.encode(row)) == row


@pytest.mark.parametrize("kind", [T.LongType(), T.StringType()], ids=str)
def test_rows_of_another_version_or_damaged_rows_are_refused(kind: T.DataType) -> None:
    codec, other = _codec(kind, version=1), _codec(kind, version=2)
    value = 1 if isinstance(kind, T.LongType) else "abc"
    data = other.encode((value,))
    with pytest.raises(FormatError, match=r"schema version 2 .* codec of version 1"):
        codec.decode(data)
    with pytest.raises(FormatError, match="schema version 2"):
        codec.decode_arrow(pa.array([codec.encode((value,)), data], pa.binary()))
    for damaged in (b"", data[:1], data[:-1], data + b"x"):
        with pytest.raises(CorruptionError):
            other.decode(damaged)
        with pytest.raises(CorruptionError):
            other.decode_arrow(pa.array([damaged], pa.binary()))


def test_columns_that_do_not_fit_are_refused() -> None:
    codec = _codec(T.IntegerType(), T.TimestampType())
    good = pa.array([1], pa.int32())
    with pytest.raises(ValueMismatchError, match="'f0' is int, its column is int64"):
        codec.encode_arrow([pa.array([1], pa.int64()), good])
    with pytest.raises(ValueMismatchError, match="'f1' is timestamp"):
        codec.encode_arrow([good, pa.array([1], pa.timestamp("us"))])
    with pytest.raises(ValueMismatchError, match="would lose data"):
        codec.encode_arrow([good, pa.array([1], pa.timestamp("ns", "UTC"))])
    tokyo = pa.array([1_000_000], pa.timestamp("us", "Asia/Tokyo"))
    seconds = pa.array([1], pa.timestamp("s", "UTC"))
    assert codec.encode_arrow([good, tokyo]) == codec.encode_arrow([good, seconds])


@pytest.mark.parametrize(
    "kind",
    [
        T.YearMonthIntervalType(),
        T.CalendarIntervalType(),
        T.CharType(3),
        T.VarcharType(3),
        Money(),
    ],
    ids=str,
)
def test_types_without_a_place_in_state_are_refused_by_name(kind: T.DataType) -> None:
    for outer in (kind, T.ArrayType(kind), struct_of([kind]), T.MapType(T.StringType(), kind)):
        with pytest.raises(UnsupportedTypeError, match=r"Field 'f1"):
            _codec(T.LongType(), outer)


def test_impossible_schemas_are_refused() -> None:
    with pytest.raises(SchemaError, match="empty"):
        codec_for(T.StructType())
    with pytest.raises(SchemaError, match="two fields named"):
        codec_for(T.StructType([T.StructField("a", T.LongType())] * 2))
    for version in (-1, 256):
        with pytest.raises(SchemaError, match="one byte"):
            _codec(T.LongType(), version=version)


@pytest.mark.parametrize("kind", [T.LongType(), T.StringType()], ids=str)
def test_a_codec_travels(kind: T.DataType) -> None:
    codec = _codec(kind, version=9)
    other = pickle.loads(pickle.dumps(codec))
    assert (type(other), other.schema, other.version) == (type(codec), codec.schema, 9)
    assert other.encode((None,)) == codec.encode((None,))


def test_no_rows_are_no_rows() -> None:
    nested = [T.MapType(T.DateType(), T.ArrayType(struct_of([T.StringType(), T.DateType()])))]
    for kinds in (SIMPLE, nested):
        codec = _codec(*kinds)
        empty = codec.encode_arrow(to_arrow(struct_of(kinds), []))
        assert empty.to_pylist() == []
        columns = codec.decode_arrow(empty)
        assert [c.type for c in columns] == [f.type for f in arrow_schema(struct_of(kinds))]


# --- schemas -----------------------------------------------------------------------------------


@given(types(maps=True))
def test_schemas_survive_json(kind: T.DataType) -> None:
    schema = struct_of([kind])
    assert schema_from_json(schema.json()) == schema


def test_json_that_is_no_schema_is_refused() -> None:
    for text in ("", "{}", "[1]", '{"type":"struct"}', '"long"'):
        with pytest.raises(SchemaError, match="not the JSON of a schema"):
            schema_from_json(text)


def test_a_bare_type_becomes_a_schema_of_one_field() -> None:
    schema = as_schema(T.LongType(), "n")
    assert schema == T.StructType([T.StructField("n", T.LongType())])
    assert as_schema(schema) is schema


def test_intervals_keep_every_microsecond() -> None:
    codec = _codec(T.DayTimeIntervalType())
    for value in (timedelta(microseconds=-1), timedelta(days=-1, seconds=5, microseconds=7)):
        assert codec.decode(codec.encode((value,))) == (value,)
