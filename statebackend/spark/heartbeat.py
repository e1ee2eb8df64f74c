"""Batches without data: a source that has something new whenever a timer is due.

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
from collections.abc import Iterator, Sequence
from typing import Any, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from statebackend import system

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
except ImportError:  # before 4.2: such a source is asked once, when the query starts
    SupportsTriggerAvailableNow = object  # type: ignore[assignment,misc]

__all__ = ["SOURCE_NAME", "Heartbeat", "HeartbeatFile", "wanted_epoch"]

SOURCE_NAME: Final = "statebackend_heartbeat"
_OFFSET: Final = "epoch"


def wanted_epoch(text: bytes, start: int, now_ms: int) -> int:
    """The epoch that is asked for now, or ``start``.

    Args:
        text: what the file says: ``epoch`` (the last one that is over), ``event_due``, and
            ``processing_due_ms`` or null.
        start: the epoch that was asked for last.
    """
    try:
        said = json.loads(text)
        epoch, due_ms = int(said["epoch"]) + 1, said["processing_due_ms"]
        due = bool(said["event_due"]) or (due_ms is not None and due_ms <= now_ms)
    except (ValueError, KeyError, TypeError):
        return start  # not written yet
    return epoch if due and epoch > start else start


class HeartbeatFile:
    """What the driver says to its query's heartbeat; ``path`` is on the driver's host."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "heartbeat.json")

    def say(self, epoch: int, *, event_due: bool, processing_due_ms: int | None) -> None:
        """``epoch`` is over, and this is due next.

        Raises:
            OSError: the driver's temporary directory cannot be written.
        """
        said = {"epoch": epoch, "event_due": event_due, "processing_due_ms": processing_due_ms}
        draft = f"{self.path}.{system.new_id()}"
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(said, file)
        os.replace(draft, self.path)

    def remove(self) -> None:
        """The query has ended; may be called twice."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)


class _Reader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, path: str) -> None:
        self._path = path
        self._last = -1

    def prepareForTriggerAvailableNow(self) -> None:
        """What is due at the end is due because of what the query did: nothing to fix now."""

    def initialOffset(self) -> dict[str, int]:
        return {_OFFSET: -1}

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, int]:
        if start is not None:
            self._last = max(self._last, int(start[_OFFSET]))
        try:
            with open(self._path, "rb") as file:
                text = file.read()
        except OSError:
            text = b""
        self._last = wanted_epoch(text, self._last, system.wall_ms())
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
