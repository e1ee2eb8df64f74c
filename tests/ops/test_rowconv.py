"""Between Arrow and Python: values as Spark shows them, and back without loss."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T
from pyspark.sql.conversion import ArrowTableToRowsConversion

from statebackend.errors import ValueMismatchError
from statebackend.ops.rowconv import RowWriter, arrow_schema, columns_to_python, make_rows, row_type

INNER = T.StructType([T.StructField("a", T.LongType()), T.StructField("b", T.StringType())])

# Each with what Spark shows for it; None everywhere in between.
ROUND_TRIPS: dict[str, tuple[T.DataType, list[Any]]] = {
    "boolean": (T.BooleanType(), [True, None, False]),
    "byte": (T.ByteType(), [-128, None, 127]),
    "short": (T.ShortType(), [-(2**15), None, 2**15 - 1]),
    "int": (T.IntegerType(), [-(2**31), None, 2**31 - 1]),
    "long": (T.LongType(), [-(2**63), None, 2**63 - 1]),
    "long without nulls": (T.LongType(), [-(2**63), 0, 2**63 - 1]),
    "float": (T.FloatType(), [1.5, None, -math.inf]),
    "float without nulls": (T.FloatType(), [1.5, 0.0, -math.inf]),
    "double": (T.DoubleType(), [0.1, None, 1e308]),
    "double without nulls": (T.DoubleType(), [0.1, -0.0, 5e-324]),
    "string": (T.StringType(), ["", None, "ä\0\U0001f600"]),
    "binary": (T.BinaryType(), [b"", None, b"\0\xff"]),
    "date": (T.DateType(), [date(1, 1, 1), None, date(9999, 12, 31)]),
    "ntz": (
        T.TimestampNTZType(),
        [datetime(1900, 1, 1, 0, 0, 0, 1), None, datetime(2200, 12, 31, 23, 59, 59, 999999)],
    ),
    "interval": (T.DayTimeIntervalType(), [timedelta(days=-3, microseconds=1), None, timedelta(1)]),
    "decimal": (T.DecimalType(38, 18), [Decimal("1." + "0" * 17 + "1"), None, Decimal(-7)]),
    "large decimal": (T.DecimalType(38, 0), [Decimal(10**38 - 1), None, Decimal(-(10**38) + 1)]),
    "array": (T.ArrayType(T.LongType()), [[1, None, 3], None, []]),
    "array of arrays": (T.ArrayType(T.ArrayType(T.StringType())), [[["x"], None, []], None]),
    "array of decimals": (T.ArrayType(T.DecimalType(5, 2)), [[Decimal("1.25"), None], None]),
    "map": (T.MapType(T.StringType(), T.DoubleType()), [{"a": 1.0, "b": None}, None, {}]),
    "map of dates": (T.MapType(T.DateType(), INNER), [{date(2020, 1, 1): T.Row(a=1, b="x")}, None]),
    "struct": (INNER, [T.Row(a=1, b="x"), None, T.Row(a=None, b=None)]),
    "struct in array": (T.ArrayType(INNER), [[T.Row(a=1, b=None), None], None, []]),
    "all null": (T.LongType(), [None, None]),
    "all null strings": (T.StringType(), [None, None]),
    "all null structs": (INNER, [None, None]),
}


def schema_of(dtype: T.DataType, *, nullable: bool = True) -> T.StructType:
    return T.StructType([T.StructField("c", dtype, nullable)])


def writer(schema: T.StructType) -> RowWriter:
    return RowWriter(schema, lambda: "The processor of operator 'op'")


def same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and (left == right or (left != left and right != right))


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_values_go_out_and_come_back_as_they_were(name: str) -> None:
    dtype, values = ROUND_TRIPS[name]
    schema = schema_of(dtype)
    out = writer(schema)
    out.rows.extend((value,) for value in values)
    batch = out.take()
    assert batch.schema == arrow_schema(schema)
    batch.validate(full=True)
    (column,) = columns_to_python(pa.Table.from_batches([batch]), schema)
    assert len(column) == len(values)
    for found, expected in zip(column, values, strict=True):
        assert same(found, expected), (found, expected)


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_values_look_as_pysparks_own_conversion_makes_them(name: str) -> None:
    dtype, values = ROUND_TRIPS[name]
    schema = schema_of(dtype)
    out = writer(schema)
    out.rows.extend((value,) for value in values)
    table = pa.Table.from_batches([out.take()])
    theirs = [row[0] for row in ArrowTableToRowsConversion.convert(table, schema)]
    (ours,) = columns_to_python(table, schema)
    assert all(map(same, ours, theirs))
    chunks = pa.concat_tables([table, table.slice(1)])
    (ours,) = columns_to_python(chunks, schema)
    assert all(map(same, ours, [*theirs, *theirs[1:]]))


def test_nan_stays_nan() -> None:
    out = writer(schema_of(T.DoubleType()))
    out.rows.extend([(math.nan,)])
    (column,) = columns_to_python(pa.Table.from_batches([out.take()]), schema_of(T.DoubleType()))
    assert math.isnan(column[0])


@pytest.fixture(params=["UTC", "America/New_York", "Asia/Kathmandu"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


# In New York 2020-11-01 01:00 came twice: at the first and at the second of these.
FIRST_0100, SECOND_0100 = 1_604_206_800_000_000, 1_604_210_400_000_000
MOMENTS = [0, 1, -1, 1_700_000_000_123_456, 1_710_054_000_000_000, -(10**15)]


@pytest.mark.parametrize("micros", [*MOMENTS, FIRST_0100, SECOND_0100])
def test_a_timestamp_is_what_pyspark_shows_for_it_in_this_time_zone(zone: str, micros: int) -> None:
    schema = schema_of(T.TimestampType())
    table = pa.table([pa.array([micros, None], pa.timestamp("us", "UTC"))], names=["c"])
    ((shown, none),) = columns_to_python(table, schema)
    assert none is None
    assert shown == T.TimestampType().fromInternal(micros)
    assert shown.tzinfo is None


@pytest.mark.parametrize("micros", MOMENTS)
def test_a_timestamp_that_is_handed_back_is_the_same_instant(zone: str, micros: int) -> None:
    schema = schema_of(T.TimestampType())
    out = writer(schema)
    out.rows.extend([(T.TimestampType().fromInternal(micros),), (None,)])
    assert out.take().column(0).cast(pa.int64()).to_pylist() == [micros, None]


def test_a_timestamp_with_a_zone_is_taken_as_the_instant_it_is() -> None:
    out = writer(schema_of(T.TimestampType()))
    out.rows.extend([(datetime(2024, 1, 1, 12, tzinfo=UTC),)])
    assert out.take().column(0).cast(pa.int64()).to_pylist() == [1_704_110_400_000_000]


def test_timestamps_inside_other_types_are_converted_alike(zone: str) -> None:
    inner = T.StructType([T.StructField("at", T.ArrayType(T.TimestampType()))])
    schema = schema_of(inner)
    moment = T.TimestampType().fromInternal(1_700_000_000_000_001)
    out = writer(schema)
    out.rows.extend([(T.Row(at=[moment, None]),)])
    (column,) = columns_to_python(pa.Table.from_batches([out.take()]), schema)
    assert column == [T.Row(at=[moment, None])]


def test_rows_are_made_one_by_one_with_their_names() -> None:
    rows = iter(make_rows([[1, 2], ["a", "b"]], row_type(["n", "s"])))
    first = next(rows)
    assert (first.n, first.s) == (1, "a")
    assert first == T.Row(n=1, s="a")
    assert [row.asDict() for row in rows] == [{"n": 2, "s": "b"}]


# --- what does not fit ---------------------------------------------------------------------------

BAD: dict[str, tuple[T.DataType, Any]] = {
    "text in a long": (T.LongType(), "1"),
    "a boolean in a long": (T.LongType(), True),
    "out of range of an int": (T.IntegerType(), 2**31),
    "out of range of a long": (T.LongType(), 2**63),
    "out of range of a byte": (T.ByteType(), 128),
    "a number in a boolean": (T.BooleanType(), 1),
    "text in a double": (T.DoubleType(), "1.0"),
    "text in a date": (T.DateType(), "2020-01-01"),
    "text in a timestamp": (T.TimestampType(), "2020-01-01"),
    "a float in a decimal": (T.DecimalType(5, 2), 1.5),
    "too many digits": (T.DecimalType(5, 2), Decimal("12345.6")),
    "no list": (T.ArrayType(T.LongType()), 5),
    "a wrong element": (T.ArrayType(T.LongType()), [1, "x"]),
    "a null element": (T.ArrayType(T.LongType(), containsNull=False), [1, None]),
    "no map": (T.MapType(T.StringType(), T.LongType()), [1]),
    "a wrong struct": (INNER, ("x", "y")),
    "a struct of another width": (INNER, (1,)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_value_that_does_not_fit_names_its_column_and_the_type(name: str) -> None:
    dtype, value = BAD[name]
    schema = T.StructType([T.StructField("good", T.LongType()), T.StructField("bad one", dtype)])
    out = writer(schema)
    out.rows.extend([(1, None), (2, value)])
    with pytest.raises(ValueMismatchError, match="'bad one'") as caught:
        out.take()
    assert dtype.simpleString() in str(caught.value)
    assert "operator 'op'" in str(caught.value)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("dtype", [T.LongType(), T.StringType(), INNER], ids=str)
def test_a_null_in_a_column_that_is_not_nullable_names_it(dtype: T.DataType) -> None:
    out = writer(schema_of(dtype, nullable=False))
    out.rows.extend([(None,)])
    with pytest.raises(ValueMismatchError, match="'c'"):
        out.take()


@pytest.mark.parametrize("row", [(), (1,), (1, 2, 3), [1, 2], "ab", 5, {"a": 1, "b": 2}, object()])
def test_what_is_no_row_of_that_width_is_shown(row: Any) -> None:
    schema = T.StructType([T.StructField(name, T.LongType()) for name in "ab"])
    out = writer(schema)
    out.rows.extend([(1, 2), row])
    with pytest.raises(ValueMismatchError, match="no row of 2 fields") as caught:
        out.take()
    assert repr(row) in str(caught.value)


def test_a_none_among_the_rows_is_shown_too() -> None:
    out = writer(schema_of(T.LongType()))
    out.rows.extend([(1,), None])
    with pytest.raises(ValueMismatchError, match="returned None"):
        out.take()


def test_a_fraction_in_an_integer_column_is_not_cut_off() -> None:
    out = writer(schema_of(T.LongType()))
    out.rows.extend([(1.5,)])
    with pytest.raises(ValueMismatchError, match="'c'"):
        out.take()


def test_a_writer_is_empty_after_it_was_taken_from_even_if_that_failed() -> None:
    out = writer(schema_of(T.LongType()))
    out.rows.extend([("x",)])
    with pytest.raises(ValueMismatchError):
        out.take()
    out.rows.extend([(1,)])
    assert out.take().to_pylist() == [{"c": 1}]
    assert out.rows == []


def test_a_writer_is_full_at_its_limit() -> None:
    out = RowWriter(schema_of(T.LongType()), lambda: "x", max_rows=3)
    cut = list(out.collect([(1,), (2,)]))
    assert cut == []
    cut = list(out.collect([(3,), (4,), (5,), (6,), (7,)]))
    assert [batch.num_rows for batch in cut] == [3, 3]
    assert out.take().to_pydict() == {"c": [7]}
