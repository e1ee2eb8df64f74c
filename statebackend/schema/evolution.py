"""From the rows of one schema to those of a later one, field by field, or why that cannot be.

Fields are matched by name: as it is written, else (as in Spark) whatever the case. A field of both
keeps its values and may be widened (`statebackend.schema.widening`); one that is only in the old
schema is dropped; one that is only in the new schema is null, or has its default
(`statebackend.schema.field_defaults`). So it goes in structs within, in an array's elements and a
map's values; a map's keys may only be widened. What may be null stays so.

A chain of schemas is gone through one after the other, never from the first to the last at once:
a field that was dropped and added again is a new one, whether its row was rewritten in between or
not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from statebackend.schema.field_defaults import wire_default
from statebackend.schema.field_meanings import elsewhere, moved, other_meaning
from statebackend.schema.msgpack_types import arrow_from_wire, from_wire
from statebackend.schema.scalars import Convert
from statebackend.schema.types import arrow_type
from statebackend.schema.value_checks import row_maker
from statebackend.schema.widening import ArrowConvert, column_widener, may_become, widener

__all__ = ["Evolution", "Incompatible", "Problem", "resolve"]

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Problem:
    """A field that cannot become what it is to be.

    Attributes:
        path: of the field, such as ``visits[].at``.
        old, new: its types, in Spark's words; "" where it was, or is, not there.
        why: the rest of a sentence.
        todo: what would do.
    """

    path: str
    old: str
    new: str
    why: str
    todo: str


class Incompatible(ValueError):
    """A schema whose rows cannot become those of another one: this floor's own, like `Refused`."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(*problems)
        self.problems = tuple(problems)


class _Step(NamedTuple):
    """What becomes of a type's values. ``changed``: their stored form does.

    ``value``: to a decoded value that is not None. ``column``: to an Arrow column. None: nothing.
    """

    changed: bool = False
    value: Convert | None = None
    column: ArrowConvert | None = None


_SAME = _Step()


class _Source(NamedTuple):
    """Where a field of the new schema comes from: an old one by index, or (None) a constant."""

    place: int | None
    step: _Step
    field: T.StructField
    wire: Any = None

    @property
    def constant(self) -> Any:
        restore = from_wire(self.field.dataType)
        return self.wire if self.wire is None or restore is None else restore(self.wire)


@dataclass(frozen=True)
class Evolution:
    """How rows of an old schema become rows of a new one.

    Attributes:
        added, dropped, widened: paths of fields, at any depth.
        is_same: the stored form is the same; other names' case, comments or looser nullability.
        row: from an old row, decoded, to a new one.
    """

    old: T.StructType
    new: T.StructType
    added: tuple[str, ...]
    dropped: tuple[str, ...]
    widened: tuple[str, ...]
    is_same: bool
    row: Callable[[Row], Row]
    _sources: Sequence[_Source]

    def columns(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        """From columns of old rows (in the types of `types.arrow_type`) to those of new ones.

        Raises:
            ValueMismatchError: a date that no timestamp can say.
        """
        return _columns(self._sources, columns, len(columns[0]))


def resolve(old: T.StructType, new: T.StructType) -> Evolution:
    """How rows of `old` become rows of `new`.

    Raises:
        Incompatible: they cannot; with every field that is to blame.
        SchemaError: a default is no value of its field.
    """
    found = _Found()
    sources, changed = _match(old, new, "", found)
    if not found.problems and all(source.place is None for source in sources):
        found.problems.append(
            Problem(
                ", ".join(old.names),
                old.simpleString(),
                new.simpleString(),
                "none of the old fields is left, so nothing of the old rows would be (a new name "
                "is another field)",
                "Keep at least one of the fields under its name.",
            )
        )
    if found.problems:
        raise Incompatible(found.problems)
    return Evolution(
        old,
        new,
        tuple(found.added),
        tuple(found.dropped),
        tuple(found.widened),
        not changed,
        _row_function(sources, len(old.fields), tuple),
        sources,
    )


# --- matching ----------------------------------------------------------------------------------


@dataclass
class _Found:
    """What was met on the way."""

    added: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    widened: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, path: str, old: T.DataType, new: T.DataType, why: str, todo: str) -> _Step:
        self.problems.append(Problem(path, old.simpleString(), new.simpleString(), why, todo))
        return _SAME


