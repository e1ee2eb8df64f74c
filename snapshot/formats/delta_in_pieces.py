"""Deltas that need not fit into memory: encoded into a file, decoded by the batch.

The format is that of :mod:`snapshot.formats.delta`, to the byte.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from blake3 import blake3

from snapshot.formats.delta import (
    DeltaRows,
    KeyOrder,
    check_digest,
    check_rows,
    check_schema,
    damaged,
    delta_sizes,
    encode_columns,
    encode_delta,
    write_stream,
)
from statebackend.state.blocks import disk_failed
from statebackend.state.spill import cut_places
from statebackend.state.table import FrozenOverlay

__all__ = ["EncodedDelta", "as_lists", "encode_frozen", "encode_stream", "iter_delta"]

_READ_BYTES: Final = 1 << 20
# What is decoded at a time as Python objects; batches of old files may be far larger.
_PIECE_ROWS: Final = 16_384
_PIECE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """One encoded delta, in memory or in a file.

    Attributes:
        data: the Arrow IPC stream; empty for no rows, None if it is in a file.
        path: the file; it belongs to the caller. None if it is in memory.
        digest: blake3 of the stream, 32 bytes.
        size_bytes: of the stream.
        rows: rows in it, deletions included. deletions: how many of them are.
    """

    data: bytes | None
    path: Path | None
    digest: bytes
    size_bytes: int
    rows: int
    deletions: int = 0


def encode_frozen(
    frozen: FrozenOverlay, path: Callable[[], Path], *, level: int = 1
) -> EncodedDelta:
    """Encode an epoch's changes: in memory if they are there, into a file if some were spilled.

    Args:
        path: names the file; called if there is to be one. What stands there is written over.
        level: of zstd, 1 (fast) to 22.

    Raises:
        LocalDirError: the disk is full or failed.
    """
    if frozen.spilled:
        return encode_stream(frozen.merged(), len(frozen), path(), level=level)
    if not len(frozen):
        return EncodedDelta(b"", None, blake3(b"").digest(), 0, 0)
    encode = encode_delta if frozen.columns is None else encode_columns
    delta = encode(*(frozen.columns or frozen.sorted()), level=level)
    return EncodedDelta(
        delta.data, None, delta.digest, len(delta.data), delta.rows, delta.deletions
    )


def encode_stream(
    pieces: Iterable[tuple[pa.BinaryArray, pa.BinaryArray]],
    rows: int,
    path: Path,
    *,
    level: int = 1,
) -> EncodedDelta:
    """Encode keys and values into a file, in memory for one batch; no file is left on an error.

    The file is not synced.

    Args:
        pieces: strictly ascending over all pieces.
        rows: how many there are in all.

    Raises:
        SettingError: the keys do not ascend, or there are more or fewer rows.
        LocalDirError: the disk is full or failed.
    """
    deletions = 0

    def counted() -> Iterator[tuple[pa.BinaryArray, pa.BinaryArray]]:
        nonlocal deletions
        for keys, values in pieces:
            deletions += values.null_count
            yield keys, values

    try:
        with path.open("wb") as file:
            sink = _HashedFile(file)
            write_stream(sink, counted(), rows, level=level)
    except BaseException as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_failed(path, error) from error
        raise
    return EncodedDelta(None, path, sink.digest(), sink.size_bytes, rows, deletions)


class _HashedFile(io.RawIOBase):
    """Passes on what is written, and takes its digest."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._hasher = blake3()
        self.size_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._file.write(view)
        self._hasher.update(view)
        self.size_bytes += view.nbytes
        return view.nbytes

    def digest(self) -> bytes:
        return self._hasher.digest()


def iter_delta(
    source: bytes | Path, *, digest: bytes | None = None, name: str = ""
) -> Iterator[DeltaRows]:
    """Decode and check a delta piece by piece, in memory for one batch.

    The digest is checked before the first piece is given. What only the whole can show (its number
    of rows) is checked at the end, so without a digest the pieces count for nothing until then.

    Args:
        source: the bytes, or the file that holds them.
        digest: the one that the record names (32 bytes); a file is read once more for it.
        name: the object, for errors.

    Raises:
        CorruptionError: the digest differs, the bytes are no delta, or the file cannot be read.
        UnsupportedFormatError: a format version or a feature that this release does not read.
    """
    if digest is not None:
        check_digest(_digest_of(source, name), digest, name)
    rows, order = 0, KeyOrder()
    with contextlib.ExitStack() as stack:
        try:
            stream = pa.OSFile(str(source)) if isinstance(source, Path) else pa.BufferReader(source)
            stack.enter_context(stream)
            reader = stack.enter_context(pa.ipc.open_stream(stream))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(name, f"Arrow cannot read it ({error})") from error
        check_schema(reader.schema, name)
        while (batch := _next_batch(reader, name)) is not None:
            keys, values = batch.columns
            if keys.null_count:
                raise damaged(name, "it has a null key")
            if not order.follows(keys):
                raise damaged(name, "its keys are not strictly ascending")
            rows += len(keys)
            for start, end in cut_places(delta_sizes((keys, values)), _PIECE_ROWS, _PIECE_BYTES):
                yield DeltaRows(keys.slice(start, end - start), values.slice(start, end - start))
        check_rows(reader.schema, rows, name)


def as_lists(
    pieces: Iterable[DeltaRows],
) -> Iterator[tuple[list[bytes], list[bytes | None]]]:
    """Pieces of a delta as ``RocksStore.apply_batches`` wants them."""
    for rows in pieces:
        yield rows.keys.to_pylist(), rows.values.to_pylist()


def _next_batch(reader: Any, name: str) -> pa.RecordBatch | None:
    try:
        batch = reader.read_next_batch()
        batch.validate(full=True)
    except StopIteration:
        return None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(name, f"Arrow cannot read it ({error})") from error
    return batch


def _digest_of(source: bytes | Path, name: str) -> bytes:
    if isinstance(source, bytes):
        return blake3(source).digest()
    hasher = blake3()
    try:
        with source.open("rb", buffering=0) as file:
            while data := file.read(_READ_BYTES):
                hasher.update(data)
    except OSError as error:
        raise damaged(name, f"it cannot be read ({error})") from error
    return hasher.digest()
