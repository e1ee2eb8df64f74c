"""Schemas, rows that fit them, and the same rows as Arrow columns."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from pyspark.sql import types as T

from statebackend.schema.types import arrow_type

SIMPLE: list[T.DataType] = [
    T.BooleanType(),
    T.ByteType(),
    T.ShortType(),
    T.IntegerType(),
    T.LongType(),
    T.FloatType(),
    T.DoubleType(),
    T.DateType(),
    T.TimestampType(),
    T.TimestampNTZType(),
    T.DayTimeIntervalType(),
    T.DecimalType(9, 2),
    T.DecimalType(18, 0),
    T.TimeType(),
]
WIDE: list[T.DataType] = [
    T.StringType(),
    T.BinaryType(),
    T.DecimalType(19, 4),
    T.DecimalType(38, 0),
    T.DecimalType(38, 38),
]
VALUES_ONLY: list[T.DataType] = [
    T.NullType(),
    T.VariantType(),
    T.GeometryType(0),
    T.GeographyType("ANY"),
    T.StringType("UTF8_LCASE"),
    T.TimeType(3),
]
BITS = {T.ByteType: 8, T.ShortType: 16, T.IntegerType: 32, T.LongType: 64}


def struct_of(types: list[T.DataType]) -> T.StructType:
    return T.StructType([T.StructField(f"f{i}", t) for i, t in enumerate(types)])


def types(*, maps: bool) -> st.SearchStrategy[T.DataType]:
    def deeper(inner: st.SearchStrategy[T.DataType]) -> st.SearchStrategy[T.DataType]:
        nested = [
            inner.map(T.ArrayType),
            st.lists(inner, min_size=1, max_size=3).map(struct_of),
        ]
        if maps:
            keys = st.sampled_from([*SIMPLE, *WIDE])
            nested.append(st.builds(T.MapType, keys, inner))
        return st.one_of(nested)

    leaves = [*SIMPLE, *WIDE, *(VALUES_ONLY if maps else [])]
    return st.recursive(st.sampled_from(leaves), deeper, max_leaves=4)


def schemas(kinds: st.SearchStrategy[T.DataType]) -> st.SearchStrategy[T.StructType]:
    return st.lists(kinds, min_size=1, max_size=10).map(struct_of)


def values(dtype: T.DataType) -> st.SearchStrategy[Any]:
    """Values as a `Row` would carry them, or None."""
    return st.none() | present(dtype)


def present(dtype: T.DataType) -> st.SearchStrategy[Any]:
    """Values as `values` gives, but never None on the outside."""
    if type(dtype) in BITS:
        top = 1 << (BITS[type(dtype)] - 1)
        return st.integers(-top, top - 1)
    if isinstance(dtype, T.DecimalType):
        limit = 10**dtype.precision - 1
        return st.integers(-limit, limit).map(lambda n: _decimal(n, dtype.scale))
    if isinstance(dtype, T.ArrayType):
        return st.lists(values(dtype.elementType), max_size=4)
    if isinstance(dtype, T.MapType):
        # NaN is no key that equals itself.
        keys = present(dtype.keyType).filter(lambda key: key == key)
        return st.dictionaries(keys, values(dtype.valueType), max_size=4)
    if isinstance(dtype, T.StructType):
        make = T.Row(*dtype.names)
        return st.tuples(*[values(f.dataType) for f in dtype]).map(lambda row: make(*row))
    if isinstance(dtype, T.TimeType):
        step = 10 ** (6 - dtype.precision)
        return st.times().map(lambda t: t.replace(microsecond=t.microsecond // step * step))
    micro = timedelta(microseconds=1)
    blob = st.binary(max_size=12)
    moments = st.datetimes(datetime(1902, 1, 1), datetime(2200, 1, 1))
    return {
        T.BooleanType: st.booleans(),
        T.FloatType: st.floats(width=32),
        T.DoubleType: st.floats(),
        T.StringType: st.text(max_size=12),
        T.BinaryType: blob,
        T.NullType: st.none(),
        T.VariantType: st.builds(T.VariantVal, blob, blob),
        T.GeometryType: st.builds(T.Geometry, blob, st.just(0)),
        T.GeographyType: st.builds(T.Geography, blob, st.sampled_from([4326, 4267])),
        T.DateType: st.dates(),
        T.TimestampType: moments,
        T.TimestampNTZType: st.datetimes(),
        T.DayTimeIntervalType: st.integers(-(10**17), 10**17).map(lambda n: n * micro),
    }[type(dtype)]


def _decimal(unscaled: int, scale: int) -> Decimal:
    sign, digits = int(unscaled < 0), tuple(map(int, str(abs(unscaled))))
    return Decimal((sign, digits, -scale))


@st.composite
def tables(
    draw: st.DrawFn, kinds: st.SearchStrategy[T.DataType]
) -> tuple[T.StructType, list[tuple[Any, ...]]]:
    schema = draw(schemas(kinds))
    row = st.tuples(*[values(f.dataType) for f in schema])
    return schema, draw(st.lists(row, max_size=6))


def to_arrow(schema: T.StructType, rows: list[tuple[Any, ...]]) -> list[pa.Array]:
    """Rows as columns, with a row in front that a slice has cut off."""
    columns = []
    for index, field in enumerate(schema):
        cells = [_cell(row[index], field.dataType) for row in rows]
        whole = pa.array([*cells[:1], *cells], arrow_type(field.dataType))
        columns.append(whole.slice(len(cells[:1])))
    return columns


def _cell(value: Any, dtype: T.DataType) -> Any:
    if value is None:
        return None
    if isinstance(dtype, T.TimestampType):
        return dtype.toInternal(value)
    if isinstance(dtype, T.ArrayType):
        return [_cell(v, dtype.elementType) for v in value]
    if isinstance(dtype, T.MapType):
        items = value.items()
        return [(_cell(k, dtype.keyType), _cell(v, dtype.valueType)) for k, v in items]
    if isinstance(dtype, T.StructType):
        return {f.name: _cell(v, f.dataType) for f, v in zip(dtype, value, strict=True)}
    if isinstance(dtype, T.FloatType):
        return np.float32(value)
    if isinstance(dtype, T.VariantType | T.GeometryType | T.GeographyType):
        return vars(value)
    return value


def same(left: Any, right: Any) -> bool:
    """Equality of type and value, NaN being itself; zeros count as one."""
    if type(left) is not type(right):
        return False
    if isinstance(left, T.VariantVal):
        return vars(left) == vars(right)
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    return bool(left == right)
