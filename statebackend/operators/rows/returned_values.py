"""Values that user code returns, to Arrow: what Spark takes, without what it would cut off.

Spark hands them to pyarrow; so is it done here. Refused besides what pyarrow refuses: numbers with
a fraction, and numpy booleans, where whole numbers are wanted; nulls where there may be none; names
in a struct that are no fields of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.conversion import LocalDataToArrowConversion
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    Row,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    TimeType,
)

from statebackend.errors import ValueMismatchError
from statebackend.operators.rows.returned_row_checks import by_name, inner_names, refuse_unknown

__all__ = ["column_array"]

Adapt = Callable[[Any], Any]

_NOTHING: Final = type(None)
# The types that pyarrow may be given as they are, where it takes others for what they are not.
_WHOLE: Final[dict[type[DataType], frozenset[type]]] = {
    **dict.fromkeys((ByteType, ShortType, IntegerType, LongType), frozenset({int, _NOTHING})),
    **dict.fromkeys(
        (TimestampType, TimestampNTZType, DateType), frozenset({datetime, date, _NOTHING})
    ),
    TimeType: frozenset({time, _NOTHING}),
    DayTimeIntervalType: frozenset({timedelta, _NOTHING}),
}
# Letters of the array module; and the type that all values must be of.
_PACKED: Final[dict[type[DataType], tuple[str, type]]] = {
    ByteType: ("b", int),
    ShortType: ("h", int),
    IntegerType: ("i", int),
    LongType: ("q", int),
    FloatType: ("f", float),
    DoubleType: ("d", float),
}
_PLAIN: Final = (StringType, BinaryType, BooleanType, FloatType, DoubleType, DecimalType, NullType)
_SHOWN_CHARS: Final = 200


class _Refused(ValueError):
    """Ends the sentence that a value is no such type (...)."""


def column_array(
    values: Sequence[Any], field: StructField, kind: pa.DataType, describe: Callable[[], str]
) -> pa.Array:
    """A column of output.

    Args:
        field: what it was declared as. kind: its Arrow type.
        describe: says whose values these are.

    Raises:
        ValueMismatchError: a value does not fit; it is shown.
    """
    try:
        return _array(values, field, kind)
    except Exception as error:
        value, why = _culprit(values, field, kind, error)
        shown = repr(value)
        if len(shown) > _SHOWN_CHARS:
            shown = shown[:_SHOWN_CHARS] + "..."
        raise ValueMismatchError(
            f"{describe()} returned a value for column {field.name!r} that is no "
            f"{field.dataType.simpleString()}: {shown} ({why}).",
            todo="Return values of the types that output_schema declares.",
        ) from error


def _culprit(
    values: Sequence[Any], field: StructField, kind: pa.DataType, error: Exception
) -> tuple[Any, Exception]:
    for value in values:
        try:
            _array((value,), field, kind)
        except Exception as found:
            return value, found
    return values, error


def _array(values: Sequence[Any], field: StructField, kind: pa.DataType) -> pa.Array:
    dtype = field.dataType
    kinds = set(map(type, values))
    if not field.nullable and _NOTHING in kinds:
        raise _Refused("the column is not nullable")
    packed = _PACKED.get(type(dtype))
    if packed is not None and kinds == {packed[1]}:
        data = array(packed[0], values)  # quicker than pyarrow, which would import pandas, too
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(data)])
    if isinstance(dtype, _PLAIN):
        return pa.array(values, type=kind)
    whole = _WHOLE.get(type(dtype))
    if whole is not None and kinds <= whole:
        return pa.array(values, type=kind)
    if not _ours(dtype):
        return _by_pyspark(values, field, kind)
    adapt = _adapter(dtype)
    if adapt is not None:
        values = [None if value is None else adapt(value) for value in values]
    return pa.array(values, type=kind)


def _ours(dtype: DataType) -> bool:
    if isinstance(dtype, StructType):
        return all(_ours(field.dataType) for field in dtype)
    if isinstance(dtype, ArrayType):
        return _ours(dtype.elementType)
    if isinstance(dtype, MapType):
        return _ours(dtype.keyType) and _ours(dtype.valueType)
    return isinstance(dtype, _PLAIN) or type(dtype) in _WHOLE


def _by_pyspark(values: Sequence[Any], field: StructField, kind: pa.DataType) -> pa.Array:
    """Variants, user-defined types and the like, which have Python classes of pyspark's."""
    check = inner_names(field.dataType)
    if check is not None:
        for value in values:
            check(value)
    rows, schema = [(value,) for value in values], StructType([field])
    table = LocalDataToArrowConversion.convert(rows, schema, False)
    return table.column(0).combine_chunks().cast(kind)


# --- one value ---------------------------------------------------------------------------------


def _adapter(dtype: DataType) -> Adapt | None:
    """What a value (not None) goes through on its way to pyarrow; None: nothing."""
    if isinstance(dtype, StructType):
        return _struct_adapter(dtype)
    if isinstance(dtype, ArrayType):
        return _array_adapter(dtype)
    if isinstance(dtype, MapType):
        return _map_adapter(dtype)
    return _whole if type(dtype) in _WHOLE else None


def _whole(value: Any) -> Any:
    if isinstance(value, bool | np.bool_):
        raise _Refused("a boolean")
    if isinstance(value, float | np.floating | Decimal):
        try:
            whole = int(value)
        except (ValueError, OverflowError) as error:
            raise _Refused(str(error)) from error
        if whole != value:
            raise _Refused("a fractional number would be cut off")
        return whole
    return value


def _inner(dtype: DataType, nullable: bool) -> Adapt | None:
    adapt = _adapter(dtype)
    if nullable and adapt is None:
        return None

    def inner(value: Any) -> Any:
        if value is None:
            if not nullable:
                raise _Refused("a null inside, where there may be none")
            return None
        return value if adapt is None else adapt(value)

    return inner


def _array_adapter(dtype: ArrayType) -> Adapt | None:
    item = _inner(dtype.elementType, dtype.containsNull)
    if item is None:
        return None

    def adapt(value: Any) -> Any:
        if isinstance(value, str | bytes | dict) or not hasattr(value, "__iter__"):
            return value  # pyarrow says what it is
        return [item(one) for one in value]

    return adapt


def _map_adapter(dtype: MapType) -> Adapt:
    key_step = _inner(dtype.keyType, False)
    value_step = _inner(dtype.valueType, dtype.valueContainsNull)
    assert key_step is not None

    def adapt(value: Any) -> Any:
        pairs = value.items() if isinstance(value, dict) else value
        if isinstance(pairs, str | bytes) or not hasattr(pairs, "__iter__"):
            return value
        try:
            return [
                (key_step(key), item if value_step is None else value_step(item))
                for key, item in pairs
            ]
        except TypeError as error:
            raise _Refused("neither a dict nor pairs") from error

    return adapt


def _struct_adapter(dtype: StructType) -> Adapt:
    names = dtype.names
    steps = [_inner(field.dataType, field.nullable) for field in dtype]

    def adapt(value: Any) -> Any:
        fields = getattr(value, "__fields__", None) if isinstance(value, Row) else None
        if fields is not None and list(fields) != names:
            value = by_name(fields, value)
        if isinstance(value, dict):
            refuse_unknown(value, names)
            value = tuple([value.get(name) for name in names])
        if not isinstance(value, tuple):
            return value
        if len(value) != len(names):
            raise _Refused(f"{len(value)} values for {len(names)} fields")
        return tuple(
            [one if step is None else step(one) for one, step in zip(value, steps, strict=True)]
        )

    return adapt
