"""Between a worker and its store: where copies lie, who opens them, how bases leave."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Final

from recovery.local.local_copies import LocalSubtask, StoreDirectory
from recovery.local.store_pool import Clock, StorePool
from recovery.local.workspace import Workspace
from recovery.restore.restorer import OpenSubtask, Restorer
from snapshot.formats.delta_in_pieces import EncodedDelta
from snapshot.protocol.messages import BaseGrant, BeginReply
from snapshot.storage.counting_store import CountingStore
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import open_store
from statebackend.errors import LocalCopyError, LocalDirError
from statebackend.keygroups import key_group_range
from statebackend.rocks.parted import Store
from statebackend.runtime.worker.background_upload import BaseUpload
from statebackend.runtime.worker.lookup_answers import OPEN_STORES, answer_lookups
from statebackend.runtime.worker.participant import EpochStamp, Participant, RemoteSession
from statebackend.runtime.worker.task_spec import TaskSpec
from statebackend.runtime.worker.upload_reporter import UploadReporter
from statebackend.system import SYSTEM, expanded
from statebackend.threads import Semaphore

__all__ = ["SubtaskStore", "durable_store", "local_subtask", "store_pool_of"]

_log = logging.getLogger("statebackend.task")
_stores: dict[tuple[int, str, StoreOptions], ObjectStore] = {}
_turn: Final = SYSTEM.threads.semaphore(1)  # a worker uploads one base at a time


def durable_store(uri: str, options: StoreOptions) -> ObjectStore:
    """This process's connection to an object store."""
    key = (os.getpid(), uri, options)
    store = _stores.get(key)
    if store is None:
        # A driver has written its claim to it.
        store = _stores[key] = open_store(uri, new_id=SYSTEM.new_id, options=options, there=True)
    return store


def store_pool_of(spec: TaskSpec, work: Workspace) -> StorePool:
    """This process's store pool."""
    return StorePool.of_process(Clock.of(SYSTEM), spec.store_pool, work.path)


def local_subtask(spec: TaskSpec, subtask: int, work: Workspace) -> LocalSubtask:
    """A subtask's copies on this host, by way of this process's store pool."""
    return LocalSubtask(
        expanded(spec.local_dir),
        job=spec.local_name,
        operator=spec.uid,
        key_groups=key_group_range(subtask, spec.parallelism, spec.max_parallelism),
        new_id=SYSTEM.new_id,
        clock=Clock.of(SYSTEM),
        store_pool=store_pool_of(spec, work),
        store_pool_settings=spec.store_pool,
    )


class SubtaskStore:
    """A keyed subtask's store on this host: restored, let go, uploaded as a base where granted.

    Args:
        copies: finds the subtask's copies on this host.
        turn: of its process, which uploads one base at a time.

    Attributes:
        opened: from :meth:`open` until it is let go.
    """

    def __init__(
        self,
        spec: TaskSpec,
        participant: Participant,
        copies: Callable[[], LocalSubtask],
        turn: Semaphore = _turn,
    ) -> None:
        self.spec, self.participant = spec, participant
        self._copies, self._turn = copies, turn
        self.opened: OpenSubtask | None = None

    @property
    def held(self) -> StoreDirectory:
        """The directory of the open store."""
        assert self.opened is not None
        return self.opened.directory

    @property
    def store(self) -> Store:
        """The open store."""
        assert self.opened is not None
        return self.opened.store

    def open(self, at: EpochStamp) -> OpenSubtask:
        """Begin an epoch, and bring the store to the end of the one before, from the nearest copy.

        Raises:
            CorruptionError, LocalDirError, LocalCopyError: see `Restorer.open`.
            StateBackendError: the coordinator refused.
        """
        spec, participant = self.spec, self.participant
        self._local = self._copies()
        self.opened = Restorer(
            self._local,
            participant.site,
            ask=lambda copy, ancestors: participant.begin(at, copy, ancestors),
            store=participant.store,
            now_s=participant.system.monotonic_s,
            lease_timeout_s=spec.lease_timeout_s,
            settings=spec.rocks,
            threads=participant.system.threads,
        ).open()
        OPEN_STORES.note(self.participant.who.local_name, spec.uid, self.opened.directory)
        return self.opened

    def begun(self, reply: BeginReply) -> None:
        """Do what comes with a begin: sweep others' copies, upload a base in the background."""
        spec, handler = self.spec, self.participant.member.handler
        if reply.lookups and isinstance(handler, RemoteSession):
            answer_lookups(handler, self.participant.who)
        if reply.settled:
            run = self.participant.member.session
            self._local.sweep_others(spec.parallelism, spec.max_parallelism, run=run)
        if reply.grant is not None:
            self._upload(reply.grant, reply.generation).start()

    def _upload(self, grant: BaseGrant, generation: int) -> BaseUpload:
        """The upload of the store as it stands."""
        participant = self.participant
        counted = CountingStore(participant.durable)
        return BaseUpload(
            self.held,
            grant,
            store=counted,
            generation=generation,
            reporter=UploadReporter(participant, grant, counted),
            now_s=participant.system.monotonic_s,
            turn=self._turn,
            threads=participant.system.threads,
            bytes_per_s=self.spec.base_bytes_per_s,
            of=str(participant.who),
        )

    def keep(self, epoch: int, delta: EncodedDelta) -> bool:
        """Keep a delta beside the store, if the disk takes it; whether it did."""
        held, digest = self.held, delta.digest.hex()
        try:
            if delta.path is not None:
                held.adopt_delta(epoch, digest, delta.path)
            else:
                held.write_delta(epoch, digest, delta.data or b"")
        except LocalDirError as error:
            _log.warning("no local copy of epoch %d: %s", epoch, error)
            return False
        return True

    def figures(self, delta: EncodedDelta) -> dict[str, int]:
        """Counts of the store, for the ack of a delta that it will take in only later."""
        found = self.store.figures()
        rows = found["estimated_rows"] + delta.rows - 2 * delta.deletions
        return {**found, "estimated_rows": max(0, rows), "open_stores": OPEN_STORES.count()}

    def mark_bad(self, error: BaseException | None) -> None:
        """Keep anybody from taking the store again, if it is why something failed."""
        if isinstance(error, LocalCopyError):
            self.held.mark_bad(error.what)

    def release(self) -> None:
        """Close the store."""
        held, self.opened = self.held, None
        held.release()

    def give_back(self) -> None:
        """Keep the store open for the next attempt, as far as the process does that."""
        held, self.opened = self.held, None
        self._local.give_back(held)
