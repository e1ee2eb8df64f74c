"""Key bytes: canonical, self-delimiting, the same one by one and by the column."""

from __future__ import annotations

import copy
import pickle
import struct
import time
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock
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
    NullKeyError,
    SchemaError,
    UnsupportedTypeError,
    ValueMismatchError,
)
from statebackend.schema.keys.key_codec import KeyCodec
from tests.schema.strategies import (
    SIMPLE,
    WIDE,
    present,
    same,
    struct_of,
    tables,
    to_arrow,
    types,
    values,
)


def _codec(*kinds: T.DataType, loose: bool = False) -> KeyCodec:
    return KeyCodec(struct_of(list(kinds)), allow_all_null=loose)


@given(tables(types(maps=False)))
def test_scalar_and_vectorised_bytes_are_the_same_and_decode_to_the_key(
    table: tuple[T.StructType, list[tuple[Any, ...]]],
) -> None:
    schema, rows = table
    codec = KeyCodec(schema, allow_all_null=True)
    singly = [codec.encode(row) for row in rows]
    assert codec.encode_arrow(to_arrow(schema, rows)).to_pylist() == singly
    for row, data in zip(rows, singly, strict=True):
        key, end = codec.decode(b"pre" + data + b"rest", 3)
        assert end == 3 + len(data)
        assert same(key, row)
        assert codec.encode(key) == data
        if codec.width is not None:
            assert len(data) == codec.width


@given(st.data())
def test_two_keys_have_equal_bytes_exactly_if_they_are_equal(data: st.DataObject) -> None:
    schema = struct_of(data.draw(st.lists(types(maps=False), min_size=1, max_size=3)))
    codec = KeyCodec(schema, allow_all_null=True)
    row = st.tuples(*[values(f.dataType) for f in schema])
    left, right = data.draw(row), data.draw(row)
    assert (codec.encode(left) == codec.encode(right)) == same(left, right)


@given(st.sampled_from([k for k in SIMPLE if not isinstance(k, T.BooleanType)]), st.data())
def test_bytes_of_fixed_width_keys_sort_as_the_keys_do(
    kind: T.DataType, data: st.DataObject
) -> None:
    ordered = present(kind).filter(lambda value: value == value)
    left, right = data.draw(ordered), data.draw(ordered)
    codec = _codec(kind)
    assert (codec.encode((left,)) < codec.encode((right,))) == (left < right)


@pytest.mark.parametrize(
    ("kind", "value", "content"),
    [
        (T.BooleanType(), True, "01"),
        (T.ByteType(), -1, "7f"),
        (T.ShortType(), 1, "8001"),
        (T.IntegerType(), -(2**31), "00000000"),
        (T.LongType(), 2, "8000000000000002"),
        (T.FloatType(), -0.0, "80000000"),
        (T.DoubleType(), 1.0, "bff0000000000000"),
        (T.DoubleType(), -1.0, "400fffffffffffff"),
        (T.DoubleType(), float("nan"), "fff8000000000000"),
        (T.StringType(), "é", "00000002c3a9"),
        (T.BinaryType(), b"\x00", "0000000100"),
        (T.DateType(), date(1969, 12, 31), "7fffffff"),
        (T.TimestampNTZType(), datetime(1970, 1, 1, 0, 0, 1), "80000000000f4240"),
        (T.DayTimeIntervalType(), timedelta(microseconds=-1), "7fffffffffffffff"),
        (T.TimeType(), clock(0, 0, 0, 1), "80000000000003e8"),
        (T.DecimalType(9, 2), Decimal("1.5"), "80000000000000000000000000000096"),
        (T.ArrayType(T.ByteType()), [1, None], "00000002" + "0181" + "0000"),
        (struct_of([T.ByteType(), T.StringType()]), (1, None), "0181" + "0000000000"),
    ],
    ids=str,
)
def test_the_bytes_are_those_of_the_format(kind: T.DataType, value: Any, content: str) -> None:
    assert _codec(kind).encode((value,)).hex() == "01" + content
    size = len(_codec(kind, loose=True).encode((None,)))
    if not isinstance(kind, T.StringType | T.BinaryType | T.ArrayType | T.StructType):
        assert size == 1 + len(content) // 2
    assert _codec(kind, loose=True).encode((None,)) == bytes(size)


