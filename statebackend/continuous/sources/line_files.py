"""Files of lines: JSON and CSV, one row a line, read from any line on.

A position is the offset of the line to go on with, in bytes. A split of a range of bytes has the
lines that *start* in it, so the splits of a file have each line once, whoever reads them.
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.json as pj
from numpy.typing import NDArray
from pyspark.sql import types as T

from statebackend.continuous.files.folder_access import Place
from statebackend.continuous.sources.source import Json, SplitReader
from statebackend.errors import DamagedInputError, ValueMismatchError
from statebackend.schema.conform import conform
from statebackend.schema.types import arrow_schema

__all__ = ["CsvLines", "JsonLines", "LineReader", "Lines"]

BLOCK_BYTES: Final = 1 << 20
LINE_LIMIT_BYTES: Final = 64 << 20
_R = TypeVar("_R")
_NEWLINE: Final = 10
_RETURN: Final = 13
_QUOTE: Final = 34


class Lines(ABC):
    """How lines become rows of a schema."""

    def __init__(self, schema: T.StructType) -> None:
        self._spark = schema
        self._arrow = arrow_schema(schema)

    @property
    def blank_is_row(self) -> bool:
        """Whether an empty line is a row; else it is passed over."""
        return False

    def begin(self, first: bytes) -> bool:
        """Look at a file's first line; whether it is a row.

        Raises:
            ValueError: it does not go with the schema; the text says why.
        """
        return True

    @abstractmethod
    def table(self, lines: bytes) -> pa.Table:
        """The rows of whole lines, with what columns there are, in types that conform.

        Raises:
            ValueError, ArrowException: they are not of the format.
        """

    def batch(self, lines: bytes, count: int) -> pa.RecordBatch:
        """The rows of lines, ``count`` of which are rows."""
        table = self.table(lines)
        if len(table) != count:
            raise ValueError(f"{count} lines hold {len(table)} rows; each must hold one")
        columns = []
        for field in self._spark:
            if field.name in table.column_names:
                column = table.column(field.name)
                if isinstance(field.dataType, T.DateType):
                    column = column.cast(pa.date32())
            else:
                column = pa.nulls(len(table), self._arrow.field(field.name).type)
            columns.append(conform(column, field))
        batch = pa.RecordBatch.from_arrays(columns, schema=self._arrow)
        batch.validate(full=True)  # Arrow's JSON reader takes any bytes for text
        return batch


class JsonLines(Lines):
    """One JSON object a line. Fields that the schema does not name are left out."""

    def __init__(self, schema: T.StructType) -> None:
        super().__init__(schema)
        # Arrow reads dates from numbers only.
        self._read = pa.schema(
            [
                pa.field(f.name, pa.string() if f.type == pa.date32() else f.type)
                for f in self._arrow
            ]
        )

    def table(self, lines: bytes) -> pa.Table:
        """By Arrow's reader."""
        return pj.read_json(
            pa.BufferReader(lines),  # a file of Python's would take its lock for each read
            read_options=pj.ReadOptions(use_threads=False, block_size=len(lines) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=self._read,
                newlines_in_values=False,
                unexpected_field_behavior="ignore",
            ),
        )


class CsvLines(Lines):
    """Values between commas, as RFC 4180 has them, but none with a line break in it.

    An empty value without quotes is null.
    """

    def __init__(self, schema: T.StructType, *, header: bool) -> None:
        super().__init__(schema)
        self._header = header
        self._names = list(self._arrow.names)

    @property
    def blank_is_row(self) -> bool:
        """In a file of one column it is that column's null."""
        return len(self._names) == 1

    def begin(self, first: bytes) -> bool:
        """A header is no row; it names the columns."""
        if not self._header:
            return True
        text = first.decode("utf-8-sig").rstrip("\r\n")
        names = next(csv.reader([text], strict=True), [])
        if len(set(names)) != len(names):
            raise ValueError(f"its header names a column twice: {text[:200]!r}")
        missing = [f.name for f in self._arrow if f.name not in names and not f.nullable]
        if missing or not set(names) & set(self._arrow.names):
            lacks = missing[0] if missing else self._arrow.names[0]
            raise ValueError(f"its header has no column {lacks!r}: {text[:200]!r}")
        self._names = names
        return False

    def table(self, lines: bytes) -> pa.Table:
        """By Arrow's reader."""
        _refuse_open_quotes(lines)
        kept = [name for name in self._names if name in self._arrow.names]
        return pc.read_csv(
            pa.BufferReader(lines),
            read_options=pc.ReadOptions(
                use_threads=False, block_size=len(lines) + 1, column_names=self._names
            ),
            parse_options=pc.ParseOptions(ignore_empty_lines=not self.blank_is_row),
            convert_options=pc.ConvertOptions(
                column_types={name: self._arrow.field(name).type for name in kept},
                include_columns=kept,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                true_values=["true", "True", "TRUE"],
                false_values=["false", "False", "FALSE"],
            ),
        )


