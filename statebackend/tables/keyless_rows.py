"""The rows of states that belong to no key: lists of subtasks, and broadcast maps."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.types import StructType

from snapshot.protocol.lineage import SliceRef
from statebackend.operators.vector.given_columns import arrow_fields
from statebackend.schema.keys.key_column_decoding import decode_key_columns
from statebackend.schema.types import schema_from_json
from statebackend.schema.versioned_rows import codec_of_versions
from statebackend.state.blocks import binary_array
from statebackend.state.operator_state import BROADCAST, decode_lists, decode_maps
from statebackend.tables.stored_job import StoredJob, StoredOperator, StoredState

__all__ = ["keyless_bytes", "operator_batches", "operator_schema"]


def operator_schema(state: StoredState) -> pa.Schema:
    """Of a list: ``subtask``, ``index``, ``value``; of a broadcast map: ``map_key``, ``value``."""
    declared = state.declared
    value = pa.field("value", pa.struct(list(arrow_fields(_value(state)))))
    if declared.kind != BROADCAST:
        return pa.schema([pa.field("subtask", pa.int32()), pa.field("index", pa.int64()), value])
    key = schema_from_json(declared.key_schema)
    return pa.schema([pa.field("map_key", pa.struct(list(arrow_fields(key)))), value])


def operator_batches(
    job: StoredJob, operator: StoredOperator, state: StoredState
) -> Iterator[pa.RecordBatch]:
    """Its rows, a batch for each subtask's list, or one for the map.

    Raises:
        CorruptionError, FormatError: a slice does not read. ObjectNotFoundError: it is gone.
    """
    entry = operator.lineage.epochs.get(job.epoch)
    if entry is None:
        return
    name, schema = state.declared.name, operator_schema(state)
    codec = codec_of_versions([schema_from_json(text) for text in state.declared.versions])

    def values(rows: list[bytes]) -> pa.StructArray:
        fields = list(arrow_fields(codec.schema))
        return pa.StructArray.from_arrays(codec.decode_arrow(binary_array(rows)), fields=fields)

    if state.declared.kind == BROADCAST:
        if entry.broadcast is None:
            return
        maps = decode_maps(keyless_bytes(job, operator, entry.broadcast))
        if name in maps and maps[name].entries:
            key_schema = schema_from_json(maps[name].key_schema)
            columns = decode_key_columns(binary_array(list(maps[name].entries)), key_schema)
            keys = pa.StructArray.from_arrays(columns, fields=list(arrow_fields(key_schema)))
            arrays = [keys, values(list(maps[name].entries.values()))]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        return
    for subtask, ref in sorted(entry.lists.items()):
        lists = decode_lists(keyless_bytes(job, operator, ref))
        rows = list(lists[name].rows) if name in lists else []
        if rows:
            numbers = pa.array([subtask] * len(rows), pa.int32())
            index = pa.array(range(len(rows)), pa.int64())
            yield pa.RecordBatch.from_arrays([numbers, index, values(rows)], schema=schema)


def keyless_bytes(job: StoredJob, operator: StoredOperator, ref: SliceRef) -> bytes:
    """A slice of states that belong to no key. Raises as :func:`operator_batches`."""
    placed = operator.placed_slice(ref)
    if placed.entry.object is not None:
        return job.store.get(placed.entry.object)
    return job.records.slice(placed)


def _value(state: StoredState) -> StructType:
    return schema_from_json(state.declared.value_schema)
