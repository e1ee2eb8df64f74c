"""What of Spark's private surface is needed, and whether the PySpark that runs has it.

Spark has no public way to read what a writer was given, or to find an operator in a query's plan.
So each use of a private member has a probe here. `statebackend doctor --spark` shows them all, and
the first start in a process tries them, so that another release of Spark is told in one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from statebackend.errors import EnvironmentMissingError
from statebackend.operators.errors import lost_jvm as jvm
from statebackend.spark.data_sources import session_of
from statebackend.spark.frames.grouped_input import grouped_input
from statebackend.spark.session_settings import frame_limits
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.writer_inspection import (
    batch_writer,
    format_of,
    function_name,
    functions_in,
    options_of,
    output_mode,
)

__all__ = ["Found", "check_internals", "probe_internals"]


@dataclass(frozen=True)
class Found:
    """A private member: what it is, what for, and why it cannot be used ("": it can)."""

    member: str
    use: str
    reason: str = ""


_NAME: Final = function_name("probe", "0")


class _Function:
    """A function with the name of an operator's."""

    def __init__(self) -> None:
        self.__name__ = _NAME

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return batches


@dataclass(frozen=True)
class _Try:
    spark: SparkSession
    stream: DataFrame
    writer: DataStreamWriter


def _operators(given: _Try) -> None:
    mapped = given.stream.mapInArrow(_Function(), given.stream.schema)
    if functions_in(mapped.writeStream) != [_NAME]:
        raise LookupError("the operator was not found in the plan")


def _streaming_query(given: _Try) -> None:
    names = (
        "org.apache.spark.sql.execution.streaming.runtime.StreamingQueryWrapper",
        "org.apache.spark.sql.execution.streaming.StreamingQueryWrapper",
    )
    java: Any = given.spark._jvm
    gateway: Any = given.spark.sparkContext._gateway
    loader = java.Thread.currentThread().getContextClassLoader()
    for name in names:
        try:
            found = java.java.lang.Class.forName(name, False, loader)
        except Exception:
            continue
        found.getMethod("streamingQuery", gateway.new_array(java.Class, 0))
        return
    raise LookupError("there is no class StreamingQueryWrapper")


_PROBES: Final[tuple[tuple[str, str, Callable[[_Try], object]], ...]] = (
    ("DataStreamWriter.extraOptions", "the checkpoint location", lambda t: options_of(t.writer)),
    (
        "DataStreamWriter.outputMode",
        "event time behind an operator",
        lambda t: output_mode(t.writer),
    ),
    ("DataStreamWriter.source", "savepoints of file sinks", lambda t: format_of(t.writer)),
    (
        "DataStreamWriter.foreachBatchWriter",
        "the size of batches",
        lambda t: batch_writer(t.writer),
    ),
    ("QueryExecution.analyzed, MapInArrow.functionExpr", "the operators of a query", _operators),
    (
        "Aggregate.groupingExpressions",
        "the keys of groupBy()",
        lambda t: grouped_input(t.stream.groupBy("value"), None),
    ),
    (
        "RelationalGroupedDataset.groupingExprs, ExpressionUtils.column",
        "expressions in groupBy()",
        lambda t: grouped_input(t.stream.groupBy(t.stream.value + 1), None),
    ),
    ("DataFrameReader._spark", "state as a table", lambda t: session_of(t.spark.read)),
    ("SessionState.conf", "the size of pandas frames", lambda t: frame_limits(t.spark)),
    ("StreamingQueryWrapper.streamingQuery", "the run of a query", _streaming_query),
    (
        "Hadoop's FileSystem",
        "what Spark has planned and committed",
        lambda t: CheckpointLocation(t.spark, "file:///").qualified(),
    ),
)


def probe_internals(spark: SparkSession) -> list[Found]:
    """Try every member on a stream that is never started."""
    stream = spark.readStream.format("rate").load()
    given = _Try(spark, stream, stream.writeStream.format("noop"))
    found = []
    for member, use, probe in _PROBES:
        reason = ""
        try:
            probe(given)
        except Exception as error:  # whatever another release of Spark answers
            reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        found.append(Found(member, use, reason))
    return found


class _Checked:
    done: ClassVar[bool] = False


def check_internals(spark: SparkSession) -> None:
    """Refuse a PySpark that lacks a member; tried once in a process.

    Raises:
        EnvironmentMissingError: naming the members.
        SparkLostError: Spark's JVM is gone.
    """
    if _Checked.done:
        return
    with jvm.calls():
        spark.sparkContext._jsc.sc().isStopped()
        missing = [one for one in probe_internals(spark) if one.reason]
    if missing:
        raise EnvironmentMissingError(
            f"PySpark {pyspark.__version__} lacks what this release of statebackend needs: "
            + "; ".join(f"{one.member} (for {one.use}): {one.reason}" for one in missing)
            + ".",
            todo="Install a PySpark that docs/reference/compatibility.md names.",
        )
    _Checked.done = True
