"""Between Arrow and Python: values as Spark shows them, and back without loss."""

from __future__ import annotations

import gc
import math
import operator
import pickle
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from statebackend.operators.rows import row_conversion
from statebackend.operators.rows.row_conversion import (
    arrow_schema,
    columns_to_python,
    make_rows,
    row_type,
    shown_keys,
)
from statebackend.schema.keys.key_codec import KeyCodec
from tests.ops.rowwriters import INNER, same, schema_of, writer

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
    "map": (T.MapType(T.StringType(), T.DoubleType()), [[("a", 1.0), ("b", None)], None, []]),
    "map of dates": (
        T.MapType(T.DateType(), INNER),
        [[(date(2020, 1, 1), {"a": 1, "b": "x"})], None],
    ),
    "struct": (INNER, [{"a": 1, "b": "x"}, None, {"a": None, "b": None}]),
    "struct in array": (T.ArrayType(INNER), [[{"a": 1, "b": None}, None], None, []]),
    "struct in struct": (
        T.StructType([T.StructField("in", INNER), T.StructField("n", T.IntegerType())]),
        [{"in": {"a": 1, "b": "x"}, "n": 5}, {"in": None, "n": None}],
    ),
    "all null": (T.LongType(), [None, None]),
    "all null strings": (T.StringType(), [None, None]),
    "all null structs": (INNER, [None, None]),
}


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


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("session", ["UTC", "America/New_York", "Asia/Kathmandu", "+05:30"])
def test_a_timestamp_is_shown_in_the_sessions_zone_whatever_that_of_the_process(
    session: str,
) -> None:
    schema = schema_of(T.TimestampType())
    micros = [0, None, *MOMENTS, FIRST_0100, SECOND_0100]
    for unit, zone in (("us", "UTC"), ("us", "Asia/Tokyo")):
        table = pa.table([pa.array(micros, pa.timestamp("us", "UTC"))], names=["c"])
        table = table.cast(pa.schema([("c", pa.timestamp(unit, zone))]))
        (shown,) = columns_to_python(table, schema, timezone=session)
        expected = [v.as_py() for v in table.column(0).cast(pa.timestamp("us", session))]
        assert shown == expected
        for one, other in zip(shown, expected, strict=True):
            if other is not None:
                assert (one.tzinfo, one.fold) == (other.tzinfo, other.fold)


@pytest.mark.parametrize("year", [0, 10_000])
def test_a_year_that_python_has_not_is_refused_as_by_arrow(year: int) -> None:
    micros = (year - 1970) * 366 * 86_400 * 10**6
    table = pa.table([pa.array([micros], pa.timestamp("us", "UTC"))], names=["c"])
    with pytest.raises((ValueError, OverflowError)):
        columns_to_python(table, schema_of(T.TimestampType()))


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("micros", MOMENTS)
def test_a_timestamp_that_is_handed_back_is_the_same_instant(micros: int) -> None:
    schema = schema_of(T.TimestampType())
    table = pa.table([pa.array([micros, None], pa.timestamp("us", "UTC"))], names=["c"])
    ((shown, _),) = columns_to_python(table, schema, timezone="Asia/Kathmandu")
    out = writer(schema)
    out.rows.extend([(shown,), (None,)])
    assert out.take().column(0).cast(pa.int64()).to_pylist() == [micros, None]


@pytest.mark.usefixtures("zone")
def test_a_timestamp_without_a_zone_is_one_of_utc_in_any_process() -> None:
    out = writer(schema_of(T.TimestampType()))
    out.rows.extend([(datetime(2024, 1, 1, 12),)])
    assert out.take().column(0).cast(pa.int64()).to_pylist() == [1_704_110_400_000_000]


def test_a_timestamp_with_a_zone_is_taken_as_the_instant_it_is() -> None:
    out = writer(schema_of(T.TimestampType()))
    out.rows.extend([(datetime(2024, 1, 1, 14, tzinfo=timezone(timedelta(hours=2))),)])
    assert out.take().column(0).cast(pa.int64()).to_pylist() == [1_704_110_400_000_000]


@pytest.mark.usefixtures("zone")
def test_timestamps_inside_other_types_are_converted_alike() -> None:
    inner = T.StructType(
        [
            T.StructField("at", T.ArrayType(T.TimestampType())),
            T.StructField("by", T.MapType(T.TimestampType(), T.TimestampNTZType())),
        ]
    )
    schema = schema_of(inner)
    plain = datetime(2023, 11, 14, 22, 13, 20, 1)
    aware = plain.replace(tzinfo=UTC)
    out = writer(schema)
    out.rows.extend([(T.Row(at=[plain, None, aware], by={plain: plain}),)])
    (column,) = columns_to_python(
        pa.Table.from_batches([out.take()]), schema, timezone="Asia/Kathmandu"
    )
    (found,) = column
    assert found == {"at": [aware, None, aware], "by": [(aware, plain)]}
    # By its name: before 25, pyarrow shows zones of pytz's.
    assert str(found["at"][0].tzinfo) == "Asia/Kathmandu"
    assert str(found["by"][0][0].tzinfo) == "Asia/Kathmandu"


