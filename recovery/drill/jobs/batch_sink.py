"""The sink of a drill: one Parquet file for each batch, replaced if the batch is repeated.

The file is named by Spark's batch id, which is all that makes the sink exactly-once: a batch that
runs again, in the same driver or in another, leaves one file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["rows_in", "schema_of", "writer"]


def writer(folder: Path) -> Callable[[DataFrame, int], None]:
    """A function for `foreachBatch` that keeps its batches below a folder."""

    def write(frame: DataFrame, batch: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{batch:010}.{os.getpid()}"
        pq.write_table(frame.toArrow(), draft)
        draft.replace(folder / f"{batch:010}.parquet")

    return write


def rows_in(folder: Path, last: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of the batches up to the last committed one, in order, with their batch."""
    for path in sorted(folder.glob("*.parquet")):
        batch = int(path.stem)
        if batch <= last:
            for row in pq.read_table(path).to_pylist():
                yield batch, row


def schema_of(folder: Path) -> pa.Schema | None:
    """The types of the output's columns; None: there is no output."""
    path = next(iter(sorted(folder.glob("*.parquet"))), None)
    return None if path is None else pq.read_schema(path)
