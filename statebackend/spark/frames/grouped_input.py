"""What a frame is grouped by: an operator's input, and the names of its key columns."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql.classic.column import Column as ClassicColumn

from statebackend.errors import SchemaError, SettingError, UnsupportedQueryError
from statebackend.operators.errors import lost_jvm as jvm

__all__ = ["GroupedInput", "grouped_for_function", "grouped_input", "key_names"]

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


def grouped_for_function(
    grouped: GroupedData | DataFrame, keys: str | list[str] | None
) -> GroupedInput:
    """As `grouped_input`, for ``apply_in_pandas_with_state``: refused where Spark refuses it.

    Raises:
        SettingError, SchemaError: it is not grouped, or twice.
        UnsupportedQueryError: the frame is static.
    """
    if not isinstance(grouped, GroupedData | DataFrame) or (
        isinstance(grouped, DataFrame) and keys is None
    ):
        raise SettingError(
            f"apply_in_pandas_with_state() was given a {type(grouped).__name__}"
            f"{'' if keys is not None else ' without keys='}.",
            todo="Give df.groupBy(...), or a frame and keys=.",
        )
    if isinstance(grouped, GroupedData) and keys is not None:
        raise SettingError(
            "keys= was given with a frame that is grouped already.", todo="Leave keys= out."
        )
    found = grouped_input(grouped, keys)
    if not found.frame.isStreaming:
        raise UnsupportedQueryError(
            "applyInPandasWithState is unsupported in a batch query, as in Spark.",
            todo="Use applyInPandas, which needs no state.",
        )
    return found


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
