"""A vector of keys, with which states by the column are aligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.errors import UsageError
from statebackend.state.binary_columns import (
    ascends,
    bools_of,
    firsts,
    indices_of,
    lasts,
    order_of,
    take,
    valid_bits,
)

__all__ = ["GROUP_BYTES", "Keys", "Which", "strictly"]

GROUP_BYTES: Final = 2

Which = Any
"""A mask (as many booleans as there are keys) or places (integers), numpy's or Arrow's."""


class Keys:
    """A column of keys. The columns that states take and give follow its order.

    ``ctx.keys`` are those of the batch; `take` gives others.

    A key may be there several times in what `take` gives.
    """

    __slots__ = ("_columns", "_full_in", "_index", "_starts", "ascending", "full")

    def __init__(
        self,
        full: pa.BinaryArray,
        columns: Callable[[], pa.RecordBatch],
        *,
        starts: NDArray[np.int64] | None = None,
        ascending: bool = False,
    ) -> None:
        # key group (2 bytes), then the encoded key
        self.full = full
        self.ascending = ascending
        self._columns: Callable[[], pa.RecordBatch] | pa.RecordBatch = columns
        self._starts = starts
        self._index: NDArray[np.int64] | None = None
        self._full_in: dict[bytes, pa.BinaryArray] = {}  # one that reads mostly writes, too

    def __len__(self) -> int:
        return len(self.full)

    def __repr__(self) -> str:
        return f"Keys({len(self)} of ({', '.join(self.columns.schema.names)}))"

    @property
    def columns(self) -> pa.RecordBatch:
        """The key columns, a row for each key."""
        if not isinstance(self._columns, pa.RecordBatch):
            self._columns = self._columns()
        return self._columns

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where the rows of each key begin in the batch, and where the last one's end: n + 1.

        Raises:
            UsageError: these are not the keys of a batch.
        """
        if self._starts is None:
            raise UsageError(
                "starts (or index) was asked of keys that are not a batch's own.",
                todo="Ask ctx.keys; of what take() or a state's scan() gives there are no rows.",
            )
        return self._starts

    @property
    def index(self) -> NDArray[np.int64]:
        """Which key each row of the batch has: ascending.

        Raises:
            UsageError: these are not the keys of a batch.
        """
        if self._index is None:
            self._index = np.repeat(np.arange(len(self)), np.diff(self.starts))
        return self._index

    def take(self, which: Which) -> Keys:
        """Some of them, in the order given.

        Args:
            which: booleans, one for each key, or places from 0 on; a place may come twice.

        Raises:
            UsageError: neither, or as many booleans as there are no keys, or a place beyond them.
        """
        places, in_order = self._places(which)
        columns = self._columns

        def taken() -> pa.RecordBatch:
            return take(columns if isinstance(columns, pa.RecordBatch) else self.columns, places)

        return Keys(take(self.full, places), taken, ascending=self.ascending and in_order)

    def distinct(self) -> tuple[Keys, NDArray[np.int64]]:
        """Each key once, in the order of the encoded keys; and which of these each key is."""
        if self.ascending:
            return self, np.arange(len(self))
        order = order_of(self.full)
        ordered = take(self.full, order)
        first = firsts(ordered)
        index = np.empty(len(order), np.int64)
        index[order] = np.cumsum(first) - 1
        kept = self.take(order[first])
        kept.ascending = True
        return kept, index

    def _places(self, which: Which) -> tuple[NDArray[np.int64], bool]:
        if isinstance(which, pa.ChunkedArray):
            which = which.combine_chunks()
        if isinstance(which, pa.Array):
            if pa.types.is_boolean(which.type):
                flags = bools_of(which)
                which = flags & valid_bits(which) if which.null_count else flags
            elif not which.null_count and pa.types.is_integer(which.type):
                which = indices_of(which)
        try:
            which = np.asarray(which)
        except ValueError as error:  # lists within lists
            raise self._no_places(error) from error
        if which.dtype == np.bool_ and which.shape == (len(self),):
            return np.flatnonzero(which), True
        # numpy makes an empty list one of floats.
        if which.ndim != 1 or which.dtype.kind not in ("iu" if len(which) else "iuf"):
            raise self._no_places(f"{which.shape} items of {which.dtype}")
        if not len(which):
            return np.zeros(0, np.int64), True
        places = which.astype(np.int64)
        low, high = int(places.min()), int(places.max())
        if low < 0 or high >= len(self):
            raise UsageError(
                f"Place {low if low < 0 else high} was taken of {len(self)} keys.",
                todo="Give places from 0 up to the number of keys.",
            )
        return places, bool((places[1:] > places[:-1]).all())

    def _no_places(self, what: object) -> UsageError:
        return UsageError(
            f"{len(self)} keys were asked for what are no places ({what}).",
            todo="Give one boolean for each key, or places as integers, without nulls.",
        )

    def in_state(self, state_id: bytes) -> pa.BinaryArray:
        """The full key of each in a state."""
        full = self._full_in.get(state_id)
        if full is None:
            full = pc.binary_replace_slice(self.full, GROUP_BYTES, GROUP_BYTES, state_id)
            self._full_in[state_id] = full
        return full


def strictly(full: pa.BinaryArray) -> NDArray[np.int64] | None:
    """Places that put keys in strictly ascending order, of equal ones the last; None: they are."""
    if ascends(full):
        return None
    order = order_of(full)
    last = lasts(take(full, order))
    return order if last.all() else order[last]