# --- keys of timers ------------------------------------------------------------------------------


KEYS: dict[str, tuple[T.DataType, pa.DataType, list[Any]]] = {
    "long": (T.LongType(), pa.int64(), [1, -5]),
    "string": (T.StringType(), pa.string(), ["a", "ä"]),
    "binary": (T.BinaryType(), pa.binary(), [b"a", b""]),
    "decimal": (T.DecimalType(9, 2), pa.decimal128(9, 2), [Decimal("1.50"), Decimal(3)]),
    "date": (T.DateType(), pa.date32(), [date(2020, 1, 1)]),
    "double": (T.DoubleType(), pa.float64(), [0.5]),
    "boolean": (T.BooleanType(), pa.bool_(), [True, False]),
    "interval": (T.DayTimeIntervalType(), pa.duration("us"), [timedelta(1, 2, 3)]),
    "ntz": (T.TimestampNTZType(), pa.timestamp("us"), [datetime(2020, 1, 1)]),
    "timestamp": (
        T.TimestampType(),
        pa.timestamp("us", "UTC"),
        [datetime(2020, 11, 1, 5, 30, tzinfo=UTC), datetime(2020, 11, 1, 6, 30, tzinfo=UTC)],
    ),
    "array": (T.ArrayType(T.LongType()), pa.list_(pa.int64()), [[1, None], []]),
    "moments": (
        T.ArrayType(T.TimestampType()),
        pa.list_(pa.timestamp("us", "UTC")),
        [[datetime(2020, 11, 1, 5, 30, tzinfo=UTC), None]],
    ),
    "struct": (
        T.StructType([T.StructField("a", T.LongType()), T.StructField("at", T.TimestampType())]),
        pa.struct([("a", pa.int64()), ("at", pa.timestamp("us", "UTC"))]),
        [{"a": 1, "at": datetime(2020, 11, 1, 6, 30, tzinfo=UTC)}, {"a": 2, "at": None}],
    ),
}


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("name", KEYS)
def test_a_timers_key_is_that_of_the_rows_with_its_names(name: str) -> None:
    dtype, kind, values = KEYS[name]
    schema = T.StructType([T.StructField("the key", dtype), T.StructField("n", T.LongType())])
    columns = [pa.array([*values, None], kind), pa.array([7] * (len(values) + 1))]
    codec = KeyCodec(schema)
    encoded = codec.encode_arrow(columns).to_pylist()
    table = pa.table(columns, names=["the key", "n"])
    expected, _ = columns_to_python(table, schema, timezone="America/New_York")
    shown = shown_keys(encoded, codec, schema, "America/New_York")
    for key, value in zip(shown, expected, strict=True):
        assert isinstance(key, T.Row)
        assert key == (value, 7)
        assert type(key[0]) is type(value)
        assert key.n == 7
        assert key.asDict() == {"the key": value, "n": 7}
        if isinstance(value, datetime):
            assert (key[0].tzinfo, key[0].fold) == (value.tzinfo, value.fold)


def test_no_timers_have_no_keys() -> None:
    schema = schema_of(T.TimestampType())
    assert shown_keys([], KeyCodec(schema), schema, "UTC") == []


def test_rows_are_made_one_by_one_with_their_names() -> None:
    rows = iter(make_rows([[1, 2], ["a", "b"]], row_type(["n", "s"])))
    first = next(rows)
    assert (first.n, first.s) == (1, "a")
    assert first == T.Row(n=1, s="a")
    assert [row.asDict() for row in rows] == [{"n": 2, "s": "b"}]


@pytest.mark.parametrize("names", [["count", "n", "index", "a b"], ["n", "n", "__x", "asDict"]])
def test_rows_give_their_fields_exactly_as_those_of_spark_do(names: list[str]) -> None:
    def found(row: Any, access: Any, what: Any) -> Any:
        try:
            value = access(row, what)
        except Exception as error:
            return type(error)
        return value if not callable(value) else value.__name__

    ours = make_rows([[10], [11], [12], [13]], row_type(names))[0]
    sparks = T.Row(*names)(10, 11, 12, 13)
    for name in [*names, "none", "mro", "__len__", "__none"]:
        assert found(ours, getattr, name) == found(sparks, getattr, name)
    places = [0, 3, -1, 4, True, slice(1, 3), np.int64(1), None, *names, "none"]
    for place in places:
        assert found(ours, operator.getitem, place) == found(sparks, operator.getitem, place)
    with pytest.raises(RuntimeError):
        ours.n = 5
    assert pickle.loads(pickle.dumps(ours)) == sparks
    assert (ours.asDict(), repr(ours), "n" in ours) == (sparks.asDict(), repr(sparks), True)


def test_a_row_type_is_made_while_the_collector_runs_at_every_step() -> None:
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1, 1, 1)
    try:
        for count in range(1, 40):
            names = [f"c{place}" for place in range(count)]
            row_conversion._getters.cache_clear()
            row = make_rows([[place] for place in range(count)], row_type(names))[0]
            assert [getattr(row, name) for name in names] == list(range(count))
    finally:
        gc.set_threshold(*before)
