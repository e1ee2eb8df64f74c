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
    "BINARY",
    "BOOLEAN",
    "DATE",
    "DOUBLE",
    "FLOAT",
    "INTERVAL",
    "SEQUENCES",
    "STRING",
    "TIMESTAMP",
    "TIMESTAMP_NTZ",
    "VOID",
    "Convert",
    "Refused",
    "Scalar",
    "decimal_scalar",
    "integer_scalar",
    "time_scalar",
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


def time_scalar(precision: int) -> Scalar:
    """Times of day of so many digits after the second."""
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


def decimal_scalar(precision: int, scale: int) -> Scalar:
    """Decimals of so many digits, and so many after the point."""
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


def integer_scalar(bits: int) -> Scalar:
    """Integers of so many bits."""
    top = 1 << (bits - 1)
    return Scalar({int: None, np.integer: int}, None, (-top, top - 1), (bool,))


_REAL = {int: float, np.floating: float, np.integer: float}

BOOLEAN = Scalar({bool: None, np.bool_: bool})
FLOAT = Scalar(dict.fromkeys((float, *_REAL), _float32), refused=(bool,))
DOUBLE = Scalar({float: None, **_REAL}, refused=(bool,))
STRING = Scalar({str: None})
BINARY = Scalar({bytes: None, bytearray: bytes, memoryview: bytes})
VOID = Scalar({type(None): None})
DATE = Scalar(
    {datetime.date: _date, np.datetime64: _numpy_date},
    _checked(_undate, "date"),
    refused=(datetime.datetime,),
)
TIMESTAMP = Scalar(
    {datetime.datetime: _timestamp, np.datetime64: _numpy_timestamp},
    _checked(_untimestamp, "timestamp"),
)
TIMESTAMP_NTZ = Scalar(
    {datetime.datetime: _ntz, np.datetime64: _numpy_ntz}, _checked(_unntz, "timestamp_ntz")
)
INTERVAL = Scalar(
    {datetime.timedelta: _interval, np.timedelta64: _numpy_interval},
    _checked(_uninterval, "interval"),
)
