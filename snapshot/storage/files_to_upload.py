"""Local files on their way into a store."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from statebackend.errors import LocalCopyError

__all__ = ["file_chunks", "opened_file", "pread_exactly"]


@contextlib.contextmanager
def opened_file(path: str | os.PathLike[str]) -> Iterator[tuple[int, int]]:
    """A handle on a regular file, and its size in bytes. Raises `LocalCopyError`."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise LocalCopyError(
                f"{os.fspath(path)!r} is not a file that can be uploaded.",
                todo="Name a regular file.",
            )
        yield handle, found.st_size
    finally:
        os.close(handle)


def pread_exactly(handle: int, start: int, length: int, path: str | os.PathLike[str]) -> bytes:
    """`length` bytes from `start` of an open file. Raises `LocalCopyError` if there are fewer."""
    chunks = []
    try:
        while length > 0:
            chunk = os.pread(handle, length, start)
            if not chunk:
                raise LocalCopyError(
                    f"The file {os.fspath(path)!r} became shorter while it was uploaded.",
                    todo="Upload files that nobody writes to.",
                )
            chunks.append(chunk)
            start, length = start + len(chunk), length - len(chunk)
    except OSError as error:
        raise _unreadable(path, error) from error
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def file_chunks(path: str | os.PathLike[str], chunk_bytes: int) -> Iterator[bytes]:
    """A file in pieces, as long as it was when it was opened. Raises `LocalCopyError`."""
    with opened_file(path) as (handle, size_bytes):
        for start in range(0, size_bytes, chunk_bytes):
            yield pread_exactly(handle, start, min(chunk_bytes, size_bytes - start), path)


def _unreadable(path: str | os.PathLike[str], error: OSError) -> LocalCopyError:
    code = error.errno or 0
    name = errno.errorcode.get(code, f"errno {code}")
    return LocalCopyError(
        f"The file {os.fspath(path)!r} cannot be read: {name} ({os.strerror(code)}).",
        todo="Look whether it is there and the disk is healthy.",
    )
