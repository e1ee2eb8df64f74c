"""The two inputs of an operator as one frame: left and right rows, side by side."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ByteType

from statebackend.errors import SchemaError
from statebackend.schema.ddl import quoted

__all__ = ["united_sides"]


def united_sides(
    left: DataFrame,
    right: DataFrame,
    *,
    left_keys: list[str],
    right_keys: list[str],
    event_time: str | None,
) -> tuple[DataFrame, list[str], str | None]:
    """Both inputs of a connected operator as one frame.

    Its columns: ``side`` (0 left, 1 right), the keys ``k0..``, the left side's columns ``l0..``,
    the right side's ``r0..``, and ``t``, the event time, where it is asked for.

    Returns:
        the frame, the names of its key columns, and of its event-time column.

    Raises:
        SchemaError: the keys do not have the same types, or no side has the event time.
    """
    kinds = [
        [frame.schema[name].dataType for name in names]
        for frame, names in ((left, left_keys), (right, right_keys))
    ]
    if kinds[0] != kinds[1]:
        shown = [", ".join(kind.simpleString() for kind in side) for side in kinds]
        raise SchemaError(
            f"The keys of the two sides differ: ({shown[0]}) and ({shown[1]}).",
            todo="Cast the key columns to the same types.",
        )
    if event_time is not None and event_time not in {*left.columns, *right.columns}:
        raise SchemaError(
            f"Neither side has a column {event_time!r}.", todo="Name the event-time column."
        )

    having = left if event_time in left.columns else right
    event_type: Any = having.schema[event_time].dataType if event_time is not None else None

    def half(side: int, frame: DataFrame, keys: list[str]) -> DataFrame:
        columns = [F.lit(side).cast(ByteType()).alias("side")]
        columns += [F.col(quoted(name)).alias(f"k{i}") for i, name in enumerate(keys)]
        for number, (letter, of) in enumerate((("l", left), ("r", right))):
            for i, field in enumerate(of.schema.fields):
                mine = F.col(quoted(field.name)) if number == side else F.lit(None)
                columns.append(mine.cast(field.dataType).alias(f"{letter}{i}"))
        if event_time is not None:
            there = event_time in frame.columns
            moment = F.col(quoted(event_time)) if there else F.lit(None).cast(event_type)
            columns.append(moment.alias("t"))
        return frame.select(*columns)

    both = half(0, left, left_keys).union(half(1, right, right_keys))
    names = [f"k{i}" for i in range(len(left_keys))]
    return both, names, "t" if event_time is not None else None
