"""Table of types: says of each Spark type, in one row, all that the codecs ask about it.

A type whose values have no parts is a `SimpleType`; one whose value is an object around a few
others is a `BoxedType`. Arrays, maps and structs are no rows: each codec walks them. What the
stored bytes look like is said in `keys`, `fixed_rows` and `msgpack_types`.
"""

from __future__ import annotations

import datetime
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as T

from statebackend.key_hashing import LONG_DIGITS
from statebackend.schema import scalars as S
from statebackend.schema.scalars import Convert, Scalar

__all__ = ["BoxedType", "SimpleType", "boxed_type", "simple", "simple_type", "takes"]

_MAX_DIGITS: Final = 38  # of a decimal


@dataclass(frozen=True)
class SimpleType:
    """Says all about a type whose values have no parts.

    Args:
        takes: what Python values a field takes, in words.
        scalar: the same in code, and the plain form in which they are kept.
        arrow: the type of a column.
        wire: what msgpack holds.
        packed: the struct module's letter of the plain form, in rows of fixed width and (its
            width) in keys; "" where the width varies.
        default: from a default in JSON to the Python value; None: no default but null.
        wider: the types that it may become, besides decimals.
    """

    takes: str
    scalar: Scalar
    arrow: pa.DataType
    wire: type = int
    packed: str = ""
    default: Convert | None = None
    wider: tuple[type[T.DataType], ...] = ()

    @property
    def width(self) -> int | None:
        """The bytes of the plain form; None where they vary."""
        return struct.calcsize(self.packed) if self.packed else None

    @property
    def digits(self) -> int:
        """The digits of an integer type's largest value; 0 for other types."""
        bounds = self.scalar.bounds
        return len(str(bounds[1])) if bounds and int in self.scalar.to_plain else 0

    @property
    def as_integers(self) -> pa.DataType | None:
        """Arrow's integers of the same memory, where only the plain form is an integer."""
        if self.wire is not int or pa.types.is_integer(self.arrow):
            return None
        return pa.int32() if self.packed == "i" else pa.int64()


@dataclass(frozen=True)
class BoxedType:
    """Says all about a type whose value is one object around a few others.

    Args:
        takes: what Python values a field takes, in words.
        kind: their class, with an attribute for each field.
        fields: what is kept of one, in this order.
        make: from the fields, in wire form, to the object.
    """

    takes: str
    kind: type
    fields: T.StructType
    make: Convert


def simple_type(dtype: T.DataType) -> SimpleType | None:
    """The row of a type whose values have no parts; None for all other types."""
    if isinstance(dtype, T.DecimalType):
        if not 1 <= dtype.precision <= _MAX_DIGITS:  # Spark's DDL takes decimal(0, 0)
            return None
        return _decimal(dtype.precision, dtype.scale)
    if isinstance(dtype, T.TimeType):
        return _time(dtype.precision)
    return _SIMPLE.get(type(dtype))


def simple(dtype: T.DataType) -> SimpleType:
    """The row of a type that is known to have one."""
    found = simple_type(dtype)
    assert found is not None, "nested types are taken apart by their codec"
    return found


def boxed_type(dtype: T.DataType) -> BoxedType | None:
    """The row of a type whose value is one object around a few others; None for all others."""
    return _BOXED.get(type(dtype))


def takes(dtype: T.DataType) -> str:
    """What Python values a field of any supported type takes, in words."""
    row = simple_type(dtype) or boxed_type(dtype)
    return row.takes if row is not None else _NESTED_TAKES[type(dtype)]


# --- the table ---------------------------------------------------------------------------------


def _json(*kinds: type) -> Convert:
    """Lets JSON values of these types through."""

    def taken(value: Any) -> Any:
        if type(value) not in kinds:
            raise ValueError(f"a {type(value).__name__}")
        return value

    return taken


def _text(read: Callable[[str], Any]) -> Convert:
    text = _json(str)
    return lambda value: read(text(value))


def _moment(text: str) -> datetime.datetime:
    moment = datetime.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("a timestamp without its offset from UTC")
    return moment


def _real(value: Any) -> float:
    return float(_json(int, float, str)(value))


