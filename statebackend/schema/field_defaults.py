"""Defaults of fields: what rows that were written before a field was added have in it.

A default stands in the field's metadata, under ``statebackend.default``: DDL's
``n int DEFAULT 0`` puts it there (`statebackend.schema.ddl`), and so may whoever builds a
`StructType`. Its form is JSON's:

============================== ==================================================================
type                           ``default``
============================== ==================================================================
boolean                        true, false
byte, short, int, long         a number
float, double                  a number, or its text ("NaN")
decimal                        a whole number, or its text ("0.10")
string                         a text
binary                         hexadecimal digits
date, time, timestamp_ntz      a text in ISO 8601
timestamp                      a text in ISO 8601, with its offset
============================== ==================================================================

Spark's own ``CURRENT_DEFAULT`` (SQL text) is read too where it is such a literal; any other is none
here, as it may come along with a table's schema. Other types have no defaults: an added array, map,
struct or variant is null.
"""

from __future__ import annotations

from decimal import InvalidOperation
from typing import Any, Final

from pyspark.sql import types as T

from statebackend.errors import SchemaError, ValueMismatchError
from statebackend.schema.ddl import DEFAULT, parse_ddl_default
from statebackend.schema.msgpack_types import to_wire
from statebackend.schema.type_table import simple_type

__all__ = ["check_defaults", "remembered", "wire_default"]

_SPARKS: Final = "CURRENT_DEFAULT"
_UNFIT: Final = (SchemaError, ValueError, TypeError, InvalidOperation)


def _given(field: T.StructField) -> Any:
    metadata = field.metadata or {}
    if DEFAULT in metadata:
        return metadata[DEFAULT]
    text = metadata.get(_SPARKS)
    try:
        literal = None if text is None else parse_ddl_default(text)
        if literal is not None:
            to_wire(field.dataType, field.name, False)(_plain(field.dataType, literal))
        return literal
    except (*_UNFIT, ValueMismatchError):
        return None


def _plain(dtype: T.DataType, given: Any) -> Any:
    """What a default is in Python."""
    row = simple_type(dtype)
    if row is None or row.default is None:
        raise ValueError("its type can have none but null")
    return row.default(given)


def wire_default(field: T.StructField, path: str) -> Any:
    """A field's default in wire form (see `schema.msgpack_types`); None where it is null.

    Raises:
        SchemaError: it is no value of the field's type, naming ``path``.
    """
    try:
        given = _given(field)
        if given is None:
            return None
        return to_wire(field.dataType, path, False)(_plain(field.dataType, given))
    except ValueMismatchError as error:
        why = error.what
    except _UNFIT as error:
        why = str(error)
    raise SchemaError(
        f"The default of field {path!r} ({field.dataType.simpleString()}) cannot be used: {why}",
        todo="Give a literal of the field's type, such as n int DEFAULT 0 or at timestamp DEFAULT "
        "'2026-01-31T00:00:00Z'; or leave it out: the field is null then.",
    )


def check_defaults(schema: T.StructType) -> None:
    """Refuse defaults that are no values of their fields, at any depth.

    Raises:
        SchemaError: naming the field.
    """
    _check(schema, "")


def _check(dtype: T.DataType, path: str) -> None:
    if isinstance(dtype, T.ArrayType):
        _check(dtype.elementType, f"{path}[]")
    elif isinstance(dtype, T.MapType):
        _check(dtype.keyType, f"{path}.key")
        _check(dtype.valueType, f"{path}.value")
    elif isinstance(dtype, T.StructType):
        for field in dtype:
            inner = f"{path}.{field.name}".lstrip(".")
            wire_default(field, inner)
            _check(field.dataType, inner)


def remembered(old: T.StructType, new: T.StructType) -> T.StructType:
    """`new`, of the same stored form as `old`, with the defaults of `old`.

    A default counts when its field is added. Were it exchanged later, rows from before would change
    with it, but for those that were rewritten meanwhile.
    """
    kept = _remembered(old, new)
    assert isinstance(kept, T.StructType)
    return kept


def _remembered(old: T.DataType, new: T.DataType) -> T.DataType:
    if isinstance(old, T.StructType) and isinstance(new, T.StructType):
        fields = []
        for before, after in zip(old, new, strict=True):
            metadata = _only(after.metadata, default=False)
            if _given(before) is not None:
                metadata |= _only(before.metadata, default=True)
            inner = _remembered(before.dataType, after.dataType)
            fields.append(T.StructField(after.name, inner, after.nullable, metadata))
        return T.StructType(fields)
    if isinstance(old, T.ArrayType) and isinstance(new, T.ArrayType):
        return T.ArrayType(_remembered(old.elementType, new.elementType), new.containsNull)
    if isinstance(old, T.MapType) and isinstance(new, T.MapType):
        value = _remembered(old.valueType, new.valueType)
        return T.MapType(new.keyType, value, new.valueContainsNull)
    return new


def _only(metadata: dict[str, Any] | None, *, default: bool) -> dict[str, Any]:
    return {k: v for k, v in (metadata or {}).items() if ("default" in k.lower()) == default}
