"""Checks that output rows fit a schema, by names and number of fields, so that nothing gets lost.

A misspelled field would be a null in every row. So a row is checked when it is yielded, while the
generator stands at the line that yields it. Where the columns of a Row are is worked out once for
each list of field names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from types import GeneratorType
from typing import Any, Final

from pyspark.sql.types import ArrayType, DataType, MapType, Row, StructType

from statebackend.errors import ValueMismatchError
from statebackend.texts import did_you_mean

__all__ = [
    "MisfitError",
    "RowShapes",
    "by_name",
    "how_to_name",
    "inner_names",
    "refuse_unknown",
    "suspended_at",
    "unknown_field",
]

_SHAPES_MAX: Final = 256


class MisfitError(ValueMismatchError):
    """Output that does not fit, found when it was yielded, and so of the current key.

    Attributes:
        where: the user's line, such as ``" at file.py:7 in handleInputRows"``, if it is known.
    """

    where = ""

    @classmethod
    def at(cls, error: ValueMismatchError, output: Any) -> MisfitError:
        """The same error, with the line at which ``output`` has just yielded."""
        made = cls(error.what, todo=error.todo)
        made.where = suspended_at(output)
        return made


def nearest(name: Any, names: Sequence[str]) -> str:
    """The name that may be meant, as a question after a comma; empty if none is near."""
    question = did_you_mean(str(name), names)
    return f", {question[0].lower()}{question[1:]}" if question else ""


def how_to_name(name: Any, names: Sequence[str]) -> str:
    """What to do about a field that output_schema does not have."""
    return f"Use the names of output_schema{nearest(name, names) or '.'}"


def unknown_field(given: Collection[Any], names: Sequence[str]) -> Any:
    """The first name that is no field, or that comes twice; None if there is none."""
    seen: set[Any] = set()
    for name in given:
        if name not in names or name in seen:
            return name
        seen.add(name)
    return None


def inner_names(dtype: DataType) -> Callable[[Any], None] | None:
    """A check of dicts and Rows that stand for structs: no name may be unknown.

    It raises a ``ValueError`` with the name. A value of another type passes: others refuse it. None
    if the type has no structs in it.
    """
    if isinstance(dtype, StructType):
        return _struct_names(dtype)
    if isinstance(dtype, ArrayType):
        return _each(inner_names(dtype.elementType))
    if isinstance(dtype, MapType):
        check = _each(inner_names(dtype.valueType))
        return check and (lambda value: check(value.values()) if isinstance(value, dict) else None)
    return None


def _each(check: Callable[[Any], None] | None) -> Callable[[Any], None] | None:
    if check is None:
        return None

    def each(values: Any) -> None:
        if isinstance(values, Iterable) and not isinstance(values, str | bytes | dict):
            for value in values:
                check(value)

    return each


def _struct_names(dtype: StructType) -> Callable[[Any], None]:
    names = dtype.names
    inner = [(field.name, inner_names(field.dataType)) for field in dtype]
    checks = [(name, check) for name, check in inner if check is not None]

    def check(value: Any) -> None:
        fields = getattr(value, "__fields__", None) if isinstance(value, Row) else None
        if fields is not None:
            value = by_name(fields, value)
        if isinstance(value, dict):
            refuse_unknown(value, names)
            for name, inside in checks:
                inside(value.get(name))

    return check


def by_name(fields: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """A Row with names as a dict.

    Raises:
        ValueError: a name comes twice, or the row is shorter than it says.
    """
    found = dict(zip(fields, values, strict=True))
    if len(found) < len(fields):
        raise ValueError(f"the field {unknown_field(fields, fields)!r} comes twice")
    return found


def refuse_unknown(given: dict[str, Any], names: Sequence[str]) -> None:
    """Refuses a name that is no field of a struct.

    Raises:
        ValueError: one is not.
    """
    if not all(map(names.__contains__, given)):
        name = unknown_field(given, names)
        raise ValueError(f"it has no field {name!r}{nearest(name, names)}")


def suspended_at(output: Any) -> str:
    """The line at which a generator has just yielded, for errors; empty for anything else."""
    while isinstance(output, GeneratorType) and isinstance(output.gi_yieldfrom, GeneratorType):
        output = output.gi_yieldfrom
    frame = output.gi_frame if isinstance(output, GeneratorType) else None
    if frame is None:
        return ""
    return f" at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


class RowShapes:
    """Finds the columns of a schema in rows, once for each list of field names.

    Args:
        schema: of the output. describe: says whose rows these are, for errors.
    """

    def __init__(self, schema: StructType, describe: Callable[[], str]) -> None:
        self._schema, self._names, self._describe = schema, schema.names, describe
        self._orders: dict[tuple[str, ...], list[int]] = {}

    def check(self, row: Any, output: Any = None) -> None:
        """Refuse what does not fit. ``output``: the iterable that it comes from.

        Raises:
            MisfitError: with the line that ``output`` stands at, if it is a generator.
        """
        try:
            self.order(row)
        except ValueMismatchError as error:
            raise MisfitError.at(error, output) from None

    def order(self, row: Any) -> list[int] | None:
        """The place of each column in a row (-1: missing, so null); None: by position.

        Raises:
            ValueMismatchError: it is no row, has another length, or has an unknown field.
        """
        if not isinstance(row, tuple):
            raise self._no_row(row)
        fields = getattr(row, "__fields__", None) if isinstance(row, Row) else None
        if fields is None:
            if len(row) != len(self._names):
                raise self._no_row(row)
            return None
        known = tuple(fields)
        if len(row) != len(known):
            raise self._no_row(row)
        order = self._orders.get(known)
        if order is None:
            if len(self._orders) >= _SHAPES_MAX:  # names that differ from row to row
                self._orders.clear()
            order = self._orders[known] = self._order(known, row)
        return order

    def _order(self, fields: tuple[str, ...], row: Any) -> list[int]:
        if list(fields) == self._names:
            return list(range(len(fields)))
        unknown = unknown_field(fields, self._names)
        if unknown is not None:
            raise self._unknown(unknown, fields, row)
        places = {name: place for place, name in enumerate(fields)}
        return [places.get(name, -1) for name in self._names]

    def _unknown(self, name: str, fields: tuple[str, ...], row: Any) -> ValueMismatchError:
        often = "twice" if fields.count(name) > 1 else "which output_schema does not have"
        return ValueMismatchError(
            f"{self._describe()} returned {row!r} with the field {name!r}, {often} "
            f"({self._schema.simpleString()}).",
            todo=how_to_name(name, self._names),
        )

    def _no_row(self, row: Any) -> ValueMismatchError:
        if isinstance(row, dict):
            return ValueMismatchError(
                f"{self._describe()} returned {row!r}: a dict is no row, as in Spark "
                f"({self._schema.simpleString()}).",
                todo="Yield Row(**fields), with the names of output_schema, or a tuple.",
            )
        return ValueMismatchError(
            f"{self._describe()} returned {row!r}, which is no row of {len(self._names)} fields "
            f"({self._schema.simpleString()}).",
            todo="Yield pyspark Rows with the names of output_schema, or tuples with one value "
            "per field of it; a single one goes into a list.",
        )
