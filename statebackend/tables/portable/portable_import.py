"""A savepoint of Parquet files with a manifest in JSON: `import_savepoint`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet
from pyspark.sql.types import StructType

from recovery.savepoints.savepoint import Savepoint
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.store_probe import probe
from snapshot.storage.stores_by_uri import open_store
from statebackend.errors import CorruptionError, NotRestorableError, ObjectNotFoundError
from statebackend.keygroups import check_parallelism
from statebackend.operators.declared_states import OPERATOR_KINDS, check_state_name
from statebackend.schema.codec import codec_for
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.types import schema_from_json
from statebackend.state.ttl_cells import TTL
from statebackend.system import SYSTEM, System
from statebackend.tables.given_keyless import GivenKeyless
from statebackend.tables.given_operators import GivenOperator
from statebackend.tables.given_rows import GivenState
from statebackend.tables.given_sources import Stood
from statebackend.tables.portable.portable_manifest import (
    MANIFEST_NAME,
    SOURCES,
    PortableFile,
    PortableManifest,
    PortableOperator,
    PortableState,
    decode_manifest,
)
from statebackend.tables.savepoint_of_rows import write_operators
from statebackend.tables.savepoint_writer import SavepointHead
from statebackend.tables.state_scan import scratch_folder
from statebackend.work_done import Progress, WorkDone

__all__ = ["import_savepoint"]

_BATCH_ROWS = 16_384
_BATCH_BYTES = 64 << 20


def import_savepoint(
    source: str,
    to: str,
    *,
    options: StoreOptions | None = None,
    scratch_dir: str | None = None,
    progress: Progress | None = None,
    system: System = SYSTEM,
) -> Savepoint:
    """Write a savepoint from the folder that `export_savepoint` made, or another tool in its form.

    Memory: a batch, and the states that belong to no key. A folder in ``scratch_dir`` takes a file
    and the state of an operator meanwhile.

    Args:
        source: the folder with `manifest.json`, a URI. to: the savepoint's folder, a URI; empty.
        options: how S3 is reached.
        progress: told how many bytes of the Parquet files were read, and of how many.

    Returns:
        the savepoint. Elements of lists count from 0 again; else it holds what was exported.

    Raises:
        NotRestorableError: there is no `manifest.json`.
        CorruptionError: a file is not what the manifest names, or does not read.
        UnsupportedFormatError: the manifest is of a later version.
        SchemaError, ValueMismatchError, NullKeyError: rows that are no state.
        SettingError: something lies in ``to`` already.
    """
    store = open_store(source, new_id=system.new_id, options=options)
    try:
        manifest = decode_manifest(store.get(MANIFEST_NAME), store.uri)
    except ObjectNotFoundError as error:
        raise NotRestorableError(
            f"There is no {MANIFEST_NAME} in {store.uri}, so nothing that was exported.",
            todo="Give the folder that `statebackend savepoint export` wrote.",
        ) from error
    target = open_store(to, new_id=system.new_id, options=options)
    probe(target, new_id=system.new_id)
    with scratch_folder(scratch_dir) as scratch:
        files = _Files(store, scratch, WorkDone(progress))
        files.work.expect(sum(one.size_bytes for one in _row_files(manifest)))
        operators = {one.uid: _operator(one, files) for one in manifest.operators}
        return write_operators(
            target, _head(manifest), operators, _stood(manifest, files), scratch_dir, system
        )


def _row_files(manifest: PortableManifest) -> Iterator[PortableFile]:
    for one in manifest.operators:
        yield from one.timers
        for state in one.states:
            yield from state.files


def _head(manifest: PortableManifest) -> SavepointHead:
    return SavepointHead(
        epoch=manifest.epoch,
        stamp_ms=manifest.stamp_ms,
        watermark_ms=manifest.watermark_ms,
        next_watermark_ms=manifest.next_watermark_ms,
        job=manifest.job,
        query_id=manifest.query_id,
        location=manifest.location,
        continuous=manifest.continuous,
        uncommitted=manifest.uncommitted,
    )


@dataclass(frozen=True)
class _Files:
    """Brings files here, checked, one at a time."""

    store: ObjectStore
    scratch: Path
    work: WorkDone

    def path(
        self, file: PortableFile, tell: Callable[[int], None] = lambda size_bytes: None
    ) -> Path:
        """A file in the scratch folder, to be removed by who asked.

        Raises:
            CorruptionError: it is gone, or other bytes than the manifest names.
        """
        path = self.scratch / hashlib.sha256(file.name.encode()).hexdigest()
        hasher, size_bytes = hashlib.sha256(), 0
        try:
            with path.open("wb") as made:
                for piece in self.store.get_chunks(file.name):
                    hasher.update(piece)
                    size_bytes += len(piece)
                    made.write(piece)
                    tell(len(piece))
        except ObjectNotFoundError as error:
            raise _damaged(self.store, file, "is not there") from error
        if (size_bytes, hasher.hexdigest()) != (file.size_bytes, file.sha256):
            raise _damaged(self.store, file, "is not the bytes that the manifest names")
        return path

    def batches(
        self, files: list[PortableFile], columns: Mapping[str, bool]
    ) -> Iterator[pa.RecordBatch]:
        """The rows of Parquet files.

        Args:
            columns: whether each must be there, or must not.

        Raises:
            CorruptionError: a file does not read, or is not what the manifest says.
        """
        for file in files:
            path = self.path(file, self.work.add)
            try:
                with parquet.ParquetFile(path) as opened:
                    self._check(file, opened, columns)
                    yield from opened.iter_batches(_rows_at_once(opened.metadata))
            except pa.ArrowException as error:
                raise _damaged(self.store, file, f"does not read ({error})") from error
            finally:
                path.unlink(missing_ok=True)  # a generator may end after its folder

    def _check(
        self, file: PortableFile, opened: parquet.ParquetFile, columns: Mapping[str, bool]
    ) -> None:
        rows, names = opened.metadata.num_rows, opened.schema_arrow.names
        if file.rows not in (None, rows):
            raise _damaged(self.store, file, f"has {rows} rows, and the manifest says {file.rows}")
        for name, wanted in columns.items():
            if (name in names) is not wanted:
                has = "no" if wanted else "a"
                raise _damaged(self.store, file, f"has {has} column {name} ({', '.join(names)})")


def _rows_at_once(metadata: parquet.FileMetaData) -> int:
    """Rows of a batch: large ones come a few at a time."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    row_bytes = sum(int(one.total_byte_size) for one in groups) // max(1, int(metadata.num_rows))
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_bytes)))