def _match(
    old: T.StructType, new: T.StructType, path: str, found: _Found
) -> tuple[list[_Source], bool]:
    """Where each field of `new` comes from; and whether the stored form changes."""
    partner = _partners(old, new, path, found)
    sources = []
    for after in new:
        inner = f"{path}.{after.name}".lstrip(".")
        index = partner.get(after.name)
        if index is None:
            sources.append(_added(after, inner, found))
            continue
        before = old.fields[index]
        if not _check_meaning(before, after, inner, found):
            continue
        step = _resolve(before.dataType, after.dataType, inner, found)
        _check_null(before.nullable, after.nullable, inner, before, after, found)
        sources.append(_Source(index, step, after))
    kept = [source.place for source in sources]
    gone = [before.name for i, before in enumerate(old) if i not in kept]
    found.dropped += [f"{path}.{name}".lstrip(".") for name in gone]
    for name in gone:
        why = moved(old[name], new)
        if why is not None:
            shown = old[name].dataType.simpleString()
            found.problems.append(Problem(name, shown, "not in this state", *why))
    same = kept == list(range(len(old.fields))) and not any(s.step.changed for s in sources)
    # What was dropped before and is elsewhere now may not meet in one step.
    return sources, not same or elsewhere(old) != elsewhere(new)


def _check_meaning(before: T.StructField, after: T.StructField, path: str, found: _Found) -> bool:
    other = other_meaning(before, after)
    if other is not None:
        found.refuse(path, before.dataType, after.dataType, *other)
    return other is None


def _partners(
    old: T.StructType, new: T.StructType, path: str, found: _Found
) -> dict[str, int | None]:
    """The old field's index for each name of the new schema that has one."""
    places = {name: index for index, name in enumerate(old.names)}
    partner: dict[str, int | None] = {n: places.pop(n) for n in new.names if n in places}
    for name in new.names:
        if name in partner:
            continue
        alike = [n for n in places if n.lower() == name.lower()]
        rivals = [n for n in new.names if n not in partner and n.lower() == name.lower()]
        if len(alike) == 1 and len(rivals) == 1:
            partner[name] = places.pop(alike[0])
        elif alike:
            both = f"fields {', '.join(map(repr, sorted({*alike, *rivals})))} differ in case only"
            found.refuse(f"{path}.{name}".lstrip("."), old, new, both, "Write them as they were.")
    return partner


def _added(after: T.StructField, path: str, found: _Found) -> _Source:
    found.added.append(path)
    wire = wire_default(after, path)
    if wire is None and not after.nullable:
        shown = after.dataType.simpleString()
        found.problems.append(
            Problem(
                path,
                "",
                f"{shown} NOT NULL",
                "it is new and may not be null, and rows from before have no value for it",
                f"Give it a default ({after.name} {shown} NOT NULL DEFAULT ...), or let it be "
                "null.",
            )
        )
    return _Source(None, _Step(True), after, wire)


def _check_null(
    was: bool, is_now: bool, path: str, old: T.StructField, new: T.StructField, found: _Found
) -> None:
    if was and not is_now:
        found.problems.append(
            Problem(
                path,
                old.dataType.simpleString(),
                f"{new.dataType.simpleString()} NOT NULL",
                "it may be null in rows from before",
                "Let it be null.",
            )
        )


def _resolve(old: T.DataType, new: T.DataType, path: str, found: _Found) -> _Step:
    if isinstance(old, T.StructType) and isinstance(new, T.StructType):
        return _struct(old, new, path, found)
    if isinstance(old, T.ArrayType) and isinstance(new, T.ArrayType):
        return _array(old, new, path, found)
    if isinstance(old, T.MapType) and isinstance(new, T.MapType):
        return _map(old, new, path, found)
    if old == new:
        return _SAME
    fits, convert = widener(old, new)
    if not fits:
        wider = may_become(old)
        shown = old.simpleString()
        return found.refuse(
            path,
            old,
            new,
            f"{shown} cannot become {new.simpleString()} without loss",
            f"Keep it {shown}" + (f" (it may become {wider})" if wider else "") + ", or give the "
            "new type to a field of another name.",
        )
    found.widened.append(path)
    return _Step(True, convert, column_widener(arrow_type(new)))


