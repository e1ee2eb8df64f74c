"""Batches without data: a source that has something new when time has moved without any.

Spark runs a batch when a source has new data. Timers are due without any, so a query with timers
has one source more, which never gives a row: its offset is the epoch that it asks for. Whether one
is due is said by the coordinator, in a small file on the driver's host, after every epoch. Spark
asks the source also at the end of an ``availableNow`` query, so timers that the last data made due
fire before it ends.

This module is imported by the process in which Spark runs the source: it imports little.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from recovery.local.private_folders import own_file_text, own_folder
from statebackend import system
from statebackend.errors import LocalDirError, UnsupportedQueryError
from statebackend.spark.data_sources import registered
from statebackend.threads import THREADS

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
except ImportError:  # before 4.2: such a source is asked once, when the query starts
    SupportsTriggerAvailableNow = object  # type: ignore[assignment,misc]

__all__ = [
    "ASKED_AT_THE_END",
    "SOURCE_NAME",
    "Heartbeat",
    "HeartbeatFile",
    "beating",
    "check_trigger",
    "wanted_epoch",
]

ASKED_AT_THE_END: Final = SupportsTriggerAvailableNow is not object
"""Whether this Spark asks a Python source at the end of an ``availableNow`` query, too."""

SOURCE_NAME: Final = "statebackend_heartbeat"
_OFFSET: Final = "epoch"
_NEVER: Final = -2  # a query that has run nothing says that epoch -1 is over


def check_trigger(trigger: str, *, asked_at_the_end: bool = ASKED_AT_THE_END) -> None:
    """Refuse `availableNow` where timers that the last data makes due would not fire.

    Args:
        trigger: the name of Spark's class, of a query with a time mode or a window.

    Raises:
        UnsupportedQueryError: it is ``availableNow``, and Spark asks a Python source only once.
    """
    if trigger.startswith("AvailableNow") and not asked_at_the_end:
        raise UnsupportedQueryError(
            "The query has an operator with a time mode or a window and the trigger availableNow. "
            "This PySpark asks a Python source once in such a query, so timers and windows that "
            "its data makes due would not fire.",
            todo="Take PySpark 4.2 or later, or trigger(processingTime=...) and stop the query.",
        )


def wanted_epoch(
    text: bytes, start: int, answered: Mapping[str, int], now_ms: int
) -> tuple[int, dict[str, int]]:
    """The epoch that is asked for now (or ``start``), and what was answered last of each query.

    Spark does not tell a source which query it is of. So where several queries run over one frame,
    each runs a batch when one of them wants one; that batch is empty for the others.

    Args:
        text: what the file says of each query by its run: ``epoch`` (the last one that is over),
            ``watermark_moves``, and ``processing_due_ms`` or null.
        start: the epoch that was asked for last. It may lie ahead of what the file says, in a
            checkpoint location that was restored from a copy.
        answered: by run, the epoch after which something was asked for last: once is enough.
    """
    wanted, now_answered = start, dict(answered)
    try:
        said = json.loads(text)
        for run, one in said.items():
            epoch, due_ms = int(one["epoch"]), one["processing_due_ms"]
            due = bool(one["watermark_moves"]) or (due_ms is not None and due_ms <= now_ms)
            if due and epoch > now_answered.get(run, _NEVER):
                wanted, now_answered[run] = max(epoch, wanted, start) + 1, epoch
    except (ValueError, KeyError, TypeError, AttributeError):
        return start, dict(answered)  # not written yet
    return wanted, now_answered


class HeartbeatFile:
    """What the driver says to the heartbeat of a frame's queries; ``path`` is on its host.

    Its folder goes with this object, which whoever runs the queries keeps.
    """

    def __init__(self) -> None:
        self._folder = system.temporary_folder(self)
        self.path = os.path.join(self._folder, "heartbeat.json")
        self._said: dict[str, dict[str, Any]] = {}
        self._ended: set[str] = set()
        self._lock = THREADS.lock()

    def write(
        self, run: str, epoch: int, *, watermark_moves: bool, processing_due_ms: int | None
    ) -> None:
        """``epoch`` is over in a run; a moved watermark, or a timer's time, wants one more.

        Raises:
            OSError: the driver's temporary directory cannot be written.
            LocalDirError: another user has put a folder of that name there.
        """
        with self._lock:
            if run in self._ended:  # an ack that came late
                return
            self._said[run] = {
                "epoch": epoch,
                "watermark_moves": watermark_moves,
                "processing_due_ms": processing_due_ms,
            }
            self._write()

    def remove(self, run: str) -> None:
        """A run has ended; may be called twice."""
        with self._lock:
            self._ended.add(run)
            if self._said.pop(run, None) is None:
                return
            with contextlib.suppress(OSError, LocalDirError):
                if self._said:
                    self._write()
                else:
                    os.unlink(self.path)

    def _write(self) -> None:
        own_folder(Path(self._folder))  # a cleaner of /tmp may have been there
        draft = f"{self.path}.{system.new_id()}"
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(self._said, file)
        os.replace(draft, self.path)


class _Reader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, path: str) -> None:
        self._path = path
        self._last = -1
        self._answered: dict[str, int] = {}

    def prepareForTriggerAvailableNow(self) -> None:
        """What is due at the end is due because of what the query did: nothing to fix now."""

    def initialOffset(self) -> dict[str, int]:
        return {_OFFSET: -1}

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, int]:
        if start is not None:
            self._last = max(self._last, int(start[_OFFSET]))
        text = own_file_text(Path(self._path)) or ""
        self._last, self._answered = wanted_epoch(
            text.encode(), self._last, self._answered, system.wall_ms()
        )
        return {_OFFSET: self._last}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return []

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return iter(())


class Heartbeat(DataSource):
    """The source, as Spark sees it. Option ``path``: of the :class:`HeartbeatFile`."""

    @classmethod
    def name(cls) -> str:
        """For ``readStream.format()``."""
        return SOURCE_NAME

    def schema(self) -> str:
        """Of the rows that it never gives."""
        return "beat int"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        """Runs on the driver."""
        return _Reader(self.options["path"])


def beating(df: DataFrame, file: HeartbeatFile) -> DataFrame:
    """``df`` with one source more, which has no rows."""
    session = df.sparkSession
    registered(session, Heartbeat)
    beats = session.readStream.format(SOURCE_NAME).option("path", file.path).load()
    nothing = [F.lit(None).cast(f.dataType).alias(f"c{i}") for i, f in enumerate(df.schema)]
    return df.union(beats.select(*nothing).where("false"))
