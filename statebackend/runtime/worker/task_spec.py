"""What a task is told of its operator: plain data in Spark's closure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from recovery.local.store_pool import StorePoolSettings
from snapshot.storage.store_options import StoreOptions
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.rocks.store import RocksSettings
from statebackend.runtime.time_plan import TimePlan
from statebackend.runtime.worker.participant import JobSubtask

if TYPE_CHECKING:  # the driver's: no worker need import them
    from statebackend.runtime.driver.operator_specs import Operator
    from statebackend.runtime.driver.worker_memory import WorkerMemory
    from statebackend.settings import Settings

__all__ = ["NO_JOB", "JobPlace", "TaskSpec", "task_spec"]


class JobPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which job a task works for, and where that keeps its state: no secrets, no addresses.

    Attributes:
        local_name: of its folder on each host. uri: of its folder in the object store.
        local_dir: where hosts have their folders; may name environment variables.
    """

    job: str
    local_name: str
    uri: str
    local_dir: str
    store_options: StoreOptions = StoreOptions()


NO_JOB = JobPlace(job="", local_name="", uri="", local_dir="")
"""Of a frame: the job that it works for is known when its query starts."""


@dataclass(frozen=True)
class TaskSpec:
    """An operator as a task needs it. Ships in Spark's closure: no secrets, no addresses.

    In the closure of a micro-batch query it has no job: its tasks read that off their query.
    """

    job: str
    local_name: str
    plan: OperatorPlan
    time: TimePlan
    parallelism: int
    max_parallelism: int
    uri: str
    local_dir: str
    lease_timeout_s: float
    begin_timeout_s: float
    commit_timeout_s: float
    input_budget_bytes: int
    overlay_budget_bytes: int
    base_bytes_per_s: int
    rocks: RocksSettings
    store_pool: StorePoolSettings
    store_options: StoreOptions
    quick_frames: bool = False
    follow_stores_bytes: int = 0  # see statebackend.spark.worker.worker_delegation
    packed: bool = False  # rows come as payloads (see statebackend.operators.input.packing)

    @property
    def uid(self) -> str:
        """The operator."""
        return self.plan.uid

    def at(self, place: JobPlace) -> TaskSpec:
        """The same operator, of a job."""
        return replace(
            self,
            job=place.job,
            local_name=place.local_name,
            uri=place.uri,
            local_dir=place.local_dir,
            store_options=place.store_options,
        )

    def subtask(self, number: int) -> JobSubtask:
        """One subtask of it."""
        return JobSubtask(self.job, self.local_name, self.uid, number, self.parallelism)


def task_spec(
    operator: Operator,
    plan: OperatorPlan,
    place: JobPlace,
    settings: Settings,
    *,
    keep_stores: bool,
    may_follow: bool,
    packed: bool,
    stays_open: bool,
    memory: WorkerMemory,
) -> TaskSpec:
    """An operator, its job's place and the settings, as its tasks need them.

    Args:
        keep_stores: whether workers live longer than a task. may_follow: whether an epoch may run
            in another worker than the one that has the task (see
            statebackend.spark.worker.worker_delegation).
        stays_open: a store is open for a whole run. memory: of a worker.
    """
    for_maps = any(state.kind == "map" for state in operator.states.values())
    return TaskSpec(
        job=place.job,
        local_name=place.local_name,
        plan=plan,
        time=operator.time,
        parallelism=operator.parallelism,
        max_parallelism=operator.max_parallelism,
        uri=place.uri,
        local_dir=place.local_dir,
        lease_timeout_s=settings.lease_timeout_s,
        begin_timeout_s=settings.start_timeout_s + 30.0,
        # The coordinator's own verdict comes first.
        commit_timeout_s=settings.commit_timeout_s + 3 * settings.s3_deadline_s + 30.0,
        input_budget_bytes=settings.input_budget_bytes,
        overlay_budget_bytes=settings.overlay_budget_bytes,
        base_bytes_per_s=settings.base_bytes_per_s,
        store_pool=StorePoolSettings(
            open_limit=settings.open_stores if keep_stores else 0,
            idle_close_s=settings.idle_close_s,
        ),
        store_options=place.store_options,
        quick_frames=bool(settings.quick_frames) and plan.flavour == "pandas",
        follow_stores_bytes=settings.follow_stores_bytes if keep_stores and may_follow else 0,
        packed=packed,
        rocks=RocksSettings(
            block_cache_bytes=settings.block_cache_bytes,
            write_buffer_bytes=settings.write_buffer_bytes,
            for_maps=for_maps,
            whole_filters=for_maps and not stays_open,
            workers=memory.workers,
            cache_max_bytes=memory.cache_max_bytes,
        ),
    )
