"""Changes in many small pieces, by the column: a hash table of which numpy does the work.

A dict costs 0.5 to 1 us for each key that is looked up or set: two objects are made of it, and the
dict is all over the memory. Here it is a tenth of that, and other threads run meanwhile. Keys have
one width, and values one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.state.binary_columns import (
    Entries,
    fixed_column,
    matrix_of,
    order_of,
    take,
    valid_bits,
    width_of,
)
from statebackend.state.blocks import ABSENT, binary_array

__all__ = ["RowCache", "read_layers", "state_of"]

Words = list[NDArray[np.uint64]]
"""A key as numbers: for each eight bytes of it, one of every key."""

_WORD: Final = 8
_FIRST_ROWS: Final = 1024
_FILLED: Final = 4  # places for each row: few look-ups need a second look
_FACTORS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)
_HALF: Final = np.uint64(32)


class RowCache:
    """Keys and what they were set to, None if they were deleted; only ever more keys.

    Some are as they were before, and here only to be found (see `following`). One thread writes.
    What is not written any more may be read by several.

    Args:
        key_bytes, value_bytes: the widths. rows: for how many there is room at first.
    """

    def __init__(self, key_bytes: int, value_bytes: int, rows: int = 0) -> None:
        self.key_bytes, self.value_bytes = key_bytes, value_bytes
        self._count = 1  # row 0 stands for none
        self._bits = 0
        self._table = np.zeros(0, np.int32)  # the row that is at a place, 0: none
        self._keys = np.zeros((0, key_bytes), np.uint8)
        self._words: Words = []
        self._values = np.zeros((0, value_bytes), np.uint8)
        self._live = np.zeros(0, np.bool_)
        self._changed = np.zeros(0, np.bool_)
        self._grow(max(_FIRST_ROWS, rows + 1))

    def __len__(self) -> int:
        return self._count - 1

    @property
    def nbytes(self) -> int:
        """What it takes of the memory."""
        row_bytes = self.key_bytes + self.value_bytes + 2 + _WORD * len(self._words)
        return self._table.nbytes + len(self._live) * row_bytes

    @property
    def content_bytes(self) -> int:
        """What its changes take as columns."""
        return int(np.count_nonzero(self._changed)) * (self.key_bytes + self.value_bytes)

    def following(self) -> RowCache:
        """Others with the same rows, none of them changed; or none, if few were changed here.

        What is written over and over is found in them from the first moment after a barrier.
        """
        changed = int(np.count_nonzero(self._changed))
        if 2 * changed < len(self):
            return RowCache(self.key_bytes, self.value_bytes, changed)
        new = copy.copy(self)
        new._table, new._keys = self._table.copy(), self._keys.copy()
        new._words = [word.copy() for word in self._words]
        new._values, new._live = self._values.copy(), self._live.copy()
        new._changed = np.zeros_like(self._changed)
        return new

    def changes(self) -> RowCache:
        """Others with what was changed alone."""
        rows = np.flatnonzero(self._changed)
        new = RowCache(self.key_bytes, self.value_bytes, len(rows))
        places = new._add(self._keys[rows])
        new._values[places], new._live[places] = self._values[rows], self._live[rows]
        new._changed[places] = True
        return new

    def find(self, keys: pa.BinaryArray) -> NDArray[np.int32]:
        """The row of each key (of the width), 0 where there is none."""
        words = _words_of(matrix_of(keys, self.key_bytes))
        return self._find(words, self._home(words))

    def rows_at(self, rows: NDArray[np.int32]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """The values of rows, and whether they are there (or were deleted)."""
        return self._values[rows], self._live[rows]

    def get_many(self, keys: Sequence[bytes]) -> list[Any]:
        """The values of keys of any width, None if deleted, ABSENT if they are not here."""
        found: list[Any] = [ABSENT] * len(keys)
        fitting = [place for place, key in enumerate(keys) if len(key) == self.key_bytes]
        rows = self.find(binary_array([keys[place] for place in fitting])) if fitting else ()
        for place, row in zip(fitting, rows, strict=True):
            if row:
                found[place] = self._values[row].tobytes() if self._live[row] else None
        return found

    def put(
        self,
        keys: pa.BinaryArray,
        values: pa.BinaryArray | None,
        rows: NDArray[np.int32] | None = None,
    ) -> None:
        """Set keys, each of which comes once; None deletes them.

        Args:
            values: one of the width for each key. rows: what `find` gave for just these keys, if
                nothing was put since.
        """
        matrix = matrix_of(keys, self.key_bytes)
        if rows is None:
            rows = self.find(keys)
        new = np.flatnonzero(rows == 0)
        if len(new):
            rows = rows.copy()
            rows[new] = self._add(matrix[new])
        if values is not None:
            self._values[rows] = matrix_of(values, self.value_bytes)
        self._live[rows] = values is not None
        self._changed[rows] = True

    def entries(self) -> Entries:
        """What was changed, in the order of the keys; null: deleted."""
        some = np.flatnonzero(self._changed)
        keys = fixed_column(self._keys[some])
        values = _fixed_values(self._values[some], self._live[some])
        order = order_of(keys)
        return take(keys, order), take(values, order)

    def _find(self, words: Words, at: NDArray[np.int64]) -> NDArray[np.int32]:
        rows = self._table[at]
        left = np.flatnonzero((rows != 0) & ~self._same(rows, words))
        mask = len(self._table) - 1
        at = at[left]
        while len(left):  # somebody else is there: the next place
            at = (at + 1) & mask
            found = self._table[at]
            rows[left] = found
            others = (found != 0) & ~self._same(found, [word[left] for word in words])
            left, at = left[others], at[others]
        return rows

    def _same(self, rows: NDArray[np.int32], words: Words) -> NDArray[np.bool_]:
        same: NDArray[np.bool_] = self._words[0][rows] == words[0]
        for own, word in zip(self._words[1:], words[1:], strict=True):
            same &= own[rows] == word
        return same

    def _add(self, matrix: NDArray[np.uint8]) -> NDArray[np.int32]:
        """New keys; their rows."""
        first, end = self._count, self._count + len(matrix)
        if end > len(self._live):
            self._grow(max(end, 2 * len(self._live)))
        rows = np.arange(first, end, dtype=np.int32)
        words = _words_of(matrix)
        self._keys[first:end] = matrix
        for own, word in zip(self._words, words, strict=True):
            own[first:end] = word
        self._count = end
        self._place(rows, self._home(words))
        return rows

    def _place(self, rows: NDArray[np.int32], at: NDArray[np.int64]) -> None:
        mask = len(self._table) - 1
        while len(rows):
            free = np.flatnonzero(self._table[at] == 0)
            self._table[at[free]] = rows[free]  # of those that want one place the last gets it
            left = np.flatnonzero(self._table[at] != rows)
            rows, at = rows[left], (at[left] + 1) & mask

    def _home(self, words: Words) -> NDArray[np.int64]:
        mixed = words[0] * np.uint64(_FACTORS[0])
        for word in words[1:]:
            mixed ^= mixed >> _HALF
            mixed += word
            mixed *= np.uint64(_FACTORS[1])
        mixed ^= mixed >> _HALF
        mixed *= _MIX
        return (mixed >> np.uint64(64 - self._bits)).view(np.int64)

    def _grow(self, rows: int) -> None:
        """Make room for so many, row 0 among them."""
        self._bits = (_FILLED * rows - 1).bit_length()
        self._table = np.zeros(1 << self._bits, np.int32)
        self._keys = _longer(self._keys, rows)
        self._values = _longer(self._values, rows)
        self._live, self._changed = _longer(self._live, rows), _longer(self._changed, rows)
        words = self._words or _words_of(self._keys[:0])
        self._words = [_longer(word, rows) for word in words]
        kept = np.arange(1, self._count, dtype=np.int32)
        self._place(kept, self._home([word[1 : self._count] for word in self._words]))


def read_layers(
    layers: Sequence[RowCache],
    keys: pa.BinaryArray,
    base: Callable[[pa.BinaryArray], pa.BinaryArray],
) -> tuple[pa.BinaryArray | None, NDArray[np.int32] | None]:
    """The values of keys, null where there is none, and what the first layer's `find` gave.

    Args:
        layers: the newest first; one or more. base: gives the values of keys that are in none.

    Returns:
        (None, None) where keys or values are not all of one width.
    """
    first = layers[0]
    widths = first.key_bytes, first.value_bytes
    if width_of(keys) != first.key_bytes or any(
        (one.key_bytes, one.value_bytes) != widths for one in layers
    ):
        return None, None
    values = np.empty((len(keys), first.value_bytes), np.uint8)
    live = np.zeros(len(keys), np.bool_)
    left, some = np.arange(len(keys)), keys
    known: NDArray[np.int32] | None = None
    for layer in layers:
        rows = layer.find(some)
        known = rows if known is None else known
        here = rows != 0
        values[left[here]], live[left[here]] = layer.rows_at(rows[here])
        left = left[~here]
        if not len(left):
            return _fixed_values(values, live), known
        some = take(keys, left)
    below = base(some)
    there, found = left[valid_bits(below)], below.drop_null()
    if len(there):
        if width_of(found) != first.value_bytes:
            return None, None
        values[there], live[there] = matrix_of(found, first.value_bytes), True
    return _fixed_values(values, live), known


def _fixed_values(matrix: NDArray[np.uint8], live: NDArray[np.bool_]) -> pa.BinaryArray:
    """Values of one width as a column, null where they are not live."""
    if live.all():
        return fixed_column(np.ascontiguousarray(matrix))
    offsets = np.zeros(len(live) + 1, np.int32)
    np.cumsum(live * np.int32(matrix.shape[1]), out=offsets[1:])
    data = np.ascontiguousarray(matrix[live])
    buffers = [np.packbits(live, bitorder="little"), offsets, data]
    return pa.Array.from_buffers(pa.binary(), len(live), [pa.py_buffer(one) for one in buffers])


def state_of(keys: pa.BinaryArray) -> bytes:
    """The number of the state that the first of full keys is of."""
    first: bytes = keys[0].as_py()
    return first[2:4]


def _words_of(matrix: NDArray[np.uint8]) -> Words:
    count, width = matrix.shape
    words = -(-width // _WORD)
    padded = np.zeros((count, words * _WORD), np.uint8)
    padded[:, :width] = matrix
    return list(np.ascontiguousarray(padded.view(np.uint64).T))


def _longer(array: NDArray[Any], rows: int) -> NDArray[Any]:
    longer = np.zeros((rows, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
