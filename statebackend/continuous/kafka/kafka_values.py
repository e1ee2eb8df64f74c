"""How the values of Kafka's records become columns: as they are, text, JSON, Avro, Protobuf.

Without a schema registry: the schema is the source's. A prefix as Confluent's registry writes it
before Avro and Protobuf can be passed over.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as T

from statebackend.continuous.files.file_formats import check_types
from statebackend.continuous.sources.line_files import JsonLines
from statebackend.errors import (
    EnvironmentMissingError,
    SchemaError,
    SettingError,
    UnsupportedTypeError,
    ValueMismatchError,
)
from statebackend.schema.conform import conform
from statebackend.schema.types import arrow_schema, as_schema
from statebackend.texts import install_extra

__all__ = ["AvroValue", "JsonValue", "PlainValue", "ValueFormat", "as_format", "past_prefix"]

Values = Sequence[bytes | None]
_PREFIX_BYTES: Final = 5  # a zero, and the schema's id in the registry
# What a value that cannot be read raises, in any format.
UNREADABLE: Final = (ValueError, pa.ArrowException, ValueMismatchError, EOFError, IndexError)


class ValueFormat(ABC):
    """How values become columns. Can be pickled.

    Attributes:
        schema: of the columns.
    """

    schema: T.StructType

    @abstractmethod
    def columns(self, values: Values) -> list[pa.Array]:
        """The columns of some values. A record without a value has nulls.

        Raises:
            ValueError, ArrowException, ValueMismatchError: one of them does not read.
        """


class PlainValue(ValueFormat):
    """The value as it is, in a column ``value``: of bytes, or of text."""

    def __init__(self, *, text: bool = False) -> None:
        kind = T.StringType() if text else T.BinaryType()
        self.schema = T.StructType([T.StructField("value", kind)])
        self._text = text

    def columns(self, values: Values) -> list[pa.Array]:
        """One."""
        found = pa.array(values, pa.binary())
        return [found.cast(pa.string()) if self._text else found]


class JsonValue(ValueFormat):
    """A JSON object. Fields that the schema does not name are left out."""

    def __init__(self, schema: T.DataType | str) -> None:
        self.schema = as_schema(schema)
        check_types(self.schema, "json")
        self._lines = JsonLines(self.schema)

    def columns(self, values: Values) -> list[pa.Array]:
        """By Arrow's reader, all of them at once."""
        # A line break in a JSON object outside a text is a space, and inside it is written as \n.
        lines = b"\n".join([b"{}" if value is None else value for value in values])
        if lines.count(b"\n") >= len(values):
            lines = b"\n".join([b"{}" if v is None else v.translate(_SPACES) for v in values])
        batch = self._lines.batch(lines, len(values))
        columns: list[pa.Array] = batch.columns
        return columns


_SPACES: Final = bytes.maketrans(b"\n\r", b"  ")


class AvroValue(ValueFormat):
    """Avro's binary form of one record, by a schema that is given here. Needs fastavro.

    Args:
        schema: Avro's, as JSON text or what that parses to.
        confluent: whether each value begins with the five bytes of Confluent's schema registry.
            They are passed over: all values are of this schema.
    """

    def __init__(self, schema: str | dict[str, Any], *, confluent: bool = False) -> None:
        import msgspec

        try:
            self._avro = msgspec.json.decode(schema) if isinstance(schema, str) else schema
        except msgspec.MsgspecError as error:
            raise SchemaError(
                f"The Avro schema is no JSON: {error}.", todo="Give it as in an .avsc file."
            ) from error
        self._confluent = confluent
        found = _avro_type(_parsed(self._avro), {})
        if not isinstance(found, T.StructType):
            raise SchemaError(
                "The Avro schema is not of a record.", todo='Give one with "type": "record".'
            )
        self.schema = found
        self._ready: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": None}

    def columns(self, values: Values) -> list[pa.Array]:
        """By fastavro, one value after the other."""
        read = _fastavro().schemaless_reader
        if self._ready is None:
            self._ready = _parsed(self._avro)
        rows: list[dict[str, Any] | None] = []
        for value in values:
            if value is None:
                rows.append(None)
                continue
            stream = io.BytesIO(past_prefix(value) if self._confluent else value)
            rows.append(read(stream, self._ready, None))
            if stream.read(1):
                raise ValueError("it is longer than a record of the schema")
        return columns_of_rows(rows, self.schema)

    def encoded(self, batch: pa.RecordBatch) -> list[bytes]:
        """Rows as values.

        Raises:
            ValueMismatchError: one does not fit the schema.
        """
        if self._confluent:
            raise SettingError(
                "A sink cannot write the prefix of Confluent's schema registry.",
                todo="Give it an AvroValue without confluent=True.",
            )
        write, made = _fastavro().schemaless_writer, []
        if self._ready is None:
            self._ready = _parsed(self._avro)
        for row in batch.select(self.schema.names).to_pylist():
            stream = io.BytesIO()
            try:
                write(stream, self._ready, row)
            except (ValueError, TypeError) as error:
                raise ValueMismatchError(
                    f"A row does not fit the Avro schema: {error}.",
                    todo="Compare the rows' columns with the schema's fields.",
                ) from error
            made.append(stream.getvalue())
        return made


