"""What is read of a job's state, and how it is brought here and decoded."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snapshot.storage.store_options import StoreOptions
from statebackend.errors import (
    CorruptionError,
    LocalDirError,
    NotRestorableError,
    ObjectNotFoundError,
    SettingError,
)
from statebackend.rocks.parted import open_store
from statebackend.tables.entry_rows import EntryRows, StateRows, TimerRows
from statebackend.tables.keyless_rows import operator_batches, operator_schema
from statebackend.tables.stored_job import StoredJob, StoredOperator, StoredState, find_job
from statebackend.tables.temporary_copy import READ_SETTINGS, fetch_subtask
from statebackend.tables.wanted_keys import encoded_keys
from statebackend.work_done import Progress, WorkDone

__all__ = [
    "BATCH_BYTES",
    "BATCH_ROWS",
    "ChosenColumns",
    "Entries",
    "StatePlace",
    "StateSource",
    "beside_cleaning",
    "entries",
    "in_batches",
    "scratch_folder",
    "state_source",
    "timer_source",
]

Found = TypeVar("Found")
Read = TypeVar("Read")

Entries = tuple[list[bytes], list[bytes]]
"""Keys and their values."""

BATCH_ROWS: Final = 65_536
BATCH_BYTES: Final = 16 << 20
"""About so many are in a batch; an entry that is larger has one of its own."""
_SCRATCH: Final = "statebackend-read-"
_OVERTAKEN: Final = (CorruptionError, NotRestorableError, ObjectNotFoundError)
_TRIES: Final = 3  # the newest epoch may be cleaned while it is read; then there is a newer one


@dataclass(frozen=True)
class StateSource:
    """What to read of an operator.

    Attributes:
        rows: of entries that lie by key groups; None: they belong to no key.
        keys: only these, encoded; None: all.
        only: of these subtasks; None: of all that hold something of it.
        groups: of these key groups; None: of all.
    """

    operator: StoredOperator
    state: StoredState | None
    rows: EntryRows | None
    keys: list[bytes] | None
    only: frozenset[int] | None = None
    groups: frozenset[int] | None = None

    @property
    def schema(self) -> pa.Schema:
        """Of the batches."""
        if self.rows is not None:
            return self.rows.schema
        assert self.state is not None
        return operator_schema(self.state)

    def subtasks(self) -> list[int]:
        """Those that hold something of it."""
        found = range(len(self.operator.lineage.subtasks))
        return [n for n in found if self.wanted(n)[0]]

    def wanted(self, subtask: int) -> tuple[list[int], list[bytes] | None]:
        """The key groups, and the keys (None: all), that are read of a subtask."""
        if self.only is not None and subtask not in self.only:
            return [], None
        own = self.operator.lineage.subtasks[subtask].key_groups
        groups = [group for group in own if self.groups is None or group in self.groups]
        if self.keys is None:
            return groups, None
        inside = set(groups)
        keys = [key for key in self.keys if int.from_bytes(key[:2], "big") in inside]
        return groups if keys else [], keys


def _keyed(operator: StoredOperator, keys: Any) -> list[bytes] | None:
    if keys is None:
        return None
    return encoded_keys(keys, operator.key_schema, operator.lineage.max_parallelism)


def state_source(operator: StoredOperator, name: str, keys: Any) -> StateSource:
    """One state, of all keys or of some.

    Raises:
        SettingError: there is no such state, or it belongs to no key.
        UsageError: these are no keys.
    """
    state = operator.state(name)
    if not state.declared.of_operator:
        rows = StateRows(state, operator.key_schema)
        return StateSource(operator, state, rows, _keyed(operator, keys))
    if keys is not None:
        raise SettingError(
            f"State {name!r} of operator {operator.uid!r} belongs to no key, and keys= was given.",
            todo="Leave keys= out.",
        )
    return StateSource(operator, state, None, None)


def timer_source(operator: StoredOperator, keys: Any) -> StateSource:
    """The timers, of all keys or of some."""
    rows = TimerRows(operator.key_schema, by_key=keys is not None)
    return StateSource(operator, None, rows, _keyed(operator, keys))


@dataclass(frozen=True)
class StatePlace:
    """Where to read: see `read_state`."""

    uri: str
    job: str | None
    epoch: int | None
    savepoint: str | None
    options: StoreOptions | None
    scratch_dir: str | None
    progress: Progress | None = None

    def find(self) -> StoredJob:
        """The job after the epoch."""
        return find_job(
            self.uri, self.job, epoch=self.epoch, savepoint=self.savepoint, options=self.options
        )

    def reader(
        self,
        uid: str,
        source_of: Callable[[StoredOperator], StateSource],
        columns: Sequence[str] | None,
    ) -> pa.RecordBatchReader:
        """The stream; what may be cleaned meanwhile has been fetched."""

        def read(found: StoredJob) -> pa.RecordBatchReader:
            source = source_of(found.operator(uid))
            taken = ChosenColumns(source.schema, columns)
            batches = _batches(found, source, self.scratch_dir, WorkDone(self.progress))
            first = next(batches, None)  # fetches, as far as nothing may go missing
            whole = batches if first is None else chain((first,), batches)
            return pa.RecordBatchReader.from_batches(taken.schema, map(taken.of, whole))

        return beside_cleaning(self.find, read, lambda found: found.epoch)


def beside_cleaning(
    find: Callable[[], Found], read: Callable[[Found], Read], epoch: Callable[[Found], int | None]
) -> Read:
    """Read a job as it is found, and again if it went on and cleaned meanwhile what was read.

    Args:
        epoch: the one in which it was found.

    Raises:
        as ``read``: the epoch is still the newest, or it was cleaned time and again.
    """
    for tries_left in reversed(range(_TRIES)):
        found = None
        try:
            found = find()
            return read(found)
        except _OVERTAKEN:
            if not tries_left or (found is not None and not _gone_on(find, epoch, found)):
                raise
    raise AssertionError("the last try returns or raises")


def _gone_on(find: Callable[[], Found], epoch: Callable[[Found], int | None], found: Found) -> bool:
    try:
        return epoch(find()) != epoch(found)
    except _OVERTAKEN:
        return True  # this look was overtaken, too


def _batches(
    job: StoredJob, source: StateSource, scratch_dir: str | None, work: WorkDone
) -> Iterator[pa.RecordBatch]:
    if source.rows is None:
        assert source.state is not None
        found = operator_batches(job, source.operator, source.state)
        yield from found if job.kept else list(found)
        return
    rows = source.rows
    with scratch_folder(scratch_dir) as folder:
        for keys, values in in_batches(entries(job, source, folder, work)):
            yield rows.batch(keys, values)


@contextmanager
def scratch_folder(scratch_dir: str | None) -> Iterator[Path]:
    """A folder for what is fetched.

    Raises:
        LocalDirError: it cannot be made.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=scratch_dir)
    except OSError as error:
        raise LocalDirError(
            f"No folder can be made in {scratch_dir or tempfile.gettempdir()} "
            f"({error.strerror or error}).",
            todo="Give scratch_dir= a local directory with room for the state.",
        ) from error
    with folder as path:
        yield Path(path)


