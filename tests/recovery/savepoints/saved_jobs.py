"""Jobs with a checkpoint location, their savepoints, and those who begin with one."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import msgspec
from blake3 import blake3

from recovery.savepoints.begin_with_savepoint import Standing, begin_job, standing
from recovery.savepoints.create_savepoint import Making, create_savepoint
from recovery.savepoints.location_files import StoreLocation
from recovery.savepoints.savepoint import Savepoint, read_savepoint
from recovery.savepoints.state_at_epoch import saved_state
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.messages import SlicePart
from snapshot.storage.memory_store import MemoryStore
from statebackend.state.operator_state import StoredList, encode_lists
from tests.cli.folder import JOB, OPERATOR, QUERY, Folder, new_id
from tests.recovery import driver
from tests.support.failing_store import FailingStore

FILE_ENTRY = '{"path":"file:///in/%d.json","timestamp":1,"batchId":%d,"action":"add"}'


class Location:
    """A checkpoint location of one file source, which gave one file in each batch."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore(new_id())
        self.put("metadata", json.dumps({"id": QUERY}))
        self.next_batch = 0

    def put(self, name: str, text: str) -> None:
        self.store.put(name, [text.encode()])

    def batches(self, count: int, *, committed: bool = True) -> Location:
        for batch in range(self.next_batch, self.next_batch + count):
            self.put(f"sources/0/{batch}", "v1\n" + FILE_ENTRY % (batch, batch))
            head = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": batch})
            self.put(f"offsets/{batch}", f'v1\n{head}\n{{"logOffset":{batch}}}')
            if committed:
                self.put(f"commits/{batch}", 'v1\n{"nextBatchWatermarkMs":0}')
        self.next_batch += count
        return self

    def compact(self, batch: int) -> None:
        """Put the source's log up to a batch together, as Spark does."""
        entries = "\n".join(FILE_ENTRY % (n, n) for n in range(batch + 1))
        self.put(f"sources/0/{batch}.compact", f"v1\n{entries}")
        self.store.delete([f"sources/0/{batch}"])

    def files(self) -> StoreLocation:
        return StoreLocation(self.store)


class Stand:
    """One job with its location, and the savepoints that are made of it."""

    def __init__(self, job: Any = None) -> None:
        self.folder = Folder(job if job is not None else MemoryStore(new_id()))
        self.location = Location()
        self.targets: list[MemoryStore] = []

    def run(self, epochs: int, **how: Any) -> Stand:
        self.folder.epochs(epochs, **how)
        self.location.batches(epochs)
        return self

    def target(self, savepoint_id: str) -> MemoryStore:
        self.targets.append(MemoryStore(new_id()))
        return self.targets[-1]

    def making(self, **other: Any) -> Making:
        store = self.folder.store
        given = {
            "store": store,
            "job": JOB,
            "location": self.location.files(),
            "manifests": lambda: log_of(store).manifests(),
            "open_target": self.target,
            "new_id": new_id,
            "now_ms": lambda: 1_700_000_000_000,
            "writer": "test",
            **other,
        }
        return Making(**given)

    def save(self, **other: Any) -> tuple[Savepoint, MemoryStore]:
        return create_savepoint(self.making(**other)), self.targets[-1]


def log_of(store: Any, job: str = JOB) -> CommitLog:
    return CommitLog(store, job=job, writer="reader", new_id=new_id)


def restored(store: Any, epoch: int, job: str = JOB) -> Any:
    """The state that a folder gives, read slice by slice."""
    reader = Folder.__new__(Folder)
    reader.store, reader.job, reader.operator = store, job, OPERATOR
    reader.log = log_of(store, job)
    reader.tenure = None  # type: ignore[assignment]
    return reader.restored(epoch)


def begun(store: Any, source: Any, job: str = "clone") -> str:
    """A job that begins with a savepoint, as a start does it; the query's id."""
    savepoint = read_savepoint(source)
    log = log_of(store, job)
    found = standing(log, job, savepoint)
    if found.standing is Standing.BEGUN:
        return found.query_id
    state = saved_state(source, savepoint, log_of(source, savepoint.job))
    query_id = f"query of {new_id()}"
    begin_job(
        state, savepoint, source, store, log, after=found.last, query_id=query_id, new_id=new_id
    )
    return query_id


def ran(
    started: driver.Started, location: Location, epochs: int, *, operator_state: bool = False
) -> None:
    """Epochs of all operators, each committed by Spark."""
    for epoch in range(location.next_batch, location.next_batch + epochs):
        for uid, parallelism in started.parallelism.items():
            for subtask in range(parallelism):
                reply, _ = started.session.begin(driver.begin_of(epoch, subtask, uid))
                part = driver.part_of({b"k%d" % epoch: b"%s %d" % (uid.encode(), subtask)})
                base = driver.base_of({b"k%d" % epoch: b"all"}) if reply.base_due else None
                ack = driver.ack_of(reply.chain, part, epoch, subtask, uid, base=base)
                if operator_state:
                    ack = msgspec.structs.replace(ack, operator_state=lists_of(epoch))
                started.session.ack(ack)
        location.batches(1)


def lists_of(epoch: int) -> SlicePart:
    field = {"name": "x", "type": "integer", "nullable": True, "metadata": {}}
    schema = {"type": "struct", "fields": [field]}
    stored = StoredList(mode="split", schema=json.dumps(schema), version=1)
    data = encode_lists({f"of epoch {epoch}": stored})
    return SlicePart(digest=blake3(data).hexdigest(), size_bytes=len(data), rows=0, data=data)


def saved(store: MemoryStore, location: Location) -> tuple[Savepoint, MemoryStore]:
    making = Stand().making(
        store=store,
        job=driver.JOB,
        location=location.files(),
        manifests=lambda: driver.manifests_of(store),
    )
    target = MemoryStore(new_id())
    return create_savepoint(replace(making, open_target=lambda _: target)), target


class Cut(BaseException):
    """The process ends here."""


def cutting(inner: Any, calls: int, verbs: tuple[str, ...] = ("put", "create", "put_file")) -> Any:
    """A store before whose n-th write the process ends; and one after it."""
    left = itertools.count(calls, -1)

    def plan(verb: str, name: str, number: int) -> Any:
        return Cut() if verb in verbs and next(left) <= 0 else None

    return FailingStore(inner, plan)
