"""Rows that a caller gives for a state, as the entries of a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType

from statebackend.errors import SchemaError, ValueMismatchError
from statebackend.key_hashing import key_groups
from statebackend.operators.declared_states import StateDeclaration, parse_schema
from statebackend.operators.rows.row_conversion import arrow_schema, struct_type
from statebackend.operators.vector.given_columns import columns_of
from statebackend.schema.codec import codec_for
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.state.expiry_index import (
    ENTRY,
    LIST,
    TIME_BYTES,
    expiry_stamp,
    index_key,
    map_kind,
    stamp_time,
)
from statebackend.state.time_ranges import BIAS
from statebackend.state.timers import BY_KEY, BY_TIME, at_bytes
from statebackend.state.ttl_cells import TTL

__all__ = [
    "Entry",
    "GivenState",
    "SparkRows",
    "batches_of",
    "fields_of",
    "given_state",
    "is_struct",
    "spark_schema",
    "timer_entries",
]

_KEY: Final = "key"
_VALUE: Final = "value"
_MAP_KEY: Final = "map_key"
_INDEX: Final = "index"
_EXPIRES: Final = "expires_at_ms"
_OURS: Final = ("key_group", "subtask")  # what reading adds, and writing finds anew

_LONG: Final = StructType([StructField(_EXPIRES, LongType(), nullable=False)])
_BATCH_ROWS: Final = 65_536

Entry = tuple[bytes, bytes]
"""A key and its value."""


@dataclass(frozen=True)
class GivenState:
    """A state as it is going to be declared, and how its rows become entries.

    Attributes:
        kind: value, list or map.
        ttl: rows say when they expire; None: they do not expire.
    """

    name: str
    kind: str
    id: int
    key: StructType
    value: StructType
    map_key: StructType | None
    ttl: TTL | None = None

    @property
    def declared(self) -> StateDeclaration:
        """As a checkpoint says it."""
        made = StateDeclaration(
            name=self.name,
            kind=self.kind,
            value_schema=self.value.json(),
            key_schema=self.map_key.json() if self.map_key is not None else "",
        )
        return made if self.ttl is None else made.expiring(self.ttl)

    def entries(self, batch: pa.RecordBatch, max_parallelism: int, first: int) -> Iterator[Entry]:
        """The entries of a batch.

        Args:
            first: how many rows came before: elements of a list keep their order.

        Raises:
            ValueMismatchError, NullKeyError: a row that does not fit.
        """
        what = f"State {self.name!r}"
        prefixes = _prefixes(batch, self.key, max_parallelism, self.id.to_bytes(2, "big"), what)
        if self.map_key is not None:
            columns = columns_of(
                fields_of(batch, _MAP_KEY), self.map_key, None, f"{what} (map_key)"
            )
            rests = KeyCodec(self.map_key, allow_all_null=True).encode_arrow(columns).to_pylist()
        elif self.kind == "list":
            numbers = range(first, first + batch.num_rows)
            rests = [number.to_bytes(8, "big") for number in numbers]
        else:
            rests = [b""] * batch.num_rows
        columns = columns_of(_values(batch, self.key), self.value, None, what)
        rows = codec_for(self.value).encode_arrow(columns).to_pylist()
        if self.ttl is None:
            for prefix, rest, row in zip(prefixes, rests, rows, strict=True):
                yield prefix + rest, row
            return
        times = _expiries(batch, what)
        for prefix, rest, row, time in zip(prefixes, rests, rows, times, strict=True):
            stamp, listed = self._stamp(prefix, rest, time, self.ttl)
            yield prefix + rest, stamp + row
            yield listed, b""

    def _stamp(self, prefix: bytes, rest: bytes, time: bytes, ttl: TTL) -> tuple[bytes, bytes]:
        """What stands before a row, and its key in the index of what expires.

        A list is in the index at the expiry of each of its elements. Its head names the first; the
        others say nothing, and go when they are due.
        """
        if self.kind == "list":
            return time, index_key(prefix, time, LIST)
        stamp = expiry_stamp(time, ttl.ms)
        kind = ENTRY if self.map_key is None else map_kind(len(prefix))
        return stamp, index_key(prefix + rest, stamp_time(stamp), kind)


def given_state(
    name: str,
    number: int,
    key: StructType,
    schema: pa.Schema,
    declared: str | StructType | None,
    ttl: TTL | None = None,
) -> GivenState:
    """A state by the columns of its rows: `map_key` makes it a map, `index` a list.

    Args:
        declared: the schema of its values, where it is not to follow from the columns' types.

    Raises:
        SchemaError: the columns are not those of a state.
        UnsupportedTypeError: of a column's type.
    """
    if (ttl is None) is (_EXPIRES in schema.names):
        column = f"column {_EXPIRES}"
        has, lacks = (f"a {column}", "ttl=") if ttl is None else ("a ttl=", column)
        raise SchemaError(
            f"State {name!r} has {has} and no {lacks}.",
            todo=f"Give a state that expires both: the column {_EXPIRES}, in milliseconds, and "
            f"ttl={{{name!r}: TTL(...)}}, as the processor has it; any other state neither.",
        )
    if len(set(schema.names)) < len(schema.names):
        raise SchemaError(
            f"State {name!r} has two columns of one name ({', '.join(schema.names)}).",
            todo="Give each a name of its own.",
        )
    map_key = _struct(schema, _MAP_KEY, name) if _MAP_KEY in schema.names else None
    kind = "map" if map_key is not None else "list" if _INDEX in schema.names else "value"
    if declared is not None:
        value = parse_schema(declared, f"state {name!r}")
    elif is_struct(schema, _VALUE):
        value = _struct(schema, _VALUE, name)
    else:
        names = _value_names(schema, key)
        value = spark_schema(pa.schema([schema.field(one) for one in names]), name)
    if not value.fields:
        raise SchemaError(
            f"State {name!r} has no column for its values ({', '.join(schema.names)}).",
            todo="Give the columns of read_state(): key and value; or key columns and others.",
        )
    if is_struct(schema, _VALUE) and (others := _value_names(schema, key, _VALUE)):
        raise SchemaError(
            f"State {name!r} has a column {_VALUE} of structs, and others beside it "
            f"({', '.join(others)}).",
            todo=f"Leave them out, or put them into {_VALUE}.",
        )
    codec_for(value)
    return GivenState(name, kind, number, key, value, map_key, ttl)


def timer_entries(batch: pa.RecordBatch, key: StructType, max_parallelism: int) -> Iterator[Entry]:
    """The entries of timers: a batch with the key and `at_ms`.

    Raises:
        ValueMismatchError, NullKeyError: a row that does not fit.
    """
    if "at_ms" not in batch.schema.names:
        raise ValueMismatchError(
            f"Timers were given without a column at_ms ({', '.join(batch.schema.names)}).",
            todo="Give the key, and at_ms in milliseconds.",
        )
    at = batch.column("at_ms")
    if at.null_count or not pa.types.is_integer(at.type):
        raise ValueMismatchError(
            f"The timers have {at.null_count} rows without at_ms, which is a {at.type}.",
            todo="Give whole milliseconds for each row.",
        )
    keys = _prefixes(batch, key, max_parallelism, b"", "The timers")
    for own, at_ms in zip(keys, at.to_pylist(), strict=True):
        time = at_bytes(at_ms)
        yield own[:2] + BY_TIME + time + own[2:], b""
        yield own[:2] + BY_KEY + own[2:] + time, b""


def batches_of(rows: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Rows as batches: of Arrow's, pandas' or Spark's.

    Raises:
        SchemaError: they are something else.
    """
    if hasattr(rows, "toArrow"):
        return arrow_schema(rows.schema), SparkRows(rows)
    if isinstance(rows, pa.RecordBatch):
        return rows.schema, iter([rows])
    if isinstance(rows, pa.RecordBatchReader):
        return rows.schema, iter(rows)
    if hasattr(rows, "iloc"):  # pandas'
        rows = pa.Table.from_pandas(rows, preserve_index=False)
    if isinstance(rows, pa.Table):
        return rows.schema, iter(rows.to_batches(max_chunksize=_BATCH_ROWS))
    raise SchemaError(
        f"The rows of a state are a {type(rows).__name__}.",
        todo="Give a pyarrow Table or RecordBatchReader, a pandas or a Spark DataFrame.",
    )


