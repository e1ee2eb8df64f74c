"""Which Python values a field of a simple type takes, and the plain form they are kept in.

The plain forms: bool, int (also dates as days, timestamps and intervals as microseconds, times as
nanoseconds, decimals as their unscaled value), float, str, bytes, None for void. Nothing is coerced
silently: a bool is no int, a float is no int, a datetime is no date. Taken besides the exact type:
an int for a float or double, numpy scalars of the right kind (datetime64 and timedelta64 only if
they are whole microseconds), subclasses (of a pandas Timestamp, the nanoseconds are cut off, as
Spark does).

`Refused` is this floor's own: callers see ValueMismatchError.
"""

from __future__ import annotations

import array
import datetime
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Context, Decimal
from typing import Any

import numpy as np
from pyspark.sql import types as T

from statebackend.errors import CorruptionError, ValueMismatchError

__all__ = [
    "SEQUENCES",
    "Convert",
    "Refused",
    "Scalar",
    "mismatch",
    "scalar_for",
    "typed",
]

Convert = Callable[[Any], Any]

SEQUENCES = (list, tuple, np.ndarray, array.array)
"""What an array field takes."""

_SINGLE = struct.Struct("<f")
_EPOCH_DAY = datetime.date(1970, 1, 1).toordinal()
_EPOCH = datetime.datetime(1970, 1, 1)
_EPOCH_UTC = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)
_DAY_NANOS = 86_400 * 10**9
# Room for every digit of a decimal(38, s) of any exponent that can fit one.
_EXACT = Context(prec=120)


class Refused(ValueError):
    """A value that its field cannot hold; the message ends the sentence "cannot hold ..."."""


@dataclass(frozen=True)
class Scalar:
    """What a field of a simple type takes and gives back.

    Args:
        to_plain: exact Python type to the conversion into the plain form; None: as it is.
        from_plain: the plain form to what `pyspark.sql.Row` would carry; None: as it is.
        bounds: lowest and highest plain int; None where the type is not an integer.
        refused: subclasses of an accepted type that are something else altogether.
    """

    to_plain: Mapping[type, Convert | None]
    from_plain: Convert | None = None
    bounds: tuple[int, int] | None = None
    refused: tuple[type, ...] = field(default=())

    def converter(self, kind: type) -> Convert | None:
        """The conversion for values of exactly this Python type.

        Raises:
            Refused: no value of this type can go into the field.
        """
        if not (self.refused and issubclass(kind, self.refused)):
            for base in kind.__mro__:
                if base in self.to_plain:
                    convert = self.to_plain[base]
                    # A subclass must be stripped to its base: encoders test for exact types.
                    return base if convert is None and base is not kind else convert
        raise Refused(f"a value of type {kind.__name__}")


def scalar_for(dtype: T.DataType) -> Scalar | None:
    """The `Scalar` of a simple type; None for arrays, maps, structs and unsupported types."""
    if isinstance(dtype, T.DecimalType):
        return _decimal(dtype.precision, dtype.scale)
    if isinstance(dtype, T.TimeType):
        return _time(dtype.precision)
    return _SCALARS.get(type(dtype))


def mismatch(path: str, dtype: T.DataType, value: object, why: str = "") -> ValueMismatchError:
    """The error for a value that does not fit its field."""
    kind = type(value).__name__
    shown = "null" if value is None else (why or f"a value of type {kind}")
    todo = f"Convert the value first: the field takes {_EXPECTED[type(dtype)]}."
    if kind in ("NaTType", "NAType"):
        todo = "Pass None for a missing value."
    return ValueMismatchError(
        f"Field {path!r} is {dtype.simpleString()}"
        + (" and not nullable" if value is None else "")
        + f" and cannot hold {shown}"
        + (f" (type {kind})" if why and value is not None and kind not in why else "")
        + ".",
        todo=todo,
    )


