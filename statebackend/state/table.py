"""The keyed state of a subtask, by the key: layers of changes over a confirmed base.

Reads go overlay, its runs (newest first), then frozen overlays and layers (newest first), then the
base. By the column it is read and written through `ColumnTable`.

Full key: ``key group (2 bytes, big-endian) | state id (2 bytes) | user key | sub key``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from statebackend.state.blocks import ABSENT
from statebackend.state.layer_stack import LayerStack
from statebackend.state.overlay import FrozenOverlay
from statebackend.state.row_cache import RowCache
from statebackend.state.spill import OverlaySpill, Run, merge
from statebackend.state.table_base import MemoryBase, ReadableBase, after

__all__ = ["FrozenOverlay", "MemoryBase", "ReadableBase", "StateTable", "state_prefix"]


def state_prefix(key_group: int, state_id: int) -> bytes:
    """The first four bytes of every key of one state in one key group."""
    return key_group.to_bytes(2, "big") + state_id.to_bytes(2, "big")


_END: Final = (None, None)


class StateTable(LayerStack):
    """All keyed state of one subtask: one sorted map from bytes to bytes.

    Args:
        base: the confirmed state.
        spill, small_writes: see `LayerStack`.
    """

    def __init__(
        self,
        base: ReadableBase,
        *,
        spill: OverlaySpill | None = None,
        small_writes: bool = False,
    ) -> None:
        super().__init__(spill=spill, small_writes=small_writes)
        self.base = base

    def get(self, key: bytes) -> bytes | None:
        """The value of ``key``, or None."""
        found = self._overlay.entries.get(key, ABSENT)
        if found is not ABSENT:
            return found  # type: ignore[no-any-return]
        if self._frozen or self._overlay.runs or self._overlay.hot:
            for source in self.sources():
                if isinstance(source, RowCache):
                    found = source.get_many([key])[0]
                else:
                    found = source.get(key) if isinstance(source, Run) else source.get(key, ABSENT)
                if found is not ABSENT:
                    return found  # type: ignore[no-any-return]
        return self.base.get(key)

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of ``keys`` in their order; one call into the base for those not overlaid."""
        values, wanted = self.multi_get_over(keys)
        self.lookups += len(keys)
        self.base_lookups += len(wanted)
        if len(wanted) == len(keys):
            return self.base.multi_get(keys)
        if wanted:
            wanted.sort()
            read = self.base.multi_get([keys[place] for place in wanted])
            for place, value in zip(wanted, read, strict=True):
                values[place] = value
        return values

    def put(self, key: bytes, value: bytes | None) -> None:
        """Set (or, with None, delete) one key."""
        self._overlay.entries[key] = value

    def put_under(self, prefix: bytes, key: bytes, value: bytes | None) -> None:
        """As :meth:`put`, for a key that :meth:`scan` must find under ``prefix``."""
        self._overlay.entries[key] = value
        first = self._overlay.under.setdefault(prefix, key)
        if first is not key:
            self.list_under(prefix, first, key)

    def list_under(self, prefix: bytes, found: bytes | set[bytes], key: bytes) -> None:
        """Note a further key under ``prefix``, where ``found`` stands in ``under``."""
        if isinstance(found, set):
            found.add(key)
        elif found != key:
            self._overlay.under[prefix] = {found, key}

    def scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """The live entries under ``prefix`` in key order; ``prefix`` as given to ``put_under``."""
        merged: dict[bytes, bytes | None] = dict(self.base.scan(prefix))
        changed = False
        if self._overlay.hot:
            self.seal()
        for overlay in (*(f._overlay for f in self._frozen), self._overlay):
            for run in overlay.all_runs() if overlay.hot else overlay.runs:
                for key, value in run.scan(prefix, after(prefix)):
                    merged[key] = value
                    changed = True
            found = overlay.under.get(prefix, ())
            for key in (found,) if isinstance(found, bytes) else found:
                merged[key] = overlay.entries[key]
                changed = True
        if not changed:
            return list(merged.items())  # type: ignore[arg-type]
        return [(key, live) for key in sorted(merged) if (live := merged[key]) is not None]

    def snapshot(self) -> Iterator[tuple[bytes, bytes]]:
        """Every live entry in key order, overlays included: what a base delta holds."""
        return self.snapshot_under([*self._frozen, FrozenOverlay(-1, self._overlay)])

    def snapshot_under(self, layers: Sequence[FrozenOverlay]) -> Iterator[tuple[bytes, bytes]]:
        """As :meth:`snapshot`, of the base and these layers (the oldest first).

        They need not be the table's any more; the base may hold some of them meanwhile.
        """
        pending = _changes(layers)
        upcoming, over = next(pending, _END)
        for key, value in self.base.scan():
            while upcoming is not None and upcoming < key:
                if over is not None:
                    yield upcoming, over
                upcoming, over = next(pending, _END)
            if upcoming == key:
                if over is not None:
                    yield key, over
                upcoming, over = next(pending, _END)
            else:
                yield key, value
        while upcoming is not None:
            if over is not None:
                yield upcoming, over
            upcoming, over = next(pending, _END)


def _changes(layers: Sequence[FrozenOverlay]) -> Iterator[tuple[bytes, bytes | None]]:
    """All that lies over the base, in key order."""
    overlays = [layer._overlay for layer in layers]
    if any(overlay.runs or overlay.hot for overlay in overlays):
        for keys, values in merge([run for o in overlays for run in o.all_runs()]):
            yield from zip(keys.to_pylist(), values.to_pylist(), strict=True)
        return
    merged: dict[bytes, bytes | None] = {}
    for overlay in overlays:
        merged.update(overlay.entries)
    for key in sorted(merged):
        yield key, merged[key]
