"""Random changes of schemas, and what they do to rows: by the rules, not by our code."""

from __future__ import annotations

from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st
from pyspark.sql import types as T

from tests.schema.strategies import schemas, types, values

WIDER: dict[T.DataType, list[T.DataType]] = {
    T.ByteType(): [T.ShortType(), T.IntegerType(), T.LongType(), T.DoubleType()],
    T.ShortType(): [T.IntegerType(), T.LongType(), T.DoubleType(), T.DecimalType(5, 0)],
    T.IntegerType(): [T.LongType(), T.DoubleType(), T.DecimalType(12, 2)],
    T.LongType(): [T.DecimalType(19, 0), T.DecimalType(38, 19)],
    T.FloatType(): [T.DoubleType()],
    T.DecimalType(9, 2): [T.DecimalType(10, 2), T.DecimalType(18, 9), T.DecimalType(30, 4)],
    T.DecimalType(19, 4): [T.DecimalType(38, 4), T.DecimalType(20, 5)],
    T.DateType(): [T.TimestampNTZType()],
    T.TimeType(3): [T.TimeType(6)],
    T.NullType(): [T.LongType(), T.StringType(), T.ArrayType(T.IntegerType())],
}
# A default as it stands in a field's metadata, and the value that it is.
DEFAULTS: dict[T.DataType, tuple[Any, Any]] = {
    T.BooleanType(): (True, True),
    T.IntegerType(): (-7, -7),
    T.LongType(): (2**63 - 1, 2**63 - 1),
    T.DoubleType(): ("1e3", 1000.0),
    T.StringType(): ("new", "new"),
    T.BinaryType(): ("00ff", b"\x00\xff"),
    T.DecimalType(9, 2): ("0.10", Decimal("0.10")),
    T.DecimalType(38, 0): (10**37, Decimal(10**37)),
    T.DateType(): ("2026-01-31", date(2026, 1, 31)),
    T.TimeType(): ("12:30:00.000001", time(12, 30, 0, 1)),
    T.TimestampNTZType(): ("2026-01-31T12:00:00", datetime(2026, 1, 31, 12)),
}


@st.composite
def changed(draw: st.DrawFn, dtype: T.DataType, *, top: bool = False) -> T.DataType:
    """A type that values of `dtype` may become."""
    if isinstance(dtype, T.ArrayType):
        return T.ArrayType(draw(changed(dtype.elementType)))
    if isinstance(dtype, T.MapType):
        key = dtype.keyType
        if draw(st.booleans()):
            key = draw(st.sampled_from([key, *WIDER.get(key, [])]))
        return T.MapType(key, draw(changed(dtype.valueType)))
    if not isinstance(dtype, T.StructType):
        return draw(st.sampled_from([dtype, dtype, *WIDER.get(dtype, [])]))
    kept = draw(st.lists(st.sampled_from(dtype.fields), unique_by=id, min_size=int(top)))
    fields = [T.StructField(f.name, draw(changed(f.dataType)), True, f.metadata) for f in kept]
    used = {f.name for f in dtype}
    least = 0 if fields else 1
    for _ in range(draw(st.integers(least, 2))):
        name = next(f"f{i}" for i in range(99) if f"f{i}" not in used)
        used.add(name)
        if draw(st.booleans()):
            fields.append(T.StructField(name, draw(types(maps=True))))
        else:
            kind = draw(st.sampled_from(list(DEFAULTS)))
            metadata = {"statebackend.default": DEFAULTS[kind][0]}
            fields.append(T.StructField(name, kind, draw(st.booleans()), metadata))
    return T.StructType(draw(st.permutations(fields)))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[T.StructType, list[tuple[Any, ...]]]]:
    """Schemas, each a change of the one before, and rows of each."""
    schema = draw(schemas(types(maps=True)))
    history = []
    for _ in range(draw(st.integers(2, 4))):
        row = st.tuples(*[_of_field(field) for field in schema])
        history.append((schema, draw(st.lists(row, max_size=3))))
        schema = draw(changed(schema, top=True))  # type: ignore[assignment]
    return history


def _of_field(field: T.StructField) -> st.SearchStrategy[Any]:
    some = _values(field.dataType)
    return some if field.nullable else some.filter(lambda value: value is not None)


def _values(dtype: T.DataType) -> st.SearchStrategy[Any]:
    """As `values`, but what may not be null in a struct is not."""
    if isinstance(dtype, T.StructType):
        make = T.Row(*dtype.names)
        rows = st.tuples(*[_of_field(f) for f in dtype]).map(lambda row: make(*row))
        return st.none() | rows
    if isinstance(dtype, T.ArrayType):
        return st.none() | st.lists(_values(dtype.elementType), max_size=3)
    if isinstance(dtype, T.MapType):
        keys = values(dtype.keyType).filter(lambda key: key is not None and key == key)
        return st.none() | st.dictionaries(keys, _values(dtype.valueType), max_size=3)
    return values(dtype)


def expected(old: T.DataType, new: T.DataType, value: Any) -> Any:
    """What a value of `old` is under `new`."""
    if value is None:
        return None
    if isinstance(old, T.StructType):
        assert isinstance(new, T.StructType)
        before = dict(zip(old.names, zip(old, value, strict=True), strict=True))
        row = []
        for field in new:
            if field.name in before:
                was, one = before[field.name]
                row.append(expected(was.dataType, field.dataType, one))
            else:
                row.append(
                    DEFAULTS[field.dataType][1]
                    if "statebackend.default" in field.metadata
                    else None
                )
        return T.Row(*new.names)(*row)
    if isinstance(old, T.ArrayType):
        assert isinstance(new, T.ArrayType)
        return [expected(old.elementType, new.elementType, one) for one in value]
    if isinstance(old, T.MapType):
        assert isinstance(new, T.MapType)
        return {
            expected(old.keyType, new.keyType, key): expected(old.valueType, new.valueType, one)
            for key, one in value.items()
        }
    if isinstance(new, T.DecimalType):
        return Decimal(value)
    if isinstance(new, T.DoubleType):
        return float(value)
    if isinstance(old, T.DateType) and isinstance(new, T.TimestampNTZType):
        return datetime(value.year, value.month, value.day)
    return value
