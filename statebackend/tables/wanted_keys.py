"""Keys that a caller asks for, as they stand in a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.errors import UsageError
from statebackend.hashing import key_groups
from statebackend.operators.vector.values import arrow_fields, columns_of
from statebackend.schema.keys import KeyCodec

__all__ = ["encoded_keys"]


def encoded_keys(keys: Any, schema: StructType, max_parallelism: int) -> list[bytes]:
    """Each key once, its key group before it, in the order in which a store has them.

    Args:
        keys: an Arrow table or record batch of the key columns, or a list: of tuples, of dicts by
            the names of the columns, or, with one key column, of values.

    Raises:
        UsageError, ValueMismatchError, NullKeyError: they are no keys of this schema.
    """
    columns = columns_of(_columns(keys, schema), schema, None, "keys=")
    if not len(columns[0]):
        return []
    encoded = KeyCodec(schema).encode_arrow(columns).to_pylist()
    groups = key_groups(columns, max_parallelism).tolist()
    return sorted({g.to_bytes(2, "big") + key for g, key in zip(groups, encoded, strict=True)})


def _columns(keys: Any, schema: StructType) -> Any:
    if isinstance(keys, pa.Table):
        return [column.combine_chunks() for column in keys.select(schema.names).columns]
    if isinstance(keys, pa.RecordBatch):
        return keys
    if isinstance(keys, str | bytes | Mapping) or not isinstance(keys, Iterable):
        raise UsageError(
            f"keys= is a {type(keys).__name__}.",
            todo="Give a list of keys: values, or tuples where there are several key columns.",
        )
    rows = [_row(key, schema) for key in keys]
    fields = arrow_fields(schema)
    try:
        return [pa.array([row[n] for row in rows], field.type) for n, field in enumerate(fields)]
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"keys= holds what is no key of {schema.simpleString()} ({error}).",
            todo="Give values of the types of the key columns.",
        ) from error


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
