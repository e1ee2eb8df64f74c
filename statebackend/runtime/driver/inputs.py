"""The inputs of an operator: their key columns, and two of them as one frame."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql import functions as F
from pyspark.sql.classic.column import Column as ClassicColumn
from pyspark.sql.types import ByteType, StructType

from statebackend.errors import SchemaError
from statebackend.operators.errors import lost_jvm as jvm
from statebackend.schema.ddl import quoted

__all__ = ["GroupedInput", "grouped_input", "key_names", "key_schema_of", "united_sides"]


_CASE: Final = "spark.sql.caseSensitive"
_KEY_COLUMN: Final = "statebackend.groupedBy"  # of a column's metadata: the expression


class GroupedInput(NamedTuple):
    """An operator's input.

    Attributes:
        names: of its key columns.
        shown: how many of its first columns a processor sees; None: all. The others are keys that
            the frame was grouped by without having them.
    """

    frame: DataFrame
    names: list[str]
    shown: int | None = None


def key_schema_of(rows: StructType, names: list[str]) -> StructType:
    """The schema of an operator's key."""
    return StructType([rows[name] for name in names])


def key_names(df: Any, keys: Any, *, static: bool = False) -> list[str]:
    """Names of key columns, checked.

    Args:
        df: a frame. keys: a name, or several.
        static: a static frame will do, too.

    Raises:
        SchemaError: what is wrong with them, or with the frame.
        SparkLostError: Spark's JVM is gone.
    """
    if not isinstance(df, DataFrame):
        raise SchemaError(
            f"The input is a {type(df).__name__}.", todo="Give a DataFrame, which is not grouped."
        )
    if isinstance(keys, Column):
        raise SchemaError(
            f"The keys are {keys!r}, a Column.",
            todo="Give the column's name; give an expression one with withColumn() first.",
        )
    names = [keys] if isinstance(keys, str) else list(keys)
    if not names or not all(isinstance(name, str) for name in names):
        raise SchemaError(
            f"The keys are {keys!r}.", todo="Give the names of one or more columns of the frame."
        )
    with jvm.calls():
        columns = df.columns
    for name in names:
        if columns.count(name) != 1:
            raise SchemaError(
                f"The frame has {columns.count(name)} columns named {name!r} "
                f"({', '.join(columns)}).",
                todo="Name existing columns; give an expression a name with withColumn() first.",
            )
    if len(set(names)) != len(names):
        raise SchemaError(f"The keys {names} name a column twice.", todo="Name each once.")
    if not df.isStreaming and not static:
        raise SchemaError(
            "The frame is not a streaming frame.", todo="Read it with spark.readStream."
        )
    return names


def grouped_input(grouped: GroupedData | DataFrame, keys: str | list[str] | None) -> GroupedInput:
    """A frame and the names of its key columns: of what ``groupBy`` gave, or by ``keys``.

    As in Spark, a frame may be grouped by expressions (``window("at", "1 hour")``, ``a.b``,
    ``lower("k").alias("l")``): they are the key, and rows are shown without them.

    Raises:
        SchemaError: what is wrong with them, or with the frame.
        SparkLostError: Spark's JVM is gone.
    """
    if isinstance(grouped, DataFrame):
        if keys is None:
            raise SchemaError(
                "The frame has no keys.", todo="Give df.groupBy(...), or name them with keys=."
            )
        return GroupedInput(grouped, key_names(grouped, keys, static=True))
    if not isinstance(grouped, GroupedData):
        raise SchemaError(
            f"The input is a {type(grouped).__name__}.", todo="Give df.groupBy(...) or a DataFrame."
        )
    if keys is not None:
        raise SchemaError("Keys are given twice.", todo="Leave keys= out after groupBy().")
    frame: Any = grouped._df
    with jvm.calls():
        places = _places(frame, grouped)
        if not places:
            raise SchemaError(
                "The frame is grouped by nothing.",
                todo="Group by one or more columns of the frame.",
            )
        made = _with_expressions(frame, grouped, places) if None in places else frame
        rest = iter(made.columns[len(frame.columns) :])
        names = [next(rest) if place is None else frame.columns[place] for place in places]
    shown = None if made is frame else len(frame.columns)
    return GroupedInput(made, key_names(made, names, static=True), shown)


def _places(frame: Any, grouped: Any) -> list[int | None]:
    """Where the columns stand that a frame is grouped by; None for an expression."""
    output = frame._jdf.queryExecution().analyzed().output()
    columns = {output.apply(i).exprId().id(): i for i in range(output.length())}
    keys = grouped.count()._jdf.queryExecution().analyzed().groupingExpressions()
    places = []
    for position in range(keys.length()):
        key = keys.apply(position)
        if str(key.getClass().getSimpleName()) == "Alias":
            key = key.child()
        is_column = str(key.getClass().getSimpleName()) == "AttributeReference"
        places.append(columns.get(key.exprId().id()) if is_column else None)
    return places


def _with_expressions(frame: Any, grouped: Any, places: list[int | None]) -> DataFrame:
    """A frame, and behind its columns the expressions that it is grouped by.

    They have the names that Spark gives them, or others where the frame has those already.

    Raises:
        SchemaError: ``rollup()``, ``cube()`` or the like, where a row belongs to several groups.
    """
    expressions = grouped._jgd.groupingExprs()
    if expressions.length() != len(places):
        raise SchemaError(
            "The frame is not grouped by groupBy().",
            todo="Give df.groupBy(...) with columns or expressions of the frame.",
        )
    column_of: Any = frame.sparkSession._jvm.org.apache.spark.sql.classic.ExpressionUtils.column
    same = str if frame.sparkSession.conf.get(_CASE, "false") == "true" else str.lower
    made, taken = [], {same(name) for name in frame.columns}
    for position, place in enumerate(places):
        if place is not None:
            continue
        column = ClassicColumn(column_of(expressions.apply(position)))
        (name,) = frame.select(column).columns
        while same(name) in taken:  # by Spark's rule, or it finds two columns of that name
            name = f"{name}_key"
        taken.add(same(name))
        # With metadata of its own, or the window of an event time would pass for event time.
        made.append(column.alias(name, metadata={_KEY_COLUMN: name}))
    extended: DataFrame = frame.select("*", *made)
    return extended


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
