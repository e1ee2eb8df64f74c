"""Rows that a caller gives for states of no key: lists of subtasks, and broadcast maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.errors import SchemaError, SettingError, ValueMismatchError
from statebackend.operators.declared_states import StateDeclaration, parse_schema
from statebackend.operators.vector.given_columns import columns_of
from statebackend.schema.codec import codec_for
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.state.operator_state import (
    BROADCAST,
    LIST_MODES,
    StoredList,
    StoredMap,
    encode_lists,
    encode_maps,
    redistribute,
)
from statebackend.tables.given_rows import batches_of, fields_of, is_struct, spark_schema

__all__ = ["GivenKeyless", "broadcast_blob", "given_broadcast", "given_list", "list_blobs"]

_SUBTASK: Final = "subtask"
_OURS: Final = (_SUBTASK, "index", "map_key", "value")


@dataclass(frozen=True)
class GivenKeyless:
    """A list of subtasks (kind split or union) or a broadcast map, with its rows.

    Attributes:
        map_key: of a broadcast map.
    """

    name: str
    kind: str
    id: int
    value: StructType
    map_key: StructType | None
    batches: Iterator[pa.RecordBatch]

    @property
    def declared(self) -> StateDeclaration:
        """As a checkpoint says it."""
        key_schema = self.map_key.json() if self.map_key is not None else ""
        return StateDeclaration(
            name=self.name, kind=self.kind, value_schema=self.value.json(), key_schema=key_schema
        )

    def rows(self, batch: pa.RecordBatch) -> list[bytes]:
        """The rows of a batch as they are stored.

        Raises:
            ValueMismatchError: one does not fit.
        """
        if is_struct(batch.schema, "value"):
            given: Any = fields_of(batch, "value")
        else:
            names = _value_names(batch.schema)
            given = {name: batch.column(name) for name in names}
        columns = columns_of(given, self.value, None, f"State {self.name!r}")
        rows: list[bytes] = codec_for(self.value).encode_arrow(columns).to_pylist()
        return rows

    def keys(self, batch: pa.RecordBatch) -> list[bytes]:
        """The keys of a map's batch as they are stored. Raises as :meth:`rows`."""
        assert self.map_key is not None
        what = f"State {self.name!r} (map_key)"
        columns = columns_of(fields_of(batch, "map_key"), self.map_key, None, what)
        codec = KeyCodec(self.map_key, allow_all_null=True)
        keys: list[bytes] = codec.encode_arrow(columns).to_pylist()
        return keys


def given_list(
    name: str, number: int, rows: Any, mode: str, declared: str | StructType | None
) -> GivenKeyless:
    """An operator list by the columns of its rows.

    Raises:
        SettingError: there is no such mode. SchemaError: the columns are not those of a list.
    """
    if mode not in LIST_MODES:
        raise SettingError(
            f"The operator list {name!r} has the mode {mode!r}.",
            todo=f"Give one of {', '.join(LIST_MODES)}, as the operator has it.",
        )
    schema, batches = batches_of(rows)
    value = _value(name, schema, declared)
    return _fitting(GivenKeyless(name, mode, number, value, None, batches), schema)


def given_broadcast(
    name: str, number: int, rows: Any, declared: str | StructType | None
) -> GivenKeyless:
    """A broadcast map by the columns of its rows.

    Raises:
        SchemaError: the columns are not those of a map.
    """
    schema, batches = batches_of(rows)
    if not is_struct(schema, "map_key"):
        raise SchemaError(
            f"The broadcast map {name!r} has no column map_key of structs "
            f"({', '.join(schema.names)}).",
            todo="Give map_key as read_state() does, a struct.",
        )
    map_key = spark_schema(pa.schema(list(schema.field("map_key").type)), name)
    value = _value(name, schema, declared)
    return _fitting(GivenKeyless(name, BROADCAST, number, value, map_key, batches), schema)


def _fitting(made: GivenKeyless, schema: pa.Schema) -> GivenKeyless:
    """The same, once its columns are known to fit."""
    empty = pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
    made.rows(empty)
    if made.map_key is not None:
        made.keys(empty)
    return made


def _value(name: str, schema: pa.Schema, declared: str | StructType | None) -> StructType:
    others = _value_names(schema)
    if is_struct(schema, "value") and others:
        raise SchemaError(
            f"State {name!r} has a column value of structs, and others beside it "
            f"({', '.join(others)}).",
            todo="Leave them out, or put them into value.",
        )
    if declared is not None:
        value = parse_schema(declared, f"state {name!r}")
    elif is_struct(schema, "value"):
        value = spark_schema(pa.schema(list(schema.field("value").type)), name)
    else:
        value = spark_schema(pa.schema([schema.field(one) for one in others]), name)
    codec_for(value)
    return value


def _value_names(schema: pa.Schema) -> list[str]:
    ours = _OURS if is_struct(schema, "value") else _OURS[:-1]
    return [name for name in schema.names if name not in ours]


def list_blobs(states: Iterable[GivenKeyless], parallelism: int) -> dict[int, bytes]:
    """The lists of each subtask, encoded; nothing where there are no lists.

    Rows stay with the subtask that they name, if there are so many. Else they are given out as
    where the parallelism changes.

    Raises:
        ValueMismatchError: a row does not fit.
    """
    lists = [one for one in states if one.kind in LIST_MODES]
    if not lists:
        return {}
    of_subtasks: list[dict[str, StoredList]] = [{} for _ in range(parallelism)]
    for one in lists:
        for number, rows in enumerate(_given_out(one, parallelism)):
            of_subtasks[number][one.name] = StoredList(one.kind, one.value.json(), 0, rows)
    return {number: encode_lists(own) for number, own in enumerate(of_subtasks)}


def _given_out(one: GivenKeyless, parallelism: int) -> list[tuple[bytes, ...]]:
    found: dict[int, list[bytes]] = {}
    named = True
    for batch in one.batches:
        named = named and _SUBTASK in batch.schema.names
        for number, row in zip(_subtasks(one.name, batch), one.rows(batch), strict=True):
            found.setdefault(number, []).append(row)
    if named and max(found, default=0) < parallelism:
        return [tuple(found.get(number, ())) for number in range(parallelism)]
    rows = tuple(row for _, some in sorted(found.items()) for row in some)
    whole = [{"": StoredList("split", "", 0, rows)}]
    return [redistribute(whole, parallelism, number)[""].rows for number in range(parallelism)]


def _subtasks(name: str, batch: pa.RecordBatch) -> Sequence[int]:
    if _SUBTASK not in batch.schema.names:
        return [0] * batch.num_rows
    column = batch.column(_SUBTASK)
    numbers: list[int] = column.to_pylist()
    if column.null_count or not pa.types.is_integer(column.type) or min(numbers, default=0) < 0:
        raise ValueMismatchError(
            f"State {name!r} has rows whose subtask is no number of one.",
            todo="Give the column subtask whole numbers from 0, or leave it out.",
        )
    return numbers


def broadcast_blob(states: Iterable[GivenKeyless]) -> bytes | None:
    """The broadcast maps, encoded; None without any. The last row of a key counts.

    Raises:
        ValueMismatchError: a row does not fit.
    """
    maps: dict[str, StoredMap] = {}
    for one in states:
        if one.map_key is not None:
            entries: dict[bytes, bytes] = {}
            for batch in one.batches:
                entries.update(zip(one.keys(batch), one.rows(batch), strict=True))
            maps[one.name] = StoredMap(one.map_key.json(), one.value.json(), 0, entries)
    return encode_maps(maps) if maps else None
