"""Making a savepoint: beside a running job, or of one that has stopped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Final

from recovery.savepoints.between_modes import CONTINUOUS, is_continuous, overtaken_in
from recovery.savepoints.location_at_epoch import files_of
from recovery.savepoints.location_copy import copy_location_files
from recovery.savepoints.location_files import Batches, LocationFiles, batches_of, query_id_of
from recovery.savepoints.other_location import refuse_other_query
from recovery.savepoints.savepoint import Begun, Savepoint, SavepointFile, SavepointOperator
from recovery.savepoints.savepoint_folder import SavepointFolder
from recovery.savepoints.state_at_epoch import Needed, StateAt, last_epochs, state_at
from recovery.savepoints.state_copy import Copied, copy_state, scratch_folder
from snapshot.formats.record import Manifest, parse_record, record_name
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.operators import operators_setting
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import (
    NotRestorableError,
    ObjectNotFoundError,
    SettingError,
    StateBackendError,
    StoreCapabilityError,
)
from statebackend.threads import THREADS, Threads
from statebackend.work_done import Progress

__all__ = ["Making", "complete_epoch", "create_savepoint", "epoch_to_save"]

_ATTEMPTS: Final = 3


def epoch_to_save(manifests: list[Manifest], batches: Batches) -> int:
    """The newest epoch whose state is durable in every operator and which Spark has committed.

    Args:
        manifests: of the log; read before `batches`, so that Spark is never behind them by more
            than the batch that runs.

    Raises:
        NotRestorableError: there is none.
    """
    epochs = last_epochs(manifests)
    if not epochs or min(epochs.values()) < 0:
        raise NotRestorableError(
            "There is nothing to save yet: the job has no batch that is durable in every operator.",
            todo="Check the URI and the job's name (statebackend list shows what is there), or let "
            "the query finish a batch first.",
        )
    if batches.last_commit < 0:
        raise NotRestorableError(
            "There is nothing to save yet: no batch is committed in the checkpoint location.",
            todo="Check which location was given, or let the query finish a batch first.",
        )
    epoch = min([batches.last_commit, *epochs.values()])
    return epoch


def complete_epoch(manifests: list[Manifest]) -> int:
    """The newest complete checkpoint of a continuous job: all its vertices have their records.

    Raises:
        NotRestorableError: there is none.
        SettingError: it is a streaming query's job.
    """
    epochs = last_epochs(manifests)
    epoch = min(epochs.values(), default=-1)
    if epoch >= 0 and not is_continuous(manifests):
        raise SettingError(
            "The job is a streaming query's: where its sources stand is in Spark's checkpoint "
            "location.",
            todo="Say where that is (--checkpoint-location).",
        )
    if epoch < 0:
        raise NotRestorableError(
            "There is nothing to save yet: no checkpoint of the job is complete.",
            todo="Let the job complete one first.",
        )
    return epoch


@dataclass(frozen=True, kw_only=True)
class Making:
    """What making a savepoint takes.

    Attributes:
        store: the job's folder. job: its name.
        location: the query's checkpoint location; None: it is a continuous job.
        epoch: of a continuous job: the checkpoint, complete in ``manifests``; None: the newest.
        uncommitted: see `Savepoint`.
        manifests: reads the job's log as it is now.
        open_target: the folder that a savepoint of this id goes to.
        new_id, now_ms, writer: ids, the clock, and who this is, for people.
        tick: told the bytes of every object that was copied; what it raises ends it.
        progress: told the bytes of objects that were copied, and of all that are.
        cleaning: entered while what was copied in vain is removed.
    """

    store: ObjectStore
    job: str
    location: LocationFiles | None
    manifests: Callable[[], list[Manifest]]
    open_target: Callable[[str], ObjectStore]
    new_id: Callable[[], str]
    now_ms: Callable[[], int]
    writer: str
    tick: Callable[[int], None] = lambda size_bytes: None
    progress: Progress | None = None
    cleaning: Callable[[], AbstractContextManager[None]] = nullcontext
    epoch: int | None = None
    uncommitted: bool = False
    threads: Threads = THREADS


def create_savepoint(making: Making) -> Savepoint:
    """Copy the newest epoch that is whole into a folder of its own.

    Nothing is changed of the job. Where the job is cleaned meanwhile by somebody else, what was
    copied goes and it is tried again with what is newest then.

    Raises:
        NotRestorableError: there is no epoch to save.
        UnsupportedQueryError: Spark keeps state of its own.
        SettingError: the folder is not empty; or the job is of another kind.
        CorruptionError: something that is needed is damaged; there is no savepoint then.
    """
    for attempt in range(_ATTEMPTS):
        manifests = making.manifests()  # before the location, see epoch_to_save()
        epoch = _epoch(making, manifests)
        if _newest_of(making.manifests(), epoch) != _newest_of(manifests, epoch):
            # Evaluated once more between the two looks: Spark may have committed that one.
            if attempt == _ATTEMPTS - 1:
                raise NotRestorableError(
                    f"Epoch {epoch} was evaluated again each time when it was to be saved.",
                    todo="Try again once the query has finished another batch.",
                )
            continue
        state = state_at(manifests, epoch)
        if making.location is None:
            _refuse_unaligned(making, state)
        names = files_of(making.location, epoch) if making.location is not None else []
        found = f"{epoch:010d}-{making.new_id()[-12:]}"
        begun = Begun(
            id=found, job=making.job, job_uri=making.store.uri, created_ms=making.now_ms()
        )
        folder = SavepointFolder(making.open_target(found), begun)
        try:
            return _made(making, state, names, folder)
        except StateBackendError as error:
            with suppress(StateBackendError), making.cleaning():
                folder.leave()
            if not isinstance(error, ObjectNotFoundError) or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError


def _epoch(making: Making, manifests: list[Manifest]) -> int:
    if making.epoch is not None:
        return making.epoch
    if making.location is None:
        return complete_epoch(manifests)
    if is_continuous(manifests):
        raise SettingError(
            f"Job {making.job!r} is a continuous one: it has no checkpoint location of Spark's.",
            todo="Leave it out (--checkpoint-location).",
        )
    batches = batches_of(making.location)
    epoch = epoch_to_save(manifests, batches)
    refuse_other_query(manifests, making.job, making.location, batches)
    return epoch


def _refuse_unaligned(making: Making, state: StateAt) -> None:
    """Rows in flight belong to channels, which are those of one job at one parallelism."""

    def read(one: Needed) -> bytes:
        if one.entry.object is not None:
            return making.store.get(one.entry.object)
        name = record_name(one.sequence)
        return parse_record(making.store.get(name), name).slice(one.entry)

    found = overtaken_in(state, read)
    if found:
        raise NotRestorableError(
            f"The last checkpoint of job {making.job!r} is unaligned: it holds rows in flight at "
            f"{', '.join(map(repr, found))}, which a savepoint cannot hold.",
            todo="Start the job once more, and end it with query.stop_with_savepoint().",
        )


def _newest_of(manifests: list[Manifest], epoch: int) -> dict[str, int]:
    """By operator, the sequence of the last record that says something of an epoch."""
    return {m.operator: m.sequence for m in manifests if m.epoch == epoch}


def _made(making: Making, state: StateAt, names: list[str], folder: SavepointFolder) -> Savepoint:
    target, begun = folder.store, folder.begun
    tip = state.records[-1].manifest
    query_id = CONTINUOUS if making.location is None else query_id_of(making.location)
    log = CommitLog(
        target,
        job=making.job,
        writer=making.writer,
        new_id=making.new_id,
        threads=making.threads,
    )
    firsts = {uid: one.first_epoch for uid, one in state.lineages.items()}
    try:
        tenure = log.claim(
            job_id=tip.job_id,
            query_id=query_id,
            run=begun.id,
            stamp_ms=begun.created_ms,
            settings=state.settings or operators_setting(firsts),
        )
    except StoreCapabilityError:  # its own claim is not listed
        folder.check()
        raise
    with scratch_folder() as scratch:
        copied = copy_state(
            state,
            making.store,
            target,
            log=log,
            tenure=tenure,
            query_id=query_id,
            run=begun.id,
            new_id=making.new_id,
            scratch=scratch,
            tick=making.tick,
            progress=making.progress,
            threads=making.threads,
        )
        files = []
        if making.location is not None:
            files = copy_location_files(
                making.location,
                ["metadata", *names],
                target,
                scratch=scratch,
                threads=making.threads,
                tick=making.tick,
            )
    savepoint = _described(making, state, copied, files, begun, query_id, target)
    folder.finish(savepoint)
    return savepoint


def _described(
    making: Making,
    state: StateAt,
    copied: Copied,
    files: list[SavepointFile],
    begun: Begun,
    query_id: str,
    target: ObjectStore,
) -> Savepoint:
    operators = []
    for uid, lineage in sorted(state.lineages.items()):
        operators.append(
            SavepointOperator(
                uid=uid,
                parallelism=lineage.parallelism,
                max_parallelism=lineage.max_parallelism,
                first_epoch=lineage.first_epoch,
                epoch=state.epoch,
                size_bytes=copied.size_bytes.get(uid, 0),
            )
        )
    tip = state.records[-1].manifest
    last = [found for uid in state.lineages if (found := state.last(uid)) is not None]
    marks = [one.watermark_ms for one in last if one.watermark_ms is not None]
    return Savepoint(
        id=begun.id,
        uri=target.uri,
        job=making.job,
        job_id=tip.job_id,
        job_uri=making.store.uri,
        query_id=query_id,
        location=making.location.path if making.location is not None else "",
        continuous=making.location is None,
        uncommitted=making.uncommitted,
        epoch=state.epoch,
        stamp_ms=max((one.stamp_ms for one in last), default=-1),
        watermark_ms=max(marks, default=None),
        created_ms=begun.created_ms,
        operators=operators,
        records=len(state.records),
        objects=copied.objects,
        size_bytes=sum(copied.size_bytes.values()),
        spark=files,
    )