def _integer(packed: str, arrow: pa.DataType, *wider: type[T.DataType]) -> SimpleType:
    scalar = S.integer_scalar(arrow.bit_width)
    return SimpleType("int in range", scalar, arrow, int, packed, _json(int), wider)


@cache
def _decimal(precision: int, scale: int) -> SimpleType:
    fits = precision <= LONG_DIGITS
    return SimpleType(
        "decimal.Decimal; round with quantize()",
        S.decimal_scalar(precision, scale),
        pa.decimal128(precision, scale),
        int if fits else bytes,
        "q" if fits else "",
        lambda value: Decimal(_json(int, str)(value)),
    )


@cache
def _time(precision: int) -> SimpleType:
    return SimpleType(
        "datetime.time, of no more digits than declared",
        S.time_scalar(precision),
        pa.time64("ns"),
        packed="q",
        default=_text(datetime.time.fromisoformat),
    )


_SIMPLE: Final[Mapping[type[T.DataType], SimpleType]] = {
    T.BooleanType: SimpleType("bool", S.BOOLEAN, pa.bool_(), bool, "?", _json(bool)),
    T.ByteType: _integer("b", pa.int8(), T.ShortType, T.IntegerType, T.LongType, T.DoubleType),
    T.ShortType: _integer("h", pa.int16(), T.IntegerType, T.LongType, T.DoubleType),
    T.IntegerType: _integer("i", pa.int32(), T.LongType, T.DoubleType),
    T.LongType: _integer("q", pa.int64()),
    T.FloatType: SimpleType(
        "float or int", S.FLOAT, pa.float32(), float, "f", _real, (T.DoubleType,)
    ),
    T.DoubleType: SimpleType("float or int", S.DOUBLE, pa.float64(), float, "d", _real),
    T.StringType: SimpleType("str", S.STRING, pa.string(), str, default=_json(str)),
    T.BinaryType: SimpleType("bytes", S.BINARY, pa.binary(), bytes, default=_text(bytes.fromhex)),
    T.DateType: SimpleType(
        "datetime.date",
        S.DATE,
        pa.date32(),
        packed="i",
        default=_text(datetime.date.fromisoformat),
        wider=(T.TimestampNTZType,),
    ),
    T.TimestampType: SimpleType(
        "datetime.datetime",
        S.TIMESTAMP,
        pa.timestamp("us", "UTC"),
        packed="q",
        default=_text(_moment),
    ),
    T.TimestampNTZType: SimpleType(
        "datetime.datetime without a time zone",
        S.TIMESTAMP_NTZ,
        pa.timestamp("us"),
        packed="q",
        default=_text(datetime.datetime.fromisoformat),
    ),
    T.DayTimeIntervalType: SimpleType(
        "datetime.timedelta", S.INTERVAL, pa.duration("us"), packed="q"
    ),
    T.NullType: SimpleType("None", S.VOID, pa.null(), type(None)),
}

_PLACE: Final = T.StructType(
    [
        T.StructField("srid", T.IntegerType(), nullable=False),
        T.StructField("wkb", T.BinaryType(), nullable=False),
    ]
)
_BOXED: Final[Mapping[type[T.DataType], BoxedType]] = {
    T.VariantType: BoxedType(
        "pyspark.sql.types.VariantVal",
        T.VariantVal,
        T.StructType(
            [
                T.StructField("value", T.BinaryType(), nullable=False),
                T.StructField(
                    "metadata", T.BinaryType(), nullable=False, metadata={"variant": "true"}
                ),
            ]
        ),
        lambda wire: T.VariantVal(*wire),
    ),
    T.GeometryType: BoxedType(
        "pyspark.sql.types.Geometry of the declared reference system",
        T.Geometry,
        _PLACE,
        lambda wire: T.Geometry(wire[1], wire[0]),
    ),
    T.GeographyType: BoxedType(
        "pyspark.sql.types.Geography of the declared reference system",
        T.Geography,
        _PLACE,
        lambda wire: T.Geography(wire[1], wire[0]),
    ),
}

_NESTED_TAKES: Final[Mapping[type[T.DataType], str]] = {
    T.ArrayType: "list or tuple",
    T.MapType: "dict",
    T.StructType: "tuple, list or Row with a value for each field, or dict by their names",
}
