"""Makes a savepoint of what a caller gives: its operators, their rows, where sources stood."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

from recovery.savepoints.savepoint import Savepoint
from snapshot.formats.record import SliceEntry
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.store_probe import probe
from snapshot.storage.stores_by_uri import open_store
from statebackend.keygroups import check_parallelism, key_group_range
from statebackend.rocks.parted import Store
from statebackend.rocks.parted import open_store as open_local
from statebackend.state.blocks import binary_array
from statebackend.state.expiry_index import TIME_BYTES, ListHead
from statebackend.system import SYSTEM, System
from statebackend.tables.given_keyless import broadcast_blob, list_blobs
from statebackend.tables.given_operators import (
    MAX_PARALLELISM,
    GivenOperator,
    OperatorState,
    check_operators,
)
from statebackend.tables.given_rows import Entry, GivenState, timer_entries
from statebackend.tables.given_sources import Stood
from statebackend.tables.saved_query import SavedQuery
from statebackend.tables.savepoint_writer import (
    Columns,
    OperatorRecord,
    SavepointHead,
    SavepointWriter,
)
from statebackend.tables.state_scan import scratch_folder

__all__ = [
    "KeyedSlices",
    "KeyedWriter",
    "ListHeadOf",
    "entry_columns",
    "in_one_process",
    "list_heads",
    "write_operators",
    "write_saved_query",
]

_PIECE: Final = 4096
_PIECE_BYTES: Final = 16 << 20
_COUNT_BYTES: Final = 8

ListHeadOf = Callable[[list[bytes]], bytes]
"""Makes the head of a list of its elements."""


@dataclass(frozen=True)
class KeyedSlices:
    """What was written of an operator's keys. ``next_timer_ms``: when its first timer is due."""

    slices: list[SliceEntry]
    next_timer_ms: int | None


class KeyedWriter(Protocol):
    """Writes what an operator holds of keys; ``folder`` takes it meanwhile."""

    def __call__(
        self, writer: SavepointWriter, uid: str, given: GivenOperator, folder: Path
    ) -> KeyedSlices:
        """See the class."""


def write_saved_query(
    to: str,
    operators: Mapping[str, OperatorState],
    stood: Stood | SavedQuery | None,
    *,
    watermark_ms: int | None = None,
    parallelism: int = 1,
    max_parallelism: int = MAX_PARALLELISM,
    options: StoreOptions | None = None,
    scratch_dir: str | None = None,
    system: System = SYSTEM,
    keyed: KeyedWriter | None = None,
) -> Savepoint:
    """As `statebackend.write_savepoint`, of a query whose place is known.

    Args:
        keyed: writes what operators hold of keys.

    Raises:
        as that, and what the place checks.
    """
    check_parallelism(parallelism, max_parallelism)
    check_operators(operators, watermark_ms)
    target = open_store(to, new_id=system.new_id, options=options)
    # What is wrong with schemas is said before anything is written, a probe of the store included.
    declared = {
        uid: replace(
            GivenOperator.of(uid, one),
            parallelism=parallelism,
            max_parallelism=max_parallelism,
            watermark_ms=watermark_ms,
            event_max_ms=watermark_ms,
        )
        for uid, one in operators.items()
    }
    plain = SavepointHead(stamp_ms=system.wall_ms(), watermark_ms=watermark_ms)
    head = plain if stood is None else stood.named(plain)
    probe(target, new_id=system.new_id)
    return write_operators(target, head, declared, stood, scratch_dir, system, keyed)


def write_operators(
    target: ObjectStore,
    head: SavepointHead,
    operators: Mapping[str, GivenOperator],
    stood: Stood | SavedQuery | None,
    scratch_dir: str | None,
    system: System,
    keyed: KeyedWriter | None = None,
) -> Savepoint:
    """Write operators whose schemas are known as a savepoint.

    Args:
        stood: where the sources stood; None: nothing is known of that.
        keyed: default: `in_one_process`.

    Raises:
        as `statebackend.write_savepoint`.
    """
    writer = SavepointWriter(target, head, operators, system)
    with scratch_folder(scratch_dir) as scratch:

        def write(to: SavepointWriter) -> None:
            for number, (uid, one) in enumerate(operators.items()):
                folder = scratch / str(number)
                folder.mkdir()
                _write_operator(to, uid, one, folder, keyed or in_one_process)
                shutil.rmtree(folder, ignore_errors=True)  # room for the next
            if stood is not None:
                to.files = stood.copy(target, scratch, system)
                stood.check()

        return writer.run(write)


def _write_operator(
    writer: SavepointWriter, uid: str, given: GivenOperator, folder: Path, keyed: KeyedWriter
) -> None:
    written = keyed(writer, uid, given, folder)
    keyless = [(one.name, one.declared, one.id) for one in given.keyless]
    states = [(one.name, one.declared, one.id) for one, _ in given.states]
    record = OperatorRecord(
        key_schema=given.key.json(),
        states={name: (declared, number) for name, declared, number in (*states, *keyless)},
        parallelism=given.parallelism,
        max_parallelism=given.max_parallelism,
        time_mode=given.time_mode,
        watermark_ms=given.watermark_ms,
        event_max_ms=given.event_max_ms,
        second_max_ms=given.second_max_ms,
        next_timer_ms=written.next_timer_ms,
        lists=list_blobs(given.keyless, given.parallelism),
        broadcast=broadcast_blob(given.keyless),
    )
    writer.operator(uid, record, written.slices)


