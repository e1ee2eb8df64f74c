"""States by the column: value, map and list, aligned with a vector of keys.

The layout is that of ``statebackend.state.cells``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql.types import StructType

from statebackend.errors import LocalCopyError, UsageError
from statebackend.operators.vector.column_entries import Entries, places_in, scan_state, under_keys
from statebackend.operators.vector.given_columns import Columns, arrow_fields, columns_of, record
from statebackend.operators.vector.key_vector import GROUP_BYTES, Keys, strictly
from statebackend.schema.codec import RowCodec
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.keys.key_column_decoding import decode_key_columns
from statebackend.state.binary_columns import (
    EMPTY,
    firsts,
    fixed_column,
    indices_of,
    joined,
    matrix_of,
    order_of,
    take,
    valid_bits,
    width_of,
)
from statebackend.state.blocks import binary_array
from statebackend.state.column_table import ColumnTable
from statebackend.state.unbound import OfOneEpoch

__all__ = ["ArrowListState", "ArrowMapState", "ArrowValueState", "StateSite"]

_COUNT: Final = ">u8"
_COUNT_BYTES: Final = 8
_UNLIKELY_ROWS: Final = 1 << 16  # from there on the last one is looked for first
_PREFIX_BYTES: Final = 4


class StateSite:
    """Where a state is: its table by the column, its name and number, and the operator's keys.

    Args:
        entries: reads and writes single entries; with a TTL, their stamps too.
        key_groups: the subtask's.
    """

    def __init__(
        self,
        columns: ColumnTable,
        entries: Entries,
        *,
        name: str,
        state_id: int,
        key_codec: KeyCodec,
        key_groups: range,
    ) -> None:
        self.columns, self.entries = columns, entries
        self.name = name
        self.id = state_id.to_bytes(2, "big")
        self.key_groups = key_groups
        self.key_codec = key_codec
        self.key_fields = arrow_fields(key_codec.schema)

    def full(self, keys: Keys) -> pa.BinaryArray:
        """The full key of each key in this state."""
        if not isinstance(keys, Keys):
            raise UsageError(
                f"State {self.name!r} was given a {type(keys).__name__} as its keys.",
                todo="Give ctx.keys, or what take() or scan() gave.",
            )
        return keys.in_state(self.id)

    def keys(self, full: pa.BinaryArray) -> Keys:
        """Keys of full keys, which ascend strictly."""
        own = pc.binary_replace_slice(full, GROUP_BYTES, _PREFIX_BYTES, b"")

        def columns() -> pa.RecordBatch:
            arrays = decode_key_columns(own, self.key_codec.schema, GROUP_BYTES)
            return record(arrays, self.key_fields)

        return Keys(own, columns, ascending=True)


class ArrowValueState(OfOneEpoch):
    """A state with one row per key, read and written by the column."""

    def __init__(self, site: StateSite, codec: RowCodec) -> None:
        self._site, self._codec = site, codec
        self._name = site.name
        self._fields = arrow_fields(codec.schema)

    @property
    def codec(self) -> RowCodec:
        """Of the rows, for who reads and writes them encoded."""
        return self._codec

    def get_encoded(self, keys: Keys) -> list[bytes | None]:
        """The encoded row of each key; None where there is none."""
        found: list[bytes | None] = self._site.entries.get(self._site.full(keys)).to_pylist()
        return found

    def put_encoded(self, keys: Keys, rows: Sequence[bytes]) -> None:
        """As :meth:`put`, of rows that the codec has encoded."""
        full = self._site.full(keys)
        self._site.entries.put(*_in_order(full, binary_array(rows), keys.ascending))

    def get(self, keys: Keys) -> pa.RecordBatch:
        """The row of each key; null in every column where there is none."""
        found = self._site.entries.get(self._site.full(keys))
        return record(self._codec.decode_arrow(found), self._fields)

    def exists(self, keys: Keys) -> pa.BooleanArray:
        """Whether each key has a row."""
        return pc.is_valid(self._site.entries.look(self._site.full(keys)))

    def put(self, keys: Keys, values: Columns) -> None:
        """Set the row of each key; of a key that comes twice, the last one counts.

        Raises:
            ValueMismatchError: the columns do not fit the schema or the keys.
        """
        full = self._site.full(keys)
        rows = columns_of(values, self._codec.schema, len(keys), f"State {self._name!r}")
        self._site.entries.put(*_in_order(full, self._codec.encode_arrow(rows), keys.ascending))

    def delete(self, keys: Keys) -> None:
        """Remove the rows of keys; those without one are passed over."""
        full = self._site.full(keys)
        self._site.entries.delete(full if keys.ascending else _distinct(full))

    def scan(self) -> Iterator[tuple[Keys, pa.RecordBatch]]:
        """All keys of the subtask that have a row, in their order, and the rows; in pieces.

        What is written meanwhile may be seen or not.
        """
        site = self._site
        for full, data in scan_state(site.columns, site.id, site.key_groups):
            full, rows = site.entries.live(full, data)
            if len(full):
                yield site.keys(full), record(self._codec.decode_arrow(rows), self._fields)


class ArrowMapState(OfOneEpoch):
    """A state with a map per key, read and written by the column; single entries are touched."""

    def __init__(self, site: StateSite, map_codec: KeyCodec, codec: RowCodec) -> None:
        self._site, self._map_codec, self._codec = site, map_codec, codec
        self._name = site.name
        self._fields = arrow_fields(codec.schema)
        self._map_fields = arrow_fields(map_codec.schema)

    def get(self, keys: Keys, map_keys: Columns) -> pa.RecordBatch:
        """The row under the i-th map key of the i-th key; null in every column where none is."""
        found = self._site.entries.get(*self._full(keys, map_keys))
        return record(self._codec.decode_arrow(found), self._fields)

    def exists(self, keys: Keys, map_keys: Columns) -> pa.BooleanArray:
        """Whether there is an entry under the i-th map key of the i-th key."""
        return pc.is_valid(self._site.entries.look(self._full(keys, map_keys)[0]))

    def put(self, keys: Keys, map_keys: Columns, values: Columns) -> None:
        """Set the entry under map_keys[i] of keys[i]; of one that comes twice the last counts.

        Raises:
            ValueMismatchError: columns that do not fit their schema or the keys.
        """
        full, prefix_bytes = self._full(keys, map_keys)
        rows = columns_of(values, self._codec.schema, len(keys), f"State {self._name!r}")
        encoded = self._codec.encode_arrow(rows)
        order = strictly(full)
        if order is not None:
            full, encoded = take(full, order), take(encoded, order)
            prefix_bytes = prefix_bytes[order]
        self._site.entries.put(full, encoded, prefix_bytes)

    def delete(self, keys: Keys, map_keys: Columns) -> None:
        """Remove entries; those that are not there are passed over."""
        full, prefix_bytes = self._full(keys, map_keys)
        self._delete(full, prefix_bytes)

    def _delete(self, full: pa.BinaryArray, prefix_bytes: NDArray[np.int64]) -> None:
        order = strictly(full)
        if order is not None:
            full, prefix_bytes = take(full, order), prefix_bytes[order]
        self._site.entries.delete(full, prefix_bytes)

    def items(
        self, keys: Keys, *, under: Columns | None = None
    ) -> tuple[NDArray[np.int64], pa.RecordBatch, pa.RecordBatch]:
        """All entries of keys, or those under the first fields of their map keys.

        Args:
            under: columns for the first field (or fields) of the map key: of the i-th key only
                entries that begin with the i-th row are given. Keys may come many times.

        Returns:
            which of ``keys`` each entry is of (ascending), the map keys (of one key in the order of
            their encoded form), and the rows.

        Raises:
            ValueMismatchError: ``under`` does not fit the map key's first fields.
        """
        index, full, data, prefix_bytes = self._under(keys, under=under)
        rows = self._site.entries.rows(full, data, prefix_bytes)
        map_keys = decode_key_columns(full, self._map_codec.schema, prefix_bytes)
        return (
            index,
            record(map_keys, self._map_fields),
            record(self._codec.decode_arrow(rows), self._fields),
        )

    def clear(self, keys: Keys) -> None:
        """Remove all entries of keys."""
        _, full, _, prefix_bytes = self._under(keys, hidden=True)
        self._delete(full, prefix_bytes)

    def _under(
        self, keys: Keys, *, hidden: bool = False, under: Columns | None = None
    ) -> tuple[NDArray[np.int64], pa.BinaryArray, pa.BinaryArray, NDArray[np.int64]]:
        prefixes = self._site.full(keys)
        narrow = prefixes if under is None else self._narrowed(prefixes, under)
        index, full, data = under_keys(self._site.columns, narrow)
        if not hidden:
            shown = self._site.entries.shown(data)
            if not shown.all():
                places = np.flatnonzero(shown)
                index, full, data = index[places], take(full, places), take(data, places)
        return index, full, data, _lengths(prefixes)[index]

    def _narrowed(self, prefixes: pa.BinaryArray, under: Columns) -> pa.BinaryArray:
        """Prefixes with the first fields of map keys behind them: keys are field after field."""
        count = under.num_columns if isinstance(under, pa.RecordBatch) else 1
        if isinstance(under, Mapping | list | tuple):
            count = len(under)
        first = KeyCodec(StructType(self._map_codec.schema.fields[:count]), allow_all_null=True)
        what = f"under= of state {self._name!r}"
        columns = columns_of(under, first.schema, len(prefixes), what)
        return joined([prefixes, first.encode_arrow(columns)])

    def _full(self, keys: Keys, map_keys: Columns) -> tuple[pa.BinaryArray, NDArray[np.int64]]:
        """Full keys, and how long the prefix of each map is."""
        prefixes = self._site.full(keys)
        what = f"The map keys of state {self._name!r}"
        columns = columns_of(map_keys, self._map_codec.schema, len(keys), what)
        return joined([prefixes, self._map_codec.encode_arrow(columns)]), _lengths(prefixes)


class ArrowListState(OfOneEpoch):
    """A state with a list of rows per key, read and written by the column."""

    def __init__(self, site: StateSite, codec: RowCodec) -> None:
        self._site, self._codec = site, codec
        self._name = site.name
        self._fields = arrow_fields(codec.schema)

    def get(self, keys: Keys) -> tuple[NDArray[np.int64], pa.RecordBatch]:
        """The rows of keys: which of ``keys`` each is of (ascending), and the rows, in order."""
        full = self._site.full(keys)
        counts = self._counts(full)
        index = np.repeat(np.arange(len(keys)), counts)
        data = self._site.columns.get_columns(_elements(full, index, places_in(counts)))
        if data.null_count:
            raise LocalCopyError(
                f"List state {self._name!r} misses {data.null_count} of {len(data)} elements.",
                todo="The local store is set aside; the state is restored from the next good copy.",
            )
        return index, record(self._codec.decode_arrow(data), self._fields)

    def exists(self, keys: Keys) -> pa.BooleanArray:
        """Whether each key has at least one row."""
        return pc.is_valid(self._site.columns.get_columns(self._site.full(keys)))

    def append(self, keys: Keys, values: Columns) -> None:
        """Add the i-th row to the i-th key; a key may come many times, its rows stay in order.

        Raises:
            ValueMismatchError: the columns do not fit the schema or the keys.
        """
        full = self._site.full(keys)
        rows = columns_of(values, self._codec.schema, len(keys), f"State {self._name!r}")
        self._write(full, self._codec.encode_arrow(rows), after=True)

    def put(self, keys: Keys, index: NDArray[np.int64], values: Columns) -> None:
        """Replace the rows of keys; a key without any is cleared.

        Args:
            index: which of ``keys`` each row is of; rows of one key stay in order.

        Raises:
            ValueMismatchError: the columns do not fit the schema, or the index not the keys.
        """
        self._site.full(keys)  # says so if these are none
        owners = keys.take(index)
        rows = columns_of(values, self._codec.schema, len(owners), f"State {self._name!r}")
        encoded = self._codec.encode_arrow(rows)
        self.delete(keys)
        self._write(self._site.full(owners), encoded, after=False)

    def delete(self, keys: Keys) -> None:
        """Remove the rows of keys."""
        full = self._site.full(keys)
        full = full if keys.ascending else _distinct(full)
        counts = self._counts(full)
        index = np.repeat(np.arange(len(full)), counts)
        elements = _elements(full, index, places_in(counts))
        gone = pa.concat_arrays([take(full, np.flatnonzero(counts)), elements])
        gone = take(gone, order_of(gone))
        self._site.columns.put_columns(gone, pa.nulls(len(gone), pa.binary()))

    def _counts(self, full: pa.BinaryArray) -> NDArray[np.int64]:
        data = self._site.columns.get_columns(full)
        valid = valid_bits(data)
        counts = np.zeros(len(full), np.int64)
        there = data.drop_null()
        if len(there):
            if width_of(there) != _COUNT_BYTES:
                raise LocalCopyError(
                    f"List state {self._name!r} has a count that is none.",
                    todo="The local store is set aside; the state is restored from the next good "
                    "copy.",
                )
            counts[valid] = matrix_of(there, _COUNT_BYTES).view(_COUNT).reshape(-1)
            self._check_counts(full, counts)
        return counts

    def _check_counts(self, full: pa.BinaryArray, counts: NDArray[np.int64]) -> None:
        """A damaged count must not cost the memory that it says."""
        large = np.flatnonzero((counts < 0) | (counts >= _UNLIKELY_ROWS))
        if not len(large):
            return
        last = _elements(full, large, counts[large] - 1)
        if (counts < 0).any() or self._site.columns.get_columns(last).null_count:
            raise LocalCopyError(
                f"List state {self._name!r} has a count of which there is no last element.",
                todo="The local store is set aside; the state is restored from the next good copy.",
            )

    def _write(self, full: pa.BinaryArray, rows: pa.BinaryArray, *, after: bool) -> None:
        """Write rows (of the owners ``full``, in any order) behind what the owners have."""
        if not len(full):
            return
        order = order_of(full)
        ordered = take(full, order)
        first = np.flatnonzero(firsts(ordered))
        owners = take(ordered, first)
        added = np.diff(np.append(first, len(ordered)))
        before = self._counts(owners) if after else np.zeros(len(owners), np.int64)
        owner = np.repeat(np.arange(len(owners)), added)
        elements = _elements(owners, owner, places_in(added) + before[owner])
        counts = fixed_column((before + added).astype(_COUNT))
        keys = pa.concat_arrays([owners, elements])
        values = pa.concat_arrays([counts, take(rows, order)])
        into = order_of(keys)
        self._site.columns.put_columns(take(keys, into), take(values, into))


def _elements(
    full: pa.BinaryArray, index: NDArray[np.int64], places: NDArray[np.int64]
) -> pa.BinaryArray:
    if not len(index):
        return EMPTY
    return joined([take(full, index), fixed_column(places.astype(_COUNT))])


def _lengths(column: pa.BinaryArray) -> NDArray[np.int64]:
    return indices_of(pc.binary_length(column)).astype(np.int64)


def _distinct(full: pa.BinaryArray) -> pa.BinaryArray:
    order = strictly(full)
    return full if order is None else take(full, order)


def _in_order(
    full: pa.BinaryArray, rows: pa.BinaryArray, ascending: bool
) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    order = None if ascending else strictly(full)
    if order is None:
        return full, rows
    return take(full, order), take(rows, order)
