"""A delta: what one subtask changed in one epoch.

Format version 1 is an Arrow IPC stream whose record batches have their buffers compressed with
zstd. A batch holds at most 65,536 rows and, unless one row is larger, 16 MiB of keys and values; it
is as long as that allows, so that rows give the same batches however they were put together. (The
bound in bytes is this writer's: readers take any.)

    key: binary, not null    strictly ascending as unsigned bytes over the whole stream
    value: binary            null = the key was deleted

The schema's metadata holds `statebackend.delta` (the format version, "1"), `statebackend.rows`
(the number of rows: an IPC stream cut between two batches is still a valid stream) and
`range_tombstones` (a JSON list, reserved, "[]"). The digest of a delta is blake3 over its bytes.
The same rows give the same bytes under one version of Arrow and zstd, and no promise is made
across versions: a digest is taken of bytes that exist, never of bytes encoded again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from statebackend.errors import CorruptionError, SettingError, UnsupportedFormatError
from statebackend.state.blocks import binary_array
from statebackend.state.spill import cut_places

__all__ = ["Delta", "DeltaRows", "decode_delta", "encode_columns", "encode_delta", "write_stream"]

BATCH_ROWS = 65_536
BATCH_BYTES = 16 << 20
COLUMN_LIMIT_BYTES = 2**31 - 1  # Arrow's offsets of `binary` are 32 bits, signed
FORMAT_VERSION = b"1"

_VERSION_KEY = b"statebackend.delta"
_ROWS_KEY = b"statebackend.rows"
_TOMBSTONES_KEY = b"range_tombstones"


@dataclass(frozen=True, slots=True)
class Delta:
    """One encoded delta.

    Attributes:
        data: the Arrow IPC stream.
        digest: blake3 of `data`, 32 bytes.
        rows: rows in it, deletions included. deletions: how many of them are.
    """

    data: bytes
    digest: bytes
    rows: int
    deletions: int = 0


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """One decoded delta: two `pa.BinaryArray` of equal length; a null value is a deletion."""

    keys: pa.BinaryArray
    values: pa.BinaryArray


def encode_delta(keys: Sequence[bytes], values: Sequence[bytes | None], *, level: int = 1) -> Delta:
    """Encode changes, already sorted by key.

    Args:
        keys: strictly ascending as unsigned bytes.
        values: one for each key; None = deleted.
        level: of zstd, 1 (fast) to 22.

    Raises:
        SettingError: lengths differ, keys are null or not strictly ascending, or either column
            is over 2 GiB.
    """
    if len(keys) != len(values):
        raise SettingError(f"A delta was given {len(keys)} keys but {len(values)} values.")
    columns = binary_array(keys, COLUMN_LIMIT_BYTES), binary_array(values, COLUMN_LIMIT_BYTES)
    return encode_columns(*columns, level=level)


def encode_columns(keys: pa.BinaryArray, values: pa.BinaryArray, *, level: int = 1) -> Delta:
    """As :func:`encode_delta`, from columns; a null value is a deletion."""
    columns = keys, values
    sink = pa.BufferOutputStream()
    write_stream(sink, [columns], len(keys), level=level)
    data = sink.getvalue().to_pybytes()
    return Delta(data, blake3(data).digest(), len(keys), values.null_count)


def write_stream(
    sink: Any, pieces: Iterable[tuple[pa.BinaryArray, pa.BinaryArray]], rows: int, *, level: int = 1
) -> None:
    """Write a delta into a file-like object.

    Args:
        pieces: keys and values, strictly ascending over all pieces.
        rows: how many there are in all.
        level: of zstd, 1 (fast) to 22.

    Raises:
        SettingError: keys are null or not strictly ascending.
    """
    # Threads would only contend with the tasks of the same executor.
    options = pa.ipc.IpcWriteOptions(
        compression=pa.Codec("zstd", compression_level=level), use_threads=False
    )
    schema, order = _schema(rows), KeyOrder()
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for keys, values in _batches(pieces):
            if keys.null_count or not order.follows(keys):
                raise SettingError("The keys of a delta are null or not strictly ascending.")
            rows -= len(keys)
            writer.write_batch(pa.RecordBatch.from_arrays([keys, values], schema=schema))
    if rows:
        raise SettingError(f"A delta was given {-rows} rows more than it was said to have.")


def decode_delta(data: bytes, *, digest: bytes | None = None, name: str = "") -> DeltaRows:
    """Decode and check a delta.

    Args:
        data: what `encode_delta` made.
        digest: the one that the record names (32 bytes); checked before anything is parsed.
            Without it a flipped bit inside a key or value cannot be noticed.
        name: the object, for errors.

    Raises:
        CorruptionError: the digest differs, or the bytes are no delta.
        UnsupportedFormatError: a format version or a feature that this release does not read.
    """
    if digest is not None:
        check_digest(blake3(data).digest(), digest, name)
    try:
        with pa.ipc.open_stream(pa.BufferReader(data)) as reader:
            check_schema(reader.schema, name)
            table = reader.read_all()
        table.validate(full=True)  # offsets inside their buffers: nothing below reads beyond them
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(name, f"Arrow cannot read it ({error})") from error
    return _checked_rows(table, name)


def _schema(rows: int) -> pa.Schema:
    return pa.schema(
        [pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())],
        metadata={
            _VERSION_KEY: FORMAT_VERSION,
            _ROWS_KEY: str(rows).encode(),
            _TOMBSTONES_KEY: b"[]",
        },
    )


def _batches(
    pieces: Iterable[tuple[pa.BinaryArray, pa.BinaryArray]],
) -> Iterator[tuple[pa.BinaryArray, pa.BinaryArray]]:
    """The same rows cut as the format says, in arrays of their own."""
    pending: list[tuple[pa.BinaryArray, pa.BinaryArray]] = []
    rows = size_bytes = 0
    for piece in pieces:
        pending.append(piece)
        rows += len(piece[0])
        size_bytes += int(delta_sizes(piece).sum())
        if rows <= BATCH_ROWS and size_bytes <= BATCH_BYTES:
            continue
        whole = _joined(pending)
        cuts = list(cut_places(delta_sizes(whole), BATCH_ROWS, BATCH_BYTES))
        for start, end in cuts[:-1]:
            yield _exact(whole[0], start, end), _exact(whole[1], start, end)
        start, end = cuts[-1]  # what follows may still go into this one
        last = whole[0].slice(start), whole[1].slice(start)
        pending, rows, size_bytes = [last], end - start, int(delta_sizes(last).sum())
    if rows:
        whole = _joined(pending)
        yield _exact(whole[0], 0, rows), _exact(whole[1], 0, rows)


def _joined(
    pieces: list[tuple[pa.BinaryArray, pa.BinaryArray]],
) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    if len(pieces) == 1:
        return pieces[0]
    return pa.concat_arrays([p[0] for p in pieces]), pa.concat_arrays([p[1] for p in pieces])


def _offsets(array: pa.BinaryArray) -> np.ndarray[Any, np.dtype[np.int32]]:
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(1, np.int32)
    return np.frombuffer(buffer, np.int32)[array.offset : array.offset + len(array) + 1]


def delta_sizes(
    piece: tuple[pa.BinaryArray, pa.BinaryArray],
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The bytes of each row, key and value together."""
    keys, values = piece
    return np.diff(_offsets(keys)).astype(np.int64) + np.diff(_offsets(values))