def typed(path: str, dtype: T.DataType, nullable: bool) -> Convert:
    """One function that takes any value for a field of a simple type to its plain form.

    It raises ValueMismatchError naming `path` for what does not fit, and lets None through where
    the field is nullable.
    """
    scalar = scalar_for(dtype)
    assert scalar is not None, "nested types are converted by their codec"
    known: dict[type, Convert | None] = dict(scalar.to_plain)
    low, high = scalar.bounds or (0, 0)
    bounded = scalar.bounds is not None

    def convert(value: Any) -> Any:
        if value is None and nullable:
            return None
        kind = type(value)
        try:
            step = known[kind] if kind in known else scalar.converter(kind)
            plain = value if step is None else step(value)
            if bounded and not low <= plain <= high:
                raise Refused(f"{value}, which is out of range")
        except (Refused, ValueError, OverflowError, TypeError) as error:
            why = str(error) if isinstance(error, Refused) else f"{value!r}: {error}"
            raise mismatch(path, dtype, value, why) from None
        return plain

    return convert


# --- conversions -------------------------------------------------------------------------------


def _float32(value: Any) -> float:
    """Rounded to single precision, as it will come back; OverflowError when out of range."""
    narrow: float = _SINGLE.unpack(_SINGLE.pack(value))[0]
    return narrow


def _date(value: datetime.date) -> int:
    return value.toordinal() - _EPOCH_DAY


def _undate(days: int) -> datetime.date:
    return datetime.date.fromordinal(days + _EPOCH_DAY)


