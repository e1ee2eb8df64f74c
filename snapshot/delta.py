"""A delta: what one subtask changed in one epoch; and the lineage that deltas form.

Format version 1 is an Arrow IPC stream whose record batches (at most 65,536 rows each) have their
buffers compressed with zstd:

    key: binary, not null    strictly ascending as unsigned bytes over the whole stream
    value: binary            null = the key was deleted

The schema's metadata holds `statebackend.delta` (the format version, "1"), `statebackend.rows`
(the number of rows: an IPC stream cut between two batches is still a valid stream) and
`range_tombstones` (a JSON list, reserved, "[]"). The digest of a delta is blake3 over its bytes.
The same rows give the same bytes under one version of Arrow and zstd, and no promise is made
across versions: a digest is taken of bytes that exist, never of bytes encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_not
from typing import cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from statebackend.errors import CorruptionError, SettingError, UnsupportedFormatError

__all__ = [
    "DIGEST_BYTES",
    "Delta",
    "DeltaRows",
    "chain",
    "chain_start",
    "decode_delta",
    "encode_delta",
]

DIGEST_BYTES = 32
BATCH_ROWS = 65_536
COLUMN_LIMIT_BYTES = 2**31 - 1  # Arrow's offsets of `binary` are 32 bits, signed
FORMAT_VERSION = b"1"

_VERSION_KEY = b"statebackend.delta"
_ROWS_KEY = b"statebackend.rows"
_TOMBSTONES_KEY = b"range_tombstones"
_CHAIN_START_CONTEXT = "statebackend 2026 lineage chain start v1"
_CHAIN_STEP_CONTEXT = "statebackend 2026 lineage chain step v1"


@dataclass(frozen=True, slots=True)
class Delta:
    """One encoded delta.

    Attributes:
        data: the Arrow IPC stream.
        digest: blake3 of `data`, 32 bytes.
        rows: rows in it, deletions included.
    """

    data: bytes
    digest: bytes
    rows: int


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
    key_column = _binary_array(keys)
    if key_column.null_count or not _ascending(key_column):
        raise SettingError("The keys of a delta are null or not strictly ascending.")
    schema = _schema(len(keys))
    table = pa.Table.from_arrays([key_column, _binary_array(values)], schema=schema)
    # Threads would only contend with the tasks of the same executor.
    options = pa.ipc.IpcWriteOptions(
        compression=pa.Codec("zstd", compression_level=level), use_threads=False
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_table(table, max_chunksize=BATCH_ROWS)
    data = sink.getvalue().to_pybytes()
    return Delta(data, blake3(data).digest(), len(keys))


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
        _check_digest(data, digest, name)
    try:
        with pa.ipc.open_stream(pa.BufferReader(data)) as reader:
            _check_schema(reader.schema, name)
            table = reader.read_all()
        table.validate(full=True)  # offsets inside their buffers: nothing below reads beyond them
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(name, f"Arrow cannot read it ({error})") from error
    return _checked_rows(table, name)


def chain_start(job_id: str, operator: str, key_groups: tuple[int, int]) -> bytes:
    """The lineage digest (32 bytes) of a subtask that has no epoch yet.

    Args:
        job_id: the job's identity, not its name.
        operator: the operator's uid.
        key_groups: first and last key group, inclusive.
    """
    hasher = blake3(derive_key_context=_CHAIN_START_CONTEXT)
    for text in (job_id, operator):
        field = text.encode()
        hasher.update(len(field).to_bytes(4, "little"))  # so that no two field lists look alike
        hasher.update(field)
    for group in key_groups:
        hasher.update(group.to_bytes(4, "little"))
    return hasher.digest()


def chain(previous: bytes, digest: bytes) -> bytes:
    """The lineage digest (32 bytes) after one more delta: `H(previous, digest)`.

    Raises:
        SettingError: either is not 32 bytes.
    """
    if len(previous) != DIGEST_BYTES or len(digest) != DIGEST_BYTES:
        raise SettingError(
            f"A lineage needs digests of {DIGEST_BYTES} bytes, not {len(previous)}/{len(digest)}."
        )
    return blake3(previous + digest, derive_key_context=_CHAIN_STEP_CONTEXT).digest()


def _schema(rows: int) -> pa.Schema:
    return pa.schema(
        [pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())],
        metadata={
            _VERSION_KEY: FORMAT_VERSION,
            _ROWS_KEY: str(rows).encode(),
            _TOMBSTONES_KEY: b"[]",
        },
    )


def _binary_array(items: Sequence[bytes | None]) -> pa.BinaryArray:
    """As `pa.array(items, pa.binary())`, which would import pandas: a second in a new worker."""
    rows = len(items)
    validity, filled = None, cast("Sequence[bytes]", items)
    if None in items:
        present = np.fromiter(map(is_not, items, repeat(None)), np.bool_, rows)
        validity = pa.py_buffer(np.packbits(present, bitorder="little"))
        filled = [item or b"" for item in items]
    data = b"".join(filled)
    if len(data) > COLUMN_LIMIT_BYTES:
        raise SettingError(
            f"A delta's column of {len(data)} bytes is over {COLUMN_LIMIT_BYTES}.",
            todo="Take checkpoints more often, or use more subtasks.",
        )
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(np.fromiter(map(len, filled), np.int32, rows), out=offsets[1:])
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), rows, buffers)


def _ascending(keys: pa.BinaryArray) -> bool:
    """Whether no key is equal to or below the one before it (as unsigned bytes, as RocksDB)."""
    if len(keys) < 2:
        return True
    return bool(pc.all(pc.less(keys[:-1], keys[1:])).as_py())


def _check_digest(data: bytes, expected: bytes, name: str) -> None:
    found = blake3(data).digest()
    if found != expected:
        raise CorruptionError(
            f"The delta {name!r} has the digest {found.hex()}, expected {expected.hex()}.",
            todo="Restore from another copy of it.",
        )


def _check_schema(schema: pa.Schema, name: str) -> None:
    metadata = schema.metadata or {}
    version = metadata.get(_VERSION_KEY)
    if version is None:
        raise _damaged(name, "it is an Arrow stream, but not a delta")
    if version != FORMAT_VERSION:
        raise _unsupported(name, f"the format version {version!r}")
    if not schema.equals(_schema(0), check_metadata=False):
        raise _damaged(name, f"its columns are {schema.to_string(show_schema_metadata=False)!r}")
    try:
        tombstones = msgspec.json.decode(metadata.get(_TOMBSTONES_KEY, b""), type=list[object])
    except msgspec.MsgspecError as error:
        raise _damaged(name, "its range tombstones are no JSON list") from error
    if tombstones:
        raise _unsupported(name, f"{len(tombstones)} range tombstones")


def _checked_rows(table: pa.Table, name: str) -> DeltaRows:
    stated = (table.schema.metadata or {}).get(_ROWS_KEY, b"")
    if stated != str(table.num_rows).encode():
        raise _damaged(name, f"it holds {table.num_rows} rows and says {stated!r}")
    keys, values = (_one_array(column) for column in table.columns)
    if keys.null_count:
        raise _damaged(name, "it has a null key")
    if not _ascending(keys):
        raise _damaged(name, "its keys are not strictly ascending")
    return DeltaRows(keys, values)


def _one_array(column: pa.ChunkedArray) -> pa.BinaryArray:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _damaged(name: str, reason: str) -> CorruptionError:
    return CorruptionError(
        f"The delta {name!r} is damaged or foreign: {reason}.",
        todo="Restore from another copy of it.",
    )


def _unsupported(name: str, what: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"The delta {name!r} has {what}, which this release does not read.",
        todo="Use a release that is at least as new as the one that wrote it.",
    )