def _struct(old: T.StructType, new: T.StructType, path: str, found: _Found) -> _Step:
    problems = len(found.problems)
    sources, changed = _match(old, new, path, found)
    if len(found.problems) > problems:
        return _SAME
    row = _row_function(sources, len(old.fields), row_maker(new))
    if old.names == new.names and all(s.step == _SAME for s in sources) and not changed:
        return _SAME
    wanted = arrow_type(new)

    def column(array: pa.Array) -> pa.Array:
        children = [array.field(i) for i in range(len(old.fields))]
        return pa.StructArray.from_arrays(
            _columns(sources, children, len(array)), fields=list(wanted), mask=pc.is_null(array)
        )

    return _Step(changed, row, column)  # also where only the case of a name is another


def _array(old: T.ArrayType, new: T.ArrayType, path: str, found: _Found) -> _Step:
    if old.containsNull and not new.containsNull:
        found.refuse(f"{path}[]", old, new, "an element may be null", "Let elements be null.")
    changed, value, column = step = _resolve(old.elementType, new.elementType, f"{path}[]", found)
    wanted = arrow_type(new)

    def columns(array: pa.Array) -> pa.Array:
        array = _unsliced(array)
        inner = array.values if column is None else column(array.values)
        return pa.ListArray.from_arrays(array.offsets, inner, type=wanted, mask=pc.is_null(array))

    each = None if value is None else _each(value)
    return _SAME if step == _SAME else _Step(changed, each, columns)


def _map(old: T.MapType, new: T.MapType, path: str, found: _Found) -> _Step:
    if old.valueContainsNull and not new.valueContainsNull:
        found.refuse(f"{path}.value", old, new, "a value may be null", "Let values be null.")
    if isinstance(old.keyType, T.StructType | T.ArrayType | T.MapType) or isinstance(
        new.keyType, T.StructType | T.ArrayType | T.MapType
    ):
        # Two keys could become one.
        key = _SAME
        if _bare(old.keyType) != _bare(new.keyType):
            todo = "Keep the map's keys as they were."
            found.refuse(f"{path}.key", old.keyType, new.keyType, "a map's keys stay", todo)
    else:
        key = _resolve(old.keyType, new.keyType, f"{path}.key", found)
    item = _resolve(old.valueType, new.valueType, f"{path}.value", found)
    wanted = arrow_type(new)

    def columns(array: pa.Array) -> pa.Array:
        array = _unsliced(array)
        keys = array.keys if key.column is None else key.column(array.keys)
        items = array.items if item.column is None else item.column(array.items)
        mask = pc.is_null(array)
        return pa.MapArray.from_arrays(array.offsets, keys, items, type=wanted, mask=mask)

    if key == item == _SAME:
        return _SAME
    return _Step(key.changed or item.changed, _entries(key.value, item.value), columns)


def _bare(dtype: T.DataType) -> str:
    return dtype.simpleString().lower()


def _unsliced(array: pa.Array) -> pa.Array:
    return array.take(pa.array(range(len(array)))) if array.offset else array


def _each(value: Convert) -> Convert:
    return lambda items: [None if item is None else value(item) for item in items]


def _entries(key: Convert | None, value: Convert | None) -> Convert | None:
    if key is None and value is None:
        return None
    return lambda entries: {
        k if key is None else key(k): v if v is None or value is None else value(v)
        for k, v in entries.items()
    }


# --- rows and columns --------------------------------------------------------------------------


def _row_function(
    sources: Sequence[_Source], old_fields: int, make: Callable[[list[Any]], Any]
) -> Callable[[Row], Any]:
    kept = [source.place for source in sources]
    if kept == list(range(old_fields)) and all(s.step.value is None for s in sources):
        # A struct within still gets its new names.
        return (lambda row: row) if make is tuple else lambda row: make(list(row))
    plan = [(s.place, s.step.value, s.constant if s.place is None else None) for s in sources]

    def convert(row: Row) -> Any:
        return make(
            [
                constant
                if index is None
                else row[index]
                if step is None or row[index] is None
                else step(row[index])
                for index, step, constant in plan
            ]
        )

    return convert


def _columns(
    sources: Sequence[_Source], columns: Sequence[pa.Array], length: int
) -> list[pa.Array]:
    first = pa.array(np.zeros(length, np.int64))
    made = []
    for index, step, of, wire in sources:
        if index is None:
            one = arrow_from_wire([wire], of.dataType)
            made.append(one.take(first))
        else:
            column = columns[index]
            made.append(column if step.column is None else step.column(column))
    return made
