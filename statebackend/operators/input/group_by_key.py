"""Grouping an epoch's rows by key, in columns.

Keys are ordered by their encoded form, key group first: the order in which RocksDB holds them, and
the same in every attempt. Rows of one key keep the order in which they arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from statebackend.key_hashing import key_groups as hash_key_groups
from statebackend.operators.input.lateness import LateRows
from statebackend.operators.input.staging import Part, StagedRows
from statebackend.state.binary_columns import (
    fixed_column,
    indices_of,
    joined,
    order_of,
    rows_in_order,
    take,
)

__all__ = ["Groups", "group_batch", "group_part", "group_parts", "group_rows"]

Encode = Callable[[Sequence[pa.Array]], pa.Array]
"""From key columns to encoded keys (see ``KeyCodec.encode_arrow``)."""

_GROUP_BYTES: Final = 2
_LOOKED_THROUGH_BYTES: Final = 4 << 20


@dataclass(frozen=True)
class Groups:
    """Rows sorted by key: an epoch's, or a part of them.

    ``full[i]`` (binary: 2 bytes of key group, big-endian, then the encoded key) belongs to the rows
    ``starts[i]:starts[i + 1]`` of ``rows``. ``keep``: what is taken of them, slice by slice, where
    they stayed on disk unfiltered.
    """

    rows: pa.Table | StagedRows
    full: pa.BinaryArray
    starts: NDArray[np.int64]
    keep: Callable[[pa.Table], pa.Table] | None = None

    def __len__(self) -> int:
        return len(self.full)

    @property
    def keys(self) -> list[bytes]:
        """Every encoded key; an operator takes them by the :meth:`chunk`."""
        return self.chunk(0, len(self))[1]

    @property
    def key_groups(self) -> list[bytes]:
        """The key group of every key, 2 bytes, big-endian."""
        return self.chunk(0, len(self))[0]

    def chunk(self, first: int, last: int) -> tuple[list[bytes], list[bytes]]:
        """Key groups and encoded keys of ``first`` to ``last`` (exclusive)."""
        # As Python objects they take several times what they take in the column.
        full: list[bytes] = self.full.slice(first, last - first).to_pylist()
        return [key[:_GROUP_BYTES] for key in full], [key[_GROUP_BYTES:] for key in full]


def group_rows(table: pa.Table, encoded: pa.Array, key_groups: NDArray[Any]) -> Groups:
    """Sort ``table`` by key.

    Args:
        table: n rows.
        encoded: binary, n encoded keys.
        key_groups: uint16, the key group of each row.
    """
    coded = _full_keys(encoded, key_groups).dictionary_encode()
    return _grouped(table, coded.dictionary, indices_of(coded.indices))


def group_batch(
    batch: pa.RecordBatch, encode: Encode, key_positions: Sequence[int], max_parallelism: int
) -> Groups:
    """Sort a batch by key, whose key groups are not known yet.

    Args:
        encode, key_positions: as for :func:`group_part`.

    Raises:
        NullKeyError: a key is null.
    """
    table = pa.Table.from_batches([batch])
    columns = [batch.column(place) for place in key_positions]
    if len(columns) == 1 and _plain(columns[0].type) and not columns[0].null_count:
        return _group_by_column(
            table, columns[0], encode, lambda keys, _: hash_key_groups([keys], max_parallelism)
        )
    return group_rows(table, encode(columns), hash_key_groups(columns, max_parallelism))


def _group_by_column(
    table: pa.Table,
    column: pa.Array,
    encode: Encode,
    groups_of: Callable[[pa.Array, NDArray[np.int32]], NDArray[Any]],
) -> Groups:
    """As :func:`group_rows`, by one column whose equal values are equal keys, none of them null.

    Only distinct keys are encoded.

    Args:
        groups_of: the key groups of distinct keys, given which of them each row has.
    """
    coded = column.dictionary_encode()
    codes = indices_of(coded.indices)
    distinct = coded.dictionary
    return _grouped(table, _full_keys(encode([distinct]), groups_of(distinct, codes)), codes)


def _groups_by_rows(
    key_groups: NDArray[Any],
) -> Callable[[pa.Array, NDArray[np.int32]], NDArray[Any]]:
    def groups_of(distinct: pa.Array, codes: NDArray[np.int32]) -> NDArray[Any]:
        # The key group of each distinct key: that of any of its rows.
        groups = np.empty(len(distinct), key_groups.dtype)
        groups[codes] = key_groups
        return groups

    return groups_of


def _grouped(table: pa.Table, distinct: pa.BinaryArray, codes: NDArray[np.int32]) -> Groups:
    """Args: distinct: full keys, in any order. codes: which of them each row has."""
    order = order_of(distinct)
    rank = np.empty(len(distinct), dtype=np.int32)
    rank[order] = np.arange(len(distinct), dtype=np.int32)
    codes = rank[codes]
    starts = np.zeros(len(distinct) + 1, dtype=np.int64)
    np.cumsum(np.bincount(codes, minlength=len(distinct)), out=starts[1:])
    return Groups(
        rows=take(table.combine_chunks(), rows_in_order(codes, len(distinct))),
        full=take(distinct, order),
        starts=starts,
    )


def group_part(
    part: Part,
    encode: Encode,
    key_positions: Sequence[int],
    late: LateRows | None = None,
) -> Groups | None:
    """Sort a part of the staged input by key; None if all of it is late.

    Args:
        encode: from key columns to encoded keys (see ``KeyCodec.encode_arrow``).
        key_positions: where the key columns stand.
        late: leaves out rows that are late.
    """

    def encoded(table: pa.Table) -> pa.Array:
        return encode([table.column(i).combine_chunks() for i in key_positions])

    if isinstance(part.rows, StagedRows):
        only = _only_key(part.rows, encoded)
        if only is not None:
            return _on_disk(part.rows, _full_keys(only, part.key_groups), late)
        part = part.whole()
    assert isinstance(part.rows, pa.Table)
    rows, key_groups = part.rows, part.key_groups
    mask = late.mask(rows) if late is not None and rows.num_rows else None
    if mask is not None:
        rows, key_groups = rows.filter(mask), key_groups[mask.to_numpy()]
        if not rows.num_rows:
            return None
    if not rows.num_rows:
        return group_rows(rows, encoded(rows), key_groups)
    if len(key_positions) == 1:
        column = rows.column(key_positions[0]).combine_chunks()
        if _plain(column.type) and not column.null_count:
            return _group_by_column(rows, column, encode, _groups_by_rows(key_groups))
    return group_rows(rows, encoded(rows), key_groups)


def group_parts(
    parts: Iterator[Part],
    encode: Encode,
    key_positions: Sequence[int],
    late: LateRows | None = None,
) -> Iterator[Groups]:
    """As :func:`group_part` for each part, of which one is in memory at a time.

    Raises:
        NullKeyError: a key is null.
        LocalDirError: the disk is full or failed.
    """
    while True:
        part = next(parts, None)
        if part is None:
            return
        groups = group_part(part, encode, key_positions, late)
        del part
        if groups is not None:
            yield groups
        del groups


def _plain(kind: pa.DataType) -> bool:
    """Whether values of a type are equal just where their keys are; of floats some are not."""
    tests = (pt.is_integer, pt.is_string, pt.is_binary, pt.is_date, pt.is_timestamp, pt.is_decimal)
    return any(test(kind) for test in tests)


def _on_disk(rows: StagedRows, full: pa.BinaryArray, late: LateRows | None) -> Groups | None:
    """One key's rows, left where they are; they are counted as late here, and left out later."""
    starts = np.array([0, rows.num_rows], np.int64)
    if late is None:
        return Groups(rows, full, starts)
    before = late.dropped
    step = _step_of(rows)
    for start in range(0, rows.num_rows, step):
        late.mask(rows.slice(start, step))
    found = late.dropped - before
    if found == rows.num_rows:
        return None
    return Groups(rows, full, starts, late.keep if found else None)


def _step_of(rows: StagedRows) -> int:
    return max(1, rows.num_rows // max(1, rows.nbytes // _LOOKED_THROUGH_BYTES))


def _full_keys(encoded: pa.Array, key_groups: NDArray[Any]) -> pa.BinaryArray:
    if not len(encoded):
        return encoded
    return joined([fixed_column(key_groups.astype(">u2")), encoded])


def _only_key(rows: StagedRows, encoded: Callable[[pa.Table], pa.Array]) -> pa.Array | None:
    """The key of all rows (one item), if they have the same."""
    only = None
    step = _step_of(rows)
    for start in range(0, rows.num_rows, step):
        keys = encoded(rows.slice(start, step))
        if only is None:
            only = keys.slice(0, 1)
        if not pc.all(pc.equal(keys, only[0])).as_py():
            return None
    return only
