"""Schemas as text and as JSON, and the bytes of rows and keys under them."""

from __future__ import annotations

import random
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import types as T

from statebackend.operators.declared_states import StateDeclaration
from statebackend.schema.codec import codec_for
from statebackend.schema.ddl import parse_ddl, parse_ddl_type
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.types import schema_from_json
from statebackend.schema.versioned_rows import codec_of_versions
from tests.fuzz.mutate import damaged_bytes, damaged_text, damaged_value
from tests.fuzz.target import TAKEN, Target, refused_or

__all__ = ["targets"]

_TEXT_CHARS: Final = 200_000
_DDL: Final = (
    "n BIGINT, at TIMESTAMP NOT NULL COMMENT 'when', price DECIMAL(38, 18)",
    "a ARRAY<STRUCT<x: INT, y: MAP<STRING, ARRAY<DOUBLE>>>>, b BINARY",
    "`odd ``name` STRING COLLATE UTF8_LCASE, i INTERVAL DAY TO SECOND, t TIME(6)",
    "STRUCT<a: STRUCT<b: STRUCT<c: STRUCT<d: TINYINT>>>>",
    "v VARIANT, d DATE DEFAULT '2020-01-01', c CHAR(3), w VARCHAR(9)",
)
_ROWS: Final = (
    ("n BIGINT, d DOUBLE, b BOOLEAN, at TIMESTAMP", (5, 1.5, None, None)),
    ("s STRING, a ARRAY<INT>, big DECIMAL(38, 4)", ("é", [1, None, 3], None)),
    ("m MAP<STRING, STRUCT<x: BIGINT, y: STRING>>, z BINARY", ({"k": (1, "v")}, b"\0")),
    ("k MAP<DOUBLE, STRING>, d DATE, v VARIANT", ({1.5: "a"}, None, None)),
)
_KEYS: Final = (
    ("n BIGINT", (7,)),
    ("s STRING, n INT", ("a\0b", 3)),
    ("a ARRAY<STRUCT<x: INT, y: STRING>>, b BINARY, d DECIMAL(20, 3)", ([(1, "x")], b"\0\1", None)),
)


def _ddl_target() -> Target:
    def make(rng: random.Random) -> str:
        if rng.random() < 0.005:
            return (
                "a " + "ARRAY<" * rng.choice((50, 3000)) + "INT" + ">" * rng.choice((0, 50, 3000))
            )
        return damaged_text(rng, rng.choice(_DDL), _DDL)

    def take(text: str) -> str:
        refused_or(lambda: _taken(parse_ddl_type(text)))
        return refused_or(lambda: _codec_made(parse_ddl(text)))

    return Target("schema as DDL", make, take)


def _taken(value: object) -> str:
    return TAKEN


def _codec_made(schema: T.StructType) -> str:
    """A schema that parses gives a codec, or says why not."""
    return _taken(codec_for(schema))


def _json_target() -> Target:
    texts = [parse_ddl(text).json() for text, _ in _ROWS]
    plain = [msgspec.json.decode(text) for text in texts]

    def make(rng: random.Random) -> str:
        if rng.random() < 0.3:
            return damaged_text(rng, rng.choice(texts), texts)
        try:
            return msgspec.json.encode(damaged_value(rng, rng.choice(plain))).decode()[:_TEXT_CHARS]
        except (ValueError, TypeError):
            return "[" * 100_000

    def take(text: str) -> str:
        return refused_or(lambda: _codec_made(schema_from_json(text)))

    return Target("schema as JSON", make, take)


def _declaration_target() -> Target:
    schema = parse_ddl(_ROWS[0][0]).json()
    plain: dict[str, Any] = {
        "name": "s",
        "kind": "map",
        "ttl": True,
        "value_schema": schema,
        "key_schema": schema,
        "ttl_ms": 1000,
        "ttl_update": "write",
        "ttl_expired": "hide",
        "earlier": [schema],
    }

    def make(rng: random.Random) -> str:
        try:
            text = msgspec.json.encode(damaged_value(rng, plain)).decode()
        except (ValueError, TypeError):
            text = "{"
        return damaged_text(rng, text, [text]) if rng.random() < 0.3 else text

    def take(text: str) -> str:
        def read() -> str:
            found = StateDeclaration.from_json(text)
            return _taken((found.versions, found.time_to_live))

        return refused_or(read)

    return Target("declaration of a state", make, take)


def _row_target() -> Target:
    codecs: list[Any] = []
    whole: list[bytes] = []
    for text, row in _ROWS:
        schema = parse_ddl(text)
        codecs.append(codec_for(schema))
        whole.append(codecs[-1].encode(row))
    older, newer = parse_ddl("n INT, s STRING"), parse_ddl("n BIGINT, s STRING, more DOUBLE")
    codecs.append(codec_of_versions([older, newer]))
    whole.append(codec_for(older).encode((5, "text")))

    def make(rng: random.Random) -> tuple[int, bytes]:
        number = rng.randrange(len(whole))
        return number, damaged_bytes(rng, whole[number], whole)

    def take(given: tuple[int, bytes]) -> str:
        number, data = given
        codec = codecs[number]
        refused_or(lambda: _taken(codec.decode_many([data, None, whole[number]])))
        column = pa.array([data, None], pa.binary())
        refused_or(lambda: _taken([one.validate(full=True) for one in codec.decode_arrow(column)]))
        return refused_or(lambda: _taken(codec.decode(data)))

    return Target("row of a state", make, take)


def _key_target() -> Target:
    codecs = [KeyCodec(parse_ddl(text)) for text, _ in _KEYS]
    whole = [codec.encode(key) for codec, (_, key) in zip(codecs, _KEYS, strict=True)]

    def make(rng: random.Random) -> tuple[int, bytes]:
        number = rng.randrange(len(whole))
        return number, damaged_bytes(rng, whole[number], whole)

    def take(given: tuple[int, bytes]) -> str:
        number, data = given
        return refused_or(lambda: _taken(codecs[number].decode(data)))

    return Target("key of a state", make, take)


def targets() -> list[Target]:
    """All of them."""
    return [_ddl_target(), _json_target(), _declaration_target(), _row_target(), _key_target()]
