"""A state that the checkpoint has under another declaration: what it becomes, or why it cannot.

The value's schema may change as `statebackend.schema.evolution` says. Then the declaration goes on
as a new version, with the schemas before it. All else stays: the kind, the key's schema (of a map,
of the operator), whether there is a TTL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from statebackend.errors import StateMismatchError
from statebackend.operators.declared_states import StateDeclaration
from statebackend.schema.evolution import Incompatible, Problem, resolve
from statebackend.schema.field_defaults import remembered
from statebackend.schema.field_meanings import declared_by_rules
from statebackend.schema.keys.key_schemas import is_same_key, other_key
from statebackend.schema.types import schema_from_json
from statebackend.schema.versioned_rows import VERSIONS_MAX
from statebackend.state.operator_state import LIST_MODES

__all__ = ["redeclared", "versions_of"]

_ANEW: Final = (
    "declare the state under another name (and pass allow_dropped_state=True where this one is "
    "gone for good), or call deleteIfExists() in init()"
)

_ANEW_UID: Final = (
    "give the operator another uid (and pass allow_dropped_state=True where the old one is gone "
    "for good)"
)  # its user declares no states, so has none to rename or delete


def redeclared(uid: str, known: StateDeclaration, new: StateDeclaration) -> StateDeclaration:
    """What the checkpoint keeps of a state from now on.

    Args:
        uid: of the operator, for messages.
        known: as the checkpoint has it. new: as the processor declares it now.

    Raises:
        StateMismatchError: entries of the one cannot be read as the other, and what to do.
    """
    what = f"State {known.name!r} of operator {uid!r}"
    if known.kind != new.kind:
        raise StateMismatchError(
            f"{what} is {_kind(known)} in the checkpoint and is declared as {_kind(new)} now.",
            todo=f"Declare it as {_kind(known)}, or to start it empty, {_ANEW}.",
        )
    if (known.ttl is True) != (new.ttl is True):
        with_or_not = ("with", "without") if known.ttl is True else ("without", "with")
        raise StateMismatchError(
            f"{what} was declared {with_or_not[0]} a TTL, and is declared {with_or_not[1]} one "
            f"now: its entries carry no such time, or would be read as if they did not.",
            todo=f"Declare it {with_or_not[0]} a TTL, or to start it empty, {_ANEW}.",
        )
    _check_key(f"The map key of state {known.name!r} of operator {uid!r}", known, new)
    was, now = schema_from_json(known.value_schema), schema_from_json(new.value_schema)
    try:
        evolution = resolve(was, now)
    except Incompatible as found:
        anew = _ANEW_UID if declared_by_rules(now) else _ANEW
        raise _incompatible(what, found.problems, anew) from None
    earlier = () if known.earlier is msgspec.UNSET else known.earlier
    if evolution.is_same:
        # Nothing of it is stored otherwise: no version is spent.
        return msgspec.structs.replace(
            new,
            value_schema=new.value_schema if now == was else remembered(was, now).json(),
            earlier=earlier or msgspec.UNSET,
        )
    if len(earlier) + 1 >= VERSIONS_MAX:
        raise StateMismatchError(
            f"{what} has had {VERSIONS_MAX} schemas; there is no number for another one.",
            todo=f"Keep it as it was ({was.simpleString()}), or to start it empty, {_ANEW}.",
        )
    return msgspec.structs.replace(new, earlier=(*earlier, known.value_schema))


def _kind(declared: StateDeclaration) -> str:
    if declared.kind in LIST_MODES:
        return f"an operator list of mode {declared.kind!r}"
    return f"a {declared.kind} state"


def _incompatible(what: str, problems: Sequence[Problem], anew: str) -> StateMismatchError:
    said = "; ".join(_said(problem) for problem in problems)
    todos = list(dict.fromkeys(problem.todo for problem in problems))
    if not any("new uid" in todo for todo in todos):
        todos.append(f"Or, to start it empty, {anew}.")
    return StateMismatchError(
        f"{what} cannot go on under its new schema: {said}.",
        todo=" ".join(todos),
    )


def _said(problem: Problem) -> str:
    was = f"{problem.old} in the checkpoint" if problem.old else "not in the checkpoint"
    return f"field {problem.path!r} is {was} and {problem.new} now ({problem.why})"


def versions_of(declared: Mapping[str, StateDeclaration]) -> dict[str, list[str]]:
    """The value schemas (JSON, oldest first) of the states that have had more than one, by name."""
    return {name: one.versions for name, one in declared.items() if len(one.versions) > 1}


def _check_key(what: str, known: StateDeclaration, new: StateDeclaration) -> None:
    if not is_same_key(known.key_schema or "{}", new.key_schema or "{}"):
        raise other_key(what, known.key_schema, new.key_schema, f"Or, to start it empty, {_ANEW}")
