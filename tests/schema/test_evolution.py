"""Schemas that change: which may, which may not, and what becomes of rows from before."""

from __future__ import annotations

import pickle
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from pyspark.sql import types as T

from statebackend.errors import CorruptionError, FormatError, SchemaError, ValueMismatchError
from statebackend.schema.codec import codec_for
from statebackend.schema.ddl import parse_ddl
from statebackend.schema.evolution import Evolution, Incompatible, Problem, resolve
from statebackend.schema.field_defaults import check_defaults, remembered, wire_default
from statebackend.schema.fixed_rows import FixedCodec
from statebackend.schema.types import schema_from_json
from statebackend.schema.versioned_rows import codec_of_versions
from tests.schema.evolving import expected, histories
from tests.schema.strategies import same


def ddl(text: str) -> T.StructType:
    return parse_ddl(text, defaults=True)


def change(old: str, new: str) -> Evolution:
    return resolve(ddl(old), ddl(new))


def problems(old: str | T.StructType, new: str | T.StructType) -> tuple[Problem, ...]:
    was, now = (ddl(one) if isinstance(one, str) else one for one in (old, new))
    with pytest.raises(Incompatible) as caught:
        resolve(was, now)
    return caught.value.problems


# --- what is allowed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("tinyint", new) for new in ("smallint", "int", "bigint", "double", "decimal(3,0)")),
        *(("smallint", new) for new in ("int", "bigint", "double", "decimal(5,0)")),
        *(("int", new) for new in ("bigint", "double", "decimal(10,0)", "decimal(38,28)")),
        *(("bigint", new) for new in ("decimal(19,0)", "decimal(38,19)")),
        ("float", "double"),
        *(("decimal(9,2)", new) for new in ("decimal(10,2)", "decimal(10,3)", "decimal(38,31)")),
        ("date", "timestamp_ntz"),
        ("time(3)", "time(6)"),
        *(("void", new) for new in ("int", "map<string,int>", "variant")),
    ],
)
def test_a_type_may_be_widened_wherever_it_stands(old: str, new: str) -> None:
    shapes = ["x {}", "x array<{}>", "x map<string, {}>", "x struct<y: array<struct<z: {}>>>"]
    paths = ["x", "x[]", "x.value", "x.y[].z"]
    if "void" not in old:
        shapes, paths = [*shapes, "x map<{}, int>"], [*paths, "x.key"]
    for shape, path in zip(shapes, paths, strict=True):
        found = change(shape.format(old), shape.format(new))
        assert (found.widened, found.added, found.dropped) == ((path,), (), ())
        assert not found.is_same


def test_fields_are_matched_by_name_in_any_order() -> None:
    found = change("a int, b string, c double", "c double, a int, d bigint default 5, e date")
    assert (found.added, found.dropped, found.widened) == (("d", "e"), ("b",), ())
    assert found.row((1, "x", 2.0)) == (2.0, 1, 5, None)


def test_names_are_matched_whatever_their_case_as_in_spark() -> None:
    found = change("userId bigint, s struct<A:int>", "USERID bigint, s struct<a:int>")
    assert found.is_same
    assert found.added == found.dropped == ()
    (row,) = found.row((1, T.Row(A=2)))[1:]
    assert row.a == 2
    # As it is written comes first.
    both = change("a int, A string", "A string, a int, b int")
    assert both.row((1, "x")) == ("x", 1, None)


def test_what_may_not_be_null_may_become_so() -> None:
    found = change("a int not null, s struct<b: int not null>", "a int, s struct<b: int>")
    assert found.is_same
    inner = T.StructType([T.StructField("x", T.ArrayType(T.IntegerType(), False))])
    assert resolve(inner, ddl("x array<int>")).is_same


def test_a_comment_is_no_change() -> None:
    assert change("a int comment 'one'", "a int default 3 comment 'two'").is_same


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bigint", "int"),
        ("bigint", "double"),
        ("bigint", "decimal(18,0)"),
        ("int", "float"),
        ("int", "decimal(10,1)"),
        ("int", "string"),
        ("double", "float"),
        ("double", "decimal(38,10)"),
        ("float", "decimal(38,10)"),
        ("boolean", "int"),
        ("string", "binary"),
        ("string", "string collate UTF8_LCASE"),
        ("decimal(10,2)", "decimal(10,3)"),
        ("decimal(10,2)", "decimal(9,2)"),
        ("decimal(10,2)", "decimal(12,1)"),
        ("decimal(10,0)", "bigint"),
        ("date", "timestamp"),
        ("timestamp", "timestamp_ntz"),
        ("timestamp_ntz", "date"),
        ("time(6)", "time(3)"),
        ("int", "void"),
        ("int", "array<int>"),
        ("struct<a:int>", "map<string,int>"),
        ("interval day", "bigint"),
    ],
)
def test_a_type_that_would_lose_something_is_refused_with_field_and_both_types(
    old: str, new: str
) -> None:
    for shape, path in [("k int, x {}", "x"), ("k int, s struct<y: array<{}>>", "s.y[]")]:
        (problem,) = problems(shape.format(old), shape.format(new))
        was, now = ddl(f"x {old}")["x"].dataType, ddl(f"x {new}")["x"].dataType
        assert (problem.path, problem.old, problem.new) == (
            path,
            was.simpleString(),
            now.simpleString(),
        )
        assert problem.why
        assert problem.todo


