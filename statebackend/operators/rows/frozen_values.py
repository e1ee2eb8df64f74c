"""Copies of values that user code has returned and may go on changing, such as a list it reuses."""

from __future__ import annotations

from operator import is_
from typing import Any, Final

import numpy as np
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    MapType,
    Row,
    StructType,
    UserDefinedType,
    VariantType,
)

__all__ = ["MUTABLE", "frozen", "frozen_in_frame"]

MUTABLE: Final = (ArrayType, MapType, StructType, BinaryType, UserDefinedType, VariantType)
"""Types of which a value can be changed from outside."""

_UNCHANGING: Final = frozenset({int, float, str, bool, bytes, type(None)})


def frozen(value: Any) -> Any:
    """The same value, of which nothing can be changed from outside any more."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if isinstance(value, tuple):
        return _frozen_row(value)
    if isinstance(value, list):
        return [frozen(one) for one in value]
    if isinstance(value, dict):
        return {frozen(key): frozen(one) for key, one in value.items()}
    if isinstance(value, bytearray):
        return bytes(value)
    return value.copy() if isinstance(value, np.ndarray) else value


def _frozen_row(row: tuple[Any, ...]) -> tuple[Any, ...]:
    values = [frozen(one) for one in row]
    if all(map(is_, values, row)):
        return row
    made = tuple.__new__(type(row), values)
    if isinstance(row, Row) and "__fields__" in getattr(row, "__dict__", ()):
        made.__fields__ = row.__fields__  # type: ignore[attr-defined]
    return made


def frozen_in_frame(value: Any) -> Any:
    """As `frozen`, of a cell of a DataFrame: an array of objects becomes a list."""
    if isinstance(value, list):
        return [frozen_in_frame(one) for one in value]
    if isinstance(value, dict):
        return {frozen_in_frame(key): frozen_in_frame(one) for key, one in value.items()}
    if type(value) is tuple:
        return tuple([frozen_in_frame(one) for one in value])
    if isinstance(value, np.ndarray):
        return frozen_in_frame(value.tolist()) if value.dtype == object else value.copy()
    return bytes(value) if isinstance(value, bytearray) else value
