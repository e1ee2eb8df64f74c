"""What users put into state, in all its forms, and what they get back: what Spark would give.

The right-hand sides for types that Spark's own transformWithState can keep were seen there (4.3):
naive datetimes in the process's zone, Rows for structs, bytes for binaries. It refuses times,
intervals, variants and geometries altogether.
"""

from __future__ import annotations

import array
from collections import namedtuple
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import types as T

from statebackend.errors import (
    CorruptionError,
    SchemaError,
    UnsupportedTypeError,
    ValueMismatchError,
)
from statebackend.schema.codec import RowCodec, codec_for
from statebackend.schema.ddl import parse_ddl
from statebackend.schema.fixed_rows import FixedCodec
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.msgpack_rows import MsgpackCodec
from statebackend.schema.types import schema_from_json
from tests.schema.strategies import same
from tests.support.ids import stable

Pair = namedtuple("Pair", "a b")
MIDNIGHT = datetime(2020, 1, 1)


def _codecs(ddl: str) -> list[RowCodec]:
    """With a string beside the field, a fixed-width one is written by the other codec."""
    schema = parse_ddl(ddl)
    return [codec_for(schema), codec_for(parse_ddl(f"{ddl}, z string"))]


def _rows(codec: RowCodec, value: Any) -> tuple[Any, ...]:
    return (value, "z") if "z" in codec.schema.names else (value,)


@pytest.mark.parametrize(
    ("ddl", "value", "back"),
    [
        ("x bigint", np.int8(5), 5),
        ("x bigint", np.uint64(5), 5),
        ("x double", np.int64(5), 5.0),
        ("x double", np.float32(0.5), 0.5),
        ("x float", 1, 1.0),
        ("x boolean", np.bool_(True), True),
        ("x string", np.str_("é"), "é"),
        ("x binary", bytearray(b"a"), b"a"),
        ("x binary", memoryview(b"a"), b"a"),
        ("x binary", np.bytes_(b"a"), b"a"),
        ("x decimal(10,2)", Decimal("1.5"), Decimal("1.50")),
        ("x date", np.datetime64("2020-01-01"), date(2020, 1, 1)),
        ("x timestamp", pd.Timestamp(MIDNIGHT), MIDNIGHT),
        ("x timestamp", np.datetime64("2020-01-01T00:00:00.000000000"), MIDNIGHT),
        ("x timestamp_ntz", pd.Timestamp(MIDNIGHT), MIDNIGHT),
        ("x timestamp_ntz", pd.Timestamp(1_000_000_001), datetime(1970, 1, 1, 0, 0, 1)),
        ("x timestamp_ntz", np.datetime64("2020-01-01"), MIDNIGHT),
        ("x interval day", pd.Timedelta(1, "D"), timedelta(days=1)),
        ("x interval day to second", np.timedelta64(5, "s"), timedelta(seconds=5)),
        ("x time", time(1, 2, 3, 4), time(1, 2, 3, 4)),
        ("x time(3)", time(1, 2, 3, 4000), time(1, 2, 3, 4000)),
        ("x string collate UTF8_LCASE", "aB", "aB"),
        ("x void", None, None),
        ("x array<void>", [None], [None]),
        ("x array<int>", np.array([1, 2]), [1, 2]),
        ("x array<int>", array.array("i", [1, 2]), [1, 2]),
        ("x array<array<int>>", np.array([[1], [2]]), [[1], [2]]),
        ("x array<date>", [date(2020, 2, 3), None], [date(2020, 2, 3), None]),
        ("x map<string,date>", {"a": date(2020, 2, 3)}, {"a": date(2020, 2, 3)}),
        ("x struct<a:int,b:string>", Pair(1, "b"), T.Row(a=1, b="b")),
        ("x struct<a:int,b:string>", {"b": "b"}, T.Row(a=None, b="b")),
        ("x array<struct<a:int>>", [{"a": np.int64(1)}, (2,)], [T.Row(a=1), T.Row(a=2)]),
        ("x variant", T.VariantVal(b"v", b"m"), T.VariantVal(b"v", b"m")),
        ("x variant", {"value": b"v", "metadata": b"m"}, T.VariantVal(b"v", b"m")),
        ("x geometry(0)", T.Geometry(b"g", 0), T.Geometry(b"g", 0)),
        ("x geometry(0)", {"srid": 0, "wkb": b"g"}, T.Geometry(b"g", 0)),
        ("x geography(any)", T.Geography(b"g", 4326), T.Geography(b"g", 4326)),
    ],
    ids=stable,
)
def test_what_loses_nothing_is_taken(ddl: str, value: Any, back: Any) -> None:
    for codec in _codecs(ddl):
        assert same(codec.decode(codec.encode(_rows(codec, value)))[0], back)


def test_a_zone_of_pandas_says_which_moment_is_meant() -> None:
    for codec in _codecs("x timestamp"):
        tokyo = pd.Timestamp("2020-01-01 09:00", tz="Asia/Tokyo")
        assert codec.encode(_rows(codec, tokyo)) == codec.encode(
            _rows(codec, datetime(2020, 1, 1, tzinfo=UTC))
        )


