"""Erases keys of a job that has stopped, and says what still holds them: `erase_keys`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from recovery.inspect.job_list import SAVEPOINT_NAME
from recovery.savepoints.location_files import LocationFiles, StoreLocation
from recovery.savepoints.savepoint import (
    Savepoint,
    below,
    encode_savepoint,
    read_savepoint,
    savepoints_folder,
)
from recovery.savepoints.savepoint_list import list_savepoints
from snapshot.formats.record import Manifest
from snapshot.log.commit_log import CommitLog
from snapshot.retention.garbage_collection import CleanReport, clean, outside_view
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import open_store
from snapshot.storage.uris import job_folder
from statebackend.errors import NotRestorableError, SettingError, StateBackendError, UsageError
from statebackend.system import SYSTEM, System
from statebackend.tables.erase_from_log import ErasedKeys, Erasing, entries_of, epoch_to_erase_in
from statebackend.tables.state_scan import scratch_folder
from statebackend.tables.stored_job import StoredJob, StoredOperator, job_in
from statebackend.tables.wanted_keys import encoded_keys
from statebackend.work_done import Progress, WorkDone

__all__ = ["EraseReport", "SavepointHolding", "erase_in_job", "erase_keys"]

_LOCAL: Final = (
    "local_dir of the executors: old copies until their subtasks run there again, which removes "
    "them; or delete the job's folder there"
)
_TEMPORARY: Final = (
    "statebackend-read-* and statebackend-lookup-* in temporary folders, of processes that were "
    "killed: until you delete them"
)
_KEYLESS: Final = "states of no key of operator {!r}: not looked into ({})"
_ELSEWHERE: Final = "savepoints in other folders than {}, or of other jobs: not looked for"
_UPLOADS: Final = (
    "what a worker was uploading when the job stopped, if it arrives yet: until the job's next "
    "cleaning; `statebackend gc`, or to erase once more, removes it too"
)
_UNREAD: Final = "{}: it does not read, so it was not deleted, until you delete it"
_FOREIGN: Final = "{} objects in the job's folder that are not the job's ({}): not looked into"
_UNFINISHED: Final = "it was not finished; `statebackend savepoint delete` removes what is left"
_OF_NO_KEY: Final = ("operator", "broadcast")
_VERSIONS: Final = "old versions of objects, and copies, where the store keeps such"


class SavepointHolding(msgspec.Struct, frozen=True, kw_only=True):
    """A savepoint that holds, or held, erased keys.

    Attributes:
        entries: of the keys, by state; none, where only what it needs no more may hold some.
        rewritten: they are not in it any more.
        problem: why that is not known; empty if it is.
    """

    uri: str
    id: str
    entries: dict[str, int] = {}
    rewritten: bool = False
    problem: str = ""


class EraseReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was erased, and what still holds it.

    Attributes:
        epoch: the newest one, which was written anew without the keys.
        entries: that were erased in it, by state; ``timers`` are the operator's timers.
        dropped_epochs: earlier ones that the job retained; they are deleted.
        savepoints: of the job, that held one of the keys.
        still: what holds the keys yet, or may, and until when, in a sentence each.
        dry_run: nothing was changed.
    """

    job: str
    operator: str
    epoch: int
    entries: dict[str, int]
    dropped_epochs: list[int]
    savepoints: list[SavepointHolding]
    still: list[str]
    dry_run: bool


def erase_keys(
    uri: str,
    job: str,
    operator: str,
    keys: Any,
    *,
    checkpoint_location: str | None = None,
    rewrite_savepoints: bool = False,
    dry_run: bool = False,
    options: StoreOptions | None = None,
    scratch_dir: str | None = None,
    progress: Progress | None = None,
    system: System = SYSTEM,
) -> EraseReport:
    """Erase keys of an operator from a job that has stopped, and say what still holds them.

    The job's whole newest epoch is written anew, and everything older is deleted. A driver that
    runs the job elsewhere is fenced: its query fails, and may be started again.

    Args:
        uri: the folder of all jobs. job: its name. operator: its uid.
        keys: a list of values (or tuples, of several key columns), or an Arrow table of them.
        checkpoint_location: of the streaming query; None: it is a continuous job.
        rewrite_savepoints: those of the job under ``<uri>/.savepoints/`` are written anew too.
        dry_run: look only: what there is of the keys.
        options: how S3 is reached. scratch_dir: for the state of a subtask, twice.
        progress: told how many subtasks were searched or written anew, and of how many; there are
            more with each savepoint that is looked into.

    Raises:
        SettingError: there is no such operator, or the location is not the job's.
        UsageError: these are no keys.
        NotRestorableError: there is no such job, no finished epoch, or one with rows in flight.
        FencedError: another driver has claimed the job meanwhile.
        JobRunningError: the query runs elsewhere, and has committed a batch meanwhile.
        CorruptionError: something that is needed is damaged.
        StoreUnreachableError, CommitUnknownError: from the store. Erase again.

    Wherever it fails, the job is as it was but for some or all of the keys, and can go on.
    """
    store = open_store(job_folder(uri, job), new_id=system.new_id, options=options)
    location = None
    if checkpoint_location is not None:
        on_s3 = checkpoint_location.partition(":")[0] in ("s3", "s3a", "s3n")
        place = open_store(
            checkpoint_location, new_id=system.new_id, options=options if on_s3 else None
        )
        location = StoreLocation(place)
    everywhere = _Everywhere(uri, job, store, options, scratch_dir, WorkDone(progress), system)
    return everywhere.erase(
        operator, keys, location, rewrite_savepoints=rewrite_savepoints, dry_run=dry_run
    )


