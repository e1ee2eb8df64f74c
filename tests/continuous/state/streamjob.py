"""A continuous job of one keyed vertex and one source, without threads and without Spark.

The driver's side is real: session, coordinator, commit log. What would be done in the background is
done at once, or whenever a seed says so.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from recovery.local.store_pool import StorePoolSettings
from recovery.local.workspace import Workspace
from snapshot.protocol.lineage import resolve
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.store_options import StoreOptions
from statebackend import system
from statebackend.continuous.driver.pending_acks import PendingAcks
from statebackend.continuous.worker.checkpointed_state import Frozen
from statebackend.continuous.worker.keyed_state import KeyedFrozen, SubtaskState
from statebackend.continuous.worker.list_state import PlainState
from statebackend.key_hashing import key_groups
from statebackend.keygroups import subtask_of
from statebackend.operators.declared_states import StateDeclaration
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.rocks.store import RocksSettings
from statebackend.runtime.time_plan import TimePlan
from statebackend.runtime.worker.participant import JobSubtask, Membership, Participant
from statebackend.runtime.worker.task_spec import TaskSpec
from statebackend.runtime.worker.worker_store import SubtaskStore, local_subtask
from statebackend.schema.ddl import parse_ddl
from tests.recovery.driver import JOB, Started, manifests_of, stamp_of

GROUPS = 16
KEYED, SOURCE = "op", "source"
INPUT = parse_ddl("k bigint, v bigint, t timestamp")
ARROW = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("t", pa.timestamp("us", tz="UTC"))])
POSITION = StateDeclaration(
    name="splits", kind="split", value_schema=parse_ddl("split bigint, position bigint").json()
)
_names = itertools.count()


class AtOnce:
    """Does background work on the spot."""

    def submit(self, fn: Callable[[], Any], /) -> Future[Any]:
        made: Future[Any] = Future()
        made.set_result(fn())
        return made


class Sometimes:
    """Does background work in its order, whenever a seed says so; at the latest when it must be."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.waiting: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[[], Any], /) -> Future[Any]:
        self.waiting.append(fn)
        return Future()

    def step(self) -> None:
        while self.waiting and self.random.random() < 0.5:
            self.waiting.pop(0)()


def plan_of(declared: dict[str, StateDeclaration], output: str, **more: Any) -> OperatorPlan:
    return OperatorPlan(
        uid=KEYED,
        flavour=more.pop("flavour", "keyed"),
        input_schema=more.pop("input_schema", INPUT),
        key_positions=more.pop("key_positions", (0,)),
        output_schema=parse_ddl(output),
        states=declared,
        **more,
    )