@dataclass(frozen=True)
class _Location:
    """The sources' files as a checkpoint location."""

    files: _Files
    by_name: dict[str, PortableFile]

    @property
    def path(self) -> str:
        """The folder's URI."""
        return self.files.store.uri

    def list(self, folder: str) -> list[str]:
        """See `LocationFiles`."""
        return [name for name in self.by_name if name.startswith(f"{folder}/")]

    def chunks(self, name: str) -> Iterator[bytes]:
        """See `LocationFiles`."""
        path = self.files.path(self.by_name[name])
        try:
            yield path.read_bytes()
        finally:
            path.unlink()


def _stood(manifest: PortableManifest, files: _Files) -> Stood | None:
    by_name = {one.name.removeprefix(SOURCES): one for one in manifest.sources}
    names = tuple(name for name in by_name if name != "metadata")
    if not by_name:
        return None
    return Stood(_Location(files, by_name), manifest.epoch, manifest.query_id, names)


def _operator(one: PortableOperator, files: _Files) -> GivenOperator:
    check_parallelism(one.parallelism, one.max_parallelism)
    key = StructType() if one.key_schema is None else _schema(one.key_schema)
    if key.fields:
        KeyCodec(key)
    states: list[tuple[GivenState, Iterator[pa.RecordBatch]]] = []
    keyless: list[GivenKeyless] = []
    for number, state in enumerate(one.states, start=1):
        check_state_name(one.uid, state.name)
        value = _schema(state.value_schema)
        codec_for(value)
        map_key = None if state.map_key_schema is None else _schema(state.map_key_schema)
        columns = {"map_key": map_key is not None, "expires_at_ms": state.ttl is not None}
        rows = files.batches(state.files, columns)
        if state.kind in OPERATOR_KINDS:
            keyless.append(GivenKeyless(state.name, state.kind, number, value, map_key, rows))
        else:
            made = GivenState(state.name, state.kind, number, key, value, map_key, _ttl(state))
            states.append((made, rows))
    return GivenOperator(
        key=key,
        states=states,
        timers=files.batches(one.timers, {"at_ms": True}),
        time_mode=one.time_mode,
        keyless=keyless,
        parallelism=one.parallelism,
        max_parallelism=one.max_parallelism,
        watermark_ms=one.watermark_ms,
        event_max_ms=one.event_max_ms,
        second_max_ms=one.second_max_ms,
    )


def _schema(given: dict[str, Any]) -> StructType:
    return schema_from_json(json.dumps(given))


def _ttl(state: PortableState) -> TTL | None:
    if state.ttl is None:
        return None
    ttl = state.ttl
    return TTL(ttl.ms, update=ttl.update, expired=ttl.expired)  # type: ignore[arg-type]


def _damaged(store: ObjectStore, file: PortableFile, why: str) -> CorruptionError:
    return CorruptionError(
        f"The file {file.name!r} in {store.uri} {why}.",
        todo="Export the savepoint once more, or take the folder from another copy.",
    )
