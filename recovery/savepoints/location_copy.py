"""Where a query's sources stood, copied into a savepoint: files of Spark's checkpoint location."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from recovery.savepoints.location_files import LocationFiles
from recovery.savepoints.savepoint import SPARK_FOLDER, SavepointFile
from recovery.savepoints.state_copy import copy_object
from snapshot.storage.object_store import ObjectStore
from statebackend.threads import Threads

__all__ = ["SavepointLocation", "copy_source_files"]

_AT_A_TIME: Final = 4


@dataclass(frozen=True)
class SavepointLocation:
    """What a savepoint holds of a checkpoint location, as one."""

    store: ObjectStore

    @property
    def path(self) -> str:
        """The savepoint's URI."""
        return self.store.uri

    def list(self, folder: str) -> list[str]:
        """See `LocationFiles`."""
        found = self.store.list(f"{SPARK_FOLDER}{folder}/")
        return [info.name.removeprefix(SPARK_FOLDER) for info in found]

    def chunks(self, name: str) -> Iterator[bytes]:
        """See `LocationFiles`."""
        return self.store.get_chunks(f"{SPARK_FOLDER}{name}")


def copy_source_files(
    location: LocationFiles,
    names: Sequence[str],
    target: ObjectStore,
    *,
    scratch: Path,
    threads: Threads,
    tick: Callable[[int], None] = lambda size_bytes: None,
) -> list[SavepointFile]:
    """Copy files of a checkpoint location into a savepoint's folder.

    Args:
        names: by their names in the location. tick: told the bytes of each.

    Raises:
        ObjectNotFoundError: one is not there. StoreUnreachableError: from the store.
    """

    def copy(name: str) -> SavepointFile:
        size_bytes, digest = copy_object(
            location.chunks,
            name,
            target,
            f"{SPARK_FOLDER}{name}",
            size_bytes=None,
            digest="",
            scratch=scratch,
            where=location.path,
        )
        return SavepointFile(name=name, size_bytes=size_bytes, digest=digest)

    files = []
    with threads.pool(_AT_A_TIME, "statebackend-savepoint") as pool:
        for file in pool.map(copy, names):
            tick(file.size_bytes)
            files.append(file)
    return files