@pytest.mark.parametrize("kind", [T.FloatType(), T.DoubleType()], ids=str)
def test_all_nans_are_one_key_and_so_are_both_zeros(kind: T.DataType) -> None:
    codec, double = _codec(kind), isinstance(kind, T.DoubleType)
    code, word = ("<d", "<u8") if double else ("<f", "<u4")
    odd = [0xFFF8000000000001, 0x7FF0000000000001] if double else [0xFFC00001, 0x7F800001]
    raw = np.array([*odd, 0, 1 << (63 if double else 31)], word)
    column = pa.array(raw.view(code))
    nan, zero = codec.encode((float("nan"),)), codec.encode((0.0,))
    assert codec.encode_arrow([column]).to_pylist() == [nan, nan, zero, zero]
    assert codec.encode((-0.0,)) == zero
    assert struct.pack(code, codec.decode(zero)[0][0]) == bytes(len(raw[0].tobytes()))


def test_a_decimal_is_its_value_whatever_its_exponent() -> None:
    codec = _codec(T.DecimalType(9, 2))
    same_value = [Decimal("1.5"), Decimal("1.50"), Decimal("15E-1"), Decimal("1.500")]
    assert len({codec.encode((value,)) for value in same_value}) == 1
    assert codec.encode((Decimal("-0.00"),)) == codec.encode((Decimal(0),))
    assert str(codec.decode(codec.encode((Decimal("1.5"),)))[0][0]) == "1.50"


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata"])
def test_timestamps_are_local_to_python_and_microseconds_in_bytes(
    monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        codec, naive = _codec(T.TimestampType()), datetime(2024, 7, 1, 12, 30, 0, 250)
        data = codec.encode((naive,))
        micros = T.TimestampType().toInternal(naive)
        assert int.from_bytes(data[1:], "big") - (1 << 63) == micros
        assert codec.decode(data)[0] == (naive,)
        assert codec.encode((naive.astimezone(UTC),)) == data
        column = pa.array([micros], pa.timestamp("us", "Asia/Tokyo"))
        assert codec.encode_arrow([column])[0].as_py() == data
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_key_without_any_value_is_refused_with_the_filter_to_add() -> None:
    single, double = _codec(T.LongType()), _codec(T.LongType(), T.StringType())
    with pytest.raises(NullKeyError, match=r'column \'f0\'.*df.where\(col\("f0"\).isNotNull'):
        single.encode((None,))
    with pytest.raises(NullKeyError, match=r"columns 'f0', 'f1'"):
        double.encode((None, None))
    with pytest.raises(NullKeyError, match="2 rows have a null key"):
        single.encode_arrow([pa.array([None, 1, None], pa.int64())])
    longs = pa.array([None, 1, None], pa.int64())
    with pytest.raises(NullKeyError, match="A row has a null key"):
        double.encode_arrow([longs, pa.array(["a", None, None])])


def test_a_key_that_is_an_expression_is_told_without_a_filter_that_cannot_run() -> None:
    name = "CASE WHEN (n > 3) THEN user END"
    codec = KeyCodec(T.StructType([T.StructField(name, T.StringType())]))
    with pytest.raises(NullKeyError, match=r"with isNotNull\(\) of what groupBy\(\) is given"):
        codec.encode((None,))


def test_a_null_in_some_columns_is_part_of_the_key() -> None:
    codec = _codec(T.LongType(), T.StringType())
    columns = [pa.array([None, 1], pa.int64()), pa.array(["a", None])]
    rows: list[tuple[Any, ...]] = [(None, "a"), (1, None)]
    assert codec.encode_arrow(columns).to_pylist() == [codec.encode(row) for row in rows]
    assert [codec.decode(codec.encode(row))[0] for row in rows] == rows


def test_map_keys_may_be_null_altogether() -> None:
    codec = _codec(T.StringType(), loose=True)
    assert codec.decode(codec.encode((None,))) == ((None,), 5)
    assert codec.encode_arrow([pa.array([None], pa.string())]).to_pylist() == [bytes(5)]


def test_garbage_under_nulls_does_not_reach_the_bytes() -> None:
    codec = _codec(T.LongType(), T.StringType())
    validity = pa.py_buffer(b"\x01")
    longs = pa.Array.from_buffers(
        pa.int64(), 2, [validity, pa.py_buffer(np.array([1, 99], np.int64))]
    )
    offsets = pa.py_buffer(np.array([0, 1, 4], np.int32))
    texts = pa.Array.from_buffers(pa.string(), 2, [validity, offsets, pa.py_buffer(b"abcd")])
    loose = KeyCodec(codec.schema, allow_all_null=True)
    expected = [loose.encode((1, "a")), loose.encode((None, None))]
    assert loose.encode_arrow([longs, texts]).to_pylist() == expected
    inner = pa.StructArray.from_arrays([pa.array([1, 2]), pa.array(["a", "b"])], ["f0", "f1"])
    hidden = pa.StructArray.from_buffers(
        inner.type, 2, [validity], children=[inner.field(0), inner.field(1)]
    )
    nested = _codec(codec.schema, loose=True)
    expected = [nested.encode(((1, "a"),)), nested.encode((None,))]
    assert nested.encode_arrow([hidden]).to_pylist() == expected


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_other_layouts_of_a_column_give_the_same_bytes(kind: pa.DataType) -> None:
    codec, texts = _codec(T.StringType()), ["a", "", "é"]
    expected = [codec.encode((text,)) for text in texts]
    array = pa.array(texts)
    array = array.dictionary_encode() if pa.types.is_dictionary(kind) else array.cast(kind)
    assert codec.encode_arrow([array]).to_pylist() == expected
    assert codec.encode_arrow([pa.chunked_array([array[:1], array[1:]])]).to_pylist() == expected


def test_numpy_scalars_and_rows_are_taken() -> None:
    codec = _codec(T.LongType(), T.StringType(), T.DoubleType(), T.BooleanType())
    plain = codec.encode((1, "a", 2.0, True))
    assert codec.encode((np.int64(1), np.str_("a"), np.float64(2), np.bool_(True))) == plain
    assert codec.encode(T.Row(x=1, y="a", z=2, b=True)) == plain
    assert _codec(T.LongType()).encode(T.Row(x=1)) == _codec(T.LongType()).encode((1,))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (T.LongType(), True),
        (T.LongType(), 1.0),
        (T.LongType(), "1"),
        (T.LongType(), 1 << 63),
        (T.LongType(), np.uint64(1 << 63)),
        (T.IntegerType(), 1 << 31),
        (T.ByteType(), -129),
        (T.DoubleType(), True),
        (T.DoubleType(), "1.0"),
        (T.DoubleType(), 10**400),
        (T.FloatType(), 1e300),
        (T.BooleanType(), 1),
        (T.StringType(), b"a"),
        (T.StringType(), "\ud800"),
        (T.BinaryType(), "a"),
        (T.DateType(), datetime(2020, 1, 1)),
        (T.TimestampType(), date(2020, 1, 1)),
        (T.TimestampNTZType(), datetime(2020, 1, 1, tzinfo=UTC)),
        (T.TimeType(), clock(1, tzinfo=UTC)),
        (T.TimeType(3), clock(1, 2, 3, 4)),
        (T.TimeType(), datetime(2020, 1, 1)),
        (T.DecimalType(5, 2), 1),
        (T.DecimalType(5, 2), Decimal("0.001")),
        (T.DecimalType(5, 2), Decimal("1000")),
        (T.DecimalType(5, 2), Decimal("NaN")),
        (T.DecimalType(5, 2), Decimal("1E+999999")),
        (T.ArrayType(T.LongType()), "ab"),
        (T.ArrayType(T.LongType()), ["a"]),
        (struct_of([T.LongType()]), (1, 2)),
    ],
    ids=repr,
)
def test_a_value_of_another_kind_is_refused_by_name(kind: T.DataType, value: Any) -> None:
    for codec, key in ((_codec(kind), (value,)), (_codec(T.LongType(), kind), (1, value))):
        with pytest.raises(ValueMismatchError, match=r"Field 'f[01]"):
            codec.encode(key)


