"""Which sources and sinks allow that a query goes back by one batch.

With asynchronous commits Spark may have committed a batch whose record was lost with the driver.
The query then repeats that batch: the source must give it again exactly, although it may have been
told that the batch is done, and the sink must take it again. A sink that skips a batch which it has
already (file sinks keep account of theirs) would leave the operator without that epoch for good.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from statebackend.errors import UnsupportedQueryError
from statebackend.spark.frames.heartbeat import SOURCE_NAME

__all__ = [
    "REPEATABLE_SOURCES",
    "Source",
    "check_sink",
    "check_sources",
    "source_names",
    "sources_in",
    "sources_of",
]

# By the name given to readStream.format(). Files only where they are left in place.
REPEATABLE_SOURCES: Final = frozenset(
    {
        *("parquet", "json", "csv", "text", "orc", "binaryFile", "avro", "xml"),
        *("kafka", "delta", "rate", "rate-micro-batch"),
        SOURCE_NAME,  # gives no rows
    }
)
_SKIPPING_SINKS: Final = ("FileStreamSink", "DeltaSink")
_TODO: Final = 'Use commit="sync" (the default) for this query.'


def source_names(df: DataFrame) -> set[str]:
    """The streaming sources of a frame that have a name of their own (data sources, version 2)."""
    leaves = df._jdf.queryExecution().analyzed().collectLeaves().iterator()
    names = set()
    while leaves.hasNext():
        leaf: Any = leaves.next()
        if leaf.getClass().getSimpleName() == "StreamingRelationV2":
            names.add(str(leaf.sourceName()))
    return names


@dataclass(frozen=True)
class Source:
    """A streaming source in one of its places in a plan.

    Attributes:
        name: for ``readStream.format()``. shown: the same for people.
        cleans: what it does to files that were read (``cleanSource``); empty for nothing.
        number: of its folder in Spark's `sources`. A source that a query reads in two places has
            one folder, and in each plan an offset for each place.
    """

    name: str
    shown: str
    cleans: str = ""
    number: int = 0


def sources_of(df: DataFrame) -> Iterator[Source]:
    """The streaming sources of a frame, in Spark's order: one for each place that reads one."""
    leaves = df._jdf.queryExecution().analyzed().collectLeaves().iterator()
    seen: list[Any] = []
    while leaves.hasNext():
        leaf: Any = leaves.next()
        kind = leaf.getClass().getSimpleName()
        if kind not in ("StreamingRelation", "StreamingRelationV2"):
            continue  # a table or a range: the same in every run
        number = next((n for n, one in enumerate(seen) if one.equals(leaf)), len(seen))
        if number == len(seen):
            seen.append(leaf)
        shown = str(leaf.sourceName())
        if kind == "StreamingRelationV2":
            yield Source(shown, shown, number=number)
            continue
        cleans = _option(leaf.dataSource().options(), "cleanSource")
        cleans = "" if cleans.lower() == "off" else cleans
        yield Source(str(leaf.dataSource().className()), shown, cleans, number)


def sources_in(writer: DataStreamWriter | None) -> list[Source] | None:
    """A query's streaming sources, in Spark's order; None where they are not known."""
    return None if writer is None else list(sources_of(writer._df))


def check_sources(df: DataFrame, also: Collection[str] = ()) -> None:
    """Refuse a frame with a source that may not repeat a batch it was told is done.

    Args:
        also: names of sources that the user vouches for.

    Raises:
        UnsupportedQueryError: naming the source.
    """
    for source in sources_of(df):
        name = source.name
        if source.cleans:
            raise UnsupportedQueryError(
                f"With asynchronous commits a batch may have to be repeated, and the source "
                f"{source.shown} moves or deletes its files (cleanSource={source.cleans}).",
                todo=f"Leave cleanSource out, or: {_TODO}",
            )
        if name not in REPEATABLE_SOURCES and name not in also:
            raise UnsupportedQueryError(
                f"With asynchronous commits a batch may have to be repeated after Spark committed "
                f"it, and of the source {name!r} it is not known whether it can.",
                todo=f"{_TODO} Or name it in spark.statebackend.repeatableSources, if it gives "
                f"the same rows for the same offsets although it was told that they are done.",
            )


def _option(options: Any, name: str) -> str:
    pairs = options.iterator()
    while pairs.hasNext():
        pair = pairs.next()
        if str(pair._1()).lower() == name.lower():
            return str(pair._2())
    return ""


def check_sink(query: StreamingQuery, *, checked: bool) -> bool:
    """Refuse a sink that skips a batch which it has, or may do so unnoticed.

    Args:
        checked: whether a function was wrapped in ``backend.checked()``.

    Returns:
        whether each batch must be checked, see `BatchChecks`.

    Raises:
        UnsupportedQueryError: naming the sink.
    """
    stream: Any = query._jsq.streamingQuery()
    kind = str(stream.sink().getClass().getSimpleName())
    if kind in _SKIPPING_SINKS:
        raise UnsupportedQueryError(
            f"With asynchronous commits a batch may have to be repeated, and the sink {kind} skips "
            f"a batch that it has written already, so the state would miss that batch.",
            todo=_TODO,
        )
    if kind == "ForeachBatchSink" and not checked:
        raise UnsupportedQueryError(
            "With asynchronous commits a batch may have to be repeated, and a foreachBatch "
            "function that skips a batch which it has seen would leave the state without it.",
            todo="Wrap the function in backend.checked(), and have it evaluate its frame (for "
            f"instance into a noop writer) also where it then skips the batch. Or: {_TODO}",
        )
    return kind == "ForeachBatchSink"
