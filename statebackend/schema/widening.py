"""Which simple type may become which other one, and how its values do.

The list is that of Delta Lake's type widening (docs.delta.io/delta-type-widening), but for times,
which are ours. Iceberg's type promotion is a part of it. Nothing is ever rounded:

=============================== =================================================================
from                            to
=============================== =================================================================
byte                            short, int, long, double, decimal
short                           int, long, double, decimal
int                             long, double, decimal
long                            decimal
float                           double
decimal(p, s)                   decimal(P, S) with S >= s and P - S >= p - s
date                            timestamp_ntz (its midnight)
time(p)                         time(P) with P >= p
void                            anything that may be null
=============================== =================================================================

A decimal for an integer needs 3, 5, 10 or 19 digits before its point (Delta wants 10 or 20).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from statebackend.errors import ValueMismatchError
from statebackend.schema.scalars import Convert
from statebackend.schema.type_table import simple, simple_type

__all__ = ["ArrowConvert", "column_widener", "may_become", "widener"]

ArrowConvert = Callable[[pa.Array], pa.Array]


def widener(old: T.DataType, new: T.DataType) -> tuple[bool, Convert | None]:
    """Whether `old` may become `new`, another type; and what is to be done to a decoded value.

    The function never gets None; None for it: a value is shown as it is.
    """
    if isinstance(old, T.NullType):
        return True, None
    if isinstance(old, T.TimeType) and isinstance(new, T.TimeType):
        return old.precision <= new.precision, None
    row = simple_type(old)
    if row is None:
        return False, None
    if isinstance(new, T.DecimalType):
        if isinstance(old, T.DecimalType):
            whole, scale = old.precision - old.scale, old.scale
        elif row.digits:
            whole, scale = row.digits, 0
        else:
            return False, None
        fits = new.scale >= scale and new.precision - new.scale >= whole
        return fits, _to_decimal(new) if fits else None
    if type(new) not in row.wider:
        return False, None
    if isinstance(new, T.TimestampNTZType):
        return True, _midnight
    return True, float if isinstance(new, T.DoubleType) else None


def column_widener(wanted: pa.DataType) -> ArrowConvert:
    """What is to be done to a column of stored values, whose type may become this one.

    The function raises ValueMismatchError for a value that cannot.
    """

    def cast(array: pa.Array) -> pa.Array:
        try:
            return array.cast(wanted)
        except pa.ArrowInvalid as error:
            raise ValueMismatchError(
                f"A stored {array.type} cannot become {wanted}: {error}.",
                todo="Restart with the field's old type, and change such values first.",
            ) from error

    return cast


def may_become(old: T.DataType) -> str:
    """The wider types of a type, in words; "" where there is none."""
    row = simple_type(old)
    if row is None:
        return ""
    wider = [kind().simpleString() for kind in row.wider]
    if row.digits:
        wider.append(f"decimal({row.digits},0)")
    if isinstance(old, T.DecimalType):
        wider.append("a decimal with as many digits on both sides of the point, or more")
    if isinstance(old, T.TimeType) and old.precision < 9:
        wider.append("a time of more digits")
    return ", ".join(wider)


def _to_decimal(new: T.DecimalType) -> Convert:
    scalar = simple(new).scalar
    unscaled, restored = scalar.to_plain[Decimal], scalar.from_plain
    assert unscaled is not None
    assert restored is not None

    def convert(value: Any) -> Any:
        return restored(unscaled(Decimal(value)))  # with the exponent of its new type

    return convert


def _midnight(value: datetime.date) -> datetime.datetime:
    return datetime.datetime.combine(value, datetime.time())
