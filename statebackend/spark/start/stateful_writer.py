"""Spark's ways to start a query, for a query whose frame has state here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from statebackend.spark.start.checked_batches import CheckedBatches
from statebackend.spark.start.writer_inspection import with_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Begin", "StatefulStreamWriter", "WriterCalls", "with_options"]

_CHECKED = "_statebackend_checked"  # an attribute of a writer: its CheckedBatches


class Begin(Protocol):
    """Checks a query, takes over its job, and has Spark start it."""

    def __call__(
        self,
        writer: DataStreamWriter,
        start: Callable[[], StreamingQuery],
        checked: Sequence[CheckedBatches],
    ) -> StreamingQuery:
        """With the ``foreachBatch`` functions that were wrapped for it."""


def with_options(
    writer: DataStreamWriter,
    format: str | None = None,
    outputMode: str | None = None,
    partitionBy: str | list[str] | None = None,
    queryName: str | None = None,
    **options: Any,
) -> DataStreamWriter:
    """A writer with the arguments of Spark's ``start`` and ``toTable`` set, as these set them."""
    writer.options(**options)
    if outputMode is not None:
        writer.outputMode(outputMode)
    if partitionBy is not None:
        writer.partitionBy(partitionBy)
    if format is not None:
        writer.format(format)
    if queryName is not None:
        writer.queryName(queryName)
    return writer


class WriterCalls:
    """``start``, ``toTable`` and ``foreachBatch`` as Spark has them, for one backend.

    Spark's own methods are taken when this module is imported: before `statebackend.install`
    puts others in their place.
    """

    spark_start = staticmethod(DataStreamWriter.start)
    spark_to_table = staticmethod(DataStreamWriter.toTable)
    spark_foreach_batch = staticmethod(DataStreamWriter.foreachBatch)

    def __init__(self, begin: Begin) -> None:
        self._starts = begin

    def start(
        self, writer: DataStreamWriter, path: str | None = None, *given: Any, **named: Any
    ) -> StreamingQuery:
        """Spark's ``start()``."""
        with_options(writer, *given, **named)
        if path is not None:
            writer.option("path", path)
        return self._begin(writer, lambda: self.spark_start(writer))

    def to_table(
        self, writer: DataStreamWriter, tableName: str, *given: Any, **named: Any
    ) -> StreamingQuery:
        """Spark's ``toTable()``."""
        with_options(writer, *given, **named)
        with_table(writer, tableName)
        return self._begin(writer, lambda: self.spark_to_table(writer, tableName))

    def foreach_batch(self, writer: DataStreamWriter, func: Callable[..., None]) -> Any:
        """Spark's ``foreachBatch()``; a function that reads a part of its frame is found out."""
        checked = func if isinstance(func, CheckedBatches) else CheckedBatches(func)
        setattr(writer, _CHECKED, [checked])
        return self.spark_foreach_batch(writer, checked)

    def _begin(
        self, writer: DataStreamWriter, start: Callable[[], StreamingQuery]
    ) -> StreamingQuery:
        return self._starts(writer, start, getattr(writer, _CHECKED, ()))


class StatefulStreamWriter(DataStreamWriter):
    """A ``DataStreamWriter`` whose queries are started with their state."""

    def __init__(self, frame: DataFrame, calls: WriterCalls) -> None:
        super().__init__(frame)
        self._calls = calls

    def start(self, path: str | None = None, *given: Any, **named: Any) -> StreamingQuery:
        """As Spark's."""
        return self._calls.start(self, path, *given, **named)

    def toTable(self, tableName: str, *given: Any, **named: Any) -> StreamingQuery:
        """As Spark's."""
        return self._calls.to_table(self, tableName, *given, **named)

    def foreachBatch(self, func: Callable[..., None]) -> DataStreamWriter:
        """As Spark's."""
        made: DataStreamWriter = self._calls.foreach_batch(self, func)
        return made
