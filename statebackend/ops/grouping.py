"""Grouping an epoch's rows by key, in columns.

Keys are ordered by their encoded form, key group first: the order in which RocksDB holds them, and
the same in every attempt. Rows of one key keep the order in which they arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

__all__ = ["Groups", "group_rows"]


@dataclass(frozen=True)
class Groups:
    """An epoch's rows, sorted by key.

    ``keys[i]`` (encoded) and ``key_groups[i]`` (2 bytes, big-endian) belong to the rows
    ``starts[i]:starts[i + 1]`` of ``rows``.
    """

    rows: pa.Table
    keys: list[bytes]
    key_groups: list[bytes]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)


def group_rows(table: pa.Table, encoded: pa.Array, key_groups: NDArray[Any]) -> Groups:
    """Sort ``table`` by key.

    Args:
        table: n rows.
        encoded: binary, n encoded keys.
        key_groups: uint16, the key group of each row.
    """
    if table.num_rows == 0:
        return Groups(table, [], [], np.zeros(1, dtype=np.int64))
    group_bytes = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(2), len(key_groups), [None, pa.py_buffer(key_groups.astype(">u2"))]
    ).cast(pa.binary())
    full = pc.binary_join_element_wise(group_bytes, encoded, pa.scalar(b"", pa.binary()))
    coded = full.dictionary_encode()
    distinct = coded.dictionary
    order = pc.sort_indices(distinct)
    rank = np.empty(len(distinct), dtype=np.int32)
    rank[order.to_numpy()] = np.arange(len(distinct), dtype=np.int32)
    codes = rank[coded.indices.to_numpy()]
    row_order = np.argsort(codes, kind="stable")
    starts = np.zeros(len(distinct) + 1, dtype=np.int64)
    np.cumsum(np.bincount(codes, minlength=len(distinct)), out=starts[1:])
    keys: Sequence[bytes] = distinct.take(order).to_pylist()
    return Groups(
        rows=table.take(pa.array(row_order)),
        keys=[key[2:] for key in keys],
        key_groups=[key[:2] for key in keys],
        starts=starts,
    )