class SparkRows:
    """The rows of a Spark frame; the first batch that is asked for brings all of them here."""

    def __init__(self, frame: Any) -> None:
        self.frame = frame
        self._batches: Iterator[pa.RecordBatch] | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        if self._batches is None:
            self._batches = iter(self.frame.toArrow().to_batches(max_chunksize=_BATCH_ROWS))
        return next(self._batches)


def _prefixes(
    batch: pa.RecordBatch, key: StructType, max_parallelism: int, state: bytes, what: str
) -> list[bytes]:
    """Key group, state and key of each row."""
    in_struct = is_struct(batch.schema, _KEY)
    if not in_struct and (missing := [n for n in key.names if n not in batch.schema.names]):
        raise ValueMismatchError(
            f"The rows of {what[0].lower()}{what[1:]} have no key column {', '.join(missing)}. "
            f"They have {', '.join(batch.schema.names)}.",
            todo="Name the key's columns as the operator's key does, or give a struct `key`.",
        )
    given = fields_of(batch, _KEY) if in_struct else _named(batch, key.names)
    columns = columns_of(given, key, None, f"{what} (key)")
    if not len(columns[0]):
        return []
    groups = key_groups(columns, max_parallelism).astype(np.dtype(">u2")).tobytes()
    keys = KeyCodec(key).encode_arrow(columns).to_pylist()
    return [groups[2 * n : 2 * n + 2] + state + one for n, one in enumerate(keys)]


