"""From what a user asked for to accumulators: checked where the call is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import types as T

from statebackend.errors import SchemaError, SettingError
from statebackend.operators.aggregate.accumulators import (
    Accumulator,
    Count,
    DoubleSum,
    LongSum,
    Mean,
    Variance,
)
from statebackend.operators.aggregate.decimals import DecimalMean, DecimalSum
from statebackend.operators.aggregate.extremes import Extreme, FirstLast, FirstLastBy, ordered
from statebackend.operators.aggregate.functions import Aggregation
from statebackend.operators.aggregate.sketches import ApproxCountDistinct
from statebackend.operators.aggregate.value_counts import CountDistinct, TopK
from statebackend.schema.types import arrow_type, check_key_schema

__all__ = ["parse_aggregations"]

Make = Callable[[str, Sequence[T.StructField], Mapping[str, Any]], Accumulator]

_HOW = 'Write {"n": "count"}, {"total": ("sum", "amount")} or {"top": top_k("page", 10)}.'


def parse_aggregations(
    aggregations: Mapping[str, Any], schema: T.StructType, taken: Sequence[str]
) -> list[Accumulator]:
    """Accumulators in the order of the output columns.

    Args:
        aggregations: output column to "count", (function, column), or an `Aggregation`.
        schema: of the input.
        taken: names of the other output columns.

    Raises:
        SettingError: not of that form, an unknown function or a wrong option.
        SchemaError: an unknown column, a type that the function does not take, a name taken twice.
    """
    if not isinstance(aggregations, Mapping) or not aggregations:
        raise SettingError(f"aggregations= is {aggregations!r}.", todo=_HOW)
    names = {name.lower() for name in taken}
    found = []
    for name, wanted in aggregations.items():
        if not isinstance(name, str) or not name:
            raise SettingError(f"An aggregation is named {name!r}.", todo="Give it a name.")
        if name.lower() in names:
            raise SchemaError(
                f"Two output columns are named {name!r}.",
                todo="Give the aggregation a name of its own, also unlike keys and windows.",
            )
        names.add(name.lower())
        found.append(_accumulator(name, _asked(name, wanted), schema))
    return found


def _asked(name: str, wanted: Any) -> Aggregation:
    if isinstance(wanted, Aggregation):
        return wanted
    if isinstance(wanted, str):
        return Aggregation(wanted)
    texts = isinstance(wanted, tuple | list) and all(isinstance(part, str) for part in wanted)
    if not texts or not wanted:
        raise SettingError(f"Aggregation {name!r} is {wanted!r}.", todo=_HOW)
    return Aggregation(wanted[0], tuple(wanted[1:]))


def _accumulator(name: str, asked: Aggregation, schema: T.StructType) -> Accumulator:
    known = _FUNCTIONS.get(asked.function)
    if known is None:
        raise SettingError(
            f"Aggregation {name!r} asks for {asked.function!r}, which is none.",
            todo=f"Use one of: {', '.join(_FUNCTIONS)}.",
        )
    make, least, most = known
    if not least <= len(asked.columns) <= most:
        raise SettingError(
            f"Aggregation {name!r}: {asked.function} was given {len(asked.columns)} columns.",
            todo="Name one column." if least else 'Write "count", or ("count", column).',
        )
    options = dict(asked.options)
    columns = () if asked.function == "count" and asked.columns == ("*",) else asked.columns
    if "by" in options and options["by"] is not None:
        options["by"] = _input_field(name, options["by"], schema)
    fields = [_input_field(name, column, schema) for column in columns]
    return make(name, fields, options)


def _input_field(name: str, column: object, schema: T.StructType) -> T.StructField:
    for field in schema:
        if field.name == column:
            arrow_type(field.dataType, field.name)
            return field
    near = [f.name for f in schema if isinstance(column, str) and f.name.lower() == column.lower()]
    hint = f"Write {near[0]!r}." if near else f"Use one of: {', '.join(schema.names)}."
    raise SchemaError(
        f"Aggregation {name!r} reads column {column!r}, which the input does not have.", todo=hint
    )


def _refused(name: str, function: str, field: T.StructField, takes: str) -> SchemaError:
    return SchemaError(
        f"Aggregation {name!r}: {function} cannot take column {field.name!r} of type "
        f"{field.dataType.simpleString()}.",
        todo=f"Give it {takes}, or cast the column.",
    )


def _count(name: str, fields: Sequence[T.StructField], options: Mapping[str, Any]) -> Accumulator:
    return Count(name, [field.name for field in fields])


def _sum(name: str, fields: Sequence[T.StructField], options: Mapping[str, Any]) -> Accumulator:
    (field,) = fields
    if isinstance(field.dataType, T.IntegralType):
        return LongSum(name, [field.name])
    if isinstance(field.dataType, T.FloatType | T.DoubleType):
        return DoubleSum(name, [field.name])
    if isinstance(field.dataType, T.DecimalType):
        return DecimalSum(name, [field.name], field.dataType)
    raise _refused(name, "sum", field, "a number")


def _number(name: str, function: str, field: T.StructField) -> None:
    if not isinstance(field.dataType, T.NumericType):
        raise _refused(name, function, field, "a number")


def _mean(name: str, fields: Sequence[T.StructField], options: Mapping[str, Any]) -> Accumulator:
    (field,) = fields
    _number(name, "mean", field)
    if isinstance(field.dataType, T.DecimalType):
        return DecimalMean(name, [field.name], field.dataType)
    return Mean(name, [field.name])


def _spread(*, root: bool) -> Make:
    def make(name: str, fields: Sequence[T.StructField], options: Mapping[str, Any]) -> Accumulator:
        _number(name, "stddev" if root else "variance", fields[0])
        return Variance(name, [fields[0].name], root=root)

    return make


def _extreme(*, largest: bool) -> Make:
    def make(name: str, fields: Sequence[T.StructField], options: Mapping[str, Any]) -> Accumulator:
        (field,) = fields
        if not ordered(field.dataType):
            raise _refused(
                name, "max" if largest else "min", field, "a number, boolean, text or time"
            )
        return Extreme(name, [field.name], field.dataType, largest=largest)

    return make


def _first_last(*, last: bool) -> Make:
    def make(name: str, fields: Sequence[T.StructField], options: Mapping[str, Any]) -> Accumulator:
        (field,) = fields
        by = options.get("by")
        ignore_nulls = bool(options.get("ignore_nulls", False))
        if by is None:
            return FirstLast(
                name, [field.name], field.dataType, last=last, ignore_nulls=ignore_nulls
            )
        if not ordered(by.dataType):
            raise _refused(name, "by=", by, "a number, text or time")
        return FirstLastBy(
            name,
            [field.name, by.name],
            field.dataType,
            by.dataType,
            last=last,
            ignore_nulls=ignore_nulls,
        )

    return make


def _count_distinct(
    name: str, fields: Sequence[T.StructField], options: Mapping[str, Any]
) -> Accumulator:
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        raise SchemaError(
            f"Aggregation {name!r} names a column twice.", todo="Name each column once."
        )
    check_key_schema(T.StructType(list(fields)))  # values become keys of a map state
    return CountDistinct(name, names, [field.dataType for field in fields])


def _approx(name: str, fields: Sequence[T.StructField], options: Mapping[str, Any]) -> Accumulator:
    (field,) = fields
    if not ordered(field.dataType):
        raise _refused(name, "approx_count_distinct", field, "a number, boolean, text or time")
    return ApproxCountDistinct(name, [field.name], field.dataType, rsd=options.get("rsd", 0.02))


def _top_k(name: str, fields: Sequence[T.StructField], options: Mapping[str, Any]) -> Accumulator:
    (field,), k = fields, options.get("k")
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= 10_000:
        raise SettingError(
            f"Aggregation {name!r}: top_k was asked for {k!r} values.",
            todo='Write top_k("page", 10), with 1 to 10,000.',
        )
    if not ordered(field.dataType):
        raise _refused(name, "top_k", field, "a number, boolean, text or time")
    return TopK(name, [field.name], field.dataType, k)


_FUNCTIONS: Mapping[str, tuple[Make, int, int]] = {
    "count": (_count, 0, 1),
    "sum": (_sum, 1, 1),
    "min": (_extreme(largest=False), 1, 1),
    "max": (_extreme(largest=True), 1, 1),
    "mean": (_mean, 1, 1),
    "avg": (_mean, 1, 1),
    "variance": (_spread(root=False), 1, 1),
    "stddev": (_spread(root=True), 1, 1),
    "first": (_first_last(last=False), 1, 1),
    "last": (_first_last(last=True), 1, 1),
    "count_distinct": (_count_distinct, 1, 64),
    "approx_count_distinct": (_approx, 1, 1),
    "top_k": (_top_k, 1, 1),
}