def _ntz(value: datetime.datetime) -> int:
    if value.tzinfo is not None:
        raise Refused("a datetime with a time zone")
    # int() refuses the NaN that pandas' NaT gives.
    return int((value - _EPOCH) // _MICROSECOND)


def _numpy_date(value: np.datetime64) -> int:
    return _numpy_exact(value, "datetime64[D]")


def _numpy_ntz(value: np.datetime64) -> int:
    return _numpy_exact(value, "datetime64[us]")


def _numpy_timestamp(value: np.datetime64) -> int:
    return _timestamp(_unntz(_numpy_ntz(value)))


def _numpy_interval(value: np.timedelta64) -> int:
    return _numpy_exact(value, "timedelta64[us]")


def _numpy_exact(value: Any, unit: str) -> int:
    narrow = value.astype(unit)
    if narrow != value:  # also for NaT, which equals nothing
        raise Refused(f"{value} (a numpy {value.dtype})")
    return int(narrow.astype(np.int64))


def _unntz(micros: int) -> datetime.datetime:
    return _EPOCH + datetime.timedelta(microseconds=micros)


def _interval(value: datetime.timedelta) -> int:
    return value // _MICROSECOND


def _uninterval(micros: int) -> datetime.timedelta:
    return datetime.timedelta(microseconds=micros)


def _timestamp(value: datetime.datetime) -> int:
    # As pyspark's toInternal, but for the hour that a clock repeats: mktime's answer for it depends
    # on what it was asked before, and one key would have two encodings. `fold` says which hour.
    if type(value) is not datetime.datetime and value.tzinfo is None:
        # A pandas Timestamp without a zone refuses to say what it would be in another.
        value = datetime.datetime.combine(value.date(), value.time().replace(fold=value.fold))
    return (value.astimezone(datetime.UTC) - _EPOCH_UTC) // _MICROSECOND


_untimestamp: Convert = T.TimestampType().fromInternal


def _checked(restore: Convert, name: str) -> Convert:
    """Spark's years go beyond Python's: say so instead of an OverflowError."""

    def checked(plain: int) -> Any:
        try:
            return restore(plain)
        except (OverflowError, ValueError, OSError) as error:
            raise ValueMismatchError(
                f"A stored {name} ({plain}) is outside the years 1 to 9999 of Python.",
                todo="Keep such values as a bigint, or read them with the Arrow interface.",
            ) from error

    return checked


def _time(precision: int) -> Scalar:
    step = 10 ** max(6 - precision, 0)

    def nanos(value: datetime.time) -> int:
        if value.tzinfo is not None:
            raise Refused("a time with a time zone")
        if value.microsecond % step:
            raise Refused(f"{value} without rounding")
        seconds = (value.hour * 60 + value.minute) * 60 + value.second
        return (seconds * 1_000_000 + value.microsecond) * 1000

    return Scalar({datetime.time: nanos}, _untime, (0, _DAY_NANOS - 1))


def _untime(nanos: int) -> datetime.time:
    if not 0 <= nanos < _DAY_NANOS:
        raise CorruptionError(
            f"A stored time ({nanos} nanoseconds) is not within a day.",
            todo="Restore from the durable copy; the local one is damaged.",
        )
    seconds, below = divmod(nanos, 10**9)
    minutes, second = divmod(seconds, 60)
    return datetime.time(minutes // 60, minutes % 60, second, below // 1000)


def _decimal(precision: int, scale: int) -> Scalar:
    limit = 10**precision - 1

    def unscaled(value: Decimal) -> int:
        if not value.is_finite():
            raise Refused(f"{value}")
        # An exponent far outside cannot fit, and would cost as many digits as it says.
        if value and not -precision - scale <= value.adjusted() < precision:
            raise Refused(f"{value}, which is out of range")
        scaled = value.scaleb(scale, _EXACT)
        plain = int(scaled)
        if plain != scaled:
            raise Refused(f"{value} without rounding")
        if not -limit <= plain <= limit:
            raise Refused(f"{value}, which is out of range")
        return plain

    def restored(plain: int) -> Decimal:
        return Decimal(plain).scaleb(-scale, _EXACT)

    return Scalar({Decimal: unscaled}, restored, (-limit, limit))


def _integer(bits: int) -> Scalar:
    top = 1 << (bits - 1)
    return Scalar({int: None, np.integer: int}, None, (-top, top - 1), (bool,))


_REAL = {int: float, np.floating: float, np.integer: float}

_SCALARS: dict[type[T.DataType], Scalar] = {
    T.BooleanType: Scalar({bool: None, np.bool_: bool}),
    T.ByteType: _integer(8),
    T.ShortType: _integer(16),
    T.IntegerType: _integer(32),
    T.LongType: _integer(64),
    T.FloatType: Scalar(dict.fromkeys((float, *_REAL), _float32), refused=(bool,)),
    T.DoubleType: Scalar({float: None, **_REAL}, refused=(bool,)),
    T.StringType: Scalar({str: None}),
    T.BinaryType: Scalar({bytes: None, bytearray: bytes, memoryview: bytes}),
    T.DateType: Scalar(
        {datetime.date: _date, np.datetime64: _numpy_date},
        _checked(_undate, "date"),
        refused=(datetime.datetime,),
    ),
    T.TimestampType: Scalar(
        {datetime.datetime: _timestamp, np.datetime64: _numpy_timestamp},
        _checked(_untimestamp, "timestamp"),
    ),
    T.TimestampNTZType: Scalar(
        {datetime.datetime: _ntz, np.datetime64: _numpy_ntz}, _checked(_unntz, "timestamp_ntz")
    ),
    T.DayTimeIntervalType: Scalar(
        {datetime.timedelta: _interval, np.timedelta64: _numpy_interval},
        _checked(_uninterval, "interval"),
    ),
    T.NullType: Scalar({type(None): None}),
}

_EXPECTED: dict[type[T.DataType], str] = {
    T.BooleanType: "bool",
    **dict.fromkeys((T.ByteType, T.ShortType, T.IntegerType, T.LongType), "int in range"),
    **dict.fromkeys((T.FloatType, T.DoubleType), "float or int"),
    T.DecimalType: "decimal.Decimal; round with quantize()",
    T.StringType: "str",
    T.BinaryType: "bytes",
    T.DateType: "datetime.date",
    T.TimestampType: "datetime.datetime",
    T.TimestampNTZType: "datetime.datetime without a time zone",
    T.DayTimeIntervalType: "datetime.timedelta",
    T.TimeType: "datetime.time, of no more digits than declared",
    T.NullType: "None",
    T.VariantType: "pyspark.sql.types.VariantVal",
    T.GeometryType: "pyspark.sql.types.Geometry of the declared reference system",
    T.GeographyType: "pyspark.sql.types.Geography of the declared reference system",
    T.ArrayType: "list or tuple",
    T.MapType: "dict",
    T.StructType: "tuple, list or Row with a value for each field, or dict by their names",
}
