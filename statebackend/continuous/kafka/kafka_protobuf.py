"""Values of Kafka's records in Protobuf, by a message class that protoc has made."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from importlib import import_module
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as T

from statebackend.continuous.kafka.kafka_values import (
    ValueFormat,
    Values,
    columns_of_rows,
    past_prefix,
)
from statebackend.errors import EnvironmentMissingError, SettingError, UnsupportedTypeError
from statebackend.texts import install_extra

__all__ = ["ProtobufValue"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIMESTAMP: Final = "google.protobuf.Timestamp"
# By google.protobuf.descriptor.FieldDescriptor.CPPTYPE_...
_PLAIN: Final[dict[int, T.DataType]] = {
    1: T.IntegerType(),
    2: T.LongType(),
    3: T.LongType(),
    4: T.DecimalType(20, 0),
    5: T.DoubleType(),
    6: T.FloatType(),
    7: T.BooleanType(),
    8: T.StringType(),
}
_UINT64: Final = 4
_STRING: Final = 9
_MESSAGE: Final = 10
_TYPE_BYTES: Final = 12
Read = Callable[[Any], Any]


class ProtobufValue(ValueFormat):
    """A Protobuf message: a column for each field. Needs protobuf.

    A field that is not set is null if the message says whether it is set; else it has Protobuf's
    default. Enums are their names, ``uint64`` is ``decimal(20,0)``, ``google.protobuf.Timestamp``
    is a timestamp.

    Args:
        message: the class, such as ``clicks_pb2.Click``. Executors need not have it.
        confluent: whether each value begins as Confluent's schema registry writes it. That is
            passed over: all values are of this message.
    """

    def __init__(self, message: type[Any], *, confluent: bool = False) -> None:
        descriptor = getattr(message, "DESCRIPTOR", None)
        if descriptor is None or not hasattr(descriptor, "fields"):
            raise SettingError(
                f"{message!r} is no message class of Protobuf.",
                todo="Give a class of a module that protoc has made.",
            )
        self._name = str(descriptor.full_name)
        self._files = _files_of(descriptor.file)
        self._confluent = confluent
        self.schema = _struct(descriptor, ())[0]
        self._ready: tuple[Any, Read] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": None}

    def columns(self, values: Values) -> list[pa.Array]:
        """By Protobuf, one value after the other."""
        if self._ready is None:
            kind = _class_of(self._files, self._name)
            self._ready = kind, _struct(kind.DESCRIPTOR, ())[1]
        kind, read = self._ready
        wrong = _protobuf("message").DecodeError
        try:
            rows = [
                None
                if value is None
                else read(kind.FromString(_message(value) if self._confluent else value))
                for value in values
            ]
        except wrong as error:
            raise ValueError(f"it is no {self._name}: {error}") from error
        return columns_of_rows(rows, self.schema)


def _message(value: bytes) -> bytes:
    """A value without the prefix of Confluent's registry: the schema's id, and which message."""
    rest = past_prefix(value)
    count, at = _varint(rest, 0)
    for _ in range(count):
        _, at = _varint(rest, at)
    return rest[at:]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number as Protobuf's sint64, and where it ends."""
    found = shift = 0
    while True:
        found |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not data[at - 1] & 0x80:
            return (found >> 1) ^ -(found & 1), at


def _protobuf(name: str) -> Any:
    try:
        return import_module(f"google.protobuf.{name}")
    except ImportError as error:
        raise EnvironmentMissingError(
            "The package protobuf is missing.",
            todo=install_extra("kafka", "on the driver and on every executor"),
        ) from error


def _files_of(file: Any) -> tuple[bytes, ...]:
    """The descriptors of a file and of those that it imports, those first."""
    found: dict[str, bytes] = {}

    def add(one: Any) -> None:
        if one.name not in found:
            for other in one.dependencies:
                add(other)
            found[one.name] = one.serialized_pb

    add(file)
    return tuple(found.values())


def _class_of(files: tuple[bytes, ...], name: str) -> Any:
    pool = _protobuf("descriptor_pool").DescriptorPool()
    for file in files:
        pool.AddSerializedFile(file)
    return _protobuf("message_factory").GetMessageClass(pool.FindMessageTypeByName(name))


def _struct(descriptor: Any, above: tuple[str, ...]) -> tuple[T.StructType, Read]:
    """The type of a message, and what reads one as a dict."""
    name = str(descriptor.full_name)
    if name in above:
        raise UnsupportedTypeError(
            f"The Protobuf message {name} holds itself: it has no end as a column.",
            todo='Read the values with value="raw", and take them apart in the processor.',
        )
    fields, readers = [], []
    for field in descriptor.fields:
        dtype, read = _field(field, (*above, name))
        optional = bool(field.has_presence) and not _repeated(field)
        fields.append(T.StructField(field.name, dtype, True))
        readers.append((str(field.name), optional, read))

    def read_message(message: Any) -> dict[str, Any]:
        return {
            name: None if optional and not message.HasField(name) else read(getattr(message, name))
            for name, optional, read in readers
        }

    return T.StructType(fields), read_message


def _repeated(field: Any) -> bool:
    said = getattr(field, "is_repeated", None)  # older releases have a label instead
    return bool(field.label == field.LABEL_REPEATED if said is None else said)


def _field(field: Any, above: tuple[str, ...]) -> tuple[T.DataType, Read]:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, _ = _single(entry.fields_by_name["key"], above)
        value, read_value = _single(entry.fields_by_name["value"], above)
        return T.MapType(key, value), lambda found: [(k, read_value(found[k])) for k in found]
    dtype, read = _single(field, above)
    if not _repeated(field):
        return dtype, read
    return T.ArrayType(dtype), lambda found: [read(one) for one in found]


def _single(field: Any, above: tuple[str, ...]) -> tuple[T.DataType, Read]:
    if field.cpp_type == _MESSAGE:
        if field.message_type.full_name == _TIMESTAMP:
            return T.TimestampType(), _timestamp
        return _struct(field.message_type, above)
    if field.cpp_type == _STRING:
        dtype = T.BinaryType() if field.type == _TYPE_BYTES else T.StringType()
        return dtype, _same
    if field.enum_type is not None:
        names = {one.number: str(one.name) for one in field.enum_type.values}
        return T.StringType(), lambda number: names.get(number, str(number))
    return _PLAIN[field.cpp_type], Decimal if field.cpp_type == _UINT64 else _same


def _same(value: Any) -> Any:
    return value


def _timestamp(message: Any) -> datetime:
    return _EPOCH + timedelta(seconds=message.seconds, microseconds=message.nanos // 1000)
