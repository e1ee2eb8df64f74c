"""State ids: given once, never again; what is deleted by name is retired."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.formats.state_ids import RESERVED_IDS_FROM, StateIds, assign_ids
from statebackend.errors import StateMismatchError

NAMES = st.sampled_from(["a", "b", "c"])


def test_ids_are_given_in_the_order_of_the_declarations() -> None:
    assert assign_ids("op", {}, declared=["b", "a"]) == StateIds({"b": 1, "a": 2}, {})


def test_a_state_keeps_its_id_and_a_new_one_gets_a_new_one() -> None:
    ids = assign_ids("op", {"b": 1, "a": 2}, declared=["a", "c", "b"])
    assert ids == StateIds({"b": 1, "a": 2, "c": 3}, {})


def test_a_state_that_is_not_declared_any_more_is_retired_and_not_deleted() -> None:
    ids = assign_ids("op", {"a": 1, "b": 2}, declared=["a"])
    assert ids == StateIds({"a": 1, "b\x002": 2}, {})


def test_a_deleted_state_is_retired_and_its_entries_go() -> None:
    ids = assign_ids("op", {"a": 1, "b": 2}, declared=["a"], deleted=["b"])
    assert ids == StateIds({"a": 1, "b\x002": 2}, {"b\x002": 2})


def test_a_deleted_state_that_is_declared_again_is_a_new_one() -> None:
    ids = assign_ids("op", {"a": 1}, declared=["a"], deleted=["a"])
    assert ids == StateIds({"a\x001": 1, "a": 2}, {"a\x001": 1})
    later = assign_ids("op", ids.states, declared=["a"])
    assert later == StateIds({"a\x001": 1, "a": 2}, {})


def test_in_later_runs_what_was_deleted_is_named_again_as_long_as_the_code_deletes_it() -> None:
    # A repeated epoch must delete it again; what is gone the coordinator knows by the record.
    first = assign_ids("op", {"a": 1, "b": 2}, declared=["a"], deleted=["b"])
    assert assign_ids("op", first.states, declared=["a"], deleted=["b"]) == first


def test_what_was_only_retired_goes_when_it_is_deleted_by_name_later() -> None:
    ids = assign_ids("op", {"b\x002": 2, "bb\x003": 3}, declared=[], deleted=["b"])
    assert ids.dropped == {"b\x002": 2}


def test_deleting_what_never_was_does_nothing() -> None:
    ids = assign_ids("op", {"a": 1}, declared=["a"], deleted=["x"])
    assert ids == StateIds({"a": 1}, {})


def test_what_the_checkpoint_says_is_not_changed_in_place() -> None:
    known = {"a": 1}
    assign_ids("op", known, declared=["b"], deleted=["a"])
    assert known == {"a": 1}


def test_reserved_ids_are_never_given() -> None:
    known = {"a": RESERVED_IDS_FROM - 2}
    assert assign_ids("op", known, declared=["a", "b"]).states["b"] == RESERVED_IDS_FROM - 1
    with pytest.raises(StateMismatchError, match=r"'op' has had 65519 states.*'c'"):
        assign_ids("op", known, declared=["a", "b", "c"])


@given(st.lists(st.tuples(st.lists(NAMES, unique=True), st.sets(NAMES))))
def test_an_id_never_changes_hands_whatever_is_declared_and_deleted(
    runs: list[tuple[list[str], set[str]]],
) -> None:
    known: dict[str, int] = {}
    owners: dict[int, str] = {}
    for declared, deleted in runs:
        ids = assign_ids("op", known, declared=declared, deleted=deleted)
        assert len(set(ids.states.values())) == len(ids.states)
        assert set(known.values()) <= set(ids.states.values())
        assert {n for n in ids.states if "\0" not in n} == set(declared)
        for name, given_id in ids.states.items():
            assert owners.setdefault(given_id, name.split("\0")[0]) == name.split("\0")[0]
        for name in deleted & set(known):
            assert known[name] in ids.dropped.values()
            assert ids.states.get(name) != known[name]
        assert not set(ids.dropped.values()) & {ids.states[name] for name in declared}
        known = ids.states
