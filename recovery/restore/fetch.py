"""From the object store to local files: streamed, checked on the way, a few at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from blake3 import blake3

from snapshot.formats.file_index import FileEntry, FileIndex
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CorruptionError, LocalDirError
from statebackend.threads import THREADS, Threads

__all__ = ["fetch_file", "fetch_index"]

_FILES_AT_A_TIME: Final = 4
_TRIES: Final = 2  # a bit that flipped on its way is not flipped the next time


def fetch_file(store: ObjectStore, name: str, path: Path, *, size_bytes: int, digest: str) -> None:
    """Write an object to a file that does not exist yet; in memory for one chunk.

    Args:
        digest: blake3, in hex.

    Raises:
        CorruptionError: it is not the bytes that its manifest or index names, read twice.
        LocalDirError: the file cannot be written.
        ObjectNotFoundError, StoreUnreachableError: from the store.
    """
    found = ""
    for _ in range(_TRIES):
        hasher, length = blake3(), 0
        try:
            with path.open("wb") as file:
                for chunk in store.get_chunks(name):
                    hasher.update(chunk)
                    length += len(chunk)
                    file.write(chunk)
        except OSError as error:
            raise _unwritable(path, error) from error
        found = hasher.hexdigest()
        if length == size_bytes and found == digest:
            return
    raise CorruptionError(
        f"The object {name!r} in {store.uri} is {length} bytes with the digest {found}, expected "
        f"{size_bytes} with {digest}.",
        todo="Restore it from another copy of the store.",
    )


def _unwritable(path: Path, error: OSError) -> LocalDirError:
    return LocalDirError(
        f"The file {path} cannot be written ({error.strerror or error}).",
        todo="Give local_dir= a directory on a local disk with room.",
    )


def fetch_index(
    store: ObjectStore, index: FileIndex, folder: Path, threads: Threads = THREADS
) -> int:
    """All files of a base into a folder, which is made; how many bytes that was.

    Raises as :func:`fetch_file`.
    """
    try:
        folder.mkdir(parents=True)
        for part in {part for file in index.files if (part := file.name.rpartition("/")[0])}:
            (folder / part).mkdir()
    except OSError as error:
        raise _unwritable(folder, error) from error

    def fetch(file: FileEntry) -> int:
        fetch_file(
            store, file.object, folder / file.name, size_bytes=file.size_bytes, digest=file.digest
        )
        return file.size_bytes

    largest_first = sorted(index.files, key=lambda file: -file.size_bytes)
    with threads.pool(_FILES_AT_A_TIME, "statebackend-fetch") as pool:
        return sum(pool.map(fetch, largest_first))
