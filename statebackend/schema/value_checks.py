"""Checks what Python values may stand for a field, a struct or a row, and says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pyspark.sql import types as T

from statebackend.errors import ValueMismatchError
from statebackend.schema.scalars import Convert, Refused
from statebackend.schema.type_table import simple, simple_type, takes

__all__ = [
    "as_row",
    "by_names",
    "columns_of_one_type",
    "diagnose",
    "mismatch",
    "row_maker",
    "typed",
]


def mismatch(path: str, dtype: T.DataType, value: object, why: str = "") -> ValueMismatchError:
    """The error for a value that does not fit its field."""
    kind = type(value).__name__
    shown = "null" if value is None else (why or f"a value of type {kind}")
    todo = f"Convert the value first: the field takes {takes(dtype)}."
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
    scalar = simple(dtype).scalar
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
        if simple_type(field_.dataType) is None:
            continue
        try:
            typed(field_.name, field_.dataType, field_.nullable)(value)
        except ValueMismatchError as found:
            return found
    return ValueMismatchError(
        f"A row of {schema.simpleString()} could not be encoded: {error}.",
        todo="Check the values against the schema.",
    )
