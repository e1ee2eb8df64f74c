"""A job in this process, without Spark: the driver's checks, and the real task of each subtask.

The task's context, its rows and the wire to the driver are replaced. What a start checks, the
coordinator, the commit log, the stores and the task itself are the real ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import LongType, StringType, StructField, StructType

from recovery.decide.live_lineages import live_lineages
from recovery.local.store_pool import StorePoolSettings
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.base_policy import BasePolicy
from snapshot.protocol.coordinator import Coordinator
from snapshot.protocol.running_job import RunningJob
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import open_store
from statebackend import system
from statebackend.api.processors import BroadcastProcessor, KeyedProcessor
from statebackend.key_hashing import key_groups
from statebackend.keygroups import key_group_range, subtask_of
from statebackend.operators.declared_states import Declarations
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.processor_calls import record_keyed_states
from statebackend.operators.stateful_processor_calls import record_states
from statebackend.rocks.store import RocksSettings
from statebackend.rpc.session_endpoint import Endpoint
from statebackend.runtime.driver.operator_specs import Operator, operator_specs
from statebackend.runtime.driver.session import RunSession
from statebackend.runtime.time_plan import TimePlan
from statebackend.runtime.worker.shipped_constants import pack
from statebackend.runtime.worker.task_spec import JobPlace, TaskSpec
from statebackend.settings import Settings
from statebackend.spark.worker import task as task_module
from statebackend.spark.worker.batch_context import EpochContext
from statebackend.spark.worker.epoch_input import CONTROL_COLUMNS, NONCE_BITS
from statebackend.spark.worker.task import SubtaskTask

__all__ = ["InProcessJob"]

UID, MAX_PARALLELISM = "op", 128
STAMP_MS = 1_700_000_000_000  # of epoch 0; a second more for each
INPUT = StructType([StructField("k", LongType()), StructField("v", LongType())])
OUTPUT = StructType([StructField("k", LongType()), StructField("seen", StringType())])
RULES = StructType([StructField("word", StringType()), StructField("cents", LongType())])
_DATA = [pa.field("k", pa.int64()), pa.field("v", pa.int64())]
_RULES = [
    pa.field("word", pa.string()),
    pa.field("cents", pa.int64()),
    pa.field("number", pa.int64()),
]
_CONTROL = [
    pa.field(CONTROL_COLUMNS[0], pa.int32()),
    pa.field(CONTROL_COLUMNS[1], pa.int32()),
    pa.field(CONTROL_COLUMNS[2], pa.int64()),
]


class InProcessJob:
    """A job whose input has a key `k` and a value `v`, both bigint; rules are a word and cents.

    Args:
        folder: the job's log and data lie in its `store`; local copies in its `local`.
        name: of the job. time_mode: none or processing. overrides: settings by name.
    """

    def __init__(
        self, folder: Path, *, name: str = "job", time_mode: str = "none", **overrides: Any
    ) -> None:
        self.name = name
        self._settings = Settings.resolve(overrides, lambda key: None)
        self._uri, self._local = f"file://{folder}/store", folder / "local"
        self._time = TimePlan(time_mode)
        self.epoch = 0

    def start(
        self,
        processor: Any,
        *,
        allow_dropped_state: bool = False,
        parallelism: int = 1,
        **overrides: Any,
    ) -> None:
        """What starting a query does: check the states, claim the log, run a coordinator.

        Args:
            overrides: settings by name, from here on.

        Raises:
            StateMismatchError: the processor's states do not go on from the checkpoint's.
        """
        self._settings = dataclasses.replace(self._settings, **overrides)
        self._parallelism = parallelism
        flavour, record = _flavour(processor)
        packed = pack(processor, uid=UID, limit_bytes=0)
        found = record(packed.rehearsal(), UID, time_mode=self._time.mode)
        store = open_store(self._uri, new_id=system.new_id, options=StoreOptions())
        log = CommitLog(store, job=self.name, writer="test", new_id=system.new_id)
        operator = Operator(
            uid=UID,
            parallelism=parallelism,
            max_parallelism=MAX_PARALLELISM,
            key_schema=StructType(INPUT.fields[:1]),
            states=found.declared,
            deleted=tuple(found.dropped),
            time=self._time,
        )
        manifests = log.manifests()
        lineages = live_lineages(manifests)
        self.specs = operator_specs(
            self.name,
            {UID: operator},
            {one.operator: one for one in manifests if one.operator in lineages},
            allow_dropped_state=allow_dropped_state,
            heartbeat=False,
        )
        tenure = log.claim(query_id="query", run=system.new_id())
        self._session = RunSession(store=store, log=log, gate_timeout_s=10.0)
        self._id, self.log = tenure.job_id, log
        self.epoch = lineages[UID].last_epoch + 1 if UID in lineages else 0
        coordinator = Coordinator(
            RunningJob(
                job=self.name,
                job_id=tenure.job_id,
                generation=tenure.generation,
                name="run",
                query_id="query",
                specs=self.specs,
                lineages=lineages,
                inline_budget_bytes=self._settings.inline_budget_bytes(parallelism),
            ),
            bases=BasePolicy(every_epochs=self._settings.base_every_epochs),
            retain_epochs=self._settings.retain_epochs,
            now_s=system.monotonic_s,
            new_id=system.new_id,
        )
        self._session.open(coordinator, tenure)
        plan = OperatorPlan(
            uid=UID,
            flavour=flavour,
            input_schema=INPUT,
            key_positions=(0,),
            output_schema=OUTPUT,
            states=found.declared,
            time_mode=self._time.mode,
        )
        self._with_rules = flavour == "broadcast"
        if self._with_rules:
            plan = dataclasses.replace(plan, rules_schema=RULES)
        token: Any = SimpleNamespace(value="")
        self._task = SubtaskTask(self._spec(plan), packed.ship(_no_broadcast), token)

    def _spec(self, plan: OperatorPlan) -> TaskSpec:
        settings = self._settings
        return TaskSpec(
            job=self.name,
            local_name=self.name,
            plan=plan,
            time=self._time,
            parallelism=self._parallelism,
            max_parallelism=MAX_PARALLELISM,
            uri=self._uri,
            local_dir=str(self._local),
            lease_timeout_s=settings.lease_timeout_s,
            begin_timeout_s=10.0,
            commit_timeout_s=settings.commit_timeout_s,
            input_budget_bytes=settings.input_budget_bytes,
            overlay_budget_bytes=settings.overlay_budget_bytes,
            base_bytes_per_s=settings.base_bytes_per_s,
            rocks=RocksSettings(settings.block_cache_bytes, settings.write_buffer_bytes),
            store_pool=StorePoolSettings(0, settings.idle_close_s),  # every store is closed at once
            store_options=StoreOptions(),
        )

    def run(
        self, rows: Iterable[tuple[int, int]], rules: Sequence[tuple[str, int]] = ()
    ) -> list[tuple[int, str]]:
        """One epoch, begin to durable: (key, value) rows and rules in, the output out."""
        context = EpochContext(
            epoch=self.epoch,
            query_id="query",
            attempt=self.epoch,
            endpoint=Endpoint(location="", session=f"{self._id}/run", token=""),
        )
        current = SimpleNamespace(current=lambda uid, token: context)
        place = JobPlace(
            job=self.name, local_name=self.name, uri=self._uri, local_dir=str(self._local)
        )
        out: list[pa.RecordBatch] = []
        with (
            mock.patch.object(task_module, "EpochContext", current),
            mock.patch.object(task_module, "job_place", return_value=place),
            mock.patch.object(task_module, "client_for", return_value=_Client(self._session)),
        ):
            given = list(rows)
            for subtask in range(self._parallelism):
                out += self._task(iter(self._batches(subtask, given, rules)))
        self.epoch += 1
        return [(row["k"], row["seen"]) for batch in out for row in batch.to_pylist()]

    def _batches(
        self, subtask: int, rows: list[tuple[int, int]], rules: Sequence[tuple[str, int]]
    ) -> list[pa.RecordBatch]:
        """A subtask's rows as Spark brings them: our control columns, the barrier last."""
        groups = key_groups([pa.array([key for key, _ in rows], pa.int64())], MAX_PARALLELISM)
        owners = subtask_of(groups, self._parallelism, MAX_PARALLELISM)
        own = [
            (key, value, group)
            for (key, value), group, owner in zip(rows, groups.tolist(), owners, strict=True)
            if owner == subtask
        ]
        between = [None] * len(_RULES) if self._with_rules else []
        stamp = (STAMP_MS + 1000 * self.epoch) << NONCE_BITS
        first = key_group_range(subtask, self._parallelism, MAX_PARALLELISM).start
        table = [(k, v, *between, group, subtask, None) for k, v, group in own]
        if rules:
            table += [
                (None, None, word, cents, number, first, subtask, None)
                for number, (word, cents) in enumerate(rules)
            ]
        table.append((None, None, *between, None, ~subtask, stamp))
        schema = pa.schema([*_DATA, *(_RULES if self._with_rules else []), *_CONTROL])
        batches = []
        for part in (table[:-1], table[-1:]):
            columns = [
                pa.array([row[at] for row in part], field.type) for at, field in enumerate(schema)
            ]
            batches.append(pa.RecordBatch.from_arrays(columns, schema=schema))
        return batches


def _flavour(processor: Any) -> tuple[str, Callable[..., Declarations]]:
    if isinstance(processor, StatefulProcessor):
        return "rows", record_states
    if isinstance(processor, KeyedProcessor):
        return "keyed", record_keyed_states
    if isinstance(processor, BroadcastProcessor):
        return "broadcast", record_keyed_states
    from statebackend.operators.arrow_calls import record_arrow_states  # not in older trees

    return "arrow", record_arrow_states


class _Client:
    """The door to the driver, without a wire."""

    def __init__(self, session: RunSession) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        answer = getattr(self._session, name)
        return lambda endpoint, request, *, timeout_s: answer(request)


def _no_broadcast(value: Any) -> Any:
    raise AssertionError("nothing is large enough")