@pytest.mark.parametrize("key", [5, [], [1, 2], "a", (), (1, 2), None])
def test_what_is_not_a_tuple_of_the_right_length_is_refused(key: Any) -> None:
    with pytest.raises(ValueMismatchError, match=r"A key of \(f0\)"):
        _codec(T.LongType()).encode(key)


def test_columns_that_do_not_fit_are_refused() -> None:
    codec = _codec(T.LongType())
    for column in (pa.array(["a"]), pa.array([1.0]), pa.array([1], pa.uint64()), pa.array([True])):
        with pytest.raises(ValueMismatchError, match="'f0' is bigint, its column is"):
            codec.encode_arrow([column])
    with pytest.raises(ValueMismatchError, match="2 columns were given for the 1 fields"):
        codec.encode_arrow([pa.array([1]), pa.array([1])])
    with pytest.raises(ValueMismatchError, match="different lengths: 1, 2"):
        _codec(T.LongType(), T.LongType()).encode_arrow([pa.array([1]), pa.array([1, 2])])
    assert codec.encode_arrow([pa.array([1], pa.int16())])[0].as_py() == codec.encode((1,))


@pytest.mark.parametrize(
    "kind",
    [
        T.MapType(T.StringType(), T.LongType()),
        T.ArrayType(T.MapType(T.StringType(), T.LongType())),
        T.StringType("UTF8_LCASE"),
        T.VariantType(),
        T.NullType(),
        T.YearMonthIntervalType(),
        T.GeometryType(0),
        T.CharType(3),
        struct_of([T.VariantType()]),
    ],
    ids=str,
)
def test_types_that_cannot_be_keys_are_refused_when_the_codec_is_made(kind: T.DataType) -> None:
    with pytest.raises(UnsupportedTypeError, match="'f0"):
        _codec(kind)


