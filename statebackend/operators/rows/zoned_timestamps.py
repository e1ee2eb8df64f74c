"""Timestamps in state with their time zone, for processors of our own API.

Spark shows a processor its input's timestamps with the session's zone and its state's without one:
they cannot be compared. An unmodified Spark processor gets both as in Spark. Ours get both with
the session's zone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    Row,
    StructType,
    TimestampType,
)

__all__ = ["zoned", "zoned_keys"]

Convert = Callable[[Any], Any]
_ROW: Final = tuple.__new__


def zoned(codec: Any, schema: StructType, timezone: str) -> Any:
    """``codec``, or one that decodes timestamps with their zone where ``schema`` has any."""
    converts = [_convert(field.dataType, timezone) for field in schema.fields]
    return Zoned(codec, converts) if any(converts) else codec


def zoned_keys(codec: Any, schema: StructType, timezone: str) -> Any:
    """As :func:`zoned`, for a codec of keys."""
    converts = [_convert(field.dataType, timezone) for field in schema.fields]
    return ZonedKeys(codec, converts) if any(converts) else codec


class Zoned:
    """A codec of rows around another one. Encoding is that one's."""

    def __init__(self, codec: Any, converts: Sequence[Convert | None]) -> None:
        self._codec = codec
        self._converts = [(i, c) for i, c in enumerate(converts) if c is not None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def decode(self, data: bytes) -> tuple[Any, ...]:
        """A row."""
        return self.shown(self._codec.decode(data))

    def decode_many(self, rows: Sequence[bytes | None]) -> list[Any]:
        """Many rows; None stays None."""
        return [row and self.shown(row) for row in self._codec.decode_many(rows)]

    def shown(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """A decoded row as it is shown."""
        values = list(row)
        for position, convert in self._converts:
            if values[position] is not None:
                values[position] = convert(values[position])
        return tuple(values)


class ZonedKeys(Zoned):
    """The same around a codec of keys, which says where a key ends."""

    def decode(self, data: bytes, offset: int = 0) -> Any:
        """A key, and its end."""
        key, end = self._codec.decode(data, offset)
        return self.shown(key), end


def _convert(dtype: DataType, timezone: str) -> Convert | None:
    """From a value as codecs decode it to the one that is shown; None where that is the same."""
    if isinstance(dtype, TimestampType):
        zone = pa.lib.string_to_tzinfo(timezone)  # as the input's: also offsets such as +09:00
        return lambda moment: moment.astimezone(zone)  # naive: in the process's own zone
    if isinstance(dtype, ArrayType):
        return _each(_convert(dtype.elementType, timezone))
    if isinstance(dtype, MapType):
        return _entries(_convert(dtype.keyType, timezone), _convert(dtype.valueType, timezone))
    if isinstance(dtype, StructType):
        return _fields([_convert(field.dataType, timezone) for field in dtype.fields])
    return None


def _each(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda items: [None if item is None else convert(item) for item in items]


def _entries(key: Convert | None, value: Convert | None) -> Convert | None:
    if key is None and value is None:
        return None

    def entries(shown: dict[Any, Any]) -> dict[Any, Any]:
        return {
            key(k) if key else k: value(v) if value and v is not None else v
            for k, v in shown.items()
        }

    return entries


def _fields(converts: Sequence[Convert | None]) -> Convert | None:
    if not any(converts):
        return None

    def fields(row: Any) -> Any:
        values: Iterable[Any] = (
            convert(value) if convert and value is not None else value
            for convert, value in zip(converts, row, strict=True)
        )
        made = _ROW(type(row), values)
        if isinstance(row, Row) and "__fields__" in getattr(row, "__dict__", {}):
            made.__fields__ = row.__fields__
        return made

    return fields
