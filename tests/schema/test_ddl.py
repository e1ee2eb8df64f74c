"""DDL without Spark: the same types as Spark's parser gives, and errors that say where.

What Spark gives is recorded in ddl_vectors.json, written by ddl_vectors.py from Spark 4.3.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from statebackend.errors import SchemaError
from statebackend.schema.ddl import parse_ddl, parse_ddl_type
from statebackend.schema.types import as_schema
from tests.schema import ddl_vectors
from tests.schema.strategies import SIMPLE, VALUES_ONLY, WIDE, schemas, types

# Where the two differ on purpose. True: Spark takes it.
DIFFERENT = {
    "string collate de_DEU": False,  # only Spark's ICU knows which regions a language has
    "char(3) collate UNICODE": True,  # pyspark loses the collation
    "a int\0": True,
    "identifier('a') int": True,
}
UNSTORED: list[T.DataType] = [
    T.CharType(3),
    T.VarcharType(70),
    T.CalendarIntervalType(),
    T.YearMonthIntervalType(0),
    T.YearMonthIntervalType(0, 1),
    T.DayTimeIntervalType(1, 2),
    T.TimeType(9),
    T.StringType("de_CI_AI"),
    T.StructType([]),
]


def test_spark_was_asked_about_every_text() -> None:
    assert [ddl for ddl, _ in ddl_vectors.load()] == ddl_vectors.texts()
    assert set(DIFFERENT) <= set(ddl_vectors.texts())


@pytest.mark.parametrize(("ddl", "answer"), ddl_vectors.load(), ids=repr)
def test_types_are_those_that_spark_reads(ddl: str, answer: str | None) -> None:
    bare = ddl.removeprefix("x ")
    if bare in DIFFERENT:
        assert (answer is not None) == DIFFERENT[bare]
    elif answer is None:
        with pytest.raises(SchemaError, match="does not parse at position"):
            parse_ddl_type(ddl)
    else:
        assert parse_ddl_type(ddl).jsonValue() == T._parse_datatype_json_string(answer).jsonValue()


@given(types(maps=True) | st.sampled_from(UNSTORED))
def test_a_type_is_read_back_from_its_simple_string(kind: T.DataType) -> None:
    assert parse_ddl_type(kind.simpleString()) == kind


@pytest.mark.parametrize("kind", [*SIMPLE, *WIDE, *VALUES_ONLY, *UNSTORED], ids=str)
def test_case_does_not_count_in_types(kind: T.DataType) -> None:
    assert parse_ddl_type(kind.simpleString().upper()) == kind


@given(schemas(types(maps=True)), st.text("ab `~\n-'ü", min_size=1, max_size=5))
def test_columns_are_read_back_whatever_their_names(schema: T.StructType, odd: str) -> None:
    fields = [T.StructField(f"{odd}{i}", f.dataType, bool(i % 2)) for i, f in enumerate(schema)]
    ddl = ", ".join(
        f"`{f.name.replace('`', '``')}` {f.dataType.simpleString()}"
        + ("" if f.nullable else " NOT NULL")
        for f in fields
    )
    assert parse_ddl(ddl) == T.StructType(fields)


_WORDS = """a int struct < > array map , : ( ) 5 99 `x` 'x' not null comment decimal interval day to
string collate timestamp without time zone -- /* */ ` ' \\ char default é"""


@given(st.text() | st.lists(st.sampled_from(_WORDS.split()), max_size=12).map(" ".join))
def test_whatever_is_no_schema_is_a_schema_error(text: str) -> None:
    with contextlib.suppress(SchemaError):
        assert isinstance(parse_ddl_type(text), T.DataType)


@pytest.mark.parametrize(
    ("ddl", "position", "wanted"),
    [
        ("n bigin", 3, "'bigin' is no type"),
        ("n", 2, "a type was expected"),
        ("n bigint, s", 12, "a type was expected"),
        ("n bigint s string", 10, "nothing more was expected, or a comma"),
        ("a array<int", 12, "'>' is missing"),
        ("a map<int>", 10, "',' is missing"),
        ("d decimal(39,0)", 11, "a precision must be from 0 to 38"),
        ("d decimal(5,6)", 13, "a scale must be from 0 to 5"),
        ("a int default 5", 7, "DEFAULT has no meaning"),
        ("a int not", 10, "'null' is missing"),
        ("a int comment x", 15, "the comment was expected, in quotes"),
        ("a int comment '\\UFFFFFFFF'", 15, "no character of Unicode"),
        ("a-b int", 2, "no place in a schema"),
        ("a /* b", 3, "this comment has no end"),
        ("t timestamp(9)", 13, "the precision, of microseconds"),
        ("i interval day to year", 19, "a unit smaller than 'day'"),
        ("s string collate x", 18, "'x' is no collation"),
        ("g geometry(17)", 12, "17 is no reference system"),
        ("array<" * 101 + "int" + ">" * 101, 601, "nested more than 100 deep"),
    ],
)
def test_an_error_says_where_and_what_was_wanted(ddl: str, position: int, wanted: str) -> None:
    with pytest.raises(SchemaError) as caught:
        parse_ddl(ddl)
    assert f"at position {position} " in caught.value.what
    assert wanted in caught.value.what


def test_a_bare_type_is_the_field_value() -> None:
    assert parse_ddl("int") == T.StructType([T.StructField("value", T.IntegerType())])
    assert as_schema("int", "n") == T.StructType([T.StructField("n", T.IntegerType())])
    assert as_schema("n int") == T.StructType([T.StructField("n", T.IntegerType())])


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(SchemaError, match="given as a int"):
        parse_ddl(5)  # type: ignore[arg-type]