@pytest.mark.parametrize(
    ("ddl", "value", "message"),
    [
        ("x bigint", pd.NA, "'x' .* NAType. Pass None"),
        ("x bigint", float("nan"), "'x' .* type float"),
        ("x timestamp", pd.NaT, "'x' .* NaT.* Pass None"),
        ("x timestamp_ntz", pd.NaT, "'x' .* NaT.* Pass None"),
        ("x timestamp", np.datetime64("NaT", "us"), "'x' .* NaT"),
        ("x timestamp", np.datetime64(1_000_000_001, "ns"), "'x' .* cannot hold 1970"),
        ("x date", np.datetime64("2020-01-01T05"), "'x' .* cannot hold 2020-01-01T05"),
        ("x interval day to second", np.timedelta64("NaT", "us"), "'x' .* NaT"),
        ("x time", time(1, tzinfo=UTC), "'x' .* a time with a time zone"),
        ("x time(3)", time(1, 2, 3, 4), "'x' is time.3. .* without rounding"),
        ("x void", 0, "'x' is void"),
        ("x variant", {"a": 1}, "'x' is variant .* type dict"),
        ("x variant", "{}", r"'x' is variant .*VariantVal"),
        ("x variant", T.VariantVal("v", b"m"), "'x.value' is binary"),  # type: ignore[arg-type]
        ("x geometry(0)", T.Geometry(b"g", 4326), "'x' is geometry.0. .* system 4326"),
        ("x geometry(0)", T.Geography(b"g", 0), "'x' is geometry.0. .* type Geography"),
        ("x array<int>", np.array([1.0]), r"'x\[\]' is int .* type float64"),
        ("x map<string,array<struct<y:int>>>", {"a": [("q",)]}, r"'x.value\[\].y' is int"),
        ("x struct<a:struct<b:date not null>>", ((None,),), "'x.a.b' is date and not nullable"),
        ("x struct<a:int>", {"a": 1, "q": 2}, "'x' .* a dict with 'q'"),
    ],
    ids=stable,
)
def test_what_does_not_fit_is_refused_by_its_path(ddl: str, value: Any, message: str) -> None:
    for codec in _codecs(ddl):
        for _ in range(2):  # the second time, the types are known
            with pytest.raises(ValueMismatchError, match=message):
                codec.encode(_rows(codec, value))


def test_a_row_may_be_a_list_as_in_spark() -> None:
    for codec in (codec_for(parse_ddl("n int")), codec_for(parse_ddl("s string"))):
        value = 1 if codec.schema.names == ["n"] else "a"
        assert codec.encode([value]) == codec.encode((value,))  # type: ignore[arg-type]
    key = KeyCodec(parse_ddl("n bigint, s string"))
    assert key.encode([1, "a"]) == key.encode((1, "a"))  # type: ignore[arg-type]


def test_the_bytes_of_the_newer_types_are_those_of_the_format() -> None:
    micro = time(0, 0, 0, 1)
    assert codec_for(parse_ddl("t time")).encode((micro,)).hex() == "0000" + "e803000000000000"
    kinds = "t time, v variant, g geometry(0), n void"
    row = (micro, T.VariantVal(b"v", b"m"), T.Geometry(b"g", 0), None)
    data = codec_for(parse_ddl(kinds)).encode(row)
    assert data.hex() == "00" + "94" + "cd03e8" + "92c40176c4016d" + "9200c40167" + "c0"


def test_void_is_never_of_fixed_width_and_time_is() -> None:
    assert isinstance(codec_for(parse_ddl("t time, n int")), FixedCodec)
    assert isinstance(codec_for(parse_ddl("t void, n int")), MsgpackCodec)


def test_a_stored_time_beyond_the_day_is_damage() -> None:
    codec, key = codec_for(parse_ddl("t time")), KeyCodec(parse_ddl("t time"))
    data, bytes_ = codec.encode((time(1),)), key.encode((time(1),))
    for damaged in (data[:-1] + b"\x7f", data[:-1] + b"\xff"):
        with pytest.raises(CorruptionError, match="not within a day"):
            codec.decode(damaged)
    with pytest.raises(CorruptionError, match="not within a day"):
        key.decode(bytes_[:1] + b"\xff" + bytes_[2:])


def test_keys_take_what_state_gives_back() -> None:
    codec = KeyCodec(parse_ddl("s struct<t:time,a:array<int>>"))
    plain = codec.encode(((time(1), [1, 2]),))
    assert codec.encode(({"t": time(1), "a": np.array([1, 2])},)) == plain
    assert codec.encode(codec.decode(plain)[0]) == plain
    with pytest.raises(ValueMismatchError, match=r"'s' .* a dict with 'q'"):
        codec.encode(({"q": 1},))


class Point(T.UserDefinedType):
    """A user's own type."""

    @classmethod
    def sqlType(cls) -> T.DataType:
        return T.ArrayType(T.DoubleType())

    @classmethod
    def module(cls) -> str:
        return __name__


def test_a_users_own_type_is_refused_with_what_to_declare_instead() -> None:
    for kind in (Point(), T.ArrayType(Point())):
        schema = T.StructType([T.StructField("p", kind)])
        for codec in (codec_for, KeyCodec):
            with pytest.raises(UnsupportedTypeError, match=r"'p.*type Point.*array<double>"):
                codec(schema)


def test_a_stored_schema_cannot_name_a_module_to_import() -> None:
    text = T.StructType([T.StructField("p", T.MapType(T.StringType(), Point()))]).json()
    with pytest.raises(SchemaError, match="not the JSON of a schema"):
        schema_from_json(text)
    named = parse_ddl("udt int, type string comment 'udt'")
    assert schema_from_json(named.json()) == named
