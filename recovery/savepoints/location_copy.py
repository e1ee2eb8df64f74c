"""Copies files of Spark's checkpoint location into a savepoint: where the query's sources stood."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from recovery.savepoints.location_files import LocationFiles
from recovery.savepoints.savepoint import SPARK_FOLDER, SavepointFile
from recovery.savepoints.state_copy import copy_object
from snapshot.storage.object_store import ObjectStore
from statebackend.threads import Threads

__all__ = ["copy_location_files"]

_AT_A_TIME: Final = 4


def copy_location_files(
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