def test_schemas_without_fields_or_with_twins_are_refused() -> None:
    with pytest.raises(SchemaError, match="empty"):
        KeyCodec(T.StructType())
    with pytest.raises(SchemaError, match="two fields named 'a'"):
        KeyCodec(T.StructType([T.StructField("a", T.LongType())] * 2))


@pytest.mark.parametrize("kind", [*SIMPLE, *WIDE, T.ArrayType(T.LongType())], ids=str)
def test_truncated_keys_are_corrupt(kind: T.DataType) -> None:
    codec = _codec(kind, loose=True)
    value = {T.StringType: "abc", T.BinaryType: b"abc", T.ArrayType: [1, 2]}.get(type(kind))
    data = codec.encode((value,))
    for end in range(len(data)):
        with pytest.raises(CorruptionError):
            codec.decode(data[:end])
    with pytest.raises(CorruptionError):
        codec.decode(b"\x07" + data[1:])


def test_a_codec_travels() -> None:
    codec = _codec(T.LongType(), loose=True)
    for other in (pickle.loads(pickle.dumps(codec)), copy.deepcopy(codec)):
        assert other.schema == codec.schema
        assert other.encode((None,)) == codec.encode((None,))


def test_no_rows_give_no_keys() -> None:
    nested = T.ArrayType(struct_of([T.StringType()]))
    for kind in (T.LongType(), T.StringType(), T.DecimalType(9, 2), T.BooleanType(), nested):
        assert _codec(kind).encode_arrow(to_arrow(struct_of([kind]), [])).to_pylist() == []
