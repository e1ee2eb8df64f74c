"""What lies over a table's base: the overlay that is written, and those that are frozen.

Writes of the current epoch live in an overlay: a dict from full key to encoded value, None for
deleted; in a stream what states by the column have is in `RowCache` beside it. An overlay over its
limit goes to disk as a sorted run. At the barrier the overlay is frozen and a fresh one put over
it: constant time, whatever the state's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import pyarrow as pa

from statebackend.state.binary_columns import newest
from statebackend.state.blocks import ABSENT, SortedRows
from statebackend.state.decoded_states import DecodedStates
from statebackend.state.overlay import FrozenOverlay, Overlay
from statebackend.state.row_cache import RowCache
from statebackend.state.spill import ArrowRows, OverlayGauge, OverlaySpill, Run, merge

__all__ = ["LayerStack"]


class LayerStack:
    """The overlay of this epoch, and the layers of those that the base does not hold yet.

    Not thread-safe: one task owns it. What is frozen never changes, and others may read it.

    Args:
        spill: where an overlay goes that grows too large; without it, it stays in memory.
        small_writes: what is written by the column comes in many small pieces, as in a stream: it
            is kept in the dict as what is written by the key, or in `RowCache`. Else each piece is
            a run of its own.

    Attributes:
        entries, under: the current overlay's, which cells write to; others after `freeze`, `seal`
            and `relieve`.
        decoded: the states in `RowCache`.
        lookups: keys that were looked up, many at once. base_lookups: those of them that no layer
            had, so that the base was asked.
    """

    lookups = 0
    base_lookups = 0

    def __init__(self, *, spill: OverlaySpill | None = None, small_writes: bool = False) -> None:
        self.small_writes = small_writes
        self._begin(Overlay())
        self._frozen: list[FrozenOverlay] = []
        self._spill = spill
        self.decoded = DecodedStates(spill.limit_bytes / 2 if spill else math.inf)

    def _begin(self, overlay: Overlay, held_bytes: int = 0) -> None:
        self._overlay = overlay
        self._gauge = OverlayGauge()
        self._held_bytes = held_bytes  # of the runs that are in memory
        self.entries: dict[bytes, bytes | None] = overlay.entries
        self.under = overlay.under

    def relieve(self) -> None:
        """Write the overlay to disk if it is over its limit; between two keys' changes, or chunks.

        Raises:
            LocalDirError: the disk is full or failed.
        """
        spill, overlay = self._spill, self._overlay
        if spill is None:
            return
        size_bytes = self._gauge.look(overlay.entries, bool(overlay.under)) + self._held_bytes
        if size_bytes + overlay.hot_bytes <= spill.limit_bytes:
            return
        self.decoded.shrink(overlay)
        if size_bytes + overlay.hot_bytes <= spill.limit_bytes:
            return
        runs = [run for run in overlay.runs if run.on_disk]
        held = [run for run in overlay.all_runs() if not run.on_disk]
        if len(held) == 1 and overlay.entries and not overlay.hot:
            runs.append(spill.write(overlay.entries))
        else:
            runs.append(spill.write_rows(SortedRows(*piece) for piece in merge(held)))
        self._begin(Overlay(runs=runs))

    def seal(self) -> None:
        """Make columns of what was written bit by bit, so that later columns stand over it."""
        overlay = self._overlay
        if overlay.entries or overlay.hot:
            added_bytes = sum(hot.content_bytes for hot in overlay.hot.values())
            added_bytes += int(self._gauge.look(overlay.entries, bool(overlay.under)))
            runs = overlay.all_runs()
            if self.small_writes:
                runs = _fewer(runs)
            self._begin(Overlay(runs=runs), self._held_bytes + added_bytes)

    def add_columns(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        """Put a run over all that was written; keys ascend strictly."""
        self.seal()
        self._overlay.runs.append(Run.in_memory([SortedRows(keys, values)]))
        self._held_bytes += keys.nbytes + values.nbytes

    def freeze(self, epoch: int) -> FrozenOverlay:
        """Close the epoch: constant time. Reads see through it until :meth:`applied`."""
        frozen = FrozenOverlay(epoch, self._overlay)
        self.decoded.frozen()
        self._frozen.append(frozen)
        self._begin(Overlay())
        return frozen

    def applied(self, frozen: FrozenOverlay) -> None:
        """The base holds ``frozen`` now (it must be the oldest that is left); its runs go."""
        if not self._frozen or self._frozen[0] is not frozen:
            raise AssertionError("frozen overlays are applied in the order of their epochs")
        del self._frozen[0]
        self.decoded.applied(frozen._overlay)
        for run in frozen._overlay.runs:
            run.remove()

    def add_layer(self, epoch: int, rows: ArrowRows | Iterable[ArrowRows]) -> FrozenOverlay:
        """Put an earlier epoch's changes below this one's; the oldest first, before any write.

        Args:
            rows: one block, which stays in memory, or blocks in key order. Of these more than a
                share of the spill's limit goes to disk, with one block in memory at a time.

        Raises:
            LocalDirError: the disk is full or failed.
        """
        if not isinstance(rows, Iterable):
            run = Run.in_memory([rows])
        elif self._spill is None:
            run = Run.in_memory(rows)
        else:
            run = self._spill.keep(rows)
        layer = FrozenOverlay(epoch, Overlay(runs=[run]))
        self._frozen.append(layer)
        return layer

    def put_joined(self, made: FrozenOverlay, layers: Sequence[FrozenOverlay]) -> None:
        """Have one layer in the place of the oldest ones, whose changes it holds (see `joined`)."""
        if self._frozen[: len(layers)] != list(layers):
            raise AssertionError("the oldest frozen overlays are joined")
        self._frozen[: len(layers)] = [made]

    @property
    def frozen(self) -> list[FrozenOverlay]:
        """What lies between the base and the overlay, the oldest first."""
        return list(self._frozen)

    def sorted_runs(self) -> tuple[list[Run], list[Run]]:
        """What can be read by the range above the base, oldest first.

        Returns:
            the runs of earlier epochs, and those of this one: with :attr:`entries` they are all.
        """
        return [run for frozen in self._frozen for run in frozen.runs], list(self._overlay.runs)

    @property
    def sorted_runs_of_overlay(self) -> list[Run]:
        """Of :meth:`sorted_runs`, those of this epoch."""
        return list(self._overlay.runs)

    def overlays(self) -> list[Overlay]:
        """The newest first."""
        return [self._overlay, *(frozen._overlay for frozen in reversed(self._frozen))]

    def sources(self) -> list[dict[bytes, bytes | None] | RowCache | Run]:
        """What lies over the base, newest first."""
        return [source for overlay in self.overlays() for source in overlay.sources()]

    def figures(self) -> dict[str, int]:
        """Counts since the table was made."""
        spilled_bytes = self._spill.written_bytes if self._spill is not None else 0
        return {
            "lookups": self.lookups,
            "base_lookups": self.base_lookups,
            "overlay_spilled_bytes": spilled_bytes,
        }

    def multi_get_over(self, keys: Sequence[bytes]) -> tuple[list[bytes | None], list[int]]:
        """The values of keys as far as the layers say them; also the places of the others."""
        sources = self.sources()
        if sources and isinstance(sources[0], dict):
            values, wanted = _all_of(sources[0], keys)
            sources = sources[1:]
        else:
            values, wanted = [None] * len(keys), list(range(len(keys)))
        ends: tuple[bytes, bytes] | None = None
        for source in sources:
            if isinstance(source, Run):
                # Keys come in order: a chunk lies behind all that was spilled before it.
                ends = ends or (min(keys, default=b""), max(keys, default=b""))
                if source.touches(*ends):
                    wanted = source.get_many(keys, wanted, values, ends)
            elif isinstance(source, RowCache):
                found = source.get_many([keys[place] for place in wanted])
                wanted = _fill(values, wanted, found)
            else:
                found = [source.get(keys[place], ABSENT) for place in wanted]
                wanted = _fill(values, wanted, found)
        return values, wanted


def _all_of(
    source: dict[bytes, bytes | None], keys: Sequence[bytes]
) -> tuple[list[bytes | None], list[int]]:
    """The value of each key in a first source, and the places of those that it does not have."""
    values: list[Any] = list(map(source.get, keys, repeat(ABSENT)))
    missing = [place for place, value in enumerate(values) if value is ABSENT]
    for place in missing:
        values[place] = None
    return values, missing


def _fill(values: list[bytes | None], wanted: list[int], found: Sequence[Any]) -> list[int]:
    """Put what was found in its places; the places that are still wanted."""
    missing = []
    for place, value in zip(wanted, found, strict=True):
        if value is ABSENT:
            missing.append(place)
        else:
            values[place] = value
    return missing


def _fewer(runs: list[Run]) -> list[Run]:
    """The same changes in runs of which each is a good deal larger than the next."""
    while len(runs) > 1 and not runs[-2].on_disk and len(runs[-2]) < 2 * len(runs[-1]):
        merged = newest([runs[-2].columns, runs[-1].columns])
        runs = [*runs[:-2], Run.in_memory([SortedRows(*merged)])]
    return runs
