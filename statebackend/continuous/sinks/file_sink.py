"""A folder of files as a sink: nothing visible before its checkpoint is complete, nothing twice.

Below the sink's folder:

    part-<sink>-<run>-<subtask>-<number>.<format>        visible: committed
    _statebackend/<job>/<uid>/<run>/<subtask>-<number>   staged: being written, or prepared
    _statebackend/<job>/<uid>/committing-<digest>        the names in the latest commit

A staged file is written and closed (on a local file system: synced) by its writer, and moved to its
visible name by the committer. Both names are its own for ever: no two runs have the same id, and
``<sink>`` is a hash of job and uid, since a job may have several sinks in one folder. So of a
committable:

* the staged file is there: it is not committed, or a move that copies was cut off. Move it (again).
* only the visible file is there: it is committed.
* neither: if a ``committing`` file names it, it was committed, and somebody took it away since.
  Otherwise it is lost, and said to be.

A run's name begins with its driver's generation: a driver that was fenced sweeps nothing of the
one that fenced it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Final
from urllib.parse import quote

import msgspec
import pyarrow as pa
from blake3 import blake3
from pyspark.sql import types as T

from statebackend.continuous.files.file_formats import check_format, check_types
from statebackend.continuous.files.folder_access import Place
from statebackend.continuous.sinks.committables import decode_committable
from statebackend.continuous.sinks.file_encoders import Encoder, encoder_for
from statebackend.continuous.sinks.sink import (
    Committer,
    Sink,
    SinkContext,
    SinkWriter,
    generation_of,
)
from statebackend.errors import ConnectorError, OutputLostError, SettingError

__all__ = ["FileSink"]

FORMAT_VERSION: Final = 1
STAGING: Final = "_statebackend"
ROLL_BYTES: Final = 128 << 20
_COMMITTING: Final = "committing-"


class _Committable(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared file: its staged and its visible name below the sink's folder, and its size."""

    v: int
    staged: str
    visible: str
    size_bytes: int


