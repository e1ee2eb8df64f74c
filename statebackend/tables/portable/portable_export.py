"""A savepoint as Parquet files with a manifest in JSON: `export_savepoint`."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyarrow import parquet

from recovery.savepoints.location_files import SavepointLocation
from recovery.savepoints.savepoint import Savepoint, read_savepoint
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import open_store
from statebackend.errors import CorruptionError, SettingError
from statebackend.rocks.parted import Store
from statebackend.rocks.parted import open_store as open_local
from statebackend.system import SYSTEM, System
from statebackend.tables.keyless_rows import operator_batches
from statebackend.tables.portable.portable_manifest import (
    MANIFEST_NAME,
    PortableFile,
    PortableManifest,
    PortableOperator,
    PortableState,
    PortableTtl,
    encode_manifest,
)
from statebackend.tables.state_scan import (
    StateSource,
    in_batches,
    scratch_folder,
    state_source,
    timer_source,
)
from statebackend.tables.stored_job import StoredJob, StoredOperator, StoredState, find_job
from statebackend.tables.temporary_copy import READ_SETTINGS, fetch_subtask
from statebackend.work_done import Progress, WorkDone

__all__ = ["export_savepoint"]

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]+")
_NAME_CHARS: Final = 40
_COMPRESSION: Final = "zstd"


def export_savepoint(
    savepoint: str,
    to: str,
    *,
    options: StoreOptions | None = None,
    scratch_dir: str | None = None,
    progress: Progress | None = None,
    rows_progress: Progress | None = None,
    system: System = SYSTEM,
) -> int:
    """Write a savepoint as Parquet files, which any tool reads, and `manifest.json`, the last one.

    Memory: a batch. A folder in ``scratch_dir`` takes a subtask's state meanwhile.

    Args:
        savepoint: its URI. to: a folder, a URI; empty.
        options: how S3 is reached.
        progress: told how many subtasks were written, and of how many.
        rows_progress: told how many rows were written. Of how many, nobody knows.

    Returns:
        how many rows were written.

    Raises:
        NotRestorableError: there is no such savepoint.
        SettingError: something lies in ``to`` already.
        CorruptionError: the savepoint is damaged. StoreUnreachableError: from the store.

    Where it fails, what was written is removed.
    """
    found = read_savepoint(open_store(savepoint, new_id=system.new_id, options=options))
    job = find_job("", None, savepoint=savepoint, options=options, system=system)
    target = open_store(to, new_id=system.new_id, options=options)
    if any(True for _ in target.list("")):
        raise SettingError(
            f"Nothing can be exported to {target.uri}: something lies there already.",
            todo="Give another folder.",
        )
    with scratch_folder(scratch_dir) as scratch:
        work, rows = WorkDone(progress), WorkDone(rows_progress)
        exporting = _Exporting(job, target, scratch, work, rows, system)
        try:
            manifest = exporting.manifest(found)
            target.put(MANIFEST_NAME, [encode_manifest(manifest)])
        except BaseException:  # a slice that is damaged, or Ctrl-C
            target.delete(exporting.written)
            raise
    return exporting.rows


class _Exporting:
    """One savepoint that is being written as files."""

    def __init__(
        self,
        job: StoredJob,
        target: ObjectStore,
        scratch: Path,
        work: WorkDone,
        rows: WorkDone,
        system: System,
    ) -> None:
        self._job, self._target, self._scratch = job, target, scratch
        self._work, self._rows_done, self._system = work, rows, system
        self.rows = 0
        self.written: list[str] = []

    def manifest(self, savepoint: Savepoint) -> PortableManifest:
        self._work.expect(sum(len(_keyed(one)) for one in self._job.operators.values()))
        operators = [
            self._operator(f"operators/{_folder(number, one.uid)}", one)
            for number, one in enumerate(self._job.operators.values())
        ]
        return PortableManifest(
            job=savepoint.of_job,
            query_id=savepoint.query_id,
            location=savepoint.location,
            epoch=savepoint.epoch,
            stamp_ms=savepoint.stamp_ms,
            watermark_ms=savepoint.watermark_ms,
            next_watermark_ms=savepoint.next_watermark_ms,
            continuous=savepoint.continuous,
            uncommitted=savepoint.uncommitted,
            operators=operators,
            sources=self._sources(savepoint),
        )

    def _operator(self, folder: str, operator: StoredOperator) -> PortableOperator:
        last, lineage = operator.last, operator.lineage
        folders = {
            name: f"{folder}/states/{_folder(number, name)}"
            for number, name in enumerate(operator.states)
        }
        files: dict[str, list[PortableFile]] = {one: [] for one in folders.values()}
        timers = f"{folder}/timers"
        files[timers] = []
        sources = {timers: timer_source(operator, None)}
        for name, place in folders.items():
            if operator.state(name).declared.of_operator:
                rows = operator_batches(self._job, operator, operator.state(name))
                files[place] += self._parquet(f"{place}/part-00000.parquet", rows)
            else:
                sources[place] = state_source(operator, name, None)
        for number in _keyed(operator):
            with closing(self._fetched(operator, number)) as store:
                for place, source in sources.items():
                    part = f"{place}/part-{number:05d}.parquet"
                    files[place] += self._parquet(part, _batches(store, source, number))
            shutil.rmtree(self._scratch / "subtask")  # room for the next
            self._work.add()
        return PortableOperator(
            uid=operator.uid,
            parallelism=lineage.parallelism,
            max_parallelism=lineage.max_parallelism,
            time_mode=last.time_mode or "none",
            watermark_ms=last.watermark_ms,
            event_max_ms=last.event_max_ms,
            second_max_ms=last.second_max_ms,
            key_columns=list(operator.key_schema.names),
            key_schema=_json(last.schemas.get("", "")),
            states=[
                _described(operator.state(name), files[place]) for name, place in folders.items()
            ],
            timers=files[timers],
        )

    def _fetched(self, operator: StoredOperator, number: int) -> Store:
        folder = self._scratch / "subtask"
        path = fetch_subtask(self._job, operator, number, folder, self._system)
        return open_local(str(path), READ_SETTINGS)

    def _parquet(self, name: str, batches: Iterable[pa.RecordBatch]) -> Iterator[PortableFile]:
        """Write batches into a file; none, if there are none."""
        path = self._scratch / "part.parquet"
        writer, rows = None, 0
        try:
            for batch in batches:
                if writer is None:
                    writer = parquet.ParquetWriter(path, batch.schema, compression=_COMPRESSION)
                writer.write_batch(batch)
                rows += batch.num_rows
                self._rows_done.add(batch.num_rows)
        finally:
            if writer is not None:
                writer.close()
        if rows:
            self.rows += rows
            self.written.append(name)
            self._target.put_file(name, path)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            size_bytes = path.stat().st_size
            yield PortableFile(name=name, size_bytes=size_bytes, sha256=digest, rows=rows)
        path.unlink(missing_ok=True)

    def _sources(self, savepoint: Savepoint) -> list[PortableFile]:
        location = SavepointLocation(self._job.store)
        made = []
        for file in savepoint.spark:
            data = b"".join(location.chunks(file.name))
            if len(data) != file.size_bytes:
                raise CorruptionError(
                    f"The file {file.name!r} of the savepoint in {savepoint.uri} has {len(data)} "
                    f"bytes, and savepoint.json names {file.size_bytes}.",
                    todo="Restore it from another copy; `savepoint describe --verify` says more.",
                )
            name = f"sources/{file.name}"
            self.written.append(name)
            self._target.put(name, [data])
            digest = hashlib.sha256(data).hexdigest()
            made.append(PortableFile(name=name, size_bytes=len(data), sha256=digest))
        return made


def _batches(store: Store, source: StateSource, number: int) -> Iterator[pa.RecordBatch]:
    assert source.rows is not None
    for keys, values in in_batches(store.scan_ranges(source.rows.ranges(*source.wanted(number)))):
        batch = source.rows.batch(keys, values)
        if batch.num_rows:  # of a list's heads alone there is none
            yield batch


def _keyed(operator: StoredOperator) -> range:
    """Its subtasks that hold something of keys."""
    return range(operator.lineage.parallelism if operator.key_schema.fields else 0)


def _folder(number: int, name: str) -> str:
    """A name that is one on every file system; the manifest says which is whose."""
    return f"{number}-{_UNSAFE.sub('-', name)[:_NAME_CHARS]}"


def _json(schema: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(schema) if schema else None
    return found


def _described(state: StoredState, files: list[PortableFile]) -> PortableState:
    declared = state.declared
    expires = declared.time_to_live
    ttl = None
    if expires is not None:
        ttl = PortableTtl(ms=expires.ms, update=expires.update, expired=expires.expired)
    elif declared.ttl not in (msgspec.UNSET, False):
        ttl = PortableTtl(ms=_UNKNOWN_TTL_MS, update="write", expired="hide")
    return PortableState(
        name=declared.name,
        kind=declared.kind,
        value_schema=json.loads(declared.value_schema),
        map_key_schema=_json(declared.key_schema),
        ttl=ttl,
        files=files,
    )


_UNKNOWN_TTL_MS: Final = (1 << 63) - 1  # a release before said that there is one, and not which