def in_one_process(
    writer: SavepointWriter, uid: str, given: GivenOperator, folder: Path
) -> KeyedSlices:
    """Write what an operator holds of keys from here; a RocksDB in the folder sorts it."""
    of = given.parallelism, given.max_parallelism
    lists = list_heads(given)
    store = open_local(str(folder / "db"))
    try:
        for state, batches in given.states:
            _fill(store, _entries_of(state, batches, given.max_parallelism))
        next_timer_ms = _timers(store, given)
        slices = []
        for subtask in range(given.parallelism):
            groups = key_group_range(subtask, *of)

            def columns(groups: Iterable[int] = groups) -> Columns:
                return entry_columns(_in_groups(store, groups), lists)

            slices.append(writer.slice(uid, subtask, of, columns, folder))
    finally:
        store.close()
    return KeyedSlices(slices, next_timer_ms)


def list_heads(given: GivenOperator) -> dict[bytes, ListHeadOf]:
    """How the heads of an operator's lists are made, by the ids of their states."""
    return {
        one.id.to_bytes(2, "big"): _plain_head if one.ttl is None else _expiring_head
        for one, _ in given.states
        if one.kind == "list"
    }


def _timers(store: Store, given: GivenOperator) -> int | None:
    """Write the timers; when the first is due."""
    earliest: list[int] = []

    def entries() -> Iterator[Entry]:
        for batch in given.timers:
            yield from timer_entries(batch, given.key, given.max_parallelism)
            if batch.num_rows:
                earliest.append(min(batch.column("at_ms").to_pylist()))

    _fill(store, entries())
    return min(earliest, default=None)


def _in_groups(store: Store, groups: Iterable[int]) -> Iterator[Entry]:
    ranges = [(group.to_bytes(2, "big"), (group + 1).to_bytes(2, "big")) for group in groups]
    for keys, values in store.scan_ranges(ranges):
        yield from zip(keys, values, strict=True)


def _entries_of(
    state: GivenState, batches: Iterator[pa.RecordBatch], max_parallelism: int
) -> Iterator[Entry]:
    first = 0
    for batch in batches:
        yield from state.entries(batch, max_parallelism, first)
        first += batch.num_rows


def _fill(store: Store, entries: Iterable[Entry]) -> None:
    """Into the store, which sorts them."""
    store.apply_batches(_pieces(entries, lambda some: _split(dict(some))), None)


def _pieces(entries: Iterable[Entry], made: Callable[[list[Entry]], Any]) -> Iterator[Any]:
    """Of so many entries or bytes, whichever comes first."""
    some: list[Entry] = []
    size_bytes = 0
    for entry in entries:
        some.append(entry)
        size_bytes += len(entry[0]) + len(entry[1])
        if len(some) >= _PIECE or size_bytes >= _PIECE_BYTES:
            yield made(some)
            some, size_bytes = [], 0
    if some:
        yield made(some)


def _split(entries: dict[bytes, bytes]) -> tuple[list[bytes], list[bytes | None]]:
    return list(entries), list(entries.values())


def entry_columns(entries: Iterable[Entry], lists: Mapping[bytes, ListHeadOf]) -> Columns:
    """Entries in the order of their keys, as a slice has them.

    Args:
        lists: see `list_heads`.
    """
    yield from _pieces(
        _with_heads(entries, lists),
        lambda some: (binary_array([k for k, _ in some]), binary_array([v for _, v in some])),
    )


def _plain_head(elements: list[bytes]) -> bytes:
    return len(elements).to_bytes(_COUNT_BYTES, "big")


def _expiring_head(elements: list[bytes]) -> bytes:
    times = [one[:TIME_BYTES] for one in elements]
    return ListHead(0, len(elements), latest=max(times), next_look=min(times)).encode()


def _with_heads(entries: Iterable[Entry], lists: Mapping[bytes, ListHeadOf]) -> Iterator[Entry]:
    """The entries of a store, with those of lists as a state has them.

    Elements come under the number of their row. In a state they count from 0, and before them
    stands their head. An element's key is read to its end: its last 8 bytes are the number.
    """
    own, elements = b"", list[bytes]()

    def flushed() -> Iterator[Entry]:
        if elements:
            yield own, lists[own[2:4]](elements)
            for index, row in enumerate(elements):
                yield own + index.to_bytes(_COUNT_BYTES, "big"), row
            elements.clear()

    for key, value in entries:
        if key[2:4] not in lists:
            yield from flushed()
            yield key, value
            continue
        if key[:-_COUNT_BYTES] != own:
            yield from flushed()
            own = key[:-_COUNT_BYTES]
        elements.append(value)
    yield from flushed()
