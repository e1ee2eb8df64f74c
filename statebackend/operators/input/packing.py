"""Rows on their way through the shuffle, many of one subtask in one: a payload of Arrow.

What Spark does for a row on that way (copy, shuffle, join, to Arrow once more) it then does for a
payload. A payload is a record batch as an Arrow IPC message without its schema, which both ends
know; the rows' key groups are its last column. It lives within one micro-batch, so it has no
version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import types as T

from statebackend import system
from statebackend.errors import CorruptionError, ValueMismatchError
from statebackend.key_hashing import key_groups
from statebackend.keygroups import subtask_of
from statebackend.operators.errors.task_errors import code_first
from statebackend.operators.rows.row_conversion import arrow_schema
from statebackend.state.binary_columns import indices_of, take

__all__ = ["GROUP", "PACKED_SCHEMA", "RowPacker", "unpacked"]

GROUP: Final = "key_group"
"""The column that sends a payload to its subtask: the key group of its first row."""

PACKED_SCHEMA: Final = T.StructType(
    [T.StructField("rows", T.BinaryType()), T.StructField(GROUP, T.IntegerType())]
)
"""What goes through the shuffle."""

_PACKED_ARROW: Final = pa.schema([pa.field("rows", pa.binary()), pa.field(GROUP, pa.int32())])
_GROUP_FIELD: Final = pa.field("__statebackend_key_group", pa.uint16())
# Spark gives rows to Python by the 10,000: so many payloads are in memory at once, 64 MB.
_PAYLOAD_BYTES: Final = 6 << 10
# Payloads whose rows are made one batch.
_JOINED: Final = 64
_BINARIES_BYTES_MAX: Final = (1 << 31) - 1

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True)
class RowPacker:
    """Packs rows by the subtask that owns their key, for ``mapInArrow``; can be pickled.

    Args:
        rows: makes the rows, of what Spark gives.
        schema: of the rows.
        key_positions: where the key columns stand in it.
        payload_bytes: how large a payload is about, unless one row is larger.
    """

    rows: Callable[[Batches], Batches]
    schema: T.StructType
    key_positions: tuple[int, ...]
    parallelism: int
    max_parallelism: int
    payload_bytes: int = _PAYLOAD_BYTES

    @code_first
    def __call__(self, batches: Batches) -> Batches:
        """Payloads, in `PACKED_SCHEMA`; rows of one subtask keep their order."""
        schema = payload_schema(arrow_schema(self.schema))
        for batch in self.rows(batches):
            if batch.num_rows:
                yield self._packed(batch, schema)
        system.keep_loaded("packing")

    def _packed(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        groups = key_groups([batch.column(i) for i in self.key_positions], self.max_parallelism)
        owners = subtask_of(groups, self.parallelism, self.max_parallelism).astype(np.uint16)
        order = np.argsort(owners, kind="stable")
        groups = groups[order]
        ends = np.cumsum(np.bincount(owners, minlength=self.parallelism)).tolist()
        columns = [*take(batch, order).columns, _uint16(groups)]
        dealt = pa.RecordBatch.from_arrays(columns, schema=schema)
        # A message has a head of its own, larger the more columns there are.
        room_bytes = max(self.payload_bytes // 4, self.payload_bytes - _head_bytes(dealt))
        step = max(1, dealt.num_rows * room_bytes // max(1, dealt.nbytes))
        payloads, heads, start = [], [], 0
        for end in ends:
            for first in range(start, end, step):
                rows = dealt.slice(first, min(step, end - first))
                payloads.append(rows.serialize())
                heads.append(int(groups[first]))
            start = end
        return pa.RecordBatch.from_arrays(
            [_binaries(payloads), pa.array(heads, pa.int32())], schema=_PACKED_ARROW
        )


def unpacked(
    payloads: pa.BinaryArray, schema: pa.Schema
) -> Iterator[tuple[pa.RecordBatch, NDArray[np.uint16]]]:
    """The rows of payloads, and their key groups; nothing of the payloads is kept.

    Args:
        schema: of the rows.

    Raises:
        CorruptionError: a payload is none, or one of other rows.
    """
    whole = payload_schema(schema)
    for start in range(0, len(payloads), _JOINED):
        some = payloads.slice(start, _JOINED)
        batch = pa.concat_batches([_read(payload, whole) for payload in some])
        groups = indices_of(batch.column(len(schema)))
        yield pa.RecordBatch.from_arrays(batch.columns[: len(schema)], schema=schema), groups


def payload_schema(schema: pa.Schema) -> pa.Schema:
    """Of a payload with rows of ``schema``."""
    return schema.append(_GROUP_FIELD)


def _read(payload: pa.BinaryScalar, schema: pa.Schema) -> pa.RecordBatch:
    try:
        # A copy: what is kept of a payload must not keep its neighbours.
        message = pa.py_buffer(payload.as_py())
        # Texts as bytes: Spark does not ask whether they are UTF-8, and so must not we.
        pa.ipc.read_record_batch(message, _texts_as_bytes(schema)).validate(full=True)
        batch = pa.ipc.read_record_batch(message, schema)
    except (pa.ArrowException, OSError, EOFError, TypeError) as error:
        raise CorruptionError(
            f"A payload of rows cannot be read: {error}",
            todo="Start the query again; if this comes back, look at the disks and the network "
            "between Spark's executors.",
        ) from error
    return batch


@lru_cache(maxsize=64)
def _texts_as_bytes(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(_bytes_for(field.type)) for field in schema])


def _bytes_for(kind: pa.DataType) -> pa.DataType:
    """The type with the same buffers and binary values where it has texts."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(_bytes_for(field.type)) for field in fields])
    if pa.types.is_map(kind):
        return pa.map_(_bytes_for(kind.key_type), _bytes_for(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_bytes_for(kind.value_type)))
    return kind


def _head_bytes(batch: pa.RecordBatch) -> int:
    return int(batch.slice(0, 0).serialize().size)


def _binaries(items: list[pa.Buffer]) -> pa.BinaryArray:
    ends = np.cumsum([0, *[item.size for item in items]], dtype=np.int64)
    if ends[-1] > _BINARIES_BYTES_MAX:
        raise ValueMismatchError(
            f"Partial rows of one batch of Spark's take {ends[-1]} bytes, more than Arrow has "
            f"room for in a column ({_BINARIES_BYTES_MAX}).",
            todo="Lower spark.sql.execution.arrow.maxRecordsPerBatch.",
        )
    buffers = [None, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(b"".join(items))]
    return pa.Array.from_buffers(pa.binary(), len(items), buffers)


def _uint16(values: NDArray[Any]) -> pa.Array:
    buffer = pa.py_buffer(np.ascontiguousarray(values, np.uint16))
    return pa.Array.from_buffers(pa.uint16(), len(values), [None, buffer])
