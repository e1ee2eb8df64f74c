"""A job in its store: a folder with a commit log and the objects that it names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Final

from blake3 import blake3

from recovery.decide.live_lineages import ResolvedOnce, live_lineages
from recovery.decide.start_batch import LogProgress
from recovery.inspect.job_list import refuse_savepoint
from recovery.savepoints.state_at_epoch import last_epochs
from snapshot.formats.record import Manifest
from snapshot.log.commit_log import CommitLog, RecordCache
from snapshot.log.figures_book import FiguresBook
from snapshot.log.stale_listings import check_listed
from snapshot.protocol.base_policy import BasePolicy
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.tenure import Patience, Tenure
from snapshot.storage.counting_store import CountingStore
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.store_probe import probe
from snapshot.storage.stores_by_uri import S3_SCHEMES, open_store
from snapshot.storage.uris import job_folder
from statebackend.errors import (
    FencedError,
    ObjectNotFoundError,
    SettingError,
    StateBackendError,
    StorageError,
)
from statebackend.runtime.worker.task_spec import JobPlace
from statebackend.settings import Settings
from statebackend.system import SYSTEM, System

__all__ = [
    "Job",
    "base_policy",
    "held_before",
    "overtaken",
    "store_options",
    "taken_from",
]

_READERS: Final = 8


def store_options(settings: Settings) -> StoreOptions:
    """What an object store must be told beyond its URI; no secrets."""
    return StoreOptions(
        endpoint_url=settings.s3_endpoint,
        region=settings.s3_region,
        sse=settings.s3_sse,
        kms_key_id=settings.s3_kms_key_id,
        role_arn=settings.s3_role_arn,
        ca_bundle=settings.s3_ca_bundle,
        deadline_s=settings.s3_deadline_s,
    )


def base_policy(settings: Settings) -> BasePolicy:
    """The settings that decide when subtasks write their full state."""
    return BasePolicy(
        every_epochs=settings.base_every_epochs,
        apart_every_epochs=settings.base_apart_every_epochs,
        apart_min_bytes=settings.base_apart_min_bytes,
        apart_ratio=settings.base_apart_ratio,
        lease_s=settings.base_lease_s,
    )


def held_before(log: CommitLog, tenure: Tenure, *, anew: bool = False) -> list[Manifest]:
    """What a job's log held when it was claimed.

    Args:
        anew: look who has claimed it by now, and not only until that claim had succeeded.

    Raises:
        FencedError: another driver has claimed it since: what it needs no more may be deleted.
        StoreCapabilityError: the listing does not show the claim.
    """
    manifests = log.manifests(None if anew else tenure.listed)
    check_listed(manifests[-1].sequence if manifests else -1, tenure.sequence)
    if manifests and manifests[-1].generation > tenure.generation:
        newer = manifests[-1]
        raise FencedError(
            f"The job {newer.job!r} was taken over by the writer {newer.writer!r} (generation "
            f"{newer.generation}) while this driver (generation {tenure.generation}) started.",
            todo="Stop this driver; it has committed nothing.",
        )
    return [manifest for manifest in manifests if manifest.sequence < tenure.sequence]


def overtaken(log: CommitLog, tenure: Tenure) -> FencedError | None:
    """What to say instead, where something is missing because another driver runs the job.

    Whoever was overtaken and does not know it yet finds that what he needs has been deleted.

    Returns:
        None: nobody has claimed it since, or that cannot be told.
    """
    with contextlib.suppress(StateBackendError, IndexError):
        newest = log.read(log.sequences()[-1])
        if newest.generation > tenure.generation:
            return _fenced_by(newest, tenure)
    return None


def taken_from(log: CommitLog, tenure: Tenure, own: Collection[str]) -> FencedError | None:
    """Whether a driver that claims its job anew, run after run, would take it back from another.

    A claim of its own that failed may have landed all the same: that is no other driver.

    Args:
        tenure: its last one. own: all of its runs, also of claims that failed.

    Raises:
        StateBackendError: the log does not read, so that cannot be told.
    """
    for sequence in reversed(log.sequences()):
        try:
            found = log.read(sequence)
        except ObjectNotFoundError:  # cleaned since it was listed; claims never are
            continue
        if found.generation <= tenure.generation:
            return None  # as all below: generations never fall
        if found.run not in own:
            return _fenced_by(found, tenure)
    return None


def _fenced_by(newer: Manifest, tenure: Tenure) -> FencedError:
    return FencedError(
        f"The job {newer.job!r} was taken over by the writer {newer.writer!r} "
        f"(generation {newer.generation}); this driver's generation is "
        f"{tenure.generation}, and what it needs may be deleted by now.",
        todo="Stop this driver.",
    )


class Job:
    """A named job under a URI; opened (and the store probed) when it is first asked for anything.

    Args:
        uri: the folder of all jobs. name: this one.
        options: what the store must be told. patience: how commits wait for it.
        system: what the driver stands on.
    """

    def __init__(
        self,
        uri: str,
        name: str,
        *,
        options: StoreOptions | None = None,
        patience: Patience | None = None,
        system: System = SYSTEM,
    ) -> None:
        if not isinstance(uri, str) or not uri:
            raise SettingError(f"The uri is {uri!r}.", todo="Give a file:/// or s3:// URI.")
        if uri.startswith("memory:"):
            raise SettingError(
                f"The uri {uri!r} is in one process's memory, which executors do not share.",
                todo="Give a file:/// or s3:// URI.",
            )
        if not isinstance(name, str):
            raise SettingError(f"The job's name is {name!r}.", todo="Give job= a name.")
        self.uri, self.name, self.system = uri, name, system
        self.store_uri = job_folder(uri, name)
        # Jobs of one name in two stores must not meet in a host's local directory.
        # By the URI as the store has it: /path and file:///path are one place.
        self.options = options or StoreOptions()
        # Refuses what cannot be a URI.
        store = open_store(self.store_uri, new_id=system.new_id, options=self.options)
        self.local_name = f"{name}-{blake3(store.uri.encode()).hexdigest()[:12]}"
        self._patience = patience
        self._store: CountingStore | None = None
        self._cache = RecordCache(system.threads)
        self.resolved = ResolvedOnce()  # for starts
        # What a new job begins with: the state of a savepoint.
        self.begins: Callable[[], dict[str, OperatorLineage]] = dict

    @property
    def store(self) -> CountingStore:
        """The job's folder.

        Raises:
            StoreUnreachableError, StoreCapabilityError: it cannot be used, and why.
            SettingError: it is a savepoint's folder. Nothing is written there.
        """
        if self._store is None:
            store = open_store(self.store_uri, new_id=self.system.new_id, options=self.options)
            counted = CountingStore(store)
            try:
                refuse_savepoint(counted)
                self.probe(counted)
            except StorageError as error:
                raise error.with_traceback(None) from None  # a user's mistake: the sentence has it
            self._store = counted
        return self._store

    @functools.cached_property
    def figures(self) -> FiguresBook:
        """Of its epochs, over all runs in this driver: for the records to come."""
        return FiguresBook(self.system.threads)

    def log(self, store: ObjectStore | None = None) -> CommitLog:
        """The job's commit log, to be read or claimed: one for each purpose.

        A driver's own must not be told what the log was like a moment ago.

        Args:
            store: the job's folder, where it is reached in another way.
        """
        return CommitLog(
            store or self.store,
            job=self.name,
            writer=self.system.process_name(),
            new_id=self.system.new_id,
            patience=self._patience,
            read_all=self._read_all,
            cache=self._cache,
            threads=self.system.threads,
        )

    def _read_all(self, read: Callable[[int], Manifest], wanted: Iterable[int]) -> list[Manifest]:
        """As ``map``, several at a time: a record is a round trip."""
        with self.system.threads.pool(_READERS, "statebackend-log") as pool:
            return list(pool.map(read, wanted))

    def open_at(self, uri: str) -> ObjectStore:
        """A place for savepoints; on S3 it is reached as the job's own store is."""
        on_s3 = uri.partition(":")[0] in S3_SCHEMES
        return open_store(uri, new_id=self.system.new_id, options=self.options if on_s3 else None)

    def probe(self, store: ObjectStore) -> None:
        """Find out whether a store does what is asked of it; see `snapshot.storage.store_probe`."""
        probe(store, new_id=self.system.new_id)

    def place(self, local_dir: str) -> JobPlace:
        """What its tasks are told of it."""
        return JobPlace(
            job=self.name,
            local_name=self.local_name,
            uri=self.store_uri,
            local_dir=local_dir,
            store_options=self.options,
        )

    def manifests(self) -> list[Manifest]:
        """What the log holds now."""
        return self.log().manifests()

    def lineages(self) -> dict[str, OperatorLineage]:
        """Every operator's lineage as the log has it now."""
        return live_lineages(self.manifests())

    def progress(self, manifests: list[Manifest]) -> LogProgress:
        """How far the log goes, for the decision at start."""
        ids = [m.query_id for m in manifests if m.query_id]
        lineages = self.resolved.of(manifests)
        return LogProgress(
            job=self.name,
            uri=self.uri,
            query_id=ids[-1] if ids else None,
            last_epochs=last_epochs(manifests, lineages),
            has_epochs=any(one.epochs for one in lineages.values()),
        )
