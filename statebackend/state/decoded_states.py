"""States of a table that are written by the column, bit by bit: which they are, and how to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.state.binary_columns import width_of
from statebackend.state.overlay import Overlay
from statebackend.state.row_cache import RowCache, read_layers, state_of

__all__ = ["DecodedStates"]

Values: TypeAlias = Callable[[pa.BinaryArray], pa.BinaryArray]


class DecodedStates:
    """What a table keeps in `RowCache`, over all its overlays.

    Args:
        limit_bytes: of what is kept beyond the changes themselves, to be read sooner: the newest
            applied changes, and in an overlay as much of copies, with their room to grow.
    """

    def __init__(self, limit_bytes: float) -> None:
        self._limit_bytes = limit_bytes
        self._cold: set[bytes] = set()  # states of which not all that is put has one width
        self._widths: dict[bytes, int] = {}  # of the values of the others
        # Of the newest applied overlay: the base has it too, and takes ten times as long.
        self._clean: dict[bytes, RowCache] = {}
        self._found: tuple[pa.BinaryArray, RowCache, NDArray[np.int32]] | None = None

    def put(
        self,
        overlays: Sequence[Overlay],
        keys: pa.BinaryArray,
        values: pa.BinaryArray | None,
        stored: Values,
    ) -> bool:
        """Set keys of one state, or (None) delete them.

        Args:
            overlays: all of the table's, the newest first: it is written to.
            stored: gives the values of any keys.

        Returns:
            False: not all that was put in this state is of one width; nothing was done, and nothing
            will be done any more.
        """
        state = state_of(keys)
        if state in self._cold:
            return False
        if not self._put(overlays, state, keys, values, stored):
            self._cold.add(state)  # the dict beats what it has written so far
            return False
        return True

    def _put(
        self,
        overlays: Sequence[Overlay],
        state: bytes,
        keys: pa.BinaryArray,
        values: pa.BinaryArray | None,
        stored: Values,
    ) -> bool:
        hot, key_bytes = overlays[0].hot.get(state), width_of(keys)
        value_bytes = self._widths.get(state) if values is None else width_of(values)
        if values is None and value_bytes is None:  # all that is known of it is a deletion
            value_bytes = width_of(stored(keys).drop_null())
        if key_bytes is None or value_bytes is None:
            return False
        if hot is None:
            before = self._before(overlays, state)
            fits = before and (before.key_bytes, before.value_bytes) == (key_bytes, value_bytes)
            hot = before.following() if before and fits else RowCache(key_bytes, value_bytes)
            overlays[0].hot[state], self._widths[state] = hot, value_bytes
        elif (hot.key_bytes, hot.value_bytes) != (key_bytes, value_bytes):
            return False
        found, self._found = self._found, None
        known = found[2] if found and found[0] is keys and found[1] is hot else None
        hot.put(keys, values, known)
        return True

    def _before(self, overlays: Sequence[Overlay], state: bytes) -> RowCache | None:
        """A state's newest rows, unless other changes lie over them, or they take too much."""
        for overlay in overlays:
            if overlay.runs:
                return None  # a part of an epoch, or something restored
            if state in overlay.hot:
                return self._fitting(overlays[0], overlay.hot[state])
        clean = self._clean.get(state)
        return clean and self._fitting(overlays[0], clean)

    def _fitting(self, current: Overlay, hot: RowCache) -> RowCache | None:
        held_bytes = sum(other.nbytes for other in current.hot.values())
        return hot if held_bytes + 2 * hot.nbytes <= self._limit_bytes else None

    def shrink(self, overlay: Overlay) -> None:
        """Only changes are left in an overlay that is too large, of which it is the newest."""
        overlay.hot.update({state: hot.changes() for state, hot in overlay.hot.items()})
        self._found = None

    def get(
        self, overlays: Sequence[Overlay], keys: pa.BinaryArray, base: Values
    ) -> pa.BinaryArray | None:
        """The values of keys of one state, null where there is none.

        Args:
            base: gives the values of keys that no overlay has.

        Returns:
            None: the state is not in `RowCache` alone, or not of one width.
        """
        state = state_of(keys)
        if state in self._cold:
            return None
        layers = [overlay.hot[state] for overlay in overlays if state in overlay.hot]
        if state in self._clean:
            layers.append(self._clean[state])
        if not layers or any(overlay.runs for overlay in overlays):
            return None
        values, rows = read_layers(layers, keys, base)
        if rows is not None and layers[0] is overlays[0].hot.get(state):
            self._found = keys, layers[0], rows  # they are likely to be put next
        return values

    def frozen(self) -> None:
        """The newest overlay is not written any more."""
        self._found = None

    def applied(self, overlay: Overlay) -> None:
        """The base holds an overlay, the oldest, now."""
        kept = self._clean | overlay.hot
        fits = sum(hot.nbytes for hot in kept.values()) <= self._limit_bytes
        self._clean = kept if fits and not overlay.runs else {}
