"""Record batches put aside on local disk, and sorted entries to search in.

A :class:`BlockFile` lives within one attempt at an epoch: nobody reads it later, so it has no
format of its own. Each block is one Arrow IPC message under lz4, which costs less than writing the
bytes that it saves. The digest of each block is kept in memory, because what is read back goes into
checkpoints.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from operator import is_not
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from statebackend.errors import LocalDirError, SettingError

__all__ = [
    "ABSENT",
    "COLUMN_LIMIT_BYTES",
    "BlockFile",
    "SortedRows",
    "SpillFolder",
    "binary_array",
    "disk_failed",
]

ABSENT: Final[Any] = object()
"""What a look-up gives for a key that is not there; None is a deletion."""

COLUMN_LIMIT_BYTES: Final = 2**31 - 1  # Arrow's offsets of `binary` are 32 bits, signed
_DIGEST_BYTES: Final = 16
_CODEC: Final = pa.Codec("lz4_raw")
# Keys of one look-up that are matched at once, if the block is not much larger than they are.
_MATCHED_KEYS: Final = 16
_MATCHED_RATIO: Final = 16
# A search takes as long as putting so many rows into a dict.
_SEARCH_ROWS: Final = 32


def binary_array(
    items: Sequence[bytes | None], limit_bytes: int = COLUMN_LIMIT_BYTES
) -> pa.BinaryArray:
    """As `pa.array(items, pa.binary())`, which would import pandas: a second in a new worker.

    Raises:
        SettingError: the items are over ``limit_bytes`` together.
    """
    rows = len(items)
    validity, filled = None, cast("Sequence[bytes]", items)
    try:
        data = b"".join(filled)
    except TypeError:  # there are deletions: to look for them first takes as long as all the rest
        present = np.fromiter(map(is_not, items, repeat(None)), np.bool_, rows)
        validity = pa.py_buffer(np.packbits(present, bitorder="little"))
        filled = [item or b"" for item in items]
        data = b"".join(filled)
    if len(data) > limit_bytes:
        raise SettingError(
            f"A delta's column of {len(data)} bytes is over {limit_bytes}.",
            todo="Take checkpoints more often, or use more subtasks.",
        )
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(np.fromiter(map(len, filled), np.int32, rows), out=offsets[1:])
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), rows, buffers)


def disk_failed(path: Path, error: Exception) -> LocalDirError:
    """The typed error around a failed read or write of a file of ours."""
    return LocalDirError(
        f"A file that holds what is over the memory budget failed: {path} ({error}).",
        todo="Give local_dir= a directory on a local disk with room, writable by the executor.",
    )


@dataclass(frozen=True, slots=True)
class _Place:
    offset: int
    stored_bytes: int
    message_bytes: int
    digest: bytes
    rows: int


class BlockFile:
    """Record batches of one schema in a file, read back one by one in any order.

    Args:
        path: does not exist yet; its folder does.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.schema = schema
        self.size_bytes = 0  # as it lies on disk
        self.message_bytes = 0  # about what the blocks take in memory
        self.rows = 0
        self._places: list[_Place] = []
        self._held: pa.NativeFile | None = None

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self._places)

    def block_rows(self, index: int) -> int:
        """Rows of one block."""
        return self._places[index].rows

    def append(self, batch: pa.RecordBatch) -> None:
        """Write one more block.

        Raises:
            LocalDirError: the disk is full or failed.
        """
        message = batch.serialize()
        stored = _CODEC.compress(message)
        place = _Place(self.size_bytes, stored.size, message.size, _digest(stored), batch.num_rows)
        try:
            with self.path.open("ab") as file:
                file.write(stored)
        except OSError as error:
            raise disk_failed(self.path, error) from error
        self._places.append(place)
        self.size_bytes += stored.size
        self.message_bytes += message.size
        self.rows += batch.num_rows

    def read(self, index: int) -> pa.RecordBatch:
        """One block, in memory of its own.

        Raises:
            LocalDirError: it cannot be read, or is not what was written.
        """
        place = self._places[index]
        try:
            if self._held is not None:
                data = _read(self._held, place)
            else:
                with pa.OSFile(str(self.path)) as file:
                    data = _read(file, place)
        except (OSError, pa.ArrowException) as error:
            raise disk_failed(self.path, error) from error
        if _digest(data) != place.digest:
            raise disk_failed(self.path, ValueError(f"block {index} has another digest"))
        message = _CODEC.decompress(data, place.message_bytes)
        return pa.ipc.read_record_batch(message, self.schema)

    def hold(self) -> None:
        """Stay readable after :meth:`remove`, for as long as this object lives."""
        try:
            self._held = pa.OSFile(str(self.path))
        except (OSError, pa.ArrowException) as error:
            raise disk_failed(self.path, error) from error

    def remove(self) -> None:
        """Remove the file; may be called twice."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise disk_failed(self.path, error) from error


class SpillFolder:
    """The folder of what one owner puts aside; made with its first file.

    Args:
        name: names a folder of our own. None: nothing is ever put aside.
        kind: begins the names of its files.
    """

    def __init__(self, name: Callable[[], Path] | None, kind: str) -> None:
        self._name, self._kind = name, kind
        self._numbers = count()
        self._made: Path | None = None

    def new_file(self, schema: pa.Schema) -> BlockFile:
        """A new file for batches of a schema.

        Raises:
            LocalDirError: the folder cannot be made.
        """
        if self._made is None:
            assert self._name is not None, "who has a budget has a folder"
            folder = self._name()
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise disk_failed(folder, error) from error
            self._made = folder
        return BlockFile(self._made / f"{self._kind}-{next(self._numbers)}", schema)

    def remove(self) -> None:
        """Remove the folder with all files in it; may be called twice."""
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
            self._made = None


def _read(file: pa.NativeFile, place: _Place) -> pa.Buffer:
    file.seek(place.offset)
    return file.read_buffer(place.stored_bytes)


def _digest(data: pa.Buffer) -> bytes:
    return blake3(data).digest(_DIGEST_BYTES)


class SortedRows:
    """Entries in memory, sorted by key: two binary arrays of one length, null = deleted."""

    __slots__ = ("_data", "_index", "_offset", "_offsets", "_searches", "keys", "values")

    def __init__(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        self.keys, self.values = keys, values
        _, offsets, data = keys.buffers()
        # Read through views: `keys[i].as_py()` takes several times as long, and a search takes
        # many of them.
        self._offsets = memoryview(offsets or b"\0\0\0\0").cast("B").cast("i")
        self._data = memoryview(data or b"")
        self._offset = keys.offset
        self._searches = 0
        self._index: dict[bytes, int] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, index: int) -> bytes:
        """The key in a row."""
        at = index + self._offset
        return bytes(self._data[self._offsets[at] : self._offsets[at + 1]])

    def value(self, index: int) -> bytes | None:
        """The value in a row; None: deleted."""
        return self.values[index].as_py()  # type: ignore[no-any-return]

    def lower(self, key: bytes, low: int = 0) -> int:
        """The first row, from ``low`` on, whose key is not below ``key``."""
        high = len(self.keys)
        while low < high:
            middle = (low + high) // 2
            if self.key(middle) < key:
                low = middle + 1
            else:
                high = middle
        return low

    def upper(self, key: bytes, low: int = 0) -> int:
        """The first row, from ``low`` on, whose key is above ``key``."""
        at = self.lower(key, low)
        return at + (at < len(self.keys) and self.key(at) == key)

    def get(self, key: bytes) -> Any:
        """The value of ``key``, None if it was deleted, ABSENT if it is not here."""
        index = self._index  # another thread may let go of it
        if index is not None:
            row = index.get(key, -1)
            return self.value(row) if row >= 0 else ABSENT
        self._searches += 1
        if self._searches * _SEARCH_ROWS > len(self.keys):
            index = dict(zip(self.keys.to_pylist(), range(len(self.keys)), strict=True))
            self._index = index
            row = index.get(key, -1)
            return self.value(row) if row >= 0 else ABSENT
        at = self.lower(key)
        return self.value(at) if at < len(self.keys) and self.key(at) == key else ABSENT

    def rest(self) -> None:
        """Give memory back that makes single look-ups quick."""
        self._searches, self._index = 0, None

    def get_many(self, keys: Sequence[bytes]) -> list[Any]:
        """As :meth:`get`, for many; quicker if they lie as close as the rows here."""
        if len(keys) < _MATCHED_KEYS:
            return [self.get(key) for key in keys]
        low, high = self.lower(min(keys)), self.upper(max(keys))
        if high - low > _MATCHED_RATIO * len(keys):
            return [self.get(key) for key in keys]
        found = pc.index_in(binary_array(keys), value_set=self.keys.slice(low, high - low))
        values = self.values.slice(low, high - low).take(found).to_pylist()
        return [
            value if present else ABSENT
            for value, present in zip(values, pc.is_valid(found).to_pylist(), strict=True)
        ]