def entries(
    job: StoredJob, source: StateSource, folder: Path, work: WorkDone | None = None
) -> Iterator[Entries]:
    """The entries that hold the rows of a source, in their order, in pieces.

    All that may be cleaned is fetched before the first piece comes.

    Args:
        work: counts the subtasks that were fetched.

    Raises:
        as `fetch_subtask`.
    """
    wanted, work = source.subtasks(), work or WorkDone()
    work.expect(len(wanted))

    def fetch(number: int) -> Path:
        path = fetch_subtask(job, source.operator, number, folder / str(number))
        work.add()
        return path

    fetched = {number: fetch(number) for number in wanted if not job.kept}
    assert source.rows is not None
    for number in wanted:
        own = folder / str(number)
        path = fetched.get(number) or fetch(number)
        with closing(open_store(str(path), READ_SETTINGS)) as store:
            yield from store.scan_ranges(source.rows.ranges(*source.wanted(number)))
        shutil.rmtree(own, ignore_errors=True)  # room for the next


def in_batches(pieces: Iterator[Entries]) -> Iterator[Entries]:
    """Pieces of entries, joined or cut so that each is enough for a batch, and not much more."""
    keys: list[bytes] = []
    values: list[bytes] = []
    size_bytes = 0
    for some_keys, some_values, some_bytes in chain.from_iterable(map(_cut, pieces)):
        keys += some_keys
        values += some_values
        size_bytes += some_bytes
        if len(keys) >= BATCH_ROWS or size_bytes >= BATCH_BYTES:
            yield keys, values
            keys, values, size_bytes = [], [], 0
    if keys:
        yield keys, values


def _cut(piece: Entries) -> Iterator[tuple[list[bytes], list[bytes], int]]:
    """A piece in parts that are a batch at most, or one entry, with how many bytes each has."""
    keys, values = piece
    total = sum(map(len, keys)) + sum(map(len, values))
    if total <= BATCH_BYTES:
        yield keys, values, total
        return
    sizes = np.fromiter(map(len, keys), np.int64, len(keys))
    sizes += np.fromiter(map(len, values), np.int64, len(values))
    ends = np.flatnonzero(np.diff(np.cumsum(sizes) // BATCH_BYTES)) + 1
    start = 0
    for end in [*ends.tolist(), len(keys)]:
        yield keys[start:end], values[start:end], int(sizes[start:end].sum())
        start = end


class ChosenColumns:
    """The columns that were asked for.

    Raises:
        SettingError: one that is not there.
    """

    def __init__(self, schema: pa.Schema, names: Sequence[str] | None) -> None:
        self._paths = None if names is None else [_path(schema, name) for name in names]
        self.schema = schema
        if names is not None and self._paths is not None:
            types = [_type_at(schema, path) for path in self._paths]
            self.schema = pa.schema(list(zip(names, types, strict=True)))

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Those of a batch."""
        if self._paths is None:
            return batch
        arrays = []
        for path in self._paths:
            array = batch.column(path[0])
            arrays.append(array if len(path) == 1 else pc.struct_field(array, path[1:]))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _path(schema: pa.Schema, name: str) -> list[int]:
    first, dot, rest = name.partition(".")
    path = [schema.get_field_index(first)]
    if path[0] >= 0 and dot:
        kind = schema.field(path[0]).type
        path.append(kind.get_field_index(rest) if pa.types.is_struct(kind) else -1)
    if min(path) < 0:
        shown = []
        for field in schema:
            shown.append(field.name)
            if pa.types.is_struct(field.type):
                shown += [f"{field.name}.{inner.name}" for inner in field.type]
        raise SettingError(f"There is no column {name!r}.", todo=f"There are: {', '.join(shown)}.")
    return path


def _type_at(schema: pa.Schema, path: Sequence[int]) -> pa.DataType:
    kind = schema.field(path[0]).type
    return kind if len(path) == 1 else kind.field(path[1]).type
