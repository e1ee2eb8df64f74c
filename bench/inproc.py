"""The product's own task without Spark: one subtask after the other in this process.

``SubtaskTask`` runs unmodified. What Spark would give it (the task's context, the rows) and the way
to the driver (Arrow Flight) are replaced; the session, the coordinator, the commit log and the
stores behind them are the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType

from bench.processor import Counter
from recovery.local.store_pool import StorePool, StorePoolSettings
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.base_policy import BasePolicy
from snapshot.protocol.coordinator import Coordinator
from snapshot.protocol.lineage import resolve
from snapshot.protocol.operators import OperatorSpec
from snapshot.protocol.running_job import RunningJob
from snapshot.storage.counting_store import CountingStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import open_store
from statebackend import system
from statebackend.key_hashing import key_groups
from statebackend.operators.declared_states import StateDeclaration
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.rocks.store import RocksSettings
from statebackend.rpc.session_endpoint import Endpoint
from statebackend.runtime.driver.session import RunSession
from statebackend.runtime.time_plan import NO_TIME
from statebackend.runtime.worker.shipped_constants import pack
from statebackend.runtime.worker.task_spec import TaskSpec
from statebackend.settings import Settings
from statebackend.spark.worker import task as task_module
from statebackend.spark.worker.batch_context import EpochContext
from statebackend.spark.worker.epoch_input import CONTROL_COLUMNS, NONCE_BITS
from statebackend.spark.worker.task import SubtaskTask

__all__ = ["INPUT", "MAX_PARALLELISM", "OUTPUT", "STATE", "Harness", "spark_batches"]

UID = "counter"
MAX_PARALLELISM = 128
_ARROW_ROWS = 10_000  # spark.sql.execution.arrow.maxRecordsPerBatch
INPUT = StructType([StructField("k", LongType()), StructField("v", LongType())])
OUTPUT = StructType([StructField("k", LongType()), StructField("n", LongType())])
STATE = StructType([StructField("n", LongType())])
_CONTROL = [
    pa.field(CONTROL_COLUMNS[0], pa.int32()),
    pa.field(CONTROL_COLUMNS[1], pa.int32()),
    pa.field(CONTROL_COLUMNS[2], pa.int64()),
]


def spark_batches(
    keys: np.ndarray | pa.Array,
    epoch: int,
    subtask: int = 0,
    *,
    values: np.ndarray | None = None,
) -> list[pa.RecordBatch]:
    """``keys`` as the operator gets them from Spark: our control columns, the barrier last."""
    if values is None:
        values = np.arange(len(keys), dtype=np.int64) + epoch
    column = keys if isinstance(keys, pa.Array) else pa.array(keys)
    data = [("k", column), ("v", pa.array(values))]
    schema = pa.schema([*(pa.field(name, of.type) for name, of in data), *_CONTROL])
    groups = key_groups([column], MAX_PARALLELISM).astype(np.int32)
    owner = np.full(len(keys), subtask, dtype=np.int32)
    stamps = pa.nulls(len(keys), _CONTROL[2].type)
    columns = [*(of for _, of in data), pa.array(groups), pa.array(owner), stamps]
    rows = pa.RecordBatch.from_arrays(columns, schema=schema)
    stamp = (1_700_000_000_000 + epoch * 1000) << NONCE_BITS
    barrier = [[None], [None], [None], [~subtask], [stamp]]
    last = pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(barrier, schema, strict=True)],
        schema=schema,
    )
    whole = pa.Table.from_batches([rows, last]).combine_chunks()
    return whole.to_batches(max_chunksize=_ARROW_ROWS)


def _no_broadcast(value: Any) -> Any:
    raise AssertionError("nothing is large enough")


class _Client:
    """The door to the driver, without a wire."""

    def __init__(self, session: RunSession) -> None:
        self._session = session

    def begin(self, endpoint: Any, request: Any, *, timeout_s: float) -> Any:
        return self._session.begin(request)

    def ack(self, endpoint: Any, request: Any, *, timeout_s: float) -> Any:
        return self._session.ack(request)

    def base_done(self, endpoint: Any, request: Any, *, timeout_s: float) -> Any:
        return self._session.base_done(request)

    def base_renewed(self, endpoint: Any, request: Any, *, timeout_s: float) -> Any:
        return self._session.base_renewed(request)


class Harness:
    """One job of one subtask, epoch by epoch.

    Args:
        folder: for the local copy, and for the store where there is no ``uri``.
        keys: how many keys there are; each epoch brings each once, in another order.
        processor: what runs over them. state: of its one value state, ``count``; or any other
            ``declared``.
        flavour, columns, output: of the operator; ``columns`` are its input.
        overrides: settings by name.
        uri, options: of the durable store.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keys: int,
        processor: Any = None,
        state: StructType = STATE,
        declared: StateDeclaration | None = None,
        flavour: str = "rows",
        columns: StructType = INPUT,
        output: StructType = OUTPUT,
        overrides: dict[str, Any] | None = None,
        uri: str = "",
        options: StoreOptions | None = None,
    ) -> None:
        self.settings = settings = Settings.resolve(overrides or {}, lambda key: None)
        uri = uri or f"file://{folder}/store"
        options = options or StoreOptions()
        self.driver_store = CountingStore(open_store(uri, new_id=system.new_id, options=options))
        self.declared = declared or StateDeclaration(
            name="count", kind="value", value_schema=state.json()
        )
        self.spec = TaskSpec(
            job="bench",
            local_name="bench",
            plan=OperatorPlan(
                uid=UID,
                flavour=flavour,
                input_schema=columns,
                key_positions=(0,),
                output_schema=output,
                states={self.declared.name: self.declared},
            ),
            time=NO_TIME,
            parallelism=1,
            max_parallelism=MAX_PARALLELISM,
            uri=uri,
            local_dir=str(folder / "local"),
            lease_timeout_s=settings.lease_timeout_s,
            begin_timeout_s=10.0,
            commit_timeout_s=settings.commit_timeout_s,
            input_budget_bytes=settings.input_budget_bytes,
            overlay_budget_bytes=settings.overlay_budget_bytes,
            base_bytes_per_s=settings.base_bytes_per_s,
            rocks=RocksSettings(
                settings.block_cache_bytes,
                settings.write_buffer_bytes,
                for_maps=self.declared.kind == "map",
                whole_filters=self.declared.kind == "map",
            ),
            store_pool=StorePoolSettings(settings.open_stores, settings.idle_close_s),
            store_options=options,
        )
        token: Any = SimpleNamespace(value="")
        shipped = pack(processor or Counter(), uid=UID, limit_bytes=0).ship(_no_broadcast)
        self.task = SubtaskTask(self.spec, shipped, token)
        self.epoch = 0
        self._keys = np.arange(keys, dtype=np.int64)
        self._random = np.random.default_rng(7)
        self.restart()

    def restart(self) -> None:
        """A driver takes over: claim, resolve, a new coordinator."""
        settings = self.settings
        self.log = CommitLog(self.driver_store, job="bench", writer="bench", new_id=system.new_id)
        tenure = self.log.claim()
        self.session = RunSession(
            store=self.driver_store,
            log=self.log,
            gate_timeout_s=10.0,
            whole_limit_bytes=settings.base_whole_limit_bytes,
            clean_every_epochs=settings.clean_every_epochs,
            clean_min_age_s=settings.clean_min_age_s,
        )
        operator = OperatorSpec(
            uid=UID,
            parallelism=1,
            max_parallelism=MAX_PARALLELISM,
            states={self.declared.name: 1},
            schemas={
                "": StructType(self.spec.plan.input_schema.fields[:1]).json(),
                self.declared.name: self.declared.to_json(),
            },
        )
        self.coordinator = Coordinator(
            RunningJob(
                job="bench",
                job_id=tenure.job_id,
                generation=tenure.generation,
                name="run",
                query_id="query",
                specs={UID: operator},
                lineages=resolve(self.log.manifests(tenure.listed)),
                inline_budget_bytes=settings.inline_budget_bytes(1),
            ),
            bases=BasePolicy(
                every_epochs=settings.base_every_epochs,
                apart_every_epochs=settings.base_apart_every_epochs,
                apart_min_bytes=settings.base_apart_min_bytes,
                apart_ratio=settings.base_apart_ratio,
                lease_s=settings.base_lease_s,
            ),
            now_s=system.monotonic_s,
            new_id=system.new_id,
        )
        self.session.open(self.coordinator, tenure)
        self.job_id = tenure.job_id

    def close(self) -> None:
        """Let the stores go that this process keeps open."""
        self.session.drain(60.0)
        known = StorePool._instance
        if known is not None:
            known[1].close()

    def rows(self) -> list[pa.RecordBatch]:
        """The next epoch's input."""
        self._random.shuffle(self._keys)
        return spark_batches(self._keys.copy(), self.epoch)

    def run(self, batches: list[pa.RecordBatch], *, take: Any = None) -> int:
        """One epoch, begin to ack; how many rows came out. ``take`` is called with each batch."""
        context = EpochContext(
            epoch=self.epoch,
            query_id="query",
            attempt=self.epoch,
            endpoint=Endpoint(location="", session=f"{self.job_id}/run", token=""),
        )
        client = _Client(self.session)
        with mock.patch.object(task_module, "client_for", return_value=client):
            out = 0
            for batch in self._through(context, iter(batches)):
                out += batch.num_rows
                if take is not None:
                    take(batch)
        self.epoch += 1
        return out

    def _through(
        self, context: EpochContext, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        yield from self.task.attempt(context, batches)

    def timings_ms(self) -> dict[str, float]:
        """The phases of the last epoch, as the task told the driver."""
        return dict(self.session.progress.summary(None).subtasks[-1].timings_ms)
