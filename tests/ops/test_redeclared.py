"""What a checkpoint keeps of a state that is declared otherwise: its history, or a refusal."""

from __future__ import annotations

import msgspec
import pytest

from statebackend.errors import CorruptionError, SchemaError, StateMismatchError
from statebackend.operators.declared_states import Declarations, StateDeclaration
from statebackend.operators.redeclared_states import redeclared, versions_of
from statebackend.schema.ddl import parse_ddl
from statebackend.schema.keys.key_schemas import check_operator_key
from statebackend.schema.types import schema_from_json
from statebackend.state.ttl_cells import TTL


def declared(
    value: str, kind: str = "value", *, key: str | None = None, ttl: TTL | None = None
) -> StateDeclaration:
    to = Declarations("op")
    to.add(kind, "clicks", value, key, ttl)
    return StateDeclaration.from_json(to.declared["clicks"].to_json())


def fields(one: StateDeclaration) -> list[str]:
    return [schema_from_json(text).simpleString() for text in one.versions]


def refused(known: StateDeclaration, new: StateDeclaration) -> StateMismatchError:
    with pytest.raises(StateMismatchError) as caught:
        redeclared("op", known, new)
    assert "state 'clicks' of operator 'op'" in caught.value.what.lower()
    assert caught.value.todo
    return caught.value


def test_each_change_is_a_version_and_the_schemas_before_it_are_kept() -> None:
    one = declared("n int")
    assert "earlier" not in one.to_json()
    two = redeclared("op", one, declared("n bigint, s string default 'x'"))
    three = redeclared("op", two, declared("s string, n bigint"))
    assert fields(three) == [
        "struct<n:int>",
        "struct<n:bigint,s:string>",
        "struct<s:string,n:bigint>",
    ]
    assert StateDeclaration.from_json(three.to_json()) == three
    assert versions_of({"a": one, "b": three}) == {"b": three.versions}


def test_what_is_stored_as_before_is_no_version() -> None:
    one = declared("n int not null, s struct<a: int>")
    two = redeclared("op", one, declared("N int default 3 comment 'x', s struct<A: int>"))
    assert len(two.versions) == 1
    # From here on null is taken, so there is no way back.
    assert "NOT NULL" in refused(two, one).what


def test_the_times_of_a_ttl_may_change_with_the_schema() -> None:
    one = declared("n int", ttl=TTL(1000))
    two = redeclared("op", one, declared("n bigint", ttl=TTL(5, update="read")))
    assert two.time_to_live == TTL(5, update="read")
    assert len(two.versions) == 2


def test_a_refusal_names_state_field_and_both_types_and_what_to_do() -> None:
    error = refused(declared("n bigint, s string"), declared("n int, s string, t int not null"))
    assert error.what == (
        "State 'clicks' of operator 'op' cannot go on under its new schema: field 'n' is bigint in "
        "the checkpoint and int now (bigint cannot become int without loss); field 't' is not in "
        "the checkpoint and int NOT NULL now (it is new and may not be null, and rows from before "
        "have no value for it)."
    )
    assert error.todo.startswith("Keep it bigint (it may become decimal(19,0))")
    assert "t int NOT NULL DEFAULT" in error.todo
    assert "deleteIfExists" in error.todo


def test_another_kind_is_refused() -> None:
    error = refused(declared("n int"), declared("n int", "list"))
    assert "a value state in the checkpoint and is declared as a list state" in error.what


@pytest.mark.parametrize("now", [None, TTL(1000)])
def test_a_ttl_neither_comes_nor_goes(now: TTL | None) -> None:
    before = None if now else TTL(1000)
    error = refused(declared("n int", ttl=before), declared("n int", ttl=now))
    assert "a TTL" in error.what


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("page bigint", "field 'page' is string, in its place is 'page', bigint"),
        ("site string", "field 'page' (string) is renamed to 'site', and that counts"),
        ("page string, lang string", "only one of them has 'lang'"),
    ],
)
def test_a_map_key_never_changes(key: str, says: str) -> None:
    known = declared("n int", "map", key="page string")
    error = refused(known, declared("n bigint", "map", key=key))
    assert says in error.what
    assert "Keys cannot change" in error.what


def test_an_operators_key_never_changes() -> None:
    old, loose = parse_ddl("k string not null").json(), parse_ddl("k string").json()
    check_operator_key("op", old, loose)
    with pytest.raises(StateMismatchError, match="is renamed to 'user'"):
        check_operator_key("op", old, parse_ddl("user string").json())
    with pytest.raises(StateMismatchError, match="in its place is 'k', bigint"):
        check_operator_key("op", old, parse_ddl("k bigint").json())


def test_the_257th_schema_of_a_state_is_refused() -> None:
    state = declared("n int, a0 int")
    for number in range(1, 256):
        state = redeclared("op", state, declared(f"n int, a{number} int"))
    assert len(state.versions) == 256
    error = refused(state, declared("n int"))
    assert "has had 256 schemas" in error.what
    assert redeclared("op", state, declared("n int, a255 int")) == state


def test_a_declaration_that_does_not_read_is_damage() -> None:
    with pytest.raises(CorruptionError, match="declares a state as"):
        StateDeclaration.from_json('{"name": 1}')


def test_a_default_that_does_not_fit_is_refused_where_the_state_is_declared() -> None:
    with pytest.raises(SchemaError, match="The default of field 'n'"):
        declared("n int default 'x'")


def test_a_release_before_versions_wrote_what_reads_as_version_0() -> None:
    old = '{"name":"clicks","kind":"value","value_schema":%s,"key_schema":""}'
    text = old % msgspec.json.encode(parse_ddl("n int").json()).decode()
    assert StateDeclaration.from_json(text).versions == [parse_ddl("n int").json()]
