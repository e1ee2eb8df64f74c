"""Rows and structs as wholes: what may stand for one, and how many are taken apart at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pyspark.sql import types as T

from statebackend.errors import ValueMismatchError
from statebackend.schema.scalars import mismatch, scalar_for, typed

__all__ = ["as_row", "by_names", "columns_of_one_type", "diagnose", "row_maker"]


def as_row(schema: T.StructType, values: object) -> tuple[Any, ...]:
    """A tuple (or list, as Spark takes it) with one value for each field, as a tuple.

    Raises:
        ValueMismatchError: says what was given, and what is wanted.
    """
    count, rows = len(schema.fields), (tuple, list)
    if isinstance(values, rows) and len(values) == count:
        return tuple(values)
    got = f"{len(values)} values" if isinstance(values, rows) else f"a {type(values).__name__}"
    raise ValueMismatchError(
        f"A row of {schema.simpleString()} cannot be made of {got}.",
        todo=f"Pass a tuple of {count}, such as ({', '.join(schema.names)},).",
    )


def row_maker(dtype: T.StructType) -> Callable[[Iterable[Any]], T.Row]:
    """Values of a struct's fields to a `Row`, without the calls that `Row` itself would make."""
    names, new = dtype.names, tuple.__new__

    def make(values: Iterable[Any]) -> T.Row:
        row: T.Row = new(T.Row, values)
        row.__fields__ = names
        return row

    return make


def columns_of_one_type(rows: Sequence[Any], count: int) -> list[Any] | None:
    """Rows as columns if they are tuples of `count` values, and each column is of one type."""
    if set(map(type, rows)) != {tuple} or set(map(len, rows)) != {count}:
        return None
    columns: list[Any] = list(zip(*rows, strict=True))
    return columns if all(len(set(map(type, column))) == 1 for column in columns) else None


def by_names(dtype: T.StructType, value: dict[Any, Any], path: str) -> tuple[Any, ...]:
    """The values of a struct that was given as a dict; a missing one is None, as in Spark.

    Raises:
        ValueMismatchError: a name that is no field.
    """
    unknown = [name for name in value if name not in dtype.names]
    if unknown:
        raise mismatch(path, dtype, value, f"a dict with {unknown[0]!r}")
    return tuple([value.get(name) for name in dtype.names])


def diagnose(schema: T.StructType, values: tuple[Any, ...], error: Exception) -> ValueMismatchError:
    """Which value of a row that would not encode is the wrong one."""
    for field_, value in zip(schema, values, strict=True):
        if value is None and not field_.nullable:
            return mismatch(field_.name, field_.dataType, None)
        if scalar_for(field_.dataType) is None:
            continue
        try:
            typed(field_.name, field_.dataType, field_.nullable)(value)
        except ValueMismatchError as found:
            return found
    return ValueMismatchError(
        f"A row of {schema.simpleString()} could not be encoded: {error}.",
        todo="Check the values against the schema.",
    )
