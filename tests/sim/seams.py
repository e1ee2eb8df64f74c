"""Where the simulation takes the place of what the real code is not handed: files, and sizes.

`installed` sets names in modules for as long as a world runs, and puts them back. Nothing of the
protocol is replaced here: only what it stands on, and (in most worlds) Arrow's encoding of deltas,
which takes half a millisecond and decides nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from blake3 import blake3

import recovery.local.local_copies
import recovery.local.private_folders
import recovery.local.store_directory
import recovery.restore.rescaled_store
import recovery.restore.restorer
import recovery.restore.step_reader
import recovery.savepoints.state_copy
import statebackend.runtime.worker.background_upload
import statebackend.runtime.worker.slice_parts
import statebackend.spark.start.launch
import statebackend.spark.worker.task
import statebackend.tables.erase_from_log
import statebackend.tables.temporary_copy
from recovery.local.local_copies import LocalSubtask
from snapshot.formats.delta import Delta, DeltaRows, check_digest
from snapshot.formats.delta_in_pieces import EncodedDelta
from snapshot.retention import history_keeping
from statebackend.rocks import parted
from statebackend.rocks import parts_layout as layout
from statebackend.rocks import store as rocks
from statebackend.rocks.parted import Opener
from statebackend.state.table import FrozenOverlay
from tests.sim import initial
from tests.sim.files import Disk, MemPath

__all__ = ["decoded", "installed"]

_ABSENT = object()
_BATCH_ROWS = 4  # of a store's write: a delta is applied in several
_EPOCHS_AN_OBJECT = 3  # of the history
_IN_MEMORY_BYTES = 300  # of an object that a savepoint copies


def _text(path: MemPath) -> str | None:
    return path.read_text() if path.exists() else None


# --- a quick encoding -------------------------------------------------------------------------


def _encoded(keys: Sequence[bytes], values: Sequence[bytes | None]) -> Delta:
    data = msgspec.msgpack.encode(list(zip(keys, values, strict=True)))
    return Delta(data, blake3(data).digest(), len(keys))


def _encoded_frozen(frozen: FrozenOverlay, path: Callable[[], Path]) -> EncodedDelta:
    if not len(frozen):
        return EncodedDelta(b"", None, blake3(b"").digest(), 0, 0)
    delta = _encoded(*frozen.sorted())
    return EncodedDelta(delta.data, None, delta.digest, len(delta.data), delta.rows)


def _encoded_stream(
    pieces: Iterator[tuple[pa.BinaryArray, pa.BinaryArray]], rows: int, path: Path
) -> EncodedDelta:
    keys, values = list[bytes](), list[bytes | None]()
    for some, more in pieces:
        keys += some.to_pylist()
        values += more.to_pylist()
    delta = _encoded(keys, values)
    path.write_bytes(delta.data)
    return EncodedDelta(None, path, delta.digest, len(delta.data), rows)


def _pairs(data: bytes) -> list[tuple[bytes, bytes | None]]:
    return msgspec.msgpack.decode(data, type=list[tuple[bytes, bytes | None]])


def _iterated(
    source: bytes | Path, *, digest: bytes | None = None, name: str = ""
) -> Iterator[DeltaRows]:
    data = source if isinstance(source, bytes) else source.read_bytes()
    if digest is not None:
        check_digest(blake3(data).digest(), digest, name)
    pairs = _pairs(data)
    for start in range(0, len(pairs), _BATCH_ROWS):
        piece = pairs[start : start + _BATCH_ROWS]
        yield DeltaRows(
            pa.array([key for key, _ in piece], pa.binary()),
            pa.array([value for _, value in piece], pa.binary()),
        )


def decoded(data: bytes, *, arrow: bool) -> list[tuple[bytes, bytes | None]]:
    """A delta's rows, for checkers."""
    if not data:
        return []
    if not arrow:
        return _pairs(data)
    from snapshot.formats.delta import decode_delta

    rows = decode_delta(data)
    return list(zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True))


# --- all of it --------------------------------------------------------------------------------


def _replacements(
    disk: Disk, *, small_bytes: int, arrow: bool, opener: Opener
) -> Iterator[tuple[Any, str, Any]]:
    yield parted, "os", disk.os
    yield layout, "open", lambda path, mode: MemPath(path).open(mode)
    yield recovery.restore.rescaled_store, "SMALL_BYTES", small_bytes
    yield recovery.local.local_copies, "Path", MemPath
    # One user has the disks of a world.
    yield recovery.local.local_copies, "home_of", MemPath
    yield (
        recovery.local.local_copies,
        "own_folder",
        lambda path: path.mkdir(parents=True, exist_ok=True),
    )
    yield recovery.local.local_copies, "own_file_text", _text
    for module in (
        recovery.local.private_folders,
        recovery.local.store_directory,
        recovery.local.local_copies,
        recovery.restore.rescaled_store,
        recovery.restore.restorer,
        statebackend.runtime.worker.background_upload,
    ):
        for name in ("os", "fcntl", "shutil"):
            if hasattr(module, name):
                yield module, name, getattr(disk, name)
    yield statebackend.spark.start.launch, "write_initial", initial.write
    yield statebackend.tables.erase_from_log, "shutil", disk.shutil
    yield (
        statebackend.tables.erase_from_log,
        "open_store",
        lambda path, settings: parted.open_store(path, settings, opener=opener),
    )
    copies = functools.partial(LocalSubtask, opener=opener)
    yield statebackend.tables.temporary_copy, "LocalSubtask", copies
    yield rocks, "_BATCH_ROWS", _BATCH_ROWS
    yield history_keeping, "EPOCHS_AN_OBJECT", _EPOCHS_AN_OBJECT
    yield recovery.savepoints.state_copy, "_IN_MEMORY_BYTES", _IN_MEMORY_BYTES
    if not arrow:
        yield statebackend.spark.worker.task, "encode_frozen", _encoded_frozen
        yield statebackend.runtime.worker.slice_parts, "encode_delta", _encoded
        yield statebackend.runtime.worker.background_upload, "encode_delta", _encoded
        yield recovery.restore.step_reader, "iter_delta", _iterated
        yield statebackend.tables.erase_from_log, "encode_stream", _encoded_stream


@contextlib.contextmanager
def installed(
    disk: Disk, *, small_bytes: int, arrow: bool, opener: Opener = parted.open_database
) -> Iterator[None]:
    """While open, the real code's files are the simulation's.

    Args:
        small_bytes: stores up to this size are copied into another when they are put together.
        arrow: whether deltas are encoded as they really are.
        opener: opens a store of the process that runs.
    """
    before: list[tuple[Any, str, Any]] = []
    silent = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for module, name, value in _replacements(
            disk, small_bytes=small_bytes, arrow=arrow, opener=opener
        ):
            before.append((module, name, getattr(module, name, _ABSENT)))
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in reversed(before):
            if value is _ABSENT:  # a builtin's name
                delattr(module, name)
            else:
                setattr(module, name, value)
        logging.disable(silent)