def _expiries(batch: pa.RecordBatch, what: str) -> Iterator[bytes]:
    """When rows expire, as it stands before them.

    Raises:
        ValueMismatchError: it is not said of each, or not in whole milliseconds.
    """
    column = batch.column(_EXPIRES)
    if column.null_count or not pa.types.is_integer(column.type):
        raise ValueMismatchError(
            f"{what} has {column.null_count} rows without {_EXPIRES}, which is a {column.type}.",
            todo="Give whole milliseconds for each row.",
        )
    whole = columns_of([column], _LONG, None, f"{what} ({_EXPIRES})")[0]
    times = whole.to_numpy().view(np.uint64) ^ np.uint64(BIAS)
    data = times.astype(">u8").tobytes()
    return (data[at : at + TIME_BYTES] for at in range(0, len(data), TIME_BYTES))


def _values(batch: pa.RecordBatch, key: StructType) -> Any:
    if is_struct(batch.schema, _VALUE):
        return fields_of(batch, _VALUE)
    return _named(batch, _value_names(batch.schema, key))


def _value_names(schema: pa.Schema, key: StructType, *used: str) -> list[str]:
    """The columns that no other use is known of."""
    others = {_MAP_KEY, _INDEX, _EXPIRES, *used}
    others |= {_KEY, *_OURS} if is_struct(schema, _KEY) else set(key.names)
    return [name for name in schema.names if name not in others]


def _named(batch: pa.RecordBatch, names: Sequence[str]) -> Mapping[str, pa.Array]:
    return {name: batch.column(name) for name in names if name in batch.schema.names}


def fields_of(batch: pa.RecordBatch, name: str) -> Mapping[str, pa.Array]:
    """The fields of a column of structs, by their names.

    Raises:
        ValueMismatchError: a row has none.
    """
    column = batch.column(name)
    if column.null_count and name != _KEY:  # a null key is refused as such
        raise ValueMismatchError(
            f"{column.null_count} rows have a null in the column {name}.",
            todo="Leave such rows out: a key without a row has no state.",
        )
    arrays = column.flatten()  # a null struct is null in every field
    return {field.name: array for field, array in zip(column.type, arrays, strict=True)}


def is_struct(schema: pa.Schema, name: str) -> bool:
    """Whether there is a column of structs of that name."""
    return name in schema.names and pa.types.is_struct(schema.field(name).type)


def _struct(schema: pa.Schema, column: str, state: str) -> StructType:
    if not is_struct(schema, column):
        raise SchemaError(
            f"The column {column} of state {state!r} is a {schema.field(column).type}.",
            todo="Give a struct, as read_state() does.",
        )
    return spark_schema(pa.schema(list(schema.field(column).type)), state)


def spark_schema(schema: pa.Schema, state: str) -> StructType:
    """Spark's schema of these columns.

    Raises:
        SchemaError: Spark has no such type, naming the state.
    """
    try:
        found = struct_type(schema)
        arrow_schema(found)
    except Exception as error:  # pyspark's own, of several kinds
        raise SchemaError(
            f"The columns of state {state!r} have a type that Spark does not have ({error}).",
            todo="Cast them to types of Spark.",
        ) from error
    return found