def test_a_refusal_says_what_the_type_may_become() -> None:
    (problem,) = problems("n int", "n string")
    assert "bigint, double, decimal(10,0)" in problem.todo


def test_an_added_field_that_may_not_be_null_needs_a_default() -> None:
    (problem,) = problems("a int", "a int, n bigint not null")
    assert (problem.path, problem.old, problem.new) == ("n", "", "bigint NOT NULL")
    assert "n bigint NOT NULL DEFAULT" in problem.todo
    assert change("a int", "a int, n bigint not null default 0").row((1,)) == (1, 0)


def test_what_may_be_null_must_stay_so() -> None:
    (problem,) = problems("a int", "a int not null")
    assert (problem.path, problem.old, problem.new) == ("a", "int", "int NOT NULL")
    never = [
        T.ArrayType(T.IntegerType(), False),
        T.MapType(T.StringType(), T.IntegerType(), False),
    ]
    for dtype, before, path in zip(
        never, ("x array<int>", "x map<string,int>"), ("x[]", "x.value"), strict=True
    ):
        (problem,) = problems(before, T.StructType([T.StructField("x", dtype)]))
        assert problem.path == path


def test_every_field_that_is_to_blame_is_named() -> None:
    found = problems("a int, b bigint, c date", "a string, b int, c date, d int not null")
    assert [problem.path for problem in found] == ["a", "b", "d"]


def test_a_schema_of_which_no_field_is_left_is_refused() -> None:
    (problem,) = problems("n bigint", "m bigint")
    assert "a new name is another field" in problem.why


def test_names_that_differ_in_case_only_are_refused_if_it_is_not_clear_which_is_which() -> None:
    (problem,) = problems("ab int, AB int, b int", "Ab int, b int")
    assert "differ in case only" in problem.why
    (problem, _) = problems("ab int, b int", "Ab int, AB int, b int")
    assert "differ in case only" in problem.why


def test_keys_of_a_map_that_are_structs_stay_as_they_are() -> None:
    (problem,) = problems("m map<struct<a:int,b:int>,int>", "m map<struct<a:int>,int>")
    assert problem.path == "m.key"


# --- rows from before ----------------------------------------------------------------------------


@given(histories())
def test_rows_of_any_version_are_read_as_the_newest(
    history: list[tuple[T.StructType, list[tuple[Any, ...]]]],
) -> None:
    versions = [schema_from_json(schema.json()) for schema, _ in history]
    codec = codec_of_versions(versions)
    newest = codec_for(versions[-1], len(versions) - 1)
    data, truth = [], []
    for version, (schema, rows) in enumerate(history):
        for row in rows:
            data.append(codec_for(schema, version).encode(row))
            now: Any = row
            for old, new in pairwise(versions[version:]):
                now = expected(old, new, now)
            truth.append(tuple(now))
    for one, row in zip(data, truth, strict=True):
        assert same(codec.decode(one), row)
        assert codec.encode(row) == newest.encode(row)
    assert same(codec.decode_many([*data, None] * 9), [*truth, None] * 9)
    # By the column, with a null and a slice's offset.
    gaps = pa.array([b"x", *data, None], pa.binary()).slice(1)
    columns = codec.decode_arrow(gaps)
    for column, field in zip(columns, newest.decode_arrow(gaps.slice(len(data))), strict=True):
        column.validate(full=True)
        assert column.type == field.type
        assert not column[len(data)].is_valid
    loose = codec_for(_nullable(versions[-1]), len(versions) - 1)
    blank = loose.encode((None,) * len(columns))
    assert loose.encode_arrow(columns).to_pylist() == [*map(newest.encode, truth), blank]


def _nullable(schema: T.StructType) -> T.StructType:
    return T.StructType([T.StructField(f.name, f.dataType) for f in schema])


def test_one_version_has_the_plain_codec() -> None:
    assert type(codec_of_versions([ddl("n int")])) is FixedCodec


def test_a_field_that_was_dropped_and_came_back_is_a_new_one() -> None:
    versions = [ddl("a int, b int"), ddl("a int"), ddl("a int, b string default 'new'")]
    codec = codec_of_versions(versions)
    assert codec.decode(codec_for(versions[0], 0).encode((1, 2))) == (1, "new")
    assert codec.decode(codec_for(versions[1], 1).encode((1,))) == (1, "new")


