"""Values of Kafka's records become columns, and rows become values."""

from __future__ import annotations

import io
import json
import pickle
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statebackend.continuous.kafka.kafka_rows import RowEncoder
from statebackend.continuous.kafka.kafka_values import (
    UNREADABLE,
    AvroValue,
    ValueFormat,
    as_format,
)
from statebackend.continuous.sinks.json_rows import json_texts
from statebackend.errors import SchemaError, SettingError, UnsupportedTypeError
from statebackend.schema.ddl import parse_ddl

CLICK = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "user", "type": "string"},
        {"name": "ms", "type": ["null", "long"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {
            "name": "price",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        },
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "other", "type": ["null", "Kind"]},
    ],
}
ROW: dict[str, Any] = {
    "user": "ü",
    "ms": None,
    "at": datetime(2026, 1, 2, 3, 4, 5, 6000, tzinfo=UTC),
    "day": date(2026, 1, 2),
    "price": Decimal("12.50"),
    "tags": ["x", "y"],
    "kind": "B",
    "other": "A",
}


def read(form: str | ValueFormat, *values: bytes | None) -> list[dict[str, Any]]:
    """The rows of some values."""
    found = pickle.loads(pickle.dumps(as_format(form)))
    columns = found.columns(values)
    batch = pa.RecordBatch.from_arrays(columns, names=found.schema.names)
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def avro(row: dict[str, Any]) -> bytes:
    fastavro = pytest.importorskip("fastavro", reason="the extra kafka is not installed")
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(CLICK), row)
    return stream.getvalue()


def test_values_as_they_are_and_as_text() -> None:
    assert read("raw", b"\xff", None) == [{"value": b"\xff"}, {"value": None}]
    assert read("text", "ü".encode(), None) == [{"value": "ü"}, {"value": None}]
    with pytest.raises(UNREADABLE):
        read("text", b"\xff")


def test_json_objects_become_the_columns_that_the_schema_names() -> None:
    values = (b'{"user": "a", "more": [1]}', b'{\n "ms": 5,\r\n "user": "x\\ny"\n}', None)
    assert read("json: user string, ms bigint", *values) == [
        {"user": "a", "ms": None},
        {"user": "x\ny", "ms": 5},
        {"user": None, "ms": None},
    ]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b" ",
        b"{",
        b"5",
        b'{"ms": "x"}',
        b'{"ms": 1.5}',
        b'{"ms": 1} {"ms": 2}',
        b'{"ms": 1}\n{}',
    ],
)
def test_what_is_no_object_of_the_schema_is_refused(value: bytes) -> None:
    with pytest.raises(UNREADABLE):
        read("json: ms bigint", b'{"ms": 1}', value, b'{"ms": 2}')


def test_a_value_that_must_be_there_is_missed() -> None:
    with pytest.raises(UNREADABLE, match="ms"):
        read("json: ms bigint not null", None)


def test_avro_becomes_columns_of_its_types() -> None:
    form = AvroValue(json.dumps(CLICK))
    want = "user string not null, ms bigint, at timestamp not null, day date not null"
    assert form.schema.fields[:4] == parse_ddl(want).fields
    assert read(form, avro(ROW)) == [ROW]
    assert read(f"avro: {json.dumps(CLICK)}", avro(ROW)) == [ROW]
    assert read(AvroValue(CLICK, confluent=True), b"\0\0\0\0\7" + avro(ROW)) == [ROW]


def test_avro_that_is_cut_off_or_too_long_is_refused() -> None:
    whole = avro(ROW)
    for value in (whole[:-1], whole + b"x", b"", None):
        with pytest.raises(UNREADABLE):
            read(AvroValue(CLICK), value)
    with pytest.raises(UNREADABLE, match="registry"):
        read(AvroValue(CLICK, confluent=True), whole)


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ("{", SchemaError),
        ('"string"', SchemaError),
        ({"type": "record", "name": "x", "fields": [{"name": "a", "type": "x"}]}, SchemaError),
        (
            {
                "type": "record",
                "name": "x",
                "fields": [{"name": "a", "type": ["int", "string"]}],
            },
            UnsupportedTypeError,
        ),
    ],
)
def test_an_avro_schema_without_columns_is_refused(schema: Any, error: type[Exception]) -> None:
    pytest.importorskip("fastavro", reason="the extra kafka is not installed")
    with pytest.raises(error):
        AvroValue(schema)


@pytest.mark.parametrize("value", ["", "jason", "json", "json:", "raw: x", "avro:", 5, None])
def test_a_form_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(SettingError, match="json: user string"):
        as_format(value)


# --- rows into values ----------------------------------------------------------------------------

_CELL = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.bool_(): st.booleans(),
    pa.float64(): st.floats(),
    pa.string(): st.text(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(UTC)),
    pa.list_(pa.string()): st.lists(st.text(), max_size=3),
    pa.decimal128(9, 2): st.decimals(-1000, 1000, places=2),
}


@given(st.data())
def test_json_is_what_msgspec_writes(data: st.DataObject) -> None:
    types = data.draw(st.lists(st.sampled_from(list(_CELL)), max_size=4))
    names = data.draw(st.lists(st.text(), min_size=len(types), max_size=len(types), unique=True))
    count = data.draw(st.integers(0, 4))
    arrays = [
        pa.array(data.draw(st.lists(st.none() | _CELL[t], min_size=count, max_size=count)), t)
        for t in types
    ]
    if types:
        batch = pa.RecordBatch.from_arrays(arrays, names=names)
        encoder = msgspec.json.Encoder(decimal_format="string")
        wanted = [encoder.encode(row).decode() for row in batch.to_pylist()]
        assert json_texts(batch).to_pylist() == wanted


def rows(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def records(encoder: RowEncoder, batch: pa.RecordBatch) -> list[tuple[Any, Any]]:
    return [tuple(row.values()) for row in encoder.records(batch).to_pylist()]


def test_keys_are_text_bytes_or_json() -> None:
    batch = rows(user=["ü", None], n=[1, None], value=["x", None])
    assert records(RowEncoder("raw", ("user",)), batch) == [("ü".encode(), b"x"), (None, None)]
    assert records(RowEncoder("raw", ("n",)), batch) == [(b"1", b"x"), (None, None)]
    assert records(RowEncoder("raw", ("user", "n")), batch)[0][0] == '{"user":"ü","n":1}'.encode()
    assert records(RowEncoder("json"), rows(n=[1])) == [(None, b'{"n":1}')]


def test_rows_as_avro_read_as_they_were() -> None:
    form = AvroValue(CLICK)
    batch = pa.RecordBatch.from_arrays(form.columns([avro(ROW)]), names=form.schema.names)
    ((key, value),) = records(RowEncoder(form, ("user",)), batch)
    assert (key, read(form, value)) == ("ü".encode(), [ROW])


@pytest.mark.parametrize(
    ("value", "key", "schema", "error"),
    [
        ("raw", (), "n int", SchemaError),
        ("raw", (), "value int", UnsupportedTypeError),
        ("json", ("user",), "n int", SchemaError),
        ("json", (), "b binary", UnsupportedTypeError),
        ("raw", ("m",), "m map<string,int>, value string", UnsupportedTypeError),
    ],
)
def test_rows_that_cannot_be_written_are_refused(
    value: str, key: tuple[str, ...], schema: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        RowEncoder(value, key).check(parse_ddl(schema))
