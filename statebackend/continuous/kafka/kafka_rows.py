"""Rows as keys and values of Kafka's records: in columns, as far as Arrow can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pyspark.sql import types as T

from statebackend.continuous.files.file_formats import check_types
from statebackend.continuous.kafka.kafka_values import AvroValue
from statebackend.continuous.sinks.json_rows import json_column, json_texts
from statebackend.errors import SchemaError, SettingError, UnsupportedTypeError

__all__ = ["RowEncoder"]

RECORD: Final = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])


@dataclass(frozen=True)
class RowEncoder:
    """How rows become records.

    Attributes:
        value: ``json``, ``raw`` (the column ``value``), or an `AvroValue`.
        key: columns; none: records have no key.
    """

    value: str | AvroValue
    key: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises `SettingError` for a form that is none."""
        if not isinstance(self.value, AvroValue) and self.value not in ("json", "raw"):
            raise SettingError(
                f"value={self.value!r} is no form of values that a sink writes.",
                todo='Give "json", "raw" or an AvroValue.',
            )

    def check(self, schema: T.StructType) -> None:
        """Refuse rows that cannot be written.

        Raises:
            SchemaError: a column is missing. UnsupportedTypeError: naming the field.
        """
        wanted = [*self.key, *(("value",) if self.value == "raw" else ())]
        if isinstance(self.value, AvroValue):
            wanted += self.value.schema.names
        missing = [name for name in wanted if name not in schema.names]
        if missing:
            raise SchemaError(
                f"The rows have no column {missing[0]!r}, which the Kafka sink writes.",
                todo=f"Name columns that there are: {', '.join(schema.names)}.",
            )
        key = T.StructType([schema[name] for name in self.key])
        if len(self.key) > 1 or not _is_plain(key):
            check_types(key, "json")
        if self.value == "json":
            check_types(schema, "json")
        elif self.value == "raw" and not _is_plain(T.StructType([schema["value"]])):
            raise UnsupportedTypeError(
                "The column 'value' is neither a string nor binary.",
                todo='Write value="json", or make the column a string.',
            )

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Keys and values, in binary."""
        if isinstance(self.value, AvroValue):
            values: pa.Array = pa.array(self.value.encoded(batch), pa.binary())
        elif self.value == "raw":
            values = batch.column("value")
        else:
            values = json_texts(batch)
        arrays = [self._keys(batch), _binary(values)]
        return pa.RecordBatch.from_arrays(arrays, schema=RECORD)

    def _keys(self, batch: pa.RecordBatch) -> pa.Array:
        if not self.key:
            return pa.nulls(batch.num_rows, pa.binary())
        if len(self.key) > 1:
            return _binary(json_texts(batch.select(list(self.key))))
        column = batch.column(self.key[0])
        if any(is_one(column.type) for is_one in _PLAIN):
            return _binary(column)
        texts = json_column(column)
        return _binary(pc.if_else(column.is_valid(), texts, pa.scalar(None, pa.string())))


def as_names(key: str | Sequence[str] | None) -> tuple[str, ...]:
    """The columns that a user named as the key."""
    if key is None:
        return ()
    return (key,) if isinstance(key, str) else tuple(key)


# Spark's batches have the large ones with spark.sql.execution.arrow.useLargeVarTypes.
_PLAIN: Final = (
    *(pt.is_string, pt.is_large_string, pt.is_string_view),
    *(pt.is_binary, pt.is_large_binary, pt.is_binary_view),
)


def _is_plain(schema: T.StructType) -> bool:
    return all(isinstance(field.dataType, T.StringType | T.BinaryType) for field in schema)


def _binary(column: pa.Array) -> pa.Array:
    return column.cast(pa.binary())