def test_a_default_counts_when_its_field_is_added() -> None:
    old, first, later = ddl("a int"), ddl("a int, b int default 1"), ddl("a int, b int default 2")
    kept = remembered(first, later)
    assert kept["b"].metadata == {"statebackend.default": 1}
    assert codec_of_versions([old, kept]).decode(codec_for(old).encode((0,))) == (0, 1)
    nested = "s array<struct<x: int default {}>>, m map<string, struct<y: int{}>>"
    kept = remembered(ddl(nested.format(1, "")), ddl(nested.format(2, " default 3")))
    assert kept == ddl(nested.format(1, ""))


def test_a_row_of_no_version_or_of_a_later_one_is_refused() -> None:
    codec = codec_of_versions([ddl("a int"), ddl("a int, s string")])
    for data in (b"", b"\x00", b"\x01junk", b"\x01"):
        rows = pa.array([data], pa.binary())
        for read in (codec.decode, lambda one: codec.decode_many([one] * 2)):
            with pytest.raises(CorruptionError):
                read(data)
        with pytest.raises(CorruptionError):
            codec.decode_arrow(rows)
    later = codec_for(ddl("a int"), 2).encode((1,))
    for read in (codec.decode, lambda one: codec.decode_many([None, one])):
        with pytest.raises(FormatError, match="version 2 is in a state whose newest version is 1"):
            read(later)
    with pytest.raises(FormatError, match="version 2"):
        codec.decode_arrow(pa.array([later, None], pa.binary()))


def test_a_date_that_no_timestamp_can_say_is_refused_by_the_column() -> None:
    versions = [ddl("at date"), ddl("at timestamp_ntz")]
    far = pa.array([2**31 - 1], pa.int32()).view(pa.date32())
    rows = codec_for(versions[0]).encode_arrow([far])
    with pytest.raises(ValueMismatchError, match="cannot become timestamp"):
        codec_of_versions(versions).decode_arrow(rows)


def test_a_codec_of_versions_can_be_shipped() -> None:
    codec = codec_of_versions([ddl("a int"), ddl("a bigint, b decimal(20,2) default 0.5")])
    data = codec_for(ddl("a int")).encode((7,))
    assert pickle.loads(pickle.dumps(codec)).decode(data) == (7, Decimal("0.50"))


# --- defaults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("x int default -5", -5),
        ("x bigint not null default 0", 0),
        ("x bigint default 0 not null comment 'c'", 0),
        ("x boolean default TRUE", True),
        ("x double default -.5", -0.5),
        ("x double default 1e-3", 0.001),
        ("x float default 'NaN'", float("nan")),
        ("x decimal(10,2) default 1.5", 150),
        ("x string default 'it''s'", "it's"),
        ("x binary default X'0aFF'", b"\x0a\xff"),
        ("x date default DATE '1970-01-02'", 1),
        ("x timestamp default TIMESTAMP '1970-01-01T00:00:01Z'", 1_000_000),
        ("x timestamp_ntz default '1970-01-01 00:00:01'", 1_000_000),
        ("x int default null", None),
        ("x int", None),
    ],
)
def test_a_default_is_a_literal_after_the_type(field: str, value: Any) -> None:
    schema = ddl(field)
    check_defaults(schema)
    found = wire_default(schema["x"], "x")
    assert same(found, value)


@pytest.mark.parametrize(
    "field",
    [
        "x int default 'one'",
        "x int default 1.5",
        "x tinyint default 300",
        "x boolean default 1",
        "x string default 1",
        "x decimal(4,2) default 1.234",
        "x timestamp default '2026-01-01 00:00:00'",
        "x date default '2026-02-30'",
        "x array<int> default 1",
        "s struct<x: int default 'a'>",
        "s array<struct<x: int default 'a'>>",
        "s map<int, struct<x: int default 'a'>>",
    ],
)
def test_a_default_of_another_type_is_refused(field: str) -> None:
    with pytest.raises(SchemaError, match=r"The default of field '(x|s.*\.x)'"):
        check_defaults(ddl(field))


@pytest.mark.parametrize("text", ["x int default", "x int default now()", "x int default 1 + 1"])
def test_a_default_that_is_no_literal_does_not_parse(text: str) -> None:
    with pytest.raises(SchemaError, match="does not parse"):
        ddl(text)


def test_defaults_of_sparks_own_columns_are_read() -> None:
    def field(text: str) -> T.StructField:
        return T.StructField("x", T.IntegerType(), True, {"CURRENT_DEFAULT": text})

    assert wire_default(field("42"), "x") == 42
    # A table's schema may bring any along: what is no literal of the type is no default here.
    for text in ("current_date()", "'one'", "1.5"):
        assert wire_default(field(text), "x") is None
