"""What a query's writer and its plan say before the start, read in Spark's JVM."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = [
    "FUNCTION_PREFIX",
    "batch_writer",
    "default_folder",
    "format_of",
    "function_name",
    "functions_in",
    "is_operator",
    "items",
    "location_path",
    "nodes_of",
    "only_our_python",
    "options_of",
    "output_mode",
    "table_of",
    "uid_in",
    "with_table",
]

_log = logging.getLogger("statebackend.spark")
FUNCTION_PREFIX: Final = "statebackend:"
"""Of the names that the functions of our operators have in Spark's plans."""
_OURS: Final = "MapInArrow"
_PYTHONS: Final = ("Arrow", "Pandas", "Python", "PySpark")
_TABLE: Final = "_statebackend_table"  # an attribute of a writer


def options_of(writer: DataStreamWriter | None) -> dict[str, str]:
    """A writer's options, keys in lower case; PySpark keeps them in the JVM only."""
    if writer is None:
        return {}
    jwriter: Any = writer._jwrite
    field = jwriter.getClass().getDeclaredField("extraOptions")
    field.setAccessible(True)
    found: dict[str, str] = {}
    pairs = field.get(jwriter).iterator()
    while pairs.hasNext():
        pair = pairs.next()
        found[str(pair._1()).lower()] = str(pair._2())
    return found


def location_path(writer: DataStreamWriter | None, options: Mapping[str, str]) -> str | None:
    """A query's checkpoint location by its options and its session; None where Spark makes one.

    The session is the frame's, as Spark has it: a backend may have been made with another.

    Args:
        options: as `options_of` gives them.
    """
    if path := options.get("checkpointlocation"):
        return path
    if writer is None:
        return None
    folder, name = default_folder(writer), options.get("queryname")
    return f"{folder}/{name}" if folder and name else None


def default_folder(writer: DataStreamWriter) -> str | None:
    """Where Spark puts the locations of queries that name none; None: they are temporary."""
    frame: Any = writer._df
    found: str | None = frame.sparkSession.conf.get("spark.sql.streaming.checkpointLocation", None)
    return found or None


def output_mode(writer: DataStreamWriter) -> str:
    """A query's output mode in lower case; append is the default."""
    jwriter: Any = writer._jwrite
    field = jwriter.getClass().getDeclaredField("outputMode")
    field.setAccessible(True)
    return str(field.get(jwriter)).lower()


def format_of(writer: DataStreamWriter) -> str:
    """What a writer was told with ``format()``, or Spark's default."""
    jwriter: Any = writer._jwrite
    field = jwriter.getClass().getDeclaredField("source")
    field.setAccessible(True)
    return str(field.get(jwriter))


def with_table(writer: DataStreamWriter, table: str) -> None:
    """Have a writer say that it is started with ``toTable(table)``."""
    setattr(writer, _TABLE, table)


def table_of(writer: DataStreamWriter) -> str:
    """The table that a writer is started with; empty: ``start()``."""
    return str(getattr(writer, _TABLE, ""))


def batch_writer(writer: DataStreamWriter) -> Any:
    """The function of ``foreachBatch``, as the JVM has it; None: there is none."""
    field = writer._jwrite.getClass().getDeclaredField("foreachBatchWriter")
    field.setAccessible(True)
    return field.get(writer._jwrite)


def function_name(uid: str, nonce: str) -> str:
    """What Spark's plans call an operator's function. Two frames never share one."""
    return f"{FUNCTION_PREFIX}{uid}:{nonce[:8]}"


def functions_in(writer: DataStreamWriter) -> list[str]:
    """The names of the functions of our operators in a writer's plan, of any backend."""
    frame: Any = writer._df
    found: dict[str, None] = {}  # a frame that is used twice counts once
    for node in nodes_of(frame._jdf.queryExecution().analyzed()):
        if is_operator(node):
            found[str(node.functionExpr().name())] = None
    return list(found)


def is_operator(node: Any) -> bool:
    """Whether a node of a logical plan is one of our operators, of any backend."""
    if str(node.getClass().getSimpleName()) != _OURS:
        return False
    return str(node.functionExpr().name()).startswith(FUNCTION_PREFIX)


def uid_in(node: Any) -> str:
    """The uid of an operator's node."""
    return str(node.functionExpr().name()).removeprefix(FUNCTION_PREFIX).rpartition(":")[0]


def only_our_python(writer: DataStreamWriter, ours: int) -> bool:
    """Whether no Python function of the user's runs in a query, whose rows might be wide.

    Args:
        ours: how many nodes of the plan are ours.
    """
    frame: Any = writer._df
    try:
        if batch_writer(writer) is not None:
            return False  # what it does with its frame is not known
        patterns = frame.sparkSession._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
        function = patterns.PYTHON_UDF()
        found = 0
        for node in nodes_of(frame._jdf.queryExecution().analyzed()):
            name = str(node.getClass().getSimpleName())
            if name == _OURS:
                found += 1
            elif any(word in name for word in _PYTHONS) or any(
                one.containsPattern(function) for one in items(node.expressions())
            ):
                return False
    except Py4JError as error:  # another release of Spark: then it is not known
        _log.debug("the plan cannot be looked through (%s)", error)
        return False
    return found == ours


def nodes_of(plan: Any) -> Iterator[Any]:
    """A logical plan's, parents before children."""
    nodes = [plan]
    while nodes:
        node = nodes.pop()
        yield node
        nodes.extend(items(node.children()))


def items(sequence: Any) -> Iterator[Any]:
    """A Scala sequence's."""
    return (sequence.apply(i) for i in range(sequence.length()))
