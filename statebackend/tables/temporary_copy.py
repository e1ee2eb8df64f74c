"""A subtask's state in a folder of its own for as long as it is read, restored as a worker does."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from recovery.decide.restore_plan import plan_restore
from recovery.local.local_copies import LocalSubtask
from recovery.local.store_pool import Clock
from recovery.restore.restorer import Restorer, Site
from snapshot.protocol.lineage import SubtaskLineage
from snapshot.protocol.messages import AncestorCopy, BeginReply, LocalCopy, RestoreStep
from statebackend.rocks.store import RocksSettings
from statebackend.runtime.driver.begin_replies import plan_steps
from statebackend.runtime.driver.restore_records import DamagedSliceError
from statebackend.system import SYSTEM, System
from statebackend.tables.stored_job import StoredJob, StoredOperator

__all__ = ["READ_SETTINGS", "fetch_subtask"]

READ_SETTINGS: Final = RocksSettings(read_once=True)
_RESTORE_SETTINGS: Final = RocksSettings()  # with merges: many files of level 0 hold up writes


def fetch_subtask(
    job: StoredJob, operator: StoredOperator, subtask: int, folder: Path, system: System = SYSTEM
) -> Path:
    """Bring a subtask's state after the job's epoch into a folder; where its store is there.

    Args:
        subtask: at the parallelism that the operator had in that epoch.
        folder: local, with room for the state.

    Raises:
        CorruptionError: a slice is damaged or gone, and nothing else leads to the epoch.
        NotRestorableError: the log does not hold what leads to it.
        LocalDirError: the folder cannot be written.
        StoreUnreachableError: from the store.
    """
    lineage = operator.lineage.subtasks[subtask]
    avoid: set[str] = set()

    def ask(
        copy: LocalCopy, ancestors: list[AncestorCopy] | None
    ) -> tuple[BeginReply, list[bytes]]:
        avoid.update(copy.damaged)
        while True:
            plan = plan_restore(
                LocalCopy(),
                lineage,
                job_id=job.job_id,
                epoch=job.epoch,
                avoid=avoid,
                ancestors={},
            )
            try:
                steps, bodies = plan_steps(operator.placed(plan), job.records)
            except DamagedSliceError as damaged:
                avoid.add(damaged.ref.key)
                continue
            return _reply(job, lineage, steps), bodies

    local = LocalSubtask(
        str(folder),
        job=job.job,
        operator=operator.uid,
        key_groups=lineage.key_groups,
        new_id=system.new_id,
        clock=Clock.of(system),
    )
    opened = Restorer(
        local,
        Site(operator.uid, subtask, "reader", "reader"),
        ask=ask,
        store=job.store,
        now_s=system.monotonic_s,
        lease_timeout_s=0.0,
        settings=_RESTORE_SETTINGS,
        threads=system.threads,
    ).open()
    opened.directory.release()
    return opened.directory.path / "db"


def _reply(job: StoredJob, lineage: SubtaskLineage, steps: list[RestoreStep]) -> BeginReply:
    """What a coordinator would answer to a subtask that has nothing."""
    chain = lineage.chain_at(job.epoch) or ""
    return BeginReply(
        job_id=job.job_id,
        generation=0,
        base_epoch=job.epoch,
        durable_epoch=job.epoch,
        durable_chain=chain,
        chain=chain,
        key_group_start=lineage.key_groups.start,
        key_group_end=lineage.key_groups.end,
        fresh=True,
        reason="it is read",
        steps=steps,
        states={},
        inline_budget_bytes=0,
        restoring=False,
        base_due=False,
    )
