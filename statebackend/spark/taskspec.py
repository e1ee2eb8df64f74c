"""What a task is told of its operator: plain data in Spark's closure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from recovery.keeper import KeeperSettings
from snapshot.storage.options import StoreOptions
from statebackend.rocks.store import RocksSettings
from statebackend.spark.tws import StateDeclaration

if TYPE_CHECKING:  # the driver's: no worker need import them
    from statebackend.settings import Settings
    from statebackend.spark.job import Job
    from statebackend.spark.launch import Operator

__all__ = ["TaskSpec", "task_spec"]


@dataclass(frozen=True)
class TaskSpec:
    """An operator as a task needs it. Ships in Spark's closure: no secrets, no addresses."""

    job: str
    local_name: str
    uid: str
    parallelism: int
    max_parallelism: int
    input_schema: StructType
    key_positions: tuple[int, ...]
    output_schema: StructType
    states: dict[str, StateDeclaration]
    uri: str
    local_dir: str
    lease_timeout_s: float
    begin_timeout_s: float
    commit_timeout_s: float
    input_budget_bytes: int
    overlay_budget_bytes: int
    base_bytes_per_s: int
    rocks: RocksSettings
    keeper: KeeperSettings
    store_options: StoreOptions


def task_spec(
    operator: Operator,
    job: Job,
    settings: Settings,
    *,
    local_dir: str,
    input_schema: StructType,
    key_positions: tuple[int, ...],
    output_schema: StructType,
    keep_stores: bool,
) -> TaskSpec:
    """An operator, its job and the settings, as its tasks need them."""
    return TaskSpec(
        job=job.name,
        local_name=job.local_name,
        uid=operator.uid,
        parallelism=operator.parallelism,
        max_parallelism=operator.max_parallelism,
        input_schema=input_schema,
        key_positions=key_positions,
        output_schema=output_schema,
        states=operator.states,
        uri=job.store_uri,
        local_dir=local_dir,
        lease_timeout_s=settings.lease_timeout_s,
        begin_timeout_s=settings.start_timeout_s + 30.0,
        # The coordinator's own verdict comes first.
        commit_timeout_s=settings.commit_timeout_s + 3 * settings.s3_deadline_s + 30.0,
        input_budget_bytes=settings.input_budget_bytes,
        overlay_budget_bytes=settings.overlay_budget_bytes,
        base_bytes_per_s=settings.base_bytes_per_s,
        keeper=KeeperSettings(
            open_limit=settings.open_stores if keep_stores else 0,
            idle_close_s=settings.idle_close_s,
        ),
        store_options=job.options,
        rocks=RocksSettings(
            block_cache_bytes=settings.block_cache_bytes,
            write_buffer_bytes=settings.write_buffer_bytes,
        ),
    )
