"""What a continuous job has put out: the visible files of a `FileSink`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

__all__ = ["rows_in"]


def rows_in(folder: Path, last: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every row, whatever epoch it is of (-1 in its place): what is visible is committed.

    Files in the order in which they were written, by the clock of their file system. A key's rows
    are all written by one subtask, and by the next one once that is gone: so they are in order.
    """
    found = [(path.stat().st_mtime_ns, path) for path in folder.glob("part-*.parquet")]
    for _, path in sorted(found):
        for row in pq.read_table(path).to_pylist():
            yield -1, row
