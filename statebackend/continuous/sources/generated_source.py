"""Sources whose rows are computed: row ``i`` of a split is a pure function of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import types as T

from statebackend.continuous.sources.source import Discovery, Json, Source, Split, SplitReader
from statebackend.errors import SettingError
from statebackend.spark_forms import Duration
from statebackend.system import monotonic_s

__all__ = ["GeneratedReader", "GeneratedSource", "RangeSource"]

ENDLESS: Final = 1 << 62
# Rows that are due are given for so long at once: else there would be some each time, and the
# thread that reads would never rest.
_PIECE_S: Final = 0.002
Clock = Callable[[], float]


class GeneratedSource(Source):
    """Rows by number: row ``i`` of split ``s`` is row ``i * splits + s`` of the source.

    A position is the number of rows that a split gave, so it costs nothing to go on from.
    """

    def __init__(
        self,
        schema: T.DataType | str,
        *,
        rows: int | None,
        splits: int,
        rows_per_s: float | None,
        clock: Clock,
        event_time: str | None = None,
        watermark_delay: str | timedelta = "0 seconds",
        idle_after_s: Duration | None = None,
    ) -> None:
        """Check the figures.

        Args:
            rows: of all splits together; None: without end.
            splits: as many subtasks can read at once.
            rows_per_s: of all splits together, counted from when a split is opened; None: as fast
                as they are taken.
            clock: seconds that never go backwards; only looked at where there is a rate.

        Raises:
            SettingError: a figure out of range.
        """
        super().__init__(
            schema,
            bounded=rows is not None,
            event_time=event_time,
            watermark_delay=watermark_delay,
            idle_after_s=idle_after_s,
        )
        if splits < 1 or (rows is not None and rows < 0) or not (rows_per_s or 1) > 0:
            raise SettingError(
                f"No source has rows={rows}, splits={splits} and rows_per_s={rows_per_s}.",
                todo="Give at least one split, and no negative figure.",
            )
        self.rows = rows
        self.splits = splits
        self.splits_end = rows is not None
        self._rows_per_s = rows_per_s
        self._clock = clock

    def discover(self, state: Json | None) -> Discovery:
        """All splits, at once."""
        if state is not None:
            return Discovery((), state, done=True)
        splits = (Split(id=f"{i:05d}", data={"split": i}) for i in range(self.splits))
        return Discovery(tuple(splits), {"splits": self.splits}, done=True)

    def open(self, split: Split, position: Json | None) -> SplitReader:
        """Go on with the row after the position."""
        index = int(split.data["split"])
        rows = ENDLESS if self.rows is None else len(range(index, self.rows, self.splits))
        return GeneratedReader(
            lambda first, count: self.batch(self._numbers(index, first, count)),
            rows=rows,
            given=0 if position is None else int(position["rows"]),
            due=self._pace(index),
            least=1 if self._rows_per_s is None else int(self._rows_per_s / self.splits * _PIECE_S),
        )

    def _numbers(self, index: int, first: int, count: int) -> NDArray[np.int64]:
        return np.arange(first, first + count, dtype=np.int64) * self.splits + index

    def _pace(self, index: int) -> Callable[[int], int] | None:
        """Says, of a split that has given so many rows, how many of them are due by now."""
        rate = self._rows_per_s
        if rate is None:
            return None
        clock, per_split = self._clock, rate / self.splits
        opened: list[tuple[float, int]] = []

        def due(given: int) -> int:
            if not opened:
                opened.append((clock(), given))
            at_s, before = opened[0]
            return int(before + (clock() - at_s) * per_split)

        return due

    @abstractmethod
    def batch(self, numbers: NDArray[np.int64]) -> pa.RecordBatch:
        """The source's rows of these numbers, in the source's schema."""


class GeneratedReader(SplitReader):
    """Counts."""

    def __init__(
        self,
        make: Callable[[int, int], pa.RecordBatch],
        *,
        rows: int,
        given: int,
        due: Callable[[int], int] | None,
        least: int = 1,
    ) -> None:
        """Go on.

        Args:
            make: the rows of the split from one number on, so many.
            rows: of the split.
            given: how many of them were given.
            due: how many of them may have been given by now; None: all.
            least: so many are given together, but for the last ones.
        """
        self._make = make
        self._rows = rows
        self._given = given
        self._due, self._least = due, max(1, least)
        if due is not None:
            due(given)  # the time runs from here

    @property
    def position(self) -> Json:
        """How many rows were given."""
        return {"rows": self._given}

    @property
    def ended(self) -> bool:
        """Whether all were."""
        return self._given >= self._rows

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """Those that are due; what was not taken in time is given as fast as it is taken."""
        upto = min(self._rows, self._given + max_rows)
        if self._due is not None:
            upto = min(upto, self._due(self._given))
        count = upto - self._given
        if count < min(self._least, max_rows, max(1, self._rows - self._given)):
            return None
        batch = self._make(self._given, count)
        self._given = upto
        return batch


class RangeSource(GeneratedSource):
    """A source of whole numbers from 0 on, in a column ``id``: for tests."""

    def __init__(
        self,
        rows: int | None,
        *,
        splits: int = 1,
        rows_per_s: float | None = None,
        clock: Clock = monotonic_s,
    ) -> None:
        """Say how many.

        Args:
            rows: of all splits together; None: without end.
            splits: as many subtasks can read at once.
            rows_per_s: of all splits together; None: as fast as they are taken.
            clock: seconds that never go backwards.

        Raises:
            SettingError: a figure out of range.
        """
        super().__init__(
            "id BIGINT NOT NULL", rows=rows, splits=splits, rows_per_s=rows_per_s, clock=clock
        )

    def batch(self, numbers: NDArray[np.int64]) -> pa.RecordBatch:
        """The numbers themselves."""
        schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
        return pa.RecordBatch.from_arrays([pa.array(numbers)], schema=schema)
