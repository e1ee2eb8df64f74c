"""Rows into a file of one of the formats, as they come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import IO, Final

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from statebackend.continuous.sinks.json_rows import json_lines

__all__ = ["Encoder", "encoder_for"]

JSON_ROWS: Final = 10_000


class Encoder(ABC):
    """Writes to a handle, which it does not close."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""

    def finish(self) -> None:
        """Write what belongs to the file's end."""
        return


class _Parquet(Encoder):
    def __init__(self, handle: IO[bytes], schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(
            handle, schema, compression="zstd", write_page_checksum=True
        )

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def finish(self) -> None:
        self._writer.close()


class _Json(Encoder):
    def __init__(self, handle: IO[bytes], schema: pa.Schema) -> None:
        self._handle = handle

    def write(self, batch: pa.RecordBatch) -> None:
        for start in range(0, batch.num_rows, JSON_ROWS):
            self._handle.write(json_lines(batch.slice(start, JSON_ROWS)))


class _Csv(Encoder):
    def __init__(self, handle: IO[bytes], schema: pa.Schema) -> None:
        self._writer = pc.CSVWriter(handle, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def finish(self) -> None:
        self._writer.close()


_ENCODERS: Final[dict[str, Callable[[IO[bytes], pa.Schema], Encoder]]] = {
    "parquet": _Parquet,
    "json": _Json,
    "csv": _Csv,
}


def encoder_for(format: str, handle: IO[bytes], schema: pa.Schema) -> Encoder:
    """The encoder of a format that `check_format` took."""
    return _ENCODERS[format](handle, schema)
