"""Spark's checkpoint location, through Spark's own file-system layer (any Hadoop file system)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from recovery.rewind import LocationProgress
from statebackend.errors import CheckpointLocationError, ObjectNotFoundError

__all__ = ["FILE_MANAGER", "CheckpointLocation"]

_log = logging.getLogger("statebackend.spark")
_CHUNK_BYTES: Final = 1 << 20
FILE_MANAGER: Final = "spark.sql.streaming.checkpointFileManagerClass"
_BY_FILE_SYSTEM: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)


class CheckpointLocation:
    """One query's checkpoint location."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.path = path
        self._spark = spark
        jvm: Any = spark._jvm
        self._Path = jvm.org.apache.hadoop.fs.Path
        self._root = self._Path(path)
        self._utils = jvm.org.apache.commons.io.IOUtils
        self._hadoop = spark._jsc.sc().hadoopConfiguration()
        self._fs = self._root.getFileSystem(self._hadoop)
        self._class_of = jvm.java.lang.Class.forName

    def file_manager(self, sink: str | None) -> str | None:
        """What Spark had better write its log files with; None for its own choice.

        By its own choice (Hadoop's ``FileContext``) Spark starts half a dozen processes on a local
        file system for each file (``chmod``, ``readlink``), and writes three files a batch. By
        Hadoop's ``FileSystem`` the same is done to the file, a rename after a look whether the name
        is taken, with two. Elsewhere the two may differ in what a rename promises.

        Args:
            sink: where a file sink writes, which has a log of its own.
        """
        places = [self._root, *([self._Path(sink)] if sink else [])]
        try:
            systems = [place.getFileSystem(self._hadoop) for place in places]
            if any(one.getUri().getScheme() != "file" for one in systems):
                return None
            self._class_of(_BY_FILE_SYSTEM)
        except Py4JJavaError:  # no path of Hadoop's; or a release of Spark that has it elsewhere
            return None
        return _BY_FILE_SYSTEM

    def progress(self) -> LocationProgress:
        """What Spark has planned and committed.

        Raises:
            CheckpointLocationError: the location cannot be read.
        """
        try:
            return LocationProgress(
                path=self.path,
                query_id=self._query_id(),
                last_offset=self._last("offsets"),
                last_commit=self._last("commits"),
            )
        except Exception as error:
            raise self._unreadable(error) from error

    def _query_id(self) -> str | None:
        path = self._Path(self._root, "metadata")
        if not self._fs.exists(path):
            return None
        stream = self._fs.open(path)
        try:
            text = self._utils.toString(stream, "UTF-8")
        finally:
            stream.close()
        return str(json.loads(text)["id"])

    def _last(self, folder: str) -> int:
        path = self._Path(self._root, folder)
        if not self._fs.exists(path):
            return -1
        names = (status.getPath().getName() for status in self._fs.listStatus(path))
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def files(self, folder: str) -> list[str]:
        """Every file below a folder, by its name in the location; hidden ones are left out.

        Raises:
            CheckpointLocationError: it cannot be read.
        """
        above = len(str(self._fs.makeQualified(self._root).toString()).rstrip("/")) + 1
        folders, found = [self._Path(self._root, folder)], []
        while folders:
            try:
                # Not listFiles(): it asks the system for the permissions of each file, and fails
                # where a running query has just removed one.
                statuses = self._fs.listStatus(folders.pop())
            except Py4JJavaError as error:
                if _is_absence(error):  # there is none, or Spark has just removed it
                    continue
                raise self._unreadable(error) from error
            for status in statuses:
                path = status.getPath()
                if str(path.getName()).startswith("."):
                    continue
                if status.isDirectory():
                    folders.append(path)
                else:
                    found.append(str(path.toString())[above:])
        return sorted(found)

    def chunks(self, name: str) -> Iterator[bytes]:
        """A file in pieces.

        Raises:
            ObjectNotFoundError: it is not there. CheckpointLocationError: it cannot be read.
        """
        try:
            stream = self._fs.open(self._Path(self._root, name))
            try:
                while piece := bytes(stream.readNBytes(_CHUNK_BYTES)):
                    yield piece
            finally:
                stream.close()
        except Py4JJavaError as error:
            if _is_absence(error):
                raise ObjectNotFoundError(
                    f"There is no file {name} in the checkpoint location {self.path}."
                ) from error
            raise self._unreadable(error) from error

    def write(self, name: str, pieces: Iterator[bytes]) -> None:
        """Write a file: under a hidden name first, so that it is there whole or not at all.

        Raises:
            CheckpointLocationError: it cannot be written. What ``pieces`` raises goes through.
        """
        path = self._Path(self._root, name)
        draft = self._Path(path.getParent(), f".{path.getName()}.tmp")
        try:
            stream = self._fs.create(draft, True)
            try:
                for piece in pieces:
                    stream.write(piece)
            finally:
                stream.close()
            self._fs.delete(path, False)
            if not self._fs.rename(draft, path):
                raise CheckpointLocationError(
                    f"The file {name} of the checkpoint location {self.path} cannot be named.",
                    todo="Check Spark's access to the location, then start again.",
                )
        except Py4JJavaError as error:
            raise CheckpointLocationError(
                f"The file {name} of the checkpoint location {self.path} cannot be written "
                f"({str(error)[:300]}).",
                todo="Check the path and Spark's access to it, then start again.",
            ) from error

    def at(self, path: str) -> CheckpointLocation:
        """Another folder, reached in the same way."""
        return CheckpointLocation(self._spark, path)

    def _unreadable(self, error: Exception) -> CheckpointLocationError:
        return CheckpointLocationError(
            f"The checkpoint location {self.path} cannot be read ({str(error)[:300]}).",
            todo="Check the path and Spark's access to it.",
        )

    def rewind(self, batch: int) -> None:
        """Make Spark repeat ``batch``: what was planned after it goes first, then its commit.

        The order matters: with the successor's offsets still there, deleting the commit alone
        makes Spark skip the batch. Safe to repeat after a crash between the two.

        Raises:
            CheckpointLocationError: a file cannot be deleted.
        """
        self.trim(batch)
        self._remove(f"commits/{batch}")
        self.trim(batch)  # a fenced driver may have planned once more before it noticed
        _log.warning(
            "went back by one batch: %s will repeat batch %d, which Spark had committed before "
            "every operator had finished it",
            self.path,
            batch,
        )

    def trim(self, batch: int) -> None:
        """Take back what was planned after ``batch``, the newest first. Raises as `rewind`."""
        planned = self._last("offsets")
        while planned > batch:
            self._remove(f"offsets/{planned}")
            planned = self._last("offsets")

    def _remove(self, name: str) -> None:
        path = self._Path(self._root, name)
        # Some file systems answer a refusal with False, as they answer an absence.
        if not self._fs.delete(path, False) and self._fs.exists(path):
            raise CheckpointLocationError(
                f"The file {name} of the checkpoint location {self.path} cannot be deleted, and "
                f"the query must go back by a batch.",
                todo="Give the driver's user the right to delete it, then start again.",
            )


def _is_absence(error: Py4JJavaError) -> bool:
    return str(error.java_exception.getClass().getName()).endswith(
        ("FileNotFoundException", "NoSuchFileException")
    )
