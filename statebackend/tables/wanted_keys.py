"""Keys that a caller asks for, as they stand in a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.types as pt
from pyspark.sql.types import StructType

from statebackend.errors import UsageError
from statebackend.key_hashing import key_groups
from statebackend.operators.vector.given_columns import arrow_fields, columns_of
from statebackend.schema.keys.key_codec import KeyCodec

__all__ = ["encoded_each", "encoded_keys"]


def encoded_keys(keys: Any, schema: StructType, max_parallelism: int) -> list[bytes]:
    """Each key once, its key group before it, in the order in which a store has them.

    Args:
        keys: an Arrow table or record batch of the key columns, or a list: of tuples, of dicts by
            the names of the columns, or, with one key column, of values.

    Raises:
        UsageError, ValueMismatchError, NullKeyError: they are no keys of this schema.
    """
    return sorted(set(encoded_each(keys, schema, max_parallelism)))


def encoded_each(keys: Any, schema: StructType, max_parallelism: int) -> list[bytes]:
    """As `encoded_keys`, in the caller's order: as many as were given."""
    columns = columns_of(_columns(keys, schema), schema, None, "keys=")
    if not len(columns[0]):
        return []
    encoded = KeyCodec(schema).encode_arrow(columns).to_pylist()
    groups = key_groups(columns, max_parallelism).tolist()
    return [g.to_bytes(2, "big") + key for g, key in zip(groups, encoded, strict=True)]


def _columns(keys: Any, schema: StructType) -> Any:
    if isinstance(keys, pa.RecordBatch):
        keys = pa.Table.from_batches([keys])
    if isinstance(keys, pa.Table):
        return _of_table(keys, schema)
    if isinstance(keys, str | bytes | Mapping) or not isinstance(keys, Iterable):
        raise UsageError(
            f"keys= is a {type(keys).__name__}.",
            todo="Give a list of keys: values, or tuples where there are several key columns.",
        )
    rows = [_row(key, schema) for key in keys]
    return [_array([row[n] for row in rows], one) for n, one in enumerate(arrow_fields(schema))]


def _of_table(keys: pa.Table, schema: StructType) -> list[pa.Array]:
    if keys.schema.names == ["key"] and pt.is_struct(keys.schema.field("key").type):
        # As read_state() gives it.
        keys = keys.flatten().rename_columns([one.name for one in keys.schema.field("key").type])
    if not set(schema.names) <= set(keys.schema.names):
        raise UsageError(
            f"keys= has the columns {', '.join(keys.schema.names)}, and a key has "
            f"{', '.join(schema.names)}.",
            todo="Give the key's columns by their names, or read_state()'s column key.",
        )
    return [keys.column(name).combine_chunks() for name in schema.names]


def _array(values: list[Any], field: pa.Field) -> pa.Array:
    """A column of plain values, none of them cut to the column's type.

    Raises:
        UsageError: a value is of another type, a fraction for a whole number, or a time without its
            zone for a moment.
    """
    kind = field.type
    try:
        made = pa.array(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise _no_key(field, str(error)) from error
    if pt.is_integer(kind) or pt.is_temporal(kind):
        for given, taken in zip(values, made.to_pylist(), strict=True):
            if given != taken:
                raise _no_key(field, f"{given!r} would be taken for {taken!r}")
    return made


def _no_key(field: pa.Field, why: str) -> UsageError:
    return UsageError(
        f"keys= holds what is no {field.type} of the key column {field.name!r} ({why}).",
        todo="Give values of the types of the key columns; a timestamp with its time zone.",
    )


def _row(key: Any, schema: StructType) -> tuple[Any, ...]:
    if isinstance(key, Mapping) and sorted(key) == sorted(schema.names):
        return tuple(key[name] for name in schema.names)
    if isinstance(key, tuple) and len(key) == len(schema):
        return key
    if len(schema) == 1 and not isinstance(key, tuple | Mapping):
        return (key,)
    raise UsageError(
        f"keys= holds {key!r}, and a key is ({', '.join(schema.names)}).",
        todo="Give a tuple with a value for each key column.",
    )
