"""Between a worker and its store: where copies lie, who opens them, how bases leave."""

from __future__ import annotations

import os
from typing import Final

from recovery.local.local_copies import LocalSubtask, StoreDirectory
from recovery.local.store_pool import Clock, StorePool
from recovery.local.workspace import Workspace
from recovery.restore.restorer import Site
from recovery.restore.upload import BaseUpload
from snapshot.protocol.messages import BaseGrant
from snapshot.storage.counting import CountingStore
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.open import open_store
from snapshot.storage.store_options import StoreOptions
from statebackend.keygroups import key_group_range
from statebackend.rpc.service import Endpoint
from statebackend.runtime.worker.task_spec import TaskSpec
from statebackend.runtime.worker.upload_reporter import UploadClient, UploadReporter
from statebackend.system import SYSTEM, expanded

__all__ = ["base_upload", "durable_store", "local_subtask", "site_of", "store_pool_of"]

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


def site_of(spec: TaskSpec, subtask: int) -> Site:
    """A subtask in this process."""
    return Site(
        operator=spec.uid,
        subtask=subtask,
        host=SYSTEM.host_name(),
        executor=SYSTEM.executor_name(),
    )


def base_upload(
    spec: TaskSpec,
    subtask: int,
    held: StoreDirectory,
    grant: BaseGrant,
    *,
    client: UploadClient,
    endpoint: Endpoint,
    store: ObjectStore,
    generation: int,
) -> BaseUpload:
    """An upload of the store as it stands, to be started; see :class:`BaseUpload`.

    Args:
        store: the durable one.
    """
    counted = CountingStore(store)
    reporter = UploadReporter(
        client,
        endpoint,
        job=spec.job,
        operator=spec.uid,
        subtask=subtask,
        grant=grant,
        counted=counted,
        timeout_s=spec.begin_timeout_s,
    )
    return BaseUpload(
        held,
        grant,
        store=counted,
        generation=generation,
        reporter=reporter,
        now_s=SYSTEM.monotonic_s,
        turn=_turn,
        threads=SYSTEM.threads,
        bytes_per_s=spec.base_bytes_per_s,
        of=f"operator {spec.uid!r}, subtask {subtask}",
    )
