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
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from statebackend.errors import ValueMismatchError
from statebackend.operators.rows import rowconv
from statebackend.operators.rows.rowconv import (
    RowWriter,
    arrow_schema,
    columns_to_python,
    make_rows,
    row_type,
    shown_keys,
)
from statebackend.operators.rows.rowshapes import MisfitError
from statebackend.schema.keys import KeyCodec

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
    assert found["at"][0].tzinfo == ZoneInfo("Asia/Kathmandu")
    assert found["by"][0][0].tzinfo == ZoneInfo("Asia/Kathmandu")


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
            rowconv._getters.cache_clear()
            row = make_rows([[place] for place in range(count)], row_type(names))[0]
            assert [getattr(row, name) for name in names] == list(range(count))
    finally:
        gc.set_threshold(*before)


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
    "a struct of other names": (INNER, {"x": 1}),
    "a Row of other names in a struct": (INNER, T.Row(x=1, y="x")),
    "a number in text": (T.StringType(), 5),
    "a fraction": (T.LongType(), 1.5),
    "a decimal fraction": (T.LongType(), Decimal("1.5")),
    "numpy's fraction": (T.ShortType(), np.float32(1.5)),
    "numpy's boolean in a long": (T.LongType(), np.bool_(True)),
    "no number": (T.LongType(), math.nan),
    "without end": (T.LongType(), math.inf),
    "a fraction in an array": (T.ArrayType(T.LongType()), [1, 1.5]),
    "a fraction in a map": (T.MapType(T.StringType(), T.LongType()), {"a": 1.5}),
    "a fraction in a struct": (INNER, {"a": 1.5}),
    "a fraction in a timestamp": (T.TimestampType(), 1.5),
    "a null key": (T.MapType(T.StringType(), T.LongType()), [(None, 1)]),
    "a null in a map": (T.MapType(T.StringType(), T.LongType(), False), {"a": None}),
    "a null in a struct": (T.StructType([T.StructField("a", T.LongType(), False)]), {"a": None}),
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
    assert repr(value) in str(caught.value)
    assert caught.value.__cause__ is not None


# What Spark takes besides what it gives, with what becomes of it.
TAKEN: dict[str, tuple[T.DataType, list[Any], list[Any]]] = {
    "whole floats": (T.LongType(), [1.0, 2, None, -3.0], [1, 2, None, -3]),
    "whole decimals": (T.IntegerType(), [Decimal("2.0")], [2]),
    "numpy's integers": (T.LongType(), [np.int32(3), np.uint8(4), np.float64(5)], [3, 4, 5]),
    "numpy's floats": (T.DoubleType(), [np.float32(1.5), np.int64(2)], [1.5, 2.0]),
    "ints in a double": (T.DoubleType(), [1, 2.5], [1.0, 2.5]),
    "numpy's text": (T.StringType(), [np.str_("a")], ["a"]),
    "numpy's boolean": (T.BooleanType(), [np.bool_(True), False], [True, False]),
    "ints in a decimal": (T.DecimalType(5, 2), [5, Decimal("1.25")], [Decimal(5), Decimal("1.25")]),
    "bytearray": (T.BinaryType(), [bytearray(b"a")], [b"a"]),
    "a tuple and an ndarray in an array": (
        T.ArrayType(T.LongType()),
        [(1, 2), np.array([3, 4]), np.array([5.0])],
        [[1, 2], [3, 4], [5]],
    ),
    "dicts, pairs and Rows": (
        T.MapType(T.StringType(), INNER),
        [{"a": T.Row(b="x", a=1)}, [("a", {"b": "y"})], (("a", (3, "z")),)],
        [[("a", {"a": 1, "b": "x"})], [("a", {"a": None, "b": "y"})], [("a", {"a": 3, "b": "z"})]],
    ),
    "structs in every form": (
        INNER,
        [T.Row(a=1, b="x"), T.Row(b="x", a=1), T.Row(b="x"), {"a": 2.0}, {}, (3, "y")],
        [
            {"a": 1, "b": "x"},
            {"a": 1, "b": "x"},
            {"a": None, "b": "x"},
            {"a": 2, "b": None},
            {"a": None, "b": None},
            {"a": 3, "b": "y"},
        ],
    ),
    "unnamed Rows": (
        INNER,
        [T.Row(1, "x"), T.Row("a", "b")(2, "y")],
        [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}],
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_values_are_taken_in_the_forms_that_spark_takes(name: str) -> None:
    dtype, values, expected = TAKEN[name]
    schema = schema_of(dtype)
    out = writer(schema)
    out.rows.extend((value,) for value in values)
    (column,) = columns_to_python(pa.Table.from_batches([out.take()]), schema)
    assert len(column) == len(expected)
    assert all(map(same, column, expected)), column


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, start=1) if line.endswith(f"# {mark}")]
    return number


TWO = T.StructType([T.StructField("a", T.LongType()), T.StructField("b", T.StringType())])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (T.Row(a=1, b="x"), (1, "x")),
        (T.Row(b="x", a=1), (1, "x")),
        (T.Row(b="x"), (None, "x")),
        (T.Row(a=1), (1, None)),
        (T.Row("b", "a")("x", 1), (1, "x")),
        (T.Row("a", "b")(1, "x"), (1, "x")),
        (row_type(["b", "a"])("x", 1), (1, "x")),
        (T.Row(1, "x"), (1, "x")),
        ((1, "x"), (1, "x")),
    ],
)
def test_a_row_with_names_is_matched_by_them_and_others_by_position(
    row: Any, expected: tuple[Any, ...]
) -> None:
    for rows in ([row], [row, row], [(5, "y"), row], [T.Row(a=5, b="y"), row]):
        out = writer(TWO)
        out.rows.extend(rows)
        assert tuple(out.take().to_pylist()[-1].values()) == expected