def _exact(array: pa.BinaryArray, start: int, end: int) -> pa.BinaryArray:
    """A slice in buffers of just its size: Arrow writes what stands behind a slice as padding."""
    piece = array.slice(start, end - start)
    offsets = _offsets(piece)
    data = piece.buffers()[2]
    if data is not None:
        data = data.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    validity = None
    if piece.null_count:
        # By way of bytes: `to_numpy` would import pandas.
        present = np.frombuffer(piece.is_valid().cast(pa.uint8()).buffers()[1], np.uint8)
        validity = pa.py_buffer(np.packbits(present[: len(piece)], bitorder="little"))
    buffers = [validity, pa.py_buffer(offsets - offsets[0]), data or pa.py_buffer(b"")]
    return pa.Array.from_buffers(pa.binary(), end - start, buffers)


class KeyOrder:
    """Whether keys ascend (strictly, as unsigned bytes, as in RocksDB) over pieces of them."""

    def __init__(self) -> None:
        self._last: pa.Scalar | None = None

    def follows(self, keys: pa.BinaryArray) -> bool:
        """Whether no key is equal to or below the one before it, also in the piece before."""
        if not len(keys):
            return True
        before, self._last = self._last, keys[len(keys) - 1]
        if before is not None and not pc.less(before, keys[0]).as_py():
            return False
        return len(keys) < 2 or bool(pc.all(pc.less(keys[:-1], keys[1:])).as_py())


def check_digest(found: bytes, expected: bytes, name: str) -> None:
    """Raises CorruptionError if the digests differ."""
    if found != expected:
        raise CorruptionError(
            f"The delta {name!r} has the digest {found.hex()}, expected {expected.hex()}.",
            todo="Restore from another copy of it.",
        )


def check_schema(schema: pa.Schema, name: str) -> None:
    """Raises CorruptionError or UnsupportedFormatError for what is no delta of this version."""
    metadata = schema.metadata or {}
    version = metadata.get(_VERSION_KEY)
    if version is None:
        raise damaged(name, "it is an Arrow stream, but not a delta")
    if version != FORMAT_VERSION:
        raise _unsupported(name, f"the format version {version!r}")
    if not schema.equals(_schema(0), check_metadata=False):
        raise damaged(name, f"its columns are {schema.to_string(show_schema_metadata=False)!r}")
    try:
        tombstones = msgspec.json.decode(metadata.get(_TOMBSTONES_KEY, b""), type=list[object])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise damaged(name, "its range tombstones are no JSON list") from error
    if tombstones:
        raise _unsupported(name, f"{len(tombstones)} range tombstones")


def _checked_rows(table: pa.Table, name: str) -> DeltaRows:
    check_rows(table.schema, table.num_rows, name)
    keys, values = (_one_array(column) for column in table.columns)
    if keys.null_count:
        raise damaged(name, "it has a null key")
    if not KeyOrder().follows(keys):
        raise damaged(name, "its keys are not strictly ascending")
    return DeltaRows(keys, values)


def check_rows(schema: pa.Schema, rows: int, name: str) -> None:
    """Raises CorruptionError if the schema's metadata states another number of rows."""
    stated = (schema.metadata or {}).get(_ROWS_KEY, b"")
    if stated != str(rows).encode():
        raise damaged(name, f"it holds {rows} rows and says {stated!r}")


def _one_array(column: pa.ChunkedArray) -> pa.BinaryArray:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def damaged(name: str, reason: str) -> CorruptionError:
    """The error for a delta that does not hold what it should."""
    return CorruptionError(
        f"The delta {name!r} is damaged or foreign: {reason}.",
        todo="Restore from another copy of it.",
    )


def _unsupported(name: str, what: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"The delta {name!r} has {what}, which this release does not read.",
        todo="Use a release that is at least as new as the one that wrote it.",
    )
