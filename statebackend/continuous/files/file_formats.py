"""The formats of files that sources read and sinks write, and what they can hold."""

from __future__ import annotations

from typing import Final

from pyspark.sql import types as T

from statebackend.errors import SettingError, UnsupportedTypeError

__all__ = ["FORMATS", "check_format", "check_types"]

FORMATS: Final = ("parquet", "json", "csv")

_LEAVES: Final = (
    T.BooleanType,
    T.ByteType,
    T.ShortType,
    T.IntegerType,
    T.LongType,
    T.FloatType,
    T.DoubleType,
    T.DecimalType,
    T.StringType,
    T.TimestampType,
    T.TimestampNTZType,
)


def check_format(format: str) -> None:
    """Refuse what is no format.

    Raises:
        SettingError: naming those there are.
    """
    if format not in FORMATS:
        raise SettingError(
            f"There is no format {format!r} of files.", todo=f"Choose one of {', '.join(FORMATS)}."
        )


def check_types(schema: T.StructType, format: str) -> None:
    """Refuse columns that a format of text has no one form for.

    JSON lines and CSV hold booleans, numbers, strings, timestamps and, as columns, dates; JSON
    also arrays and structs of them.

    Raises:
        UnsupportedTypeError: naming the field.
    """
    if format != "parquet":
        for field in schema:
            if not isinstance(field.dataType, T.DateType):
                _check(field.dataType, field.name, format)


def _check(dtype: T.DataType, path: str, format: str) -> None:
    if format == "json" and isinstance(dtype, T.ArrayType):
        _check(dtype.elementType, f"{path}[]", format)
    elif format == "json" and isinstance(dtype, T.StructType):
        for field in dtype:
            _check(field.dataType, f"{path}.{field.name}", format)
    elif not isinstance(dtype, _LEAVES):
        raise UnsupportedTypeError(
            f"Field {path!r} has type {dtype.simpleString()}, which files of {format} do not hold.",
            todo='Declare it STRING, or use format="parquet".',
        )