class StreamJob:
    """The job; a processor's factory, and what :func:`plan_of` made of its states."""

    def __init__(
        self,
        root: Path,
        plan: OperatorPlan,
        processor: Callable[[], Any],
        *,
        parallelism: int = 2,
        store: ObjectStore | None = None,
        background: Any = None,
        drops_late: bool = False,
        **options: Any,
    ) -> None:
        self.root, self.plan, self.processor = root, plan, processor
        self.parallelism = parallelism
        self.store = store or MemoryStore()
        self.background = background or AtOnce()
        self.drops_late = drops_late
        self.overlay_bytes = options.pop("overlay_bytes", 64 << 20)
        self.options = options
        self.name = f"stream-{next(_names)}-{system.new_id()}"
        self.attempt = 0
        self.host = "a"
        self.keyed: list[SubtaskState] = []
        self.sources: list[PlainState] = []

    # --- the driver ----------------------------------------------------------------------------

    def start(self, parallelism: int | None = None) -> int:
        """A run from the last complete epoch on: the first epoch of it."""
        self.parallelism = parallelism or self.parallelism
        known = resolve(manifests_of(self.store))
        wanted = {KEYED: self.parallelism, SOURCE: self.parallelism}
        last = min((known[uid].last_epoch if uid in known else -1) for uid in wanted)
        ids = {name: number for number, name in enumerate(self.plan.states, start=1)}
        timed = self.plan.time_mode
        self.started = Started(
            self.store,
            wanted,
            first_epoch=last + 1,
            specs={
                KEYED: {
                    "states": ids,
                    "schemas": {n: d.to_json() for n, d in self.plan.states.items()},
                    "time_mode": timed,
                    "watermark_delay_ms": 0 if timed == "event" else None,
                    "max_parallelism": GROUPS,
                },
                SOURCE: {"states": {"splits": 1}, "max_parallelism": GROUPS},
            },
            **self.options,
        )
        self.acks = PendingAcks(self.started.session, wanted)
        self.epoch = last + 1
        self._open()
        return self.epoch

    def stamp(self, epoch: int) -> int:
        return stamp_of(epoch)

    # --- the workers ---------------------------------------------------------------------------

    def spec(self) -> TaskSpec:
        return TaskSpec(
            job=JOB,
            local_name=self.name,
            plan=self.plan,
            time=TimePlan(
                self.plan.time_mode,
                event_position=2 if self.plan.time_mode == "event" else None,
                delay_ms=0 if self.plan.time_mode == "event" else None,
                drops_late=self.drops_late,
            ),
            parallelism=self.parallelism,
            max_parallelism=GROUPS,
            uri="",
            local_dir=str(self.root / self.host),
            lease_timeout_s=1.0,
            begin_timeout_s=10.0,
            commit_timeout_s=10.0,
            input_budget_bytes=64 << 20,
            overlay_budget_bytes=self.overlay_bytes,
            base_bytes_per_s=0,
            rocks=RocksSettings(block_cache_bytes=1 << 20, write_buffer_bytes=1 << 20),
            store_pool=StorePoolSettings(open_limit=4, unflushed_epochs=3),
            store_options=StoreOptions(),
        )

    def _open(self) -> None:
        spec = self.spec()
        member = Membership(self.started.session, "session", "query")
        work = Workspace.of_process(str(self.root / self.host), system.new_id)
        self.keyed, self.sources = [], []
        for subtask in range(self.parallelism):
            participant = Participant(spec.subtask(subtask), member, self.store)
            copies = functools.partial(local_subtask, spec, subtask, work)
            one = SubtaskState(SubtaskStore(spec, participant, copies), self.background, work=work)
            one.open(self.epoch, self.stamp(self.epoch))
            one.make_operator(self.processor())
            self.keyed.append(one)
            who = JobSubtask(JOB, self.name, SOURCE, subtask, self.parallelism)
            source = PlainState(
                Participant(who, member, self.store),
                self.background,
                declared={"splits": POSITION},
            )
            source.open(self.epoch, self.stamp(self.epoch))
            self.sources.append(source)

    def crash(self, *, keep_disk: bool = True) -> None:
        """All workers are gone; their host too, if its disk is not kept."""
        for one in (*self.keyed, *self.sources):
            one.close()
        if not keep_disk:
            self.host += "x"

    def process(self, rows: list[tuple[int, int, int]]) -> list[tuple[Any, ...]]:
        """Rows (key, value, milliseconds) by way of their subtasks: the output, in any order."""
        out: list[tuple[Any, ...]] = []
        owners = self._owners([row[0] for row in rows])
        for subtask, one in enumerate(self.keyed):
            own = [row for row, owner in zip(rows, owners, strict=True) if owner == subtask]
            if own:
                out += taken(one.operator.process(batch_of(own)))
        return out

    def _owners(self, keys: list[int]) -> list[int]:
        groups = key_groups([pa.array(keys, pa.int64())], GROUPS)
        owners: list[int] = subtask_of(groups, self.parallelism, GROUPS).tolist()
        return owners

    def move(self, **times: int) -> list[tuple[Any, ...]]:
        """Time goes on in all subtasks, and timers fire."""
        out = []
        for one in self.keyed:
            vars(one.times).update(times)
            out += taken(one.operator.fire())
        return out

    # --- checkpoints ---------------------------------------------------------------------------

    def freeze(self) -> tuple[list[KeyedFrozen], list[Frozen]]:
        """The barrier is in every subtask."""
        self.attempt += 1
        sources = [one.freeze(self.attempt) for one in self.sources]
        return [one.freeze(self.attempt) for one in self.keyed], sources

    def persist(self, frozen: tuple[list[KeyedFrozen], list[Frozen]], count: int = 99) -> bool:
        """The first ``count`` subtasks ack; whether that was all."""
        whole = False
        pairs = zip((*self.keyed, *self.sources), (*frozen[0], *frozen[1]), strict=True)
        for one, what in list(pairs)[:count]:
            ack = one.persist(what)
            if ack is None:  # aborted meanwhile
                return False
            whole = self.acks.take(ack)
        return whole

    def complete(self, attempt: int | None = None) -> None:
        """The (newest) attempt is made an epoch, and everybody is told."""
        number = attempt or self.attempt
        assert self.acks.commit(number) == self.epoch
        self.epoch += 1
        for one in (*self.keyed, *self.sources):
            one.confirmed(number, self.stamp(self.epoch))

    def abort(self, attempt: int | None = None) -> None:
        number = attempt or self.attempt
        self.acks.drop(number)
        for one in (*self.keyed, *self.sources):
            one.aborted(number)

    def checkpoint(self) -> None:
        assert self.persist(self.freeze())
        self.complete()


def batch_of(rows: list[tuple[int, int, int]]) -> pa.RecordBatch:
    columns = [[row[0] for row in rows], [row[1] for row in rows], [row[2] * 1000 for row in rows]]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, ARROW, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW)


def taken(batches: Any) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def schema_of(ddl: str) -> StructType:
    return parse_ddl(ddl)
