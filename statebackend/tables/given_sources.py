"""Where the sources stand of the query that begins with a savepoint which is being written."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from recovery.inspect.job_list import SAVEPOINT_NAME
from recovery.savepoints.location_at_epoch import files_after
from recovery.savepoints.location_copy import copy_location_files
from recovery.savepoints.location_files import (
    LocationFiles,
    SavepointLocation,
    StoreLocation,
    batches_of,
    query_id_of,
)
from recovery.savepoints.savepoint import SavepointFile
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import open_store
from statebackend.errors import NotRestorableError
from statebackend.system import System
from statebackend.tables.savepoint_writer import SavepointHead

__all__ = ["Stood", "stood_at"]


@dataclass(frozen=True)
class Stood:
    """Where a query's sources stood after an epoch: files of a checkpoint location."""

    location: LocationFiles
    epoch: int
    query_id: str
    names: tuple[str, ...]

    def named(self, head: SavepointHead) -> SavepointHead:
        """What the savepoint says of itself, with the epoch and the query."""
        path = self.location.path
        return replace(head, epoch=self.epoch, query_id=self.query_id, location=path)

    def copy(self, target: ObjectStore, scratch: Path, system: System) -> list[SavepointFile]:
        """Copy the files into the savepoint's folder."""
        names = ["metadata", *self.names]
        return copy_location_files(
            self.location, names, target, scratch=scratch, threads=system.threads
        )

    def check(self) -> None:
        """The query has stopped: nothing has changed."""


def stood_at(sources: str | LocationFiles, options: StoreOptions | None, system: System) -> Stood:
    """Where the sources stood after the last batch that a location (or a savepoint) has committed.

    Raises:
        CheckpointLocationError: it is no query's checkpoint location.
        NotRestorableError: no batch is committed, or a source's log is not whole.
        UnsupportedFormatError: the plan of the batch is of a form that this release does not know.
    """
    location = _located(sources, options, system) if isinstance(sources, str) else sources
    query_id = query_id_of(location)
    epoch = batches_of(location).last_commit
    if epoch < 0:
        raise NotRestorableError(
            f"No batch is committed in the checkpoint location {location.path}, so its sources "
            f"stand nowhere.",
            todo="Leave sources= out: the query then reads them from their start.",
        )
    return Stood(location, epoch, query_id, tuple(files_after(location, epoch)))


def _located(uri: str, options: StoreOptions | None, system: System) -> LocationFiles:
    where = os.path.abspath(uri) if ":" not in uri.partition("/")[0] else uri
    store = open_store(where, new_id=system.new_id, options=options)
    saved = any(info.name == SAVEPOINT_NAME for info in store.list(SAVEPOINT_NAME))
    return SavepointLocation(store) if saved else StoreLocation(store)
