"""Spark's checkpoint location, through Spark's own file-system layer (any Hadoop file system)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from recovery.decide.start_batch import COMMITS, OFFSETS, LocationProgress
from recovery.decide.taken_back_files import TakenBack
from snapshot.protocol.refusal_texts import planned_anew
from statebackend import system
from statebackend.errors import CheckpointLocationError, ObjectNotFoundError

__all__ = ["FILE_MANAGER", "CheckpointLocation"]

_log = logging.getLogger("statebackend.spark")
_CHUNK_BYTES: Final = 1 << 20
FILE_MANAGER: Final = "spark.sql.streaming.checkpointFileManagerClass"
_BY_FILE_SYSTEM: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
# A file under way, and its checksum: of a batch, with a UUID.
_DRAFT: Final = re.compile(r"\.{1,2}\d+\.[0-9a-f-]{36}\.tmp(\.crc)?")
# What brings a scheme's file system, in Hadoop's own releases.
_MODULES: Final = {
    "s3a": "org.apache.hadoop:hadoop-aws",
    "abfs": "org.apache.hadoop:hadoop-azure",
    "abfss": "org.apache.hadoop:hadoop-azure",
}


class _CannotReplaceError(Exception):
    """The file system cannot replace a file by renaming another."""


class CheckpointLocation:
    """One query's checkpoint location.

    Raises:
        CheckpointLocationError: Spark has no file system for it.
    """

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.path = path
        self._spark = spark
        jvm: Any = spark._jvm
        self._Path = jvm.org.apache.hadoop.fs.Path
        self._root = self._Path(path)
        self._utils = jvm.org.apache.commons.io.IOUtils
        self._hadoop = spark._jsc.sc().hadoopConfiguration()
        try:
            self._fs = self._root.getFileSystem(self._hadoop)
        except (Py4JJavaError, PySparkException) as error:
            raise _no_file_system(path, error) from None
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

    def qualified(self) -> str:
        """Its path with its scheme, the same however it was written."""
        return str(self._fs.makeQualified(self._root).toString())

    def progress(self) -> LocationProgress:
        """What Spark has planned and committed.

        Raises:
            CheckpointLocationError: the location cannot be read.
        """
        try:
            query_id = self._query_id()
            offsets, commits = self._batches(OFFSETS), self._batches(COMMITS)
        except Exception as error:
            raise self._unreadable(error) from None
        return LocationProgress(
            path=self.path,
            query_id=query_id,
            last_offset=max(offsets, default=-1),
            last_commit=max(commits, default=-1),
            offsets=offsets,
            commits=commits,
        )

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

    def _batches(self, folder: str) -> frozenset[int]:
        return frozenset(int(name) for name in self._names(folder) if name.isdigit())

    def _names(self, folder: str) -> list[str]:
        """Of a folder's files, hidden ones among them."""
        path = self._Path(self._root, folder)
        if not self._fs.exists(path):
            return []
        return [str(status.getPath().getName()) for status in self._fs.listStatus(path)]

    def taken_back(self) -> list[TakenBack]:
        """The plans and commits that starts have taken back and left under hidden names.

        To be called after `progress`. A listing may miss a file while it is renamed, and the next
        listing does not. So a file that `progress` missed is found here, unless it has its own name
        again.

        Raises:
            CheckpointLocationError: the location cannot be read.
        """
        try:
            parsed = [
                TakenBack.parse(folder, name)
                for folder in (OFFSETS, COMMITS)
                for name in self._names(folder)
            ]
        except Exception as error:
            raise self._unreadable(error) from None
        return sorted(one for one in parsed if one is not None)

    def drafts(self) -> list[str]:
        """What Spark writes, or was writing when it was cut, under hidden names.

        Raises:
            CheckpointLocationError: the location cannot be read.
        """
        try:
            return [
                f"{folder}/{name}"
                for folder in (OFFSETS, COMMITS)
                for name in self._names(folder)
                if _DRAFT.fullmatch(name)
            ]
        except Exception as error:
            raise self._unreadable(error) from None

    def remove_drafts(self, names: Iterable[str]) -> None:
        """Remove what a first batch that was cut has left in a location without any batch.

        Spark writes a plan under a hidden name first. Where it was stopped or killed before the
        rename, Spark 4.3 refuses the location from then on, since its folder is not empty
        (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY).

        Args:
            names: from `drafts`, when the start began: what another start was writing then has its
                own name by now.

        Raises:
            CheckpointLocationError: it cannot be read or written.
        """
        try:
            for name in names:
                self._fs.delete(self._Path(self._root, name), False)
        except Exception as error:
            raise self._unreadable(error) from None

    def stamp_ms(self, name: str) -> int | None:
        """The time that Spark gave a batch when it planned it; None where there is no such plan.

        Raises:
            CheckpointLocationError: it cannot be read.
        """
        try:
            lines = b"".join(self.chunks(name)).decode().split("\n", 2)
            return int(json.loads(lines[1])["batchTimestampMs"])
        except (ObjectNotFoundError, ValueError, KeyError, IndexError, TypeError):
            return None  # of a form that is not known: then it says nothing

    def check_planned(self, epoch: int, stamp_ms: int) -> None:
        """Refuse a batch that Spark runs by another plan than the one that is here.

        Spark reads or makes a plan, and may freeze before the start claims the job. If another
        driver goes back meanwhile, it takes that plan away, and with asynchronous commits the log
        does not show it. After the claim nobody can go back any more.

        Args:
            stamp_ms: of the plan that Spark goes by.

        Raises:
            CheckpointLocationError: it is not here any more, or cannot be read.
        """
        found_ms = self.stamp_ms(f"{OFFSETS}/{epoch}")
        if found_ms is None and self.progress().last_offset >= epoch:
            return  # of a form that is not known
        if found_ms != stamp_ms:
            raise planned_anew(epoch)

    def files(self, folder: str) -> list[str]:
        """Every file below a folder, by its name in the location; hidden ones are left out.

        Raises:
            CheckpointLocationError: it cannot be read.
        """
        above = len(self.qualified().rstrip("/")) + 1
        folders, found = [self._Path(self._root, folder)], []
        while folders:
            try:
                # Not listFiles(): it asks the system for the permissions of each file, and fails
                # where a running query has just removed one.
                statuses = self._fs.listStatus(folders.pop())
            except Py4JJavaError as error:
                if _is_absence(error):  # there is none, or Spark has just removed it
                    continue
                raise self._unreadable(error) from None
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
            raise self._unreadable(error) from None

    def write(self, name: str, pieces: Iterator[bytes]) -> None:
        """Write a file: under a hidden name first, so that it is there whole or not at all.

        A file that is there already stays: a late start takes nothing from a query that has gone
        on.

        Raises:
            CheckpointLocationError: it cannot be written. What ``pieces`` raises goes through.
        """
        path = self._Path(self._root, name)
        draft = self._Path(path.getParent(), f".{path.getName()}.{system.new_id()}.tmp")
        try:
            stream = self._fs.create(draft, True)
            try:
                for piece in pieces:
                    stream.write(piece)
            finally:
                stream.close()
            if not self._fs.exists(path) and self._fs.rename(draft, path):
                return
            self._fs.delete(draft, False)
            if not self._fs.exists(path):
                raise CheckpointLocationError(
                    f"The file {name} of the checkpoint location {self.path} cannot be named.",
                    todo="Check Spark's access to the location, then start again.",
                )
        except Py4JJavaError as error:
            raise CheckpointLocationError(
                f"The file {name} of the checkpoint location {self.path} cannot be written "
                f"({_said(error)}).",
                todo="Check the path and Spark's access to it, then start again.",
            ) from None

    def at(self, path: str) -> CheckpointLocation:
        """Another folder, reached in the same way."""
        return CheckpointLocation(self._spark, path)

    def _unreadable(self, error: Exception) -> CheckpointLocationError:
        return CheckpointLocationError(
            f"The checkpoint location {self.path} cannot be read ({_said(error)}).",
            todo="Check the path and Spark's access to it.",
        )

    # --- taking back: see `recovery.decide.taken_back_files` ------------------------------------

    def take_back(self, one: TakenBack) -> bool:
        """Rename a plan or commit to its hidden name; False where it was not there.

        Raises:
            CheckpointLocationError: it cannot be renamed.
        """
        return self._renamed(one.place, one.name)

    def put_back(self, one: TakenBack, *, replace: bool = True) -> bool:
        """Give a hidden file its own name again; False where somebody else has done so.

        Args:
            replace: also if another file has that name by now.

        Raises:
            CheckpointLocationError: it cannot be renamed.
        """
        if not self._exists(one.place):
            return self._renamed(one.name, one.place)
        try:
            return replace and self._renamed(one.name, one.place, replace=True)
        except _CannotReplaceError:
            return self._put_in_place(one)

    def _put_in_place(self, one: TakenBack) -> bool:
        """As `put_back`, in three steps; the next start does what is left if it is cut off."""
        if not self._exists(one.name):
            return False
        other = one.replaced(system.new_id())
        self._renamed(one.place, other.name)
        if self._renamed(one.name, one.place):
            self.drop(other)
            return True
        # Somebody else was faster, and what had the place is what was put back.
        self.put_back(other, replace=False)
        return False

    def drop(self, one: TakenBack) -> None:
        """Remove a hidden file for good.

        Raises:
            CheckpointLocationError: it cannot be deleted.
        """
        path = self._Path(self._root, one.name)
        try:
            # Some file systems answer a refusal with False, as they answer an absence.
            if self._fs.delete(path, False) or not self._fs.exists(path):
                return
            reason = "no reason was given"
        except Py4JJavaError as error:
            reason = str(error)[:300]
        raise self._unchangeable(one.name, "deleted", reason)

    def _exists(self, name: str) -> bool:
        return bool(self._fs.exists(self._Path(self._root, name)))

    def _renamed(self, source: str, target: str, *, replace: bool = False) -> bool:
        """Whether a file has got another name in its folder; False where it was not there."""
        try:
            if self._rename(source, target, replace=replace):
                return True
            reason = "no reason was given"
        except Py4JJavaError as error:
            reason = str(error)[:300]
        # Refused, or somebody else was faster: both answer alike.
        if not self._exists(source):
            return False
        raise self._unchangeable(source, "renamed", reason)

    def _rename(self, source: str, target: str, *, replace: bool) -> bool:
        paths = self._Path(self._root, source), self._Path(self._root, target)
        if not replace:  # where the name is taken, it refuses
            return bool(self._fs.rename(*paths))
        spark: Any = self._spark
        fs: Any = spark._jvm.org.apache.hadoop.fs
        how = spark.sparkContext._gateway.new_array(fs.Options.Rename, 1)
        how[0] = fs.Options.Rename.OVERWRITE
        try:
            context = fs.FileContext.getFileContext(self._root.toUri(), self._hadoop)
        except Py4JJavaError as error:  # it has no AbstractFileSystem: gs as it is set by default
            raise _CannotReplaceError from error
        context.rename(*paths, how)
        return True

    def _unchangeable(self, name: str, done: str, reason: str) -> CheckpointLocationError:
        return CheckpointLocationError(
            f"The file {name} of the checkpoint location {self.path} cannot be {done} ({reason}), "
            f"and the query must go back by a batch.",
            todo="Give the driver's user the right to change files there, then start again.",
        )


def _no_file_system(path: str, error: Py4JJavaError | PySparkException) -> CheckpointLocationError:
    """For a location whose file system cannot be made: most often its classes are not there."""
    scheme = path.partition(":")[0]
    module = _MODULES.get(scheme)
    return CheckpointLocationError(
        f"Spark has no file system for the checkpoint location {path} ({_said(error)}).",
        todo=f"Put Hadoop's module for {scheme}:// on Spark's class path, such as "
        f"--packages {module} (in Hadoop's version that Spark has), and check its settings."
        if module
        else f"Put the library for {scheme}:// on Spark's class path, or name another location.",
    )


def _said(error: Exception) -> str:
    """An error's first line: the JVM's have a stack behind it."""
    said = error.java_exception.toString() if isinstance(error, Py4JJavaError) else error
    return str(said).partition("\n")[0][:300]


def _is_absence(error: Py4JJavaError) -> bool:
    return str(error.java_exception.getClass().getName()).endswith(
        ("FileNotFoundException", "NoSuchFileException")
    )
