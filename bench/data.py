"""Input, written before anything is measured: parquet files, the same ones for every side.

A batch is ``FILES_PER_BATCH`` files. In a full batch the keys come in a shuffled order, each
equally often, so what the counter must say after every batch is known; an empty batch has files
without rows.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["FILES_PER_BATCH", "INPUT_SCHEMA", "write_batches"]

FILES_PER_BATCH = 2  # one map task for each of the two cores
INPUT_SCHEMA = "k bigint, v bigint"
_ARROW = pa.schema([("k", pa.int64()), ("v", pa.int64())])
_FIRST_MTIME_S = 1_700_000_000


def write_batches(
    folder: Path, *, keys: int, rows: int, full: int, empty: int = 0, seed: int = 42
) -> Path:
    """``full`` batches of ``rows`` rows over ``keys`` keys, then ``empty`` ones; the folder.

    Args:
        rows: a multiple of ``keys``.
    """
    if rows % keys:
        raise ValueError(f"{rows} rows a batch are no multiple of {keys} keys")
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    for batch in range(full + empty):
        order = np.tile(np.arange(keys, dtype=np.int64), rows // keys)
        random.shuffle(order)
        if batch >= full:
            order = order[:0]
        for part, piece in enumerate(np.array_split(order, FILES_PER_BATCH)):
            values = np.arange(len(piece), dtype=np.int64) + batch
            index = batch * FILES_PER_BATCH + part
            path = folder / f"{index:05d}.parquet"
            pq.write_table(pa.table([piece, values], schema=_ARROW), path)
            # Spark takes files by their time: one second apart, so that no two are equal.
            mtime_s = _FIRST_MTIME_S + index
            os.utime(path, (mtime_s, mtime_s))
    return folder
