"""Reading state as Arrow tables: `read_state`, `read_timers`, `states`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from snapshot.storage.store_options import StoreOptions
from statebackend.errors import (
    CorruptionError,
    NotRestorableError,
    ObjectNotFoundError,
    SettingError,
)
from statebackend.rocks.parted import Store, open_store
from statebackend.schema.types import schema_from_json
from statebackend.tables.entry_rows import EntryRows, StateRows, TimerRows
from statebackend.tables.operator_rows import operator_batches, operator_schema
from statebackend.tables.stored_job import StoredJob, StoredOperator, StoredState, find_job
from statebackend.tables.temporary_copy import READ_SETTINGS, fetch_subtask
from statebackend.tables.wanted_keys import encoded_keys

__all__ = ["read_state", "read_timers", "states"]

_BATCH_ROWS: Final = 65_536
_BATCH_BYTES: Final = 16 << 20
_TRIES: Final = 3  # the newest epoch may be cleaned while it is read; then there is a newer one


def read_state(
    uri: str,
    job: str | None = None,
    operator: str = "",
    state: str = "",
    *,
    epoch: int | None = None,
    savepoint: str | None = None,
    keys: Any = None,
    columns: Sequence[str] | None = None,
    options: StoreOptions | None = None,
    scratch_dir: str | None = None,
) -> pa.RecordBatchReader:
    """One state of an operator, as a stream of Arrow batches; the job may run meanwhile.

    What is needed of the job is fetched before this returns, so that nothing is missing if the job
    cleans it: ``scratch_dir`` takes the state of the operator, or that of the subtasks which
    ``keys`` belong to. Of a savepoint, one subtask after the other is fetched. Memory: a batch.

    Args:
        uri: the folder of all jobs, as ``uri=`` of the query. job: its name.
        operator, state: which. A reducing or aggregating state is a value state.
        epoch: one that the job retains; default: the newest durable one.
        savepoint: the URI of a savepoint, instead of ``uri`` and ``job``.
        keys: only these: a list of values (or tuples, of several key columns), or an Arrow table
            or record batch of the key columns.
        columns: only these, and in this order. ``value.n`` is a field of a struct.
        options: how S3 is reached.
        scratch_dir: a local folder for the time of reading; default: Python's.

    Returns:
        ``key_group``, ``key`` (a struct), of a list ``index``, of a map ``map_key``, ``value`` (a
        struct), and with a TTL ``expires_at_ms``: expired entries are there until they are removed.
        Elements of a list come in their order; ``index`` has gaps where elements expired. Of
        states of no key: ``subtask``, ``index``, ``value``, or ``map_key``, ``value``.

    Raises:
        SettingError: there is no such operator, state, or column; or keys of a state of no key.
        NotRestorableError: there is no such job or savepoint, or the epoch is not retained.
        FormatError: what is there does not read.
        StoreUnreachableError: from the store.
    """
    place = _Place(uri, job, epoch, savepoint, options, scratch_dir)
    return place.reader(operator, lambda found: _state_source(found, state, keys), columns)


def read_timers(
    uri: str,
    job: str | None = None,
    operator: str = "",
    *,
    epoch: int | None = None,
    savepoint: str | None = None,
    keys: Any = None,
    columns: Sequence[str] | None = None,
    options: StoreOptions | None = None,
    scratch_dir: str | None = None,
) -> pa.RecordBatchReader:
    """An operator's timers: ``key_group``, ``key`` (a struct), ``at_ms``. See :func:`read_state`.

    Within a key group they come in the order of their times.
    """
    place = _Place(uri, job, epoch, savepoint, options, scratch_dir)
    return place.reader(operator, lambda found: _timer_source(found, keys), columns)


_STATES: Final = pa.schema(
    [
        ("operator", pa.string()),
        ("state", pa.string()),
        ("kind", pa.string()),
        ("key_schema", pa.string()),
        ("map_key_schema", pa.string()),
        ("value_schema", pa.string()),
        ("ttl_ms", pa.int64()),
        ("epoch", pa.int64()),
        ("parallelism", pa.int32()),
        ("max_parallelism", pa.int32()),
        ("operator_bytes", pa.int64()),
    ]
)


def states(
    uri: str,
    job: str | None = None,
    *,
    epoch: int | None = None,
    savepoint: str | None = None,
    options: StoreOptions | None = None,
) -> pa.Table:
    """What states a job has, a row each. Reads the log alone. Args, raises: see `read_state`.

    ``operator_bytes``: what a restore of the operator reads, of all of its states together.
    """
    found = find_job(uri, job, epoch=epoch, savepoint=savepoint, options=options)
    rows = []
    for one in found.operators.values():
        size_bytes = _operator_bytes(one)
        for name, state in sorted(one.states.items()):
            declared = state.declared
            of_keys = not declared.of_operator
            rows.append(
                {
                    "operator": one.uid,
                    "state": name,
                    "kind": declared.kind,
                    "key_schema": _ddl_of(one.last.schemas[""]) if of_keys else None,
                    "map_key_schema": _ddl_of(declared.key_schema),
                    "value_schema": _ddl_of(declared.value_schema),
                    "ttl_ms": declared.ttl_ms if isinstance(declared.ttl_ms, int) else None,
                    "epoch": found.epoch,
                    "parallelism": one.lineage.parallelism,
                    "max_parallelism": one.lineage.max_parallelism,
                    "operator_bytes": size_bytes,
                }
            )
    return pa.Table.from_pylist(rows, schema=_STATES)


@dataclass(frozen=True)
class _Source:
    """What to read of an operator.

    Attributes:
        rows: of entries that lie by key groups; None: they belong to no key.
        keys: only these, encoded; None: all.
    """

    operator: StoredOperator
    state: StoredState | None
    rows: EntryRows | None
    keys: list[bytes] | None

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
        if self.keys is None:
            return list(found)
        groups = {int.from_bytes(key[:2], "big") for key in self.keys}
        return [n for n in found if groups & set(self.operator.lineage.subtasks[n].key_groups)]


def _keyed(operator: StoredOperator, keys: Any) -> list[bytes] | None:
    if keys is None:
        return None
    return encoded_keys(keys, operator.key_schema, operator.lineage.max_parallelism)


def _state_source(operator: StoredOperator, name: str, keys: Any) -> _Source:
    state = operator.state(name)
    if not state.declared.of_operator:
        rows = StateRows(state, operator.key_schema)
        return _Source(operator, state, rows, _keyed(operator, keys))
    if keys is not None:
        raise SettingError(
            f"State {name!r} of operator {operator.uid!r} belongs to no key, and keys= was given.",
            todo="Leave keys= out.",
        )
    return _Source(operator, state, None, None)


def _timer_source(operator: StoredOperator, keys: Any) -> _Source:
    return _Source(operator, None, TimerRows(operator.key_schema), _keyed(operator, keys))


@dataclass(frozen=True)
class _Place:
    """Where to read: see `read_state`."""

    uri: str
    job: str | None
    epoch: int | None
    savepoint: str | None
    options: StoreOptions | None
    scratch_dir: str | None

    def find(self) -> StoredJob:
        """The job after the epoch."""
        return find_job(
            self.uri, self.job, epoch=self.epoch, savepoint=self.savepoint, options=self.options
        )

    def reader(
        self,
        uid: str,
        source_of: Callable[[StoredOperator], _Source],
        columns: Sequence[str] | None,
    ) -> pa.RecordBatchReader:
        """The stream; what may be cleaned meanwhile has been fetched."""
        for tries_left in reversed(range(_TRIES)):
            found = self.find()
            source = source_of(found.operator(uid))
            taken = _Columns(source.schema, columns)
            try:
                batches = _batches(found, source, self.scratch_dir)
                first = next(batches, None)  # fetches, as far as nothing may go missing
            except (CorruptionError, NotRestorableError, ObjectNotFoundError):
                if self.find().epoch == found.epoch or not tries_left:
                    raise
                continue
            whole = batches if first is None else chain((first,), batches)
            return pa.RecordBatchReader.from_batches(taken.schema, map(taken.of, whole))
        raise AssertionError("the last try returns or raises")


def _batches(job: StoredJob, source: _Source, scratch_dir: str | None) -> Iterator[pa.RecordBatch]:
    if source.rows is None:
        assert source.state is not None
        found = operator_batches(job, source.operator, source.state)
        yield from found if job.kept else list(found)
        return
    with tempfile.TemporaryDirectory(prefix="statebackend-read-", dir=scratch_dir) as folder:
        wanted = source.subtasks()
        fetched = {}
        for number in wanted if not job.kept else ():
            fetched[number] = fetch_subtask(job, source.operator, number, Path(folder, str(number)))
        for number in wanted:
            own = Path(folder, str(number))
            path = fetched.get(number) or fetch_subtask(job, source.operator, number, own)
            with closing(open_store(str(path), READ_SETTINGS)) as store:
                yield from _subtask_batches(store, source, number)
            shutil.rmtree(own, ignore_errors=True)  # room for the next


def _subtask_batches(store: Store, source: _Source, subtask: int) -> Iterator[pa.RecordBatch]:
    rows, groups = source.rows, source.operator.lineage.subtasks[subtask].key_groups
    assert rows is not None
    own = source.keys
    if own is not None:
        own = [key for key in own if int.from_bytes(key[:2], "big") in groups]
    keys: list[bytes] = []
    values: list[bytes] = []
    size_bytes = 0
    for some_keys, some_values in store.scan_ranges(rows.ranges(list(groups), own)):
        keys += some_keys
        values += some_values
        size_bytes += sum(map(len, some_values)) + sum(map(len, some_keys))
        if len(keys) >= _BATCH_ROWS or size_bytes >= _BATCH_BYTES:
            yield rows.batch(keys, values)
            keys, values, size_bytes = [], [], 0
    if keys:
        yield rows.batch(keys, values)


class _Columns:
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


def _operator_bytes(operator: StoredOperator) -> int:
    found = 0
    for subtask in operator.lineage.subtasks:
        for one, epoch in subtask.origins(operator.last.epoch):
            base = one.base_before(epoch)
            found += max(base.entry.size_bytes, base.entry.state_bytes) if base else 0
            found += one.since_base(epoch)[1]
    return found


def _ddl_of(schema_json: str) -> str | None:
    if not schema_json:
        return None
    return ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in schema_from_json(schema_json))