def _refuse_open_quotes(lines: bytes) -> None:
    # Arrow goes on with the next line, or closes the quotes itself at the end of what it is given.
    data = np.frombuffer(lines, np.uint8)
    quotes = np.flatnonzero(data == _QUOTE)
    if len(quotes):
        ends = np.flatnonzero(data == _NEWLINE)
        if np.any(np.searchsorted(quotes, ends) % 2) or len(quotes) % 2:
            raise ValueError("quotes are open at the end of a line")


class LineReader(SplitReader):
    """The lines of one range of a file."""

    def __init__(
        self,
        place: Place,
        name: str,
        lines: Lines,
        *,
        start: int,
        end: int,
        offset: int | None,
    ) -> None:
        """Open.

        Args:
            start, end: the lines that start in this range of bytes.
            offset: of the line to go on with; None: the first.

        Raises:
            ConnectorError: the file cannot be read.
            DamagedInputError: its header does not go with the schema.
        """
        self._place = place
        self._name = name
        self._lines = lines
        self._end = end
        self._buffer = b""
        self._ends: NDArray[np.int64] = np.empty(0, np.int64)  # one past each line, in the buffer
        self._taken = 0  # bytes of the buffer
        self._eof = False
        self._file = place.open(name)
        try:
            self._offset = self._begin(start) if offset is None else offset
            if offset is not None:
                self._first_line()
            self._seek(self._offset)
        except BaseException:
            self.close()
            raise

    def _begin(self, start: int) -> int:
        """The offset of the first line that is a row of this range."""
        header_end = self._first_line()
        if start == 0:
            return header_end
        # The line that goes on at `start` is of the range before, unless it starts right there.
        self._seek(start - 1)
        return max(start - 1 + len(self._line()), header_end)

    def _first_line(self) -> int:
        first = self._line()
        return 0 if self._checked(lambda: self._lines.begin(first), 0, len(first)) else len(first)

    def _seek(self, offset: int) -> None:
        with self._place.errors("reading", self._name):
            self._file.seek(offset)

    def _line(self) -> bytes:
        with self._place.errors("reading", self._name):
            found = self._file.readline(LINE_LIMIT_BYTES + 1)
        self._check_length(len(found))
        return found

    @property
    def position(self) -> Json:
        """The offset of the next line."""
        return {"offset": self._offset}

    @property
    def ended(self) -> bool:
        """Whether no further line starts in the range."""
        return self._offset >= self._end or (self._eof and self._taken == len(self._buffer))

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """As many lines as there are in a block, at most."""
        while not self.ended:
            taken = self._take(max_rows)
            if taken is None:
                continue
            lines, count = taken
            batch = None
            if count:
                batch = self._checked(
                    partial(self._lines.batch, lines, count),
                    self._offset,
                    len(lines),
                )
            self._taken += len(lines)
            self._offset += len(lines)
            if batch is not None:
                return batch
        return None

    def _take(self, max_rows: int) -> tuple[bytes, int] | None:
        """Whole lines, and how many of them are rows; None: more was read, ask again."""
        first = int(np.searchsorted(self._ends, self._taken, side="right"))
        ends = self._ends[first : first + max_rows]
        if not len(ends):
            if not self._eof:
                self._fill()
                return None
            ends = np.array([len(self._buffer)], np.int64)  # the last line lacks its end
        starts = np.concatenate(([self._taken], ends[:-1]))
        inside = int(np.searchsorted(starts, self._taken + self._end - self._offset))
        starts, ends = starts[:inside], ends[:inside]
        lines = self._buffer[self._taken : int(ends[-1])]
        count = len(starts)
        if not self._lines.blank_is_row:
            data = np.frombuffer(self._buffer, np.uint8)
            second = data[np.minimum(starts + 1, len(data) - 1)]
            blank = (data[starts] == _NEWLINE) | (data[starts] == _RETURN) & (second == _NEWLINE)
            count -= int(np.count_nonzero(blank))
        return lines, count

    def _fill(self) -> None:
        with self._place.errors("reading", self._name):
            block = self._file.read(BLOCK_BYTES)
        self._eof = not block
        self._buffer = self._buffer[self._taken :] + block
        self._taken = 0
        found = np.flatnonzero(np.frombuffer(self._buffer, np.uint8) == _NEWLINE) + 1
        self._ends = found.astype(np.int64)
        if not len(found):
            self._check_length(len(self._buffer))

    def _check_length(self, length: int) -> None:
        if length > LINE_LIMIT_BYTES:
            raise DamagedInputError(
                f"{self._place.shown(self._name)} has a line of more than {LINE_LIMIT_BYTES >> 20} "
                "MiB.",
                todo="Check that it is a file of lines; break it up if it is.",
            )

    def _checked(self, call: Callable[[], _R], offset: int, length: int) -> _R:
        try:
            return call()
        except (ValueError, pa.ArrowException, csv.Error, ValueMismatchError) as error:
            said = error.what if isinstance(error, ValueMismatchError) else str(error)
            raise DamagedInputError(
                f"{self._place.shown(self._name)} cannot be read between bytes {offset} and "
                f"{offset + length}: {said.rstrip('.')}.",
                todo="Mend the file or take it away, or declare the schema as the file has it.",
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()