MISNAMED = [
    (T.Row(x=1, y="x"), "the field 'x', which output_schema does not have"),
    (T.Row(A=1), "did you mean 'a'"),
    (T.Row(c=0, b="x", a=1), "the field 'c', which output_schema does not have"),
    (T.Row(a=1, bb="x"), "the field 'bb', .*did you mean 'b'"),
    (T.Row("a", "a")(1, "x"), "the field 'a', twice"),
]


@pytest.mark.parametrize(("row", "said"), MISNAMED)
def test_a_row_with_a_field_that_is_none_is_refused(row: Any, said: str) -> None:
    out = writer(TWO)
    out.rows.extend([T.Row(a=1, b="x"), row])
    with pytest.raises(ValueMismatchError, match=said) as caught:
        out.take()
    assert repr(row) in str(caught.value)
    assert "struct<a:bigint,b:string>" in str(caught.value)


@pytest.mark.parametrize("row", [row for row, _ in MISNAMED] + [(1,), (1, "x", 2), 5, T.Row(1)])
@pytest.mark.parametrize("mutable", [False, True])
def test_a_row_that_does_not_fit_is_refused_at_the_line_that_yields_it(
    row: Any, mutable: bool
) -> None:
    schema = T.StructType([*TWO.fields, T.StructField("l", T.ArrayType(T.LongType()))])
    good = (1, "x", [1]) if mutable else (1, "x")
    out = writer(schema if mutable else TWO)

    def inner() -> Iterator[Any]:
        yield row  # the line
        raise AssertionError("it goes no further")

    def outer() -> Iterator[Any]:
        yield good
        yield from inner()

    for way in (out.put, lambda rows: list(out.collect(rows))):
        if mutable and row == (1, "x", 2):
            continue  # it has the right number
        with pytest.raises(MisfitError) as caught:
            way(outer())
        assert caught.value.where == f" at {__file__}:{line_of('the line')} in inner"
        out.rows.clear()
    with pytest.raises(MisfitError) as caught:
        out.put([good, row if not mutable else T.Row(q=1)])
    assert caught.value.where == ""


def test_a_row_that_comes_late_in_a_batch_is_refused_with_the_batch() -> None:
    out = writer(TWO)
    out.put((n, "x") for n in range(5_000))
    out.put(iter([T.Row(a=1, c="x")]))
    with pytest.raises(ValueMismatchError, match="field 'c'") as caught:
        out.take()
    assert not isinstance(caught.value, MisfitError)  # whose key would be another's


@pytest.mark.parametrize("dtype", [INNER, T.ArrayType(INNER), T.MapType(T.StringType(), INNER)])
@pytest.mark.parametrize("value", [T.Row(b="x", c=1), {"a": 1, "d": 2}, T.Row("a", "a")(1, 2)])
def test_a_name_that_is_no_field_of_a_struct_is_refused(dtype: T.DataType, value: Any) -> None:
    if isinstance(dtype, T.ArrayType):
        value = [value]
    elif isinstance(dtype, T.MapType):
        value = {"k": value}
    out = writer(schema_of(dtype))
    out.rows.append((value,))
    with pytest.raises(ValueMismatchError, match=r"has no field '[cd]'|'a' comes twice"):
        out.take()


def test_a_name_that_is_no_field_beside_a_variant_is_refused_too() -> None:
    inner = T.StructType().add("v", T.VariantType()).add("n", T.LongType())
    out = writer(schema_of(inner))
    out.rows.append(({"v": None, "n": 1, "m": 2},))
    with pytest.raises(ValueMismatchError, match="has no field 'm'"):
        out.take()


@pytest.mark.parametrize("dtype", [T.LongType(), T.StringType(), INNER], ids=str)
def test_a_null_in_a_column_that_is_not_nullable_names_it(dtype: T.DataType) -> None:
    out = writer(schema_of(dtype, nullable=False))
    out.rows.extend([(None,)])
    with pytest.raises(ValueMismatchError, match="'c'"):
        out.take()


@pytest.mark.parametrize("row", [(), (1,), (1, 2, 3), [1, 2], "ab", 5, object()])
def test_what_is_no_row_of_that_width_is_shown(row: Any) -> None:
    schema = T.StructType([T.StructField(name, T.LongType()) for name in "ab"])
    out = writer(schema)
    out.rows.extend([(1, 2), row])
    with pytest.raises(ValueMismatchError, match="no row of 2 fields") as caught:
        out.take()
    assert repr(row) in str(caught.value)


@pytest.mark.parametrize("row", [{"a": 1, "b": 2}, {"a": 1}, {"x": 1, "b": 2}])
def test_a_dict_is_no_row_and_is_called_one(row: dict[str, int]) -> None:
    schema = T.StructType([T.StructField(name, T.LongType()) for name in "ab"])
    out = writer(schema)
    out.rows.extend([row])
    with pytest.raises(ValueMismatchError, match="a dict is no row, as in Spark") as caught:
        out.take()
    assert repr(row) in caught.value.what
    assert "Row(**fields)" in caught.value.todo


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
