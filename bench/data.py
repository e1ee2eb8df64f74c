"""Input, written before anything is measured: parquet files, the same ones for every side.

A batch is ``FILES_PER_BATCH`` files; an empty batch has files without rows.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["FILES_PER_BATCH", "INPUT_SCHEMA", "shuffled", "write_batch", "write_batches"]

FILES_PER_BATCH = 2  # one map task for each of the two cores
INPUT_SCHEMA = "k bigint, v bigint"
_ARROW = pa.schema([("k", pa.int64()), ("v", pa.int64())])
_FIRST_MTIME_S = 1_700_000_000


def write_batch(folder: Path, batch: int, keys: Any, values: Any) -> None:
    """The files of one batch, in the order of its rows."""
    pieces = (np.array_split(of, FILES_PER_BATCH) for of in (keys, values))
    for part, columns in enumerate(zip(*pieces, strict=True)):
        index = batch * FILES_PER_BATCH + part
        path = folder / f"{index:05d}.parquet"
        pq.write_table(pa.table(list(columns), schema=_ARROW), path)
        # Spark takes files by their time: one second apart, so that no two are equal.
        mtime_s = _FIRST_MTIME_S + index
        os.utime(path, (mtime_s, mtime_s))


def shuffled(random: np.random.Generator, keys: int, rows: int) -> Any:
    """Every key equally often, in any order: ``rows`` of them, a multiple of ``keys``."""
    if rows % keys:
        raise ValueError(f"{rows} rows a batch are no multiple of {keys} keys")
    order = np.tile(np.arange(keys, dtype=np.int64), rows // keys)
    random.shuffle(order)
    return order


def write_batches(folder: Path, *, keys: int, rows: int, full: int, seed: int = 42) -> Path:
    """``full`` batches of ``rows`` rows over ``keys`` keys; the folder."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    for batch in range(full):
        order = shuffled(random, keys, rows)
        write_batch(folder, batch, order, np.arange(len(order), dtype=np.int64) + batch)
    return folder
