"""Makes a savepoint out of tables: `write_savepoint`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from blake3 import blake3

from recovery.savepoints.savepoint import Begun, Savepoint, SavepointOperator
from recovery.savepoints.savepoint_folder import SavepointFolder
from snapshot.formats.delta import chain, chain_start
from snapshot.formats.delta_stream import EncodedDelta, encode_stream
from snapshot.formats.names import data_name
from snapshot.formats.record import Manifest, SliceEntry
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.operators import operators_setting
from snapshot.protocol.tenure import Tenure
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.open import open_store, probe
from snapshot.storage.store_options import StoreOptions
from statebackend.keygroups import check_parallelism, key_group_range
from statebackend.rocks.parted import Store
from statebackend.rocks.parted import open_store as open_local
from statebackend.state.blocks import binary_array
from statebackend.state.expiry import TIME_BYTES, ListHead
from statebackend.system import SYSTEM, System
from statebackend.tables.given_operators import (
    MAX_PARALLELISM,
    GivenOperator,
    OperatorState,
    check_operators,
)
from statebackend.tables.given_rows import Entry, GivenState, timer_entries
from statebackend.tables.scan import scratch_folder
from statebackend.tables.temporary_copy import READ_SETTINGS

__all__ = ["OperatorState", "write_savepoint"]

_EPOCH: Final = 0  # the savepoint's
_PIECE: Final = 4096
_PIECE_BYTES: Final = 16 << 20
_COUNT_BYTES: Final = 8


def write_savepoint(
    to: str,
    operators: Mapping[str, OperatorState],
    *,
    parallelism: int = 1,
    max_parallelism: int = MAX_PARALLELISM,
    watermark_ms: int | None = None,
    options: StoreOptions | None = None,
    scratch_dir: str | None = None,
    system: System = SYSTEM,
) -> Savepoint:
    """Write tables as a savepoint, which a job can begin with: ``StateBackend(savepoint=...)``.

    The query that begins with it reads its sources from their start. Memory: a batch. A folder in
    ``scratch_dir`` takes the state of an operator meanwhile, which is sorted there.

    Args:
        to: the savepoint's folder, a URI; empty.
        operators: by uid.
        parallelism: in how many parts the state is written; a job may have another one.
        max_parallelism: key groups. The job that begins with it has so many.
        watermark_ms: in force; timers of event time at or before it fire in the first batch.
        options: how S3 is reached.

    Returns:
        the savepoint.

    Raises:
        SettingError: there is no operator, an argument is of no use, or something lies in the
            folder already.
        SchemaError, ValueMismatchError, NullKeyError: rows that are no state.
        StoreUnreachableError: from the store.

    Where it fails, what was written is removed, or is no savepoint: `savepoint.json` comes last.
    """
    check_parallelism(parallelism, max_parallelism)
    check_operators(operators, watermark_ms)
    target = open_store(to, new_id=system.new_id, options=options)
    probe(target, new_id=system.new_id)
    writing = _Writing(target, parallelism, max_parallelism, watermark_ms, system)
    # What is wrong with schemas is said before anything is written.
    declared = {uid: GivenOperator.of(uid, one) for uid, one in operators.items()}
    with scratch_folder(scratch_dir) as scratch:
        return writing.run(declared, scratch)


class _Writing:
    """One savepoint that is being made."""

    def __init__(
        self,
        target: ObjectStore,
        parallelism: int,
        max_parallelism: int,
        watermark_ms: int | None,
        system: System,
    ) -> None:
        self._target, self._system = target, system
        self._parallelism, self._max = parallelism, max_parallelism
        self._watermark_ms = watermark_ms
        self._stamp_ms = system.wall_ms()
        self._id = f"{_EPOCH:010d}-{system.new_id()[-12:]}"
        self._job_id = system.new_uuid()
        self._objects = 0

    def run(self, operators: Mapping[str, GivenOperator], scratch: Path) -> Savepoint:
        """Take the folder, write each operator's record, and say at last that it is whole."""
        begun = Begun(id=self._id, job=self._id, job_uri="", created_ms=self._stamp_ms)
        into = SavepointFolder(self._target, begun)
        try:
            savepoint = self._written(operators, scratch)
            into.finish(savepoint)
        except BaseException:  # a row that does not fit, or Ctrl-C
            into.leave()
            raise
        return savepoint

    def _written(self, operators: Mapping[str, GivenOperator], scratch: Path) -> Savepoint:
        system = self._system
        log = CommitLog(
            self._target,
            job=self._id,
            writer="write_savepoint",
            new_id=system.new_id,
            threads=system.threads,
        )
        settings = operators_setting(dict.fromkeys(operators, _EPOCH))
        tenure = log.claim(
            job_id=self._job_id,
            query_id="",
            run=self._id,
            stamp_ms=self._stamp_ms,
            settings=settings,
        )
        sizes = {}
        for number, (uid, one) in enumerate(operators.items()):
            folder = scratch / str(number)
            folder.mkdir()
            sizes[uid] = self._operator(log, tenure, uid, one, folder, settings)
        return self._described(operators, sizes)

    def _operator(
        self,
        log: CommitLog,
        tenure: Tenure,
        uid: str,
        given: GivenOperator,
        folder: Path,
        settings: dict[str, Any],
    ) -> int:
        states = [state for state, _ in given.states]
        store = open_local(str(folder / "db"), READ_SETTINGS)
        try:
            for state, batches in given.states:
                _fill(store, _entries_of(state, batches, self._max))
            next_timer_ms = self._timers(store, given)
            slices = [
                self._slice(store, tenure, uid, number, states, folder)
                for number in range(self._parallelism)
            ]
        finally:
            store.close()
        log.append(
            tenure,
            Manifest(
                kind="checkpoint",
                job="",
                job_id="",
                generation=0,
                sequence=0,
                writer="",
                write_id="",
                oldest_needed=tenure.oldest_needed,
                run=self._id,
                operator=uid,
                epoch=_EPOCH,
                stamp_ms=self._stamp_ms,
                watermark_ms=self._watermark_ms,
                event_max_ms=self._watermark_ms,
                next_timer_ms=next_timer_ms,
                time_mode=given.time_mode,
                parallelism=self._parallelism,
                max_parallelism=self._max,
                first_epoch=_EPOCH,
                schemas={
                    "": given.key.json(),
                    **{one.name: one.declared.to_json() for one in states},
                },
                states={one.name: one.id for one in states},
                slices=slices,
                settings=settings,
            ),
            [None if one.size_bytes else b"" for one in slices],
        )
        return sum(one.size_bytes for one in slices)

    def _timers(self, store: Store, given: GivenOperator) -> int | None:
        """Write the timers; when the first is due."""
        earliest: list[int] = []

        def entries() -> Iterator[Entry]:
            for batch in given.timers:
                yield from timer_entries(batch, given.key, self._max)
                if batch.num_rows:
                    earliest.append(min(batch.column("at_ms").to_pylist()))

        _fill(store, entries())
        return min(earliest, default=None)

    def _slice(
        self,
        store: Store,
        tenure: Tenure,
        uid: str,
        subtask: int,
        states: list[GivenState],
        folder: Path,
    ) -> SliceEntry:
        groups = key_group_range(subtask, self._parallelism, self._max)
        lists = {
            one.id.to_bytes(2, "big"): _plain_head if one.ttl is None else _expiring_head
            for one in states
            if one.kind == "list"
        }
        ranges = [(group.to_bytes(2, "big"), (group + 1).to_bytes(2, "big")) for group in groups]

        def pieces() -> Iterator[Entry]:
            for keys, values in store.scan_ranges(ranges):
                yield from zip(keys, values, strict=True)

        rows = sum(1 for _ in _with_heads(pieces(), lists))
        encoded = EncodedDelta(b"", None, blake3(b"").digest(), 0, 0)
        name = None
        if rows:
            in_columns = _columns(_with_heads(pieces(), lists))
            encoded = encode_stream(in_columns, rows, folder / "slice")
            assert encoded.path is not None
            name = data_name(tenure.generation, _EPOCH, self._system.new_id())
            self._target.put_file(name, encoded.path)
            self._objects += 1
        start = chain_start(self._job_id, uid, (groups.start, groups.end))
        return SliceEntry(
            operator=uid,
            subtask=subtask,
            kind="delta",
            epoch=_EPOCH,
            key_group_start=groups.start,
            key_group_end=groups.end,
            attempt=0,
            rows=rows,
            size_bytes=encoded.size_bytes,
            digest=encoded.digest.hex(),
            chain=chain(start, encoded.digest).hex(),
            object=name,
        )

    def _described(self, operators: Iterable[str], sizes: dict[str, int]) -> Savepoint:
        return Savepoint(
            id=self._id,
            uri=self._target.uri,
            job=self._id,
            job_id=self._job_id,
            job_uri="",
            query_id="",
            location="",
            epoch=_EPOCH,
            stamp_ms=self._stamp_ms,
            watermark_ms=self._watermark_ms,
            created_ms=self._stamp_ms,
            operators=[
                SavepointOperator(
                    uid=uid,
                    parallelism=self._parallelism,
                    max_parallelism=self._max,
                    first_epoch=_EPOCH,
                    epoch=_EPOCH,
                    size_bytes=sizes[uid],
                )
                for uid in sorted(operators)
            ],
            records=len(sizes),
            objects=self._objects,
            size_bytes=sum(sizes.values()),
            spark=[],
        )


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


def _columns(entries: Iterable[Entry]) -> Iterator[tuple[pa.BinaryArray, pa.BinaryArray]]:
    yield from _pieces(
        entries,
        lambda some: (binary_array([k for k, _ in some]), binary_array([v for _, v in some])),
    )


def _plain_head(elements: list[bytes]) -> bytes:
    return len(elements).to_bytes(_COUNT_BYTES, "big")


def _expiring_head(elements: list[bytes]) -> bytes:
    times = [one[:TIME_BYTES] for one in elements]
    return ListHead(0, len(elements), latest=max(times), next_look=min(times)).encode()


def _with_heads(
    entries: Iterable[Entry], lists: Mapping[bytes, Callable[[list[bytes]], bytes]]
) -> Iterator[Entry]:
    """The entries of a store, with those of lists as a state has them.

    Elements come under the number of their row. In a state they count from 0, and before them
    stands their head. An element's key is read to its end: its last 8 bytes are the number.

    Args:
        lists: by the ids of their states, how a head is made of the elements.
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
