"""Key schemas, which never change: entries are found by their keys' bytes."""

from __future__ import annotations

import json
from typing import Any, Final

from pyspark.sql.types import StructType

from statebackend.errors import StateMismatchError
from statebackend.schema.types import schema_from_json

__all__ = ["check_operator_key", "is_same_key", "key_renamed", "other_key"]

_NOT_STORED: Final = ("nullable", "containsNull", "valueContainsNull", "metadata")


def check_operator_key(uid: str, known: str, new: str) -> None:
    """Refuse another key schema of an operator; both as JSON.

    Raises:
        StateMismatchError: naming the field and both types.
    """
    if not is_same_key(known, new):
        anew = "Or give the operator another uid: it starts without state"
        raise other_key(f"The key of operator {uid!r}", known, new, anew)


def key_renamed(known: str, new: str) -> str:
    """The new schema of a key (both as JSON) if only the names of its columns differ; else the old.

    Of Spark's own operators a key has the names of the call: ``groupBy("User")`` of a column `user`
    names it `User`.
    """
    if [one["type"] for one in _shape(known)["fields"]] != [
        one["type"] for one in _shape(new)["fields"]
    ]:
        return known
    return new


def is_same_key(known: str, new: str) -> bool:
    """Whether keys of two schemas (JSON) have the same bytes."""
    return bool(_shape(known) == _shape(new))


def other_key(what: str, known: str, new: str, anew: str) -> StateMismatchError:
    """The error for a key that has another schema now; both as JSON, ``anew``: the way out."""
    was, now = schema_from_json(known), schema_from_json(new)
    return StateMismatchError(
        f"{what} is {was.simpleString()} in the checkpoint and {now.simpleString()} now: "
        f"{_first_difference(was, now)}. Keys cannot change: entries are found by their bytes.",
        todo=f"Keep the key's fields, their types, names and order. {anew}.",
    )


def _first_difference(was: StructType, now: StructType) -> str:
    for before, after in zip(was, now, strict=False):
        old, new = before.dataType.simpleString(), after.dataType.simpleString()
        if before.name != after.name and old == new:
            return f"field {before.name!r} ({old}) is renamed to {after.name!r}, and that counts"
        if before.name != after.name or old != new:
            return f"field {before.name!r} is {old}, in its place is {after.name!r}, {new}"
    extra = [*was.names[len(now) :], *now.names[len(was) :]]
    return f"only one of them has {', '.join(map(repr, extra))}" if extra else "within a field"


def _shape(schema: str) -> Any:
    """A schema (JSON) as far as stored bytes depend on it: without nullability and metadata."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: bare(v) for k, v in value.items() if k not in _NOT_STORED}
        return [bare(v) for v in value] if isinstance(value, list) else value

    return bare(json.loads(schema))
