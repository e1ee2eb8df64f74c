"""The log that Spark's file sink keeps beside its files, where a query begins with a savepoint.

The sink writes a file for each batch into `_spark_metadata`, takes in only batches after the last
one that is there, and every tenth time (`spark.sql.streaming.fileSink.log.compactInterval`) puts
the log together, in `<n>.compact`. Readers of the folder go by it. Tried on Spark 4.3:

* in a new folder a query that goes on with batch n > 0 fails where the log is put together for the
  first time, and the folder cannot be read: batches that should be there are not;
* one `<n>.compact` to begin with decides how often it is put together from then on: the least
  divisor of n + 1 that is 10 or more. That is each batch for n = 0, every 1,009th for n = 1008.

So the log begins as if there had been batches before, without files: up to the one that the
savepoint is of and, so that the interval stays what it is, from the last but one at which it would
have been put together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from pyspark.errors import PySparkException

from statebackend.errors import CheckpointLocationError
from statebackend.spark.start.writer_inspection import format_of, table_of

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from statebackend.spark.start.checkpoint_location import CheckpointLocation

__all__ = ["Sink", "SinkLog", "batches_before", "sink_log", "sink_of"]

_INTERVAL_KEY: Final = "spark.sql.streaming.fileSink.log.compactInterval"
_FILE_SINKS: Final = ("parquet", "json", "csv", "text", "orc", "avro", "xml")
_FOLDER: Final = "_spark_metadata"
_COMPACT: Final = ".compact"
_EMPTY: Final = b"v1"


class Folder(Protocol):
    """Where a sink writes; see `checkpoint_location.CheckpointLocation`."""

    path: str

    def files(self, folder: str) -> list[str]: ...
    def chunks(self, name: str) -> Iterator[bytes]: ...
    def write(self, name: str, pieces: Iterator[bytes]) -> None: ...


def batches_before(epoch: int, interval: int) -> list[str]:
    """Names of log files without which a sink cannot go on after a batch; the batch's own last."""
    together = (epoch + 1) // interval * interval - 1  # the last one at which it was; -1: none
    names = [f"{n}{_COMPACT}" for n in (together - interval, together) if n >= 0]
    return names + [str(n) for n in range(together + 1, epoch + 1)]


class Sink(NamedTuple):
    """Where a query writes: a format of Spark's, and its folder where that is known."""

    format: str
    path: str | None


def sink_of(writer: DataStreamWriter, path: str | None) -> Sink:
    """A writer's sink: a table's own, where it is started with ``toTable()`` of one that is there.

    Args:
        path: the writer's option of that name.
    """
    table = table_of(writer)
    if not table:
        return Sink(format_of(writer), path)
    session: Any = writer._df.sparkSession
    try:
        rows = session.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
    except PySparkException:  # it is made at the start
        return Sink(format_of(writer), path)
    said = {str(row[0]): row[1] for row in rows}
    return Sink(said.get("Provider") or format_of(writer), said.get("Location") or path)


def sink_log(writer: DataStreamWriter, location: CheckpointLocation, sink: Sink) -> SinkLog | None:
    """The log that a sink keeps; None where it keeps none, or it is not known where.

    Args:
        location: by which the sink's folder is reached.
    """
    if sink.path is None or sink.format.lower() not in _FILE_SINKS:
        return None
    interval = writer._df.sparkSession.conf.get(_INTERVAL_KEY, "10")
    return SinkLog(location.at(sink.path), int(interval or "10"))


class SinkLog:
    """A file sink's log.

    Args:
        interval: at how many batches it is put together.
    """

    def __init__(self, folder: Folder, interval: int) -> None:
        self._folder, self._interval = folder, max(1, interval)

    def check(self, epoch: int) -> None:
        """Whether a query that goes on after a batch can write here.

        Raises:
            CheckpointLocationError: there are batches already which it would leave out, or too few.
        """
        batches = self._batches()
        last = max(batches.values(), default=epoch)
        if last > epoch:
            raise CheckpointLocationError(
                f"The sink's folder {self._folder.path} has batches up to {last} already, and the "
                f"query begins after batch {epoch}: the sink would leave out what it puts out up "
                f"to there.",
                todo="Give the query a folder of its own to write into.",
            )
        if last < epoch and not self._is_ours(batches, epoch):
            raise CheckpointLocationError(
                f"The sink's folder {self._folder.path} has batches up to {last}, and the query "
                f"begins after batch {epoch}: Spark fails where batches of a sink are missing.",
                todo="Give the query a folder of its own to write into.",
            )

    def begin(self, epoch: int) -> None:
        """Have the log end with a batch; may be cut anywhere, and repeated."""
        if epoch not in self._batches().values():
            for name in batches_before(epoch, self._interval):
                self._folder.write(f"{_FOLDER}/{name}", iter([_EMPTY]))

    def _batches(self) -> dict[str, int]:
        """What is there, by name."""
        names = [name.rpartition("/")[2] for name in self._folder.files(_FOLDER)]
        numbers = {name: name.removesuffix(_COMPACT) for name in names}
        return {name: int(number) for name, number in numbers.items() if number.isdigit()}

    def _is_ours(self, batches: dict[str, int], epoch: int) -> bool:
        """Whether these are from a beginning that was cut."""
        if not batches.keys() <= set(batches_before(epoch, self._interval)):
            return False
        return all(b"".join(self._folder.chunks(f"{_FOLDER}/{one}")) == _EMPTY for one in batches)
