"""Parquet files, read from any row of a row group on.

A position is the row group to go on with and the rows of it that were given. A split of a range of
bytes has the row groups that start in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import types as T

from statebackend.continuous.files.folder_access import Place
from statebackend.continuous.sources.source import Json, SplitReader
from statebackend.errors import ConnectorError, DamagedInputError, ValueMismatchError
from statebackend.schema.conform import conform
from statebackend.schema.types import arrow_schema

__all__ = ["RowGroupReader"]

BATCH_ROWS: Final = 1 << 16
_TODO: Final = "Write the file anew or take it away, or declare the schema as the file has it."


class RowGroupReader(SplitReader):
    """The row groups of one range of a file."""

    def __init__(
        self,
        place: Place,
        name: str,
        schema: T.StructType,
        *,
        start: int,
        end: int,
        position: Json | None,
    ) -> None:
        """Open: the footer is read.

        Raises:
            ConnectorError: the file cannot be read.
            DamagedInputError: it is no Parquet file, or has not the schema's columns.
        """
        self._place = place
        self._name = name
        self._spark = schema
        self._arrow = arrow_schema(schema)
        self._rest: pa.RecordBatch | None = None
        self._batches: Iterator[Any] | None = None
        self._handle = place.open(name)
        try:
            self._file = self._try(
                lambda: pq.ParquetFile(
                    self._handle,
                    pre_buffer=not place.local,
                    page_checksum_verification=True,
                    coerce_int96_timestamp_unit="us",
                )
            )
            self._groups = self._try(lambda: self._groups_of(start, end))
            self._columns = self._try(self._columns_of)
        except BaseException:
            self.close()
            raise
        first = self._groups[0] if self._groups else 0
        self._group = first if position is None else int(position["group"])
        self._row = 0 if position is None else int(position["row"])

    def _groups_of(self, start: int, end: int) -> range:
        metadata = self._file.metadata
        offsets = []
        for group in range(metadata.num_row_groups):
            column = metadata.row_group(group).column(0)
            dictionary = column.dictionary_page_offset
            offsets.append(min(column.data_page_offset, dictionary or column.data_page_offset))
        inside = [group for group, offset in enumerate(offsets) if start <= offset < end]
        return range(inside[0], inside[-1] + 1) if inside else range(0)

    def _columns_of(self) -> list[str]:
        """The schema's columns that the file has."""
        names = self._file.schema_arrow.names
        missing = [f.name for f in self._spark if f.name not in names and not f.nullable]
        if missing:
            raise ValueError(f"it has no column {missing[0]!r}")
        # Written as INT96, a timestamp is in UTC although Arrow cannot know it.
        physical = [self._file.schema.column(i) for i in range(len(self._file.schema.names))]
        self._int96 = {found.path for found in physical if found.physical_type == "INT96"}
        return [name for name in self._arrow.names if name in names]

    @property
    def position(self) -> Json:
        """The next row group, and the rows of it that were given."""
        return {"group": self._group, "row": self._row}

    @property
    def ended(self) -> bool:
        """Whether all row groups of the range were given."""
        return self._group not in self._groups

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """Rows of one row group."""
        while not self.ended:
            if self._rest is None:
                self._rest = self._next()
            if self._rest is None:
                self._group, self._row, self._batches = self._group + 1, 0, None
                continue
            batch, self._rest = self._rest[:max_rows], self._rest[max_rows:]
            self._rest = self._rest if self._rest.num_rows else None
            self._row += batch.num_rows
            if self._row == self._file.metadata.row_group(self._group).num_rows:
                self._group, self._row, self._batches = self._group + 1, 0, None
            return batch
        return None

    def _next(self) -> pa.RecordBatch | None:
        """Rows of the row group, from the position on; None: there are none left."""
        skip = 0
        if self._batches is None:
            skip = self._row
            self._batches = self._try(
                lambda: self._file.iter_batches(
                    BATCH_ROWS,
                    row_groups=[self._group],
                    columns=self._columns,
                    use_threads=False,
                )
            )
        batches = self._batches
        while True:
            batch = self._try(lambda: next(batches, None))
            if batch is None:
                return None
            if batch.num_rows > skip:
                return self._conformed(batch.slice(skip))
            skip -= batch.num_rows

    def _conformed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        def make() -> pa.RecordBatch:
            columns = []
            for field in self._spark:
                if field.name not in self._columns:
                    columns.append(pa.nulls(batch.num_rows, self._arrow.field(field.name).type))
                    continue
                column = batch.column(field.name)
                if field.name in self._int96 and isinstance(field.dataType, T.TimestampType):
                    column = column.cast(pa.timestamp("us", "UTC"))
                columns.append(conform(column, field))
            whole = pa.RecordBatch.from_arrays(columns, schema=self._arrow)
            whole.validate(full=True)  # Parquet's reader takes any bytes for text
            return whole

        return self._try(make)

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except ValueMismatchError as error:
            raise self._damaged(error.what) from error
        except OSError as error:
            if error.errno:  # Arrow's own have none
                raise ConnectorError(
                    f"Reading {self._place.shown(self._name)} failed: {error}.",
                    todo="Check that the place is there, and that this user may read it.",
                ) from error
            raise self._damaged(str(error)) from error
        except (pa.ArrowException, ValueError, OverflowError, EOFError) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, said: str) -> DamagedInputError:
        return DamagedInputError(
            f"{self._place.shown(self._name)} cannot be read near row {getattr(self, '_row', 0)} "
            f"of row group {getattr(self, '_group', 0)}: {said.rstrip('.')}.",
            todo=_TODO,
        )

    def close(self) -> None:
        """Close the file."""
        self._batches = self._rest = None
        self._handle.close()
