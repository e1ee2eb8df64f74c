"""Request bodies that are read as they are sent, and can be sent again."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from snapshot.storage.files_to_upload import pread_exactly
from snapshot.storage.object_store import Buffer, byte_views

__all__ = ["FileSlice", "PartsBody", "body_of"]

# Below this, one copy costs less than the small writes that a body read piece by piece goes out in.
JOINED_BYTES = 8 << 20


class _Body:
    """As much of a file object as botocore needs: it seeks back to send a body again."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._position = 0

    def __len__(self) -> int:
        return self._size_bytes

    def __bool__(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}
        self._position = min(max(0, start[whence] + offset), self._size_bytes)
        return self._position

    def read(self, length: int | None = -1) -> bytes:
        left = self._size_bytes - self._position
        wanted = left if length is None or length < 0 else min(length, left)
        found = self._read_at(self._position, wanted) if wanted else b""
        self._position += len(found)
        return found

    def _read_at(self, start: int, length: int) -> bytes:
        raise NotImplementedError


class PartsBody(_Body):
    """Buffers one after the other; what is copied is only the piece being sent."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if view.nbytes]
        self._ends = list(accumulate(view.nbytes for view in self._views))
        super().__init__(self._ends[-1] if self._ends else 0)

    def _read_at(self, start: int, length: int) -> bytes:
        pieces = []
        index = bisect_right(self._ends, start)
        while length:
            view = self._views[index]
            inside = start - (self._ends[index] - view.nbytes)
            pieces.append(view[inside : inside + length])
            start, length = start + pieces[-1].nbytes, length - pieces[-1].nbytes
            index += 1
        return b"".join(pieces)


class FileSlice(_Body):
    """A part of an open file; nothing of it is kept. Raises `LocalCopyError` if it has shrunk."""

    def __init__(self, handle: int, start: int, length: int, path: str | os.PathLike[str]) -> None:
        super().__init__(length)
        self._handle, self._start, self._path = handle, start, path

    def _read_at(self, start: int, length: int) -> bytes:
        return pread_exactly(self._handle, self._start + start, length, self._path)


def body_of(parts: Sequence[Buffer]) -> bytes | PartsBody:
    """The parts as one body; call it anew for each request."""
    if len(parts) == 1 and isinstance(parts[0], bytes):
        return parts[0]
    views = byte_views(parts)
    if sum(view.nbytes for view in views) <= JOINED_BYTES:
        return b"".join(views)
    return PartsBody(views)