class FileSink(Sink):
    """Writes files into a folder, exactly once. They are visible when their checkpoint is complete.

    Readers must pass over names that start with ``_``, as Spark does.

    JSON: timestamps in ISO 8601, decimals as texts, NaN and infinities as null.
    CSV: with a header; null is empty, an empty text is ``""``.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, format: str = "parquet", roll_bytes: int = ROLL_BYTES
    ) -> None:
        """Name the folder; it is made when first written to.

        Args:
            path: by a path that the driver and all executors see, or an fsspec URL. Several jobs
                may write into one folder.
            format: ``parquet``, ``json`` or ``csv``.
            roll_bytes: a new file is begun when one has so many (as Arrow counts them, before
                compression); there is at least one for each checkpoint in which rows came.

        Raises:
            SettingError: no such format, or no place.
        """
        check_format(format)
        if roll_bytes < 1:
            raise SettingError(f"roll_bytes={roll_bytes} is no size.", todo="Give bytes above 0.")
        self.place = Place(path)
        self.format = format
        self._roll_bytes = roll_bytes

    def __repr__(self) -> str:
        return f"FileSink({self.place.url!r}, format={self.format!r})"

    def check(self, schema: T.StructType) -> None:
        """Refuse columns that the format has no form for."""
        check_types(schema, self.format)

    def open(self, context: SinkContext) -> SinkWriter:
        """A writer of staged files."""
        return _Writer(self.place, self.format, context, self._roll_bytes)

    def committer(self, job: str, uid: str) -> Committer:
        """Moves them to their visible names."""
        return _Committer(self.place, _folder(job, uid))


def _folder(job: str, uid: str) -> str:
    return f"{STAGING}/{_part(job)}/{_part(uid)}"


def _part(name: str) -> str:
    """A name as one part of a path; no two names give the same."""
    quoted = quote(name, safe="")
    return quoted.replace(".", "%2E") if quoted.startswith(".") else quoted


class _Writer(SinkWriter):
    """The staged files of a subtask."""

    def __init__(self, place: Place, format: str, context: SinkContext, roll_bytes: int) -> None:
        self._place = place
        self._format = format
        self._context = context
        self._roll_bytes = roll_bytes
        self._sink = blake3(_folder(context.job, context.uid).encode()).hexdigest()[:8]
        self._number = 0
        self._ready: list[_Committable] = []
        self._name = ""
        self._file: tuple[IO[bytes], Encoder, pa.Schema] | None = None
        self._written_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._file is not None and (
            self._written_bytes >= self._roll_bytes or not batch.schema.equals(self._file[2])
        ):
            self._finish()
        if self._file is None:
            self._begin(batch.schema)
        assert self._file is not None
        with self._place.errors("writing", self._name):
            self._file[1].write(batch)
        self._written_bytes += batch.nbytes

    def _begin(self, schema: pa.Schema) -> None:
        of = self._context
        self._name = f"{_folder(of.job, of.uid)}/{of.run}/{of.subtask:05d}-{self._number:06d}"
        handle = self._place.create(self._name)
        with self._place.errors("writing", self._name):
            self._file = (handle, encoder_for(self._format, handle, schema), schema)
        self._written_bytes = 0

    def _finish(self) -> None:
        assert self._file is not None
        handle, encoder, _ = self._file
        with self._place.errors("writing", self._name):
            encoder.finish()
            size_bytes = handle.tell()
        self._place.close(handle, self._name)
        self._file = None
        of = self._context
        part = f"part-{self._sink}-{of.run}-{of.subtask:05d}-{self._number:06d}.{self._format}"
        self._number += 1
        self._ready.append(
            _Committable(v=FORMAT_VERSION, staged=self._name, visible=part, size_bytes=size_bytes)
        )

    def prepare(self, checkpoint: int) -> list[bytes]:
        if self._file is not None:
            self._finish()
        ready, self._ready = self._ready, []
        return [msgspec.msgpack.encode(one) for one in ready]

    def abort(self) -> None:
        names = [one.staged for one in self._ready]
        self._ready = []
        if self._file is not None:
            handle, encoder, _ = self._file
            self._file = None
            names.append(self._name)
            for let_go in (encoder.finish, handle.close):
                _try_to(let_go)
        for name in names:
            _try_to(partial(self._place.remove, name))


def _try_to(call: Callable[[], object]) -> None:
    """What fails here is swept by the next run."""
    try:
        call()
    except Exception:
        return


class _Committer(Committer):
    """Moves staged files to their visible names."""

    def __init__(self, place: Place, folder: str) -> None:
        self._place = place
        self._folder = folder
        self._outdated: set[str] = set()  # no later restore needs them, once a commit is through

    def commit(self, committables: Sequence[bytes]) -> None:
        found = [decode_committable(data, _Committable, FORMAT_VERSION) for data in committables]
        staged = [one for one in found if self._is_staged(one)]
        here = {one.staged for one in staged}
        for one in found:
            if one.staged not in here:
                self._check_committed(one)
        note = self._note(found)
        for one in staged:
            self._move(one)
        for name in self._outdated - {note}:
            self._place.remove(name)
        self._outdated = {note} if note else set()

    def _move(self, one: _Committable) -> None:
        try:
            self._place.move(one.staged, one.visible)
        except ConnectorError:
            # A commit that an earlier run gave up on may be at it still, and have been quicker.
            gone = self._place.size(one.staged) is None
            if not gone or self._place.size(one.visible) != one.size_bytes:
                raise

    def _is_staged(self, one: _Committable) -> bool:
        size = self._place.size(one.staged)
        if size is not None and size != one.size_bytes:
            raise OutputLostError(
                f"{self._place.shown(one.staged)} was prepared with {one.size_bytes} bytes and "
                f"has {size}.",
                todo="Find out who changed it; restore from an older checkpoint.",
            )
        return size is not None

    def _note(self, found: list[_Committable]) -> str:
        """Say what is about to be visible: it may be taken away before it is committed again."""
        if not found:
            return ""
        body = msgspec.json.encode(sorted({one.visible for one in found}))
        name = f"{self._folder}/{_COMMITTING}{blake3(body).hexdigest()[:32]}"
        # Never written over: were that cut off, nothing would tell of what was moved before.
        if self._place.size(name) != len(body) or self._read(name) != body:
            self._place.write(name, body)
        return name

    def _read(self, name: str) -> bytes:
        with self._place.errors("reading", name), self._place.open(name) as handle:
            return handle.read()

    def _check_committed(self, one: _Committable) -> None:
        if self._place.size(one.visible) is not None:
            return
        for name in self._place.children(self._folder):
            if name.startswith(_COMMITTING) and one.visible in self._noted(name):
                return
        raise OutputLostError(
            f"{self._place.shown(one.visible)} is not there, nor what it is to be made of.",
            todo="If it was taken away on purpose, put an empty file of this name there until the "
            f"job has started. If {STAGING}/ was deleted, restore from an older checkpoint.",
        )

    def _noted(self, name: str) -> list[str]:
        try:
            return msgspec.json.decode(self._read(f"{self._folder}/{name}"), type=list[str])
        except (msgspec.MsgspecError, RecursionError):
            return []  # cut off while it was written: nothing was moved after it

    def discard(self, committables: Sequence[bytes]) -> None:
        for data in committables:
            self._place.remove(decode_committable(data, _Committable, FORMAT_VERSION).staged)

    def sweep(self, run: str) -> None:
        # A restart before the next checkpoint commits the same once more: its note stays till then.
        for name in self._place.children(self._folder):
            if name.startswith(_COMMITTING):
                self._outdated.add(f"{self._folder}/{name}")
            elif name != run and _is_before(name, run):
                self._place.remove(f"{self._folder}/{name}")


def _is_before(name: str, run: str) -> bool:
    """Whether a folder is of an earlier run, whose files nobody writes or commits any more."""
    of, now = generation_of(name), generation_of(run)
    return of is None or now is None or of < now
