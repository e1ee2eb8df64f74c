"""Helpers over `pyspark.sql.types.StructType`: Arrow types, JSON, checks, columns made to fit."""

from __future__ import annotations

import json

import pyarrow as pa
from pyspark.sql import types as T

from statebackend.errors import SchemaError, UnsupportedTypeError
from statebackend.schema.ddl import parse_ddl_type
from statebackend.schema.type_table import boxed_type, simple_type

__all__ = [
    "arrow_schema",
    "arrow_type",
    "as_schema",
    "check_key_schema",
    "check_value_schema",
    "ddl_of",
    "is_fixed_width",
    "schema_from_json",
]

_TODO = (
    "Use booleans, numbers, decimals of 1 to 38 digits, strings, binaries, dates, times, "
    "timestamps, day-time intervals, variants, arrays, maps or structs."
)
_TODO_FOR: dict[type[T.DataType], str] = {
    T.CharType: "Declare it string: a char's padding would have to be guessed.",
    T.VarcharType: "Declare it string.",
    T.YearMonthIntervalType: "Keep the number of months as an int: Python has no such value.",
    T.CalendarIntervalType: "Keep months, days and microseconds: Python has no such value.",
}


def as_schema(schema: T.DataType | str, name: str = "value") -> T.StructType:
    """A schema as a `StructType`: a bare type becomes its only field.

    Args:
        schema: a `StructType`, any other `DataType`, or Spark DDL.
        name: the field's name for a bare type.

    Raises:
        SchemaError: DDL that does not parse.
    """
    if isinstance(schema, str):
        schema = parse_ddl_type(schema)
    return (
        schema if isinstance(schema, T.StructType) else T.StructType([T.StructField(name, schema)])
    )


def arrow_type(dtype: T.DataType, path: str = "") -> pa.DataType:
    """The Arrow type that stands for a Spark type here.

    Timestamps are microseconds, with zone UTC for `TimestampType`. Inner fields are nullable
    whatever Spark says, as Arrow would refuse casts that narrow them.

    Raises:
        UnsupportedTypeError: char, varchar, year-month and calendar intervals, user-defined
            types; `path` names the field.
    """
    row = simple_type(dtype)
    if row is not None:
        return row.arrow
    if isinstance(dtype, T.ArrayType):
        return pa.list_(arrow_type(dtype.elementType, f"{path}[]"))
    if isinstance(dtype, T.MapType):
        key = arrow_type(dtype.keyType, f"{path}.key")
        return pa.map_(key, arrow_type(dtype.valueType, f"{path}.value"))
    if isinstance(dtype, T.StructType):
        fields = [
            pa.field(f.name, arrow_type(f.dataType, f"{path}.{f.name}".lstrip("."))) for f in dtype
        ]
        if not fields:
            raise UnsupportedTypeError(f"Field {path!r} is a struct without fields.", todo=_TODO)
        return pa.struct(fields)
    box = boxed_type(dtype)
    if box is None:
        raise _unsupported(dtype, path)
    # The tag tells pyspark's own converters what the struct stands for.
    return pa.struct(
        [pa.field(f.name, arrow_type(f.dataType), metadata=f.metadata or None) for f in box.fields]
    )


def _unsupported(dtype: T.DataType, path: str) -> UnsupportedTypeError:
    if isinstance(dtype, T.UserDefinedType):
        # To read one back, a module would have to be imported that the checkpoint names.
        return UnsupportedTypeError(
            f"Field {path!r} has the user-defined type {type(dtype).__name__}, which cannot be "
            "kept in state.",
            todo=f"Declare it {dtype.sqlType().simpleString()}, and call serialize() and "
            "deserialize() yourself.",
        )
    return UnsupportedTypeError(
        f"Field {path!r} has type {dtype.simpleString()}, which cannot be kept in state.",
        todo=_TODO_FOR.get(type(dtype), _TODO),
    )


def arrow_schema(schema: T.StructType) -> pa.Schema:
    """The Arrow schema of rows of `schema`, with Spark's nullability on the outer fields.

    Raises:
        UnsupportedTypeError: a type that has no place in state.
    """
    return pa.schema(
        [pa.field(f.name, arrow_type(f.dataType, f.name), nullable=f.nullable) for f in schema]
    )


def is_fixed_width(dtype: T.DataType) -> bool:
    """Whether values of the type take a fixed number of bytes in the fixed-width codec."""
    row = simple_type(dtype)
    return row is not None and bool(row.packed)


def schema_from_json(text: str) -> T.StructType:
    """The schema of Spark's JSON.

    Raises:
        SchemaError: not the JSON of a struct.
    """
    try:
        # To pyspark this names a module, which it would import.
        if '"udt"' in text and _names_udt(json.loads(text)):
            raise ValueError("a user-defined type")
        return T.StructType.fromJson(json.loads(text))
    except Exception as error:  # pyspark raises what it stumbles over
        raise SchemaError(
            f"This is not the JSON of a schema: {text[:80]!r}.",
            todo="Pass what StructType.json() gives.",
        ) from error


def ddl_of(text: str) -> str:
    """Spark's DDL of a schema in Spark's JSON, for people: "user string, n bigint".

    Raises:
        SchemaError: not the JSON of a struct.
    """
    return ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in schema_from_json(text))


def _names_udt(node: object) -> bool:
    if isinstance(node, dict):
        return node.get("type") == "udt" or any(map(_names_udt, node.values()))
    return isinstance(node, list) and any(map(_names_udt, node))


def check_value_schema(schema: T.StructType) -> None:
    """Refuse a schema that values cannot have.

    Raises:
        SchemaError: no fields, or two of one name.
        UnsupportedTypeError: a type that has no place in state.
    """
    names = [field.name for field in schema]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice:
        raise SchemaError(
            f"The schema has two fields named {twice[0]!r}." if twice else "The schema is empty.",
            todo="Give each field a name of its own." if twice else "Give it at least one field.",
        )
    arrow_schema(schema)


def check_key_schema(schema: T.StructType) -> None:
    """Refuse a schema that keys cannot have.

    Raises:
        SchemaError: no fields, or two of one name.
        UnsupportedTypeError: a type that cannot be (part of) a key: maps, variants, geometries,
            void, strings with a collation, and all that values cannot be either.
    """
    check_value_schema(schema)
    for field in schema:
        _check_key_type(field.dataType, field.name)


def _check_key_type(dtype: T.DataType, path: str) -> None:
    if isinstance(dtype, T.ArrayType):
        _check_key_type(dtype.elementType, f"{path}[]")
    elif isinstance(dtype, T.StructType):
        for field in dtype:
            _check_key_type(field.dataType, f"{path}.{field.name}")
    elif isinstance(dtype, T.MapType):
        raise UnsupportedTypeError(
            f"Key field {path!r} has type {dtype.simpleString()}: a map cannot be part of a key.",
            todo="Use a sorted array of entries, or another column.",
        )
    elif boxed_type(dtype) is not None or isinstance(dtype, T.NullType):
        raise UnsupportedTypeError(
            f"Key field {path!r} has type {dtype.simpleString()}: its values have no one form "
            "by which to tell them apart.",
            todo="Use another column, or a field taken out of this one.",
        )
    elif isinstance(dtype, T.StringType) and dtype != T.StringType():
        # Texts that are equal under a collation would need equal bytes.
        raise UnsupportedTypeError(
            f"Key field {path!r} has type {dtype.simpleString()}: a collated string cannot be "
            "part of a key.",
            todo="Cast it to a plain string, for example lower(x) COLLATE UTF8_BINARY.",
        )


# --- columns -----------------------------------------------------------------------------------