def erase_in_job(
    uri: str,
    job: str,
    store: ObjectStore,
    location: LocationFiles | None,
    operator: str,
    keys: Any,
    *,
    rewrite_savepoints: bool,
    options: StoreOptions | None,
    system: System,
    dry_run: bool = False,
    scratch_dir: str | None = None,
    progress: Progress | None = None,
) -> EraseReport:
    """As `erase_keys`, with a store and a checkpoint location that are open."""
    everywhere = _Everywhere(uri, job, store, options, scratch_dir, WorkDone(progress), system)
    return everywhere.erase(
        operator, keys, location, rewrite_savepoints=rewrite_savepoints, dry_run=dry_run
    )


class _Everywhere:
    """A job and its savepoints."""

    def __init__(
        self,
        uri: str,
        job: str,
        store: ObjectStore,
        options: StoreOptions | None,
        scratch_dir: str | None,
        work: WorkDone,
        system: System,
    ) -> None:
        self._uri, self._job, self._store = uri, job, store
        self._options, self._scratch_dir = options, scratch_dir
        self._work, self._system = work, system

    def erase(
        self,
        uid: str,
        keys: Any,
        location: LocationFiles | None,
        *,
        rewrite_savepoints: bool,
        dry_run: bool,
    ) -> EraseReport:
        """See `erase_keys`."""
        keys = list(keys) if isinstance(keys, Iterator) else keys  # savepoints are asked, too
        log = self._log(self._store, self._job)
        manifests = log.manifests()
        if not manifests:
            raise NotRestorableError(
                f"There is no job in {self._store.uri}: it has no commit log.",
                todo="Check the URI and the job's name (statebackend list shows what is there).",
            )
        epoch, check = epoch_to_erase_in(manifests, location)
        found = job_in(self._store, self._job, manifests, epoch, self._system)
        encoded, cleaned = self._encoded(found, uid, keys), None
        with scratch_folder(self._scratch_dir) as scratch:
            if dry_run:
                one = found.operator(uid)
                entries = self._entries(found, one, encoded, scratch)
            else:
                erasing = self._erasing(self._store, self._job, log, manifests, epoch, scratch)
                entries, cleaned = replace(erasing, check=check).run(uid, encoded)
            holding = self._savepoints(uid, keys, scratch, rewrite_savepoints and not dry_run)
        known = {m.epoch for m in manifests if m.kind == "checkpoint" and m.operator == uid}
        return EraseReport(
            job=self._job,
            operator=uid,
            epoch=epoch,
            entries=entries,
            dropped_epochs=sorted(known - {epoch}),
            savepoints=holding,
            still=[*self._still(found, uid, holding), *_uncleaned(self._store.uri, cleaned)],
            dry_run=dry_run,
        )

    def _encoded(self, found: StoredJob, uid: str, keys: Any) -> list[bytes]:
        operator = found.operator(uid)
        if not operator.key_schema.fields:
            raise SettingError(
                f"The operator {uid!r} has no keys.", todo="Name an operator with keyed state."
            )
        encoded = encoded_keys(keys, operator.key_schema, operator.lineage.max_parallelism)
        if not encoded:
            raise UsageError("No key was given.", todo="Give at least one key.")
        return encoded

    def _entries(
        self, found: StoredJob, operator: StoredOperator, encoded: list[bytes], scratch: Path
    ) -> dict[str, int]:
        erased = ErasedKeys(operator, encoded)
        return entries_of(found, operator, erased, scratch, self._work, self._system)

    def _log(self, store: ObjectStore, job: str) -> CommitLog:
        system = self._system
        return CommitLog(
            store,
            job=job,
            writer=system.process_name(),
            new_id=system.new_id,
            threads=system.threads,
        )

    def _erasing(
        self,
        store: ObjectStore,
        job: str,
        log: CommitLog,
        manifests: list[Manifest],
        epoch: int,
        scratch: Path,
    ) -> Erasing:
        return Erasing(
            store=store,
            job=job,
            log=log,
            manifests=manifests,
            epoch=epoch,
            scratch=scratch,
            work=self._work,
            system=self._system,
        )

    # --- savepoints ----------------------------------------------------------------------------

    def _savepoints(
        self, uid: str, keys: Any, scratch: Path, rewrite: bool
    ) -> list[SavepointHolding]:
        """Those of the job that hold a key, or of which that is not known."""
        folder, found = savepoints_folder(self._uri), list[SavepointHolding]()

        def at(name: str) -> ObjectStore:
            uri = below(folder, name) if name else folder
            return open_store(uri, new_id=self._system.new_id, options=self._options)

        for info in list_savepoints(at(""), at, job=self._job):
            if not info.complete:
                found.append(SavepointHolding(uri=info.uri, id=info.id, problem=_UNFINISHED))
                continue
            try:
                one = self._savepoint(info.uri, uid, keys, scratch, rewrite)
            except StateBackendError as error:
                one = SavepointHolding(uri=info.uri, id=info.id, problem=error.what)
            if one is not None:
                found.append(one)
        return found

    def _savepoint(
        self, uri: str, uid: str, keys: Any, scratch: Path, rewrite: bool
    ) -> SavepointHolding | None:
        store = open_store(uri, new_id=self._system.new_id, options=self._options)
        savepoint = read_savepoint(store)
        log = self._log(store, savepoint.job)
        manifests = log.manifests()
        found = job_in(store, savepoint.job, manifests, savepoint.epoch, self._system)
        if uid not in found.operators:
            return None
        encoded, operator = self._encoded(found, uid, keys), found.operator(uid)
        entries = self._entries(found, operator, encoded, scratch)
        # One that was cut after its records holds none in its newest; its older ones may.
        if not entries and not _cut(savepoint, manifests):
            return self._swept(store, savepoint, log, rewrite)
        if rewrite:
            erasing = self._erasing(store, savepoint.job, log, manifests, savepoint.epoch, scratch)
            replace(erasing, keeps_history=False).run(uid, encoded)
            store.put(SAVEPOINT_NAME, [encode_savepoint(self._described(store, savepoint))])
        return SavepointHolding(uri=uri, id=savepoint.id, entries=entries, rewritten=rewrite)

    def _swept(
        self, store: ObjectStore, savepoint: Savepoint, log: CommitLog, rewrite: bool
    ) -> SavepointHolding | None:
        """What a power cut has brought back of one that was rewritten: nobody else cleans it."""
        report = clean(store, lambda: outside_view(store, log), dry_run=not rewrite)
        if not report.removed:
            return None
        return SavepointHolding(uri=store.uri, id=savepoint.id, rewritten=rewrite)

    def _described(self, store: ObjectStore, savepoint: Savepoint) -> Savepoint:
        """As it is now."""
        manifests = self._log(store, savepoint.job).manifests()
        records = [one for one in manifests if one.kind == "checkpoint"]
        sizes = {m.operator: sum(one.size_bytes for one in m.slices) for m in records}
        objects = sum(one.object is not None for m in records for one in m.slices)
        operators = [
            msgspec.structs.replace(one, size_bytes=sizes.get(one.uid, one.size_bytes))
            for one in savepoint.operators
        ]
        return msgspec.structs.replace(
            savepoint,
            operators=operators,
            records=len(records),
            objects=objects,
            size_bytes=sum(sizes.values()),
        )

    # --- the report ----------------------------------------------------------------------------

    def _still(self, found: StoredJob, uid: str, holding: Sequence[SavepointHolding]) -> list[str]:
        still = [_LOCAL, _TEMPORARY]
        for one in holding:
            if one.problem:
                still.append(f"savepoint {one.uri}: not known ({one.problem})")
            elif not one.rewritten:
                still.append(f"savepoint {one.uri}: until it is deleted, or rewritten")
        for name, operator in found.operators.items():
            states = operator.states.items()
            keyless = sorted(own for own, one in states if one.declared.of_operator)
            # A source's splits, and what a sink has prepared, are declared by nobody.
            if keyless or any(one.kind in _OF_NO_KEY for one in operator.last.slices):
                still.append(_KEYLESS.format(name, ", ".join(keyless) or "its own"))
        if len(found.operators) > 1:
            others = ", ".join(repr(name) for name in found.operators if name != uid)
            still.append(f"other operators ({others}): erased by their own keys only")
        still += [_UPLOADS, _ELSEWHERE.format(savepoints_folder(self._uri)), _VERSIONS]
        return still


def _uncleaned(uri: str, cleaned: CleanReport | None) -> list[str]:
    """What a cleaning has left in the job's folder, and may hold anything."""
    if cleaned is None:
        return []
    still = [_UNREAD.format(below(uri, name)) for name in cleaned.unknown]
    if cleaned.foreign:
        still.append(_FOREIGN.format(len(cleaned.foreign), cleaned.foreign[0]))
    return still


def _cut(savepoint: Savepoint, manifests: Sequence[Manifest]) -> bool:
    """Whether a savepoint's log is not what `savepoint.json` says."""
    return sum(one.kind == "checkpoint" for one in manifests) != savepoint.records
