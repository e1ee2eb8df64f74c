"""Protobuf messages become columns."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from statebackend.continuous.kafka.kafka_protobuf import ProtobufValue
from statebackend.continuous.kafka.kafka_values import UNREADABLE
from statebackend.errors import SettingError, UnsupportedTypeError

pytest.importorskip("google.protobuf", reason="the extra kafka is not installed")

from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    message_factory,
    timestamp_pb2,
)

F = descriptor_pb2.FieldDescriptorProto


def click() -> Any:
    """As protoc makes it of a .proto file."""
    file = descriptor_pb2.FileDescriptorProto(name="click.proto", package="shop", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    kind = file.enum_type.add(name="Kind")
    kind.value.add(name="NONE", number=0)
    kind.value.add(name="SOME", number=1)
    item = file.message_type.add(name="Item")
    item.field.add(name="name", number=1, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    made = file.message_type.add(name="Click")
    entry = made.nested_type.add(name="CountsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=F.TYPE_INT32, label=F.LABEL_OPTIONAL)
    made.oneof_decl.add(name="_ms")
    one, many = F.LABEL_OPTIONAL, F.LABEL_REPEATED
    for number, (name, type_, label, of) in enumerate(
        [
            ("user", F.TYPE_STRING, one, ""),
            ("ms", F.TYPE_INT64, one, ""),
            ("at", F.TYPE_MESSAGE, one, ".google.protobuf.Timestamp"),
            ("kind", F.TYPE_ENUM, one, ".shop.Kind"),
            ("items", F.TYPE_MESSAGE, many, ".shop.Item"),
            ("counts", F.TYPE_MESSAGE, many, ".shop.Click.CountsEntry"),
            ("body", F.TYPE_BYTES, one, ""),
            ("large", F.TYPE_UINT64, one, ""),
        ],
        1,
    ):
        field = made.field.add(name=name, number=number, type=type_, label=label)
        if of:
            field.type_name = of
        if name == "ms":
            field.oneof_index, field.proto3_optional = 0, True
    itself = file.message_type.add(name="Tree")
    itself.field.add(name="left", number=1, type=F.TYPE_MESSAGE, label=one, type_name=".shop.Tree")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"shop.{name}"))
        for name in ("Click", "Tree")
    }


CLASSES = click()
AT = datetime(2026, 1, 2, 3, 4, 5, 6000, tzinfo=UTC)


def full() -> bytes:
    made = CLASSES["Click"](
        user="ü",
        ms=0,
        kind=1,
        items=[{"name": "x"}],
        counts={"a": 1},
        body=b"\xff",
        large=2**64 - 1,
    )
    made.at.seconds, made.at.nanos = round(AT.timestamp()), 6_000_000
    data: bytes = made.SerializeToString()
    return data


def read(form: ProtobufValue, *values: bytes | None) -> list[dict[str, Any]]:
    found = pickle.loads(pickle.dumps(form))
    columns = found.columns(values)
    rows: list[dict[str, Any]] = pa.RecordBatch.from_arrays(
        columns, names=found.schema.names
    ).to_pylist()
    return rows


def test_messages_become_columns() -> None:
    form = ProtobufValue(CLASSES["Click"])
    wanted = {
        **{"user": "ü", "ms": 0, "at": AT, "kind": "SOME", "items": [{"name": "x"}]},
        **{"counts": [("a", 1)], "body": b"\xff", "large": Decimal(2**64 - 1)},
    }
    empty = {
        **{"user": "", "ms": None, "at": None, "kind": "NONE", "items": [], "counts": []},
        **{"body": b"", "large": Decimal(0)},
    }
    assert read(form, full(), b"", None) == [wanted, empty, dict.fromkeys(wanted)]
    for prefix in (b"\0\0\0\0\7\0", b"\0\0\0\0\7\4\2\0"):  # of the first message, and of another
        found = read(ProtobufValue(CLASSES["Click"], confluent=True), prefix + full())
        assert found == [wanted]


def test_what_is_no_message_is_refused() -> None:
    for form, value in (
        (ProtobufValue(CLASSES["Click"]), full()[:-1]),
        (ProtobufValue(CLASSES["Click"], confluent=True), b"\7" + full()),
        (ProtobufValue(CLASSES["Click"], confluent=True), b"\0\0\0\0\7"),
    ):
        with pytest.raises(UNREADABLE):
            read(form, value)
    with pytest.raises(UnsupportedTypeError, match="Tree"):
        ProtobufValue(CLASSES["Tree"])
    with pytest.raises(SettingError):
        ProtobufValue(dict)
