"""What a state has become from one epoch to another: `read_changes`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

import pyarrow as pa

from snapshot.storage.store_options import StoreOptions
from statebackend.errors import (
    SettingError,
)
from statebackend.state.blocks import binary_array
from statebackend.tables.entry_rows import StateRows
from statebackend.tables.state_scan import (
    BATCH_BYTES,
    BATCH_ROWS,
    ChosenColumns,
    Entries,
    StatePlace,
    StateSource,
    beside_cleaning,
    entries,
    scratch_folder,
    state_source,
)
from statebackend.tables.stored_job import StoredJob

__all__ = ["read_changes"]

_END: Final = None, b""
_INSERT, _UPDATE, _DELETE = "insert", "update", "delete"

Change = tuple[bytes, bytes | None, bytes | None]
"""A key, and what was stored under it before and after."""


def read_changes(
    uri: str,
    job: str,
    operator: str,
    state: str,
    *,
    from_epoch: int,
    to_epoch: int | None = None,
    keys: Any = None,
    columns: Sequence[str] | None = None,
    options: StoreOptions | None = None,
    scratch_dir: str | None = None,
) -> pa.RecordBatchReader:
    """What changed in a state between the ends of two epochs that the job retains.

    Both are fetched before this returns. The parallelism may have changed in between. Memory: a
    batch.

    Args:
        to_epoch: default: the newest durable one. The others: as `statebackend.read_state`.

    Returns:
        ``change`` (insert, update or delete), ``key_group``, ``key``, of a list ``index``, of a map
        ``map_key``, and ``before`` and ``value``: structs by the newer epoch's schema, null where
        there is no row. A row whose time to live alone moved on is an update.

    Raises:
        SettingError: of an operator, state or column that is not there; of a state of no key; or
            the epochs are in the wrong order.
        NotRestorableError: an epoch is not retained. FormatError: what is there does not read.
        StoreUnreachableError: from the store.
    """
    if to_epoch is not None:
        _check_order(from_epoch, to_epoch)
    later = StatePlace(uri, job, to_epoch, None, options, scratch_dir)
    earlier = StatePlace(uri, job, from_epoch, None, options, scratch_dir)

    def read(newer: StoredJob) -> pa.RecordBatchReader:
        _check_order(from_epoch, newer.epoch)
        return _reader(earlier.find(), newer, operator, state, keys, columns, scratch_dir)

    return beside_cleaning(later.find, read, lambda newer: newer.epoch)


def _check_order(from_epoch: int, to_epoch: int) -> None:
    if from_epoch > to_epoch:
        raise SettingError(
            f"The changes from epoch {from_epoch} to epoch {to_epoch} were asked for.",
            todo="Give the earlier epoch as from_epoch=.",
        )


def _reader(
    older: StoredJob,
    newer: StoredJob,
    operator: str,
    state: str,
    keys: Any,
    columns: Sequence[str] | None,
    scratch_dir: str | None,
) -> pa.RecordBatchReader:
    """The changes; both epochs are fetched before this returns."""
    source = state_source(newer.operator(operator), state, keys)
    if not isinstance(source.rows, StateRows):
        raise SettingError(
            f"State {state!r} of operator {operator!r} belongs to no key: its changes are not kept "
            f"apart.",
            todo="Read it at both epochs with read_state() and compare.",
        )
    schema = _schema(source.rows)
    taken = ChosenColumns(schema, columns)
    before = _before(older, newer, source, keys)
    stack = ExitStack()
    with stack:
        folders = [stack.enter_context(scratch_folder(scratch_dir)) for _ in range(2)]
        old = entries(older, before, folders[0]) if before else iter(())
        streams = [_fetched(old), _fetched(entries(newer, source, folders[1]))]
        kept = stack.pop_all()  # the folders go once the reader has
    batches = _batches(source.rows, schema, streams, kept)
    return pa.RecordBatchReader.from_batches(taken.schema, map(taken.of, batches))


def _before(
    older: StoredJob, newer: StoredJob, source: StateSource, keys: Any
) -> StateSource | None:
    """The same state in the older epoch; None where it was not there, or another of its name."""
    operator = older.operators.get(source.operator.uid)
    assert source.state is not None
    name = source.state.declared.name
    if operator is None or operator.lineage.first_epoch != source.operator.lineage.first_epoch:
        return None
    if name not in operator.states or operator.states[name].id != source.state.id:
        return None
    return state_source(operator, name, keys)


def _schema(rows: StateRows) -> pa.Schema:
    value = rows.schema.field("value")
    fields = [one for one in rows.schema if one.name not in ("value", "expires_at_ms")]
    return pa.schema([("change", pa.string()), *fields, ("before", value.type), value])


def _fetched(pieces: Iterator[Entries]) -> Iterator[tuple[bytes, bytes]]:
    """The entries one by one; what they lie in has been fetched."""
    first = next(pieces, None)

    def each() -> Iterator[tuple[bytes, bytes]]:
        if first is not None:
            yield from zip(*first, strict=True)
        for keys, values in pieces:
            yield from zip(keys, values, strict=True)

    return each()


def _batches(
    rows: StateRows,
    schema: pa.Schema,
    streams: list[Iterator[tuple[bytes, bytes]]],
    kept: ExitStack,
) -> Iterator[pa.RecordBatch]:
    with kept:
        found: list[Change] = []
        size_bytes = 0
        for change in _merged(*streams):
            found.append(change)
            key, before, after = change
            size_bytes += len(key) + len(before or b"") + len(after or b"")
            if len(found) >= BATCH_ROWS or size_bytes >= BATCH_BYTES:
                yield _batch(rows, schema, found)
                found, size_bytes = [], 0
        if found:
            yield _batch(rows, schema, found)


def _merged(
    old: Iterator[tuple[bytes, bytes]], new: Iterator[tuple[bytes, bytes]]
) -> Iterator[Change]:
    """Keys whose entries differ; both streams ascend."""
    key, value = next(old, _END)
    for at, after in new:
        while key is not None and key < at:
            yield key, value, None
            key, value = next(old, _END)
        if key == at:
            if value != after:
                yield at, value, after
            key, value = next(old, _END)
        else:
            yield at, None, after
    while key is not None:
        yield key, value, None
        key, value = next(old, _END)


def _batch(rows: StateRows, schema: pa.Schema, changes: list[Change]) -> pa.RecordBatch:
    keys, before, after = (list(column) for column in zip(*changes, strict=True))
    named, places = rows.named(binary_array(keys))
    old, new = binary_array(before), binary_array(after)
    if places is not None:
        old, new = old.take(places), new.take(places)
    kinds = [
        _INSERT if was is None else _DELETE if now is None else _UPDATE
        for was, now in zip(old.to_pylist(), new.to_pylist(), strict=True)
    ]
    arrays = [pa.array(kinds, pa.string()), *named, rows.values(old), rows.values(new)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
