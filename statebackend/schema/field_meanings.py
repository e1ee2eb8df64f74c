"""What a field of state means, where its name and type do not say it: in the field's metadata.

Who declares a state by rules of its own (an aggregation, a window) writes it there; a later
declaration that means something else under the same name is refused by `evolution.resolve`.
"""

from __future__ import annotations

import json
from typing import Any, Final

from pyspark.sql import types as T

__all__ = [
    "ELSEWHERE",
    "MEANING",
    "OF_ALL",
    "declared_by_rules",
    "elsewhere",
    "moved",
    "other_meaning",
]

MEANING: Final = "statebackend.meaning"
"""What the field holds, in words. It may not change."""
OF_ALL: Final = "statebackend.meaning.of_all"
"""Beside a meaning, true: it is that of all of the operator's state, not of the field alone."""
ELSEWHERE: Final = "statebackend.elsewhere"
"""In the metadata of a first field: names (a JSON array) of fields that a state beside it has.

A field that goes from one to the other, as its type asks for, would leave what it held behind.
"""

_KEEP: Final = "Keep it as it was, or give what is new a name of its own: it begins with nothing."


def other_meaning(before: T.StructField, after: T.StructField) -> tuple[str, str] | None:
    """Why a field cannot become another, and what to do; None: it means the same, or nothing."""
    was, now = _of(before).get(MEANING), _of(after).get(MEANING)
    if was == now or was is None or now is None:
        return None
    if _of(after).get(OF_ALL):
        todo = f"Keep it to {was}, or give the operator a new uid: it starts without state."
    else:
        todo = _KEEP
    return f"it held {was} and would hold {now}", todo


def moved(before: T.StructField, new: T.StructType) -> tuple[str, str] | None:
    """Why a field that is not in `new` may not go, and what to do; None: it may."""
    if before.name not in elsewhere(new):
        return None
    what = _of(before).get(MEANING, "values")
    return f"it held {what}; its new type is kept elsewhere and would begin with nothing", _KEEP


def declared_by_rules(schema: T.StructType) -> bool:
    """Whether the state is not the user's own: some field says what it means."""
    return any(MEANING in _of(field) for field in schema.fields)


def elsewhere(schema: T.StructType) -> frozenset[str]:
    """The fields of the state beside it."""
    text = _of(schema.fields[0]).get(ELSEWHERE) if schema.fields else None
    return frozenset(json.loads(text)) if text else frozenset()


def _of(field: T.StructField) -> dict[str, Any]:
    return field.metadata or {}
