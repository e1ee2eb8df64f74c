"""What a source is: splits that are found on the driver and read, from any position, by subtasks.

A *split* is a part of the input with an order of its own: a file, a partition, a stream. A
*position* says how far a split was read; it is JSON, and the split read from it gives the rest:
the same rows in the same order, however often. Both are state of the job: a split that is being
read is an element of its subtask's list state, one that is not is in the assigner's
(`statebackend.continuous.sources.split_assigner`), and a checkpoint holds every split exactly once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import types as T

from statebackend.errors import SchemaError, SettingError
from statebackend.schema.types import as_schema, check_value_schema
from statebackend.spark_forms import Duration, parsed_seconds, seconds_of

__all__ = [
    "Discovery",
    "Json",
    "Source",
    "Split",
    "SplitReader",
]

Json = dict[str, Any]  # what json.dumps takes, keys texts


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the input with an order of its own: a file, a partition, a stream.

    Attributes:
        id: never another split's in the life of the job.
        data: what `Source.open` needs to find it; JSON, small, no secrets.
    """

    id: str
    data: Json = {}


@dataclass(frozen=True)
class Discovery:
    """What `Source.discover` returns: new splits, and what to remember.

    Attributes:
        splits: those that no earlier discovery gave, in the order to read them in.
        state: goes into the next discovery; JSON.
        done: whether there is nothing more to discover, ever.
    """

    splits: tuple[Split, ...]
    state: Json
    done: bool


class SplitReader(ABC):
    """Reads one split, in one thread; what `Source.open` returns."""

    @abstractmethod
    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """The next rows, in the source's schema; None: none now (look at `ended`).

        Does not wait for rows to come. At most ``max_rows`` rows.

        Raises:
            ConnectorError: what is read from cannot be reached.
            DamagedInputError: it holds what the schema cannot take.
            NotReplayableError: what is to be read is no longer there, or was changed.
        """

    @property
    @abstractmethod
    def position(self) -> Json:
        """Where to go on after all that `read` gave; a new object each time."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether all of the split was given."""

    @property
    def lag(self) -> int | None:
        """How many rows there are that were not read yet; None: it is not known."""
        return None

    def close(self) -> None:
        """Let go of files and connections. A second call does nothing."""
        return


class Source(ABC):
    """An input of a continuous job; subclass it for one of your own.

    It is shipped to the subtasks, so it must be picklable.

    Attributes:
        schema: of its rows.
        bounded: whether it ends. A job of bounded sources only ends with a last checkpoint.
        splits_end: whether its splits end, so that a subtask reads one, then asks for another.
            Otherwise a subtask keeps its fair share of them and reads them by turns.
        event_time: the column that says when a row happened; None: its rows have no watermark.
        watermark_delay_ms: how far the watermark stays behind the latest row of a split.
        idle_after_s: a split without rows for so long holds the watermark back no longer.
    """

    splits_end: bool = True

    def __init__(
        self,
        schema: T.DataType | str,
        *,
        bounded: bool,
        event_time: str | None = None,
        watermark_delay: str | timedelta = "0 seconds",
        idle_after_s: Duration | None = None,
    ) -> None:
        """Set what all sources have.

        Args:
            schema: of the rows: a `StructType` or Spark DDL.
            bounded: whether the source ends.
            event_time: the column that says when a row happened; None: there is no watermark.
            watermark_delay: how late rows may come: "10 seconds", or a timedelta.
            idle_after_s: a split without rows for so long no longer holds the watermark back; a
                number of seconds, or "1 minute".

        Raises:
            SchemaError: no valid schema, or no such column of timestamps in it.
            SettingError: a delay or an idle time that is none.
        """
        self.schema: T.StructType = as_schema(schema)
        check_value_schema(self.schema)
        self.bounded = bounded
        self.event_time = event_time
        self.watermark_delay_ms = _delay_ms(watermark_delay)
        self.idle_after_s = None
        if idle_after_s is not None:
            self.idle_after_s = seconds_of("idle_after_s", idle_after_s)
        if self.idle_after_s is not None and not self.idle_after_s > 0:
            raise SettingError(
                f"idle_after_s={idle_after_s!r} is no time.", todo="Give seconds above 0."
            )
        if event_time is not None:
            _check_event_time(self.schema, event_time)

    @abstractmethod
    def discover(self, state: Json | None) -> Discovery:
        """Look for splits; on the driver, now and then until it says that it is done.

        Args:
            state: that of the discovery before; None for the first.

        Raises:
            ConnectorError: the input cannot be reached.
        """

    @abstractmethod
    def open(self, split: Split, position: Json | None) -> SplitReader:
        """Read a split from a position (None: from its start); in the subtask that was given it.

        Raises:
            ConnectorError: it cannot be reached.
            NotReplayableError: it is gone, or is not what it was when it was discovered.
            DamagedInputError: it cannot be read.
        """


def _check_event_time(schema: T.StructType, column: str) -> None:
    types = {field.name: field.dataType for field in schema}
    if not isinstance(types.get(column), T.TimestampType | T.TimestampNTZType):
        raise SchemaError(
            f"The event time {column!r} is no column of timestamps of the source.",
            todo=f"Name one of its columns ({', '.join(types)}), declared TIMESTAMP.",
        )


def _delay_ms(delay: str | timedelta) -> int:
    found = delay.total_seconds() if isinstance(delay, timedelta) else None
    if isinstance(delay, str):
        found = parsed_seconds(delay)
    if found is None or found < 0:
        raise SettingError(
            f"The watermark delay {delay!r} is no time.",
            todo='Write it as "10 seconds", or pass a timedelta that is not negative.',
        )
    return round(found * 1000)