def past_prefix(value: bytes) -> bytes:
    """A value without the five bytes of Confluent's registry.

    Raises:
        ValueError: it does not begin with them.
    """
    if len(value) < _PREFIX_BYTES or value[0]:
        raise ValueError("it does not begin as Confluent's schema registry writes it")
    return value[_PREFIX_BYTES:]


def columns_of_rows(rows: Sequence[dict[str, Any] | None], schema: T.StructType) -> list[pa.Array]:
    """The columns of rows as dicts. Raises as `ValueFormat.columns`."""
    made = []
    for field, arrow in zip(schema, arrow_schema(schema), strict=True):
        name = field.name
        column = [None if row is None else row.get(name) for row in rows]
        try:
            array = pa.array(column, arrow.type)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from error
        made.append(conform(array, field))
    return made


def _fastavro() -> Any:
    try:
        import fastavro
    except ImportError as error:
        raise EnvironmentMissingError(
            "The package fastavro is missing.",
            todo=install_extra("kafka", "on the driver and on every executor"),
        ) from error
    return fastavro


def _parsed(schema: Any) -> Any:
    fastavro = _fastavro()
    from fastavro.schema import SchemaParseException, UnknownType

    try:
        return fastavro.parse_schema(schema)
    except (SchemaParseException, UnknownType, KeyError, TypeError, ValueError) as error:
        raise SchemaError(
            f"The Avro schema does not parse: {error}.", todo="Give it as in an .avsc file."
        ) from error


_AVRO: Final[dict[str, T.DataType]] = {
    "boolean": T.BooleanType(),
    "int": T.IntegerType(),
    "long": T.LongType(),
    "float": T.FloatType(),
    "double": T.DoubleType(),
    "bytes": T.BinaryType(),
    "string": T.StringType(),
    "enum": T.StringType(),
    "fixed": T.BinaryType(),
}
_LOGICAL: Final[dict[str, T.DataType]] = {
    "date": T.DateType(),
    "timestamp-millis": T.TimestampType(),
    "timestamp-micros": T.TimestampType(),
    "local-timestamp-millis": T.TimestampNTZType(),
    "local-timestamp-micros": T.TimestampNTZType(),
}


def _avro_type(schema: Any, names: dict[str, T.DataType | None]) -> T.DataType:
    """Spark's type of an Avro schema that fastavro has parsed; ``names``: of those around it."""
    if isinstance(schema, list):
        raise UnsupportedTypeError(
            "The Avro schema has a union that is not a type and null.",
            todo="Read the values raw, and take them apart in the processor.",
        )
    kind = schema if isinstance(schema, str) else schema["type"]
    if isinstance(schema, dict) and schema.get("logicalType"):
        logical = schema["logicalType"]
        if logical == "decimal":
            return T.DecimalType(schema["precision"], schema.get("scale", 0))
        if logical in _LOGICAL:
            return _LOGICAL[logical]
        if kind == "fixed" or logical not in ("uuid",):
            raise UnsupportedTypeError(
                f"The Avro schema has the logical type {logical!r}, which has no column.",
                todo="Leave the logical type out, or read the values raw.",
            )
    if kind == "record":
        return _avro_record(schema, names)
    if kind == "array":
        element, optional = _avro_optional(schema["items"], names)
        return T.ArrayType(element, optional)
    if kind == "map":
        value, optional = _avro_optional(schema["values"], names)
        return T.MapType(T.StringType(), value, optional)
    if kind in _AVRO:
        if isinstance(schema, dict) and "name" in schema:
            names[schema["name"]] = _AVRO[kind]
        return _AVRO[kind]
    found = names.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise UnsupportedTypeError(
            f"The Avro schema has the type {kind!r}, which has no column.",
            todo="Read the values raw, and take them apart in the processor.",
        )
    return found


def _avro_record(schema: Any, names: dict[str, T.DataType | None]) -> T.StructType:
    names[schema["name"]] = None  # in itself it has no end
    fields = []
    for one in schema["fields"]:
        dtype, optional = _avro_optional(one["type"], names)
        fields.append(T.StructField(one["name"], dtype, optional))
    names[schema["name"]] = T.StructType(fields)
    return T.StructType(fields)


def _avro_optional(schema: Any, names: dict[str, T.DataType | None]) -> tuple[T.DataType, bool]:
    """A type, and whether it may be null."""
    if isinstance(schema, list) and "null" in schema and len(schema) == 2:
        (inner,) = [one for one in schema if one != "null"]
        return _avro_type(inner, names), True
    return _avro_type(schema, names), False


def as_format(value: str | ValueFormat) -> ValueFormat:
    """What a user gave as ``value=``.

    Raises:
        SettingError: it is no form. SchemaError, UnsupportedTypeError: its schema is none.
    """
    if isinstance(value, ValueFormat):
        return value
    kind, _, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind in ("raw", "text") and not rest.strip():
        return PlainValue(text=kind == "text")
    if kind == "json" and rest.strip():
        return JsonValue(rest.strip())
    if kind == "avro" and rest.strip():
        return AvroValue(rest.strip())
    raise SettingError(
        f"value={value!r} is no form of values.",
        todo='Give "raw", "text", "json: user string, ms bigint", "avro: {...}", or an AvroValue '
        "or a ProtobufValue.",
    )
