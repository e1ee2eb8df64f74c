"""A checkpoint location as Spark can read it: itself, or a copy of one on S3.

A Spark without a file system for S3 reads no checkpoint there. The library does, with its own
store. So the location is copied to a folder of this host first, and Spark reads the copy.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from recovery.decide.start_batch import COMMITS, OFFSETS
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import S3_SCHEMES, open_store
from statebackend.errors import (
    CheckpointLocationError,
    JobRunningError,
    LocalDirError,
    ObjectNotFoundError,
)
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.system import SYSTEM
from statebackend.tables.state_scan import scratch_folder

__all__ = ["ReachedLocation", "is_on_s3", "reached", "running"]

_METADATA: Final = "/_metadata/v2/"  # of an operator; since it says where its schemas are
_STATE: Final = "/state/"


@dataclass(frozen=True)
class ReachedLocation:
    """Where Spark reads a checkpoint location.

    Attributes:
        path: that Spark is given. shown: as the caller named it.
        check: refuses what has changed at its own place since it was copied.
    """

    path: str
    shown: str
    check: Callable[[], None] = lambda: None

    def open(self, spark: SparkSession) -> CheckpointLocation:
        """Its files. Raises as `CheckpointLocation`."""
        location = CheckpointLocation(spark, self.path)
        location.path = self.shown
        return location


@contextlib.contextmanager
def reached(
    spark: SparkSession, path: str, options: StoreOptions | None, scratch_dir: str | None
) -> Iterator[ReachedLocation]:
    """Have Spark reach a location for the time of a block; a copy is removed at its end.

    Args:
        options: how S3 is reached. scratch_dir: where a copy is put.

    Raises:
        CheckpointLocationError: Spark has no file system for it, and it is not on S3.
        JobRunningError: its files change.
        StoreUnreachableError: from the store. LocalDirError: there is no room for a copy.
    """
    if _is_spark_able(spark, path):
        yield ReachedLocation(path, path)
        return
    store = open_store(path, new_id=SYSTEM.new_id, options=options)
    with scratch_folder(scratch_dir) as folder:
        planned = _batches(store)
        _copy(store, folder, path)

        def check() -> None:
            if _batches(store) != planned:
                raise running(path, "a batch was planned or committed there meanwhile")

        yield ReachedLocation(str(folder), path, check)


def is_on_s3(path: str) -> bool:
    """Whether a path is on S3, by its scheme."""
    return path.partition("://")[0] in S3_SCHEMES


def running(path: str, why: str) -> JobRunningError:
    """For a location that a query uses."""
    return JobRunningError(
        f"The checkpoint location {path} is in use: {why}.",
        todo="Stop the query, wait until its process has ended, then bring it over.",
    )


def _is_spark_able(spark: SparkSession, path: str) -> bool:
    try:
        CheckpointLocation(spark, path)
    except CheckpointLocationError:
        if not is_on_s3(path):
            raise
        return False
    return True


def _batches(store: ObjectStore) -> set[str]:
    return {one.name for folder in (OFFSETS, COMMITS) for one in store.list(f"{folder}/")}


def _copy(store: ObjectStore, folder: Path, path: str) -> None:
    root = folder.resolve()
    try:
        for one in store.list(""):
            target = (root / one.name).resolve()
            if not target.is_relative_to(root):
                raise CheckpointLocationError(
                    f"The checkpoint location {path} has an object named {one.name!r}, which is no "
                    f"file of Spark's.",
                    todo="Give the checkpointLocation that the query was started with.",
                )
            if one.name.endswith("/"):  # some tools make an object for a folder
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                file.writelines(store.get_chunks(one.name))
            if _METADATA in one.name:
                _point_to(target, root)
    except ObjectNotFoundError as error:
        raise running(path, "its files went away while they were read") from error
    except OSError as error:
        raise LocalDirError(
            f"The checkpoint location {path} cannot be copied to {folder} "
            f"({error.strerror or error}).",
            todo="Give scratch_dir= a local directory with room for all of the location.",
        ) from error


def _point_to(metadata: Path, root: Path) -> None:
    """Have Spark's description of an operator name its schema's files where the copy has them."""
    version, _, text = metadata.read_bytes().partition(b"\n")
    try:
        said = json.loads(text)
        for store in said["stateStoreInfo"]:
            paths = [str(one) for one in store.get("stateSchemaFilePaths", ())]
            store["stateSchemaFilePaths"] = [
                f"file:{root}{one[one.rindex(_STATE) :]}" for one in paths
            ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return  # what is wrong with it Spark says
    metadata.write_bytes(b"\n".join([version, json.dumps(said).encode()]))
